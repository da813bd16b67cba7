"""A report as a small tree of blocks, and the two ways to write it down: Markdown and one self-contained HTML page.

What a report says is built once (`eval.report.leaderboard`, `eval.report.summary`) as headings, texts, tables, figures
and sections; how it looks is decided here. Both renderers are pure functions from blocks to a string. The HTML needs
nothing from the network: style and plots are inside, and it follows the reader's light or dark setting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """A table cell: text, a smaller second text (spread, detail), a tone (see `_STYLE`), a link within the page."""

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
    opened: bool = False


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
    return _PAGE.format(title=escape(title), style=_STYLE, body=body)


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
        opened = " open" if block.opened else ""
        return f"<details{opened}><summary>{escape(block.title)}</summary>\n{inner}\n</details>"
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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --line: #d9dee4; --page: #ffffff; --panel: #f5f7f9;
  --accent: #1f5fbf; --good: #17733a; --warn: #8a5a00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #98a2ad; --line: #333b44; --page: #14181c;
  --panel: #1c2228; --accent: #7fb2ff; --good: #6fcf8e; --warn: #e0b35a; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 80px; }
h1 { font-size: 1.9rem; margin: 0 0 .2em; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 2.2em 0 .5em; padding-top: .6em; border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 2em 0 .4em; }
p { max-width: 90ch; margin: .4em 0 .9em; }
h1 + p { color: var(--soft); }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .4em 0; }
th, td { padding: 6px 11px; text-align: left; vertical-align: baseline; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line); white-space: nowrap; }
table.tasks td:first-child { white-space: nowrap; }
.n { text-align: right; white-space: nowrap; padding-left: 7px; padding-right: 7px; }
table.scores { width: 100%; } table.scores td:nth-child(2) { min-width: 270px; }
@media (max-width: 640px) { main { padding: 18px 12px 60px; } th, td { padding: 6px; }
  table.scores td:nth-child(2) { min-width: 130px; max-width: 150px; overflow-wrap: anywhere; }
  table.scores th:first-child, table.scores td:first-child { min-width: 26px; max-width: 26px; padding: 6px 4px; }
  .wide tr:not(.group) > :first-child, table.scores tr:not(.group) > :nth-child(2) { position: sticky; left: 0;
    background: var(--page); background-clip: padding-box; z-index: 1; }
  table.scores tr:not(.group) > :nth-child(2) { left: 26px; } }
tbody.faint .main { font-weight: 500; }
tbody tr:hover td { background: var(--panel); }
tr.group th { padding-top: 16px; color: var(--soft); font-weight: 600; font-size: .85rem; }
tbody.faint td { color: var(--soft); }
small { display: block; color: var(--soft); font-size: .8em; line-height: 1.35; }
.best { font-weight: 700; }
.main { font-weight: 650; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.closed { color: var(--good); } .open { color: var(--warn); } .invalid { color: var(--bad); }
.badge { font-size: .72rem; font-weight: 600; padding: 2px 9px; border: 1px solid currentColor; border-radius: 99px;
  vertical-align: middle; letter-spacing: .02em; color: var(--soft); }
.badge.closed { color: var(--good); } .badge.open { color: var(--warn); } .badge.invalid { color: var(--bad); }
ul.notes { color: var(--soft); font-size: .84rem; margin: .3em 0 1.2em; padding-left: 1.2em; max-width: 120ch; }
figure { margin: .8em 0 1.2em; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; color: var(--ink); }
details { margin: .6em 0; border: 1px solid var(--line); border-radius: 8px; padding: 0 14px; }
summary { cursor: pointer; padding: 9px 0; font-weight: 600; }
details[open] > summary { border-bottom: 1px solid var(--line); margin-bottom: 8px; }
"""
