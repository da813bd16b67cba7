"""The rule of the gate: it lets through what learns the same, and its tolerance is what rounding makes it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from cramming.bench import gate
from cramming.bench.curves import REFERENCE
from cramming.bench.gate import Floor
from cramming.bench.tricks import COARSE, SAME, TRICKS

PLAIN = replace(REFERENCE, rounding=SAME)


def test_a_trick_that_changes_no_number_is_at_no_distance(small: Any) -> None:
    (trick,) = (trick for trick in TRICKS if trick.name == "checkpoint every 2nd")
    verdict = small.sound(trick)
    assert verdict.passed and verdict.distance == 0 and verdict.fall > gate.MIN_FALL


@pytest.mark.parametrize("rounding", [SAME, COARSE])
def test_another_twin_passes(small: Any, rounding: float) -> None:
    twin = moved(small, rounding)
    assert gate.judge(replace(PLAIN, rounding=rounding), small.reference, twin, small.floor(rounding)).passed


def test_fp32_is_not_allowed_what_bf16_is(small: Any) -> None:
    assert not gate.judge(PLAIN, small.reference, moved(small, COARSE), small.floor(SAME)).passed


def moved(small: Any, rounding: float) -> list[float]:
    """The curve of a fourth twin."""
    (curve,) = small.losses([small.job(REFERENCE) | {"moved": (rounding, 4)}])
    assert isinstance(curve, list)
    return curve


def test_the_tolerance_never_falls_and_has_a_least() -> None:
    allowed = Floor(SAME, [[0.0, 1e-6, 1e-3, 0.02, 0.01], [0.0, 0.0, 2e-3, 0.01, 0.03]]).allowed()
    assert allowed == pytest.approx([6e-3, 0.06, 0.09, 0.09, 0.09])
    assert Floor(SAME, [[0.0] * 4]).allowed() == [gate.LEAST] * 4


def test_a_curve_that_is_not_finite_fails() -> None:
    curve = [3.0] * 20 + [2.0] * 20
    verdict = gate.judge(PLAIN, curve, [*curve[:-1], math.nan], Floor(SAME, [[0.0] * 4]))
    assert not verdict.passed and verdict.distance is None and verdict.at_step == 40


def test_a_reference_that_learns_nothing_proves_nothing() -> None:
    with pytest.raises(ValueError, match=r"fell by 0\.000"):
        gate.judge(PLAIN, [3.0] * 40, [3.0] * 40, Floor(SAME, [[0.0] * 4]))
