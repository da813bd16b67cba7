"""A simulated step holds exactly what can be counted by hand, and follows the tricks that are switched on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cramming.model import attention, heads
from cramming.model.config import ModelConfig, count_parameters, flops_per_token
from cramming.plan.memory import (
    CATEGORIES,
    CUBLAS_BYTES,
    Simulation,
    largest_fitting,
    micro_batch_sizes,
)
from cramming.precision import Mode
from cramming.recipe import Config, Hardware

Simulate = Callable[..., Simulation]
MODEL = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=128, max_length=64
)
LENGTH, TARGETS = 32, 8
without_a_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="fake CUDA tensors are used there"
)


@pytest.fixture
def simulate(compose: Callable[..., dict[str, Any]]) -> Simulate:
    """`simulate("memory.checkpoint_every=1", mode="bf16", num_layers=6)`: overrides, place, changes of the model."""

    def make(
        *overrides: str, mode: Mode = "fp32", kind: str = "cpu", gib: float = 0.0, **model: Any
    ) -> Simulation:
        config = Config.of(compose("optim=adamw", f"train.sequence_length={LENGTH}", *overrides))
        place = Hardware(kind, "a device", mode, (8, 0) if kind == "cuda" else (0, 0))
        return Simulation(config.replace(model=replace(MODEL, **model)), place, gib * 2**30)

    return make


@pytest.mark.parametrize(
    ("name", "copies", "counters"),
    [("adamw", 2, 1), ("sgd", 1, 0), ("adagrad", 1, 1), ("lamb", 2, 1)],
)
def test_weights_gradients_and_optimizer_state_are_exact(
    simulate: Simulate, name: str, copies: int, counters: int
) -> None:
    """`copies` of the parameters that an optimizer keeps, and its step counters (4 bytes each)."""
    simulation = simulate(f"optim={name}")
    parameters = 4 * count_parameters(MODEL).total
    tensors = len(list(simulation.engine.model.parameters()))
    assert simulation.tracker.live["weights"] == parameters
    assert simulation.tracker.live["optimizer"] == copies * parameters + 4 * counters * tensors
    for rows, count in ((1, 1), (4, 2)):
        peak = simulation.step(rows, count).peak
        assert tuple(peak) == CATEGORIES
        assert peak["weights"] == parameters
        assert peak["optimizer"] == simulation.tracker.live["optimizer"]
        assert 0 <= peak["gradients"] <= parameters
    assert (
        simulation.step(64, 2).peak["gradients"] == parameters
    )  # accumulated ones are there at every peak
    assert simulation.tracker.live["gradients"] == 0


def test_a_generator_is_planned_with_the_encoder(simulate: Simulate) -> None:
    simulation = simulate("objective=rtd", "objective.generator_width=0.5", mode="bf16")
    config = simulation.config
    assert (
        simulation.tracker.live["weights"]
        == 4 * config.parameters.total
        > 4 * count_parameters(MODEL).total
    )
    assert simulation.step(4).flops == pytest.approx(
        4 * LENGTH * config.flops_per_token(), rel=1e-6
    )


@pytest.mark.parametrize("init", ["truncated", "depth_scaled", "small"])
def test_every_initialisation_ends(simulate: Simulate, init: str) -> None:
    """Some draw again what is out of bounds: here nothing ever is."""
    assert simulate(init=init).tracker.total > 0


def test_a_step_leaves_nothing_behind(simulate: Simulate) -> None:
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    simulation = simulate()
    before = simulation.tracker.total
    costs = [simulation.step(8, 2) for _ in range(3)]
    assert simulation.tracker.total == before
    assert costs[0] == costs[1] == costs[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision


def test_the_phase_that_needs_most_is_planned(simulate: Simulate) -> None:
    """A causal one beside a masked one with as many targets, for the masks of its last layer; else the most targets."""
    by_phase = [
        simulate(*overrides).step(8).peak_bytes
        for overrides in ((), ("objective=causal-then-mlm", "objective.until=1"))
    ]
    assert by_phase[0] <= by_phase[1]
    for override, expected in (
        ("objective=causal-then-mlm", by_phase[1]),
        ("objective.phases=[{at: 0.5, rate: 0.1}]", by_phase[0]),
    ):
        assert simulate(override).step(8).peak_bytes == expected


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_memory_grows_with_the_micro_batch_and_not_with_their_number(
    simulate: Simulate, mode: Mode
) -> None:
    simulation = simulate(mode=mode)
    sizes = [simulation.step(rows, 4).peak_bytes for rows in (8, 16, 32, 64)]
    assert sizes == sorted(sizes)
    _, second, third, fourth = sizes
    assert fourth - third == pytest.approx(2 * (third - second), rel=0.1)  # a straight line
    assert simulation.step(32, 2).peak_bytes == simulation.step(32, 100).peak_bytes


def test_checkpointing_lowers_the_activations_and_costs_arithmetic(simulate: Simulate) -> None:
    settings = (
        "memory.checkpoint_every=0",
        "memory.checkpoint_every=2",
        "memory.checkpoint_every=1",
        "memory=selective",
    )
    plain, half, full, selective = (simulate(setting).step(64) for setting in settings)
    assert (
        plain.peak["activations"]
        > 1.3 * half.peak["activations"]
        > 1.3 * 1.3 * full.peak["activations"]
    )
    assert (
        plain.flops < half.flops < full.flops < 1.34 * plain.flops
    )  # one more forward pass: a third
    assert selective.flops == plain.flops
    assert full.peak["activations"] < selective.peak["activations"] < plain.peak["activations"]


def test_what_is_offloaded_takes_no_memory_of_a_gpu(simulate: Simulate) -> None:
    """With a GPU here or without one. Of six blocks about two have their activations on the device."""
    settings = (
        "memory.checkpoint_every=0",
        "memory.offload_activations=true",
        "memory.offload_weights=true",
        "memory.offload_optimizer=true",
    )
    simulations = [
        simulate(setting, mode="bf16", kind="cuda", num_layers=6) for setting in settings
    ]
    plain, activations, weights, optimizer = (
        simulation.step(64, 2).peak for simulation in simulations
    )
    assert activations["activations"] < 0.6 * plain["activations"]
    assert activations["gradients"] == plain["gradients"]
    model: Any = simulations[0].engine.model
    blocks = 4 * sum(p.numel() for p in model.encoder.blocks.parameters())
    for name in ("weights", "gradients"):
        assert weights[name] == plain[name] - blocks
    assert (
        sum(weights.values()) < sum(plain.values()) - 2 * blocks
    )  # AdamW's moments of the blocks are there too
    assert optimizer["optimizer"] < 0.001 * plain["optimizer"]  # counters of steps
    assert optimizer["weights"] == plain["weights"]


def test_offloading_is_simulated_by_the_code_that_does_it(simulate: Simulate) -> None:
    """Storages without data are told apart: activations travel to the host and back, weights once more than that."""
    plain, activations, weights = (
        simulate(f"memory.{m}").step(64)
        for m in ("loss_chunk=null", "offload_activations=true", "offload_weights=true")
    )
    moved = [
        sum(op.bytes * count for op, count in cost.micro_batch.items())
        for cost in (plain, activations, weights)
    ]
    assert moved[1] > 1.2 * moved[0]
    assert moved[2] > moved[0]
    assert weights.flops == activations.flops == plain.flops


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_arithmetic_is_that_of_the_formula(simulate: Simulate, mode: Mode) -> None:
    """Up to SDPA's backward pass, which computes the scores again: 2.5 instead of 2 times its forward. Attention in 16
    bits keeps them, on a CPU."""
    cost = simulate(mode=mode).step(4, 2)
    formula = flops_per_token(MODEL, LENGTH, TARGETS / LENGTH, "targets") * 4 * LENGTH
    queries = MODEL.num_layers - 1 + TARGETS / LENGTH  # the last layer's at the targets only
    again = 0.5 * 4 * MODEL.hidden_size * LENGTH * queries * 4 * LENGTH if mode == "fp32" else 0
    assert cost.flops == pytest.approx(formula + again, rel=1e-6)


def test_lower_precision_needs_less(simulate: Simulate) -> None:
    """With a residual stream in bf16 each of the two norms of a block keeps 2 bytes of a number where it kept 4."""
    full, half, residual = (
        simulate(f"precision.residual={kind}", mode=mode).step(64)  # type: ignore[arg-type]
        for mode, kind in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
    )
    assert half.peak["activations"] < 0.85 * full.peak["activations"]
    assert half.peak["weights"] == full.peak["weights"] == residual.peak["weights"]
    kept = (
        2 * MODEL.num_layers * 64 * LENGTH * MODEL.hidden_size
    )  # numbers; the last block's are at the targets
    saved = half.peak["activations"] - residual.peak["activations"]
    assert 0.8 * 2 * kept < saved < 1.2 * 2 * kept
    assert residual.flops == half.flops


def test_compiled_settings_are_run_eagerly(simulate: Simulate) -> None:
    compiled = simulate("runtime.compile=model", "memory.activation_budget=0.5")
    assert compiled.step(4).peak == simulate().step(4).peak


@without_a_gpu
def test_a_gpu_is_planned_without_one(simulate: Simulate) -> None:
    """Documents need no mask there, the head's chunks are larger, and cuBLAS has its workspace."""
    tables = dict(attention.KERNELS), dict(heads.CHUNK_ELEMENTS)
    packings = ("train.packing=rows", "train.packing=documents")
    on_gpu = [simulate(packing, kind="cuda", mode="bf16").step(64).peak for packing in packings]
    assert on_gpu[0]["activations"] == pytest.approx(on_gpu[1]["activations"], rel=0.01)
    assert on_gpu[0]["workspace"] >= CUBLAS_BYTES
    rows, documents = (
        simulate(packing, "attention.kernel=sdpa", "precision.residual=bf16", mode="bf16")
        .step(64)
        .peak
        for packing in packings
    )
    assert rows["activations"] == on_gpu[0]["activations"] < documents["activations"]
    assert tables == (attention.KERNELS, heads.CHUNK_ELEMENTS)


