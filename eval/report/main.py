"""`cramming report`: the leaderboard over a folder of runs, and a page for each run.

    <out>/leaderboard.html       everything on one page that needs no other file
    <out>/leaderboard.md, .csv   the tables for a repository and for a spreadsheet
    <out>/plots/*.png
    <runs>/<name>/report/        report.md, report.html, plots, and submission.zip where all test predictions exist

It only reads run folders, so it works on another machine, on runs still in progress and on records that came by mail.
A run that cannot be read is listed with what is wrong; it hides no other run. Same records, same bytes.
"""

from collections.abc import Sequence
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
from eval.report import leaderboard, plots, submission, summary
from eval.report.render import DASH, Block, Cell, Figure, Group, Heading, Paragraph, Section, Table, markdown, page
from eval.report.standings import Entrant, bars, comma_separated, distinct, entrants
from eval.rules.fields import wrong_fields
from eval.rules.reading import Run, at, entries, load_runs
from eval.rules.table import RULES, Verdict, judge
from eval.tasks.suites import AVERAGES

TITLE = "Cramming leaderboard"


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
    rows = entrants(runs)
    stories = []
    for run in runs:
        if not run.problem:
            stories.append(_tell(run, [row for row in rows if row.run is run], settings.each_run))
            if settings.each_run:
                own = run.folder / "report"
                _write(own, "report", run.label, stories[-1].blocks(own, "", 1))
    for folder in (out, out / "plots"):
        sweep(folder, ".*", locked=False)
    _write(out, "leaderboard", TITLE, _board(runs, rows, stories, out))
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
        path = out / "plots" / f"{name}.png"
        _write_file(path, self.png)
        return Figure(self.title, f"plots/{name}.png", self.svg)


@dataclass(frozen=True)
class Story:
    """All there is to say about one run; drawn once, written into the run's own report and the leaderboard."""

    run: Run
    verdict: Verdict
    rows: Sequence[Entrant]
    picture: Picture | None
    lines: Sequence[str]

    def blocks(self, out: Path, prefix: str, level: int) -> list[Block]:
        """The run's section, its plot written below `out`."""
        figures = [self.picture.place(out, f"{prefix}training")] if self.picture else []
        return summary.blocks(self.run, self.verdict, self.rows, figures, self.lines, level)


def _tell(run: Run, rows: Sequence[Entrant], write: bool) -> Story:
    drawn = plots.training([plots.Curve(run.label, run.metrics)])
    name = leaderboard.anchor(run)
    picture = Picture(f"Training of {run.label}", plots.png(drawn), plots.svg(drawn, name)) if drawn else None
    return Story(run, judge(run.record), rows, picture, _submission_lines(run, write))


def _submission_lines(run: Run, write: bool) -> list[str]:
    """Write the run's submission.zip where all its test predictions are there, and say so; else say what is missing."""
    section, results = at(run.record, "glue.pretrained"), run.folder / "glue" / "pretrained"
    seeds = entries(at(section, "seeds"))
    if at(section, "suite") != "glue" or not seeds or not (results / "predictions").is_dir():
        return []
    found, missing = submission.collect(results, section, seeds[0])
    path = run.folder / "report" / "submission.zip"
    if write:
        path.unlink(missing_ok=True)  # an earlier one is of other predictions
    if missing:
        reasons = [
            f"{', '.join(file for file, why in missing.items() if why == reason)} ({reason})"
            for reason in dict.fromkeys(missing.values())
        ]
        return [f"No submission to the GLUE server, for want of test predictions: {'; '.join(reasons)}."]
    if write:
        try:
            archive = submission.archive(found)
        except ValueError as error:
            return [f"No submission to the GLUE server: {error}."]
        _write_file(path, archive)
        if problems := submission.validate(path):
            return [f"report/submission.zip would be refused by the GLUE server: {'; '.join(problems)}."]
    return (
        [f"Submission to the GLUE server: report/submission.zip in the run folder (seed {seeds[0]})."] if write else []
    )


def _board(runs: Sequence[Run], rows: Sequence[Entrant], stories: Sequence[Story], out: Path) -> list[Block]:
    """The leaderboard, from the tables down to the rules."""
    readable = [run for run in runs if not run.problem]
    blocks: list[Block] = [Heading(TITLE, 1), Paragraph(_opening(runs, rows))]
    for suite in AVERAGES:
        if any(row.suite == suite for row in rows):
            blocks += [Heading(leaderboard.SUITE_TITLES[suite]), leaderboard.table(rows, suite)]
            blocks += _placed(_score_picture(rows, suite), out, f"scores-{suite}")
    blocks += _problem_blocks(runs)
    trained = [run for run in readable if run.record.get("pretrain")]
    if trained:
        blocks += [Heading("Pretraining"), leaderboard.pretraining_table(trained)]
        blocks += _placed(_training_picture(trained), out, "training")
    blocks += [Heading("Runs")] if stories else []
    for story in stories:
        blocks += story.blocks(out, f"{leaderboard.anchor(story.run)}-", 3)
    blocks += [Heading("Reference"), Section(f"The rules, version {RULES_VERSION}", [_rules_table()])]
    blocks.append(Section("Published results of other protocols, not comparable", leaderboard.other_protocols()))
    return blocks


