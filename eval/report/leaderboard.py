"""The leaderboard as one table, and its thin writers: CSV, LaTeX and Markdown (the page takes the table as it is).

Entries of the closed division on the full official data are ranked by the suite's first average, track by track. If
runs with other objectives compete by the same clock, all of that track are ranked once more together. All other rows
stand in groups without a rank. Published rows of the same protocol stand beneath the GLUE table.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from cramming.data.suites import AVERAGES, SUITES
from cramming.data.task_files import ENTRIES
from eval.report.blocks import Block, Details, Heading, Notes, Table, Text
from eval.report.entries import Identity, entries_of, sort_tracks, track_of
from eval.report.facts import FACTS, facts_of, known_facts
from eval.report.format import (
    DASH,
    PARTIAL,
    Score,
    compact,
    counted,
    describe_run,
    join_words,
    run_id,
    title_of,
    titles_of,
)
from eval.report.ranking import RankedEntry, rank_entries
from eval.report.references import EIGHT, OTHER_PROTOCOLS, PROTOCOL, REFERENCES, Reference
from eval.report.run_page import CONSEQUENCES
from eval.report.table import (
    BASELINES,
    GAIN,
    SCORED_MEAN,
    Row,
    along_the_way,
    distinct,
    main_average,
    score_columns,
)
from eval.rules.evidence import abbreviated, swept
from eval.rules.load import Run
from eval.rules.table import RULES

CLOSED, ANY_OBJECTIVE = "Closed division", "Any objective, same clock"
DUPLICATES, OPEN = "Not ranked: the weights of a row above", "Open division, not ranked"
PARTS = "Not ranked: parts of the official data, or tasks missing"
UNFINISHED = "Not ranked: not finished"
INVALID = "Not ranked: invalid (a rule for both divisions is broken)"
UNTRAINED = "Baselines: without pretraining, not ranked"
PUBLISHED = f"Published results, same protocol ({PROTOCOL})"
MEASURES = [fact.title for fact in FACTS.values() if fact.view == "measures"]
HOW_TO_READ = Path(__file__).with_name("notes.txt").read_text(encoding="utf-8").splitlines()
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a cell that spreadsheets run
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")

Line = tuple[dict[str, Any], Callable[[str], Score]]  # words of a row, and its score by column


@dataclass(frozen=True)
class Board:
    """Rows of one suite; `tables`: the ranked ones, each table with its title."""

    suite: str
    rows: Sequence[Row]
    tables: Sequence[tuple[str, Sequence[RankedEntry]]]

    @property
    def title(self) -> str:
        """Title of the suite."""
        return "Embedded tasks" if self.suite == "embedded" else SUITES["glue"].title

    @property
    def ranked(self) -> list[RankedEntry]:
        """Ranked entries, each once: that of the closed division for an entry with two places."""
        by_row: dict[Row, RankedEntry] = {}
        for _, entries in self.tables:
            for ranked in entries:
                by_row.setdefault(ranked.entry.first, ranked)
        return list(by_row.values())

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Table with a row per entry, in groups. Scores are `Score`s; columns without any are left out."""
        lines = [*self._ranked_lines(), *self._unranked_lines()]
        trained = [row for row in self.rows if not row.is_baseline] or self.rows
        columns = []
        for name in score_columns(self.suite):
            if any(row.cell(name).value is not None for row in trained):
                columns.append(name)
        if self.suite == "glue":
            for row in REFERENCES:
                words = {"group": PUBLISHED, "model": row.title, "detail": row.detail}
                lines.append((words | {"division": "published", "runs": []}, row.cell))
        table = []
        for words, score in lines:
            scores = {name: score(name) for name in columns}
            table.append(words | scores)
        named = ("group", "place", "model", "detail", "hours", "hardware")
        names = [*named, *columns, "division", "runs", *MEASURES]
        return pd.DataFrame(table, columns=names).fillna("")

    @property
    def columns(self) -> list[str]:
        """Columns to print: place, model, headline scores, tasks, division."""
        hidden = ("group", "detail", "hours", "hardware", "runs", *MEASURES)
        return [name for name in self.frame if name not in hidden]

    @cached_property
    def printed(self) -> dict[str, pd.DataFrame]:
        """Tables in words by their titles: scores, and below the averages the measures of rows that have any."""
        measured = self.frame[(self.frame[MEASURES] != "").any(axis=1)]
        averages = [*AVERAGES[self.suite], SCORED_MEAN, GAIN]
        names = [name for name in ("place", "model", *averages) if name in measured]
        names += [name for name in MEASURES if (measured[name] != "").any()]
        tables = {self.title: in_words(self.frame, self.columns)}
        if len(measured):
            known = measured.replace({name: {"": DASH} for name in MEASURES})
            tables[f"{self.title}: measures beside the tasks"] = in_words(known, names)
        return tables

    @property
    def headline(self) -> str:
        """Best trained model in one sentence: its score, and the gain over a baseline."""
        trained = [row for row in self.rows if not row.is_baseline]
        if not trained:
            return ""
        best = min(trained, key=lambda row: not row.competes)  # the first of the ranked ones
        column = SCORED_MEAN if best.main is None else main_average(self.suite)
        score = f"{title_of(column)} {best.cell(column)}"
        return f"{best.run.label}: {join_words(score, best.gain, describe_run(best.run.record))}."

    @property
    def notes(self) -> Details:
        """Explanation of the table's columns and marks."""
        averages = AVERAGES[self.suite].items()
        definitions = [f"{title_of(name)}: {average.definition}." for name, average in averages]
        return Details("How to read this table", [Notes(definitions + HOW_TO_READ)])

    def _ranked_lines(self) -> Iterator[Line]:
        for title, entries in self.tables:
            for ranked in entries:
                entry = ranked.entry
                words = _words(entry.first, entry.rows)
                detail = join_words(words["detail"], *ranked.remarks)
                words |= {"place": ranked.places, "model": entry.label, "detail": detail}
                yield {"group": title} | words, entry.cell

    def _unranked_lines(self) -> Iterator[Line]:
        for group in (DUPLICATES, OPEN, PARTS, UNFINISHED, INVALID):
            for row in self.rows:
                if _group_of(row) == group:
                    yield {"group": group} | _words(row, [row]), row.cell
        for same in distinct([row for row in self.rows if _group_of(row) == UNTRAINED]):
            names = abbreviated(list(dict.fromkeys(row.run.label for row in same)))
            words = {"model": BASELINES[same[0].init], "detail": f"of {names}"}
            yield {"group": UNTRAINED, "division": "baseline", "runs": []} | words, same[0].cell


