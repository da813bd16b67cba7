"""Exact deduplication and the held-out split, both from one content hash, so both are independent of order and workers.

A document is known by 16 bytes of BLAKE2b of its normalised text: 8 bytes decide whether it was seen before, 8 bytes
whether it is held out. The memory of seen documents is 8 bytes each (a sorted array) plus a bounded set of the newest:
100 million documents take 0.8 GB, and the chance that among them one is dropped for another's hash is 3 in 10,000.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from cramming.data.corpus import Split

Item = TypeVar("Item")
NEWEST = 1 << 18
SCALE = 1 << 64


def content_hash(data: bytes, seed: int) -> tuple[int, int]:
    """Two independent 64-bit numbers of a document's content: for finding duplicates, and for the split."""
    digest = hashlib.blake2b(data, digest_size=16, salt=seed.to_bytes(8, "little", signed=True)).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


class SeenBefore:
    """Remembers 64-bit hashes; asked in batches, so that the large sorted part is searched by one numpy call."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, dtype=np.uint64)
        self._newest: set[int] = set()

    def ask(self, hashes: Sequence[int]) -> Iterator[bool]:
        """For each hash in order: was it there before (earlier calls and earlier in this one)? It is from now on."""
        old = self._in_sorted(np.array(hashes, dtype=np.uint64))
        for number, known in zip(hashes, old.tolist()):
            seen = known or number in self._newest
            if not seen:
                self._newest.add(number)
            yield seen
        if len(self._newest) > NEWEST:
            merged = np.concatenate([self._sorted, np.fromiter(self._newest, np.uint64, len(self._newest))])
            merged.sort()
            self._sorted, self._newest = merged, set()

    def _in_sorted(self, hashes_N: np.ndarray) -> np.ndarray:
        if not len(self._sorted):
            return np.zeros(len(hashes_N), dtype=bool)
        place_N = np.minimum(np.searchsorted(self._sorted, hashes_N), len(self._sorted) - 1)
        return self._sorted[place_N] == hashes_N


class HeldOut(Generic[Item]):
    """Decides by hash which documents are validation, and sees to it that there is at least one.

    A document is held out when its hash falls below `fraction`. As long as none was, the one with the smallest hash so
    far is kept back: if the text ends without any, that one is the validation split; else it goes to train after all.
    Which documents end up where therefore does not depend on their order. `Item` is whatever the caller moves around.
    """

    def __init__(self, fraction: float) -> None:
        self.threshold = int(fraction * SCALE)
        self._candidate: tuple[int, Item] | None = None
        self._found = False

    def assign(self, number: int, item: Item) -> list[tuple[Split, Item]]:
        """The items that are decided now, each with its split."""
        if number < self.threshold:
            decided: list[tuple[Split, Item]] = [] if self._candidate is None else [("train", self._candidate[1])]
            self._candidate, self._found = None, True
            return [*decided, ("validation", item)]
        if self._found:
            return [("train", item)]
        if self._candidate is None:
            self._candidate = (number, item)
            return []
        if number < self._candidate[0]:
            item, self._candidate = self._candidate[1], (number, item)
        return [("train", item)]

    def finish(self) -> list[tuple[Split, Item]]:
        """The text has ended: what was kept back, if no document was held out."""
        return [] if self._candidate is None else [("validation", self._candidate[1])]
