"""Schedules: bounded, continuous, with the promised start, peak and end, whatever the unit of the budget."""

import math
from itertools import pairwise, product
from typing import Any

import pytest

from cramming.schedule import (
    SCHEDULES,
    BatchRamp,
    Schedule,
    learning_rate_factor,
    ramp_step,
    sequences_per_step,
)

GRID = [i / 2000 for i in range(2001)]
RAMPS = [
    BatchRamp(start=start, until=until)
    for start, until in ((0.1, 0.6), (0.125, 0.3), (0.5, 1.0), (0.8, 0.5))
]


def variants(name: str) -> list[Schedule]:
    """The schedule with all combinations of these values of its settings."""
    values: dict[str, tuple[Any, ...]] = {
        "warmup": (0.0, 0.05, 0.3),
        "decay": (0.1, 0.3, 0.7),
        "decay_shape": ("linear", "sqrt"),
        "start": (0.0, 0.25, 1.0),
        "final": (0.0, 0.1, 1.0),
    }
    fields = [field for field in SCHEDULES[name].model_fields if field != "name"]
    return [
        SCHEDULES[name](**dict(zip(fields, chosen)))
        for chosen in product(*(values[setting] for setting in fields))
    ]


ONE_PEAK = ("constant", "cosine", "linear", "triangle", "wsd")


@pytest.mark.parametrize("name", ONE_PEAK)
def test_every_shape_rises_once_and_falls_once_between_its_ends_and_the_peak_without_a_jump(
    name: str,
) -> None:
    """The steepest shape here, sqrt decay over 10 %, moves by sqrt(step / 0.1) in one step of the grid."""
    bound = math.sqrt(1 / 2000 / 0.1) + 1e-9
    for variant in variants(name):
        values = [learning_rate_factor(variant, p) for p in GRID]
        rises, final = getattr(variant, "warmup", 1.0) > 0, getattr(variant, "final", 1.0)
        assert values[0] == pytest.approx(variant.start if rises else 1.0)
        assert max(values) == pytest.approx(1.0) and values[-1] == pytest.approx(final, abs=1e-9)
        assert min(values) >= max(
            0.0, min(variant.start, final) - 1e-12
        )  # exactly: an optimizer may refuse -1e-16
        peak, steps = values.index(max(values)), [b - a for a, b in pairwise(values)]
        assert min(steps[:peak], default=0.0) >= -1e-12 and max(steps[peak:], default=0.0) <= 1e-12
        assert max(map(abs, steps)) <= bound, variant
        assert [learning_rate_factor(variant, p) for p in (-1.0, 2.0)] == [values[0], values[-1]]


def test_known_points() -> None:
    triangle = SCHEDULES["triangle"](start=0.25, decay=0.25, final=0.0)
    assert learning_rate_factor(triangle, 0.375) == pytest.approx(0.625)
    assert learning_rate_factor(triangle, 0.75) == pytest.approx(1.0)
    assert learning_rate_factor(triangle, 0.875) == pytest.approx(0.5)
    cosine = SCHEDULES["cosine"](start=0.0, warmup=0.0, final=0.0)
    assert learning_rate_factor(cosine, 0.5) == pytest.approx(0.5)
    wsd = SCHEDULES["wsd"](start=0.0, warmup=0.05, decay=0.4, decay_shape="sqrt", final=0.0)
    assert learning_rate_factor(wsd, 0.7) == pytest.approx(0.5)
    flat = SCHEDULES["wsd"](start=0.0, warmup=0.0, decay=0.0, decay_shape="linear", final=0.0)
    assert {learning_rate_factor(flat, p) for p in GRID} == {1.0}


@pytest.mark.parametrize("size", [2, 7, 32, 96, 1000, 8192])
@pytest.mark.parametrize("ramp", RAMPS)
def test_batch_ramp_grows_from_its_start_to_the_full_batch(size: int, ramp: BatchRamp) -> None:
    if ramp.start * size < 1 or round(ramp.start * size) == size:
        with pytest.raises(ValueError, match=rf"batch_ramp.start={ramp.start}: "):
            ramp_step(ramp, size)
        return
    step = ramp_step(ramp, size)
    assert size % step == 0 and step <= ramp.start * size + 1e-9
    sizes = [sequences_per_step(ramp, p, size) for p in GRID]
    for progress, batch in zip(GRID, sizes):
        line = size * min(1.0, ramp.start + (1 - ramp.start) * progress / ramp.until)
        assert batch % step == 0
        assert abs(batch - line) <= step / 2 + 1e-6, progress
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == size


@pytest.mark.parametrize("size", [1, 7, 8192])
def test_without_a_ramp_every_batch_is_the_full_one(size: int) -> None:
    assert ramp_step(None, size) == size
    assert {sequences_per_step(None, p, size) for p in GRID} == {size}
