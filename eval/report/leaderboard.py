"""The leaderboard's tables and what their small print needs (templates/leaderboard.j2 says it).

Rows of the closed division on the full official data are ranked by the suite's first average; what is within noise
shares a place. Those of the open division, then rows on marked subsets or with an average that cannot be printed, then
invalid records, then the rows without pretraining stand in groups of their own and have no rank. Published rows of the
same protocol hang beneath the GLUE table. A number that is missing stays a dash, and the reason stands below the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cramming.data.task_files import ENTRIES
from eval.report.ranking import BASELINES, Row, columns_of, distinct, gain_words, ranks
from eval.report.render import Cell, Figure, Group
from eval.report.run_page import average_cell, score_cell
from eval.report.wording import (
    SUBSET,
    SUITE_TITLES,
    anchor,
    budget_words,
    counted,
    model_words,
    title_of,
)
from eval.rules.evidence import swept
from eval.rules.fine_tuning import MIN_SEEDS
from eval.tasks.suites import AVERAGES

CLOSED, UNTRAINED = "Closed division", "Baselines: without pretraining, not ranked"
AGAIN, OPEN = "Not ranked: the weights of a row above", "Open division, not ranked"
PARTS = f"Not ranked: parts of the official data ({SUBSET}), or tasks missing"
INVALID = "Not ranked: invalid records (a rule for both divisions is broken)"
GROUPS = (CLOSED, AGAIN, OPEN, PARTS, INVALID, UNTRAINED)


def _group_of(row: Row) -> str:
    if row.verdict.division == "invalid":
        return INVALID
    if row.baseline:
        return UNTRAINED
    if row.main is None or row.subset:
        return PARTS
    if row.verdict.division != "closed":
        return OPEN
    return AGAIN if row.again else CLOSED


@dataclass(frozen=True)
class Board:
    """The rows of one suite."""

    suite: str
    rows: Sequence[Row]
    figure: Figure | None = None

    @property
    def title(self) -> str:
        return SUITE_TITLES[self.suite]

    @property
    def columns(self) -> list[str]:
        """The titles of the columns."""
        return ["#", "Model", "Division", *map(title_of, AVERAGES[self.suite]), *map(title_of, columns_of(self.suite))]

    @cached_property
    def groups(self) -> list[Group]:
        """The suite's rows, the ranked ones first."""
        found = {title: [row for row in self.rows if _group_of(row) == title] for title in GROUPS}
        closed, baselines = found.pop(CLOSED), distinct(found.pop(UNTRAINED))
        entries = columns_of(self.suite)
        best = {entry: max((row.score(entry) or 0.0 for row in closed), default=None) for entry in entries}
        return [
            Group([_row(row, str(place), best) for row, place in zip(closed, ranks(closed))], CLOSED),
            *(Group(list(map(_row, rows)), title, "faint" * (title == INVALID)) for title, rows in found.items()),
            Group([_baseline_row(row, same) for row, same in baselines.items()], UNTRAINED),
        ]

    @property
    def protocols(self) -> dict[str, list[str]]:
        """How the scores were made, in words, and by that the runs."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            names = found.setdefault(_protocol(row), []) if not row.without_encoder else []
            names += [row.run.label] if row.run.label not in names else []
        return dict(sorted(found.items()))

    @property
    def has_subset(self) -> bool:
        """Whether the mark is used."""
        return any(task.subset for row in self.rows for task in row.section.tasks.values())

    @property
    def gaps_and_gains(self) -> list[str]:
        """Why averages are not printed, and what pretraining adds."""
        gaps = [f"{row.run.label}, {row.init}: {said}" for row in self.rows if (said := _gaps(row))]
        gains = [f"{row.run.label}: {said}" for row in self.rows if (said := gain_words(row, self.rows))]
        return gaps + gains


def _row(row: Row, rank: str = "", best: Mapping[str, float | None] | None = None) -> list[Cell]:
    parts = [BASELINES.get(row.init, row.init), _seeds_words(row), swept(row.section)]
    if not row.baseline:
        parts += [model_words(row.run.record), budget_words(row.run.record)]
        parts += [f"same weights as {', '.join(row.same_weights)}"] if row.same_weights else []
    model = Cell(row.run.label, ", ".join(filter(None, parts)), "main", anchor(row.run))
    return [Cell(rank), model, division_cell(row), *number_cells(row, best)]


def _baseline_row(row: Row, same: Sequence[Row]) -> list[Cell]:
    """A row without pretraining under its own name; the runs that it was scored for stand beside it."""
    runs = ", ".join(dict.fromkeys(r.run.label for r in same))
    detail = f"of {runs}" if row.without_encoder else f"of {runs}, {_seeds_words(row)}"
    return [Cell(""), Cell(BASELINES.get(row.init, row.init), detail, "main"), division_cell(row), *number_cells(row)]


def number_cells(row: Row, best: Mapping[str, float | None] | None = None) -> list[Cell]:
    """The row's averages, then its entries; a score equal to its column's in `best` is set off."""
    cells = [average_cell(row, name) for name in row.averages]
    for entry in columns_of(row.suite):
        leads = row.score(entry) is not None and row.score(entry) == (best or {}).get(entry)
        cells.append(score_cell(row.section.tasks.get(entry), "best" if leads else ""))
    return cells


def _seeds_words(row: Row) -> str:
    return counted(len(row.section.seeds), "seed")


def division_cell(row: Row) -> Cell:
    """The row's division with the rules it breaks; a baseline competes in none."""
    if row.baseline:
        return Cell("baseline")
    return Cell(row.verdict.division, ", ".join(f.rule for f in row.verdict.broken), row.verdict.division)


def _protocol(row: Row) -> str:
    section = row.section
    count = len(section.seeds)
    length = "" if section.epochs is None else f", {counted(section.epochs, 'epoch')}"
    few = f" (fewer than the {MIN_SEEDS} of the closed division)" if count < MIN_SEEDS else ""
    of_seeds = "one seed" if count == 1 else f"median of {count} seeds"
    chosen = f", {sets} by the mean over all tasks" if (sets := swept(section)) else ""
    return f"{section.split} split, {of_seeds}{few}, {section.selection} scored{length}{chosen}"


def _gaps(row: Row) -> str:
    """Why averages of the row are not printed; empty where all are."""
    dashed = [title_of(name) for name, value in row.averages.items() if value is None]
    tasks, absent, lacking = row.section.tasks, row.section.absent, []
    for entry in columns_of(row.suite):
        if row.score(entry) is None:
            reason = tasks[entry].remark if entry in tasks else absent.get(entry) or absent.get(ENTRIES[entry][0].name)
            lacking.append(f"{title_of(entry)} ({reason or 'not scored'})")
    why = f"there is no score for {', '.join(lacking) or 'some entry'}"
    return f"{' and '.join(dashed)} not printed, because {why}" if dashed else ""
