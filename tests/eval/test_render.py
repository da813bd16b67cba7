"""The two renderers: the same blocks, nothing lost, nothing unescaped, nothing from outside."""

import re
from html.parser import HTMLParser

from eval.report.render import Block, Cell, Figure, Group, Heading, Paragraph, Section, Table, markdown, page

NASTY = 'a|b <script>alert("x")</script> & "q"\nnext'
TABLE = Table(
    ["Name", "Score"],
    [Group([[Cell(NASTY, "small", "main", "run-x"), Cell("83.9", "±0.4")]], "First"), Group([], "Empty")],
    ["a note"],
)
BLOCKS: list[Block] = [
    Heading("Title", 1, badge="open"),
    Paragraph(NASTY),
    TABLE,
    Figure("Loss", "plots/loss.png", '<svg xmlns="http://www.w3.org/2000/svg"></svg>'),
    Section("More", [Paragraph("inside")]),
]


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


def test_markdown_tables_keep_their_shape() -> None:
    text = markdown(BLOCKS)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}
    assert "<script" not in text
    assert "83.9 ±0.4" in text and "![Loss](plots/loss.png)" in text and "# Title [open]" in text
    assert "- a note" in text and "inside" in text and "Empty" not in text


def test_page_is_well_formed_escaped_and_self_contained() -> None:
    text = page(NASTY, BLOCKS)
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert "<script" not in text
    assert NASTY in checker.words and "83.9" in checker.words and "a note" in checker.words
    assert not re.search(r'(?:src|href)="(?!#)', text) and "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_table_without_titles_has_no_head() -> None:
    text = page("t", [Table(["", ""], [Group([[Cell("a"), Cell("b")]])], left=2)])
    assert "<thead>" not in text


def test_on_a_narrow_screen_names_stay_in_sight_and_averages_in_one_line() -> None:
    text = page("t", [TABLE])
    narrow = text[text.index("@media (max-width: 640px)") :]
    assert "position: sticky; left: 0" in narrow
    assert "table.tasks td:first-child { white-space: nowrap; }" in text
