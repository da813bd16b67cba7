"""Near-duplicates by MinHash and locality-sensitive hashing: which documents to drop, whatever their order.

A document is the set of its n-grams. Its signature (Broder 1997) has one byte for each of `permutations` random orders
of all n-grams: 8 bits of a hash of the first one (b-bit minwise hashing, Li and König 2010). Two documents agree in a
byte with chance J + (1 - J) / 256, where J is their Jaccard similarity, so counting agreements estimates J with a
standard deviation of sqrt(J (1 - J) / permutations). Candidates are pairs that agree in a whole band of `rows` bytes
(Indyk and Motwani 1998): chance 1 - (1 - J**rows)**bands. Only candidates whose estimate reaches `threshold` are
near-duplicates. With the defaults (3 words, 85 bands of 3, threshold 0.5) a pair counts with these chances:

    Jaccard   0.3     0.4     0.45    0.5     0.55    0.6     0.65
    chance    <1e-9   0.0006  0.05    0.5     0.95    0.999   >0.9999

Changing 10 % of the words leaves J = 0.9**3 / (2 - 0.9**3) = 0.57, 20 % leave 0.34; cutting off a third leaves 0.67.

The longest is kept, of equally long ones that with the smallest key; a document is dropped only if it is itself similar
to one that is kept. The result is a function of the set of (key, text): neither order nor workers matter. Memory: about
310 bytes a document with the defaults. Suffixes: D documents, W words, P bytes of a signature, M members of buckets.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import numpy as np
from pydantic import Field

from cramming.config import Count, Section, Seed, Share
from data_prep.dedup.exact import in_sorted
from data_prep.dedup.ngram_hashes import hash_words, ngrams

SHORT_CHARACTERS = 1 << 13
BLOCK_NGRAMS = 1024  # times 256 hashes of 4 bytes: 1 MiB of scratch space
ROW_BYTES_IN_SEARCH = 40
NEIGHBOURS = (
    16  # in a bucket with more documents, each is compared with so many next ones, and the first
)
PAIRS_AT_ONCE = 1 << 14
SPREAD = np.uint32(0x9E3779B1)  # odd: every bit of a number reaches the highest 8 of its multiple


class NearDuplicateConfig(Section):
    """Section `data.near_duplicates`."""

    enabled: bool = False
    ngram: Count = 3  # words
    threshold: Share = (
        0.5  # estimated Jaccard similarity from which two documents are near-duplicates
    )
    permutations: Count = 256  # bytes of a signature
    rows: Annotated[int, Field(ge=1, le=8)] = 3  # bytes in a band; bands = permutations // rows
    seed: Seed = 0


def find_near_duplicates(
    keys_N: np.ndarray, ngrams_N: np.ndarray, signatures_NP: np.ndarray, config: NearDuplicateConfig
) -> np.ndarray:
    """Return for each document the row of the one that is kept in its place: [N].

    That one has the same key, unless the document is a near-duplicate. `keys_N` are 64-bit keys of the content;
    documents of equal keys count once. `ngrams_N` and `signatures_NP` are as `Signer` gives them, of documents that
    have n-grams.
    """
    _, row_D, place_N = np.unique(keys_N, return_index=True, return_inverse=True)
    longest_first_D = np.argsort(-ngrams_N[row_D].astype(np.int64), kind="stable")
    order_D = row_D[longest_first_D]
    kept_D = representatives(signatures_NP, order_D, config.rows, config.threshold)
    row_D[longest_first_D] = order_D[kept_D]
    kept_N: np.ndarray = row_D[place_N]
    return kept_N


def memory_bytes(ngrams_N: np.ndarray, signatures_NP: np.ndarray) -> int:
    """Return the most that keys, signatures and the search among them take."""
    return signatures_NP.nbytes + len(ngrams_N) * (8 + ngrams_N.itemsize + ROW_BYTES_IN_SEARCH)


class Signer:
    """Texts to signatures."""

    def __init__(self, config: NearDuplicateConfig) -> None:
        self.ngram = config.ngram
        rng = np.random.default_rng(config.seed)
        # Multiplying by an odd factor modulo 2**32 permutes the 32-bit numbers. The lowest bits of a product
        # depend on the lowest bits of x alone, so no byte of a signature is made of them.
        self._factors_P = rng.integers(
            0, 1 << 31, config.permutations, dtype=np.uint32
        ) * np.uint32(2) + np.uint32(1)

    def __call__(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return signatures [D, P] uint8 and n-gram counts [D] uint32; the signature of none is void."""
        texts = list(texts)
        signatures_DP = np.empty((len(texts), len(self._factors_P)), dtype=np.uint8)
        ngrams_D = np.empty(len(texts), dtype=np.uint32)
        # Short texts in one pass: most of the time on them would otherwise be numpy's calls. Long ones on their own, so
        # that where their bytes are cut into blocks does not depend on their neighbours.
        short = [number for number, text in enumerate(texts) if len(text) <= SHORT_CHARACTERS]
        for group in [
            short,
            *([number] for number, text in enumerate(texts) if len(text) > SHORT_CHARACTERS),
        ]:
            if group:
                signatures_DP[group], ngrams_D[group] = self._sign(
                    [texts[number] for number in group]
                )
        return signatures_DP, ngrams_D

    def _sign(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        words = hash_words(texts)
        text_W = words.text_numbers()
        grams = (ngrams(words.hashes_W, self.ngram) >> np.uint64(32)).astype(np.uint32)
        inside = text_W[: len(grams)] == text_W[len(text_W) - len(grams) :]
        ends_D = np.searchsorted(
            text_W[: len(grams)][inside], np.arange(len(texts)), side="right"
        ).tolist()
        grams = grams[inside]
        scratch = np.empty((min(BLOCK_NGRAMS, len(grams)), len(self._factors_P)), dtype=np.uint32)
        smallest_DP = np.full((len(texts), len(self._factors_P)), 0xFFFFFFFF, dtype=np.uint32)
        for smallest_P, start, end in zip(smallest_DP, [0, *ends_D], ends_D):
            for block in range(start, end, BLOCK_NGRAMS):
                values = grams[block : min(end, block + BLOCK_NGRAMS), None]
                products = np.multiply(values, self._factors_P, out=scratch[: len(values)])
                np.minimum(smallest_P, products.min(axis=0), out=smallest_P)
        ngrams_D = np.diff(ends_D, prepend=0)
        return ((smallest_DP * SPREAD) >> np.uint32(24)).astype(np.uint8), ngrams_D


def representatives(
    signatures_DP: np.ndarray, order_D: np.ndarray, rows: int, threshold: float
) -> np.ndarray:
    """Return for each document the kept one that it is similar to [D]; the document itself if it is kept.

    `order_D` are the rows of the documents among the signatures, preferred ones first. The choice is the greedy one: a
    document is dropped if it is similar to an earlier one that is kept. (Connected components of similar pairs would
    also drop what is only similar to something similar.) Rounds go band by band through all undecided documents:
    one without a similar earlier one is kept, one with a kept such is dropped, the others wait for the next round. Few
    do, and the order is random among documents of one length, so rounds are few.
    """
    itself_D = np.arange(len(order_D), dtype=np.uint32)
    similar_D = itself_D.copy()  # an earlier similar document, if one is known
    open_D = np.ones(len(order_D), dtype=bool)  # undecided
    dropped_D = np.zeros(len(order_D), dtype=bool)
    while open_D.any():
        similar_D[open_D] = itself_D[open_D]
        for start in range(0, signatures_DP.shape[1] - rows + 1, rows):
            bucket_D = _buckets(signatures_DP[:, start : start + rows], order_D)
            members = itself_D[~dropped_D]
            if not open_D.all():  # only buckets with undecided ones
                members = members[in_sorted(bucket_D[members], np.sort(bucket_D[open_D]))]
            for first, other in _candidates(bucket_D[members], members):
                wanted = open_D[other] & (similar_D[other] == other)
                first, other = first[wanted], other[wanted]
                alike = estimate(signatures_DP, order_D[first], order_D[other]) >= threshold
                similar_D[other[alike]] = first[alike]
        open_D &= similar_D != itself_D
        decided_D = open_D & ~open_D[similar_D]
        dropped_D |= decided_D
        open_D &= ~decided_D
    return similar_D


def _buckets(columns: np.ndarray, order_D: np.ndarray) -> np.ndarray:
    """Return the bytes of a band as one number a document [D], below 2**32; of more than four bytes a hash."""
    bucket_D = np.zeros(len(columns), dtype=np.uint32)
    for column in np.ascontiguousarray(
        columns
    ).T:  # one pass through the signatures, not one for each byte
        bucket_D = ((bucket_D << 8) | (bucket_D >> 24) * SPREAD) ^ column
    placed_D: np.ndarray = bucket_D[order_D]
    return placed_D


def _candidates(
    bucket_M: np.ndarray, members: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of documents of one bucket, the preferred one first, as two arrays of equal length."""
    both_M = bucket_M.astype(np.uint64) << np.uint64(32)
    both_M |= members
    both_M.sort()  # twice as fast as to sort places by their numbers
    bucket_M, members = (both_M >> np.uint64(32)).astype(np.uint32), both_M.astype(np.uint32)
    same = np.flatnonzero(bucket_M[1:] == bucket_M[:-1]) + 1
    yield (
        members[np.searchsorted(bucket_M, bucket_M[same])],
        members[same],
    )  # the first is the likeliest kept
    for distance in range(1, NEIGHBOURS + 1):
        same = same[same >= distance]
        same = same[bucket_M[same] == bucket_M[same - distance]]
        if not len(same):
            return
        yield members[same - distance], members[same]


def estimate(signatures_DP: np.ndarray, first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the estimated Jaccard similarities [n] of the pairs (first[i], other[i]) of rows."""
    agree = np.empty(len(first))
    for start in range(0, len(first), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        equal_nP = signatures_DP.take(first[part], axis=0) == signatures_DP.take(
            other[part], axis=0
        )
        agree[part] = equal_nP.sum(axis=1, dtype=np.uint32)
    return (agree / signatures_DP.shape[1] - 1 / 256) / (1 - 1 / 256)
