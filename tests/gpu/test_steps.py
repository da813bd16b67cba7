"""Whole training steps on the device: compiled as eager, in each number format, with less memory."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import checkpoint
from cramming.bench.worker import cap_memory
from cramming.budget import Work
from cramming.data.batches import Batch
from cramming.device import compiled_graphs
from cramming.engine import Engine
from cramming.hooks import StepResult
from cramming.model.attention import Packing
from cramming.plan.micro_batch import find_micro_batch
from cramming.recipe import Config

from .conftest import ROWS

pytestmark = pytest.mark.gpu
Make = Callable[..., Engine]
Train = Callable[..., list[StepResult]]
CLOSE = {"fp32": 1e-4, "bf16": 2e-2}  # nats, of about six
COMPILERS = {
    "cuda-graphs": ["runtime.cuda_graphs=true"],
    "coordinate-descent": ["runtime.tune=coordinate-descent"],
    "max-autotune": ["runtime.tune=max-autotune"],
}
FORMATS = {
    "bf16": ["precision.mode=bf16", "precision.residual=fp32"],
    "bf16-residual": ["precision.mode=bf16", "precision.residual=bf16"],
    "fp16": ["precision.mode=fp16"],
    "fp8": ["precision.mode=fp8"],
    "fp8-rowwise": ["precision.mode=fp8", "precision.fp8_scaling=rowwise"],
}
LESS_MEMORY = {
    "checkpoint": ["memory.checkpoint_every=1"],
    "selective": ["memory=selective"],
    "offload": ["memory.offload_activations=true"],
    "offload-weights": ["memory.offload_weights=true"],
    "offload-optimizer": ["memory.offload_optimizer=true"],
    "offload-all": ["memory=offload-all"],
    "offload-weights-muon": ["memory.offload_weights=true", "optim=muon"],
    "offload-all-normuon": ["memory=offload-all", "optim=normuon"],
    "offload-optimizer-cautious": ["memory.offload_optimizer=true", "optim=adamw-cwd"],
}


@pytest.mark.parametrize("packing", ["rows", "documents"])
@pytest.mark.parametrize("model", ["bert-base", "crammed-bert", "modern"])
def test_a_compiled_step_equals_an_eager_one(
    make_engine: Make, train: Train, model: str, packing: str, mode: str
) -> None:
    """In one graph without a break, compiled once."""
    from torch._dynamo.utils import counters

    expected = train(make_engine(f"model={model}"), 4, packing)
    counters.clear()
    actual = train(make_engine(f"model={model}", "runtime.compile=model"), 4, packing)
    assert compiled_graphs() == 1 and not counters["graph_break"], dict(counters["graph_break"])
    assert [stats.recompilations for stats in actual] == [0] * 4
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], abs=CLOSE[mode])
    assert [s.grad_norm for s in actual] == pytest.approx([s.grad_norm for s in expected], rel=0.05)


def test_compiled_blocks_equal_eager_ones(make_engine: Make, train: Train, mode: str) -> None:
    actual, expected = (
        train(make_engine("model=modern", *more), 3) for more in (["runtime.compile=blocks"], [])
    )
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], abs=CLOSE[mode])


@pytest.mark.parametrize("kernel", ["varlen", "flex", "padded"])
def test_every_kernel_trains_alike(
    make_engine: Make, train: Train, device: torch.device, kernel: str
) -> None:
    if device.type == "cpu" and kernel in ("varlen", "flex"):
        pytest.skip("trains on CUDA only")
    actual, expected = (
        train(
            make_engine("model=modern", "precision.mode=auto", f"attention.kernel={k}"),
            3,
            "documents",
        )
        for k in (kernel, "sdpa")
    )
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], abs=CLOSE["bf16"])


@pytest.mark.parametrize("lever", COMPILERS.values(), ids=COMPILERS)
def test_what_the_compiler_tries_or_replays_equals_an_eager_step(
    make_engine: Make,
    train: Train,
    gpu: torch.device,
    batch_of: Callable[..., Batch],
    lever: list[str],
    mode: str,
) -> None:
    """Two micro-batches a step; between the steps a step that is not applied, and a validation."""

    def losses(engine: Engine) -> list[float]:
        values = [s.loss for s in train(engine, 3)]
        engine.discard(engine.forward_backward([batch_of(0), batch_of(ROWS)]))
        values += engine.evaluate([batch_of(8 * ROWS), batch_of(9 * ROWS)])[:1]
        return values + [s.loss for s in train(engine, 2)]

    actual, expected = (
        losses(make_engine("model=modern", *more))
        for more in (["runtime.compile=model", *lever], [])
    )
    assert actual == pytest.approx(expected, abs=CLOSE[mode])


@pytest.mark.parametrize("format_", FORMATS)
def test_fewer_bits_learn_what_fp32_learns(
    make_engine: Make, train: Train, device: torch.device, format_: str
) -> None:
    is_fp8 = "mode=fp8" in FORMATS[format_][0]
    if is_fp8 and find_spec("torchao") is None:
        pytest.skip("needs torchao")
    if is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("needs units for fp8")
    if format_ == "fp16" and device.type == "cpu":
        pytest.skip("takes minutes where no instruction multiplies fp16")
    emulated = f"precision.emulate_fp8={str(is_fp8 and device.type == 'cpu').lower()}"
    actual, expected = (
        train(make_engine("model=bert-base", *more), 5)
        for more in ([*FORMATS[format_], emulated], ["precision.mode=fp32"])
    )
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], abs=0.1)


@pytest.mark.parametrize("memory", LESS_MEMORY.values(), ids=LESS_MEMORY)
def test_less_memory_trains_alike(
    make_engine: Make, train: Train, memory: list[str], mode: str
) -> None:
    unclipped = memory[1:]
    actual, expected = (
        train(make_engine("model=crammed-bert", *more), 4, cut=1) for more in (memory, unclipped)
    )
    assert [s.loss for s in actual] == pytest.approx([s.loss for s in expected], abs=CLOSE[mode])


@pytest.mark.parametrize(
    "memory",
    [["memory.checkpoint_every=1"], ["memory.offload_activations=true"], ["memory=offload-all"]],
)
def test_less_memory_is_less_memory(
    make_engine: Make, train: Train, gpu: torch.device, memory: list[str]
) -> None:
    """Activations and weights dominate the memory of this model."""
    peaks = []
    for more in ([], memory):
        engine = make_engine(
            "model.hidden_size=256", "model.num_layers=16", "model.intermediate_size=1024", *more
        )
        torch.cuda.reset_peak_memory_stats()
        train(engine, 2, cut=1)
        peaks.append(torch.cuda.max_memory_allocated())
        del engine
        torch.cuda.empty_cache()
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("memory", [[], ["memory=offload-all"]], ids=["on the device", "offloaded"])
def test_a_checkpoint_written_while_training_continues_is_of_its_step(
    make_engine: Make,
    train: Train,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: list[str],
) -> None:
    """Twice: the second copy may be in the memory of the first."""
    monkeypatch.setattr(checkpoint, "BACKGROUND_DEVICES", {device.type})
    engine = make_engine("model=crammed-bert", *memory)
    with checkpoint.Saver() as saver:
        for step in (1, 2):
            train(engine, 1)
            saved = checkpoint.contents(engine, Work(steps=step))
            expected = {name: w.cpu().clone() for name, w in saved["model"].items()}
            moments = [s["exp_avg"].cpu().clone() for s in saved["optimizer"]["state"].values()]
            saver.save(tmp_path, engine, Work(steps=step), lambda _: None, retain=False)
            train(engine, 1)
            saver.wait()
            saved = checkpoint.read(tmp_path / f"step-{step:08d}.pt")
            assert all(torch.equal(saved["model"][name], w) for name, w in expected.items())
            states = saved["optimizer"]["state"].values()
            assert all(torch.equal(s["exp_avg"], m) for s, m in zip(states, moments, strict=True))


def test_a_batch_too_large_is_survived(
    make_engine: Make,
    compose: Callable[..., dict[str, Any]],
    gpu: torch.device,
    batch_of: Callable[..., Batch],
) -> None:
    """A card of 0.4 GiB: the largest size really runs out of memory, a smaller one is found and trains.

    By `plan` 1,024 sequences, the most that `auto` tries, take 0.55 GiB.
    """
    batch = batch_of(0)
    share = torch.cuda.get_per_process_memory_fraction(gpu)
    cap_memory(gpu, 0.4 + torch.cuda.memory_allocated() / 2**30)
    try:
        engine = make_engine("model=bert-base", "model.vocab_size=512")
        sections = compose(
            "precision=bf16",
            "model=bert-base",
            "model.hidden_size=64",
            "model.num_layers=2",
            "model.num_heads=2",
            "model.intermediate_size=128",
            "model.vocab_size=512",
        )
        config = Config.of(sections)
        rows, how = find_micro_batch(
            engine, lambda first, count: repeated(batch, count), config, 2**17
        )
        assert 8 <= rows < 2**17 and "does not fit" in how
        stats = engine.step([repeated(batch, rows)], 1e-3)
        assert not stats.skipped
    finally:
        torch.cuda.set_per_process_memory_fraction(share, gpu)


def repeated(batch: Batch, rows: int) -> Batch:
    """So many sequences: the eight of `few` again and again."""
    copies, length = rows // 8, batch.ids_T.numel() // 8
    places = (batch.target_positions_M + 8 * length * torch.arange(copies)[:, None]).flatten()
    packing = Packing(
        torch.arange(0, rows * length + 1, length, dtype=torch.int32), length, length, length
    )
    tokens = (batch.ids_T.repeat(copies), batch.positions_T.repeat(copies), packing)
    return Batch(*tokens, places, batch.target_ids_M.repeat(copies), copies * batch.num_targets)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_repeated_batch_has_the_loss_of_one(
    make_engine: Make, batch_of: Callable[..., Batch], copies: int
) -> None:
    """This checks the batch that the test above makes."""
    batch = batch_of(0)
    actual, expected = (
        make_engine("model=bert-base").evaluate([b]) for b in (repeated(batch, 8 * copies), batch)
    )
    assert actual[0] == pytest.approx(expected[0], abs=1e-2) and actual[2] == copies * expected[2]
