"""Scored rows of all runs, best first: one per run and initialisation, and per baseline without an encoder.

Only a trained model of the closed division, with every task of the suite on its full official data, competes for a
rank. A number that is missing stays None.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

from cramming.data.suites import AVERAGES
from cramming.record_schema import Scores
from cramming.scores import WITHOUT_ENCODER, mean_of
from eval.report.format import PARTIAL, SUBSET, Score
from eval.report.references import NINE
from eval.rules.load import Run
from eval.rules.table import Verdict

BAG_OF_WORDS, CONSTANT = WITHOUT_ENCODER.values()
OBJECTIVE_RULE = "R9"  # the only rule that a run may break in the tables of any objective
# Initialisations of rows without pretraining, and their names.
BASELINES = {BAG_OF_WORDS: BAG_OF_WORDS, "random": "random initialisation", CONSTANT: CONSTANT}
GAIN, SCORED_MEAN = "gain", "scored_mean"  # columns beside averages and tasks


class Gain(NamedTuple):
    """Mean difference to a baseline over the entries that both have."""

    points: float
    baseline: "Row"
    entries: int

    def __str__(self) -> str:
        """Return `+19.9 points over bag of words (mean over 9 entries)`."""
        entries = "entry" if self.entries == 1 else "entries"
        name = BASELINES[self.baseline.init]
        return f"{self.points:+.1f} points over {name} (mean over {self.entries} {entries})"


@dataclass(frozen=True, eq=False)
class Row:
    """Scores of a run's model, or of one of its `baselines`, on one suite.

    `is_duplicate` marks a row whose weights an earlier row has.
    """

    run: Run
    init: str
    suite: str
    section: Scores
    baselines: Sequence["Row"] = ()
    is_duplicate: bool = False

    @property
    def verdict(self) -> Verdict:
        """Verdict of the run."""
        return self.run.verdict

    @property
    def is_baseline(self) -> bool:
        """True for a model without pretraining."""
        return self.init != "pretrained"

    @cached_property
    def scores(self) -> dict[str, Score]:
        """Scores of the recorded tasks and averages."""
        scores = {}
        for name, task in self.section.tasks.items():
            scores[name] = Score(task.score, task.spread, SUBSET if task.subset else "")
        mark = SUBSET if self.subset else ""
        for name, average in self.section.averages.items():
            values = self.scores_by_seed(name)
            spread = statistics.stdev(values) if len(values) > 1 else None
            scores[name] = Score(average.value, spread, mark)
        return scores

    @property
    def main(self) -> float | None:
        """Average that the suite is ranked by."""
        return self.score(main_average(self.suite))

    @property
    def subset(self) -> bool:
        """True if any entry of the averages was trained or scored on a part of its official data."""
        tasks = self.section.tasks
        return any(tasks[entry].subset for entry in columns_of(self.suite) if entry in tasks)

    @property
    def competes(self) -> bool:
        """True if the row has a rank among all objectives: a trained model, all tasks, all data, each model once."""
        if self.main is None or self.subset or self.is_baseline or self.is_duplicate:
            return False
        broken = [finding.rule for finding in self.verdict.broken]
        return self.verdict.division == "closed" or broken == [OBJECTIVE_RULE]

    @property
    def ranked(self) -> bool:
        """True if the row has a rank in the closed division."""
        return self.competes and self.verdict.division == "closed"

    @cached_property
    def spent(self) -> dict[str, Any]:
        """Work and cost of the run up to the row's checkpoint, or in all, by the names of facts."""
        training = self.run.record.training
        total = {
            "progress": 1.0,
            "steps": training.steps,
            "spent_seconds": training.budget.spent_seconds,
            "tokens": training.tokens,
            "energy_kwh": training.energy_kwh,
        }
        checkpoint = self.section.checkpoint
        reached = total
        if checkpoint is not None:  # nothing is known of one that the log lacks
            reached = self.run.spent.get(checkpoint) or dict.fromkeys(total)
        per_token = (training.exaflops or 0.0) / (training.tokens or 1)
        exaflops = per_token * (reached["tokens"] or 0)
        return {**reached, "exaflops": exaflops, "devices": training.devices}

    @property
    def place(self) -> str:
        """Share of the budget after which the scored weights were saved, such as `50 %`."""
        return f"{100 * (self.spent['progress'] or 0):.3g} %"

    @property
    def same_weights(self) -> list[str]:
        """Other runs of the report that scored the weights of this row."""
        return [] if self.is_baseline else [other.run for other in self.run.record.elsewhere]

    @cached_property
    def scored(self) -> list[str]:
        """Entries of the averages that have a score."""
        return [entry for entry in columns_of(self.suite) if self.score(entry) is not None]

    @cached_property
    def scored_mean(self) -> float | None:
        """Mean of the tasks that have a score, for a row without the main average."""
        if self.main is not None or not self.scored:
            return None
        return self._mean(self.scored)

    @cached_property
    def gain(self) -> Gain | None:
        """Gain over the baseline of the same run that the row is the least above.

        A baseline with fewer entries than another, such as a constant class without a correlation, is left out.
        """
        gains = []
        for baseline in self.baselines:
            both = [entry for entry in self.scored if entry in baseline.scored]
            if both:
                points = self._mean(both) - baseline._mean(both)
                gains.append(Gain(points, baseline, len(both)))
        return min(gains, key=lambda gain: (-gain.entries, gain.points), default=None)

    def score(self, column: str) -> float | None:
        """Return the score of a task or an average in percent."""
        return self.cell(column).value

    def _mean(self, entries: Sequence[str]) -> float:
        return statistics.fmean(self.score(entry) or 0.0 for entry in entries)

    def scores_by_seed(self, average: str) -> list[float]:
        """Return an average for each seed alone, in percent; empty if a value is missing."""
        values = []
        for entry in AVERAGES[self.suite][average].entries:
            task = self.section.tasks.get(entry)
            values.append(task.main.per_seed if task else [])
        if len(set(map(len, values))) != 1:
            return []
        means = [mean_of(column) for column in zip(*values)]
        known = [100 * mean for mean in means if mean is not None]
        return known if len(known) == len(means) else []

    def cell(self, column: str) -> Score:
        """Return the score of an average, of an entry, of the gain, or of the scored tasks."""
        if column == GAIN:
            return Score(self.gain.points if self.gain else None)
        if column == SCORED_MEAN:
            return Score(self.scored_mean, mark=PARTIAL)
        return self.scores.get(column, Score())


