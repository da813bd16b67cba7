"""`cramming report`: the leaderboard over a folder of runs, and a page for each run.

    <out>/leaderboard.html       everything on one page that needs no other file
    <out>/leaderboard.md, .csv   the tables for a repository and for a spreadsheet
    <out>/plots/*.svg
    <runs>/<name>/report/        report.md, report.html, plots, and submission.zip where all test predictions exist

It only reads run folders, so it works on another machine, on runs still in progress and on records that came by mail.
A run that cannot be read is listed with what is wrong; it hides no other run. Same records, same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from cramming.config import UserError, build, expand_home
from cramming.files import overwrite_atomically, sweep
from cramming.progress import say
from eval.duel.ledger import Ledger
from eval.report import plots, render, submission
from eval.report.entries import fought
from eval.report.leaderboard import Board, board_of
from eval.report.leaderboard_csv import comma_separated
from eval.report.ranking import Row, bars, main_average, rows_of
from eval.report.render import Figure
from eval.report.run_page import RunPage
from eval.report.wording import DASH, anchor, counted, title_of
from eval.rules.evidence import few
from eval.rules.load import Run, load_runs
from eval.tasks.suites import AVERAGES

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class ReportConfig:
    """Where the report goes; `ledger`: the folder of duels."""

    out: Path | None
    each_run: bool
    ledger: Path


def main(config: dict[str, Any]) -> None:
    """Write the leaderboard of `config["runs"]`, and each run's own report; print the table and the page's path."""
    settings = build(ReportConfig, config["report"], "report")
    folder, out = expand_home(config["runs"], "runs"), check(config)
    runs = load_runs(folder)
    rows = rows_of(runs)
    for place in (out, out / "plots"):
        sweep(place, ".*", locked=False)
    pages = []
    for run in runs:
        if run.problem:
            continue
        own = run.folder / "report" if settings.each_run else None
        places = [out, *([own] if own else [])]
        figure = _training_figure([run], run.label, f"{anchor(run)}-training", *places)
        page = RunPage(run, [row for row in rows if row.run is run], figure, submission_lines(run, own))
        pages.append(page)
        if own:
            _write_page(own, "report", run.label, "report.j2", one=page)
    verdicts = fought(Ledger(settings.ledger))
    suites = {suite: [row for row in rows if row.suite == suite] for suite in AVERAGES}
    boards = [board_of(mine, runs, verdicts, _score_figure(mine, suite, out)) for suite, mine in suites.items() if mine]
    _write_board(out, runs, boards, pages)
    _write(out / "leaderboard.csv", comma_separated(rows, [one for found in boards for one in found.ranked_entries]))
    _print(boards, runs)
    say(f"report: {out / 'leaderboard.html'}")


def check(config: dict[str, Any]) -> Path:
    """The folder that the report goes to; UserError for a wrong setting."""
    out = build(ReportConfig, config["report"], "report").out or expand_home(config["runs"], "runs") / "report"
    if out.exists() and not out.is_dir():
        raise UserError(f"report.out={out}: is a file; give a folder")
    return out


def _figure(drawing: "Drawing | None", title: str, name: str, *places: Path) -> Figure | None:
    """Write a plot to `plots/<name>.svg` below each place; None where there is nothing to draw."""
    if drawing is None:
        return None
    found = Figure(title, f"plots/{name}.svg", plots.svg(drawing, name))
    for place in places:
        _write(place / found.path, found.svg)
    return found


def _training_figure(runs: Sequence[Run], title: str, name: str, *places: Path) -> Figure | None:
    drawing = plots.training([plots.Curve(run.label, run.metrics) for run in runs])
    return _figure(drawing, f"Training of {title}", name, *places)


def submission_lines(run: Run, out: Path | None) -> list[str]:
    """Write the run's submission.zip into `out` where all test predictions are there; what there is to say of it."""
    section, predictions = run.record.trained, run.folder / "glue" / "pretrained" / "predictions"
    if not section or section.suite != "glue" or not section.seeds or not predictions.is_dir():
        return []
    found, missing = submission.collect(predictions, run.record, section.seeds[0])
    if out:
        (out / "submission.zip").unlink(missing_ok=True)  # an earlier one is of other predictions
    if missing:
        reasons = [
            f"{', '.join(file for file, why in missing.items() if why == reason)} ({reason})"
            for reason in dict.fromkeys(missing.values())
        ]
        return [f"No submission to the GLUE server, for want of test predictions: {'; '.join(reasons)}."]
    if not out:
        return []
    _write(out / "submission.zip", submission.archive(found))
    return [f"Submission to the GLUE server: report/submission.zip in the run folder (seed {section.seeds[0]})."]


