"""Near-duplicates: what is found and what is dropped wrongly, by threshold, beside datasketch and rensa.

    python benchmarks/near_duplicates.py <text files, also .xz>        (pip install datasketch rensa)

Texts are blocks of about `--words` words; with 0, whole documents (between blank lines). All sides see the same runs
of 3 words, take 256 permutations, go through the texts longest first, and drop a text whose estimated similarity to one
that they keep reaches the threshold. Planted are pairs of a text and a copy with words replaced, cut off at the end, or
with other text in front; and what is no duplicate: texts of 3 random words, and texts of 100, 200 and 400 words of
their own that share 170 words of boilerplate. In the real text a drop counts as wrong when less than half of the runs
of the dropped text stand in the kept one. Times are CPU seconds of this process.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.near import SIGN, NearDuplicateConfig, Signer, find_near_duplicates
from data_prep.dedup.ngram_hashes import hash_words, ngrams
from data_prep.sources import plain_text
from data_prep.workers import Workers

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
EDITS = (0.05, 0.1, 0.2, 0.3)
BOILERPLATE_WORDS, SHARING = 170, 150
PERMUTATIONS, RENSA_BANDS = 256, 64

Dropped = dict[int, int]  # number of the dropped text -> number of the kept one that it is similar to
Side = Callable[[list[str], float], Dropped]


def ours(rows: int) -> Side:
    """data_prep with bands of so many rows."""

    def drop(texts: list[str], threshold: float) -> Dropped:
        config = NearDuplicateConfig(threshold=threshold, rows=rows)
        with Workers(1, {SIGN: Signer(config)}) as workers:
            found = find_near_duplicates(enumerate(texts), config, workers)
        return dict(zip(found.drop.tolist(), found.kept.tolist()))

    return drop


def dropped_by(index: Any, signature_of: Callable[[np.ndarray], Any], texts: list[str], threshold: float) -> Dropped:
    """What an LSH index drops, the longest text kept, each candidate's estimate checked."""
    dropped, kept = Dropped(), dict[int, Any]()
    for number, runs in longest_first(texts):
        signature = signature_of(runs)
        alike = [other for other in index.query(signature) if signature.jaccard(kept[other]) >= threshold]
        if alike:
            dropped[number] = min(alike)
        else:
            kept[number] = signature
            index.insert(number, signature)
    return dropped


def datasketch(texts: list[str], threshold: float) -> Dropped:
    """datasketch's LSH."""
    from datasketch import MinHash, MinHashLSH

    base = MinHash(num_perm=PERMUTATIONS, hashfunc=lambda number: number)

    def signature_of(runs: np.ndarray) -> Any:
        signature = base.copy()
        signature.update_batch(runs.tolist())
        return signature

    return dropped_by(MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS), signature_of, texts, threshold)


def rensa(texts: list[str], threshold: float) -> Dropped:
    """rensa's LSH."""
    from rensa import RMinHash, RMinHashLSH

    def signature_of(runs: np.ndarray) -> Any:
        signature = RMinHash(PERMUTATIONS, 42)
        signature.update([str(run) for run in runs.tolist()])
        return signature

    return dropped_by(RMinHashLSH(threshold, PERMUTATIONS, RENSA_BANDS), signature_of, texts, threshold)


def runs_of(text: str) -> np.ndarray:
    """The text's runs of 3 words as 32-bit numbers."""
    return np.unique(ngrams(hash_words([text]).hashes_W, 3) >> np.uint64(32))


def longest_first(texts: list[str]) -> Iterator[tuple[int, np.ndarray]]:
    """Numbers and runs."""
    runs = [runs_of(text) for text in texts]
    for number in sorted(range(len(texts)), key=lambda number: -len(runs[number])):
        if len(runs[number]):
            yield number, runs[number]


def read(paths: list[Path], words: int, most: int) -> list[str]:
    """Blocks of about so many words, cut at line ends, or with 0 words whole documents."""
    texts: list[str] = []
    for path in paths:
        for document, _ in plain_text.documents_of(plain_text.TextFile(path).lines(), "block", 1 << 22):
            block: list[str] = []
            for line in document.split("\n") if words else [document]:
                block.append(line)
                if sum(len(line.split()) for line in block) >= words:
                    texts.append("\n".join(block))
                    block = []
            if len(texts) >= most:
                return texts[:most]
    return texts


