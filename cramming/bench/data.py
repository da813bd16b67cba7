"""Text for measurements: made here, the same everywhere, and learnable, so that a loss curve has something to show.

A document has one of a few topics, each with its own frequent words; of its tokens half are drawn from the topic and
half follow from the token before. A model learns the frequencies in tens of steps, the topics soon after, which needs
attention, and the successors last: the curve falls all the way, but only if every part works.
"""

import functools

import numpy as np

from cramming.data.batches import BatchSource
from cramming.data.corpus import TokenStream
from cramming.data.masking import Masker, ObjectiveConfig

SPECIAL = ("pad", "unk", "cls", "sep", "mask")
TOPICS = 4


@functools.lru_cache(maxsize=2)  # seconds for a GPU's batches, and one process may serve many sides
def topic_stream(vocab_size: int, num_tokens: int, document_length: int, seed: int) -> TokenStream:
    """A stream of `num_tokens` ids below `vocab_size` in documents of `document_length`."""
    rng = np.random.default_rng(seed)
    first, words = len(SPECIAL), vocab_size - len(SPECIAL)
    documents = -(-num_tokens // document_length)
    order_KW = np.stack([rng.permutation(words) for _ in range(TOPICS)])  # each topic's words by frequency
    successor_W = rng.permutation(words)
    topic_D = rng.integers(0, TOPICS, documents)
    share_W = np.arange(1, words + 1) ** -1.5
    rank_DL = rng.choice(words, (documents, document_length), p=share_W / share_W.sum())
    ids_DL = order_KW[topic_D[:, None], rank_DL]
    follows_DL = rng.random((documents, document_length)) < 0.5
    for place in range(1, document_length):
        ids_DL[:, place] = np.where(follows_DL[:, place], successor_W[ids_DL[:, place - 1]], ids_DL[:, place])
    ids_DL += first
    ids_DL[:, 0] = SPECIAL.index("cls")
    return TokenStream.of_array(ids_DL.reshape(-1), np.arange(0, ids_DL.size, document_length))


def topic_batches(
    objective: ObjectiveConfig, vocab_size: int, sequence_length: int, packing: str, rows: int, seed: int = 0
) -> BatchSource:
    """A source with room for about 200 batches of `rows` before it repeats itself."""
    num_tokens = max(200 * rows, 1000) * sequence_length
    stream = topic_stream(vocab_size, min(num_tokens, 2**24), max(8, sequence_length * 3 // 4), seed)
    masker = Masker(objective, vocab_size, SPECIAL.index("mask"), tuple(range(len(SPECIAL))), seed)
    assert packing in ("rows", "documents")
    return BatchSource(stream, masker, sequence_length, packing, seed)  # type: ignore[arg-type]
