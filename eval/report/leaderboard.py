"""The leaderboard's tables and what their small print needs (templates/leaderboard.j2 says it).

Entries of the closed division on the full official data are ranked by the suite's first average, track by track
(entries.py); where runs with other objectives competed by the same clock, all of that track are ranked once more
together. Those of the open division, then rows on marked subsets or with an average that cannot be printed, then
invalid records, then the rows without pretraining stand in groups of their own and have no rank. Published rows of the
same protocol hang beneath the GLUE table. A number that is missing stays a dash, and the reason stands below the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cramming.data.task_files import ENTRIES
from eval.report.entries import Entry, Identity, RankedEntry, ranked_entries
from eval.report.ranking import BASELINES, Row, columns_of, distinct, gain_words
from eval.report.references import PROTOCOL, REFERENCES, Reference
from eval.report.render import Cell, Figure, Group
from eval.report.run_page import average_cell, score_cell
from eval.report.tracks import in_order, track_of
from eval.report.wording import (
    DASH,
    SUBSET,
    SUITE_TITLES,
    anchor,
    budget_words,
    counted,
    model_words,
    score_words,
    spread_words,
    title_of,
)
from eval.rules.evidence import few, swept
from eval.rules.fine_tuning import MIN_SEEDS
from eval.rules.load import Run
from cramming.data.suites import AVERAGES

CLOSED, UNTRAINED = "Closed division", "Baselines: without pretraining, not ranked"
ANY_OBJECTIVE = "Any objective, same clock"
AGAIN, OPEN = "Not ranked: the weights of a row above", "Open division, not ranked"
PARTS = f"Not ranked: parts of the official data ({SUBSET}), or tasks missing"
INVALID = "Not ranked: invalid records (a rule for both divisions is broken)"
GROUPS = (AGAIN, OPEN, PARTS, INVALID, UNTRAINED)


def _group_of(row: Row) -> str | None:
    """Of a row without a place; None for those that have one."""
    if row.competes:
        return None
    if row.verdict.division == "invalid":
        return INVALID
    if row.baseline:
        return UNTRAINED
    if row.main is None or row.subset:
        return PARTS
    return AGAIN if row.again else OPEN


def board_of(
    rows: Sequence[Row],
    runs: Sequence[Run],
    verdicts: Mapping[tuple[Identity, Identity], str],
    figure: Figure | None,
) -> "Board":
    """The board of a suite's rows. Tracks where no other objective competes have the closed division alone."""
    competing = [row for row in rows if row.competes]
    closed = ranked_entries([row for row in competing if row.ranked], runs, verdicts)
    others = {track_of(row.run.record) for row in competing if not row.ranked}
    any_objective = ranked_entries(
        [row for row in competing if track_of(row.run.record) in others], runs, verdicts
    )
    tables = []
    for track in in_order({*any_objective, *closed}):
        where = f", {track.title}" if track else ""
        tables.append((f"{CLOSED}{where}", closed.get(track, [])))
        tables.append((f"{ANY_OBJECTIVE}{where}", any_objective.get(track, [])))
    return Board(rows[0].suite, rows, tables, figure)


@dataclass(frozen=True)
class Board:
    """The rows of one suite; `tables`: those that have a place, each table with its title, of a track the closed
    division's before that of any objective."""

    suite: str
    rows: Sequence[Row]
    tables: Sequence[tuple[str, Sequence[RankedEntry]]]
    figure: Figure | None = None

    @property
    def title(self) -> str:
        return SUITE_TITLES[self.suite]

    @cached_property
    def columns(self) -> list[str]:
        averages = map(title_of, AVERAGES[self.suite])
        return [
            "#",
            "Model",
            "Division",
            *averages,
            *self.noise_columns,
            *map(title_of, columns_of(self.suite)),
        ]

    @cached_property
    def noise_columns(self) -> list[str]:
        """Those about pretraining seeds; none where every recipe has one run."""
        several = any(one.entry.confirmed for _, found in self.tables for one in found)
        return ["Pretraining seeds", "95 % interval", "p to the row above"] if several else []

    @cached_property
    def ranked_entries(self) -> list[RankedEntry]:
        """Every entry once: of the closed division where it is in it."""
        placed = [one for _, found in self.tables for one in found]
        return list({one.entry.first: one for one in reversed(placed)}.values())[::-1]

    @cached_property
    def groups(self) -> list[Group]:
        unranked = [
            Group(self._unranked(title), title, "faint" * (title == INVALID)) for title in GROUPS
        ]
        return [Group(self._ranked(found), title) for title, found in self.tables] + unranked

    @cached_property
    def published(self) -> Group:
        """Published results of the same protocol; none beneath another suite's rows than GLUE's."""
        rows = [self._published_row(row) for row in REFERENCES] if self.suite == "glue" else []
        return Group(rows, f"Published results, same protocol ({PROTOCOL})", "faint")

    def _ranked(self, found: Sequence[RankedEntry]) -> list[list[Cell]]:
        entries = columns_of(self.suite)
        best = {
            task: max((one.entry.score(task)[0] or 0.0 for one in found), default=None)
            for task in entries
        }
        return [self._placed_row(one, best) for one in found]

    def _placed_row(self, ranked: RankedEntry, best: Mapping[str, float | None]) -> list[Cell]:
        entry = ranked.entry
        detail = _entry_words(entry) if entry.confirmed else _row_words(entry.first)
        small = ", ".join(filter(None, (detail, *entry.remarks)))
        model = Cell(entry.label, small, "main", [anchor(row.run) for row in entry.rows])
        noise = noise_cells(ranked) if self.noise_columns else []
        return self._line(
            [Cell(ranked.places), model, division_cell(entry.first)],
            entry_cells(entry, best),
            noise,
        )

    def _unranked(self, title: str) -> list[list[Cell]]:
        rows = [row for row in self.rows if _group_of(row) == title]
        lines = (
            [(_baseline_cells(row, same), row) for row, same in distinct(rows).items()]
            if title == UNTRAINED
            else [([Cell(""), _model_cell(row), division_cell(row)], row) for row in rows]
        )
        return [self._line(cells, number_cells(row)) for cells, row in lines]

    def _published_row(self, row: Reference) -> list[Cell]:
        named = [
            Cell(""),
            Cell(row.title, "; ".join(filter(None, (row.source, row.note)))),
            Cell("published"),
        ]
        averages = [
            Cell(score_words(row.avg9), spread_words(row.spread)),
            Cell(score_words(row.avg8)),
        ]
        scores = [Cell(score_words(row.scores.get(entry))) for entry in columns_of(self.suite)]
        return self._line(named, averages + scores)

    def _line(
        self, named: Sequence[Cell], numbers: Sequence[Cell], noise: Sequence[Cell] = ()
    ) -> list[Cell]:
        """What is about pretraining seeds stands behind the averages: empty cells where a row has nothing of it."""
        averages, empty = len(AVERAGES[self.suite]), [Cell("")] * len(self.noise_columns)
        return [*named, *numbers[:averages], *(noise or empty), *numbers[averages:]]

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
        return any(task.subset for row in self.rows for task in row.section.tasks.values())

    @property
    def gaps_and_gains(self) -> list[str]:
        """Why averages are not printed, and what pretraining adds."""
        gaps = [f"{row.run.label}, {row.init}: {said}" for row in self.rows if (said := _gaps(row))]
        gains = [
            f"{row.run.label}: {said}" for row in self.rows if (said := gain_words(row, self.rows))
        ]
        return gaps + gains


