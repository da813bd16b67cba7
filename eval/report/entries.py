"""Entries of the leaderboard: recipes (eval/recipe.py) in their tracks, with all their pretraining seeds.

A track is a budget: hours on one kind of device and clock, or equal work (exaFLOPs, tokens, steps) on any device. There
is no track of time on a reference device: a record has the throughput of its own device alone. An entry's score is the
mean over its runs, and its noise their standard deviation. A single run is unconfirmed.
"""

import re
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cramming.config import settings_hash
from cramming.plan import cards
from cramming.progress import budget_text
from cramming.record_schema import Record
from cramming.scores import mean_of
from eval.duel.duel_log import Duel, DuelLog
from eval.duel.ladder import MEASURES
from eval.recipe import Recipe, recipe, recipe_of
from eval.report.format import Score
from eval.report.table import Row, main_average
from eval.rules.evidence import abbreviated, made_with
from eval.rules.load import Run

UNITS = ("hours", "exaflops", "tokens", "steps")  # in the order of the tables
# ExaFLOPs of a day on the cramming paper's cards (JonasGeiping/cramming, the budgets beside the paper's results).
DAYS = {5.0: "RTX 2080 Ti", 8.0: "RTX A4000", 13.0: "RTX A6000"}
SEED_IN_NAME = re.compile(r"[\W_]*(?:seed|s)?[\W_]*\d*$")
# Verdict of a duel for the candidate and for the base.
VERDICTS = {
    "win": ("won", "lost"),
    "loss": ("lost", "won"),
    "equivalent": ("equal", "equal"),
    "undecided": ("undecided", "undecided"),
}


class Track(NamedTuple):
    """Budget that runs share; `clock` and `device` are None if the unit is not hours."""

    unit: str
    limit: float
    clock: str | None
    device: str | None

    @property
    def title(self) -> str:
        """Title such as `24 hours on RTX A6000` or `13 exaflops on any device (the day of an RTX A6000)`."""
        amount = budget_text(self.unit, self.limit)
        if self.unit == "hours":
            clock = " of CPU time" if self.clock == "cpu" else ""
            return f"{amount}{clock} on {self.device}"
        day = DAYS.get(self.limit) if self.unit == "exaflops" else None
        return f"{amount} on any device" + (f" (the day of an {day})" if day else "")


def track_for(unit: str, limit: float, clock: str | None, device: str | None) -> Track:
    """Return the track of a budget; a card is known by its model, whatever the driver calls it."""
    if unit != "hours":
        return Track(unit, limit, None, None)
    card = cards.find(device) if device else None
    return Track(unit, limit, clock or "wall", card.name if card else device)


def track_of(record: Record) -> Track | None:
    """Return the track of a run; None without a budget of a known unit."""
    budget, device = record.training.budget, record.environment.device
    if budget.unit not in UNITS or budget.limit is None:
        return None
    return track_for(budget.unit, budget.limit, budget.clock, device.name or device.kind)


def sort_tracks(tracks: Collection[Track | None]) -> list[Track | None]:
    """Return the tracks in the order of their tables: hours first, long before short, None last."""
    return sorted(tracks, key=_track_key)


def _track_key(track: Track | None) -> tuple[Any, ...]:
    if track is None:
        return (len(UNITS),)
    return UNITS.index(track.unit), -track.limit, str(track.device), str(track.clock)


class Identity(NamedTuple):
    """Track and recipe that runs of one entry share; a run without a whole recipe has its folder instead."""

    track: Track | None
    recipe: Recipe | str


def identify(run: Run) -> Identity:
    """Return what a run shares with the others of its entry."""
    return Identity(track_of(run.record), recipe_of(run.record) or str(run.folder))


