"""Each way to save memory trains exactly as a plain run does: steps, evaluation, resume, export.

On a CPU the offloads make real copies (host and device are then two places in the same memory), so what is tested is
all but the streams.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cramming import checkpoint
from cramming.budget import Work
from cramming.config import UserError
from cramming.engine import Engine, StepStats
from cramming.model.config import ModelConfig
from cramming.model.export import save_pretrained
from cramming.parallel import activations, host_weights, lane
from cramming.parallel.apply import MemoryConfig, refuse_unfit
from cramming.parallel.mesh import Mesh, ParallelConfig
from cramming.parts import EngineConfig, build_engine

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=320, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=32, max_length=32, dropout=0.1
)
OFFLOADS = {"offload_weights": True, "offload_activations": True, "offload_optimizer": True}
TRICKS: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint_every": 1},
    "checkpoint 2nd": {"checkpoint_every": 2},
    "selective": {"checkpoint_every": 1, "checkpoint": "selective"},
    "activations": {"offload_activations": True},
    "activations, checkpoint 2nd": {"offload_activations": True, "checkpoint_every": 2},
    "activations, selective": {"offload_activations": True, "checkpoint_every": 1, "checkpoint": "selective"},
    "weights": {"offload_weights": True},
    "weights, checkpoint": {"offload_weights": True, "checkpoint_every": 1},
    "weights, activations": {"offload_weights": True, "offload_activations": True},
    "optimizer": {"offload_optimizer": True},
    "all offloads, checkpoint 2nd": {**OFFLOADS, "checkpoint_every": 2},
    "in backward": {"update_in_backward": True},
    "in backward, all offloads": {**OFFLOADS, "update_in_backward": True},
}
LOW_BIT = pytest.param("adamw8bit", 0.02), pytest.param("adamw4bit", 0.2)  # relative, of the losses of five steps
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is an extra")


@pytest.fixture
def make_engine(compose: Callable[..., dict[str, Any]]) -> Callable[..., Engine]:
    """`make_engine(model=..., precision=..., optim={...}, **memory)`: an engine with seeded weights."""
    plain = EngineConfig.of(compose("precision=fp32", "optim=adamw-tiny"))

    def make(
        seed: int = 0,
        model: ModelConfig = MODEL,
        mode: Any = "fp32",
        optim: dict[str, Any] | None = None,
        device: torch.device = CPU,
        **memory: Any,
    ) -> Engine:
        torch.manual_seed(seed)
        if memory.get("update_in_backward"):
            optim = {"clip": None, **(optim or {})}
        config = replace(
            plain,
            memory=replace(plain.memory, **memory),
            optim=replace(plain.optim, eps=1e-8, **(optim or {})),
            precision=replace(plain.precision, mode=mode, emulate_fp8=mode == "fp8"),
        )
        return build_engine(config, model, Mesh(ParallelConfig("auto"), device), device)

    return make


def train(engine: Engine, source: Any, steps: range, cut: int = 1) -> list[StepStats]:
    found = []
    for step in steps:
        torch.manual_seed(step)
        rows = 4 // cut
        stats = engine.step([source.batch(4 * step + rows * k, rows) for k in range(cut)], 1e-2 / (step + 1))
        assert stats is not None
        found.append(stats)
    return found


def weights(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


def state(engine: Engine) -> list[Tensor]:
    return [v for _, s in sorted(engine.optimizer.state_dict()["state"].items()) for v in s.values()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain_twin(memory: dict[str, Any]) -> dict[str, Any]:
    """Settings of the plain run to compare with: the update in backward cannot clip."""
    return {"optim": {"clip": None}} if memory.get("update_in_backward") else {}


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
@pytest.mark.parametrize("cut", [1, 2])
def test_a_trick_changes_no_bit(
    make_engine: Callable[..., Engine], tiny_source: Any, memory: dict[str, Any], cut: int
) -> None:
    if memory.get("update_in_backward") and cut > 1:
        pytest.skip("one micro-batch only")
    ours, reference = make_engine(**memory), make_engine(**plain_twin(memory))
    found, expected = (train(e, tiny_source, range(4), cut) for e in (ours, reference))
    assert [(s.loss, s.accuracy, s.skipped) for s in found] == [(s.loss, s.accuracy, s.skipped) for s in expected]
    assert [s.grad_norm for s in found] == pytest.approx([s.grad_norm for s in expected], rel=1e-5)
    assert equal(weights(ours), weights(reference))
    assert equal(state(ours), state(reference))
    batches = [tiny_source.batch(50, 3)]
    assert ours.evaluate(batches) == reference.evaluate(batches)


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
def test_resumed_equals_unbroken(
    make_engine: Callable[..., Engine], tiny_source: Any, tmp_path: Path, memory: dict[str, Any]
) -> None:
    unbroken, first, second = (make_engine(seed, **memory) for seed in (0, 0, 1))
    train(unbroken, tiny_source, range(5))
    train(first, tiny_source, range(3))
    resume(first, second, tmp_path)
    train(second, tiny_source, range(3, 5))
    assert equal(weights(second), weights(unbroken))
    assert equal(state(second), state(unbroken))


def resume(first: Engine, second: Engine, folder: Path) -> None:
    checkpoint.save(folder, first.model, first.optimizer, first.precision.scaler, Work(steps=3))
    work = checkpoint.load_newest(folder, second.model, second.optimizer, second.precision.scaler)
    assert work == Work(steps=3)


@pytest.mark.parametrize("memory", [TRICKS["all offloads, checkpoint 2nd"], TRICKS["in backward"]])
def test_a_checkpoint_fits_a_plain_run(
    make_engine: Callable[..., Engine], tiny_source: Any, tmp_path: Path, memory: dict[str, Any]
) -> None:
    ours, plain = make_engine(**memory), make_engine(1, **plain_twin(memory))
    train(ours, tiny_source, range(3))
    resume(ours, plain, tmp_path)
    for engine in (ours, plain):
        train(engine, tiny_source, range(3, 5))
    assert equal(weights(ours), weights(plain))


@pytest.mark.parametrize("name", ["weights", "weights, activations", "weights, checkpoint"])
def test_fetched_weights_are_lowered_as_autocast_lowers_them(
    make_engine: Callable[..., Engine], tiny_source: Any, name: str
) -> None:
    small = replace(MODEL, hidden_size=16, num_layers=2, intermediate_size=16)
    ours, plain = (make_engine(model=small, mode="bf16", **memory) for memory in (TRICKS[name], {}))
    assert [s.loss for s in train(ours, tiny_source, range(2))] == [s.loss for s in train(plain, tiny_source, range(2))]
    assert equal(weights(ours), weights(plain))


@pytest.mark.parametrize("optim", ["sgd", "nadamw", "adagrad", "lamb", "lars"])
@pytest.mark.parametrize("trick", ["optimizer", "in backward"])
def test_any_optimizer_goes_with_it(
    make_engine: Callable[..., Engine], tiny_source: Any, trick: str, optim: str
) -> None:
    engines = [make_engine(optim={"name": optim, "clip": None}, **memory) for memory in (TRICKS[trick], {})]
    for engine in engines:
        train(engine, tiny_source, range(3))
    for a, b in zip(*map(weights, engines)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["weights", "activations", "optimizer", "in backward"])
def test_names_and_types_of_weights_stay(make_engine: Callable[..., Engine], name: str) -> None:
    ours, plain = make_engine(**TRICKS[name]).model.state_dict(), make_engine().model.state_dict()
    assert [(k, v.dtype, v.shape) for k, v in ours.items()] == [(k, v.dtype, v.shape) for k, v in plain.items()]
    assert equal(list(ours.values()), list(plain.values()))


def test_no_copy_of_a_weight_outlives_its_blocks_turn(
    make_engine: Callable[..., Engine], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two blocks' weights are away from home at a time, in both passes; in between none."""
    away, most = set[int](), [0]
    original = host_weights.HostWeights.prefetch, host_weights._Visit.leave

    def prefetch(self: host_weights.HostWeights) -> None:
        original[0](self)
        away.add(id(self))
        most[0] = max(most[0], len(away))

    def leave(self: host_weights._Visit) -> None:
        original[1](self)
        away.discard(id(self.weights))

    monkeypatch.setattr(host_weights.HostWeights, "prefetch", prefetch)
    monkeypatch.setattr(host_weights._Visit, "leave", leave)
    engine = make_engine(offload_weights=True)
    loss, _ = engine._forward(tiny_source.batch(0, 4))
    assert away == set()
    loss.backward()
    assert (away, most[0]) == (set(), 2)


