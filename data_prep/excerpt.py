"""The passage of a dropped text in which the reason shows, for a person to read."""

import re
from collections.abc import Iterable

import numpy as np

EXCERPT_CHARACTERS = 160
Span = tuple[int, int]  # of characters, the end not included


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
