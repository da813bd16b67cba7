"""Which entries of a track seeds tell apart: the tests, and the places that they leave.

Two groups of runs of one recipe each are compared by Student's and by Welch's t-test, and the larger p-value counts:
alone, Welch's calls 10 % of equal groups of 2 and 10 runs different at 5 %, and Student's 33 % if the smaller group's
spread is three times the larger's (tests/eval/test_ranking.py). P-values are adjusted for all pairs of a track (Holm
1979). An entry has every place that the others leave open (Mogstad, Romano, Shaikh and Wilhelm 2024).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cramming.scores import spread
from eval.duel.sequential_test import ROUNDING
from eval.report.entries import Entry, Identity

NOISE = 0.05  # largest p-value of a difference that is not noise
POWER = 0.9  # of the number of seeds that would decide
MAX_SEEDS = 200


@dataclass(frozen=True)
class RankedEntry:
    """Entry with its places, from `first` to `last`, and its comparison with the entry above it.

    `p` is adjusted for all pairs of the track. With `needed` seeds each the two would be told apart with a probability
    of 0.9, if difference and spread are those seen. `duel`: the verdict of a duel of the two.
    """

    entry: Entry
    first: int
    last: int
    p: float | None = None
    needed: int | None = None
    duel: str = ""

    @property
    def places(self) -> str:
        """Places such as `1` or `2–4`."""
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"

    @property
    def remarks(self) -> list[str]:
        """Interval of the mean, the comparison with the entry above, and what could be a selection."""
        remarks = []
        bounds = interval(self.entry.scores)
        if bounds:
            remarks.append(f"95 % interval {bounds[0]:.1f} to {bounds[1]:.1f}")
        if self.duel:
            remarks.append(f"{self.duel} in a duel with the row above")
        elif self.p is not None:
            remarks.append(f"p {self.p:.2g} to the row above")
        if self.needed:
            remarks.append(f"{self.needed} seeds each would decide")
        return remarks + self.entry.remarks


def rank_entries(
    entries: Sequence[Entry], verdicts: Mapping[tuple[Identity, Identity], str]
) -> list[RankedEntry]:
    """Return the entries of a track with their places, best first; `verdicts`: those of duels."""
    entries = sorted(entries, key=lambda entry: -entry.main)
    p = p_values([entry.scores for entry in entries])
    tested = np.triu(~np.isnan(p), 1)  # the better entry of a pair has the row
    p[tested] = adjust_holm(p[tested])
    apart = np.triu(np.where(np.isnan(p), _apart_by_fine_tuning(entries), p < NOISE), 1)
    ranked = []
    for place, entry in enumerate(entries):
        first, last = apart[:, place].sum() + 1, len(entries) - apart[place].sum()
        compared = _compare(entries, place, p, tested, apart) if place else {}
        if place:
            pair = (entry.identity, entries[place - 1].identity)
            compared["duel"] = verdicts.get(pair, "")
        ranked.append(RankedEntry(entry, int(first), int(last), **compared))
    return ranked


def _compare(
    entries: Sequence[Entry], place: int, p: np.ndarray, tested: np.ndarray, apart: np.ndarray
) -> dict[str, Any]:
    """Return how an entry compares with the one above it: p, and the seeds that would decide."""
    pair = (place - 1, place)
    if not tested[pair]:
        return {}
    needed = None
    if not apart[pair]:
        needed = _seeds_needed(entries[place - 1], entries[place], int(tested.sum()))
    return {"p": float(p[pair]), "needed": needed}


def p_values(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """Return [group, group]: two-sided p-values for the difference of the means of two groups of runs.

    A single run is taken to have the spread of the other group. NaN stands where there is no spread: two single runs,
    runs that all agree (scores are coarse), or a group without any.
    """
    from scipy.stats import ttest_ind_from_stats  # half a second, needed with two ranked entries

    size = np.array([len(group) for group in groups], dtype=float)
    mean = np.array(list(map(_mean, groups)))
    std = np.array(list(map(_std, groups)))
    agrees = np.array([_agree(group) for group in groups], dtype=bool)
    first = (mean[:, None], std[:, None], size[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        student = ttest_ind_from_stats(*first, mean, std, size, equal_var=True).pvalue
        welch = ttest_ind_from_stats(*first, mean, std, size, equal_var=False).pvalue
    several = np.logical_and.outer(size > 1, size > 1)
    p = np.where(several, np.maximum(student, welch), student)
    p[np.logical_and.outer(agrees, agrees)] = math.nan
    return p


def adjust_holm(p: np.ndarray) -> np.ndarray:
    """Return p-values adjusted for looking at all of them (Holm 1979)."""
    order = np.argsort(p)
    scaled = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean; None without a spread."""
    if _agree(values):
        return None
    low, high = spread(values)["mean_ci95"]
    return low, high


def power(effect: float, seeds: int, error: float = NOISE) -> float:
    """Return the power of Student's t-test between two groups of so many runs each (Cohen 1988).

    `effect`: difference of the means in standard deviations; `error`: largest p-value that tells two groups apart.
    """
    from scipy.stats import nct, t

    freedom = 2 * seeds - 2
    shift = abs(effect) * math.sqrt(seeds / 2)
    limit = t.isf(error / 2, freedom)
    return float(nct.sf(limit, freedom, shift) + nct.cdf(-limit, freedom, shift))


def seeds_needed(effect: float, error: float = NOISE) -> int | None:
    """Return how many runs each find an effect with a probability of `POWER`; None above `MAX_SEEDS`."""
    for seeds in range(2, MAX_SEEDS + 1):
        if power(effect, seeds, error) >= POWER:
            return seeds
    return None


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _agree(values: Sequence[float]) -> bool:
    """Return whether there is no spread but that of rounding."""
    return len(values) < 2 or max(values) - min(values) <= ROUNDING


def _apart_by_fine_tuning(entries: Sequence[Entry]) -> np.ndarray:
    """Return [entry, entry]: whether fine-tuning seeds of the best runs tell two entries apart.

    Their means have to have the order of the scores, which are medians. Without a spread the scores decide.
    """
    by_seed = [entry.fine_tunings for entry in entries]
    main = np.array([entry.main for entry in entries])
    mean = np.array(list(map(_mean, by_seed)))
    p = p_values(by_seed)
    difference = np.subtract.outer(main, main)
    same_order = difference * np.subtract.outer(mean, mean) > 0
    return np.where(np.isnan(p), np.abs(difference) > ROUNDING, (p < NOISE) & same_order)


def _seeds_needed(above: Entry, entry: Entry, comparisons: int) -> int | None:
    groups = [each.scores for each in (above, entry) if each.confirmed]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
    effect = (above.main - entry.main) / math.sqrt(squares / freedom)
    return seeds_needed(effect, NOISE / comparisons)
