"""What the quality filters look at: counts and shares of one text, each computed when first asked for.

Suffixes: B bytes, W words, N n-grams. A word is a run without white space; only where n-grams are counted it is one of
data_prep/words.py, so that case and punctuation do not hide a repetition.
"""

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from data_prep.words import hash_words_and_lengths, ngrams

LONG_WORD_BYTES = 100
LEAST_LINES = 3  # to speak of a share of the lines
_SPACES = b" \n\t\r\v\f"
_LETTERS = bytes(byte for byte in range(0x80) if chr(byte).isalpha())
_SYMBOLS = bytes(byte for byte in range(0x21, 0x7F) if not chr(byte).isalnum()) + b"\xc2\xe2"  # lead bytes of symbols
_CONTROLS = bytes(byte for byte in range(0x20) if byte not in _SPACES) + b"\x7f"


def _others(members: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in members)


_NOT_SYMBOLS, _NOT_CONTROLS, _BEYOND_ASCII = _others(_SYMBOLS), _others(_CONTROLS), bytes(range(0x80, 0x100))
_INSIDE_WORD = bytes(byte not in _SPACES for byte in range(256))
_IS_LETTER = bytes(byte in _LETTERS or byte >= 0x80 for byte in range(256))
_SENTENCE_END = re.compile(r"[.!?…。！？]+[\"'”’)\]]*(?:\s|$)")
_BROKEN = re.compile("[\ufffd\ue000-\uf8ff]|Ã[\u0080-\u00bf]|Â[\u00a0-\u00bf]|â€")
_BROKEN_SIGNS = (b"\xef", b"\xee", b"\xc3\x83", b"\xc3\x82", b"\xc3\xa2\xe2")  # what _BROKEN begins with, in UTF-8
_MARKUP = re.compile(r"</?[A-Za-z!][^<>\n]{0,300}>|&(?:[A-Za-z]{2,8}|#\d{1,6});|\{[{|]|[|}]\}|\[\[|\]\]|'''?|={2,}")
_MARKUP_SIGNS = ("<", "&", "{{", "{|", "[[", "''", "==")
_LONGEST_MARKUP = {"<": 304, "&": 10, "=": 1, "'": 1} | dict.fromkeys(("{{", "{|", "|}", "}}", "[[", "]]"), 2)


