"""A report as a small tree of blocks, and the two ways to write it down: Markdown and one self-contained HTML page.

What a report says is built once (`eval.report.leaderboard`, `eval.report.run_page`) as headings, texts, tables, figures
and sections; how it looks is decided here. Both renderers are pure functions from blocks to a string. The HTML needs
nothing from the network: style and plots are inside, and it follows the reader's light or dark setting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """A table cell: text, a smaller second text (spread, detail), a tone (class of style.css), a link in the page."""

    text: str
    small: str = ""
    tone: str = ""
    link: str = ""


@dataclass(frozen=True)
class Group:
    """Consecutive rows under an optional title line; `tone` colours all of them."""

    rows: Sequence[Sequence[Cell]]
    title: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Columns, the first `left` of them text and the rest numbers; `notes` are the small print, `kind` a style."""

    columns: Sequence[str]
    groups: Sequence[Group]
    notes: Sequence[str] = ()
    left: int = 1
    kind: str = ""


@dataclass(frozen=True)
class Heading:
    """A heading; `badge` is a division or status beside it."""

    text: str
    level: int = 2
    anchor: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A plot: inline SVG for the page, and the PNG's path (relative to the report) for Markdown."""

    title: str
    path: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Blocks that a reader of the page can fold away."""

    title: str
    blocks: Sequence["Block"]


Block = Heading | Paragraph | Table | Figure | Section


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks as GitHub-flavoured Markdown."""
    return "\n\n".join(part for block in blocks for part in _markdown(block)) + "\n"


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        badge = f" [{block.badge}]" if block.badge else ""
        yield f"{'#' * block.level} {_plain(block.text)}{badge}"
    elif isinstance(block, Paragraph):
        yield _plain(block.text)
    elif isinstance(block, Figure):
        yield f"![{_plain(block.title)}]({block.path})"
    elif isinstance(block, Section):
        yield f"**{_plain(block.title)}**"
        for inner in block.blocks:
            yield from _markdown(inner)
    else:
        yield "\n".join(_markdown_table(block))
        if block.notes:
            yield "\n".join(f"- {_plain(note)}" for note in block.notes)


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _markdown_table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(map(_plain, table.columns))} |"
    yield "|" + "|".join("---" if i < table.left else "---:" for i in range(len(table.columns))) + "|"
    for group in table.groups:
        if group.title and group.rows:
            yield f"| **{_plain(group.title)}** |" + " |" * (len(table.columns) - 1)
        for row in group.rows:
            yield f"| {' | '.join(_markdown_cell(cell, i < table.left) for i, cell in enumerate(row))} |"


def _markdown_cell(cell: Cell, text: bool) -> str:
    between = "<br>" if text and cell.small else " "
    return f"{_plain(cell.text)}{between}{_plain(cell.small)}".strip()


def page(title: str, blocks: Sequence[Block]) -> str:
    """The blocks as one HTML document."""
    body = "\n".join(_html(block) for block in blocks)
    folder = Path(__file__).parent
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    style = (folder / "style.css").read_text(encoding="utf-8")
    return template.substitute(title=escape(title), style=style, body=body)


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        anchor = f' id="{escape(block.anchor)}"' if block.anchor else ""
        badge = f' <span class="badge {_first(block.badge)}">{escape(block.badge)}</span>' if block.badge else ""
        return f"<h{block.level}{anchor}>{escape(block.text)}{badge}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Figure):
        return f'<figure role="img" aria-label="{escape(block.title)}">{block.svg}</figure>'
    if isinstance(block, Section):
        inner = "\n".join(_html(b) for b in block.blocks)
        return f"<details><summary>{escape(block.title)}</summary>\n{inner}\n</details>"
    return _html_table(block)


def _first(words: str) -> str:
    """The style of a badge: its first word (`closed`, `open`, `invalid`)."""
    return escape(words.split(",")[0].split(" ")[0])


def _html_table(table: Table) -> str:
    def kind(index: int) -> str:
        return "" if index < table.left else ' class="n"'

    head = "".join(f"<th{kind(i)}>{escape(name)}</th>" for i, name in enumerate(table.columns))
    thead = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    lines = [f'<div class="wide"><table class="{escape(table.kind)}">{thead}']
    for group in table.groups:
        lines.append(f'<tbody class="{escape(group.tone)}">')
        if group.title and group.rows:
            lines.append(f'<tr class="group"><th colspan="{len(table.columns)}">{escape(group.title)}</th></tr>')
        for row in group.rows:
            cells = "".join(f"<td{kind(i)}>{_html_cell(cell)}</td>" for i, cell in enumerate(row))
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</tbody>")
    lines.append("</table></div>")
    if table.notes:
        lines.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in table.notes)}</ul>')
    return "\n".join(lines)


def _html_cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.link:
        text = f'<a href="#{escape(cell.link)}">{text}</a>'
    if cell.tone:
        text = f'<span class="{escape(cell.tone)}">{text}</span>'
    return text + (f" <small>{escape(cell.small)}</small>" if cell.small else "")
