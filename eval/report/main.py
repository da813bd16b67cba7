"""`cramming report`: the leaderboard over a folder of runs, and a page for each run.

    <out>/leaderboard.html       everything on one page that needs no other file
    <out>/leaderboard.md, .csv   the tables for a repository and for a spreadsheet
    <out>/plots/*.png
    <runs>/<name>/report/        report.md, report.html, plots, and submission.zip where all test predictions exist

It only reads run folders, so it works on another machine, on runs still in progress and on records that came by mail.
A run that cannot be read is listed with what is wrong; it hides no other run. Same records, same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from cramming.config import UserError, build, expand_home
from cramming.files import overwrite_atomically, sweep
from cramming.progress import say
from cramming.record import RULES_VERSION
from eval.report import leaderboard, plots, run_page, submission
from eval.report.leaderboard_csv import comma_separated
from eval.report.ranking import Row, bars, distinct, main_average, rows_of
from eval.report.render import DASH, Block, Cell, Figure, Group, Heading, Paragraph, Section, Table, markdown, page
from eval.report.wording import SUITE_TITLES, TITLES, anchor, counted
from eval.rules.load import Run, load_runs
from eval.rules.table import RULES, judge
from eval.tasks.suites import AVERAGES


@dataclass(frozen=True)
class ReportConfig:
    """Where the report goes."""

    out: Path | None
    each_run: bool


def main(config: dict[str, Any]) -> None:
    """Write the leaderboard of `config["runs"]`, and each run's own report; print the table and the page's path."""
    settings = build(ReportConfig, config["report"], "report")
    folder, out = expand_home(config["runs"], "runs"), check(config)
    runs = load_runs(folder)
    rows = rows_of(runs)
    readable = [run for run in runs if not run.problem]
    pages = [_page_of(run, [row for row in rows if row.run is run], settings.each_run) for run in readable]
    if settings.each_run:
        for one in pages:
            own = one.run.folder / "report"
            _write(own, "report", one.run.label, one.blocks(own, "", 1))
    for folder in (out, out / "plots"):
        sweep(folder, ".*", locked=False)
    _write(out, "leaderboard", "Cramming leaderboard", _board(runs, rows, pages, out))
    _write_file(out / "leaderboard.csv", _utf8(comma_separated(rows)))
    _print(rows, runs)
    say(f"report: {out / 'leaderboard.html'}")


def check(config: dict[str, Any]) -> Path:
    """The folder that the report goes to; UserError for a wrong setting."""
    out = build(ReportConfig, config["report"], "report").out or expand_home(config["runs"], "runs") / "report"
    if out.exists() and not out.is_dir():
        raise UserError(f"report.out={out}: is a file; give a folder")
    return out


@dataclass(frozen=True)
class Picture:
    """A drawn plot in both forms."""

    title: str
    png: bytes
    svg: str

    def place(self, out: Path, name: str) -> Figure:
        """Write the PNG below `out` and hand back the block that shows it."""
        _write_file(out / "plots" / f"{name}.png", self.png)
        return Figure(self.title, f"plots/{name}.png", self.svg)


@dataclass(frozen=True)
class RunPage:
    """All there is to say about one run; drawn once, written into the run's own report and the leaderboard."""

    run: Run
    rows: Sequence[Row]
    picture: Picture | None
    lines: Sequence[str]

    def blocks(self, out: Path, prefix: str, level: int) -> list[Block]:
        """The run's section, its plot written below `out`."""
        figures = _placed(self.picture, out, f"{prefix}training")
        return run_page.blocks(self.run, judge(self.run.record), self.rows, figures, self.lines, level)


def _page_of(run: Run, rows: Sequence[Row], write: bool) -> RunPage:
    return RunPage(run, rows, _training_picture([run], run.label, anchor(run)), _submission_lines(run, write))


def _training_picture(runs: Sequence[Run], title: str, name: str) -> Picture | None:
    drawn = plots.training([plots.Curve(run.label, run.metrics) for run in runs])
    return Picture(f"Training of {title}", plots.png(drawn), plots.svg(drawn, name)) if drawn else None


def _score_picture(rows: Sequence[Row], suite: str) -> Picture | None:
    title = TITLES[main_average(suite)]
    drawn = plots.scores(bars(rows, suite), title)
    return Picture(f"{title} of all rows", plots.png(drawn), plots.svg(drawn, suite)) if drawn else None


def _placed(picture: Picture | None, out: Path, name: str) -> list[Figure]:
    return [picture.place(out, name)] if picture else []


def _submission_lines(run: Run, write: bool) -> list[str]:
    """Write the run's submission.zip where all its test predictions are there, and say so; else say what is missing."""
    section, results = run.record.trained, run.folder / "glue" / "pretrained"
    if not section or section.suite != "glue" or not section.seeds or not (results / "predictions").is_dir():
        return []
    found, missing = submission.collect(results, section, section.seeds[0])
    path = run.folder / "report" / "submission.zip"
    if write:
        path.unlink(missing_ok=True)  # an earlier one is of other predictions
    if missing:
        reasons = [
            f"{', '.join(file for file, why in missing.items() if why == reason)} ({reason})"
            for reason in dict.fromkeys(missing.values())
        ]
        return [f"No submission to the GLUE server, for want of test predictions: {'; '.join(reasons)}."]
    if not write:
        return []
    archive = submission.archive(found)
    if problems := submission.validate(archive):
        return [f"No submission to the GLUE server, which would refuse it: {'; '.join(problems)}."]
    _write_file(path, archive)
    return [f"Submission to the GLUE server: report/submission.zip in the run folder (seed {section.seeds[0]})."]


