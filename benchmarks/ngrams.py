"""What pinned validation loss do counted neighbours reach? The simplest alternative to a model that reads them.

    python benchmarks/ngrams.py <corpus folder> [--tokens 2e6] [--validation-tokens 32768]

Tokens are counted by the one or two tokens before and after them in the training text (or in its first `--tokens`, as
many as a short run reads) and smoothed by interpolated absolute discounting (Ney, Essen & Kneser 1994). What is known
from before and from after is multiplied; counts of the two tokens around a place, and of all four, are interpolated
with that product. A neighbour behind [MASK] is not used.
"""

import argparse
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cramming.config import UserError
from cramming.data.batches import ALL_MASK, BERT_MASKING, EXCERPT_TOKENS, BatchSource, HeldOut
from cramming.data.corpus import Corpus
from cramming.objectives.masking import IGNORE, MaskedTargets, Masker

MAX_ENTRIES = 2**15  # of a vocabulary
DISCOUNT = 0.75  # Ney, Essen & Kneser's for small counts
CONTEXTS = ((-1,), (1,), (-2, -1), (1, 2), (-1, 1), (-2, -1, 1, 2))


@dataclass(frozen=True)
class Counts:
    """Counts of the tokens in each context at some offsets: positions, sorted by the key of their context."""

    keys_N: np.ndarray
    tokens_N: np.ndarray

    @classmethod
    def of(cls, ids_N: np.ndarray, offsets: tuple[int, ...], vocab_size: int) -> "Counts":
        """All places of a text of int64 tokens."""
        keys_N = key([np.roll(ids_N, -offset) for offset in offsets], vocab_size)
        order = np.argsort(keys_N, kind="stable")
        return cls(keys_N[order], ids_N[order])

    def smoothed(self, context: int, beyond_V: np.ndarray) -> np.ndarray:
        """Probabilities [V] after this context's key; what discounting frees goes by `beyond_V`."""
        first, last = np.searchsorted(self.keys_N, [context, context + 1])
        if first == last:
            return beyond_V
        counts_V = np.bincount(self.tokens_N[first:last], minlength=len(beyond_V))
        freed = DISCOUNT * np.count_nonzero(counts_V)
        return (np.maximum(counts_V - DISCOUNT, 0) + freed * beyond_V) / (last - first)


def key(tokens: list[np.ndarray], vocab_size: int) -> np.ndarray:
    """One number for each combination; those of four tokens fit into 63 bits (`MAX_ENTRIES`)."""
    out = np.zeros_like(tokens[0], dtype=np.int64)
    for column in tokens:
        out = out * (vocab_size + 1) + column
    return out


class Neighbours:
    """P(token | the tokens around it) from counts."""

    def __init__(self, ids_N: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.counts = {offsets: Counts.of(ids_N, offsets, vocab_size) for offsets in CONTEXTS}
        unigram_V = np.bincount(ids_N, minlength=vocab_size) + 0.5
        self.unigram_V = unigram_V / unigram_V.sum()

    def losses(
        self, window: np.ndarray, target: int, mask_id: int, form: MaskedTargets
    ) -> dict[str, float]:
        """Nats for `target` by what is used of the window of five tokens around it.

        A target that shows a token is that token or behind a random one, as often as the form says.
        """
        shown_V = np.zeros(self.vocab_size)
        shown_V[window[2]] = 1.0
        itself = 1 - form.mask_share - form.random_share
        trust = 0.0 if window[2] == mask_id else itself / (itself + form.random_share)

        def probabilities(offsets: tuple[int, ...], beyond_V: np.ndarray) -> np.ndarray:
            tokens = [window[2 + offset] for offset in offsets]
            if mask_id in tokens:
                return beyond_V
            return self.counts[offsets].smoothed(
                int(key([np.array(t) for t in tokens], self.vocab_size)), beyond_V
            )

        left_V = probabilities((-2, -1), probabilities((-1,), self.unigram_V))
        right_V = probabilities((1, 2), probabilities((1,), self.unigram_V))
        product_V = left_V * right_V / self.unigram_V
        product_V /= product_V.sum()
        both_V = probabilities((-2, -1, 1, 2), probabilities((-1, 1), product_V))
        by_offsets = {
            "unigram": self.unigram_V,
            "two before": left_V,
            "two after": right_V,
            "both sides": both_V,
        }
        return {
            name: -float(np.log((trust * shown_V + (1 - trust) * p_V)[target]))
            for name, p_V in by_offsets.items()
        }


def answers(
    held_out: HeldOut, form: MaskedTargets, neighbours: Neighbours, mask_id: int
) -> dict[str, list[float]]:
    """Nats for each target of the validation, by what is used."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for batch in held_out.batches(form, rows=32):
        rows_NL = np.pad(
            batch.ids_T.numpy().reshape(-1, held_out.length),
            ((0, 0), (2, 2)),
            constant_values=mask_id,
        )
        for place, target in zip(batch.target_positions_M.tolist(), batch.target_ids_M.tolist()):
            if target != IGNORE:
                row, column = divmod(place, held_out.length)
                for name, loss in neighbours.losses(
                    rows_NL[row, column : column + 5], target, mask_id, form
                ).items():
                    by_name[name].append(loss)
    return by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument(
        "--tokens", type=float, default=math.inf, help="count only so many; all by default"
    )
    parser.add_argument("--validation-tokens", type=int, default=32768)
    args = parser.parse_args()
    if not (args.tokens >= 1 and args.validation_tokens >= 1):
        parser.error("--tokens and --validation-tokens are at least 1")
    try:
        corpus = Corpus.open(args.corpus)
    except UserError as error:
        parser.error(str(error))
    if corpus.vocab_size > MAX_ENTRIES:
        parser.error(
            f"{args.corpus}: its vocabulary has {corpus.vocab_size} entries, at most {MAX_ENTRIES} can be counted"
        )
    masker = Masker(
        BERT_MASKING, corpus.vocab_size, corpus.special_ids.mask, tuple(corpus.special_ids), seed=0
    )
    held_out = HeldOut(
        BatchSource(corpus.stream("validation"), masker, EXCERPT_TOKENS, "rows", 0),
        args.validation_tokens,
    )
    stream = corpus.stream("train")
    begin, count = time.process_time(), int(min(args.tokens, stream.num_tokens))
    neighbours = Neighbours(
        stream.gather(np.zeros(1, np.int64), count).reshape(-1).astype(np.int64), corpus.vocab_size
    )
    print(f"{count:,} tokens counted in {time.process_time() - begin:.1f} s of CPU time")
    for name, form in (("pinned", BERT_MASKING), ("all hidden", ALL_MASK)):
        for used, losses in answers(held_out, form, neighbours, corpus.special_ids.mask).items():
            print(f"{name:10}  {used:10}  {np.mean(losses):.4f} nats, {len(losses)} targets")


if __name__ == "__main__":
    main()
