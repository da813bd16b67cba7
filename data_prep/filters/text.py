"""What several filters need of one text, each computed when first asked for; and the verdict of a filter."""

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from data_prep.dedup.ngram_hashes import hash_words, ngrams
from data_prep.stats import Span, excerpt, matches

LEAST_LINES = 3  # to speak of a share of the lines: of fewer, it is all or nothing
SPACES = b" \n\t\r\v\f"
_BEYOND_ASCII = bytes(range(0x80, 0x100))
# Thai, Lao, Burmese, Khmer, Japanese, Chinese
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]+")
_INSIDE_WORD = bytes(byte not in SPACES for byte in range(256))

# Finds what was counted in a text; without it the beginning of the text is shown.
Where = re.Pattern[str] | Callable[["Text"], Iterable[Span]] | None


class Violation(NamedTuple):
    """Measured value of a text that is beyond a limit."""

    value: Any
    limit: Any
    where: Where = None

    def spans(self, text: str) -> Iterable[Span]:
        """Return the places in the text that were counted."""
        if isinstance(self.where, re.Pattern):
            return matches(self.where, text)
        return self.where(Text(text)) if self.where else ()

    def explain(self, text: str, setting: str) -> str:
        """Return `value, limit (setting): excerpt`."""
        return f"{_plain(self.value)}, limit {_plain(self.limit)} ({setting}): {excerpt(text, self.spans(text))}"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Text:
    """A normalised text as filters see it. A word is a run without white space; suffix W: [words]."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    @cached_property
    def utf8(self) -> bytes:
        """The text in UTF-8; lone surrogates as `?`."""
        return self.text.encode("utf-8", "replace")

    @cached_property
    def lower(self) -> bytes:
        """Bytes of the text with A-Z as a-z."""
        return self.utf8.lower()

    @cached_property
    def lines(self) -> list[str]:
        """The lines, without white space around them; at least one."""
        return [line.strip() for line in self.text.split("\n")]

    @cached_property
    def word_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of words in `utf8`: [W] each."""
        inside = np.frombuffer(b"\0" + self.utf8.translate(_INSIDE_WORD) + b"\0", np.bool_)
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        return edges[::2], edges[1::2]

    @cached_property
    def is_spaced(self) -> bool:
        """Presence of spaces between words: half of the text or more is in scripts that write them."""
        if 2 * len(self.utf8.translate(None, _BEYOND_ASCII)) >= len(self.utf8):
            return True
        return 2 * len(_UNSPACED.sub("", self.text)) >= len(self.text)

    @property
    def words(self) -> int:
        """Number of words."""
        return len(self.word_bounds[0])

    @property
    def mean_word_length(self) -> float:
        """Characters per word."""
        starts_W, ends_W = self.word_bounds
        spaces = len(self.utf8) - int((ends_W - starts_W).sum())
        return (len(self.text) - spaces) / max(1, self.words)

    @cached_property
    def word_hashes(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and lengths in bytes of the words as data_prep/dedup/ngram_hashes.py defines them: [W] each."""
        words = hash_words([self.text])
        return words.hashes_W, words.ends_W - words.starts_W

    @cached_property
    def most_frequent_pair(self) -> int:
        """Number of times that the most frequent 2-gram of `word_hashes` occurs; no longer n-gram occurs more often."""
        ordered_N = np.sort(ngrams(self.word_hashes[0], 2))
        edges = np.flatnonzero(np.concatenate([[True], ordered_N[1:] != ordered_N[:-1], [True]]))
        return int(np.diff(edges).max()) if len(ordered_N) else 0

    def share_of_lines(self, test: Callable[[str], object]) -> float | None:
        """Return the share of the lines that pass the test; None below `LEAST_LINES` lines."""
        if len(self.lines) < LEAST_LINES:
            return None
        return sum(1 for line in self.lines if test(line)) / len(self.lines)

    def line_spans(self, test: Callable[[str], object]) -> list[Span]:
        """Return the places of the lines that pass the test."""
        ends = np.cumsum([len(line) + 1 for line in self.text.split("\n")]).tolist()
        return [
            (start, end - 1) for start, end, line in zip([0, *ends], ends, self.lines) if test(line)
        ]
