"""The scored rows of all runs, judged and in order; the numbers that tables, plots and CSV are made of. Places have
entries.py.

One `Row` per run and initialisation, and per baseline without an encoder. Only a trained model of the closed division,
with every task of the suite on its full official data, competes for a rank: what the open division allows, a downloaded
model for one, has no limit. A number that is missing stays None all the way.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from cramming.data.suites import AVERAGES
from cramming.record_schema import Scores
from cramming.scores import WITHOUT_ENCODER, mean_of
from eval.report.plots import Bar
from eval.report.references import NINE, REFERENCES
from eval.rules.load import Run
from eval.rules.table import Verdict

BAG_OF_WORDS, CONSTANT = WITHOUT_ENCODER.values()
OBJECTIVE_RULE = "R9"  # without which any objective competes, by the same clock
# Rows without pretraining: initialisation -> in words.
BASELINES = {"random": "random initialisation", BAG_OF_WORDS: BAG_OF_WORDS, CONSTANT: CONSTANT}


@dataclass(frozen=True, eq=False)
class Row:
    """One row: a run's model, or a baseline of it (`init`), on one suite."""

    run: Run
    init: str
    suite: str
    section: Scores
    again: bool = False  # a row with the same weights stands before it

    @property
    def verdict(self) -> Verdict:
        return self.run.verdict

    @property
    def averages(self) -> dict[str, float | None]:
        recorded = self.section.averages
        return {
            name: recorded[name].value if name in recorded else None
            for name in AVERAGES[self.suite]
        }

    @property
    def baseline(self) -> bool:
        """Whether the row is one without pretraining."""
        return self.init != "pretrained"

    @property
    def without_encoder(self) -> bool:
        """Whether it is a bag of words or a constant class."""
        return self.init in (BAG_OF_WORDS, CONSTANT)

    def of_seeds(self, average: str) -> list[float]:
        """An average for each seed alone, of that seed's main metrics in percent; empty where a value is missing."""
        tasks = [self.section.tasks.get(entry) for entry in AVERAGES[self.suite][average].entries]
        values = [task.main.per_seed if task else [] for task in tasks]
        means = (
            [mean_of(column) for column in zip(*values)] if len(set(map(len, values))) == 1 else []
        )
        known = [100 * mean for mean in means if mean is not None]
        return known if len(known) == len(means) else []

    def spread(self, average: str) -> float | None:
        """Standard deviation of an average over seeds; None below two seeds."""
        values = self.of_seeds(average)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def main(self) -> float | None:
        """The average that the suite is ranked by."""
        return self.averages[main_average(self.suite)]

    @property
    def subset(self) -> bool:
        """Whether any entry of the averages was trained or scored on a part of its official data."""
        tasks = self.section.tasks
        return any(tasks[entry].subset for entry in columns_of(self.suite) if entry in tasks)

    def score(self, entry: str) -> float | None:
        """An entry's score in percent."""
        return self.section.tasks[entry].score if entry in self.section.tasks else None

    @property
    def competes(self) -> bool:
        """Whether the row has a place: a trained model that breaks no rule but that of the objective, all tasks, all
        data, each model once.
        """
        whole = self.main is not None and not self.subset and not self.baseline and not self.again
        only_objective = [finding.rule for finding in self.verdict.broken] == [OBJECTIVE_RULE]
        return whole and (self.verdict.division == "closed" or only_objective)

    @property
    def ranked(self) -> bool:
        """Whether that place is in the closed division."""
        return self.competes and self.verdict.division == "closed"

    @property
    def same_weights(self) -> list[str]:
        """The other runs of the report that scored the weights of this row."""
        return [] if self.baseline else [str(other.run) for other in self.run.record.elsewhere]


def main_average(suite: str) -> str:
    """The name of the average that a suite is ranked by."""
    return next(iter(AVERAGES[suite]))