def planted(texts: list[str], rng: np.random.Generator) -> dict[str, list[str]]:
    """Copies of the texts by how they are changed; new words are drawn from the texts' own."""
    words = [word for text in texts for word in text.split()]

    def edited(text: str, share: float) -> str:
        own = text.split()
        for place in rng.choice(len(own), int(share * len(own)), replace=False):
            own[place] = words[rng.integers(len(words))]
        return " ".join(own)

    found = {f"{100 * share:.0f} % of the words": [edited(text, share) for text in texts] for share in EDITS}
    for share in (0.2, 0.4):
        cut = [text.split() for text in texts]
        found[f"last {100 * share:.0f} % cut off"] = [" ".join(own[: int((1 - share) * len(own))]) for own in cut]
    for share in (0.2, 0.5):
        extra = [" ".join(texts[rng.integers(len(texts))].split()[: int(share * len(t.split()))]) for t in texts]
        found[f"{100 * share:.0f} % more in front"] = [f"{more} {text}" for more, text in zip(extra, texts)]
    return found


def unlike(texts: list[str], rng: np.random.Generator) -> dict[str, list[str]]:
    """Sets of texts none of which is a duplicate of another."""
    words = " ".join(texts).split()
    lexicon = np.array(sorted(set(words)))
    found = {"3 random words": [" ".join(three) for three in rng.choice(lexicon, (5000, 3))]}
    shared = " ".join(words[-BOILERPLATE_WORDS:])
    for own in (100, 200, 400):
        parts = [words[start : start + own] for start in range(0, SHARING * own, own)]
        found[f"boilerplate, {own} own words"] = [f"{' '.join(part)} {shared}" for part in parts]
    return found


def lost(texts: list[str], dropped: Dropped) -> tuple[int, int, float]:
    """Wrong drops, dropped words, and the share of the dropped texts' runs that stand in no kept one."""
    wrong, words, missing, runs = 0, 0, 0, 0
    for number, kept in dropped.items():
        own, others = runs_of(texts[number]), runs_of(texts[kept])
        inside = int(np.isin(own, others).sum())
        wrong += inside < len(own) / 2
        words += len(texts[number].split())
        missing, runs = missing + len(own) - inside, runs + len(own)
    return wrong, words, missing / max(1, runs)


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--words", type=int, default=180)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--planted", type=int, default=1000)
    parser.add_argument("--rows", type=int, nargs="+", default=[NearDuplicateConfig.rows])
    parser.add_argument("--peers", nargs="*", default=["datasketch", "rensa"], choices=["datasketch", "rensa"])
    parser.add_argument("--thresholds", type=float, nargs="+", default=list(THRESHOLDS))
    arguments = parser.parse_args()
    texts = read(arguments.paths, arguments.words, arguments.texts)
    sample, rng = texts[:: max(1, len(texts) // arguments.planted)][: arguments.planted], np.random.default_rng(0)
    copies, others = planted(sample, rng), unlike(texts, rng)
    sides: dict[str, Side] = {f"data_prep, {rows} rows": ours(rows) for rows in arguments.rows}
    sides |= {name: {"datasketch": datasketch, "rensa": rensa}[name] for name in arguments.peers}
    total = sum(len(text.split()) for text in texts)
    print(f"{len(texts)} texts, {total:,} words; {len(sample)} copies of each kind\n")
    columns = ["threshold", "side", *copies, *others, "real: dropped", "wrong", "words", "lost", "s"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for threshold in arguments.thresholds:
        for name, side in sides.items():
            recall = [100 * len(side(sample + changed, threshold)) / len(sample) for changed in copies.values()]
            false = [len(side(set_, threshold)) for set_ in others.values()]
            start = time.process_time()
            dropped = side(texts, threshold)
            seconds = time.process_time() - start
            wrong, words, missing = lost(texts, dropped)
            cells = [f"{share:.1f}" for share in recall] + list(map(str, false))
            cells += [str(len(dropped)), str(wrong), f"{words:,}", f"{100 * missing:.0f} %", f"{seconds:.1f}"]
            print(f"| {threshold} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
