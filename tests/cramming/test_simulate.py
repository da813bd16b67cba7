"""A simulated step holds exactly what can be counted by hand, and follows the tricks that are switched on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cramming.checks import Config
from cramming.model import attention, heads
from cramming.model.config import ModelConfig, count_parameters, flops_per_token
from cramming.plan.memory import (
    CATEGORIES,
    CUBLAS_BYTES,
    Recipe,
    Simulation,
    largest_below,
    largest_fitting,
    micro_batch_sizes,
)
from cramming.precision import Mode

MODEL = ModelConfig(vocab_size=512, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=128, max_length=64)
LENGTH, TARGETS = 32, 8


@pytest.fixture
def make_recipe(compose: Callable[..., dict[str, Any]]) -> Callable[..., Recipe]:
    """`make_recipe("memory=checkpoint", mode="bf16")`."""

    def make(*overrides: str, mode: Mode = "fp32", device_type: str = "cpu", packing: str = "rows") -> Recipe:
        form = (f"train.sequence_length={LENGTH}", f"train.packing={packing}")
        return Recipe(replace(Config.of(compose("optim=adamw", *form, *overrides)), model=MODEL), mode, device_type)

    return make


def changed(recipe: Recipe, **sections: Any) -> Recipe:
    """The recipe with other sections of its configuration."""
    return replace(recipe, config=replace(recipe.config, **sections))


def packed(recipe: Recipe, packing: Any) -> Recipe:
    return changed(recipe, train=replace(recipe.config.train, packing=packing))


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    return make_recipe()


# copies of the parameters that an optimizer keeps, and its step counters (4 bytes each)
@pytest.mark.parametrize(
    ("name", "copies", "counters"), [("adamw", 2, 1), ("sgd", 1, 0), ("adagrad", 1, 1), ("lamb", 2, 1)]
)
def test_weights_gradients_and_optimizer_state_are_exact(
    make_recipe: Callable[..., Recipe], name: str, copies: int, counters: int
) -> None:
    simulation = Simulation(make_recipe(f"optim={name}"))
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
    assert simulation.step(64, 2).peak["gradients"] == parameters  # accumulated ones are there at every peak
    assert simulation.tracker.live["gradients"] == 0


@pytest.mark.parametrize("init", ["normal", "truncated", "depth_scaled", "small"])
def test_every_initialisation_ends(recipe: Recipe, init: Any) -> None:
    """Some draw again what is out of bounds: here nothing ever is."""
    assert Simulation(changed(recipe, model=replace(MODEL, init=init))).floor > 0


def test_nothing_is_left_behind_by_a_step(recipe: Recipe) -> None:
    simulation = Simulation(recipe)
    before = simulation.tracker.total
    costs = [simulation.step(8, 2) for _ in range(3)]
    assert simulation.tracker.total == before
    assert costs[0] == costs[1] == costs[2]


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_memory_grows_with_the_micro_batch_and_not_with_their_number(recipe: Recipe, mode: Mode) -> None:
    simulation = Simulation(replace(recipe, mode=mode))
    sizes = [simulation.step(rows, 4).peak_bytes for rows in (8, 16, 32, 64)]
    assert sizes == sorted(sizes)
    _, second, third, fourth = sizes
    assert fourth - third == pytest.approx(2 * (third - second), rel=0.1)  # a straight line
    assert simulation.step(32, 2).peak_bytes == simulation.step(32, 100).peak_bytes


def test_checkpointing_lowers_the_activations_and_costs_arithmetic(make_recipe: Callable[..., Recipe]) -> None:
    settings = ("memory=plain", "memory.checkpoint_every=2", "memory=checkpoint")
    plain, half, full = (Simulation(make_recipe(setting)).step(64) for setting in settings)
    assert plain.peak["activations"] > 1.3 * half.peak["activations"] > 1.3 * 1.3 * full.peak["activations"]
    assert plain.flops < half.flops < full.flops < 1.34 * plain.flops  # one more forward pass: a third
    selective = Simulation(make_recipe("memory=selective")).step(64)
    assert selective.flops == plain.flops
    assert full.peak["activations"] < selective.peak["activations"] < plain.peak["activations"]


def test_what_is_offloaded_takes_no_memory_of_a_gpu(make_recipe: Callable[..., Recipe]) -> None:
    """With a GPU here or without one. Of six blocks about two have their activations on the device."""
    deep = replace(MODEL, num_layers=6)
    settings = ("memory=plain", "memory=offload", "memory=offload-weights", "memory=offload-optimizer")
    recipes = [make_recipe(setting, mode="bf16", device_type="cuda") for setting in settings]
    simulations = [Simulation(changed(recipe, model=deep)) for recipe in recipes]
    plain, activations, weights, optimizer = (simulation.step(64, 2).peak for simulation in simulations)
    assert activations["activations"] < 0.6 * plain["activations"]
    assert activations["gradients"] == plain["gradients"]
    blocks = 4 * sum(p.numel() for p in simulations[0].engine.model.encoder.blocks.parameters())  # type: ignore[union-attr, operator]
    for name in ("weights", "gradients"):
        assert weights[name] == plain[name] - blocks
    assert sum(weights.values()) < sum(plain.values()) - 2 * blocks  # AdamW's moments of the blocks are there too
    assert optimizer["optimizer"] < 0.001 * plain["optimizer"]  # counters of steps
    assert optimizer["weights"] == plain["weights"]


def test_offloading_is_simulated_by_the_code_that_does_it(make_recipe: Callable[..., Recipe]) -> None:
    """Storages without data are told apart: activations travel to the host and back, weights once more than that."""
    plain, activations, weights = (
        Simulation(make_recipe(f"memory={name}")).step(64) for name in ("plain", "offload", "offload-weights")
    )
    moved = [sum(op.bytes * count for op, count in cost.micro_batch.items()) for cost in (plain, activations, weights)]
    assert moved[1] > 1.2 * moved[0]
    assert moved[2] > moved[0]
    assert weights.flops == activations.flops == plain.flops


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_arithmetic_is_that_of_the_formula(recipe: Recipe, mode: Mode) -> None:
    """Up to SDPA's backward pass, which computes the scores again: 2.5 instead of 2 times its forward. Attention in 16
    bits keeps them, on a CPU."""
    cost = Simulation(replace(recipe, mode=mode)).step(4, 2)
    formula = flops_per_token(MODEL, LENGTH, TARGETS / LENGTH, "targets") * 4 * LENGTH
    asking = MODEL.num_layers - 1 + TARGETS / LENGTH  # the last layer's at the targets only
    again = 0.5 * 4 * MODEL.hidden_size * LENGTH * asking * 4 * LENGTH if mode == "fp32" else 0
    assert cost.flops == pytest.approx(formula + again, rel=1e-6)


def test_lower_precision_needs_less(recipe: Recipe) -> None:
    full, half = (Simulation(replace(recipe, mode=mode)).step(64).peak for mode in ("fp32", "bf16"))  # type: ignore[arg-type]
    assert half["activations"] < 0.85 * full["activations"]
    assert half["weights"] == full["weights"]


def test_a_residual_stream_in_bf16_needs_less(make_recipe: Callable[..., Recipe]) -> None:
    """Each of the two norms of a block keeps 2 bytes of a number where it kept 4."""
    full, half = (
        Simulation(make_recipe(f"precision.residual={kind}", mode="bf16")).step(64) for kind in ("fp32", "bf16")
    )
    kept = 2 * MODEL.num_layers * 64 * LENGTH * MODEL.hidden_size  # numbers; the last block's are at the targets
    saved = full.peak["activations"] - half.peak["activations"]
    assert 0.8 * 2 * kept < saved < 1.2 * 2 * kept
    assert half.flops == full.flops and half.peak["weights"] == full.peak["weights"]


def test_compiled_settings_are_run_eagerly(make_recipe: Callable[..., Recipe]) -> None:
    compiled = make_recipe("runtime=compile", "memory.activation_budget=0.5")
    assert Simulation(compiled).step(4).peak == Simulation(make_recipe()).step(4).peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="fake CUDA tensors are used there")
def test_a_gpu_is_planned_without_one(recipe: Recipe) -> None:
    """Documents need no mask there, the head's chunks are larger, and cuBLAS has its workspace."""
    tables = dict(attention.KERNELS), dict(heads.CHUNK_ELEMENTS)
    on_gpu = [
        Simulation(replace(packed(recipe, packing), device_type="cuda", mode="bf16")).step(64).peak
        for packing in ("rows", "documents")
    ]
    assert on_gpu[0]["activations"] == pytest.approx(on_gpu[1]["activations"], rel=0.01)
    assert on_gpu[0]["workspace"] >= CUBLAS_BYTES
    fused = changed(recipe, attention=replace(recipe.config.attention, kernel="sdpa"))
    rows, documents = (
        Simulation(replace(packed(fused, packing), mode="bf16")).step(64).peak for packing in ("rows", "documents")
    )
    assert rows["activations"] == on_gpu[0]["activations"] < documents["activations"]
    assert tables == (attention.KERNELS, heads.CHUNK_ELEMENTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fake CUDA tensors are used there")
def test_a_large_card_and_who_sets_it_have_more_logits_at_a_time(recipe: Recipe) -> None:
    wide = replace(changed(recipe, model=replace(MODEL, vocab_size=2**17)), device_type="cuda", mode="bf16")
    memory = replace(wide.config.memory, loss_chunk=heads.CHUNK_ELEMENTS["large cuda"])
    as_set = changed(wide, memory=memory)
    small, large, small_as_set = (
        Simulation(replace(one, memory_bytes=size * 2**30)).step(256).peak["head"]
        for one, size in ((wide, 11), (wide, 80), (as_set, 11))
    )
    assert large > 2 * small
    assert small_as_set == large


@pytest.mark.skipif(torch.cuda.is_available(), reason="fake CUDA tensors are used there")
def test_flash_attention_has_scratch_for_every_sequence(recipe: Recipe) -> None:
    """128 tokens each, in fp32, beside its tokens: with rows as short as here that is four times what these need."""
    scratch = {}
    for packing, window in (("rows", None), ("rows", 8), ("documents", None)):
        model = replace(MODEL, local_window=window, global_every=2)
        made = changed(packed(recipe, packing), model=model)
        simulation = Simulation(replace(made, device_type="cuda", mode="bf16"))
        noted, scratch_of = list[int](), simulation.tracker.scratch
        assert scratch_of

        def note(func: Any, args: Any, noted: list[int] = noted, scratch_of: Any = scratch_of) -> int:
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


def test_random_states_and_default_settings_stay(recipe: Recipe) -> None:
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    Simulation(recipe).step(2, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision


def test_sizes_divide_the_batch() -> None:
    assert micro_batch_sizes(16) == [1, 2, 4, 8, 16]
    assert micro_batch_sizes(24) == [1, 2, 4, 8, 24]
    assert micro_batch_sizes(1) == [1]
    assert micro_batch_sizes(7) == [1, 7]


SIZES = [[1], [1, 2], [1, 2, 4, 8, 16, 48], [2**k for k in range(14)]]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_largest_that_fits_is_found(sizes: list[int]) -> None:
    for limit in (0, *sizes, 10_000):
        asked: list[int] = []

        def fits(rows: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(rows)
            return rows <= limit

        assert largest_fitting(sizes, fits) == max((s for s in sizes if s <= limit), default=None)
        assert len(asked) == len(set(asked)) <= 4


@pytest.mark.parametrize("sizes", SIZES)
def test_the_largest_peak_below_a_limit_is_found(sizes: list[int]) -> None:
    """Of a floor and two lines; the last size is 100 lower: nothing is accumulated there."""

    def true_peak(rows: int) -> int:
        return max(300, 200 + 10 * rows, 25 * rows) - (100 if rows == sizes[-1] else 0)

    for limit in (199, 299, *(true_peak(s) + d for s in sizes for d in (-1, 0, 1)), 10**9):
        asked: list[int] = []

        def peak(rows: int, asked: list[int] = asked) -> int:
            asked.append(rows)
            return true_peak(rows)

        found = largest_below(sizes, peak, limit, floor=150)
        fitting = [s for s in sizes if true_peak(s) <= limit]
        assert found == (max(fitting) if sizes[0] in fitting else None)
        assert len(asked) == len(set(asked)) <= 6


@pytest.mark.parametrize(("mode", "expected"), [("bf16", "varlen"), ("fp32", "sdpa")])
def test_flex_is_planned_on_a_gpu_as_what_runs_uncompiled(
    make_recipe: Callable[..., Recipe], mode: Mode, expected: str
) -> None:
    """FlexAttention exists compiled only, and a simulation runs eagerly."""
    simulation = Simulation.__new__(Simulation)
    simulation.recipe = make_recipe("attention.kernel=flex", mode=mode, device_type="cuda")
    assert simulation._executed(stands_in=False).attention.kernel == expected