def board_of(
    rows: Sequence[Row], runs: Sequence[Run], verdicts: Mapping[tuple[Identity, Identity], str]
) -> Board:
    """Return the board of a suite's rows; a track without other objectives has the closed division alone."""
    competing = [row for row in rows if row.competes]
    closed = entries_of([row for row in competing if row.ranked], runs)
    others = {track_of(row.run.record) for row in competing if not row.ranked}
    mixed = entries_of([row for row in competing if track_of(row.run.record) in others], runs)
    tables = []
    for track in sort_tracks({*mixed, *closed}):
        where = f", {track.title}" if track else ""
        for title, entries in ((CLOSED, closed), (ANY_OBJECTIVE, mixed)):
            if track in entries:
                tables.append((f"{title}{where}", rank_entries(entries[track], verdicts)))
    return Board(rows[0].suite, rows, tables)


def _group_of(row: Row) -> str | None:
    """Return the group heading of an unranked row, or None for a ranked row."""
    if row.competes:
        return None
    if row.verdict.division == "invalid":
        return INVALID
    if row.is_baseline:
        return UNTRAINED
    if row.verdict.division == "unfinished":
        return UNFINISHED
    if row.main is None or row.subset:
        return PARTS
    return DUPLICATES if row.is_duplicate else OPEN