def _board(runs: Sequence[Run], rows: Sequence[Row], pages: Sequence[RunPage], out: Path) -> list[Block]:
    """The leaderboard, from the tables down to the rules."""
    counts, ranked = f"{counted(len(runs), 'run')}, {counted(len(rows), 'scored row')}", sum(row.ranked for row in rows)
    opening = (
        f"How good a language model can one GPU train from scratch in one day? {counts}, {ranked} ranked. Division by"
        f" the rules, version {RULES_VERSION}; a missing number stays a dash."
    )
    blocks: list[Block] = [Heading("Cramming leaderboard", 1), Paragraph(opening)]
    for suite in AVERAGES:
        if any(row.suite == suite for row in rows):
            blocks += [Heading(SUITE_TITLES[suite]), leaderboard.table(rows, suite)]
            blocks += _placed(_score_picture(rows, suite), out, f"scores-{suite}")
    blocks += _problems("Not readable", {run.folder.name: run.problem for run in runs if run.problem})
    odd = {run.folder.name: _listed(run.record.problems) for run in _incomplete(runs)}
    blocks += _problems("Incomplete records", odd)
    trained = [run for run in runs if run.record.pretrain]
    if trained:
        blocks += [Heading("Pretraining"), leaderboard.pretraining_table(trained)]
    if len(trained) > 1:  # one run's plot stands in its own section
        blocks += _placed(_training_picture(trained, "all runs", "all"), out, "training")
    blocks += [Heading("Runs")] if pages else []
    for one in pages:
        blocks += one.blocks(out, f"{anchor(one.run)}-", 3)
    rules = [[Cell(rule.number, "", "main"), Cell(rule.division), Cell(rule.sentence)] for rule in RULES]
    table = Table(["Rule", "Division", "Sentence"], [Group(rules)], left=3)
    blocks += [Heading("Reference"), Section(f"The rules, version {RULES_VERSION}", [table])]
    blocks.append(Section("Published results of other protocols, not comparable", leaderboard.other_protocols()))
    return blocks


def _problems(title: str, found: Mapping[str, str]) -> list[Block]:
    """What is wrong with which folder; nothing where there is none."""
    rows = [[Cell(folder, "", "main"), Cell(wrong)] for folder, wrong in found.items()]
    return [Heading(title), Table(["Folder", "What is wrong"], [Group(rows)], left=2)] if rows else []


def _incomplete(runs: Sequence[Run]) -> list[Run]:
    """Readable records with values missing or of the wrong kind."""
    return [run for run in runs if not run.problem and run.record.problems]


def _listed(phrases: Sequence[str], most: int = 12) -> str:
    more = f"; and {len(phrases) - most} more" if len(phrases) > most else ""
    return "; ".join(phrases[:most]) + more


def _write(out: Path, name: str, title: str, blocks: Sequence[Block]) -> None:
    _write_file(out / f"{name}.md", _utf8(markdown(blocks)))
    _write_file(out / f"{name}.html", _utf8(page(title, blocks)))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold half of a surrogate pair, UTF-8 cannot


def _write_file(path: Path, content: bytes) -> None:
    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    overwrite_atomically(path, write)


def _print(rows: Sequence[Row], runs: Sequence[Run]) -> None:
    """The leaderboard in short, on the terminal, and which records are not in order."""
    for suite in AVERAGES:
        if mine := [row for row in rows if row.suite == suite]:
            _print_suite(suite, mine)
    for run in runs:
        if run.problem:
            say(f"not readable: {run.problem}")
    for run in _incomplete(runs):
        say(f"{run.folder / 'record.json'}: {_listed(run.record.problems, 4)}")


def _print_suite(suite: str, rows: Sequence[Row]) -> None:
    """Of the columns with a score the averages, and the entries where the window is wide enough for all of them; where
    no average can be printed, as many entries as it is wide enough for."""
    console = Console(highlight=False)
    grid = Grid(title=SUITE_TITLES[suite], title_justify="left", box=SIMPLE_HEAD)
    for name in ("run", "init", "division"):
        grid.add_column(name, overflow="fold")
    baselines = distinct([row for row in rows if row.baseline])
    lines = [row for row in rows if not row.baseline] + list(baselines)
    cells = [leaderboard.number_cells(row) for row in lines]
    scored = [index for index, column in enumerate(zip(*cells)) if any(cell.text != DASH for cell in column)]
    averages = [index for index in scored if index < len(AVERAGES[suite])]
    room = (console.width - (50 if averages else 35)) // 9
    shown = scored if len(scored) <= room else averages or scored[: max(1, room)]
    for index in shown:
        grid.add_column(leaderboard.number_columns(suite)[index], justify="right", no_wrap=True)
    for row, numbers in zip(lines, cells):
        names = ", ".join(dict.fromkeys(r.run.label for r in baselines.get(row, [row])))
        division = leaderboard.division_cell(row).text
        grid.add_row(Text(names), Text(row.init), division, *(numbers[index].text for index in shown))
    console.print(grid)
    if len(shown) < len(scored):
        say(f"{counted(len(scored) - len(shown), 'more column')} in leaderboard.html, or in a wider window")
