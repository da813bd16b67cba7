"""Normalisation: one normal form for equal text, and the cutting of very long documents.

Normalisation makes equal text equal: one Unicode form, no control or invisible characters, single spaces, no blank
lines, `<br />` as the line break it stands for. Zero-width characters stay where they are spelling: joiners between the
letters of scripts that join them (Persian, Hindi), and in emoji of several; the zero-width space is a space in scripts
that write none (Thai, Khmer). A line that is already clean, which is nearly every line, is recognised by two C-level
tests and left alone.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field

from cramming.config import Count, Section

# C0 and C1 controls that are not whitespace; soft hyphen, directional marks, byte-order mark; lone surrogates, which
# JSON escapes can smuggle in.
_CONTROLS = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
_NEVER_TEXT = f"{_CONTROLS}\xad\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ud800-\udfff"
_INVISIBLE = re.compile(f"[{_NEVER_TEXT}]")
_ZERO_WIDTH = re.compile("[\u200b-\u200d]+")  # space, non-joiner, joiner
_DELETABLE = re.compile(f"[{_NEVER_TEXT}\u200b-\u200d]")
_JOINED = "\u0600-\u0dff\u1780-\u18af"  # Arabic to Sinhala, Khmer, Mongolian
_VIRAMAS = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca"  # with a joiner also at a word's end
_EMOJI = "\u2190-\u2bff\ufe0f\U0001f000-\U0001faff"
_SPELLING = re.compile(
    f"[{_JOINED}][\u200c\u200d][{_JOINED}]|[{_VIRAMAS}]\u200d|[{_EMOJI}]\u200d[{_EMOJI}]"
)
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # Thai, Lao, Myanmar, Khmer
_UNICODE_FORMS: dict[str, Callable[[str], str]] = {
    "NFC": partial(unicodedata.normalize, "NFC"),
    "NFKC": partial(unicodedata.normalize, "NFKC"),
    "none": str,
}
_LINE_BREAK = re.compile(r"<br ?/?>")  # left in reviews and in what WikiExtractor makes


class CleanConfig(Section):
    """Section `data.clean`."""

    unicode: Literal["NFC", "NFKC", "none"] = "NFC"
    min_characters: Count = 20
    max_characters: Annotated[int, Field(ge=1000)] = 4_000_000  # longer documents are cut


def normalize(text: str, config: CleanConfig, deleted: Counter[str] | None = None) -> str:
    """Return the text in its normal form: with its lines, without blank ones. `deleted` counts lost characters."""
    unify = _UNICODE_FORMS[config.unicode]
    if "<br" in text:
        text = _LINE_BREAK.sub("\n", text)
    if not text.isascii():
        text = unify(text)
    return "\n".join(filter(None, (_clean_line(line, unify, deleted) for line in text.split("\n"))))


def _clean_line(line: str, unify: Callable[[str], str], deleted: Counter[str] | None) -> str:
    if (
        line.isprintable() and "  " not in line
    ):  # printable: no control characters, no space but U+0020
        return line.strip()
    visible = _ZERO_WIDTH.sub(_spelt, _INVISIBLE.sub("", line))
    if deleted is not None and visible != line:
        deleted.update(_DELETABLE.findall(line))
        deleted.subtract(_DELETABLE.findall(visible))
    # Once more: what was removed may have stood between a letter and its accent.
    return unify(" ".join(visible.split()))


def _spelt(run: re.Match[str]) -> str:
    """Return a run of zero-width characters in the text's spelling: a joiner, a space or nothing."""
    text, joiner = run.string, run[0].strip("\u200b")[:1]
    before, after = text[run.start() - 1 : run.start()], text[run.end() : run.end() + 1]
    if joiner:
        return joiner if _SPELLING.match(before + joiner + after) else ""
    return " " if _UNSPACED.search(before + after) else ""


def deleted_by_kind(deleted: Counter[str]) -> dict[str, int]:
    """Return the numbers of control characters, soft hyphens, lone surrogates and other invisible characters."""
    kinds = Counter[str]()
    for sign, count in deleted.items():
        name = {"Cc": "control", "Cs": "surrogate"}.get(unicodedata.category(sign), "invisible")
        kinds["soft hyphen" if sign == "\xad" else name] += count
    return {name: count for name, count in sorted(kinds.items()) if count}


def split_evenly(text: str, limit: int) -> list[str]:
    """Cut a normalised text of more than `limit` characters into parts of at most that many, of similar length.

    At line ends where there are any in the second half of a part, else between words. Joined, they are the text again.
    """
    parts, start = [], 0
    while (left := len(text) - start) > limit:
        aim = -(-left // -(-left // limit))
        low, high = start + aim // 2, start + aim
        cut = text.rfind("\n", low, high) + 1 or text.rfind(" ", low, high) + 1 or high
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]


def split_by_words(text: str, limit: int | None) -> list[str]:
    """Cut a normalised text of more than `limit` words at its line ends, into parts of about equal length.

    A part has at most `limit` words; a line that alone has more is cut between words. None: no limit.
    """
    if limit is None or len(text) < 2 * limit:
        return [text]
    words = text.count(" ") + text.count("\n") + 1
    if words <= limit:
        return [text]
    aim = -(-words // -(-words // limit))
    parts: list[list[str]] = []
    held = aim  # words in the last part; as if it were full
    for piece in chain.from_iterable(_in_pieces(line, limit) for line in text.split("\n")):
        size = piece.count(" ") + 1
        if (
            held >= aim or held + size > limit
        ):  # short of the aim, what is left would add up to a tiny part
            parts.append([])
            held = 0
        parts[-1].append(piece)
        held += size
    return ["\n".join(part) for part in parts]


def _in_pieces(line: str, limit: int) -> list[str]:
    if line.count(" ") < limit:
        return [line]
    words = line.split(" ")
    return [" ".join(words[start : start + limit]) for start in range(0, len(words), limit)]