def _model_cell(row: Row) -> Cell:
    return Cell(row.run.label, _row_words(row), "main", [anchor(row.run)])


def _row_words(row: Row) -> str:
    parts = [BASELINES.get(row.init, row.init), _seeds_words(row), swept(row.section)]
    if not row.baseline:
        parts += [model_words(row.run.record), budget_words(row.run.record)]
        parts += [f"same weights as {', '.join(row.same_weights)}"] if row.same_weights else []
    return ", ".join(filter(None, parts))


def _entry_words(entry: Entry) -> str:
    record, names = entry.first.run.record, [row.run.label for row in entry.rows]
    parts = [
        f"mean of {few(names)}",
        f"{_seeds_words(entry.first)} each",
        model_words(record),
        budget_words(record),
    ]
    return ", ".join(filter(None, parts))


def _baseline_cells(row: Row, same: Sequence[Row]) -> list[Cell]:
    """A row without pretraining under its own name; the runs that it was scored for stand beside it."""
    runs = ", ".join(dict.fromkeys(r.run.label for r in same))
    detail = f"of {runs}" if row.without_encoder else f"of {runs}, {_seeds_words(row)}"
    return [Cell(""), Cell(BASELINES.get(row.init, row.init), detail, "main"), division_cell(row)]


def noise_cells(ranked: RankedEntry) -> list[Cell]:
    """Seeds, interval, and p or the verdict of a duel against the row above; then how many seeds would decide."""
    entry, bounds = ranked.entry, ranked.entry.bounds
    seeds = Cell(str(len(entry.rows)), "" if entry.confirmed else "unconfirmed")
    between = Cell(f"{bounds[0]:.1f} to {bounds[1]:.1f}" if bounds else DASH)
    p = DASH if ranked.p is None else f"{ranked.p:.2g}" if ranked.p >= 0.001 else "<0.001"
    more = f"{ranked.needed} seeds each would decide" if ranked.needed else ""
    return [seeds, between, Cell(ranked.duel, "in a duel") if ranked.duel else Cell(p, more)]


def entry_cells(entry: Entry, best: Mapping[str, float | None]) -> list[Cell]:
    """The entry's averages, then its tasks; a score equal to its column's in `best` is set off."""
    suite = entry.first.suite
    averages = [(*entry.average(name), "main") for name in AVERAGES[suite]]
    tasks = [
        (*(found := entry.score(task)), "best" * (found[0] == best[task]))
        for task in columns_of(suite)
    ]
    return [
        Cell(score_words(mean), spread_words(spread), tone)
        for mean, spread, tone in averages + tasks
    ]


def number_cells(row: Row) -> list[Cell]:
    """The row's averages, then its tasks."""
    averages = [average_cell(row, name) for name in row.averages]
    return averages + [score_cell(row.section.tasks.get(entry)) for entry in columns_of(row.suite)]


def _seeds_words(row: Row) -> str:
    return counted(len(row.section.seeds), "seed")


def division_cell(row: Row) -> Cell:
    """The row's division with the rules it breaks; a baseline competes in none."""
    if row.baseline:
        return Cell("baseline")
    return Cell(
        row.verdict.division, ", ".join(f.rule for f in row.verdict.broken), row.verdict.division
    )


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
            reason = (
                tasks[entry].remark
                if entry in tasks
                else absent.get(entry) or absent.get(ENTRIES[entry][0].name)
            )
            lacking.append(f"{title_of(entry)} ({reason or 'not scored'})")
    why = f"there is no score for {', '.join(lacking) or 'some entry'}"
    return f"{' and '.join(dashed)} not printed, because {why}" if dashed else ""
