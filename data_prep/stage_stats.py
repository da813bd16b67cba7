"""What each stage of the preparation took in, gave out and dropped, and why, with examples.

Every count is a pure function of text and settings, so a resumed run gives the same. Examples are those dropped
documents whose seeded hash is smallest, whatever the order of counting.
"""

import hashlib
import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cramming.data.manifest import Dropped, StageLine

EXAMPLES = 3
EXCERPT_CHARACTERS = 160
STAGES = (
    "source",
    "normalise",
    "filters",
    "exact deduplication",
    "near deduplication",
    "decontamination",
    "hold-out",
    "tokenizer",
    "tokens",
    "order",
    "shards",
)
Span = tuple[int, int]  # of characters, the end not included


def text_bytes(text: str) -> int:
    """UTF-8 bytes of a text; stray surrogates count as they would be written."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def matches(pattern: re.Pattern[str], text: str) -> list[Span]:
    """Where the pattern matches."""
    return [match.span() for match in pattern.finditer(text)]


def excerpt(text: str, counted: Iterable[Span] = ()) -> str:
    """The `EXCERPT_CHARACTERS` that hold most of the counted spans, in the middle; without any the beginning."""
    start = 0
    if found := sorted(counted):
        starts_N, ends_N = np.array(found, dtype=np.int64).T
        sums_N = np.concatenate([[0], np.cumsum(ends_N - starts_N)])
        beyond_N = np.searchsorted(starts_N, starts_N + EXCERPT_CHARACTERS)
        first = int(np.argmax(sums_N[beyond_N] - sums_N[:-1]))
        room = EXCERPT_CHARACTERS - int(ends_N[first : beyond_N[first]].max() - starts_N[first])
        start = max(0, int(starts_N[first]) - max(0, room // 2))
    start = max(0, min(start, len(text) - EXCERPT_CHARACTERS))
    end = start + EXCERPT_CHARACTERS
    return f"{'... ' if start else ''}{text[start:end]}{' ...' if end < len(text) else ''}"


@dataclass
class _Reason:
    """What was dropped for one reason; `examples` with their hash, the smallest first."""

    documents: int = 0
    bytes: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Stage:
    """One stage while it counts."""

    name: str
    seed: int
    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, _Reason] = field(default_factory=dict)

    def take(self, size: int, documents: int = 1) -> None:
        """So many documents of `size` bytes together came in; further parts of one that came before count no more."""
        self.documents_in += documents
        self.bytes_in += size

    def give(self, size: int, documents: int = 1) -> None:
        """So many documents of `size` bytes together went out."""
        self.documents_out += documents
        self.bytes_out += size

    def drop(self, reason: str, size: int, documents: int = 1) -> None:
        """So many documents of `size` bytes together that came in go no further."""
        found = self.reasons.setdefault(reason, _Reason())
        found.documents += documents
        found.bytes += size

    def example(
        self, reason: str, name: str, text: str, show: Callable[[str], str] = excerpt
    ) -> None:
        """One that was dropped is perhaps an example. `name` is its place in the source; `show` makes of `text` what an
        example shows."""
        examples = self.reasons[reason].examples
        place = f"{self.seed}:{name}:{text[:EXCERPT_CHARACTERS]}".encode(errors="surrogatepass")
        digest = hashlib.blake2b(place, digest_size=8).hexdigest()
        if len(examples) < EXAMPLES or digest < examples[-1][0]:
            insort(examples, (digest, f"{name}: {_one_line(show(text))}"))
            del examples[EXAMPLES:]

    def line(self) -> StageLine:
        """For the manifest."""
        dropped = {
            reason: Dropped(found.documents, found.bytes, [text for _, text in found.examples])
            for reason, found in sorted(self.reasons.items())
        }
        counts = (self.documents_in, self.bytes_in, self.documents_out, self.bytes_out)
        return StageLine(self.name, *counts, dropped, self.notes)


class StageStats(dict[str, Stage]):
    """All stages by name, in the order of the pipeline."""

    def __init__(self, seed: int) -> None:
        super().__init__((name, Stage(name, seed)) for name in STAGES)

    def removed(self) -> dict[str, int]:
        """Documents dropped, by reason, over all stages."""
        total = Counter[str]()
        for stage in self.values():
            total.update({reason: found.documents for reason, found in stage.reasons.items()})
        return dict(sorted(total.items()))

    def pass_on(self, name: str) -> None:
        """A stage that changes nothing on the way: what its predecessor gave comes in and goes out."""
        stage, before = self[name], self[STAGES[STAGES.index(name) - 1]]
        stage.documents_in = stage.documents_out = before.documents_out
        stage.bytes_in = stage.bytes_out = before.bytes_out


def _one_line(text: str) -> str:
    """An excerpt that a table can show: no control characters, no line breaks, valid UTF-8."""
    shown = "".join(c if c.isprintable() else " " for c in text.encode(errors="replace").decode())
    return " ".join(shown.split())
