"""Passages that alone make documents near-duplicates, such as a licence in front of every chapter of a book.

A passage is the longest run of tokens that a dropped document shares with the kept one. It is reported where the two
would not reach the threshold without it, and a twentieth of the dropped document or more stands outside of it.
Suffixes: T tokens, R runs of `RUN_TOKENS`.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from data_prep.dedup.near import NearDuplicateConfig
from data_prep.dedup.ngram_hashes import mix, ngrams

RUN_TOKENS = 16  # of the shortest passage
MIN_SHARE_OUTSIDE = 0.05  # of a dropped document that is more than the passage
MIN_DOCUMENTS = 5  # that a reported passage explains
SHOWN_PASSAGES = 3
FIRST_TOKENS = 32  # of a passage that are shown


class SharedPassages:
    """Passages of groups of near-duplicates with the documents that each explains.

    Two passages are the same where one holds the run in the middle of the other.
    """

    def __init__(self, config: NearDuplicateConfig) -> None:
        self.config = config
        self._first_tokens: dict[int, np.ndarray] = {}  # by the run in the middle
        self._explained = Counter[int]()  # documents
        self._compared = Counter[int]()  # documents of the groups that have the passage

    def add_group(self, kept_T: np.ndarray, dropped: Iterable[np.ndarray]) -> None:
        """Compare the documents that are dropped for one that is kept with that one."""
        explained = Counter[int]()
        compared = 0
        for dropped_T in dropped:
            compared += 1
            passage_T = explaining_passage(dropped_T, kept_T, self.config)
            if len(passage_T):
                explained[self._name(passage_T)] += 1
        self._explained.update(explained)
        self._compared.update(dict.fromkeys(explained, compared))

    def _name(self, passage_T: np.ndarray) -> int:
        runs = _runs(passage_T).tolist()
        for run in runs:
            if run in self._first_tokens:
                return int(run)
        middle: int = runs[len(runs) // 2]
        self._first_tokens[middle] = passage_T[:FIRST_TOKENS]
        return middle

    def most_common(self) -> list[tuple[np.ndarray, int]]:
        """Return the passages that explain most of what is dropped in their groups: first tokens, documents."""
        passages = []
        for name, documents in self._explained.most_common():
            if documents >= MIN_DOCUMENTS and 2 * documents > self._compared[name]:
                passages.append((self._first_tokens[name], documents))
        return passages[:SHOWN_PASSAGES]


def explaining_passage(
    dropped_T: np.ndarray, kept_T: np.ndarray, config: NearDuplicateConfig
) -> np.ndarray:
    """Return the passage without which two near-duplicates are none; empty where there is no such passage."""
    in_dropped, in_kept = longest_shared_run(dropped_T, kept_T)
    nothing = dropped_T[:0]
    outside_T = np.delete(dropped_T, in_dropped)
    if len(outside_T) < MIN_SHARE_OUTSIDE * len(dropped_T):
        return nothing
    if _similarity(outside_T, np.delete(kept_T, in_kept), config.ngram) >= config.threshold:
        return nothing
    return dropped_T[in_dropped]


def longest_shared_run(one_T: np.ndarray, other_T: np.ndarray) -> tuple[slice, slice]:
    """Return where the longest run that two documents share stands in each; empty below `RUN_TOKENS`.

    What the other document repeats counts at its first place.
    """
    one_R, other_R = _runs(one_T), _runs(other_T)
    if not len(one_R) or not len(other_R):
        return slice(0, 0), slice(0, 0)
    different_R, first_R = np.unique(other_R, return_index=True)
    index_R = np.minimum(np.searchsorted(different_R, one_R), len(different_R) - 1)
    is_shared_R = different_R[index_R] == one_R
    shift_R = first_R[index_R] - np.arange(len(one_R))
    goes_on_R = (shift_R[1:] == shift_R[:-1]) & (is_shared_R[1:] == is_shared_R[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~goes_on_R) + 1])
    lengths = np.diff(starts, append=len(one_R)) * is_shared_R[starts]
    longest = int(np.argmax(lengths))
    if not lengths[longest]:
        return slice(0, 0), slice(0, 0)
    start, length = int(starts[longest]), int(lengths[longest]) + RUN_TOKENS - 1
    start_in_other = start + int(shift_R[start])
    return slice(start, start + length), slice(start_in_other, start_in_other + length)


def _runs(tokens_T: np.ndarray) -> np.ndarray:
    return ngrams(_hashes(tokens_T), RUN_TOKENS)


def _hashes(tokens_T: np.ndarray) -> np.ndarray:
    return mix(tokens_T.astype(np.uint64) + np.uint64(1))


def _similarity(one_T: np.ndarray, other_T: np.ndarray, ngram: int) -> float:
    """Return the Jaccard similarity of the sets of n-grams."""
    first, other = (np.unique(ngrams(_hashes(tokens), ngram)) for tokens in (one_T, other_T))
    both = len(np.intersect1d(first, other, assume_unique=True))
    return both / max(1, len(first) + len(other) - both)
