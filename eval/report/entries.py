"""Places: entries in their tracks, and which of them pretraining seeds tell apart.

An entry is a recipe (eval/recipe.py) in a track (tracks.py), fine-tuned in one way, with all its pretraining seeds: its
score is their mean, and its noise their standard deviation. An entry has every place that the others leave open: behind
those that are better beyond noise, and before those that are worse (Mogstad, Romano, Shaikh and Wilhelm, Inference for
Ranks, Review of Economic Studies 2024). All pairs of a track are compared, so p-values are adjusted for that
(noise.py). Between two entries of one run each is only the noise of fine-tuning, which does not confirm a place.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cramming.config import settings_hash
from cramming.scores import mean_of
from eval.duel.duel_log import Duel, DuelLog
from eval.duel.ladder import MEASURES
from eval.duel.sequential_test import ROUNDING
from eval.recipe import Recipe, recipe, recipe_of
from eval.report.noise import NOISE, adjusted, interval, p_values, seeds_needed
from eval.report.ranking import Row, main_average
from eval.report.tracks import Track, track_for, track_of
from eval.rules.evidence import few, made_with
from eval.rules.load import Run

SEED_IN_NAME = re.compile(r"[\W_]*(?:seed|s)?[\W_]*\d*$")
# A duel's verdict for the candidate and for the base.
FROM_BOTH_SIDES = {
    "win": ("won", "lost"),
    "loss": ("lost", "won"),
    "equivalent": ("equal",) * 2,
    "undecided": ("undecided",) * 2,
}


class Identity(NamedTuple):
    """What runs of one entry have in common beside the way in which they were fine-tuned. A run whose record does not
    have its recipe is alone with its folder.
    """

    track: Track | None
    recipe: Recipe | str


@dataclass(frozen=True, eq=False)
class Entry:
    """The rows of one recipe, best first; `left_out`: other runs of it in the same track, which have no place."""

    rows: Sequence[Row]
    left_out: Sequence[Run] = ()

    @property
    def first(self) -> Row:
        return self.rows[0]

    @cached_property
    def scores(self) -> list[float]:
        """Of the average that the suite is ranked by, run by run."""
        return [row.main for row in self.rows if row.main is not None]

    @cached_property
    def fine_tunings(self) -> list[float]:
        """The same of the best run's fine-tuning seeds."""
        return self.first.of_seeds(main_average(self.first.suite))

    @cached_property
    def main(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def confirmed(self) -> bool:
        return len(self.rows) > 1

    @property
    def label(self) -> str:
        """Its runs' name without the seed, where that is one; else that of its best run."""
        stems = {SEED_IN_NAME.sub("", row.run.name) for row in self.rows}
        return (stems.pop() if self.confirmed and len(stems) == 1 else "") or self.first.run.label

    @property
    def bounds(self) -> tuple[float, float] | None:
        """95 % interval of the mean; None for a single run."""
        return interval(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the score over pretraining seeds; None for a single run."""
        return statistics.stdev(self.scores) if self.confirmed else None

    def average(self, name: str) -> tuple[float | None, float | None]:
        """An average over runs, and its standard deviation: of a single run over fine-tuning seeds."""
        if not self.confirmed:
            return self.first.averages[name], self.first.spread(name)
        return _over_runs([row.averages[name] for row in self.rows])

    def score(self, task: str) -> tuple[float | None, float | None]:
        """The same of one task's score."""
        if not self.confirmed:
            return self.first.score(task), self.first.section.tasks[task].spread
        return _over_runs([row.score(task) for row in self.rows])

    @property
    def remarks(self) -> list[str]:
        """What could be a selection: seeds that are not the first ones, runs without a score; and several commits."""
        seeds = [row.run.record.training.seed for row in self.rows]
        commits = {row.run.record.environment.git.commit for row in self.rows}
        first, expected = (
            set(range(len(seeds))),
            "0" if len(seeds) == 1 else f"0 to {len(seeds) - 1}",
        )
        lost = [f"{run.label} ({_why(run)})" for run in self.left_out]
        return [
            *(
                [f"pretraining seeds {', '.join(sorted(map(str, seeds)))}, not {expected}"]
                * (set(seeds) != first)
            ),
            *([f"not counted of the same recipe: {few(lost)}"] if lost else []),
            *([f"code of {len(commits)} commits"] if len(commits) > 1 else []),
        ]


def _over_runs(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return mean_of(values), statistics.stdev(known) if len(known) == len(values) > 1 else None


def _why(run: Run) -> str:
    status = run.record.training.status
    return (
        status or "no status"
        if status != "finished"
        else "not ranked"
        if run.record.trained
        else "not scored"
    )


@dataclass(frozen=True)
class RankedEntry:
    """An entry's places, from `first` to `last`, and how it compares to the entry above it.

    `p` is adjusted for all pairs of the track; `needed`: so many seeds each would tell the two apart with a probability
    of 0.9, if difference and spread are those seen; `duel`: the verdict of a duel of the two, in place of p.
    """

    entry: Entry
    first: int
    last: int
    p: float | None = None
    needed: int | None = None
    duel: str = ""

    @property
    def places(self) -> str:
        """Such as `1` or `2–4`."""
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


def ranked_entries(
    rows: Iterable[Row], runs: Sequence[Run], verdicts: Mapping[tuple[Identity, Identity], str]
) -> dict[Track | None, list[RankedEntry]]:
    """The entries of each track, best first. `rows`: those of one suite that compete with each other; `runs`: all of
    the report; `verdicts`: of duels, as `verdicts_of` has them.
    """
    of_recipe: dict[Identity, list[Run]] = {}
    for run in runs:
        of_recipe.setdefault(_identity(run), []).append(run)
    entries: dict[tuple[Identity, str], list[Row]] = {}
    placed = set[str]()  # with whichever fine-tuning
    for row in rows:
        placed |= {row.run.label, *row.same_weights}
        protocol = settings_hash(row.section.split, made_with(row.section))
        entries.setdefault((_identity(row.run), protocol), []).append(row)
    tracks: dict[Track | None, list[Entry]] = {}
    for (identity, _), own in entries.items():
        left_out = [run for run in of_recipe[identity] if run.label not in placed]
        tracks.setdefault(identity.track, []).append(Entry(own, left_out))
    return {track: _placed(found, verdicts) for track, found in tracks.items()}


def _identity(run: Run) -> Identity:
    return Identity(track_of(run.record), recipe_of(run.record) or str(run.folder))


def _placed(
    entries: Sequence[Entry], verdicts: Mapping[tuple[Identity, Identity], str]
) -> list[RankedEntry]:
    entries = sorted(entries, key=lambda entry: -entry.main)
    p = p_values([entry.scores for entry in entries])
    tested = np.triu(~np.isnan(p), 1)  # of a pair the better entry has the row
    p[tested] = adjusted(p[tested])
    apart = np.triu(np.where(np.isnan(p), _apart_by_fine_tuning(entries), p < NOISE), 1)
    better, worse = apart.sum(axis=0).tolist(), apart.sum(axis=1).tolist()
    found = [
        RankedEntry(entry, better[i] + 1, len(entries) - worse[i])
        for i, entry in enumerate(entries)
    ]
    for i, (above, entry) in enumerate(pairwise(entries)):
        duel = verdicts.get((_identity(entry.first.run), _identity(above.first.run)), "")
        known = float(p[i, i + 1]) if tested[i, i + 1] else None
        needed = (
            _seeds_needed(above, entry, tested.sum())
            if known is not None and not apart[i, i + 1]
            else None
        )
        found[i + 1] = replace(found[i + 1], p=known, needed=needed, duel=duel)
    return found


def _apart_by_fine_tuning(entries: Sequence[Entry]) -> np.ndarray:
    """By the averages of single fine-tuning seeds of the best runs, where these have the order of the scores, which are
    medians; without any spread by the scores themselves."""
    found, main = (
        [entry.fine_tunings for entry in entries],
        np.array([entry.main for entry in entries]),
    )
    p, mean = (
        p_values(found),
        np.array([statistics.fmean(group) if group else math.nan for group in found]),
    )
    same_order = np.subtract.outer(main, main) * np.subtract.outer(mean, mean) > 0
    return np.where(
        np.isnan(p), np.abs(np.subtract.outer(main, main)) > ROUNDING, (p < NOISE) & same_order
    )


def _seeds_needed(one: Entry, other: Entry, comparisons: int) -> int | None:
    groups = [entry.scores for entry in (one, other) if entry.confirmed]
    freedom = sum(len(group) - 1 for group in groups)
    spread = math.sqrt(
        sum((len(group) - 1) * statistics.variance(group) for group in groups) / freedom
    )
    return seeds_needed((one.main - other.main) / spread, NOISE / comparisons)


def verdicts_of(log: DuelLog) -> dict[tuple[Identity, Identity], str]:
    """Return what duels say of one recipe against another, from both sides: `won by pinned validation loss`.

    Of several duels `1 of 4 won by ...; 3 of 4 undecided by ...`.
    """
    settings = log.configurations()
    words: dict[tuple[Identity, Identity], list[str]] = {}
    for duel in log.duels().values():
        decision = duel.decision
        if decision is None or decision.verdict not in FROM_BOTH_SIDES:
            continue
        base, candidate = _sides_of(duel, settings)
        by = [f" by {MEASURES[duel.terms.measure][0]}"] * 2
        if decision.why:  # of a loss: else the duel is void
            by = [" as a run of its own failed", " as a run of the other failed"]
        of_candidate, of_base = FROM_BOTH_SIDES[decision.verdict]
        words.setdefault((candidate, base), []).append(of_candidate + by[0])
        words.setdefault((base, candidate), []).append(of_base + by[1])
    return {pair: _of_several(said) for pair, said in words.items()}


def _sides_of(duel: Duel, settings: Mapping[str, Mapping[str, Any]]) -> list[Identity]:
    """Return what base and candidate are known by."""
    terms = duel.terms
    sides = []
    for side, limits, corpus in zip(
        (terms.base, terms.candidate), terms.budgets, terms.corpora, strict=True
    ):
        ((unit, limit),) = limits.items()
        track = track_for(unit, limit, terms.clock, terms.device)
        sides.append(Identity(track, recipe(settings[side.hash], corpus)))
    return sides


def _of_several(said: Sequence[str]) -> str:
    return (
        said[0]
        if len(said) == 1
        else "; ".join(f"{n} of {len(said)} {words}" for words, n in Counter(said).items())
    )
