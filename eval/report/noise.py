"""Whether two recipes differ, from a few runs of each: the test, intervals, and the number of seeds that would decide.

Scores of runs that differ in their seed alone are taken for normal. Two groups of runs are compared by Student's
t-test, which is exact where they have one spread, as groups of the same recipe have, and by Welch's, which does not
need that; the larger p-value counts. Alone, Welch's calls 10 % of equal groups of 2 and 10 runs different at 5 %, and
Student's 33 % if the smaller group's spread is three times the larger's; together they stay at or below 5 % for the
same recipe, and below 9 % for such spreads (tests/eval/test_noise.py). A single run against several has Student's
alone: it is taken to have their spread. Tests of ranks and permutations find nothing below four runs each: of three and
three the clearest order has p = 0.1.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, nctdtr, stdtr, stdtrit

from cramming.scores import spread
from eval.duel.sequential_test import ROUNDING

NOISE = 0.05  # a difference whose p-value is not below this is noise
POWER = 0.9  # of predictions, as for duels
MOST_SEEDS = 200  # beyond which nobody would go on
STRATA = (np.arange(64) + 0.5) / 64  # of the distribution that `power` averages over


def p_values(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """[group, group]: two-sided p-values for the difference of the means of any two groups of runs.

    NaN where there is no spread to go by: single runs, runs that all agree (scores are coarse, and a few that agree
    say nothing about the next), or a group without any.
    """
    size = np.array([len(group) for group in groups], dtype=float)
    mean = np.array([statistics.fmean(group) if group else math.nan for group in groups])
    square = np.array(
        [sum((value - middle) ** 2 for value in group) for group, middle in zip(groups, mean)]
    )
    agrees = np.array([_agree(group) for group in groups], dtype=bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Squared error of the difference and degrees of freedom: Student's, then Welch's, which a single run has not.
        freedom = _each_pair(size) - 2
        student = _each_pair(square) / freedom * _each_pair(1 / size)
        error = square / size / (size - 1)
        tests = [
            (student, freedom),
            (_each_pair(error), _each_pair(error) ** 2 / _each_pair(error**2 / (size - 1))),
        ]
        difference = np.abs(np.subtract.outer(mean, mean))
        found = np.fmax(
            *(2 * stdtr(degrees, -difference / np.sqrt(squared)) for squared, degrees in tests)
        )
    found[np.logical_and.outer(agrees, agrees)] = math.nan
    return np.asarray(found)


def _agree(values: Sequence[float]) -> bool:
    """Whether there is no spread but that of rounding."""
    return len(values) < 2 or max(values) - min(values) <= ROUNDING


def _each_pair(values: np.ndarray) -> np.ndarray:
    return np.add.outer(values, values)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Bounds of the mean of all runs that a recipe could have, by Student's t, at 95 %; None without a spread."""
    if _agree(values):
        return None
    low, high = spread(values)["mean_ci95"]
    return low, high


def adjusted(p_values: np.ndarray) -> np.ndarray:
    """The p-values for looking at all of them: the probability of any false one stays below the error (Holm 1979)."""
    order, found = np.argsort(p_values), np.empty(len(p_values))
    found[order] = np.minimum(
        np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1)), 1.0
    )
    return found


def power(effect: float, seeds: int, error: float = NOISE) -> float:
    """Probability that `p_value` is below `error` for so many runs each, of one spread, with means that are `effect`
    standard deviations apart.

    With groups of one size both tests have one statistic, a noncentral t, and Welch's, with fewer degrees of freedom,
    decides. Those depend on the share that one group has of the sum of both variances, which has a beta distribution
    and is independent of the sum: the power is its mean over that.
    """
    share = betaincinv((seeds - 1) / 2, (seeds - 1) / 2, STRATA)
    limits = -stdtrit((seeds - 1) / (share**2 + (1 - share) ** 2), error / 2)
    shift, freedom = abs(effect) * math.sqrt(seeds / 2), 2 * seeds - 2
    return float((1 - nctdtr(freedom, shift, limits) + nctdtr(freedom, shift, -limits)).mean())


def seeds_needed(effect: float, error: float = NOISE) -> int | None:
    """So many runs each find an effect of so many standard deviations with a probability of `POWER`; None above
    `MOST_SEEDS`."""
    counts = range(2, MOST_SEEDS + 1)
    place = bisect_left(counts, POWER, key=lambda seeds: power(effect, seeds, error))
    return counts[place] if place < len(counts) else None
