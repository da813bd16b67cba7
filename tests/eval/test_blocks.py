"""Parts of a page as Markdown: tables keep their shape, and nothing of a log is read as Markdown or HTML."""

from dataclasses import replace
from pathlib import Path

from cramming.data.task_files import ENTRIES
from eval.report.blocks import Links, to_data, to_markdown
from eval.report.run_page import run_blocks
from eval.report.table import rows_of
from eval.rules.load import load_run
from tests.eval.runs import write_run

NASTY = 'a|b \\| <script>alert("x")</script> & "q"\nnext'


def test_nasty_words_keep_the_shape_of_a_report(tmp_path: Path) -> None:
    """Not even behind a backslash is a pipe in a cell: readers differ in what two backslashes before it mean."""
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
    blocks = [Links({NASTY: "../record.json"}), *run_blocks(run, rows_of([run]), [NASTY])]
    text = to_markdown(blocks)
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 3
    for rows in tables:
        assert rows[1].startswith("|---")
        assert len({row.count("|") for row in rows}) == 1
    assert "<script" not in text and "](../record.json)." in text
    assert [kind for kind, *_ in to_data(blocks)] == [type(block).__name__ for block in blocks]