@without_a_gpu
def test_a_large_card_and_who_sets_it_have_more_logits_at_a_time(simulate: Simulate) -> None:
    as_set = f"memory.loss_chunk={heads.CHUNK_ELEMENTS['large cuda']}"
    small, large, small_as_set = (
        simulate(*overrides, kind="cuda", mode="bf16", gib=gib, vocab_size=2**17)
        .step(256)
        .peak["head"]
        for overrides, gib in (([], 11), ([], 80), ([as_set], 11))
    )
    assert large > 2 * small
    assert small_as_set == large


@without_a_gpu
def test_flash_attention_has_scratch_for_every_sequence(simulate: Simulate) -> None:
    """128 tokens each, in fp32, beside its tokens: with rows as short as here that is four times what these need."""
    scratch = {}
    for packing, window in (("rows", None), ("rows", 8), ("documents", None)):
        simulation = simulate(
            f"train.packing={packing}",
            kind="cuda",
            mode="bf16",
            local_window=window,
            global_every=2,
        )
        noted, scratch_of = list[int](), simulation.tracker.scratch
        assert scratch_of

        def note(
            func: Any, args: Any, noted: list[int] = noted, scratch_of: Any = scratch_of
        ) -> int:
            noted.append(scratch_of(func, args))
            return noted[-1]

        simulation.tracker.scratch = note
        simulation.step(64)
        scratch[packing, window] = max(noted)
    each, tokens = 4 * MODEL.hidden_size, 64 * LENGTH
    assert scratch == {
        ("rows", None): tokens * each,
        ("rows", 8): (tokens + 128 * 64) * each,
        ("documents", None): (tokens + 128 * (64 + tokens // 256)) * each,
    }


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=without_a_gpu)])
@pytest.mark.parametrize("window", [None, 8])
def test_sequences_are_padded_by_their_number_alone(
    simulate: Simulate, kind: str, window: int | None
) -> None:
    """No bound has a value. Rows cost what they do in SDPA, and copies; documents fewer pairs of tokens than rows."""
    costs = {
        (packing, kernel): simulate(
            f"train.packing={packing}",
            f"attention.kernel={kernel}",
            "train.sequence_length=64",
            kind=kind,
            local_window=window,
            global_every=2,
        ).step(16)
        for packing in ("rows", "documents")
        for kernel in ("padded", "sdpa")
    }
    assert costs["rows", "padded"].flops == costs["rows", "sdpa"].flops
    assert costs["rows", "padded"].peak_bytes > costs["rows", "sdpa"].peak_bytes
    assert costs["documents", "padded"].flops < costs["documents", "sdpa"].flops


