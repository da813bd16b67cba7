"""Which documents with similar signatures (data_prep/dedup/near.py) are kept, and which kept one stands for the others.

Documents come in an order of preference, and the choice is the greedy one: a document is dropped if it is similar to
an earlier one that is kept. So every dropped document is similar to the one that stands for it; joining all that are
connected by similar pairs would also drop what is only similar to something similar. Going through the documents
singly would take one table per band for all of them. Instead, rounds go band by band through all that are undecided:
a document without a similar earlier one is kept, one with a kept such is dropped, the others wait for the next round,
which leaves out what was dropped. Few do, and the order is random among documents of one length, so rounds are few.

Suffixes: D documents in the order of preference, P places of a signature.
"""

from collections.abc import Iterator

import numpy as np

NEIGHBOURS = 16  # in a band with more members of one bucket, each is compared with so many next ones, and the first
PAIRS_AT_ONCE = 1 << 14


def representatives(signatures_DP: np.ndarray, order_D: np.ndarray, rows: int, threshold: float) -> np.ndarray:
    """For each document the kept one that it is similar to [D]; the document itself if it is kept.

    `order_D` are the rows of the documents among the signatures, preferred ones first; documents whose estimated
    similarity reaches `threshold` are near-duplicates. A band has `rows` places; places left over only serve the
    estimate.
    """
    itself_D = np.arange(len(order_D), dtype=np.uint32)
    similar_D = itself_D.copy()  # an earlier similar document, if one is known
    open_D = np.ones(len(order_D), dtype=bool)  # undecided
    dropped_D = np.zeros(len(order_D), dtype=bool)
    while open_D.any():
        similar_D[open_D] = itself_D[open_D]
        for start in range(0, signatures_DP.shape[1] - rows + 1, rows):
            bucket_D = _buckets(signatures_DP[:, start : start + rows], order_D)
            members = np.flatnonzero(_may_match(bucket_D, open_D) & ~dropped_D)
            for one, other in _candidates(bucket_D[members], members):
                wanted = open_D[other] & (similar_D[other] == other)
                one, other = one[wanted], other[wanted]
                alike = estimate(signatures_DP, order_D[one], order_D[other]) >= threshold
                similar_D[other[alike]] = one[alike]
        open_D &= similar_D != itself_D
        decided_D = open_D & ~open_D[similar_D]
        dropped_D |= decided_D
        open_D &= ~decided_D
    return similar_D


def _buckets(columns: np.ndarray, order_D: np.ndarray) -> np.ndarray:
    """The bytes of a band as one number a document [D]."""
    bucket_D: np.ndarray = np.zeros(len(columns), dtype=np.uint32 if columns.shape[1] <= 4 else np.uint64)
    for column in columns.T:
        bucket_D = (bucket_D << 8) | column
    return bucket_D[order_D]


def _may_match(bucket_D: np.ndarray, open_D: np.ndarray) -> np.ndarray:
    """Which documents share a bucket with an undecided one [D]."""
    return open_D if open_D.all() else np.isin(bucket_D, bucket_D[open_D])


def _candidates(bucket_M: np.ndarray, members: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of documents of one bucket, the preferred one first, as two arrays of equal length."""
    by_bucket_M = np.argsort(bucket_M, kind="stable")
    bucket_M, members = bucket_M[by_bucket_M], members[by_bucket_M]
    same = np.flatnonzero(bucket_M[1:] == bucket_M[:-1]) + 1
    yield members[np.searchsorted(bucket_M, bucket_M[same])], members[same]  # the first is the likeliest kept
    for distance in range(1, NEIGHBOURS + 1):
        same = same[same >= distance]
        same = same[bucket_M[same] == bucket_M[same - distance]]
        if not len(same):
            return
        yield members[same - distance], members[same]


def estimate(signatures_DP: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Estimated Jaccard similarities [n] of the pairs (one[i], other[i]) of rows."""
    agree = np.empty(len(one))
    for start in range(0, len(one), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        agree[part] = (signatures_DP[one[part]] == signatures_DP[other[part]]).mean(axis=1)
    return (agree - 1 / 256) / (1 - 1 / 256)
