"""Our MinHash beside datasketch's: speed of the signatures, and the error of both estimates on the same pairs.

    python benchmarks/near_duplicates.py <text files, also .xz>        (pip install datasketch)

Documents are the blocks between blank lines; both sides see the same runs of 3 words, 256 permutations, one thread.
Times are CPU seconds of this process. datasketch gets its fastest way: a batch of hashed runs per document, through its
own table of permutations.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import files
from data_prep.clusters import estimate
from data_prep.neardup import NearDuplicateConfig, Signer
from data_prep.words import hash_words, ngrams

CHANGED = 0.1


def read(paths: list[Path], megabytes: float) -> list[str]:
    """Documents of the files, up to so many megabytes of characters."""
    documents, characters = [], 0
    for path in paths:
        for text in files.TEXT_DOCUMENTS["block"](files.read_lines(files.OpenFile(path)), 1 << 22):
            documents.append(text)
            characters += len(text)
            if characters > megabytes * 1e6:
                return documents
    return documents


def edited(documents: list[str], seed: int) -> list[str]:
    """Each document with a tenth of its words replaced."""
    rng = np.random.default_rng(seed)
    copies = []
    for document in documents:
        words = document.split()
        for place in rng.choice(len(words), int(CHANGED * len(words)), replace=False):
            words[place] = f"x{rng.integers(10**9)}"
        copies.append(" ".join(words))
    return copies


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its CPU seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def datasketch_signatures(documents: list[str], ngram: int, permutations: int) -> list[Any]:
    """datasketch's MinHash of every document, from the same hashed runs."""
    import datasketch

    base = datasketch.MinHash(num_perm=permutations, hashfunc=lambda number: number)
    result = []
    for document in documents:
        runs = (ngrams(hash_words(document), ngram) >> np.uint64(32)).tolist()
        own = base.copy()
        own.update_batch(runs)
        result.append(own)
    return result


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=float, default=20)
    arguments = parser.parse_args()
    config = NearDuplicateConfig()
    documents = read(arguments.paths, arguments.megabytes)
    copies, size = edited(documents, 0), sum(map(len, documents)) / 1e6
    sets = [[set(ngrams(hash_words(text), config.ngram).tolist()) for text in texts] for texts in (documents, copies)]
    exact = np.array([len(a & b) / max(1, len(a | b)) for a, b in zip(*sets)])
    signer, rows = Signer(config), np.arange(len(documents))
    (ours, _), our_seconds = timed(lambda: signer(documents))
    our_error = estimate(np.concatenate([ours, signer(copies)[0]]), rows, rows + len(rows)) - exact
    theirs, their_seconds = timed(lambda: datasketch_signatures(documents, config.ngram, config.permutations))
    other = datasketch_signatures(copies, config.ngram, config.permutations)
    their_error = np.array([a.jaccard(b) for a, b in zip(theirs, other)]) - exact
    print(f"{len(documents)} documents, {size:.1f} MB, mean Jaccard similarity of the pairs {exact.mean():.3f}\n")
    print("| | MB/s, one thread | bytes a document | error: mean | error: std |\n|---|---|---|---|---|")
    for name, seconds, held, error in (
        ("data_prep.neardup", our_seconds, config.permutations, our_error),
        ("datasketch", their_seconds, theirs[0].hashvalues.nbytes, their_error),
    ):
        print(f"| {name} | {size / seconds:.1f} | {held} | {error.mean():+.4f} | {error.std():.4f} |")


if __name__ == "__main__":
    main()