def _words(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the words of a model's row; `rows`: those of all its runs."""
    names = abbreviated([each.run.label for each in rows])
    mean = f"mean of {names}" if len(rows) > 1 else ""
    weights = row.same_weights and f"same weights as {abbreviated(row.same_weights)}"
    partial = row.scored_mean is not None and f"{PARTIAL} {titles_of(row.scored)}"
    seeds = counted(len(row.section.seeds), "seed")
    epochs = row.section.epochs and counted(row.section.epochs, "epoch")
    init = row.is_baseline and BASELINES[row.init]
    seconds = row.run.record.training.budget.spent_seconds
    device = row.run.record.environment.device
    return {
        "model": row.run.label,
        "detail": join_words(
            mean,
            init,
            describe_run(row.run.record),
            seeds,
            epochs,
            swept(row.section),
            weights,
            partial,
        ),
        "hours": "" if seconds is None else compact(seconds / 3600),
        "hardware": device.name or device.kind,
        "division": join_words(
            row.verdict.division, *(finding.rule for finding in row.verdict.broken)
        ),
        "runs": [run_id(each.run) for each in rows],
        **known_facts(row.run.record, "measures"),
    }


def to_csv(rows: Sequence[Row], ranked: Sequence[RankedEntry]) -> str:
    """Return the text of leaderboard.csv: every scored row, with the place of its entry and the facts of its run.

    Published rows stand beneath.
    """
    places: dict[Row, dict[str, Any]] = {}
    for each in ranked:
        places |= dict.fromkeys(each.entry.rows, _csv_place(each))
    runs = {row.run.label: row.run for row in rows}
    facts = [{"run": label, **facts_of(run.record)} for label, run in runs.items()]
    lines = [_csv_line(row) | places.get(row, {}) for row in rows]
    for row in rows:
        lines += map(_csv_checkpoint, along_the_way(row))
    table = pd.DataFrame([_csv_reference(reference) for reference in REFERENCES])
    if lines:
        measured = pd.DataFrame(lines).merge(pd.DataFrame(facts), on="run")
        table = pd.concat([measured, table])
    return table.map(_csv_cell).to_csv(index=False, lineterminator="\n")


def _csv_line(row: Row) -> dict[str, Any]:
    """Return what a row says of itself, and its scores."""
    section = row.section
    return {
        "kind": "run",
        "run": row.run.label,
        "folder": row.run.folder.name,
        "init": row.init,
        "suite": row.suite,
        "division": row.verdict.division,
        "broken_rules": " ".join(finding.rule for finding in row.verdict.broken),
        "split": section.split,
        "selection": section.selection,
        "seeds": " ".join(map(str, section.seeds)),
        "subset": row.subset,
        **_csv_scores(row.cell),
    }


def _csv_checkpoint(row: Row) -> dict[str, Any]:
    """Return the line of a checkpoint, with what the run had spent by then."""
    spent = {f"reached_{name}": value for name, value in row.spent.items()}
    return _csv_line(row) | {"kind": "checkpoint"} | spent


def _csv_reference(reference: Reference) -> dict[str, Any]:
    """Return the line of a published result."""
    words = {"kind": "published", "run": reference.title, "suite": "glue"}
    return words | _csv_scores(reference.cell) | {"source": reference.source}


def _csv_scores(cell: Callable[[str], Score]) -> dict[str, float | None]:
    """Return all scores of a row, and their standard deviations."""
    scores: dict[str, float | None] = {}
    for name in (*AVERAGES["glue"], *AVERAGES["embedded"], SCORED_MEAN, GAIN, *ENTRIES):
        scores[name], scores[f"{name}_std"], _ = cell(name)
    return scores


def _csv_place(ranked: RankedEntry) -> dict[str, Any]:
    """Return the places of an entry, its mean over runs, and how it compares with the entry above it."""
    return {
        "entry": ranked.entry.label,
        "first_place": ranked.first,
        "last_place": ranked.last,
        "mean": ranked.entry.main,
        "p_above": ranked.p,
        "duel_above": ranked.duel,
        "seeds_to_decide": ranked.needed,
        "remarks": "; ".join(ranked.remarks),
    }


def _csv_cell(value: Any) -> str:
    """Return seven digits of a number; a text that a spreadsheet would run as a formula gets an apostrophe."""
    if value is None or value != value:  # None or NaN
        return ""
    if isinstance(value, float):
        return f"{value:.7g}"
    text = str(value)
    is_formula = text.lstrip(" \n")[:1] in FORMULA and not NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def to_latex(boards: Sequence[Board]) -> str:
    """Return the text of leaderboard.tex: a table per suite for the package booktabs."""
    tables = ["% Needs \\usepackage{booktabs} and an engine that reads UTF-8.\n"]
    for board in boards:
        for caption, table in board.printed.items():
            alignment = "ll" + "r" * (len(table.columns) - 2)
            tables.append(
                table.to_latex(index=False, escape=True, column_format=alignment, caption=caption)
            )
    return "\n".join(tables)


def in_words(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return columns of the table in words, each group below a row with its title."""
    parts = []
    for title, group in frame.groupby("group", sort=False):
        parts.append(pd.DataFrame({"model": [title]}))
        parts.append(group[columns].map(_one_line))
    return pd.concat(parts).fillna("")[columns].rename(columns=title_of)


def summary_table(board: Board) -> Table:
    """Return name, headline score, hours, hardware and division of each row that was measured here."""
    measured = board.frame[board.frame["group"] != PUBLISHED]
    scores = (main_average(board.suite), SCORED_MEAN, GAIN)
    names = ("place", "model", *scores, "hours", "hardware", "division")
    table = in_words(measured, [name for name in names if name in measured])
    return table_of(table)


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def board_blocks(board: Board) -> list[Block]:
    """Return the headline, the tables and the notes of a suite."""
    (_, scores), *others = board.printed.items()
    details = [f"{row.model}: {row.detail}." for row in board.frame.itertuples()]
    blocks: list[Block] = [Text(board.headline), table_of(scores)]
    blocks.append(Details("The rows", [Notes(details)]))
    for title, table in others:
        blocks += [Heading(title, 3), table_of(table)]
    return [*blocks, board.notes]


def table_of(frame: pd.DataFrame, left: int = 2) -> Table:
    """Return a frame as a part of a page."""
    return Table(list(frame), frame.values.tolist(), left)


def runs_table(runs: Sequence[Run]) -> Table:
    """Return the training and the recipe of each run; a fact that no run has gets no column."""
    frame = pd.DataFrame([known_facts(run.record, "training", "recipe") for run in runs])
    frame = frame[[fact.title for fact in FACTS.values() if fact.title in frame]].fillna(DASH)
    frame.insert(0, "Model", [run.label for run in runs])
    return table_of(frame, 1)


def reference_blocks() -> list[Block]:
    """Return the rules, and published results of other protocols."""
    rules = [(rule.number, rule.sentence, CONSEQUENCES[rule.kind]) for rule in RULES]
    results = []
    for row in OTHER_PROTOCOLS:
        scores = [str(row.cell(name)) for name in ("avg8", *EIGHT)]
        results.append((row.title, *scores, row.parameters, row.cost, row.detail))
    columns = (
        "Model",
        "average of 8",
        *map(title_of, EIGHT),
        "Parameters",
        "Pretraining",
        "Source",
    )
    return [
        Details("The rules", [Table(("Rule", "Sentence", "A run that breaks it"), rules, 3)]),
        Details("Published results of other protocols, not comparable", [Table(columns, results)]),
    ]
