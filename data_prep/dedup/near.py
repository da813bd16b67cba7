"""Near-duplicates by MinHash and locality-sensitive hashing: which documents to drop, whatever their order.

A document is the set of its runs of `ngram` words. Its signature (Broder 1997) has one byte for each of `permutations`
random orders of all runs: 8 bits of a hash of the smallest one (b-bit minwise hashing, Li and König 2010). Two
documents agree in a place with chance J + (1 - J) / 256, where J is their Jaccard similarity, so counting agreements
estimates J with a standard deviation of sqrt(J (1 - J) / permutations): 0.03 at J = 0.5 and 256 places.

Candidates are pairs that agree in a whole band of `rows` places (Indyk and Motwani 1998): of similarity J they are
found with chance 1 - (1 - J**rows)**bands. Only candidates whose estimate reaches `threshold` count as near-duplicates.
With the defaults (3 words, 85 bands of 3, threshold 0.5) a pair counts with these chances:

    Jaccard   0.3     0.4     0.45    0.5     0.55    0.6     0.65
    chance    <1e-9   0.0006  0.05    0.5     0.95    0.999   >0.9999

Changing 10 % of the words leaves J = 0.9**3 / (2 - 0.9**3) = 0.57, 20 % leave 0.34; cutting off a third leaves 0.67.
Two texts of one form (census figures, a law's boilerplate) may well share 0.3 and still say different things.

Of near-duplicates the longest is kept, of equally long ones that with the smallest key; a document is dropped only if
it is itself similar to one that is kept (data_prep/dedup/representatives.py), so at least 2 J / (1 + J) of its runs
stand there. The result is a function of the set of (key, text), so neither order nor number of workers matters. Memory:
`permutations` + 12 bytes a document, and 40 more during the search, about 310 bytes with the defaults.

Suffixes: D documents, W words, P places of a signature.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cramming.config import UserError
from cramming.files import overwrite_atomically
from data_prep.dedup.ngram_hashes import hash_words, ngrams
from data_prep.dedup.representatives import estimate, representatives
from data_prep.workers import Workers

SIGN = "signatures"  # the workers' function: Signer
BATCH_CHARACTERS = 1 << 19
SHORT_CHARACTERS = 1 << 13
BLOCK_RUNS = 1024  # times 256 places of 4 bytes: 1 MiB of scratch space
GROW_DOCUMENTS = 1 << 14
ROW_BYTES_IN_SEARCH = 40
SPREAD = np.uint32(0x9E3779B1)  # odd: every bit of a number reaches the highest 8 of its multiple


@dataclass(frozen=True)
class NearDuplicateConfig:
    """Section `data.near_duplicates`."""

    enabled: bool = False
    ngram: int = 3  # words in a run
    threshold: float = 0.5  # estimated Jaccard similarity from which two documents are near-duplicates
    permutations: int = 256  # bytes of a signature
    rows: int = 3  # places in a band; bands = permutations // rows
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.ngram <= 32:
            raise ValueError(f"ngram={self.ngram} must be between 1 and 32")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be above 0 and at most 1")
        if not 1 <= self.rows <= 8 or not self.rows <= self.permutations <= 4096:
            raise ValueError(
                f"rows={self.rows} must be between 1 and 8, permutations={self.permutations} between rows and 4096"
            )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")


@dataclass(frozen=True)
class NearDuplicates:
    """The result: `key in result` says whether the document with this key is to be dropped.

    `drop` [n] uint64 are the keys, sorted, `kept` [n] the key of the kept document that each is similar to,
    `similarity` [n] float32 their estimated Jaccard similarity. `documents` had a signature; `memory_bytes` is the most
    that signatures and search took.
    """

    drop: np.ndarray
    kept: np.ndarray
    similarity: np.ndarray
    documents: int
    memory_bytes: int

    @property
    def clusters(self) -> int:
        """How many kept documents have near-duplicates."""
        return len(np.unique(self.kept))

    def __contains__(self, key: int) -> bool:
        place = int(np.searchsorted(self.drop, np.uint64(key)))
        return place < len(self.drop) and int(self.drop[place]) == key

    def first(self, count: int) -> dict[int, tuple[int, float]]:
        """For the `count` smallest keys among `drop`: the kept document's key, and the similarity."""
        pairs = zip(self.kept[:count].tolist(), self.similarity[:count].tolist())
        return dict(zip(self.drop[:count].tolist(), pairs))

    def save(self, path: Path) -> None:
        """Write to a file, atomically."""
        counts = np.array([self.documents, self.memory_bytes], dtype=np.int64)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as handle:
                np.savez(handle, drop=self.drop, kept=self.kept, similarity=self.similarity, counts=counts)

        overwrite_atomically(path, write)

    @classmethod
    def load(cls, path: Path) -> "NearDuplicates":
        """Read what `save` wrote."""
        try:
            with np.load(path) as arrays:
                return cls(arrays["drop"], arrays["kept"], arrays["similarity"], *arrays["counts"].tolist())
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: cannot be read as a list of near-duplicates ({error}); delete it") from None


