"""Measures of repetition within a text: lines and n-grams (Gopher: Rae et al. 2021, section A.1.1 and table A1).

The words of n-grams are those of data_prep/dedup/ngram_hashes.py: case and punctuation do not hide a repetition.
Suffixes: W words, N n-grams.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from data_prep.dedup.ngram_hashes import ngrams, word_places
from data_prep.filters.text import LEAST_LINES, Text, Violation
from data_prep.stats import Span

TOP_NGRAMS = (2, 3, 4)
DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)


def duplicate_lines(text: Text, limit: float) -> float | None:
    """Return the share of the lines that repeat an earlier one (a normalised text's paragraphs are its lines)."""
    lines = text.lines
    if len(lines) < LEAST_LINES:
        return None
    return (len(lines) - len(set(lines))) / len(lines)


def duplicate_line_characters(text: Text, limit: float) -> float | None:
    """Return the share of the characters that stand in lines that repeat an earlier one."""
    if len(text.lines) < LEAST_LINES:
        return None
    characters = sum(map(len, text.lines))
    repeated = characters - sum(map(len, set(text.lines)))
    return repeated / max(1, characters)


def repeated_lines(text: Text) -> list[Span]:
    """Return the places of the lines that repeat an earlier one."""
    seen = set[str]()
    return text.line_spans(lambda line: line in seen or seen.add(line))  # type: ignore[func-returns-value]


def top_ngrams(text: Text, limits: Sequence[float]) -> Violation | None:
    """Return the share of the characters that the n-gram takes up that takes up most, of 2, 3, 4 words.

    Overlapping occurrences count twice; an n-gram that occurs once does not count. Bytes stand for characters.
    """
    hashes_W, lengths_W = text.word_hashes
    if text.most_frequent_pair < 2:
        return None
    edges_W = np.concatenate([[0], np.cumsum(lengths_W)])
    total = int(edges_W[-1])
    for n, limit in zip(TOP_NGRAMS, limits):
        longest = max((edges_W[n:] - edges_W[:-n]).tolist(), default=0)
        if (
            text.most_frequent_pair * longest / total <= limit
        ):  # an upper bound, far quicker than the count
            continue
        grams_N = ngrams(hashes_W, n)
        different, first, counts = np.unique(grams_N, return_index=True, return_counts=True)
        bytes_N = (edges_W[first + n] - edges_W[first]) * counts * (counts > 1)
        top = int(bytes_N.argmax())
        if (share := bytes_N[top] / total) > limit:
            where = partial(_ngram_spans, np.flatnonzero(grams_N == different[top]), n)
            return Violation(f"{share:.4g} in a run of {n} words", limit, where)
    return None


def duplicate_ngrams(text: Text, limits: Sequence[float]) -> Violation | None:
    """Return the share of the characters in repeated n-grams of 5, 6 ... 10 words; each byte counts once."""
    hashes_W, lengths_W = text.word_hashes
    if text.most_frequent_pair < 2:
        return None
    for n, limit in zip(DUPLICATE_NGRAMS, limits):
        first_words = _repeated(hashes_W, n)
        change_W = np.zeros(
            len(hashes_W) + 1, dtype=np.int64
        )  # +1 where an n-gram begins, -1 where it has ended
        change_W[first_words] += 1
        change_W[first_words + n] -= 1
        share = lengths_W[np.cumsum(change_W[:-1]) > 0].sum() / lengths_W.sum()
        if share > limit:
            return Violation(
                f"{share:.4g} in runs of {n} words", limit, partial(_ngram_spans, first_words, n)
            )
        if share <= min(
            limits
        ):  # what a repeated longer n-gram covers, repeated shorter ones cover too
            return None
    return None


def _repeated(hashes_W: np.ndarray, n: int) -> np.ndarray:
    """Return which words begin an n-gram that occurs more than once."""
    grams_N = ngrams(hashes_W, n)
    ordered_N = np.sort(grams_N)
    repeated = ordered_N[1:][ordered_N[1:] == ordered_N[:-1]]
    if not len(repeated):
        return np.empty(0, dtype=np.int64)
    # `repeated` is short and sorted: np.isin would sort all anew.
    nearest_N = np.minimum(np.searchsorted(repeated, grams_N), len(repeated) - 1)
    return np.flatnonzero(repeated[nearest_N] == grams_N)


def _ngram_spans(first_words: np.ndarray, n: int, text: Text) -> list[Span]:
    starts_W, ends_W = word_places(text.text)
    return list(zip(starts_W[first_words].tolist(), ends_W[first_words + n - 1].tolist()))
