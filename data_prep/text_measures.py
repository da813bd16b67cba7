"""What is measured of every kept document's text: sums for the corpus card, and two numbers per document for orders."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Measure(NamedTuple):
    """Of one text: characters, UTF-8 bytes, words (between white space) and sentences. All 0 for ready-made ids."""

    characters: int
    bytes: int
    words: int
    sentences: int


def measure(text: str, size: int) -> Measure:
    """Measure a normalised text of `size` bytes. A sentence ends with . ! or ? before a space, or with its line."""
    if not text:
        return Measure(0, 0, 0, 0)
    lines = text.count("\n")
    words = text.count(" ") + lines + 1
    ends = sum(text.count(end) for end in (". ", "! ", "? ", '." ', ".) "))
    return Measure(len(text), size, words, ends + lines + 1)


MOST_SOURCES = 32
OTHERS = "all others"


class TextMeasures:
    """The measures of one split's documents, in the order of the shards. Memory: 14 bytes per document.

    `sources` are those to count by name; from a corpus of a thousand files the first are, the rest together.
    """

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.sources = [*sources[:MOST_SOURCES], OTHERS]
        self.documents = self.characters = self.words = 0
        self._index = {name: i for i, name in enumerate(self.sources)}
        self._bytes, self._characters = array("I"), array("I")
        self._sentence_length, self._source = array("f"), array("H")

    def add(self, one: Measure, source: str) -> None:
        """The next document."""
        self.documents += 1
        self.characters += one.characters
        self.words += one.words
        self._bytes.append(one.bytes)
        self._characters.append(one.characters)
        self._sentence_length.append(one.words / max(1, one.sentences))
        self._source.append(self._index.get(source, len(self._index) - 1))

    def by_source(self, lengths_D: np.ndarray) -> dict[str, dict[str, int]]:
        """Documents, bytes and tokens of each source that has any; `lengths_D` in tokens."""
        source_D, most = np.frombuffer(self._source, dtype=np.uint16), len(self.sources)
        counts = {
            "documents": np.bincount(source_D, minlength=most),
            "bytes": np.bincount(source_D, np.frombuffer(self._bytes, dtype=np.uint32), most),
            "tokens": np.bincount(source_D, lengths_D, most),
        }
        rows = {name: {key: int(value[i]) for key, value in counts.items()} for i, name in enumerate(self.sources)}
        return {name: row for name, row in rows.items() if row["documents"]}

    def characters_of_each(self) -> np.ndarray:
        """Characters of each document: uint32 [D]."""
        return np.frombuffer(self._characters, dtype=np.uint32)

    def sentence_lengths(self) -> np.ndarray:
        """Mean words per sentence of each document: float32 [D]."""
        return np.frombuffer(self._sentence_length, dtype=np.float32)
