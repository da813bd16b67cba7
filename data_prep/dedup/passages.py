"""Why a text was removed, for a person: what was measured, the limit, and the passage in which it shows.

A rule's verdict is a `Breach`, or None where the text may stay. Where in the text it lies is looked up only for the few
documents that are shown.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

PASSAGE_CHARACTERS = 160
Span = tuple[int, int]  # of characters, the end not included


def nowhere() -> Iterable[Span]:
    """The whole text is at fault: its beginning is shown."""
    return ()


class Breach(NamedTuple):
    """What a text has beyond a limit. `where` gives the spans that were counted."""

    value: Any
    limit: Any
    where: Callable[[], Iterable[Span]] = nowhere

    def shown(self, text: str, setting: str) -> str:
        """`value, limit (setting): passage`."""
        return f"{_plain(self.value)}, limit {_plain(self.limit)} ({setting}): {passage(text, self.where())}"


def above(value: float, limit: float, where: Callable[[], Iterable[Span]] = nowhere) -> Breach | None:
    """A breach if the value is above the limit."""
    return Breach(value, limit, where) if value > limit else None


def below(value: float, limit: float, where: Callable[[], Iterable[Span]] = nowhere) -> Breach | None:
    """A breach if the value is below the limit."""
    return Breach(value, limit, where) if value < limit else None


def spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    """Where the pattern matches."""
    return [match.span() for match in pattern.finditer(text)]


def passage(text: str, counted: Iterable[Span] = ()) -> str:
    """The `PASSAGE_CHARACTERS` that hold most of what was counted, in the middle; without any the beginning."""
    start = 0
    if found := sorted(counted):
        starts_N, ends_N = np.array(found, dtype=np.int64).T
        sums_N = np.concatenate([[0], np.cumsum(ends_N - starts_N)])
        beyond_N = np.searchsorted(starts_N, starts_N + PASSAGE_CHARACTERS)
        first = int(np.argmax(sums_N[beyond_N] - sums_N[:-1]))
        room = PASSAGE_CHARACTERS - int(ends_N[first : beyond_N[first]].max() - starts_N[first])
        start = max(0, int(starts_N[first]) - max(0, room // 2))
    start = max(0, min(start, len(text) - PASSAGE_CHARACTERS))
    end = start + PASSAGE_CHARACTERS
    return f"{'... ' if start else ''}{text[start:end]}{' ...' if end < len(text) else ''}"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
