"""`cramming report`: the leaderboard over a folder of runs, and a page for each run.

    <out>/leaderboard.html       everything on one page that needs no other file
    <out>/leaderboard.md, .csv, .tex    the tables for a repository, for a spreadsheet, for a paper
    <out>/plots/*.svg            scores, and curves of the best runs
    <runs>/<name>/report/        report.md, report.html, and submission.zip where all test predictions exist
    <runs>/<name>/record.json    where it is missing, or not what the run log gives

It needs the run logs alone, so it works on another machine, on runs still in progress and on archives. A run that
cannot be read is listed with what is wrong; it hides no other run. Same logs, same bytes.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from cramming.config import file_sha256, printable, require
from cramming.data.suites import AVERAGES
from cramming.files import overwrite_atomically, sweep
from cramming.progress import say
from cramming.record import RECORD, write_record
from eval.duel.duel_log import DuelLog
from eval.report import plots, render, submission
from eval.report.entries import verdicts_of
from eval.report.leaderboard import Board, board_of
from eval.report.leaderboard_csv import comma_separated
from eval.report.leaderboard_latex import latex
from eval.report.page_data import Section, curve, data_of
from eval.report.ranking import Row, bars, main_average, rows_of
from eval.report.render import Figure
from eval.report.run_page import RunPage, links
from eval.report.wording import DASH, breaks, counted, title_of
from eval.rules.evidence import few
from eval.rules.load import Run, load_runs, readers

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

MOST_BARS = 40  # of the plot of scores


def main(
    *, runs: Path, out: Path | None, each_run: bool, duels: Path, repository: str | None
) -> None:
    """Write the leaderboard of a folder of runs, and each run's own report; print the table and the page's path.

    `duels`: the folder of duels; `repository`: the web address of the code, for links.
    """
    is_web = repository is None or repository.startswith(("https://", "http://"))
    require(is_web, f"--repository={repository}: not a web address. Give https://...")
    out = out or runs / "report"
    require(not out.exists() or out.is_dir(), f"--out={out}: is a file. Give a folder.")
    for place in (out, out / "plots"):
        sweep(place, ".*", locked=False)
    with readers(runs) as run_map:
        found = load_runs(runs, run_map)
    rows = rows_of(found)
    sections: list[Section] = []
    for run in found:
        if run.problem:
            continue
        own_rows = [row for row in rows if row.run is run]
        sections.append(_section(run, own_rows, each_run, repository, out))
    folders = [run for run in found if each_run and not run.problem and run.folder.is_dir()]
    if closed := [run.label for run in folders if not _takes_pages(run)]:
        say(f"{few(closed, 4)}: these folders can only be read, so they get no report of their own")
    verdicts = verdicts_of(DuelLog(duels))
    suites = {suite: [row for row in rows if row.suite == suite] for suite in AVERAGES}
    boards = [
        board_of(mine, found, verdicts, _score_figure(mine, suite, out))
        for suite, mine in suites.items()
        if mine
    ]
    _write_board(out, found, boards, sections)
    _write(
        out / "leaderboard.csv",
        comma_separated(rows, [entry for board in boards for entry in board.ranked_entries]),
    )
    _write(out / "leaderboard.tex", latex(boards))
    _print(boards, found)
    say(f"report: {out / 'leaderboard.html'}")


def _section(
    run: Run, rows: Sequence[Row], each_run: bool, repository: str | None, out: Path
) -> Section:
    """Return a run's part of the leaderboard; write its own report, with the same content."""
    own = run.folder / "report" if each_run and _takes_pages(run) else None
    if own is not None:
        _refresh_record(run)
    lines, line = submission_lines(run, own), curve(run.metrics, run.record)
    page = RunPage(run, rows, lines, links(run, out, repository, own))
    html = render.fragment("html", "body.j2", one=page)
    if own:
        alone = replace(page, links=links(run, own, repository))
        data = data_of([Section(alone, line)])
        _write(own / "report.md", render.markdown("report.j2", one=alone))
        _write(
            own / "report.html", render.html(run.label, "report.j2", data, one=alone, content=html)
        )
    return Section(page, line, render.fragment("html", "details.j2", one=page, content=html))


def _refresh_record(run: Run) -> None:
    """Write the run's record.json where it is missing, or not what its log gives."""
    path = run.folder / RECORD
    if not path.is_file() or file_sha256(path) != run.record_sha256:
        write_record(run.folder)


def _takes_pages(run: Run) -> bool:
    """No archive does, nor what can only be read."""
    place = run.folder / "report"
    return run.folder.is_dir() and os.access(
        place if place.is_dir() else run.folder, os.W_OK | os.X_OK
    )


