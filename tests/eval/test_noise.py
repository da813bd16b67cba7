"""The leaderboard's test keeps to its error, and finds what it is predicted to find: by simulation of normal scores."""

import itertools
import statistics

import numpy as np
import pytest
from scipy.stats import ttest_ind

from eval.report.noise import NOISE, POWER, adjusted, interval, p_values, power, seeds_needed

DRAWS = 6_000
SIZES = (2, 3, 4, 5, 7, 10)


def _p_values(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of many groups [draws, runs] at once; the first ones as `p_values` has them."""
    found = np.maximum(
        *(ttest_ind(one, other, axis=1, equal_var=equal).pvalue for equal in (True, False))
    )
    pairs = p_values([*one[:5].tolist(), *other[:5].tolist()])
    assert pairs[range(5), range(5, 10)] == pytest.approx(found[:5]) and np.array_equal(
        pairs, pairs.T, equal_nan=True
    )
    return np.asarray(found)


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_equal_recipes_are_called_different_no_more_often_than_is_said(spread: float) -> None:
    """Also where the spreads are not one, but for very few runs against many."""
    random = np.random.default_rng(0)
    for few, many in itertools.product(SIZES, repeat=2):
        one, other = (
            spread * random.standard_normal((DRAWS, few)),
            random.standard_normal((DRAWS, many)),
        )
        share = (_p_values(one, other) < NOISE).mean()
        assert share < (0.057 if spread == 1 else 0.09 if few == 2 else 0.07), (few, many)


@pytest.mark.parametrize(("most", "share"), [(5, 0.08), (10, 0.14)])
def test_seeds_added_until_p_is_small_find_too_much(most: int, share: float) -> None:
    """As docs/rules.md says, of equal recipes with three runs each to begin with."""
    one, other = np.random.default_rng(3).standard_normal((2, DRAWS, most))
    found = [_p_values(one[:, :count], other[:, :count]) < NOISE for count in range(3, most + 1)]
    assert np.any(found, axis=0).mean() == pytest.approx(share, abs=0.01)


def test_a_single_run_is_held_against_the_spread_of_the_others() -> None:
    random = np.random.default_rng(1)
    found = [
        p_values([group[:1], group[1:]])[0, 1]
        for group in random.standard_normal((1000, 5)).tolist()
    ]
    assert 0.03 < np.mean([p < NOISE for p in found]) < 0.07


def test_groups_without_a_spread_have_no_p_value() -> None:
    found = p_values([[70.0], [71.0], [70.0, 70.0], [71.0, 71.0], [], [70.0, 71.0]])
    assert np.isnan(found[:5, :5]).all() and np.isfinite(found[5]).tolist() == [True] * 4 + [
        False,
        True,
    ]


@pytest.mark.parametrize("effect", [1.5, 2.0, 3.0])
def test_a_planted_gain_is_found_with_the_predicted_seeds_in_the_predicted_share(
    effect: float,
) -> None:
    seeds = seeds_needed(effect)
    assert seeds is not None
    random = np.random.default_rng(2)
    for count in (seeds - 1, seeds):
        one, other = random.standard_normal((2, DRAWS, count))
        share = (_p_values(one + effect, other) < NOISE).mean()
        assert share == pytest.approx(power(effect, count), abs=0.015)
    assert power(effect, seeds - 1) < POWER <= power(effect, seeds)


def test_a_gain_that_no_one_would_wait_for_has_no_number_of_seeds() -> None:
    assert seeds_needed(2.0) == 7 and seeds_needed(0.0) is None


def test_looking_at_many_pairs_is_paid_for() -> None:
    for found, paid in (
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.9, 0.5], [1.0, 1.0]),
        ([], []),
    ):
        assert adjusted(np.array(found)) == pytest.approx(paid)


def test_the_interval_holds_the_mean_as_often_as_is_said() -> None:
    draws = np.random.default_rng(3).standard_normal((2000, 3)).tolist()
    ends = [interval(values) for values in draws]
    assert 0.93 < statistics.fmean(low < 0 < high for low, high in filter(None, ends)) < 0.97
    assert interval([70.0]) is None
