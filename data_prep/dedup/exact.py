"""Exact deduplication and the held-out split, both from one content hash, so both are independent of order and workers.

A document is known by 16 bytes of BLAKE2b of its normalised text: 8 bytes decide whether it was seen before, 8 bytes
whether it is held out. The memory of seen documents is 8 bytes each (a sorted array) plus a bounded set of the newest:
100 million documents take 0.8 GB, and the chance that among them one is dropped for another's hash is 3 in 10,000.
"""

import hashlib

import numpy as np

HASHES = np.dtype(
    [("key", "<u8"), ("number", "<u8")]
)  # of `content_hash`: for finding duplicates, and for the split
NEWEST = 1 << 18
SCALE = 1 << 64


def content_hash(data: bytes, seed: int) -> bytes:
    """Two independent 64-bit numbers of a document's content, as `HASHES` reads them."""
    return hashlib.blake2b(
        data, digest_size=16, salt=seed.to_bytes(8, "little", signed=True)
    ).digest()


def in_sorted(hashes_N: np.ndarray, sorted_M: np.ndarray) -> np.ndarray:
    """Which of the hashes stand in the sorted array: [N] bool."""
    if not len(sorted_M):
        return np.zeros(len(hashes_N), dtype=bool)
    place_N = np.minimum(np.searchsorted(sorted_M, hashes_N), len(sorted_M) - 1)
    found_N: np.ndarray = sorted_M[place_N] == hashes_N
    return found_N


class SeenBefore:
    """Remembers 64-bit hashes; asked in batches, so that the large sorted part is searched by one numpy call."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, dtype=np.uint64)
        self._newest: set[int] = set()

    def ask(self, hashes_N: np.ndarray) -> np.ndarray:
        """Which hashes were there before, in earlier calls or earlier in this one: [N] bool. They are from now on."""
        seen_N = in_sorted(hashes_N, self._sorted)
        new = np.flatnonzero(~seen_N)
        for place, number in zip(new.tolist(), hashes_N[new].tolist()):
            if number in self._newest:
                seen_N[place] = True
            else:
                self._newest.add(number)
        if len(self._newest) > NEWEST:
            merged = np.concatenate(
                [self._sorted, np.fromiter(self._newest, np.uint64, len(self._newest))]
            )
            merged.sort(kind="stable")  # finds the sorted part
            self._sorted, self._newest = merged, set()
        return seen_N


class HeldOut:
    """Decides by hash which documents are validation, and sees to it that there is at least one.

    A document is held out when its hash falls below `fraction`. As long as none was, the one with the smallest hash so
    far is kept back: if the text ends without any, that one is the validation split; else it goes to train after all.
    Which documents end up where therefore does not depend on their order.
    """

    def __init__(self, fraction: float) -> None:
        self.threshold = int(fraction * SCALE)
        self._kept_back = np.empty(0, dtype=np.uint64)  # the hash of the document that is
        self._found = False

    def assign(self, hashes_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of these documents the places of those that are decided now, in the order in which they go on; whether each
        is held out; and the place of the one kept back, [0] or [1]. Place -1: the one that was kept back before."""
        out_N, before = hashes_N < self.threshold, len(self._kept_back)
        end = 0 if self._found else int(np.argmax(out_N)) if out_N.any() else len(hashes_N)
        self._found |= bool(out_N.any())
        open_N = np.concatenate([self._kept_back, hashes_N[:end]])  # none of them is held out
        smallest = np.unique(np.minimum.accumulate(open_N), return_index=True)[1][
            ::-1
        ]  # so far, each time
        places, last = np.arange(1, len(open_N)), smallest[-1:]
        places[smallest[1:] - 1] = smallest[:-1]  # it goes on when a smaller one comes
        if self._found:
            places = np.concatenate([places, last, np.arange(len(open_N), before + len(hashes_N))])
            last = last[:0]
        self._kept_back, places = open_N[last], places - before
        return places, out_N[places] & (places >= 0), last - before
