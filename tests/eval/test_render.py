"""The two forms of a page: the same content, nothing lost, nothing unescaped, nothing from outside."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cramming.data.task_files import ENTRIES
from cramming.record_schema import Pretraining, Record
from eval.report.ranking import rows_of
from eval.report.render import html, markdown
from eval.report.run_page import RunPage
from eval.rules.load import Run, load_run
from tests.eval.runs import write_run

NASTY = 'a|b \\| <script>alert("x")</script> & "q"\nnext'


@pytest.fixture
def one(tmp_path: Path) -> RunPage:
    """A page with nasty words wherever a log, a folder or a file has words."""
    values = {name: [0.70, 0.702, 0.704] for name in ENTRIES if name != "rte"}
    change = {
        "setup": {
            "environment": {"device": {"name": NASTY}},
            "corpus": {"sources": [{"name": NASTY, "license": NASTY}]},
        },
        "scoring": {"selection": NASTY, "entries": {"rte": {"title": NASTY}}},
    }
    write_run(tmp_path / "a", scores={"pretrained": values, "random": 0.5}, change=change)
    run = replace(load_run(tmp_path / "a"), label=NASTY)
    return RunPage(run, rows_of([run]), [NASTY], {NASTY: "../record.json"})


class _Checker(HTMLParser):
    """Collects text and notes tags that do not nest."""

    void = frozenset({"meta", "br", "img", "hr", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_markdown_tables_keep_their_shape(one: RunPage) -> None:
    """Not even behind a backslash is a pipe in a cell: readers differ in what two backslashes before it mean."""
    text = markdown("report.j2", one=one)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for rows in tables:
        assert rows[1].startswith("|---")
        assert len({row.count("|") for row in rows}) == 1
    assert "<script" not in text and "\n\n\n" not in text
    assert "70.2 ±0.2" in text and "](../record.json)." in text and "\n- avg-9: " in text


def test_page_is_well_formed_escaped_and_self_contained(one: RunPage) -> None:
    text = html(NASTY, "report.j2", one=one)
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert "<script" not in text
    assert (
        checker.words.count(NASTY) >= 6 and "70.2" in checker.words and "avg-9: " in checker.words
    )
    assert (
        not re.search(r'(?:src|href)="(?!#|\.\./record\.json)', text)
        and "@import" not in text
        and "url(" not in text
    )
    assert "prefers-color-scheme: dark" in text


def test_energy_that_was_measured_is_a_fact_and_what_was_not_is_none() -> None:
    known = Pretraining(energy_kwh=9.5, energy_source="NVML energy counter")
    for training, is_shown in ((known, True), (Pretraining(), False)):
        run = Run(Path("a"), "a", Record(pretrain=training))
        page = markdown("report.j2", one=RunPage(run, []))
        assert ("| Energy of the GPU | 9.5 kWh, NVML energy counter |" in page) == is_shown