def test_activations_leave_the_device_and_come_back_two_blocks_at_a_time(
    make_engine: Callable[..., Engine], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[activations._BlockPass] = []
    original = activations._BlockPass.__init__

    def note(self: activations._BlockPass, *arguments: Any) -> None:
        original(self, *arguments)
        passes.append(self)

    monkeypatch.setattr(activations._BlockPass, "__init__", note)
    asked: list[tuple[int, bool]] = []
    back, present = activations._BlockPass._back, activations._BlockPass._present

    def note_back(self: activations._BlockPass, *arguments: Any) -> Tensor:
        asked.append((passes.index(self), self.restored))
        return back(self, *arguments)

    def note_present(self: activations._BlockPass, tensor: Tensor) -> Tensor:
        asked.append((passes.index(self), True))
        return present(self, tensor)

    monkeypatch.setattr(activations._BlockPass, "_back", note_back)
    monkeypatch.setattr(activations._BlockPass, "_present", note_present)
    engine = make_engine(offload_activations=True)
    loss, _ = engine._forward(tiny_source.batch(0, 4))
    assert [len(p.saved) > 0 for p in passes] == [True, True, False, False]  # the last two are asked for first: no copy
    assert all(saved.host is not None and saved.device is None for p in passes for saved in p.saved.values())
    loss.backward()
    assert {index for index, _ in asked} == {0, 1, 2, 3}
    assert all(on_its_way for _, on_its_way in asked)  # each block's were called for by the one after it
    assert not [saved for p in passes for saved in p.saved.values() if saved.device is not None or saved.uses]


def test_a_forward_pass_without_backward_leaves_nothing_stale(
    make_engine: Callable[..., Engine], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out in the middle: what was on its way must not be used after the weights have changed."""
    ours, plain = make_engine(**TRICKS["all offloads, checkpoint 2nd"]), make_engine()
    second = ours.model.encoder.blocks[1]  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(second, "forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours._forward(tiny_source.batch(0, 4))
    with torch.no_grad():
        for engine in (ours, plain):
            for p in engine.model.parameters():
                p.mul_(1.5)
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert train(ours, tiny_source, range(2)) == train(plain, tiny_source, range(2))


class Late:
    """The arrival of copies that have not begun: they are made when somebody waits, in the order of their stream."""

    queue: ClassVar[list[Callable[[], object]]] = []

    def __init__(self) -> None:
        self.position = len(self.queue)

    def synchronize(self) -> None:
        for i in range(self.position):
            self.queue[i]()
            self.queue[i] = lambda: None


class LateLane(lane.Lane):
    """The slowest side stream there can be; what has not arrived is NaN."""

    def copy(self, targets: Any, sources: Any) -> Any:
        for target, source in zip(targets, sources, strict=True):
            if target.is_floating_point():
                target.fill_(torch.nan)
            Late.queue.append(partial(torch.Tensor.copy_, target, source.detach()))
        return Late()

    def wait(self, event: Any) -> None:
        event.synchronize()


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
def test_nothing_is_read_before_its_copy_was_waited_for(
    make_engine: Callable[..., Engine], tiny_source: Any, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]
) -> None:
    plain = make_engine(**plain_twin(memory))
    monkeypatch.setattr("cramming.parallel.apply.Lane", LateLane)
    monkeypatch.setattr("cramming.optim.build.Lane", LateLane)
    Late.queue.clear()
    ours = make_engine(**memory)
    for step in range(3):  # an evaluation between steps fetches weights too
        steps = range(step, step + 1)
        assert [s.loss for s in train(ours, tiny_source, steps)] == [s.loss for s in train(plain, tiny_source, steps)]
        assert ours.evaluate([tiny_source.batch(50, 3)]) == plain.evaluate([tiny_source.batch(50, 3)])
    assert equal(weights(ours), weights(plain))
    assert bool(Late.queue) == any(name.startswith("offload") for name in memory)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["activations", "weights", "optimizer", "in backward", "all offloads, checkpoint 2nd"])
def test_on_a_gpu_it_trains_the_same_with_less_memory(
    make_engine: Callable[..., Engine], tiny_source: Any, name: str
) -> None:
    model, peaks, losses = replace(MODEL, hidden_size=512, num_layers=8, intermediate_size=2048), [], []
    for memory in (plain_twin(TRICKS[name]), TRICKS[name]):
        torch.cuda.empty_cache()
        engine = make_engine(model=model, device=torch.device("cuda"), **memory)
        torch.cuda.reset_peak_memory_stats()
        losses.append([s.loss for s in train(engine, tiny_source, range(4))])
        peaks.append(torch.cuda.max_memory_allocated())
        del engine
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert peaks[1] < peaks[0]


def test_views_come_back_as_they_were() -> None:
    """Same strides and one memory, moved once."""
    moved = activations.Activations(lane.Lane(CPU), 3)
    seen: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        matrix = hidden.exp().view(-1, 3, 512)
        q, k, _ = matrix.unbind(1)
        packed = [moved.pack(x) for x in (q, k.t(), matrix)]
        seen.extend([q, k.t(), matrix])
        assert moved._current
        moved._current.release()
        back.extend(lane.unpack(p) for p in packed)
        return hidden

    back: list[Tensor] = []
    moved.wrap(forward, 0, [])(torch.randn(4, 1536, requires_grad=True))
    assert equal(back, seen)
    assert [b.stride() for b in back] == [s.stride() for s in seen]
    assert len({b.untyped_storage().data_ptr() for b in back}) == 1


class TestUpdateInBackward:
    def test_gradients_are_gone_when_the_next_is_made(
        self, make_engine: Callable[..., Engine], tiny_source: Any
    ) -> None:
        engine, alive = make_engine(update_in_backward=True), list[int]()

        def count(_: Tensor) -> None:
            alive.append(sum(p.grad is not None for p in engine.parameters))

        for p in engine.parameters:
            p.register_post_accumulate_grad_hook(count)
        train(engine, tiny_source, range(1))
        assert len(alive) == len(engine.parameters)
        assert max(alive) <= 1

    def test_the_deadline_decides_before_anything_has_moved(
        self, make_engine: Callable[..., Engine], tiny_source: Any
    ) -> None:
        engine = make_engine(update_in_backward=True)
        before, foreseen = weights(engine), list[float]()

        def no() -> bool:
            foreseen.append(engine.foreseen_seconds)
            return False

        assert engine.step([tiny_source.batch(0, 4)], 0.1, no) is None
        assert foreseen[0] > 0  # nothing was measured yet, so the forward pass must tell
        assert equal(weights(engine), before)
        assert not engine.optimizer.state_dict()["state"]
        train(engine, tiny_source, range(1))
        assert engine.update_seconds > 0
        assert engine.step([tiny_source.batch(0, 4)], 0.1, no) is None
        assert foreseen[1] == 0

    @pytest.mark.parametrize("bad", ["loss", "one gradient"])
    def test_what_is_not_finite_reaches_no_weight(
        self, make_engine: Callable[..., Engine], tiny_source: Any, bad: str
    ) -> None:
        engine = make_engine(update_in_backward=True)
        train(engine, tiny_source, range(1))
        victim = engine.model.encoder.blocks[0].attn.qkv.weight  # type: ignore[union-attr]
        before, kept = victim.detach().clone(), weights(engine)
        if bad == "loss":
            with torch.no_grad():
                engine.model.decoder_bias.fill_(torch.nan)  # type: ignore[union-attr,operator]
            kept = weights(engine)
        else:
            victim.register_hook(lambda gradient: gradient * torch.inf)
        stats = engine.step([tiny_source.batch(4, 4)], 0.1)
        assert stats is not None
        assert (stats.skipped, stats.partly_skipped) == (bad == "loss", bad == "one gradient")
        assert torch.equal(victim, before)
        if bad == "loss":
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(weights(engine), kept))
        else:
            assert all(w.isfinite().all() for w in weights(engine))
            assert not any(torch.equal(a, b) for a, b in zip(weights(engine), kept) if not torch.equal(a, before))
            steps = {float(s["step"]) for s in engine.optimizer.state_dict()["state"].values()}
            assert steps == {1.0, 2.0}  # the victim's state has not moved either
            stats = engine.step([tiny_source.batch(8, 4)], 0.1)
            assert stats is not None and stats.partly_skipped

    @pytest.mark.parametrize("name", ["sgd", "lamb", "adamw"])
    def test_a_first_gradient_that_is_not_finite_leaves_the_rest(
        self, make_engine: Callable[..., Engine], tiny_source: Any, name: str
    ) -> None:
        ours, plain = (make_engine(update_in_backward=True, optim={"name": name}) for _ in range(2))
        victims = [e.model.encoder.blocks[0].attn.qkv.weight for e in (ours, plain)]  # type: ignore[union-attr]
        before, handle = victims[0].detach().clone(), victims[0].register_hook(lambda g: g * torch.nan)
        for engine in (ours, plain):
            torch.manual_seed(0)
            engine.step([tiny_source.batch(0, 4)], 0.1)
        assert torch.equal(victims[0], before)
        others = [(a, b) for a, b in zip(ours.parameters, plain.parameters) if a is not victims[0]]
        assert all(torch.equal(a, b) for a, b in others)
        handle.remove()
        torch.manual_seed(1)
        stats = ours.step([tiny_source.batch(4, 4)], 0.1)
        assert stats is not None and not stats.skipped and not stats.partly_skipped
        assert not torch.equal(victims[0], before)

    def test_the_host_does_not_wait_for_each_parameter(
        self, make_engine: Callable[..., Engine], tiny_source: Any
    ) -> None:
        """Of the values that the host reads in a step there is a fixed number, however many parameters there are."""
        engine, read = make_engine(update_in_backward=True), [0]

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                read[0] += func is torch.ops.aten._local_scalar_dense.default
                return func(*args, **(kwargs or {}))

        with Count():
            train(engine, tiny_source, range(1))
        assert 0 < read[0] < 5 < len(engine.parameters)

    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({"micro_batches": 2}, "train.micro_batch=8"),
            ({"clip": 0.5}, "optim.clip=null"),
            ({"mode": "fp16"}, "precision=bf16"),
            ({"processes": 2}, "one process"),
        ],
    )
    def test_steps_of_another_kind_are_refused(self, changes: dict[str, Any], names: str) -> None:
        config = MemoryConfig(0, "full", None, False, False, False, True)
        fit = {"micro_batches": 1, "clip": None, "mode": "fp32", "processes": 1, "fits": "8"}
        refuse_unfit(config, **fit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=names) as caught:
            refuse_unfit(config, **{**fit, **changes})
        assert "update_in_backward" in str(caught.value)


@needs_torchao
class TestTorchao:
    @pytest.mark.parametrize(("name", "tolerance"), LOW_BIT)
    def test_low_bit_states_are_near_and_resume_exactly(
        self, make_engine: Callable[..., Engine], tiny_source: Any, tmp_path: Path, name: str, tolerance: float
    ) -> None:
        wide = replace(MODEL, hidden_size=64, intermediate_size=64, num_layers=1)  # smaller matrices stay fp32 there
        with torch.compiler.set_stance("force_eager"):
            unbroken, first, second, plain = (
                make_engine(seed, model=wide, optim={"name": kind})
                for seed, kind in ((0, name), (0, name), (1, name), (0, "adamw"))
            )
            found, expected = (train(e, tiny_source, range(5)) for e in (unbroken, plain))
            train(first, tiny_source, range(3))
            resume(first, second, tmp_path)
            train(second, tiny_source, range(3, 5))
        assert [s.loss for s in found] == pytest.approx([s.loss for s in expected], rel=tolerance)
        assert [s.loss for s in found] != [s.loss for s in expected]
        assert equal(weights(second), weights(unbroken))

    @pytest.mark.parametrize("trick", ["optimizer", "in backward"])
    def test_low_bit_goes_with(self, make_engine: Callable[..., Engine], tiny_source: Any, trick: str) -> None:
        wide = replace(MODEL, hidden_size=64, intermediate_size=64, num_layers=1)
        with torch.compiler.set_stance("force_eager"):
            engines = [
                make_engine(model=wide, optim={"name": "adamw8bit", "clip": None}, **memory)
                for memory in (TRICKS[trick], {})
            ]
            for engine in engines:
                train(engine, tiny_source, range(3))
        assert equal(*map(weights, engines))

    def test_fp8_converts_the_blocks_only_and_exports_fp32(
        self, make_engine: Callable[..., Engine], tiny_source: Any, tiny_corpus: Path, tmp_path: Path
    ) -> None:
        from safetensors.torch import load_file

        engine, plain = make_engine(mode="fp8"), make_engine()
        kinds = {n: type(m).__name__ for n, m in engine.model.named_modules() if isinstance(m, torch.nn.Linear)}
        assert {k for n, k in kinds.items() if ".blocks." in n} == {"Float8Linear"}
        assert {k for n, k in kinds.items() if ".blocks." not in n} == {"Linear"}
        found, expected = (train(e, tiny_source, range(3)) for e in (engine, plain))
        assert [s.loss for s in found] == pytest.approx([s.loss for s in expected], rel=0.02)
        assert [s.loss for s in found] != [s.loss for s in expected]
        files = []
        for one, folder in ((engine, tmp_path / "fp8"), (plain, tmp_path / "plain")):
            save_pretrained(one.model, folder, tiny_corpus / "tokenizer.json")  # type: ignore[arg-type]
            files.append(load_file(folder / "model.safetensors"))
        assert [(k, v.dtype, v.shape) for k, v in files[0].items()] == [
            (k, v.dtype, v.shape) for k, v in files[1].items()
        ]
        assert {v.dtype for v in files[0].values()} == {torch.float32}

    def test_fp8_multiplies_rounded_numbers(self, make_engine: Callable[..., Engine]) -> None:
        """What comes out of a layer is the product of operands with 3 bits of mantissa, as the scale says."""
        layer = make_engine(mode="fp8").model.encoder.blocks[0].attn.out  # type: ignore[union-attr]
        x = torch.randn(16, 32)

        def rounded(t: Tensor) -> Tensor:
            scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().max()
            return (t * scale).to(torch.float8_e4m3fn).float() / scale

        torch.testing.assert_close(layer(x), rounded(x) @ rounded(layer.weight).T + layer.bias, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["checkpoint", "selective", "activations", "weights", "optimizer"])
    def test_fp8_goes_with(self, make_engine: Callable[..., Engine], tiny_source: Any, name: str) -> None:
        ours, plain = (make_engine(mode="fp8", **memory) for memory in (TRICKS[name], {}))
        assert train(ours, tiny_source, range(2)) == train(plain, tiny_source, range(2))


def test_what_excludes_each_other_is_refused(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(UserError, match=r"memory\.checkpoint=selective"):
        make_engine(offload_weights=True, checkpoint_every=1, checkpoint="selective")
