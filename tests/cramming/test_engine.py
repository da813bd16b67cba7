"""A step does not depend on how its batch was cut; what is not finite never reaches the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cramming.config import UserError
from cramming.engine import MAX_SKIPPED_IN_A_ROW, Engine, Gradients
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision, PrecisionConfig

CPU = torch.device("cpu")


def engine(
    model: nn.Module, mode: str = "fp32", clip: float | None = None, kind: str = "sgd"
) -> Engine:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    precision = Precision(PrecisionConfig(mode=mode, tf32=False), CPU)  # type: ignore[arg-type]
    return Engine(model, optimizer, precision, clip, Mesh.solo(CPU), CPU)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(model), before))


@pytest.mark.parametrize("cuts", [[8], [4, 4], [2] * 4, [1] * 8, [5, 3]])
def test_micro_batches_equal_one_batch(
    make_model: Callable[..., Any], tiny_source: Any, cuts: list[int]
) -> None:
    reference, model = make_model(), make_model()
    whole = engine(reference).step([tiny_source.batch(0, 8)], 0.5)
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    parts = engine(model).step(
        [tiny_source.batch(first, rows) for first, rows in zip(starts, cuts)], 0.5
    )
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert parts.accuracy == whole.accuracy
    for a, b in zip(weights(model), weights(reference)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_rows_with_fewer_targets_do_not_count_more(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    """A mean of means would: here one micro-batch keeps two targets, the other all."""
    from dataclasses import replace

    first, many = tiny_source.batch(0, 4), tiny_source.batch(4, 4)
    ids = first.target_ids_M.clone()
    ids[2:] = -100
    first = replace(first, target_ids_M=ids, num_targets=2)
    model = make_model()
    with torch.no_grad():
        sums = [
            model(b.ids_T, b.positions_T, b.packing, b.target_positions_M, b.target_ids_M)[0].item()
            for b in (first, many)
        ]
    stats = engine(model).step([first, many], 0.1)
    assert stats.loss == pytest.approx(sum(sums) / (2 + many.num_targets), rel=1e-6)


def test_clipping_bounds_the_update_and_reports_the_norm_before(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    for clip, factor in ((None, 1.0), (1e-3, None), (1e9, 1.0)):
        model = make_model()
        before = weights(model)
        stats = engine(model, clip=clip).step([tiny_source.batch(0, 4)], 1.0)
        moved = (
            torch.cat([(a - b).reshape(-1) for a, b in zip(weights(model), before)]).norm().item()
        )
        assert stats.grad_norm > 0.05
        assert moved == pytest.approx(stats.grad_norm if factor else 1e-3, rel=1e-3)


def test_a_fused_update_clips_as_a_separate_pass_does(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    """AdamW's first step hardly knows how long a gradient is, so two of different lengths are taken."""
    for clip in (0.05, 1e9):
        fused_model, expected = make_model(), make_model()
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3, fused=fused)
            for m, fused in ((fused_model, True), (expected, False))
        ]
        for model, optimizer in zip((fused_model, expected), optimizers):
            precision = Precision(PrecisionConfig(mode="fp32", tf32=False), CPU)
            clipped = Engine(model, optimizer, precision, clip, Mesh.solo(CPU), CPU)
            for rows in (1, 6):
                clipped.step([tiny_source.batch(0, rows)], 1e-3)
        for name in ("exp_avg", "exp_avg_sq"):
            moments = [
                [state[name] for state in optimizer.state.values()] for optimizer in optimizers
            ]
            torch.testing.assert_close(*moments, rtol=1e-4, atol=1e-9)


