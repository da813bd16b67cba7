"""`cramming report`: the leaderboard over a folder of runs, and a page for each run.

    <out>/leaderboard.html       everything on one page that needs no other file
    <out>/leaderboard.md, .csv, .tex    the tables for a repository, for a spreadsheet, for a paper
    <runs>/<name>/report/        report.md, report.html, and submission.zip where all test predictions exist
    <runs>/<name>/record.json    where it is missing, or not what the run log gives

It needs the run logs alone, so it works on another machine, on unfinished runs and on archives. A run that cannot be
read is listed with its problem. Same logs, same bytes.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from cramming.config import file_sha256, printable, require
from cramming.data.suites import AVERAGES
from cramming.files import overwrite_atomically, sweep
from cramming.progress import say, show_table
from cramming.record import RECORD, write_record
from eval.duel.duel_log import DuelLog
from eval.report.blocks import Block, Heading, Notes, Text, to_markdown
from eval.report.entries import verdicts_of
from eval.report.format import counted
from eval.report.leaderboard import (
    Board,
    board_blocks,
    board_of,
    reference_blocks,
    runs_table,
    summary_table,
    to_csv,
    to_latex,
)
from eval.report.page import Section, leaderboard_page, run_page
from eval.report.run_page import curve_of, links_of, run_blocks, status_of
from eval.report.submission import write_submission
from eval.report.table import Row, rows_of
from eval.rules.load import Run, load_runs, readers


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the collector of reference cycles: logs have none, and it would walk through all of them many times."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_without_collector()
def main(
    *, runs: Path, out: Path | None, each_run: bool, duels: Path, repository: str | None
) -> None:
    """Write the leaderboard of a folder of runs, and each run's own report; print the table and the page's path.

    `duels` is the folder of duels, `repository` the web address of the code, for links.
    """
    is_web = repository is None or repository.startswith(("https://", "http://"))
    require(is_web, f"--repository={repository}: not a web address. Give https://...")
    out = out or runs / "report"
    require(not out.exists() or out.is_dir(), f"--out={out}: is a file. Give a folder.")
    sweep(out, ".*", locked=False)
    with readers(runs) as run_map:
        loaded = load_runs(runs, run_map)
    rows = rows_of(loaded)
    sections = []
    for run in loaded:
        if run.problem:
            say(f"not readable: {run.problem}")
        else:
            rows_of_run = [row for row in rows if row.run is run]
            sections.append(_write_run(run, rows_of_run, each_run, repository, out))
    verdicts = verdicts_of(DuelLog(duels))
    boards = []
    for suite in AVERAGES:
        of_suite = [row for row in rows if row.suite == suite]
        if of_suite:
            boards.append(board_of(of_suite, loaded, verdicts))
    _write_leaderboard(out, loaded, rows, boards, sections)
    for board in boards:
        table = summary_table(board)
        show_table(board.title, table.columns, table.rows)
    say(f"report: {out / 'leaderboard.html'}")


def _write_run(
    run: Run, rows: Sequence[Row], each_run: bool, repository: str | None, out: Path
) -> Section:
    """Write the report of one run; return its part of the leaderboard."""
    place = run.folder / "report"
    writes = each_run and _takes_report(run, place)
    remark = write_submission(run, place if writes else None)
    blocks = run_blocks(run, rows, [remark] if remark else [])
    curve = curve_of(run)
    if writes:
        record = run.folder / RECORD
        if not record.is_file() or file_sha256(record) != run.record_sha256:
            write_record(run.folder)
        links = links_of(run, place, repository)
        section = Section(run, rows, [links, *blocks], curve)
        title = Heading(f"{printable(run.label)} [{status_of(run, rows)}]", 1)
        _write(place / "report.md", to_markdown([title, *section.blocks]))
        _write(place / "report.html", run_page(section))
    return Section(run, rows, [links_of(run, out, repository), *blocks], curve)


def _takes_report(run: Run, place: Path) -> bool:
    """Return whether a report can be written into the run's folder; an archive takes none."""
    if not run.folder.is_dir():
        return False
    if os.access(place if place.is_dir() else run.folder, os.W_OK | os.X_OK):
        return True
    say(f"{run.label}: its folder can only be read, so it gets no report")
    return False


def _write_leaderboard(
    out: Path,
    runs: Sequence[Run],
    rows: Sequence[Row],
    boards: Sequence[Board],
    sections: Sequence[Section],
) -> None:
    """Write the four forms of the leaderboard."""
    problems = {run.folder.name: run.problem for run in runs if run.problem}
    ranked = sum(row.ranked for row in rows)
    counts = (counted(len(runs), "run"), counted(len(rows), "scored row"), f"{ranked} ranked")
    summary = f"{', '.join(counts)}."
    _write(out / "leaderboard.html", leaderboard_page(boards, sections, problems, summary))
    _write(out / "leaderboard.md", to_markdown(_markdown_blocks(boards, runs, problems, summary)))
    entries = list(chain.from_iterable(board.ranked for board in boards))
    _write(out / "leaderboard.csv", to_csv(rows, entries))
    _write(out / "leaderboard.tex", to_latex(boards))


def _markdown_blocks(
    boards: Sequence[Board], runs: Sequence[Run], problems: dict[str, str], summary: str
) -> list[Block]:
    """Return the blocks of leaderboard.md."""
    blocks: list[Block] = [Heading("Cramming leaderboard", 1), Text(summary)]
    for board in boards:
        blocks += [Heading(board.title), *board_blocks(board)]
    if problems:
        lines = [f"{name}: {problem}" for name, problem in problems.items()]
        blocks += [Heading("Not readable"), Notes(lines)]
    trained = [run for run in runs if run.record.pretrain]
    if trained:
        blocks += [Heading("Runs"), runs_table(trained)]
    return [*blocks, Heading("Reference"), *reference_blocks()]


def _write(path: Path, text: str) -> None:
    """Write a page; pages are many, and the same command writes them again, so they are not synced one by one."""
    content = text.encode(
        "utf-8", "replace"
    )  # JSON can hold half of a surrogate pair, UTF-8 cannot
    overwrite_atomically(path, lambda temporary: temporary.write_bytes(content), synced=False)
