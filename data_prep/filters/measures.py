"""What the quality filters look at: counts and shares of one text, each computed when first asked for, and where in the
text what they count stands.

Suffixes: B bytes, W words, N n-grams. A word is a run without white space; only where n-grams are counted it is one of
data_prep/dedup/words.py, so that case and punctuation do not hide a repetition.
"""

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from data_prep.dedup.passages import Span
from data_prep.dedup.words import hash_words_and_lengths, ngrams, word_places

LONG_WORD_BYTES = 100
LEAST_LINES = 3  # to speak of a share of the lines
_SPACES = b" \n\t\r\v\f"
_LETTERS = bytes(byte for byte in range(0x80) if chr(byte).isalpha())
SYMBOL = re.compile(r"[!-/:-@\[-`{-~\u0080-\u00bf\u2000-\u2fff]")
_SYMBOLS = bytes(byte for byte in range(0x80) if SYMBOL.match(chr(byte))) + b"\xc2\xe2"  # and lead bytes of symbols
_CONTROLS = bytes(byte for byte in range(0x20) if byte not in _SPACES) + b"\x7f"


def _others(members: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in members)


_NOT_SYMBOLS, _NOT_CONTROLS, _BEYOND_ASCII = _others(_SYMBOLS), _others(_CONTROLS), bytes(range(0x80, 0x100))
_INSIDE_WORD = bytes(byte not in _SPACES for byte in range(256))
_IS_LETTER = bytes(byte in _LETTERS or byte >= 0x80 for byte in range(256))
_WORD = re.compile(r"[^ \n\t\r\v\f]+")
NO_LETTER_WORD = re.compile(r"(?<!\S)[!-@\[-`{-~]+(?!\S)")
# Only from the first sign of a run: tried from each, a run of n that no space follows would take n * n steps.
_SENTENCE_END = re.compile(r"[.!?…。！？](?<![.!?…。！？].)[.!?…。！？]*[\"'”’)\]]*(?:\s|$)")
# "Â" or "Ã" behind a capital may end a word; otherwise a non-breaking space, or its like, stood behind it.
_BROKEN = re.compile(
    "[\ufffd\ue000-\uf8ff]|[ÂÃ][\u0080-\u00bf]|â€|[\u0080-\u0084\u0086-\u009f]|(?<![A-ZÀ-Þ])[ÂÃ](?=[ \n]|$)"
)
BROKEN = re.compile(f"{_BROKEN.pattern}|[{re.escape(_CONTROLS.decode())}]")
_BROKEN_SIGNS = (b"\xef", b"\xee", b"\xc3\x83", b"\xc3\x82", b"\xc3\xa2\xe2")  # what _BROKEN begins with, in UTF-8
_LATIN_CONTROLS = re.compile(rb"\xc2[\x80-\x84\x86-\x9f]")  # the same; their first byte alone is frequent
MARKUP = re.compile(r"</?[A-Za-z!][^<>\n]{0,300}>|&(?:[A-Za-z]{2,8}|#\d{1,6});|\{[{|]|[|}]\}|\[\[|\]\]|'''?|={2,}")
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

    def long_word_spans(self) -> list[Span]:
        """Where the words of over `LONG_WORD_BYTES` bytes stand."""
        words = _WORD.finditer(self.text)
        return [word.span() for word in words if len(word[0].encode("utf-8", "replace")) > LONG_WORD_BYTES]

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
        if any(sign in self._data for sign in _BROKEN_SIGNS) or _LATIN_CONTROLS.search(self._data):
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
        return sum(len(found) for found in MARKUP.findall(self.text)) / max(1, len(self.text))

    @property
    def sentences(self) -> int:
        """How many ends of sentence."""
        return sum(1 for _ in _SENTENCE_END.finditer(self.text))

    def lines_share(self, test: Callable[[str], object]) -> float:
        """Share of the lines that pass the test; 0 where they are fewer than `LEAST_LINES`."""
        if len(self.lines) < LEAST_LINES:
            return 0.0
        return sum(1 for line in self.lines if test(line)) / len(self.lines)

    def line_spans(self, test: Callable[[str], object]) -> list[Span]:
        """Where the lines that pass the test stand."""
        ends = np.cumsum([len(line) + 1 for line in self.text.split("\n")]).tolist()
        return [(start, end - 1) for start, end, line in zip([0, *ends], ends, self.lines) if test(line)]

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

    def duplicate_line_spans(self) -> list[Span]:
        """Where the lines that repeat an earlier one stand."""
        seen = set[str]()

        def repeats(line: str) -> bool:
            seen_before = line in seen
            seen.add(line)
            return seen_before

        return self.line_spans(repeats)

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
        return float(self._top_ngram(n)[0] / total)

    def _top_ngram(self, n: int) -> tuple[int, np.uint64]:
        """How many bytes the run of n words takes up that takes up most, of those that repeat, and its number."""
        hashes_W, lengths_W = self._hashed
        edges_W = np.concatenate([[0], np.cumsum(lengths_W)])
        numbers, first, counts = np.unique(ngrams(hashes_W, n), return_index=True, return_counts=True)
        bytes_N = (edges_W[first + n] - edges_W[first]) * counts * (counts > 1)
        top = int(bytes_N.argmax())
        return int(bytes_N[top]), numbers[top]

    def top_ngram_spans(self, n: int) -> list[Span]:
        """Where the run of `top_ngram_share` stands."""
        return self._spans_of_runs(np.flatnonzero(ngrams(self._hashed[0], n) == self._top_ngram(n)[1]), n)

    def duplicate_ngram_share(self, n: int) -> float:
        """Share of the words' bytes that lie in runs of n words which occur more than once, each byte counted once."""
        hashes_W, lengths_W = self._hashed
        if self._most_frequent_pair < 2:
            return 0.0
        places = self._repeated_runs(n)
        if not len(places):
            return 0.0
        change_W = np.zeros(len(hashes_W) + 1, dtype=np.int64)  # +1 where a run begins, -1 where it has ended
        change_W[places] += 1
        change_W[places + n] -= 1
        return float(lengths_W[np.cumsum(change_W[:-1]) > 0].sum() / lengths_W.sum())

    def _repeated_runs(self, n: int) -> np.ndarray:
        """Where runs of n words begin that occur more than once, as numbers of words."""
        grams_N = ngrams(self._hashed[0], n)
        ordered_N = np.sort(grams_N)
        repeated = ordered_N[1:][ordered_N[1:] == ordered_N[:-1]]
        if not len(repeated):
            return repeated
        # `repeated` is short and sorted: np.isin would sort all anew.
        nearest_N = np.minimum(np.searchsorted(repeated, grams_N), len(repeated) - 1)
        return np.flatnonzero(repeated[nearest_N] == grams_N)

    def duplicate_ngram_spans(self, n: int) -> list[Span]:
        """Where the runs of `duplicate_ngram_share` stand."""
        return self._spans_of_runs(self._repeated_runs(n), n)

    def _spans_of_runs(self, first_words: np.ndarray, n: int) -> list[Span]:
        starts_W, ends_W = word_places(self.text)
        return list(zip(starts_W[first_words].tolist(), ends_W[first_words + n - 1].tolist()))