def _score_figure(rows: Sequence[Row], suite: str, out: Path) -> Figure | None:
    title = title_of(main_average(suite))
    return _figure(plots.scores(bars(rows, suite), title), f"{title} of all rows", f"scores-{suite}", out)


def _write_board(out: Path, runs: Sequence[Run], boards: Sequence[Board], pages: Sequence[RunPage]) -> None:
    """The leaderboard, from the tables down to the rules."""
    rows = [row for board in boards for row in board.rows]
    trained = [run for run in runs if run.record.pretrain]
    # One run's plot stands in its own section.
    curves = _training_figure(trained, "all runs", "training", out) if len(trained) > 1 else None
    problems = {
        "Not readable": {run.folder.name: run.problem for run in runs if run.problem},
        "Odd values in records": {run.folder.name: few(run.record.problems, 12, "; ") for run in _odd(runs)},
    }
    ranked = sum(row.ranked for row in rows)
    _write_page(
        out, "leaderboard", "Cramming leaderboard", "leaderboard.j2",
        counts=f"{counted(len(runs), 'run')}, {counted(len(rows), 'scored row')}, {ranked} ranked",
        boards=boards,
        problems=problems,
        trained=trained,
        figure=curves,
        pages=pages,
    )  # fmt: skip


def _odd(runs: Sequence[Run]) -> list[Run]:
    """Readable records with values of the wrong kind."""
    return [run for run in runs if not run.problem and run.record.problems]


def _write_page(out: Path, name: str, title: str, template: str, **values: Any) -> None:
    _write(out / f"{name}.md", render.markdown(template, **values))
    _write(out / f"{name}.html", render.html(title, template, **values))


def _write(path: Path, content: str | bytes) -> None:
    def write(temporary: Path) -> None:
        # JSON can hold half of a surrogate pair, UTF-8 cannot.
        temporary.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)

    overwrite_atomically(path, write)


def _print(boards: Sequence[Board], runs: Sequence[Run]) -> None:
    """The leaderboard in short, on the terminal, and which records are not in order."""
    for board in boards:
        _print_board(board)
    for run in runs:
        if run.problem:
            say(f"not readable: {run.problem}")
    for run in _odd(runs):
        say(f"{run.folder / 'record.json'}: {few(run.record.problems, 4, '; ')}")


def _print_board(board: Board) -> None:
    """The averages that have a value; where none has, the entries."""
    rows = [row for group in board.groups for row in group.rows]
    names, averages = range(3), len(AVERAGES[board.suite])
    scored = [i for i in range(3, len(board.columns)) if any(row[i].text != DASH for row in rows)]
    shown = [i for i in scored if i < 3 + averages] or scored
    grid = Grid(title=board.title, title_justify="left", box=SIMPLE_HEAD)
    for i in (*names, *shown):
        grid.add_column(
            board.columns[i], overflow="fold", justify="left" if i in names else "right", no_wrap=i in shown
        )
    for row in rows:
        grid.add_row(*(Text(row[i].text) for i in (*names, *shown)))
    Console(highlight=False).print(grid)