@dataclass(frozen=True, eq=False)
class Entry:
    """Rows of one recipe, best first; `left_out` are its unranked runs of the same track."""

    identity: Identity
    rows: Sequence[Row]
    left_out: Sequence[Run] = ()

    @property
    def first(self) -> Row:
        """Row of the best run."""
        return self.rows[0]

    @property
    def confirmed(self) -> bool:
        """True with several pretraining seeds."""
        return len(self.rows) > 1

    @cached_property
    def scores(self) -> list[float]:
        """Values of the main average, run by run."""
        return [row.main for row in self.rows if row.main is not None]

    @cached_property
    def fine_tunings(self) -> list[float]:
        """Values of the main average of the best run, by fine-tuning seed."""
        return self.first.scores_by_seed(main_average(self.first.suite))

    @cached_property
    def main(self) -> float:
        """Mean of the main average over runs."""
        return statistics.fmean(self.scores)

    @property
    def label(self) -> str:
        """Name of its runs without the seed, or the label of the best run."""
        stems = {SEED_IN_NAME.sub("", row.run.name) for row in self.rows}
        stem = stems.pop() if self.confirmed and len(stems) == 1 else ""
        return stem or self.first.run.label

    def cell(self, column: str) -> Score:
        """Return a score as the mean over runs with their standard deviation; for a single run, over fine-tunings."""
        if not self.confirmed:
            return self.first.cell(column)
        values = [row.cell(column).value for row in self.rows]
        known = [value for value in values if value is not None]
        spread = statistics.stdev(known) if len(known) == len(values) else None
        return Score(mean_of(values), spread)

    @property
    def remarks(self) -> list[str]:
        """Remarks on what could be a selection: other seeds than the first ones, runs without a place, commits."""
        seeds = [row.run.record.training.seed for row in self.rows]
        commits = {row.run.record.environment.git.commit for row in self.rows}
        remarks = []
        if set(seeds) != set(range(len(seeds))):
            expected = "0" if len(seeds) == 1 else f"0 to {len(seeds) - 1}"
            listed = ", ".join(sorted(map(str, seeds)))
            remarks.append(f"pretraining seeds {listed}, not {expected}")
        if self.left_out:
            missing = abbreviated([f"{run.label} ({_reason(run)})" for run in self.left_out])
            remarks.append(f"not counted of the same recipe: {missing}")
        if len(commits) > 1:
            remarks.append(f"code of {len(commits)} commits")
        return remarks


def _reason(run: Run) -> str:
    """Return why a run has no place."""
    status = run.record.training.status
    if status != "finished":
        return status or "no status"
    return "not ranked" if run.record.trained else "not scored"


def entries_of(rows: Sequence[Row], runs: Sequence[Run]) -> dict[Track | None, list[Entry]]:
    """Return the entries of each track. `rows`: those of one suite that compete; `runs`: all of the report."""
    if not rows:
        return {}
    runs_by_identity: dict[Identity, list[Run]] = {}
    for run in runs:
        runs_by_identity.setdefault(identify(run), []).append(run)
    grouped: dict[tuple[Identity, str], list[Row]] = {}
    placed: set[str] = set()
    for row in rows:
        placed |= {row.run.label, *row.same_weights}
        protocol = settings_hash(row.section.split, made_with(row.section))
        grouped.setdefault((identify(row.run), protocol), []).append(row)
    tracks: dict[Track | None, list[Entry]] = {}
    for (identity, _), members in grouped.items():
        left_out = [run for run in runs_by_identity[identity] if run.label not in placed]
        tracks.setdefault(identity.track, []).append(Entry(identity, members, left_out))
    return tracks


def verdicts_of(log: DuelLog) -> dict[tuple[Identity, Identity], str]:
    """Return the verdicts of duels of one recipe against another, from both sides.

    A verdict is `won by pinned validation loss`; of several duels, `1 of 4 won by ...; 3 of 4 undecided by ...`.
    """
    settings = log.configurations()
    words: dict[tuple[Identity, Identity], list[str]] = {}
    for duel in log.duels().values():
        decision = duel.decision
        if decision is None or decision.verdict not in VERDICTS:
            continue
        base, candidate = _sides(duel, settings)
        reason = "as a run failed" if decision.why else f"by {MEASURES[duel.terms.measure][0]}"
        of_candidate, of_base = VERDICTS[decision.verdict]
        words.setdefault((candidate, base), []).append(f"{of_candidate} {reason}")
        words.setdefault((base, candidate), []).append(f"{of_base} {reason}")
    return {pair: _summarize(verdicts) for pair, verdicts in words.items()}


def _sides(duel: Duel, settings: Mapping[str, Mapping[str, Any]]) -> list[Identity]:
    """Return the identities of base and candidate."""
    terms = duel.terms
    sides = []
    for side, limits, corpus in zip(
        (terms.base, terms.candidate), terms.budgets, terms.corpora, strict=True
    ):
        ((unit, limit),) = limits.items()
        track = track_for(unit, limit, terms.clock, terms.device)
        sides.append(Identity(track, recipe(settings[side.hash], corpus)))
    return sides


def _summarize(verdicts: Sequence[str]) -> str:
    if len(verdicts) == 1:
        return verdicts[0]
    counts = Counter(verdicts).items()
    return "; ".join(f"{count} of {len(verdicts)} {verdict}" for verdict, count in counts)
