"""A simulated step holds what can be counted by hand, follows the settings, and agrees with a measured one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming.model.config import ModelConfig, count_parameters
from cramming.model.heads import CHUNK_ELEMENTS
from cramming.plan.memory import CATEGORIES, Simulation, largest_fitting, micro_batch_sizes
from cramming.precision import Mode
from cramming.recipe import Config, Hardware

Simulate = Callable[..., Simulation]
MODEL = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=128, max_length=64
)
LENGTH = 32
PARAMETER_BYTES = 4 * count_parameters(MODEL).total


@pytest.fixture
def simulate(compose: Callable[..., dict[str, Any]]) -> Simulate:
    """`simulate("memory.checkpoint_every=1", mode="bf16", num_layers=6)`: overrides, hardware, changes of the model."""

    def make(
        *overrides: str, mode: Mode = "fp32", kind: str = "cpu", gib: float = 0.0, **model: Any
    ) -> Simulation:
        config = Config.of(compose("optim=adamw", f"train.sequence_length={LENGTH}", *overrides))
        hardware = Hardware(kind, "a device", mode, (8, 0) if kind == "cuda" else (0, 0))
        return Simulation(config.replace(model=replace(MODEL, **model)), hardware, gib * 2**30)

    return make


def total(peak: dict[str, int]) -> int:
    return sum(peak.values())


@pytest.mark.parametrize(
    ("name", "copies", "counters"),
    [("adamw", 2, 1), ("sgd", 1, 0), ("adagrad", 1, 1), ("lamb", 2, 1)],
)
def test_weights_gradients_and_optimizer_state_are_exact(
    simulate: Simulate, name: str, copies: int, counters: int
) -> None:
    """`copies` of the parameters that an optimizer keeps, and its step counters (4 bytes each)."""
    simulation = simulate(f"optim={name}")
    config = simulation.config
    tensors = 0 if counters == 0 else config.model.num_layers
    state = simulation.state()
    assert state["weights"] == PARAMETER_BYTES
    counted = state["optimizer"] - copies * PARAMETER_BYTES
    assert counted >= 4 * counters * tensors and counted < 0.01 * PARAMETER_BYTES
    for rows, accumulates in ((1, False), (4, True)):
        peak = simulation.peak(rows, accumulates)
        assert peak.keys() == CATEGORIES.keys()
        assert peak["weights"] == PARAMETER_BYTES
        assert peak["optimizer"] >= state["optimizer"]  # in the update also what it computes
        assert 0 <= peak["gradients"] <= PARAMETER_BYTES
    accumulated = simulation.peak(64, accumulates=True)
    assert accumulated["gradients"] == PARAMETER_BYTES
    assert simulation.state() == state


def test_a_generator_is_planned_with_the_encoder(simulate: Simulate) -> None:
    simulation = simulate("objective=rtd", "objective.generator_width=0.5", mode="bf16")
    weights = simulation.state()["weights"]
    assert weights == 4 * simulation.config.parameters.total > PARAMETER_BYTES
    assert total(simulation.peak(4)) > weights


@pytest.mark.parametrize("init", ["truncated", "depth_scaled", "small"])
def test_every_initialisation_ends(simulate: Simulate, init: str) -> None:
    """Some draw again what is out of bounds: here nothing ever is."""
    assert simulate(init=init).state()["weights"] > 0


def test_a_simulation_repeats_and_leaves_random_numbers_alone(simulate: Simulate) -> None:
    before = torch.get_rng_state()
    simulation = simulate(dropout=0.1)
    peaks = [simulation.peak(8, accumulates=True) for _ in range(3)]
    assert peaks[0] == peaks[1] == peaks[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_phase_that_needs_most_is_planned(simulate: Simulate) -> None:
    """A causal one beside a masked one with as many targets, for the masks of its last layer; else the most targets."""
    masked, causal = (
        total(simulate(*overrides).peak(8))
        for overrides in ((), ("objective=causal-then-mlm", "objective.until=1"))
    )
    assert masked <= causal
    for override, expected in (
        ("objective=causal-then-mlm", causal),
        ("objective.phases=[{at: 0.5, rate: 0.1}]", masked),
    ):
        assert total(simulate(override).peak(8)) == expected


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_memory_grows_in_a_straight_line_with_the_micro_batch(
    simulate: Simulate, mode: Mode
) -> None:
    simulation = simulate(mode=mode)
    sizes = [total(simulation.peak(rows, accumulates=True)) for rows in (16, 32, 64)]
    assert sizes == sorted(sizes)
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.1)


def test_checkpointing_lowers_the_peak(simulate: Simulate) -> None:
    settings = ("memory=selective", "memory.checkpoint_every=2", "memory.checkpoint_every=1")
    plain, selective, half, full = (
        total(simulate(setting).peak(64)) for setting in ("memory.checkpoint_every=0", *settings)
    )
    assert full < half < plain and full < selective < plain


def test_what_is_offloaded_takes_no_memory_of_a_gpu(simulate: Simulate) -> None:
    settings = (
        "checkpoint_every=0",
        "offload_weights=true",
        "offload_optimizer=true",
    )
    plain, weights, optimizer = (
        simulate(f"memory.{setting}", mode="bf16", kind="cuda").peak(64, accumulates=True)
        for setting in settings
    )
    assert optimizer == plain | {"optimizer": 0}
    blocks = 4 * count_parameters(MODEL).without_embeddings
    for name in ("weights", "gradients"):
        assert plain[name] - weights[name] == pytest.approx(blocks, abs=1)
    assert weights["activations"] == plain["activations"]


def test_lower_precision_needs_less(simulate: Simulate) -> None:
    """With a residual stream in bf16 each of the two norms of a block keeps 2 bytes of a number where it kept 4."""
    full, half, residual = (
        simulate(f"precision.residual={kind}", mode=mode).peak(64)  # type: ignore[arg-type]
        for mode, kind in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
    )
    assert total(half) < 0.9 * total(full)
    assert half["weights"] == full["weights"] == residual["weights"]
    numbers = 2 * MODEL.num_layers * 64 * LENGTH * MODEL.hidden_size
    assert 0.8 * 2 * numbers < total(half) - total(residual) < 1.2 * 2 * numbers


def test_compiled_settings_are_run_eagerly(simulate: Simulate) -> None:
    compiled = simulate("runtime.compile=model", "memory.activation_budget=0.5")
    assert compiled.peak(4) == simulate().peak(4)


def test_flash_attention_of_a_gpu_needs_no_masks(simulate: Simulate) -> None:
    """Nor does FlexAttention, which exists compiled only. Without flash, documents and windows have masks."""
    gpu = {"kind": "cuda", "mode": "bf16"}
    rows, documents = (
        simulate(f"train.packing={packing}", **gpu).peak(64) for packing in ("rows", "documents")
    )
    assert rows == documents == simulate("attention.kernel=flex", **gpu).peak(64)
    assert rows == simulate(**gpu, local_window=8, global_every=2).peak(64)
    masked = simulate("train.packing=documents", "attention.kernel=sdpa", **gpu).peak(64)
    assert total(masked) > total(rows)


def test_relative_positions_take_masks_but_keep_no_scores_of_a_gpu(simulate: Simulate) -> None:
    peaks = {}
    for kind in ("cpu", "cuda"):
        for count in (4, 8):
            simulation = simulate(
                kind=kind, mode="bf16", num_layers=count, relative_positions=32, num_heads=8
            )
            peaks[kind, count] = total(simulation.peak(64))
    scores_bytes = 2 * 64 * 8 * LENGTH**2
    more_on_cpu, more_on_gpu = (peaks[kind, 8] - peaks[kind, 4] for kind in ("cpu", "cuda"))
    assert more_on_cpu > more_on_gpu + 4 * scores_bytes
    flash = total(simulate(kind="cuda", mode="bf16", num_heads=8).peak(64))
    assert peaks["cuda", 4] > flash + scores_bytes


def test_a_large_card_and_who_sets_it_have_more_logits_at_a_time(simulate: Simulate) -> None:
    as_set = f"memory.loss_chunk={CHUNK_ELEMENTS['large cuda']}"
    small, large, small_as_set = (
        total(simulate(*overrides, kind="cuda", mode="bf16", gib=gib, vocab_size=2**17).peak(256))
        for overrides, gib in (([], 11), ([], 80), ([as_set], 11))
    )
    assert small < large == small_as_set


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("packing", ["rows", "documents"])
@pytest.mark.parametrize("window", [None, 8])
def test_padded_sequences_are_planned(
    simulate: Simulate, kind: str, packing: str, window: int | None
) -> None:
    """Their bounds have no values."""
    settings = (f"train.packing={packing}", "attention.kernel=padded", "train.sequence_length=64")
    simulation = simulate(*settings, kind=kind, local_window=window, global_every=2)
    assert simulation.peak(16)["activations"] > simulation.peak(8)["activations"]


def test_sizes_divide_the_sequences_and_have_not_too_many_tokens() -> None:
    assert [micro_batch_sizes(n, 128) for n in (16, 24, 1, 7, 4096)] == [
        [1, 2, 4, 8, 16],
        [1, 2, 4, 8, 24],
        [1],
        [1, 7],
        [2**k for k in range(11)],
    ]
    assert micro_batch_sizes(4096, 200_000) == [1]  # a single row whatever its length


@pytest.mark.parametrize("sizes", [[1], [1, 2], [1, 2, 4, 8, 16, 48], [2**k for k in range(14)]])
@pytest.mark.parametrize("start", [0, 8, 10_000])
def test_the_largest_that_fits_is_found(sizes: list[int], start: int) -> None:
    for limit in (0, *sizes, 10_000):
        tried: list[int] = []

        def fits(rows: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(rows)
            return rows <= limit

        expected = max((size for size in sizes if size <= limit), default=None)
        assert largest_fitting(sizes, fits, start) == expected
        assert len(tried) == len(set(tried))
        assert max(tried) <= max(2 * limit, start, 48)  # hardly larger than what fits


SHAPES = {
    "256x4": ["hidden_size=256", "num_layers=4", "num_heads=4", "intermediate_size=1024"],
    "768x12": [],  # BERT-base
}
CHECKPOINT = "memory.checkpoint_every"
MEASURED = [  # shape, rows of a micro-batch, micro-batches, overrides
    ("256x4", 32, 1, []),
    ("256x4", 32, 4, []),
    ("256x4", 128, 1, [f"{CHECKPOINT}=1"]),
    ("256x4", 128, 1, [f"{CHECKPOINT}=2"]),
    ("256x4", 128, 1, ["memory=selective"]),
    ("256x4", 64, 1, ["train.packing=documents"]),
    ("768x12", 8, 1, []),
    ("768x12", 4, 2, []),
    ("256x4", 64, 1, ["model.relative_positions=32"]),
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident sets are read from /proc")
@pytest.mark.parametrize(("shape", "rows", "count", "overrides"), MEASURED)
def test_the_predicted_peak_is_the_measured_one(
    compose: Callable[..., dict[str, Any]],
    shape: str,
    rows: int,
    count: int,
    overrides: list[str],
) -> None:
    """In a fresh process in which malloc gives freed memory back (measured_peak.py says how)."""
    model = [f"model.{size}" for size in SHAPES[shape]]
    settings = compose(
        "model=bert-base",
        "model.vocab_size=32768",
        *model,
        "optim=adamw",
        "precision=fp32",
        "train.sequence_length=128",
        *overrides,
    )
    predicted = total(
        Simulation(Config.of(settings), Hardware("cpu", "a CPU", "fp32")).peak(rows, count > 1)
    )
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).parent / "measured_peak.py"
    done = subprocess.run(
        [sys.executable, script, json.dumps(settings, default=str), str(rows), str(count)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    measured = int(done.stdout)
    print(f"{shape}, {count} x {rows} {overrides}: {predicted / measured - 1:+.2%}")
    assert predicted == pytest.approx(measured, rel=0.05)
