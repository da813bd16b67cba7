"""Parts of a page, written once: as Markdown here, as HTML by the page's scripts (templates/blocks.js)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Heading(NamedTuple):
    """Heading of a level from 1."""

    words: str
    level: int = 2


class Text(NamedTuple):
    """Paragraph."""

    words: str


class Table(NamedTuple):
    """Table whose first `left` columns hold words and the others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


class Notes(NamedTuple):
    """List of short remarks."""

    items: Sequence[str]


class Links(NamedTuple):
    """Links by their titles."""

    targets: Mapping[str, str]


class Details(NamedTuple):
    """Part that is folded until it is opened."""

    title: str
    blocks: Sequence["Block"]


Block = Heading | Text | Table | Notes | Links | Details


def to_data(blocks: Sequence[Block]) -> list[list[Any]]:
    """Return the blocks as JSON: the kind of each, then its fields."""
    return [[type(block).__name__, *_fields(block)] for block in blocks]


def _fields(block: Block) -> Sequence[Any]:
    return (block.title, to_data(block.blocks)) if isinstance(block, Details) else block


def to_markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as GitHub-flavoured Markdown."""
    return "\n\n".join("\n".join(_lines(block)) for block in blocks) + "\n"


def escape(text: object) -> str:
    """Return one line of Markdown that is neither a table's column nor HTML."""
    return " ".join(str(text).replace("|", "&#124;").replace("<", "&lt;").split())


def _lines(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"{'#' * block.level} {escape(block.words)}"
    elif isinstance(block, Text):
        yield escape(block.words)
    elif isinstance(block, Notes):
        yield from (f"- {escape(item)}" for item in block.items)
    elif isinstance(block, Links):
        yield ", ".join(f"[{escape(title)}]({to})" for title, to in block.targets.items()) + "."
    elif isinstance(block, Details):
        yield f"<details><summary>{escape(block.title)}</summary>\n"
        yield to_markdown(block.blocks)
        yield "</details>"
    else:
        rules = ["---"] * block.left + ["---:"] * (len(block.columns) - block.left)
        yield _table_line(block.columns)
        yield f"|{'|'.join(rules)}|"
        yield from map(_table_line, block.rows)


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escape, cells))} |"