def _opening(runs: Sequence[Run], rows: Sequence[Entrant]) -> str:
    ranked = sum(row.ranked for row in rows)
    counts = f"{leaderboard.counted(len(runs), 'run')}, {leaderboard.counted(len(rows), 'scored row')}"
    return (
        f"How good a language model can one GPU train from scratch in one day? {counts}, {ranked} ranked. Division by"
        f" the rules, version {RULES_VERSION}; a missing number stays a dash."
    )


def _placed(picture: Picture | None, out: Path, name: str) -> list[Figure]:
    return [picture.place(out, name)] if picture else []


def _training_picture(runs: Sequence[Run]) -> Picture | None:
    if len(runs) < 2:  # one run's plot stands in its own section
        return None
    drawn = plots.training([plots.Curve(run.label, run.metrics) for run in runs])
    return Picture("Training of all runs", plots.png(drawn), plots.svg(drawn, "all")) if drawn else None


def _score_picture(rows: Sequence[Entrant], suite: str) -> Picture | None:
    title = leaderboard.TITLES[next(iter(AVERAGES[suite]))]
    drawn = plots.scores(bars(rows, suite), title)
    return Picture(f"{title} of all rows", plots.png(drawn), plots.svg(drawn, suite)) if drawn else None


def _problem_blocks(runs: Sequence[Run]) -> list[Block]:
    """Folders that could not be read, and readable records with fields missing or of the wrong kind."""
    found: list[Block] = []
    unread = [[Cell(run.folder.name, "", "main"), Cell(run.problem)] for run in runs if run.problem]
    if unread:
        found += [Heading("Not readable"), Table(["Folder", "What is wrong"], [Group(unread)], left=2)]
    odd = [[Cell(run.folder.name, "", "main"), Cell(_listed(wrong))] for run, wrong in _odd(runs)]
    if odd:
        found += [Heading("Incomplete records"), Table(["Folder", "What is wrong"], [Group(odd)], left=2)]
    return found


def _odd(runs: Sequence[Run]) -> list[tuple[Run, list[str]]]:
    return [(run, wrong) for run in runs if not run.problem and (wrong := wrong_fields(run.record))]


def _listed(phrases: Sequence[str], most: int = 12) -> str:
    more = f"; and {len(phrases) - most} more" if len(phrases) > most else ""
    return "; ".join(phrases[:most]) + more


def _rules_table() -> Table:
    rows = [[Cell(rule.number, "", "main"), Cell(rule.division), Cell(rule.sentence)] for rule in RULES]
    return Table(["Rule", "Division", "Sentence"], [Group(rows)], left=3)


def _write(out: Path, name: str, title: str, blocks: Sequence[Block]) -> None:
    _write_file(out / f"{name}.md", _utf8(markdown(blocks)))
    _write_file(out / f"{name}.html", _utf8(page(title, blocks)))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold half of a surrogate pair, UTF-8 cannot


def _write_file(path: Path, content: bytes) -> None:
    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    overwrite_atomically(path, write)


def _print(rows: Sequence[Entrant], runs: Sequence[Run]) -> None:
    """The leaderboard in short, on the terminal: of the columns with a score the averages, and the entries where the
    window is wide enough for all of them; where no average can be printed, as many entries as it is wide enough for.
    """
    console = Console(highlight=False)
    for suite, averages in AVERAGES.items():
        mine = [row for row in rows if row.suite == suite]
        if not mine:
            continue
        grid = Grid(title=leaderboard.SUITE_TITLES[suite], title_justify="left", box=SIMPLE_HEAD)
        for name in ("run", "init", "division"):
            grid.add_column(name, overflow="fold")
        baselines = distinct([row for row in mine if row.baseline])
        lines = [row for row in mine if not row.baseline] + list(baselines)
        cells = [leaderboard.number_cells(row) for row in lines]
        scored = [index for index, column in enumerate(zip(*cells)) if any(cell.text != DASH for cell in column)]
        means = [index for index in scored if index < len(averages)]
        room = (console.width - (50 if means else 35)) // 9
        shown = scored if len(scored) <= room else means or scored[: max(1, room)]
        for index in shown:
            grid.add_column(leaderboard.number_columns(suite)[index], justify="right", no_wrap=True)
        for row, numbers in zip(lines, cells):
            names = ", ".join(dict.fromkeys(r.run.label for r in baselines.get(row, [row])))
            division = leaderboard.division_cell(row).text
            grid.add_row(Text(names), Text(row.init), division, *(numbers[index].text for index in shown))
        console.print(grid)
        if len(shown) < len(scored):
            more = leaderboard.counted(len(scored) - len(shown), "more column")
            say(f"{more} in leaderboard.html, or in a wider window")
    for run in runs:
        if run.problem:
            say(f"not readable: {run.problem}")
    for run, wrong in _odd(runs):
        say(f"{run.folder / 'record.json'}: {_listed(wrong, 4)}")