def _figure(drawing: "Drawing | None", title: str, name: str, out: Path) -> Figure | None:
    """Write a plot to `plots/<name>.svg`; None where there is nothing to draw."""
    if drawing is None:
        return None
    found = Figure(title, f"plots/{name}.svg", plots.svg(drawing, name))
    _write(out / found.path, found.svg)
    return found


def _training_figure(rows: Sequence[Row], runs: Sequence[Run], out: Path) -> Figure | None:
    """Of the best runs, as many as there are colours; then of those that have no score, or no trust."""
    by_score = list(
        dict.fromkeys(
            [*(row.run.label for row in rows if not row.baseline), *(run.label for run in runs)]
        )
    )
    best = sorted(runs, key=lambda run: (bool(breaks(run)), by_score.index(run.label)))[
        : len(plots.COLOURS)
    ]
    drawing = plots.training([plots.Curve(run.label, run.metrics) for run in best])
    words = "all runs" if len(best) == len(runs) else f"the first {len(best)} of {len(runs)} runs"
    return _figure(drawing, f"Training of {words}", "training", out)


def submission_lines(run: Run, out: Path | None) -> list[str]:
    """Write the run's submission.zip into `out` where all test predictions are there; return what there is to say."""
    section = run.record.trained
    folder = run.folder / "predictions"
    if section is None or section.suite != "glue" or not folder.is_dir():
        return []
    seed = section.seeds[0]
    predictions, missing = submission.collect(folder, section, seed)
    if out:
        (out / "submission.zip").unlink(missing_ok=True)  # an earlier one is of other predictions
    if missing:
        reasons = []
        for reason in dict.fromkeys(missing.values()):
            files = ", ".join(file for file, why in missing.items() if why == reason)
            reasons.append(f"{files} ({reason})")
        return [
            f"No submission to the GLUE server, for want of test predictions: {'; '.join(reasons)}."
        ]
    if not out:
        return []
    _write(out / "submission.zip", submission.archive(predictions), synced=True)
    return [
        f"Submission to the GLUE server: report/submission.zip in the run folder (seed {seed})."
    ]


def _score_figure(rows: Sequence[Row], suite: str, out: Path) -> Figure | None:
    title, every = title_of(main_average(suite)), bars(rows, suite)
    own = [bar for bar in every if bar.kind != "published"]
    shown = [bar for bar in every if bar.kind == "published" or bar in own[:MOST_BARS]]
    words = "all rows" if len(own) <= MOST_BARS else f"the first {MOST_BARS} of {len(own)} rows"
    return _figure(plots.scores(shown, title), f"{title} of {words}", f"scores-{suite}", out)


def _write_board(
    out: Path, runs: Sequence[Run], boards: Sequence[Board], sections: Sequence[Section]
) -> None:
    """The leaderboard, from the tables down to the rules."""
    rows = [row for board in boards for row in board.rows]
    trained = [run for run in runs if run.record.pretrain]
    ranked = sum(row.ranked for row in rows)
    values = {
        "counts": f"{counted(len(runs), 'run')}, {counted(len(rows), 'scored row')}, {ranked} ranked",
        "boards": boards,
        "unreadable": {run.folder.name: run.problem for run in runs if run.problem},
        "trained": trained,
        "figure": _training_figure(rows, trained, out),
        "pages": [section.page for section in sections],
    }
    _write(out / "leaderboard.md", render.markdown("leaderboard.j2", **values))
    title = "Cramming leaderboard"
    _write(
        out / "leaderboard.html", render.html(title, "leaderboard.j2", data_of(sections), **values)
    )


def _write(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Pages and plots are many, and the same command writes them again: they are not synced one by one."""

    def write(temporary: Path) -> None:
        # JSON can hold half of a surrogate pair, UTF-8 cannot.
        temporary.write_bytes(
            content.encode("utf-8", "replace") if isinstance(content, str) else content
        )

    overwrite_atomically(path, write, synced=synced)


def _print(boards: Sequence[Board], runs: Sequence[Run]) -> None:
    """The leaderboard in short, on the terminal, and which runs cannot be read."""
    for board in boards:
        _print_board(board)
    for run in runs:
        if run.problem:
            say(f"not readable: {run.problem}")


def _print_board(board: Board) -> None:
    """The averages that have a value; where none has, the entries."""
    rows = [row for group in board.groups for row in group.rows]
    names, averages = range(3), len(AVERAGES[board.suite])
    scored = [i for i in range(3, len(board.columns)) if any(row[i].text != DASH for row in rows)]
    shown = [i for i in scored if i < 3 + averages] or scored
    grid = Grid(title=board.title, title_justify="left", box=SIMPLE_HEAD)
    for i in (*names, *shown):
        grid.add_column(
            board.columns[i],
            overflow="fold",
            justify="left" if i in names else "right",
            no_wrap=i in shown,
        )
    for row in rows:
        grid.add_row(*(Text(printable(row[i].text)) for i in (*names, *shown)))
    Console(highlight=False).print(grid)
