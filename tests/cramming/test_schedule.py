"""Schedules: bounded, continuous, with the promised start, peak and end, whatever the unit of the budget."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest

from cramming.schedule import SHAPES, UNUSED, ScheduleConfig, learning_rate_factor, ramp_step, sequences_per_step

BASE = ScheduleConfig(
    "wsd", warmup=0.05, decay=0.4, decay_shape="linear", start=0.0, final=0.0, batch_start=1.0, batch_ramp=0.0
)
GRID = [i / 2000 for i in range(2001)]


def config(**changes: Any) -> ScheduleConfig:
    return dataclasses.replace(BASE, **changes)


VARIANTS = [
    config(
        **{
            "name": name,
            "warmup": warmup,
            "decay": decay,
            "decay_shape": shape,
            "start": start,
            "final": final,
            **UNUSED[name],
        }
    )
    for name in SHAPES
    for warmup in (0.0, 0.05, 0.3)
    for decay in (0.1, 0.3, 0.7)
    for shape in ("linear", "sqrt")
    for start, final in ((0.0, 0.0), (0.25, 0.1), (1.0, 1.0))
]


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name, unused in UNUSED.items() for setting in unused]
)
def test_a_setting_that_a_shape_does_not_look_at_is_refused(name: str, setting: str) -> None:
    value = "sqrt" if setting == "decay_shape" else 0.3
    with pytest.raises(ValueError, match=f"{setting}={value} does nothing with name={name}; choose .* schedule={name}"):
        config(name=name, **{**UNUSED[name], setting: value})


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_shape_stays_between_its_ends_and_the_peak(name: str) -> None:
    for variant in (v for v in VARIANTS if v.name == name):
        low = min(variant.start, variant.final)
        for progress in GRID:
            factor = learning_rate_factor(variant, progress)
            assert low - 1e-12 <= factor <= 1.0 + 1e-12, (variant, progress)
            assert factor >= 0.0, (variant, progress)  # exactly: an optimizer may refuse -1e-16


@pytest.mark.parametrize("name", list(SHAPES))
def test_start_peak_and_end(name: str) -> None:
    for variant in (v for v in VARIANTS if v.name == name):
        values = [learning_rate_factor(variant, p) for p in GRID]
        rises = variant.warmup > 0 or name == "triangle"
        assert values[0] == pytest.approx(variant.start if rises else 1.0)
        assert max(values) == pytest.approx(1.0)
        assert values[-1] == pytest.approx(1.0 if name == "constant" else variant.final, abs=1e-9)


@pytest.mark.parametrize("name", list(SHAPES))
def test_one_rise_then_one_fall(name: str) -> None:
    for variant in (v for v in VARIANTS if v.name == name):
        values = [learning_rate_factor(variant, p) for p in GRID]
        peak = values.index(max(values))
        assert all(a <= b + 1e-12 for a, b in pairwise(values[: peak + 1]))
        assert all(a >= b - 1e-12 for a, b in pairwise(values[peak:]))


@pytest.mark.parametrize("name", list(SHAPES))
def test_continuous(name: str) -> None:
    """No jump: the steepest shape here (sqrt decay over 10 %) moves by sqrt(step / 0.1) in one step of the grid."""
    bound = math.sqrt(1 / 2000 / 0.1) + 1e-9
    for variant in (v for v in VARIANTS if v.name == name):
        values = [learning_rate_factor(variant, p) for p in GRID]
        assert max(abs(a - b) for a, b in pairwise(values)) <= bound, variant


def test_progress_outside_the_budget_counts_as_its_ends() -> None:
    for variant in VARIANTS:
        assert learning_rate_factor(variant, -1.0) == learning_rate_factor(variant, 0.0)
        assert learning_rate_factor(variant, 2.0) == learning_rate_factor(variant, 1.0)


def test_no_warmup_and_no_decay_are_flat() -> None:
    flat = config(warmup=0.0, decay=0.0)
    assert {learning_rate_factor(flat, p) for p in GRID} == {1.0}


def test_known_points() -> None:
    triangle = config(name="triangle", warmup=0.0, decay=0.25, start=0.25)
    assert learning_rate_factor(triangle, 0.375) == pytest.approx(0.625)
    assert learning_rate_factor(triangle, 0.75) == pytest.approx(1.0)
    assert learning_rate_factor(triangle, 0.875) == pytest.approx(0.5)
    assert learning_rate_factor(config(name="cosine", warmup=0.0, decay=0.0), 0.5) == pytest.approx(0.5)
    assert learning_rate_factor(config(decay_shape="sqrt"), 0.7) == pytest.approx(0.5)


@pytest.mark.parametrize("size", [2, 7, 32, 96, 1000, 8192])
@pytest.mark.parametrize(("start", "ramp"), [(0.1, 0.6), (0.125, 0.3), (0.5, 1.0), (0.8, 0.5)])
def test_batch_ramp_grows_from_its_start_to_the_full_batch(size: int, start: float, ramp: float) -> None:
    ramped = config(batch_start=start, batch_ramp=ramp)
    if start * size < 1 or round(start * size) == size:
        with pytest.raises(ValueError, match=rf"batch_start={start} of {size} sequences is "):
            ramp_step(ramped, size)
        return
    step = ramp_step(ramped, size)
    assert size % step == 0 and step <= start * size + 1e-9
    sizes = [sequences_per_step(ramped, p, size) for p in GRID]
    for progress, found in zip(GRID, sizes):
        line = size * min(1.0, start + (1 - start) * progress / ramp)
        assert found % step == 0
        assert abs(found - line) <= step / 2 + 1e-6, progress
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == size


@pytest.mark.parametrize("size", [1, 7, 8192])
def test_without_a_ramp_every_batch_is_the_full_one(size: int) -> None:
    assert ramp_step(BASE, size) == size
    assert {sequences_per_step(BASE, p, size) for p in GRID} == {size}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"warmup": -0.1}, "warmup=-0.1"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"final": 2.0}, "final=2.0"),
        ({"batch_start": 0.0}, "batch_start=0.0"),
        ({"batch_start": 0.1}, "batch_start=0.1 and batch_ramp=0.0: neither does anything without the other"),
        ({"batch_ramp": 0.3}, "batch_start=1.0 and batch_ramp=0.3: neither does anything without the other"),
        ({"batch_ramp": 1.1}, "batch_ramp=1.1"),
        ({"warmup": 0.7, "decay": 0.7}, "warmup=0.7 and decay=0.7"),
    ],
)
def test_values_that_make_no_schedule(changes: dict[str, float], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        config(**changes)