def main_average(suite: str) -> str:
    """Return the name of the average that a suite is ranked by."""
    return next(iter(AVERAGES[suite]))


@cache
def columns_of(suite: str) -> tuple[str, ...]:
    """Return the entries of the suite's averages, in the order in which papers print them."""
    used = set(chain.from_iterable(average.entries for average in AVERAGES[suite].values()))
    return tuple(entry for entry in NINE if entry in used)


def score_columns(suite: str) -> list[str]:
    """Return all columns with scores, the headline first."""
    main, *others = AVERAGES[suite]
    return [main, GAIN, SCORED_MEAN, *others, *columns_of(suite)]


def along_the_way(row: Row) -> list[Row]:
    """Return rows of the scored checkpoints of a row's run on its suite, in their order; none for a baseline."""
    if row.is_baseline:
        return []
    sections = row.run.record.checkpoints.get(row.suite, {}).values()
    rows = [replace(row, section=each) for each in sections]
    return sorted(rows, key=lambda each: each.spent["steps"] or 0)


def trained_row(run: Run) -> Row | None:
    """Return the row of the trained model if its suite has averages."""
    rows = rows_of([run])
    return next((row for row in rows if not row.is_baseline), None)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Return all rows of all readable runs, best first, those without the main average last."""
    rows: list[Row] = []
    for run in runs:
        if not run.problem:
            rows += _rows_of_run(run)
    rows.sort(key=_rank_key)
    ordered: list[Row] = []
    seen: set[tuple[str, str | None]] = set()
    for row in rows:
        model = (row.suite, row.section.model_sha256)
        if row.competes:
            row = replace(row, is_duplicate=model in seen)
            seen.add(model)
        ordered.append(row)
    return ordered


def _rows_of_run(run: Run) -> list[Row]:
    rows = []
    for init, section in {**run.record.glue, **run.record.baselines}.items():
        if section.suite in AVERAGES:
            rows.append(Row(run, WITHOUT_ENCODER.get(init, init), section.suite, section))
    completed = []
    for row in rows:
        if not row.is_baseline:
            row = replace(row, baselines=_baselines(row, rows))
        completed.append(row)
    return completed


def _baselines(row: Row, rows: Sequence[Row]) -> list[Row]:
    of_suite = {other.init: other for other in rows if other.suite == row.suite}
    return [of_suite[init] for init in BASELINES if init in of_suite]


def _rank_key(row: Row) -> tuple[bool, float, bool, int, float, str]:
    main, mean = row.main, row.scored_mean
    return (
        main is None,
        -(main or 0.0),
        row.is_baseline,
        -len(row.scored),
        -(mean or 0.0),
        row.run.label,
    )


def distinct(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups with the same initialisation and scores: runs share their bag of words."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        scores = [row.cell(entry) for entry in columns_of(row.suite)]
        groups.setdefault((row.init, *scores), []).append(row)
    return list(groups.values())