def find_near_duplicates(
    documents: Iterable[tuple[int, str]], config: NearDuplicateConfig, workers: Workers
) -> NearDuplicates:
    """Which of these documents, given as (64-bit content key, normalised text), are near-duplicates of kept ones.

    Documents of equal keys count once. Those of fewer than `ngram` words are left alone. `workers` have `SIGN`.
    """
    index = _Index(config.permutations).filled(_signed(documents, workers))
    keys_D, order_D = np.unique(index.keys_D, return_index=True)
    longest_first_D = np.argsort(-index.runs_D[order_D].astype(np.int64), kind="stable")
    keys_D, order_D = keys_D[longest_first_D], order_D[longest_first_D]
    kept_D = representatives(index.signatures_DP, order_D, config.rows, config.threshold)
    dropped = np.flatnonzero(kept_D != np.arange(len(order_D)))
    dropped = dropped[np.argsort(keys_D[dropped])]
    alike = estimate(index.signatures_DP, order_D[dropped], order_D[kept_D[dropped]])
    return NearDuplicates(
        drop=keys_D[dropped],
        kept=keys_D[kept_D[dropped]],
        similarity=alike.astype(np.float32),
        documents=len(order_D),
        memory_bytes=index.bytes + ROW_BYTES_IN_SEARCH * len(index.keys_D),
    )


class Signer:
    """Texts to signatures."""

    def __init__(self, config: NearDuplicateConfig) -> None:
        self.ngram = config.ngram
        rng = np.random.default_rng(config.seed)
        # x -> factor * x modulo 2**32 with an odd factor is a permutation of 32-bit numbers; runs are mixed before. The
        # lowest bits of a product depend on the lowest bits of x alone, so no byte of a signature is made of them.
        self._factors_P = rng.integers(0, 1 << 31, config.permutations, dtype=np.uint32) * np.uint32(2) + np.uint32(1)

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """`signatures` [D, P] uint8 and `runs` [D] uint32: how many a text has; without any its signature is void."""
        signatures_DP = np.empty((len(texts), len(self._factors_P)), dtype=np.uint8)
        runs_D = np.empty(len(texts), dtype=np.uint32)
        # Short texts in one pass: most of the time on them would otherwise be numpy's calls. Long ones on their own, so
        # that where their bytes are cut into blocks does not depend on their neighbours.
        short = [number for number, text in enumerate(texts) if len(text) <= SHORT_CHARACTERS]
        for group in [short, *([number] for number, text in enumerate(texts) if len(text) > SHORT_CHARACTERS)]:
            if group:
                signatures_DP[group], runs_D[group] = self._sign([texts[number] for number in group])
        return signatures_DP, runs_D

    def _sign(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = hash_words(texts)
        number_W = found.text_numbers()
        runs = (ngrams(found.hashes_W, self.ngram) >> np.uint64(32)).astype(np.uint32)
        inside = number_W[: len(runs)] == number_W[len(number_W) - len(runs) :]
        ends_D = np.searchsorted(number_W[: len(runs)][inside], np.arange(len(texts)), side="right").tolist()
        runs = runs[inside]
        scratch = np.empty((min(BLOCK_RUNS, len(runs)), len(self._factors_P)), dtype=np.uint32)
        smallest_DP = np.full((len(texts), len(self._factors_P)), 0xFFFFFFFF, dtype=np.uint32)
        for smallest_P, start, end in zip(smallest_DP, [0, *ends_D], ends_D):
            for block in range(start, end, BLOCK_RUNS):
                values = runs[block : min(end, block + BLOCK_RUNS), None]
                products = np.multiply(values, self._factors_P, out=scratch[: len(values)])
                np.minimum(smallest_P, products.min(axis=0), out=smallest_P)
        return ((smallest_DP * SPREAD) >> np.uint32(24)).astype(np.uint8), np.diff(ends_D, prepend=0)


class _Index:
    """Keys [D], numbers of runs [D] and signatures [D, P], growing in place, so that no second copy is ever held."""

    def __init__(self, places: int) -> None:
        self.keys_D = np.empty(0, dtype=np.uint64)
        self.runs_D = np.empty(0, dtype=np.uint32)
        self.signatures_DP = np.empty((0, places), dtype=np.uint8)

    @property
    def bytes(self) -> int:
        """What the arrays take."""
        return self.keys_D.nbytes + self.runs_D.nbytes + self.signatures_DP.nbytes

    def filled(self, batches: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> "_Index":
        """With all batches."""
        count = 0
        arrays: tuple[np.ndarray, ...] = (self.keys_D, self.runs_D, self.signatures_DP)
        for batch in batches:
            end = count + len(batch[0])
            if end > len(self.keys_D):
                self._resize(end + GROW_DOCUMENTS)
            for array, part in zip(arrays, batch):
                array[count:end] = part
            count = end
        self._resize(count)
        return self

    def _resize(self, size: int) -> None:
        # In place (realloc moves pages, it does not copy them); nobody else holds a view.
        for array in (self.keys_D, self.runs_D, self.signatures_DP):
            array.resize((size, *array.shape[1:]), refcheck=False)


def _signed(
    documents: Iterable[tuple[int, str]], workers: Workers
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Keys, numbers of runs and signatures of batches."""
    for keys, (signatures_DP, runs_D) in workers.map(SIGN, _batches(documents)):
        enough_D = runs_D > 0
        yield np.array(keys, dtype=np.uint64)[enough_D], runs_D[enough_D], signatures_DP[enough_D]


def _batches(documents: Iterable[tuple[int, str]]) -> Iterator[tuple[list[int], list[str]]]:
    keys: list[int] = []
    texts: list[str] = []
    characters = 0
    for key, text in documents:
        keys.append(key)
        texts.append(text)
        characters += len(text) + 1
        if characters >= BATCH_CHARACTERS:
            yield keys, texts
            keys, texts, characters = [], [], 0
    if keys:
        yield keys, texts
