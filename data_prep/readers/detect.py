"""Content that is no plain text in UTF-8, known from a file's first bytes, and what to do about it."""

import csv
import io
import re
from contextlib import suppress
from itertools import islice
from typing import Any

HEAD_BYTES = 1 << 16
FEW_ROWS = 20  # of a table that are looked at
COMMON = frozenset(" \n、。，")  # characters that any text has
FEW_COMMON = 0.01  # of the characters

_EXTRACT = "Extract its text first, for example with trafilatura"
# Elements that hold a paragraph or more. Text about HTML and Markdown have them too, but not most lines begin with one.
_BLOCK = "(?:p|div|h[1-6]|[uo]l|li|table|t[rdh]|blockquote|section|article|figure|main|header)"
_BLOCK_BEGINS = re.compile(rf"\s*<{_BLOCK}\b[^<>]*>", re.I)
_BLOCK_ENDS = re.compile(rf"</{_BLOCK}\s*>", re.I)
FEW_BLOCKS = 3
# Of HTML, at most; a README may begin with a few blocks, and goes on in Markdown.
LINES_PER_BLOCK = 10

# What the content looks like, the pattern of its first bytes, and the cure.
_SIGNS = (
    ("JSON", rb'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:', "Set data.format=jsonl"),
    (
        "HTML",
        rb"\s*(<\?xml[^>]*>\s*|<!--((?!-->).)*-->\s*)*<(!doctype\s+html|html|head|body)\b",
        _EXTRACT,
    ),
    ("a Wikipedia dump", rb"\s*(<\?xml[^>]*>\s*)?<mediawiki\b", "Set data.format=wikipedia"),
    ("XML", rb"\s*<\?xml\b", "Extract its text first"),
    ("a WET or WARC file", rb"WARC/1\.\d\r?\n", "Set data.format=wet"),
    ("parquet", rb"PAR1", "Set data.format=parquet"),
    ("gzip", rb"\x1f\x8b\x08", "Give its name the suffix .gz"),
    ("bzip2", rb"BZh[1-9]1AY&SY", "Give its name the suffix .bz2"),
    ("xz", rb"\xfd7zXZ\0", "Give its name the suffix .xz"),
    ("Zstandard", rb"\x28\xb5\x2f\xfd", "Give its name the suffix .zst"),
)
_PATTERNS = [(name, re.compile(sign, re.I | re.S), cure) for name, sign, cure in _SIGNS]
_COLUMN = r'"?[A-Za-z_][\w-]*(?: [\w-]+){0,3}"?'
_TABLES = (
    (",", "CSV", "Set data.format=csv"),
    ("\t", "TSV", "Set data.format=tsv"),
    (";", "CSV with semicolons", "Write it with commas and set data.format=csv"),
)
_MARKS = {  # the longer first, as one begins with another
    "UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
    "UTF-16": (b"\xff\xfe", b"\xfe\xff"),
}
_WIDE = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")


def other_content(head: bytes) -> tuple[str, str] | None:
    """Return what the beginning of a file of text looks like, and the cure; None for plain text."""
    head = head.removeprefix(b"\xef\xbb\xbf")
    for name, pattern, cure in _PATTERNS:
        if pattern.match(head):
            return name, cure
    text = head.decode("utf-8", "replace").lstrip()
    if _is_html_fragment(text):
        return "HTML", _EXTRACT
    for delimiter, name, cure in _TABLES:
        if _is_table(text, delimiter):
            return f"a table ({name})", cure
    return None


def _is_html_fragment(text: str) -> bool:
    """Return whether these are blocks of HTML: most lines begin with one, or the text does and has one in ten lines."""
    ends = len(_BLOCK_ENDS.findall(text))
    if ends < FEW_BLOCKS:
        return False
    lines = list(filter(str.strip, text.split("\n")))
    blocks = list(filter(_BLOCK_BEGINS.match, lines))
    is_begun = _BLOCK_BEGINS.match(text) is not None and LINES_PER_BLOCK * ends > len(lines)
    return is_begun or 2 * len(blocks) > len(lines)


def _is_table(text: str, delimiter: str) -> bool:
    """Return whether these are rows of as many fields as the first has names."""
    if not re.match(rf"{_COLUMN}(?:{delimiter}{_COLUMN})+\s*\n", text):
        return False
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    lines = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    rows: list[list[str]] = []
    with suppress(csv.Error):  # a row that goes on behind the head
        reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
        rows.extend(row for row in islice(reader, FEW_ROWS) if row)
    return len(rows) > 2 and len(set(map(len, rows))) == 1


def wide_encoding(head: bytes) -> str | None:
    """Return the name for `iconv` of an encoding in units of 2 or 4 bytes; None for other content."""
    for name, marks in _MARKS.items():
        if head.startswith(marks):
            return name
    if b"\0" not in head:
        return None
    for name in _WIDE:
        unit_bytes = int(name[4:6]) // 8
        whole = head[: len(head) // (2 * unit_bytes) * 2 * unit_bytes]
        text = whole.decode(name, "replace")
        common = sum(map(text.count, COMMON))
        if common > FEW_COMMON * len(text) and "\ufffd" not in text[:-1] and "\0" not in text:
            return name
    return None