def trained_row(run: Run) -> Row | None:
    """That of the trained model, where its suite has averages."""
    section = run.record.trained
    return (
        Row(run, "pretrained", section.suite, section)
        if section and section.suite in AVERAGES
        else None
    )


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """All rows of all readable runs, best first, missing averages last."""
    rows = [
        Row(run, WITHOUT_ENCODER.get(init, init), section.suite, section)
        for run in runs
        if not run.problem
        for init, section in {**run.record.glue, **run.record.baselines}.items()
        if section.suite in AVERAGES
    ]
    ordered = sorted(
        rows, key=lambda row: (row.main is None, -(row.main or 0.0), row.baseline, row.run.label)
    )
    found, seen = [], set()
    for row in ordered:
        model = (row.suite, str(row.section.model_sha256))
        found.append(replace(row, again=row.competes and model in seen))
        seen |= {model} if row.competes else set()
    return found


def distinct(rows: Sequence[Row]) -> dict[Row, list[Row]]:
    """Of the rows of one initialisation whose scores agree the one with the most of them, and all that it stands for.
    Runs that were scored on the same tasks have the same bag of words.
    """
    found: dict[Row, list[Row]] = {}
    for row in sorted(rows, key=lambda r: -len(_known(r))):
        of_kind = (r for r in found if (r.init, r.suite) == (row.init, row.suite))
        same = next((r for r in of_kind if _known(row).items() <= _known(r).items()), row)
        found.setdefault(same, []).append(row)
    return {row: found[row] for row in rows if row in found}


def _known(row: Row) -> dict[str, tuple[float, float | None]]:
    tasks = row.section.tasks.items()
    return {name: (task.score, task.spread) for name, task in tasks if task.score is not None}


@cache
def columns_of(suite: str) -> tuple[str, ...]:
    """The entries that the suite's averages are made of, in the order in which papers print them."""
    used = {entry for average in AVERAGES[suite].values() for entry in average.entries}
    return tuple(entry for entry in NINE if entry in used)


def gain_over(row: Row, other: Row) -> tuple[float | None, int]:
    """Mean difference of the scores over the averages' entries that both have, and how many those are."""
    both = [(row.score(entry), other.score(entry)) for entry in columns_of(row.suite)]
    gains = [mine - theirs for mine, theirs in both if mine is not None and theirs is not None]
    return (statistics.fmean(gains) if gains else None), len(gains)


def gain_words(row: Row, rows: Sequence[Row]) -> str:
    """Such as `+0.4 points above the best row without pretraining (bag of words), on average over ...`: of the same
    run's baselines the one that a trained model is the least above; empty where there is none. One with fewer entries
    than others, as the constant class without a correlation, stands back.
    """
    others = [
        r
        for r in rows
        if r.run is row.run and r.suite == row.suite and r.baseline and not row.baseline
    ]
    gains = [(other, *gain_over(row, other)) for other in others]
    known = [(other, gain, count) for other, gain, count in gains if gain is not None]
    if not known:
        return ""
    other, gain, count = min(known, key=lambda found: (-found[2], found[1]))
    name, over = (
        BASELINES.get(other.init, other.init),
        f"{count} {'entry' if count == 1 else 'entries'}",
    )
    points = f"{gain:+.1f} points above" if gain >= 0 else f"{-gain:.1f} points below"
    return f"{points} the best row without pretraining ({name}), on average over the {over} that both rows have"


def bars(rows: Sequence[Row], suite: str) -> list[Bar]:
    """The score plot's bars: every printed average of valid full-data rows, with published ones for GLUE."""
    found = []
    shown = [
        row
        for row in rows
        if row.suite == suite and row.verdict.division in ("closed", "open") and not row.subset
    ]
    for row in distinct(shown):
        if row.main is not None:
            name = row.init if row.without_encoder else f"{row.run.label}, {row.init}"
            kind = "untrained" if row.baseline else "pretrained"
            found.append(
                Bar(
                    name if row.baseline else row.run.label,
                    row.main,
                    row.spread(main_average(suite)),
                    kind,
                )
            )
    if suite == "glue" and found:
        found += [Bar(r.title, r.avg9, r.spread, "published") for r in REFERENCES]
    return found
