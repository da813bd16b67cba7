"""The test that decides a duel: repeated confidence intervals for the mean of paired differences.

After each pair an interval `mean ± c_k * sd / sqrt(k)` is drawn. With probability 1 - error all intervals of a duel
contain the true mean, so a duel may stop at any of them, for a win, a loss or an equivalence (Jennison and Turnbull
1989). The share of the error that a look may spend is set beforehand (Lan and DeMets 1983; the power family of Kim and
DeMets 1987). For normal differences the t-statistics of all looks have one joint distribution, whatever the standard
deviation: c_k are its quantiles, simulated with a fixed seed. Differences that are far from normal (two values, one
long tail) are decided wrongly more often after few pairs: docs/log.md, 2026-11-23. A later first look helps.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

Verdict = Literal["win", "loss", "equivalent", "undecided"]
RULE = ("pairs", "error", "delta", "first_look")  # settings of a test that the caller chooses
MIN_PAIRS = 3  # pairs before a first look: two tell next to nothing about the standard deviation
# Exponent of the spending function: with 1 large effects are decided a little earlier, with 2 small ones are detected a
# little more often.
SPENDING_POWER = 1.5
PATHS = 200_000  # simulated duels
ROUNDING = 1e-9  # nats, bits or points: closer numbers are equal
SMALLEST_P = 1e-3  # smaller p-values would be counts of too few simulated paths
POWER = 0.9  # probability of a decision for which `pairs_needed` is computed

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """State of a duel after `pairs` differences, candidate minus base: a negative mean is a win if lower is better.

    `low` and `high` bound the repeated confidence interval. `p` is the smallest error at which the duel would have been
    decided by now. `pairs_needed` is the total number of pairs with which the duel is decided with a probability of
    0.9, if the effect is the present one (approximate above the planned number, None without an effect). `over` is true
    if the duel ends here.
    """

    pairs: int
    mean: float
    sd: float
    low: float
    high: float
    p: float
    verdict: Verdict
    pairs_needed: int | None
    over: bool


@dataclass(frozen=True)
class SequentialTest:
    """Rule of one duel, set before its first pair.

    `pairs` is the maximum, `error` the probability of any wrong verdict, `delta` the equivalence margin in the unit of
    the differences. There is no verdict before `first_look` pairs.
    """

    pairs: int
    error: float
    delta: float
    first_look: int = MIN_PAIRS
    higher_is_better: bool = False

    def look(self, differences: Sequence[float]) -> Look:
        """Return the state of the duel after these differences."""
        count = len(differences)
        mean = statistics.fmean(differences) if count else 0.0
        sd = _sd(differences)
        low, high = self.interval(differences)
        needed: int | None = None
        if count >= self.first_look and sd:
            needed = self.pairs_needed(abs(mean) / sd)
        verdict = self.verdict(low, high)
        over = verdict != "undecided" or count >= self.pairs
        return Look(count, mean, sd, low, high, self.p_value(differences), verdict, needed, over)

    def interval(self, differences: Sequence[float]) -> tuple[float, float]:
        """Return the repeated confidence interval of the mean after these differences.

        It is infinite before the first look, and without any variance: scores are coarse, and three equal ones say
        nothing about the next.
        """
        count, sd = len(differences), _sd(differences)
        if count < self.first_look or not sd:
            return -math.inf, math.inf
        boundary = boundaries(self.pairs, self.error, self.first_look)[count - 1]
        half = boundary * sd / math.sqrt(count)
        mean = statistics.fmean(differences)
        return mean - half, mean + half

    def verdict(self, low: float, high: float) -> Verdict:
        """Return the verdict of an interval."""
        if high < 0:
            return "loss" if self.higher_is_better else "win"
        if low > 0:
            return "win" if self.higher_is_better else "loss"
        return "equivalent" if -self.delta <= low and high <= self.delta else "undecided"

    def p_value(self, differences: Sequence[float]) -> float:
        """Return the smallest error at which a look up to now would have excluded 0, within 2 % of its value.

        It is at least `SMALLEST_P`, and at most the test's error if one of the looks excluded 0 at that error.
        """

        def excludes_zero(error: float) -> bool:
            test = replace(self, error=error)
            for count in range(self.first_look, len(differences) + 1):
                low, high = test.interval(differences[:count])
                if low > 0 or high < 0:
                    return True
            return False

        if not excludes_zero(0.999):
            return 1.0
        if excludes_zero(SMALLEST_P):
            return SMALLEST_P
        too_small, enough = SMALLEST_P, 1.0
        error = (
            self.error
        )  # tried first, so that the value lies on the side of it that the verdict says
        while True:
            if excludes_zero(error):
                enough = error
            else:
                too_small = error
            if enough / too_small <= 1.02:
                return enough
            error = math.sqrt(too_small * enough)

    def pairs_needed(self, effect: float) -> int | None:
        """Return the pairs after which a mean of `effect` standard deviations is detected with probability `POWER`.

        Up to the planned number of pairs it is simulated. A larger number is that of a single test with all pairs.
        """
        if not effect:
            return None
        limits = boundaries(self.pairs, self.error, self.first_look)
        means, sds = _null_paths(self.pairs)
        t = (means + effect) * np.sqrt(np.arange(1, self.pairs + 1)) / sds
        power_by_pair = np.maximum.accumulate(np.abs(t) > np.array(limits), axis=1).mean(axis=0)
        enough = np.flatnonzero(power_by_pair >= POWER)
        normal = statistics.NormalDist()
        quantiles = normal.inv_cdf(1 - self.error / 2) + normal.inv_cdf(POWER)
        single = math.ceil((quantiles / effect) ** 2) + 2
        return int(enough[0]) + 1 if len(enough) else max(self.pairs + 1, single)


def _sd(differences: Sequence[float]) -> float:
    """Return the standard deviation: infinite for fewer than two differences, 0 if it is no more than rounding."""
    if len(differences) < 2:
        return math.inf
    sd = statistics.stdev(differences)
    return sd if sd > ROUNDING else 0.0


@functools.lru_cache(maxsize=256)
def boundaries(pairs: int, error: float, first_look: int) -> tuple[float, ...]:
    """Return c_1 ... c_pairs: the |t| that each look must exceed, infinite before the first look."""
    means, sds = _null_paths(pairs)
    limits = [math.inf] * (first_look - 1)
    alive, spent = np.ones(len(means), bool), 0
    for k in range(first_look, pairs + 1):
        t = np.abs(means[alive, k - 1]) * math.sqrt(k) / sds[alive, k - 1]
        may_cross = round(error * (k / pairs) ** SPENDING_POWER * len(means)) - spent
        limit = math.inf
        if 0 < may_cross < len(t):
            limit = float(np.partition(t, -may_cross - 1)[-may_cross - 1])
        alive[np.flatnonzero(alive)[t > limit]] = False
        spent += int((t > limit).sum())
        limits.append(limit)
    return tuple(limits)


@functools.lru_cache(maxsize=1)
def _null_paths(pairs: int) -> tuple[Array, Array]:
    """Return running means and standard deviations of simulated duels between equals, [PATHS, pairs] each."""
    values = np.random.default_rng(0).standard_normal((PATHS, pairs))
    counts = np.arange(1, pairs + 1)
    means = values.cumsum(axis=1) / counts
    squares = np.maximum((values**2).cumsum(axis=1) - counts * means**2, 1e-30)
    return means, np.sqrt(squares / np.maximum(counts - 1, 1))
