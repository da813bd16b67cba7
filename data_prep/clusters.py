"""Clusters of documents with similar signatures (of data_prep/neardup.py): candidates band by band, then joined.

Suffixes: D documents, P places of a signature.
"""

from collections.abc import Iterator

import numpy as np

NEIGHBOURS = 16  # in a band with more members of one kind, each is compared with so many next ones, and the first
PAIRS_AT_ONCE = 1 << 14


def clusters(signatures_DP: np.ndarray, order_D: np.ndarray, rows: int, threshold: float) -> np.ndarray:
    """For each document, in the order of keys, the first document of its cluster [D].

    `order_D` are the rows of the documents among the signatures; documents whose estimated similarity reaches
    `threshold` are near-duplicates. A band has `rows` places; places left over only serve the estimate.
    """
    label_D = np.arange(len(order_D))
    for start in range(0, signatures_DP.shape[1] - rows + 1, rows):
        kind_D = _kinds(signatures_DP[:, start : start + rows], order_D)
        by_kind_D = np.argsort(kind_D, kind="stable")
        kind_D = kind_D[by_kind_D]
        for one, other in _candidates(kind_D, by_kind_D):
            apart = label_D[one] != label_D[other]
            one, other = one[apart], other[apart]
            alike = estimate(signatures_DP, order_D[one], order_D[other]) >= threshold
            _join(label_D, one[alike], other[alike])
    return label_D


def _kinds(columns: np.ndarray, order_D: np.ndarray) -> np.ndarray:
    """The bytes of a band as one number a document [D]."""
    kind_D: np.ndarray = np.zeros(len(columns), dtype=np.uint32 if columns.shape[1] <= 4 else np.uint64)
    for column in columns.T:
        kind_D = (kind_D << 8) | column
    return kind_D[order_D]


def _candidates(kind_D: np.ndarray, by_kind_D: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of documents of one kind, as two arrays of equal length; documents lie sorted by kind, then by key."""
    for distance in range(1, NEIGHBOURS + 1):
        same = np.flatnonzero(kind_D[distance:] == kind_D[:-distance])
        if not len(same):
            return
        yield by_kind_D[same], by_kind_D[same + distance]
    first = np.searchsorted(kind_D, kind_D[same])  # `same` has some left: kinds with more members than compared
    yield by_kind_D[first], by_kind_D[same + NEIGHBOURS]


def estimate(signatures_DP: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Estimated Jaccard similarities [n] of the pairs (one[i], other[i]) of rows."""
    agree = np.empty(len(one))
    for start in range(0, len(one), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        agree[part] = (signatures_DP[one[part]] == signatures_DP[other[part]]).mean(axis=1)
    return (agree - 1 / 256) / (1 - 1 / 256)


def _join(label_D: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Merge the clusters of these pairs in place. A label is the cluster's smallest member, always its own label."""
    one, other = label_D[one], label_D[other]
    while len(one):
        low, high = np.minimum(one, other), np.maximum(one, other)
        np.minimum.at(label_D, high, low)
        while True:  # halve all paths until every label is a root
            next_D = label_D[label_D]
            if np.array_equal(next_D, label_D):
                break
            label_D[:] = next_D
        one, other = label_D[low], label_D[high]
        apart = one != other
        one, other = one[apart], other[apart]
