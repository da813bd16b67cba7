"""The leaderboard's test keeps to its error, and finds what it is predicted to find: by simulation of normal scores."""

import itertools
import statistics

import numpy as np
import pytest
from scipy.stats import ttest_ind

from eval.report.ranking import NOISE, POWER, adjust_holm, interval, p_values, power, seeds_needed

DRAWS = 6_000
SIZES = (2, 3, 4, 5, 7, 10)


def _simulated(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return p-values of many groups [draws, runs] at once, by the two tests that `p_values` takes."""
    student = ttest_ind(first, second, axis=1).pvalue
    welch = ttest_ind(first, second, axis=1, equal_var=False).pvalue
    return np.asarray(np.maximum(student, welch))


def test_p_values_are_the_larger_of_both_tests() -> None:
    random = np.random.default_rng(0)
    for smaller, many in itertools.product(SIZES, repeat=2):
        first, second = random.standard_normal((5, smaller)), random.standard_normal((5, many))
        p = p_values([*first.tolist(), *second.tolist()])
        assert np.diagonal(p[:5, 5:]) == pytest.approx(_simulated(first, second))
        assert np.array_equal(p, p.T, equal_nan=True)


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_equal_recipes_are_called_different_no_more_often_than_is_said(spread: float) -> None:
    """Also where the spreads are not one, but for very few runs against many."""
    random = np.random.default_rng(0)
    for smaller, many in itertools.product(SIZES, repeat=2):
        first = spread * random.standard_normal((DRAWS, smaller))
        share = (_simulated(first, random.standard_normal((DRAWS, many))) < NOISE).mean()
        limit = 0.057 if spread == 1 else 0.09 if smaller == 2 else 0.07
        assert share < limit, (smaller, many)


@pytest.mark.parametrize(("max_seeds", "share"), [(5, 0.08), (10, 0.14)])
def test_seeds_added_until_p_is_small_find_too_much(max_seeds: int, share: float) -> None:
    """Equal recipes start with three runs each, as on the page of rules."""
    first, second = np.random.default_rng(3).standard_normal((2, DRAWS, max_seeds))
    counts = range(3, max_seeds + 1)
    different = [_simulated(first[:, :count], second[:, :count]) < NOISE for count in counts]
    assert np.any(different, axis=0).mean() == pytest.approx(share, abs=0.01)


def test_a_single_run_is_held_against_the_spread_of_the_others() -> None:
    groups = np.random.default_rng(1).standard_normal((1000, 5)).tolist()
    p = [p_values([group[:1], group[1:]])[0, 1] for group in groups]
    assert 0.03 < np.mean(np.array(p) < NOISE) < 0.07


def test_groups_without_a_spread_have_no_p_value() -> None:
    p = p_values([[70.0], [71.0], [70.0, 70.0], [71.0, 71.0], [], [70.0, 71.0]])
    assert np.isnan(p[:5, :5]).all()
    assert np.isfinite(p[5]).tolist() == [True] * 4 + [False, True]


@pytest.mark.parametrize("effect", [1.5, 2.0, 3.0])
def test_a_planted_gain_is_found_in_about_the_predicted_share(effect: float) -> None:
    """Welch's test has fewer degrees of freedom than Student's, whose power is predicted."""
    seeds = seeds_needed(effect)
    assert seeds is not None and power(effect, seeds - 1) < POWER <= power(effect, seeds)
    first, second = np.random.default_rng(2).standard_normal((2, DRAWS, seeds))
    share = (_simulated(first + effect, second) < NOISE).mean()
    assert share == pytest.approx(power(effect, seeds), abs=0.04)


def test_an_effect_of_nothing_has_no_number_of_seeds() -> None:
    assert seeds_needed(0.0) is None


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]), ([0.9, 0.5], [1.0, 1.0]), ([], [])],
)
def test_looking_at_many_pairs_is_paid_for(p: list[float], adjusted: list[float]) -> None:
    assert adjust_holm(np.array(p)) == pytest.approx(adjusted)


def test_the_interval_holds_the_mean_as_often_as_is_said() -> None:
    draws = np.random.default_rng(3).standard_normal((2000, 3)).tolist()
    ends = [interval(values) for values in draws]
    assert 0.93 < statistics.fmean(low < 0 < high for low, high in filter(None, ends)) < 0.97
    assert interval([70.0]) is None