class Measures:
    """One text's measures. Shares of nothing are 0."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _data(self) -> bytes:
        return self.text.encode("utf-8", "replace")

    def contains(self, *phrases: bytes) -> bool:
        """Whether one of these stands in the text, whatever the case of ASCII letters; phrases in lower case."""
        return any(phrase in self._lowered for phrase in phrases)

    @cached_property
    def _lowered(self) -> bytes:
        return self._data.lower()

    @cached_property
    def lines(self) -> list[str]:
        """The lines, without white space around them; at least one."""
        return [line.strip() for line in self.text.split("\n")]

    @cached_property
    def _word_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Where words start and end in the bytes, [W] each."""
        inside = np.frombuffer(b"\0" + self._data.translate(_INSIDE_WORD) + b"\0", np.bool_)
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        return edges[::2], edges[1::2]

    @property
    def words(self) -> int:
        """How many runs without white space."""
        return len(self._word_bounds[0])

    @property
    def mean_word_length(self) -> float:
        """Characters per word."""
        starts_W, ends_W = self._word_bounds
        spaces = len(self._data) - int((ends_W - starts_W).sum())
        return (len(self.text) - spaces) / max(1, self.words)

    @property
    def long_word_share(self) -> float:
        """Share of the bytes in words of over `LONG_WORD_BYTES` bytes; 0 for scripts that do not space their words."""
        starts_W, ends_W = self._word_bounds
        lengths_W = ends_W - starts_W
        long = int(lengths_W[lengths_W > LONG_WORD_BYTES].sum())
        if not long or (not self.text.isascii() and self._beyond_ascii > len(self._data) / 2):
            return 0.0
        return long / len(self._data)

    @property
    def _beyond_ascii(self) -> int:
        return len(self._data) - len(self._data.translate(None, _BEYOND_ASCII))

    @property
    def alphabetic_word_share(self) -> float:
        """Share of the words with at least one letter; what lies beyond ASCII counts as one."""
        starts_W, _ = self._word_bounds
        letters_B = np.frombuffer(self._data.translate(_IS_LETTER), np.uint8)
        return float(np.maximum.reduceat(letters_B, starts_W).mean()) if len(starts_W) else 0.0

    @property
    def symbol_share(self) -> float:
        """Share of the characters that are neither letter, digit nor white space."""
        return len(self._data.translate(None, _NOT_SYMBOLS)) / max(1, len(self.text))

    @property
    def broken_share(self) -> float:
        """Share of the characters that are replacement, private-use or control characters, or part of UTF-8 that was
        once decoded as Latin-1 or Windows-1252 (`Ã©`, `â€™`)."""
        broken = len(self._data.translate(None, _NOT_CONTROLS))
        if any(sign in self._data for sign in _BROKEN_SIGNS):
            broken += sum(len(found) for found in _BROKEN.findall(self.text))
        return broken / max(1, len(self.text))

    def markup_share(self, limit: float) -> float:
        """Share of the characters in HTML tags, entities and wikitext's brackets, quotes and headings.

        Exact where it is above `limit`; below it may be an upper bound.
        """
        if not any(sign in self.text for sign in _MARKUP_SIGNS):
            return 0.0
        bound = sum(longest * self.text.count(sign) for sign, longest in _LONGEST_MARKUP.items()) / len(self.text)
        if bound <= limit:  # reading the text by the pattern takes far longer
            return bound
        return sum(len(found) for found in _MARKUP.findall(self.text)) / max(1, len(self.text))

    @property
    def sentences(self) -> int:
        """How many ends of sentence."""
        return sum(1 for _ in _SENTENCE_END.finditer(self.text))

    def lines_share(self, test: Callable[[str], object]) -> float:
        """Share of the lines that pass the test; 0 where they are fewer than `LEAST_LINES`."""
        if len(self.lines) < LEAST_LINES:
            return 0.0
        return sum(1 for line in self.lines if test(line)) / len(self.lines)

    def count_present(self, words: Iterable[str], enough: int) -> int:
        """How many of these words stand in the text, whatever their case; it stops counting at `enough`."""
        found = 0
        for word in words:
            if found >= enough:
                break
            # The first test finds nearly all, fast.
            found += f" {word} " in self.text or re.search(rf"\b{word}\b", self.text, re.IGNORECASE) is not None
        return found

    @cached_property
    def duplicate_lines(self) -> tuple[float, float]:
        """Share of the lines, and share of their characters, that repeat an earlier line; 0 below `LEAST_LINES`."""
        once = set(self.lines)
        if len(once) == len(self.lines) or len(self.lines) < LEAST_LINES:
            return 0.0, 0.0
        characters = sum(map(len, self.lines))
        repeated = characters - sum(map(len, once))
        return 1 - len(once) / len(self.lines), repeated / max(1, characters)

    @cached_property
    def _hashed(self) -> tuple[np.ndarray, np.ndarray]:
        return hash_words_and_lengths(self.text)

    @cached_property
    def _most_frequent_pair(self) -> int:
        """How often the most frequent run of 2 words occurs; no longer run occurs more often."""
        ordered_N = np.sort(ngrams(self._hashed[0], 2))
        edges = np.flatnonzero(np.concatenate([[True], ordered_N[1:] != ordered_N[:-1], [True]]))
        return int(np.diff(edges).max()) if len(ordered_N) else 0

    def top_ngram_share(self, n: int, limit: float) -> float:
        """Share of the words' bytes in the run of n words that takes up most of them, overlaps counted twice.

        Exact where it is above `limit`; below it may be an upper bound. A run that occurs once repeats nothing.
        """
        hashes_W, lengths_W = self._hashed
        count = self._most_frequent_pair
        if count < 2 or len(hashes_W) < n:
            return 0.0
        edges_W = np.concatenate([[0], np.cumsum(lengths_W)])
        total, lengths_N = int(edges_W[-1]), edges_W[n:] - edges_W[:-n]
        bound = count * int(lengths_N.max()) / total
        if bound <= limit:
            return bound
        _, first, counts = np.unique(ngrams(hashes_W, n), return_index=True, return_counts=True)
        bytes_N = counts * lengths_N[first]
        return float(bytes_N[counts > 1].max(initial=0) / total)

    def duplicate_ngram_share(self, n: int) -> float:
        """Share of the words' bytes that lie in runs of n words which occur more than once, each byte counted once."""
        hashes_W, lengths_W = self._hashed
        if self._most_frequent_pair < 2:
            return 0.0
        grams_N = ngrams(hashes_W, n)
        ordered_N = np.sort(grams_N)
        repeated = ordered_N[1:][ordered_N[1:] == ordered_N[:-1]]
        if not len(repeated):
            return 0.0
        # `repeated` is short and sorted: np.isin would sort all anew.
        nearest_N = np.minimum(np.searchsorted(repeated, grams_N), len(repeated) - 1)
        places = np.flatnonzero(repeated[nearest_N] == grams_N)
        change_W = np.zeros(len(hashes_W) + 1, dtype=np.int64)  # +1 where a run begins, -1 where it has ended
        change_W[places] += 1
        change_W[places + n] -= 1
        return float(lengths_W[np.cumsum(change_W[:-1]) > 0].sum() / lengths_W.sum())
