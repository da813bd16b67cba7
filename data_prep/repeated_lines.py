"""Lines that repeat, from an even random sample of all lines: markers between documents, menus, licences.

A line's number is a hash of its document's content and its place in it, and those with the smallest numbers stay. So
the sample is the same for any division into tasks, and equal documents count once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

SAMPLED_LINES = 1024
SHOWN_CHARACTERS = 80  # of a line, which is known by them and its size
LARGE_SHARE = 0.01  # of the lines, or of their bytes
LEAST_TIMES = 5  # in the sample
MAX_LINES = 3  # that are named

Line = tuple[int, int, str]  # number, bytes, beginning


class LineSample:
    """The lines with the smallest numbers so far."""

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(self, keys: Sequence[int], texts: Sequence[str]) -> None:
        """Add the lines of documents, whose keys are hashes of their content."""
        counts_D = np.array([text.count("\n") + 1 for text in texts], dtype=np.int64)
        first_D = np.cumsum(counts_D) - counts_D
        document_L = np.repeat(np.arange(len(texts)), counts_D)
        place_L = np.arange(len(document_L)) - first_D[document_L]
        number_L = _mixed(np.array(keys, dtype=np.uint64)[document_L], place_L)
        chosen = np.sort(np.argsort(number_L, kind="stable")[:SAMPLED_LINES])
        if len(self._lines) == SAMPLED_LINES:
            chosen = chosen[number_L[chosen] < self._lines[-1][0]]
        sampled: list[Line] = []
        for document, rows in groupby(chosen, key=lambda row: int(document_L[row])):
            lines = texts[document].split("\n")
            for row in rows:
                line = lines[place_L[row]]
                beginning = line[:SHOWN_CHARACTERS]
                sampled.append((int(number_L[row]), len(line.encode()), beginning))
        self.merge(sampled)

    def merge(self, lines: Iterable[Line]) -> None:
        """Add what another sample has."""
        self._lines = sorted({*self._lines, *lines})[:SAMPLED_LINES]

    def lines(self) -> list[Line]:
        """Return what stays, the smallest numbers first."""
        return self._lines

    def repeated(self) -> list[dict[str, Any]]:
        """Return the lines that make up much of the text, with their shares; the largest share first."""
        times = Counter((size, beginning) for _, size, beginning in self._lines)
        all_bytes = sum(size for _, size, _ in self._lines)
        repeated: list[dict[str, Any]] = []
        for (size, beginning), count in times.items():
            of_lines, of_bytes = count / len(self._lines), count * size / max(1, all_bytes)
            if size and count >= LEAST_TIMES and max(of_lines, of_bytes) > LARGE_SHARE:
                shares = {"of_lines": round(of_lines, 3), "of_bytes": round(of_bytes, 3)}
                repeated.append({"line": beginning, **shares})
        repeated.sort(key=lambda line: (-max(line["of_lines"], line["of_bytes"]), line["line"]))
        return repeated[:MAX_LINES]


def _mixed(keys_L: np.ndarray, places_L: np.ndarray) -> np.ndarray:
    """Return a hash of each key and place: the output function of SplitMix64 (Steele et al. 2014)."""
    mixed_L = keys_L + (places_L.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed_L = (mixed_L ^ (mixed_L >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_L = (mixed_L ^ (mixed_L >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result_L: np.ndarray = mixed_L ^ (mixed_L >> np.uint64(31))
    return result_L