class Poisoned(nn.Module):
    """A model whose gradient is not finite on some calls."""

    def __init__(self, bad: Callable[[int], bool], value: float = float("nan")):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
        self.bad, self.value, self.calls = bad, value, 0

    def forward(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        loss = (self.weight**2).sum() + (self.other**2).sum()
        return (loss * self.value if self.bad(self.calls - 1) else loss), torch.tensor(1)


def history(trainer: Engine) -> list[torch.Tensor]:
    return [
        v.clone()
        for state in trainer.optimizer.state.values()
        for v in state.values()
        if torch.is_tensor(v)
    ]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(
    tiny_source: Any, kind: str, mode: str, value: float
) -> None:
    model = Poisoned(lambda call: call == 1, value)
    trainer = engine(model, mode, clip=0.5, kind=kind)
    batch = tiny_source.batch(0, 1)
    first = trainer.step([batch], 0.1)
    before, scale = weights(model), trainer.precision.scaler.get_scale()
    state = history(trainer)
    second = trainer.step([batch], 0.1)
    assert unchanged(model, before)
    assert all(torch.equal(a, b) for a, b in zip(history(trainer), state, strict=True))
    assert (first.skipped, second.skipped) == (False, True)
    if mode == "fp16":
        assert trainer.precision.scaler.get_scale() == scale / 2
    third = trainer.step([batch], 0.1)
    assert not third.skipped
    assert not unchanged(model, before)
    assert all(torch.isfinite(w).all() for w in weights(model))


def test_nothing_but_skipped_steps_ends_the_run(tiny_source: Any) -> None:
    trainer = engine(Poisoned(lambda call: call != 3))
    batch = tiny_source.batch(0, 1)
    with pytest.raises(UserError, match=r"not finite in 50 steps in a row.*optim\.lr") as caught:
        for _ in range(4 + MAX_SKIPPED_IN_A_ROW):
            trainer.step([batch], 1e-3)
    assert (
        trainer.model.calls == 4 + MAX_SKIPPED_IN_A_ROW
    )  # the good step in between began a new row
    assert "\n" not in str(caught.value)


def test_what_the_update_compiles_counts_as_well(
    tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao's optimizers compile themselves. The first update may; a skipped one, as fp16 begins, does not."""
    graphs = [0]
    monkeypatch.setattr("cramming.engine.compiled_graphs", lambda: graphs[0])
    trainer = engine(Poisoned(lambda call: call == 0))
    update = trainer.optimizer.step

    def compiling(*arguments: Any) -> Any:
        graphs[0] += 1
        return update(*arguments)

    batch, compiled = tiny_source.batch(0, 1), list[int]()
    for compiles in (False, True, False, True):
        monkeypatch.setattr(trainer.optimizer, "step", compiling if compiles else update)
        stats = trainer.step([batch], 0.1)
        compiled.append(stats.recompilations)
    assert compiled == [0, 0, 0, 1]


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_a_discarded_step_leaves_everything_as_it_was(
    make_model: Callable[..., Any], tiny_source: Any, mode: str
) -> None:
    """And the same step can follow: in fp16 gradients are unscaled once."""
    model = make_model(dropout=0.1, hidden_size=8, num_layers=1, intermediate_size=8)
    trainer = engine(model, mode, kind="adamw", clip=1.0)
    trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=mode == "fp16")
    trainer.step([tiny_source.batch(0, 2)], 1e-3)
    before, random_state = weights(model), torch.get_rng_state()
    gradients = trainer.forward_backward([tiny_source.batch(2, 2)])
    assert gradients.is_whole
    assert all(p.grad is not None for p in model.parameters())
    trainer.discard(gradients)
    assert unchanged(model, before)
    assert all(p.grad is None for p in model.parameters())
    assert all(int(s["step"]) == 1 for s in trainer.optimizer.state.values())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not trainer.step([tiny_source.batch(2, 2)], 1e-3).skipped


def test_fp16_with_loss_scaling_is_close_to_fp32(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    """Large scales overflow at first: those steps are skipped, the rest agrees."""
    losses = {}
    for mode in ("fp32", "fp16"):
        model = make_model(hidden_size=8, num_layers=1, intermediate_size=8)
        trainer = engine(model, mode, clip=1.0)
        stats = [trainer.step([tiny_source.batch(0, 1)], 0.1) for _ in range(4)]
        losses[mode] = [(s.loss, s.grad_norm) for s in stats if not s.skipped]
    assert losses["fp16"]
    for half, full in zip(losses["fp16"], losses["fp32"]):
        assert half == pytest.approx(full, rel=0.02)


def test_evaluation_changes_nothing(make_model: Callable[..., Any], tiny_source: Any) -> None:
    model = make_model(dropout=0.5)
    trainer = engine(model)
    before, state = weights(model), torch.get_rng_state()
    batches = [tiny_source.batch(0, 4), tiny_source.batch(4, 3)]
    first, second = trainer.evaluate(batches), trainer.evaluate(batches)
    assert first == second  # no dropout
    assert first[2] == sum(b.num_targets for b in batches)
    assert first == pytest.approx(trainer.evaluate([tiny_source.batch(0, 7)]), rel=1e-6)
    assert unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("rows", [[4], [2, 2]])
def test_the_host_reads_once_before_the_update_and_never_in_it(
    make_model: Callable[..., Any],
    tiny_source: Any,
    host_reads: Callable[..., list[str]],
    rows: list[int],
) -> None:
    """Loss, hits and gradient norm together; an update only waits for its end."""
    trainer, batches = engine(make_model(), clip=1.0), [tiny_source.batch(0, n) for n in rows]
    waiting = list[Gradients]()
    assert host_reads(lambda: waiting.append(trainer.forward_backward(batches))) == ["tolist"]
    assert host_reads(lambda: trainer.update(waiting[0], 0.1)) == []


class Replayed(nn.Module):
    """Model whose passes write their results to the same memory, like a CUDA graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.places = model, (torch.zeros(()), torch.zeros((), dtype=torch.int64))

    def forward(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, hits = self.model(*batch)
        for place, value in zip(self.places, (loss, hits)):
            place.copy_(value.detach())
        loss.data = self.places[0]
        return loss, self.places[1]


def test_what_cuda_graphs_overwrite_is_copied_and_gradients_stay_where_they_are(
    make_model: Callable[..., Any], tiny_source: Any
) -> None:
    """Several micro-batches a step, and a step that is taken back; all as without graphs, bit for bit."""
    plain, model = make_model(), make_model()
    ours, reference = engine(Replayed(model), clip=0.5), engine(plain, clip=0.5)
    ours.cuda_graphs = True
    places = None
    for step in range(3):
        batches = [tiny_source.batch(4 * step + 2 * k, 2) for k in range(2)]
        ours.discard(ours.forward_backward(batches))
        assert ours.step(batches, 0.1) == reference.step(batches, 0.1)
        assert places in (None, [p.grad.data_ptr() for p in model.parameters()])
        places = [p.grad.data_ptr() for p in model.parameters()]
    assert unchanged(model, weights(plain))
