"""The test keeps its error, finds what it says it finds, and predicts how long that takes."""

import math

import numpy as np
import pytest
from scipy import stats

from eval.duel.sequential_test import SequentialTest, boundaries

ERROR, PAIRS = 0.05, 8
TEST = SequentialTest(PAIRS, ERROR, delta=0.0)


def ends_with_a_winner(values: np.ndarray, test: SequentialTest = TEST) -> tuple[int, bool]:
    """After how many pairs a duel over these differences ends, and whether with a winner."""
    looks = [
        (k, test.verdict(*test.interval(values[:k].tolist()))) for k in range(1, len(values) + 1)
    ]
    end, verdict = next((look for look in looks if look[1] != "undecided"), looks[-1])
    return end, verdict in ("win", "loss")


@pytest.mark.parametrize(("spread", "first_look"), [(1e-4, 3), (1.0, 5), (50.0, 8)])
def test_of_equals_at_most_the_error_ends_with_a_winner(spread: float, first_look: int) -> None:
    """2,000 duels, other draws than those that the boundaries were made from; 3 standard errors above 5 %."""
    draws = np.random.default_rng(7).normal(0.0, spread, (2000, PAIRS))
    test = SequentialTest(PAIRS, ERROR, 0.0, first_look)
    winners = np.mean([ends_with_a_winner(row, test)[1] for row in draws])
    assert ERROR / 2 < winners < ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / len(draws))


@pytest.mark.parametrize("effect", [1.5, 2.0, 3.0])
def test_a_planted_effect_is_found_with_the_pairs_that_are_predicted(effect: float) -> None:
    test = SequentialTest(12, ERROR, 0.0)
    predicted = test.pairs_needed(effect)
    assert predicted is not None and predicted <= 12
    draws = np.random.default_rng(8).normal(-effect, 1.0, (1000, 12))
    ends = [ends_with_a_winner(row, test) for row in draws]
    assert np.mean([won and count <= predicted for count, won in ends]) > 0.88


def test_beyond_the_plan_the_pairs_are_those_of_a_single_test() -> None:
    needed = {SequentialTest(pairs, ERROR, 0.0, pairs).pairs_needed(0.8) for pairs in (3, 8)}
    draws = np.random.default_rng(6).normal(0.8, 1.0, (2000, needed.copy().pop()))
    power = np.mean(stats.ttest_1samp(draws, 0.0, axis=1).pvalue < ERROR)
    assert len(needed) == 1 and 0.87 < power < 0.94


def test_all_intervals_of_a_duel_hold_the_true_mean_at_once() -> None:
    true, missed = 0.3, 0
    for row in np.random.default_rng(9).normal(true, 1.0, (1000, PAIRS)):
        ends = [TEST.interval(row[:k].tolist()) for k in range(3, PAIRS + 1)]
        missed += any(not low <= true <= high for low, high in ends)
    assert missed / 1000 < ERROR + 3 * math.sqrt(ERROR * (1 - ERROR) / 1000)


def test_p_is_the_error_at_which_the_duel_would_just_have_been_decided() -> None:
    values = [-0.9, -1.2, -0.7, -1.4]
    p = TEST.p_value(values)
    assert 0 < p < 1
    assert SequentialTest(PAIRS, p * 1.05, 0.0).look(values).verdict == "win"
    assert SequentialTest(PAIRS, p / 1.05, 0.0).look(values).verdict == "undecided"


def test_p_of_a_narrow_win_is_not_above_the_error() -> None:
    mean = 1.0001 * boundaries(PAIRS, ERROR, 3)[2] / math.sqrt(3)
    look = TEST.look([-mean - 1.0, -mean, -mean + 1.0])
    assert look.verdict == "win" and look.p <= ERROR


@pytest.mark.parametrize(
    ("values", "delta", "says"),
    [
        ([0.001, -0.001, 0.002, 0.0], 0.01, "equivalent"),
        ([0.5, 0.51, 0.5], 0.01, "loss"),
        ([-0.5, -0.51, -0.5], 0.01, "win"),
        ([0.0, 0.0, 0.0], 0.01, "undecided"),  # no spread: coarse scores that agree by chance
        ([-0.5, -0.5, -0.5], 0.01, "undecided"),
        ([0.7 - 0.6, 0.8 - 0.7, 0.9 - 0.8], 0.01, "undecided"),  # nor is rounding a spread
        ([1.4e-14, 0.0, -1.4e-14], 0.01, "undecided"),  # also around nothing
        ([0.5, -0.5, 0.1], 0.01, "undecided"),
        ([-0.5, -0.5], 0.01, "undecided"),
    ],
)
def test_verdicts(values: list[float], delta: float, says: str) -> None:
    look = SequentialTest(PAIRS, ERROR, delta).look(values)
    assert look.verdict == says and look.over == (says != "undecided")


@pytest.mark.parametrize("first_look", [3, 5])
def test_fewer_pairs_are_stricter_at_first_and_never_before_the_first_look(first_look: int) -> None:
    limits = boundaries(PAIRS, ERROR, first_look)
    assert limits[: first_look - 1] == (math.inf,) * (first_look - 1)
    assert list(limits[first_look - 1 :]) == sorted(limits[first_look - 1 :], reverse=True)
