"""The page (templates/): one HTML file with its data, scripts and style inside, which needs no network.

Data is JSON, deflated, in base64: 500 runs take less than 5 MB. `overview` has what is shown when the page opens,
`details` what is shown on demand: curves, settings, the report of a run.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from cramming.data.task_files import ENTRIES
from eval.report.blocks import Block, Table, to_data
from eval.report.facts import FACTS, differences, facts_of
from eval.report.format import Score, describe_run, run_id, title_of
from eval.report.leaderboard import MEASURES, Board, reference_blocks, summary_table
from eval.report.run_page import status_of
from eval.report.table import Row, along_the_way, score_columns
from eval.rules.load import Run

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("uplot/uPlot.iife.min.js", "blocks.js", "charts.js", "table.js", "page.js")


@dataclass(frozen=True)
class Section:
    """Run on a page: its scored rows, the blocks of its report, and the columns of its curves."""

    run: Run
    rows: Sequence[Row]
    blocks: Sequence[Block]
    curve: Mapping[str, Any]


def leaderboard_page(
    boards: Sequence[Board], sections: Sequence[Section], problems: Mapping[str, str], summary: str
) -> str:
    """Return the HTML of the leaderboard; `problems`: of the folders that could not be read."""
    overview = {
        "title": "Cramming leaderboard",
        "summary": summary,
        "boards": [_board_data(board) for board in boards],
        "unreadable": list(problems.items()),
        "reference": to_data(reference_blocks()),
    }
    tables = [(board.title, summary_table(board)) for board in boards]
    return _render(overview, sections, tables)


def run_page(section: Section) -> str:
    """Return the HTML of one run's report."""
    title = f"{section.run.label} ({status_of(section.run, section.rows)})"
    summary = describe_run(section.run.record)
    tables = [("Scores", block) for block in section.blocks if isinstance(block, Table)]
    return _render({"title": title, "summary": summary, "boards": []}, [section], tables)


def _render(
    overview: Mapping[str, Any], sections: Sequence[Section], tables: Sequence[tuple[str, Table]]
) -> str:
    """Return a page; `tables` stand in it, with their titles, until its scripts draw the data."""
    columns = [[key, fact.title, fact.view, fact.form] for key, fact in FACTS.items()]
    runs = {run_id(section.run): _run_data(section) for section in sections}
    configs = [section.run.record.config for section in sections]
    usual: dict[str, str] = {}
    others: list[dict[str, str | None]] = [{}]
    if len(sections) > 1:
        usual, others = differences(configs)
    details = {}
    for section, settings in zip(sections, others):
        details[run_id(section.run)] = {
            "settings": settings,
            "curve": section.curve,
            "blocks": to_data(section.blocks),
        }
    return template("page.html").render(
        title=overview["title"],
        summary=overview["summary"],
        tables=tables,
        style=_source("uplot/uPlot.min.css") + _source("style.css"),
        scripts=[_source(name) for name in SCRIPTS],
        overview=packed({**overview, "facts": columns, "runs": runs}),
        details=packed({"settings": usual, "runs": details}),
    )


def packed(value: Any) -> str:
    """Return a value as the scripts unpack it."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return base64.b64encode(zlib.compress(text.encode(), 6, -zlib.MAX_WBITS)).decode()


def _run_data(section: Section) -> dict[str, Any]:
    """Return the name, the division and the facts of a run."""
    run = section.run
    facts = {key: value for key, value in facts_of(run.record).items() if value is not None}
    division = run.verdict.division if section.rows else "not scored"
    return {"name": run.label, "division": division, "facts": facts}


def _board_data(board: Board) -> dict[str, Any]:
    """Return the table of a suite: columns with titles, and rows whose scores are [value, spread, mark]."""
    frame = board.frame
    columns = []
    for name in board.columns:
        columns.append([name, title_of(name), "task" if name in ENTRIES else "headline"])
    rows = frame.drop(columns=MEASURES).map(_cell_data).to_dict("records")
    return {
        "title": board.title,
        "headline": board.headline,
        "columns": columns,
        "rows": rows,
        "lines": [_line_data(row) for row in board.rows if along_the_way(row)],
        "notes": to_data([board.notes]),
    }


def _line_data(row: Row) -> dict[str, Any]:
    """Return the scores along the way of a run, and the final one: what was spent, and scores by column."""
    points = []
    for each in (*along_the_way(row), row):
        scores = {name: each.cell(name).value for name in score_columns(row.suite)}
        points.append({"at": each.place, "spent": each.spent, "scores": scores})
    return {"run": run_id(row.run), "name": row.run.label, "points": points}


def _cell_data(value: Any) -> Any:
    if isinstance(value, Score):
        return [*map(_rounded, value[:2]), value.mark]
    return value


def _rounded(value: float | None) -> float | None:
    return value if value is None else round(value, 2)


@cache
def template(name: str) -> Template:
    """Return a template of the folder; only those of HTML escape what they are given."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


@cache
def _source(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
