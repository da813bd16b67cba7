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

NOISE = 0.05  # a difference whose p-value is not below this is noise
POWER = 0.9  # of predictions, as for duels
MOST_SEEDS = 200  # beyond which nobody would go on
STRATA = (np.arange(64) + 0.5) / 64  # of the distribution that `power` averages over


def p_value(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Two-sided, for the difference of the means of two groups of runs.

    None where there is no spread to go by: single runs, runs that all agree (scores are coarse, and a few that agree
    say nothing about the next), or a group without any.
    """
    from scipy.special import stdtr  # takes a second, as all of SciPy

    groups = (one, other)
    if not all(groups) or all(len(set(group)) == 1 for group in groups):
        return None
    sizes, means = [len(group) for group in groups], [statistics.fmean(group) for group in groups]
    squares = [sum((value - mean) ** 2 for value in group) for group, mean in zip(groups, means)]
    freedom = sum(sizes) - 2
    # Squared error of the difference and degrees of freedom: Student's, then Welch's.
    tests: list[tuple[float, float]] = [(sum(squares) / freedom * sum(1 / size for size in sizes), freedom)]
    if min(sizes) > 1:
        errors = [square / size / (size - 1) for square, size in zip(squares, sizes)]
        tests.append((sum(errors), sum(errors) ** 2 / sum(e**2 / (size - 1) for e, size in zip(errors, sizes))))
    difference = abs(means[0] - means[1])
    return max(float(2 * stdtr(degrees, -difference / math.sqrt(error))) for error, degrees in tests)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Bounds of the mean of all runs that a recipe could have, by Student's t, at `NOISE`; None without a spread."""
    from scipy.stats import t

    if len(set(values)) < 2:
        return None
    half = float(t.isf(NOISE / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def adjusted(p_values: Sequence[float]) -> list[float]:
    """The p-values for looking at all of them: the probability of any false one stays below the error (Holm 1979)."""
    found, largest = [0.0] * len(p_values), 0.0
    for done, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - done)))
        found[place] = largest
    return found


def power(effect: float, seeds: int, error: float = NOISE) -> float:
    """Probability that `p_value` is below `error` for so many runs each, of one spread, with means that are `effect`
    standard deviations apart.

    With groups of one size both tests have one statistic, a noncentral t, and Welch's, with fewer degrees of freedom,
    decides. Those depend on the share that one group has of the sum of both variances, which has a beta distribution
    and is independent of the sum: the power is its mean over that.
    """
    from scipy.stats import beta, nct, t

    share = beta.ppf(STRATA, (seeds - 1) / 2, (seeds - 1) / 2)
    limits = t.isf(error / 2, (seeds - 1) / (share**2 + (1 - share) ** 2))
    shift, freedom = abs(effect) * math.sqrt(seeds / 2), 2 * seeds - 2
    return float((nct.sf(limits, freedom, shift) + nct.cdf(-limits, freedom, shift)).mean())


def seeds_needed(effect: float, error: float = NOISE) -> int | None:
    """So many runs each find an effect of so many standard deviations with a probability of `POWER`; None above
    `MOST_SEEDS`."""
    counts = range(2, MOST_SEEDS + 1)
    place = bisect_left(counts, POWER, key=lambda seeds: power(effect, seeds, error))
    return counts[place] if place < len(counts) else None
