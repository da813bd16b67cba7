"""One run's page (templates/run.j2): its numbers and tables."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from cramming.data.task_files import ENTRIES
from cramming.record import RECORD
from cramming.record_schema import Metric, TaskScore
from cramming.runlog import RUN_LOG
from eval.report.ranking import BAG_OF_WORDS, BASELINES, CONSTANT, Row, gain_words
from eval.report.render import Cell
from eval.report.settings import recipe
from eval.report.wording import (
    DASH,
    anchor,
    budget_words,
    model_words,
    score_words,
    spread_words,
    title_of,
)
from eval.rules.load import Run
from eval.rules.table import RULES, Finding, Rule

# Initialisations as columns. The first that was scored is the one that the others of its suite stand beside.
COLUMNS = {
    "pretrained": "Pretrained",
    "random": "Random init",
    BAG_OF_WORDS: "Bag of words",
    CONSTANT: "Constant class",
}


@dataclass(frozen=True)
class RunPage:
    """What run.j2 shows of one run: `rows` are its own, `lines` are about files beside it, `links` lead to them."""

    run: Run
    rows: Sequence[Row]
    lines: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """The run's place in a page."""
        return anchor(self.run)

    @property
    def badge(self) -> str:
        """Such as `open, interrupted`."""
        division = self.run.verdict.division if self.rows else "not scored"
        status = self.run.record.training.status
        return ", ".join(filter(None, (division, "" if status == "finished" else status)))

    @property
    def opening(self) -> str:
        """Such as `12.3M parameters, 24 h on 1 RTX A6000`."""
        return ", ".join(
            filter(None, (model_words(self.run.record), budget_words(self.run.record)))
        )

    @cached_property
    def recipe(self) -> dict[str, str]:
        """What was trained with which settings, in words."""
        return recipe(self.run.record)

    @property
    def runs_setting(self) -> str:
        """What `cramming glue` needs beside the run's name."""
        home = self.run.folder.parent
        return "" if home.name == "runs" else f" --runs {home}"

    @cached_property
    def first(self) -> Row:
        """The row that the page is about."""
        return next(
            (row for init in COLUMNS for row in self.rows if row.init == init), self.rows[0]
        )

    @cached_property
    def beside(self) -> list[Row]:
        """What it is measured against."""
        of_suite = [
            row for row in self.rows if row.suite == self.first.suite and row is not self.first
        ]
        return [row for init in BASELINES for row in of_suite if row.init == init]

    @property
    def gain(self) -> str:
        """Over the best row without pretraining, in words; empty where there is none."""
        return gain_words(self.first, self.rows)

    @property
    def columns(self) -> list[str]:
        """Of the table of scores: the trained model, and beside it what it is measured against."""
        mine = COLUMNS.get(self.first.init, self.first.init)
        columns = [
            "Task",
            "Metric",
            "Other metrics",
            "Examples",
            f"{mine}, mean",
            f"{mine}, median",
        ]
        return columns + [
            title for row in self.beside for title in (f"{COLUMNS[row.init]}, median", "Difference")
        ]

    @property
    def task_rows(self) -> list[list[Cell]]:
        tasks = self.first.section.tasks
        names = [*(n for n in ENTRIES if n in tasks), *(n for n in tasks if n not in ENTRIES)]
        return [self._score_row(name, tasks[name]) for name in names]

    @property
    def average_rows(self) -> list[list[Cell]]:
        return [self._average_row(name) for name in self.first.averages]

    def _score_row(self, name: str, task: TaskScore) -> list[Cell]:
        beside = []
        for row in self.beside:
            beside += [
                score_cell(row.section.tasks.get(name)),
                _difference(task.score, row.score(name)),
            ]
        metrics = {
            key.replace("_", " "): value
            for key, value in task.metrics.items()
            if key != task.main_metric
        }
        medians = [
            f"{key} {100 * value.median:.1f}"
            for key, value in metrics.items()
            if value.median is not None
        ]
        train = _examples(task.train_examples, task.official_train_examples)
        return [
            Cell(title_of(name) if name in ENTRIES else task.title or name, "", "main"),
            Cell((task.main_metric or "").replace("_", " ")),
            Cell(", ".join(medians) or DASH),
            Cell(f"{train} / {_examples(task.eval_examples, task.official_eval_examples)}"),
            _mean_cell(task.main),
            score_cell(task),
            *beside,
        ]

    def _average_row(self, name: str) -> list[Cell]:
        mine, recorded, beside = (
            self.first.averages[name],
            self.first.section.averages.get(name),
            [],
        )
        for row in self.beside:
            beside += [average_cell(row, name), _difference(mine, row.averages[name])]
        missing = recorded.missing if recorded else []
        why = (
            f"not printed, missing: {', '.join(map(title_of, map(str, missing)))}"
            if mine is None
            else ""
        )
        parts = [Cell(title_of(name), "", "main"), Cell("mean"), Cell(why), Cell(""), Cell("")]
        return [*parts, average_cell(self.first, name), *beside]

    @property
    def findings(self) -> list[tuple[Rule, Finding]]:
        return list(zip(RULES, self.run.verdict.findings))


FILES = {"record": RECORD, "run log": RUN_LOG}


def links(run: Run, place: Path, repository: str | None, own: Path | None = None) -> dict[str, str]:
    """Where a page at `place` leads to, by title: the run's `own` report, its files that are there, and its commit."""
    found = {"report": own / "report.html"} if own else {}
    found |= {title: path for title, name in FILES.items() if (path := run.folder / name).exists()}
    found |= {"archive": run.folder} if run.folder.is_file() else {}
    paths = {title: Path(os.path.relpath(path, place)).as_posix() for title, path in found.items()}
    targets = {title: quote(os.fsencode(path)) for title, path in paths.items()}
    commit = run.record.environment.git.commit
    return targets | (
        {f"commit {commit[:12]}": f"{repository}/commit/{commit}"} if repository and commit else {}
    )


def score_cell(task: TaskScore | None) -> Cell:
    """`83.9 ±0.4`, with the subset's mark; a dash where there is no score."""
    if task is None or task.score is None:
        return Cell(DASH, "", "warn" if task and task.problem else "")
    return Cell(score_words(task.score, task.subset), spread_words(task.spread))


def average_cell(row: Row, name: str) -> Cell:
    """A row's average with its spread."""
    value = row.averages[name]
    return Cell(
        score_words(value, row.subset),
        "" if value is None else spread_words(row.spread(name)),
        "main",
    )


def _mean_cell(metric: Metric) -> Cell:
    """`83.7`, with `83.1 to 84.3` beside it; a dash where it is not on record."""
    if metric.mean is None:
        return Cell(DASH)
    ends = [f"{100 * end:.1f}" for end in metric.mean_ci95 or []]
    return Cell(f"{100 * metric.mean:.1f}", " to ".join(ends))


def _examples(have: float | None, official: float | None) -> str:
    if have is None:
        return DASH
    return f"{have:,.0f}" if official in (None, have) else f"{have:,.0f} of {official:,.0f}"


def _difference(mine: float | None, theirs: float | None) -> Cell:
    return Cell(DASH if mine is None or theirs is None else f"{mine - theirs:+.1f}")