@pytest.mark.parametrize(("mode", "expected"), [("bf16", "varlen"), ("fp32", "sdpa")])
def test_flex_is_planned_on_a_gpu_as_what_runs_uncompiled(
    compose: Callable[..., dict[str, Any]], mode: Mode, expected: str
) -> None:
    """FlexAttention exists compiled only, and a simulation runs eagerly."""
    simulation = Simulation.__new__(Simulation)
    simulation.config = Config.of(compose("attention.kernel=flex"))
    simulation.place = Hardware("cuda", "a GPU", mode, (8, 0))
    assert simulation._executed(is_fake=False).attention.kernel == expected


def test_sizes_divide_the_batch() -> None:
    assert [micro_batch_sizes(n) for n in (16, 24, 1, 7)] == [
        [1, 2, 4, 8, 16],
        [1, 2, 4, 8, 24],
        [1],
        [1, 7],
    ]


@pytest.mark.parametrize("sizes", [[1], [1, 2], [1, 2, 4, 8, 16, 48], [2**k for k in range(14)]])
def test_the_largest_that_fits_is_found(sizes: list[int]) -> None:
    """The last size may need less than the one before: nothing is accumulated there."""
    for limit in (0, *sizes, 10_000):
        for last_fits in (limit >= sizes[-1], True):
            tried: list[int] = []

            def fits(
                rows: int, limit: int = limit, last: bool = last_fits, tried: list[int] = tried
            ) -> bool:
                tried.append(rows)
                return last if rows == sizes[-1] else rows <= limit

            expected = (
                sizes[-1] if last_fits else max((s for s in sizes if s <= limit), default=None)
            )
            assert largest_fitting(sizes, fits) == expected
            assert len(tried) == len(set(tried)) <= 5
