"""Documents to token shards: encoding on all cores while the main thread reads, cleans and writes.

`tokenizers` works outside the interpreter lock, so threads are enough: no process to start, no text to copy, nothing
left running after a `kill -9`. At most two batches per thread are under way, so memory does not depend on the corpus. A
long document is encoded in pieces cut in front of whitespace, where both WordPiece and byte-level BPE start a new word
anyway. The pieces depend only on the document and results are taken in order, so the stream is the same for any number
of threads and any batch size.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from cramming.config import UserError
from cramming.data.shards import ResumePoint, ShardWriter, SpecialIds, Split
from data_prep.clean import split_at_whitespace
from data_prep.sources import Document

PIECE_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 1 << 12
LARGEST_UNKNOWN_SHARE = 0.2  # above it, the tokenizer is for another language
ENOUGH_TOKENS = 100_000  # to judge that share


class Piece(NamedTuple):
    """A document, or a stretch of a long one; `ids` instead of text where the source is already tokenized."""

    split: Split
    text: str
    ids: np.ndarray | None
    first: bool
    last: bool


class Encoded(NamedTuple):
    """One batch's part of a split: tokens [n], and the offsets in it where documents begin."""

    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Encoder:
    """Pieces to tokens, with [CLS] and [SEP] around each document. Called from many threads."""

    tokenizer: Tokenizer
    ids: SpecialIds
    vocab_size: int
    dtype: np.dtype[np.generic]

    def __call__(self, pieces: list[Piece]) -> dict[Split, Encoded]:
        texts = [piece.text for piece in pieces if piece.ids is None]
        encodings = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        tokens: dict[Split, list[int]] = {"train": [], "validation": []}
        starts: dict[Split, list[int]] = {"train": [], "validation": []}
        for piece in pieces:
            flat = tokens[piece.split]
            if piece.first:
                starts[piece.split].append(len(flat))
                flat.append(self.ids.cls)
            flat += next(encodings).ids if piece.ids is None else self._checked(piece.ids)
            if piece.last:
                flat.append(self.ids.sep)
        return {
            split: Encoded(
                np.array(flat, dtype=self.dtype),
                np.array(starts[split], dtype=np.int64),
            )
            for split, flat in tokens.items()
            if flat
        }

    def _checked(self, ids: np.ndarray) -> list[int]:
        """Ids of a tokenized source, without a [CLS] in front and a [SEP] at the end: every document gets its own."""
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise UserError(
                f"data.ids_field holds token {ids.max()}, the tokenizer has {self.vocab_size} entries: it is not the"
                " one that made these ids; set data.tokenizer_file"
            )
        flat: list[int] = ids.tolist()
        return flat[flat[:1] == [self.ids.cls] : len(flat) - (flat[-1:] == [self.ids.sep])]


def pieces(selected: Iterable[tuple[Split, Document]], done: dict[Split, ResumePoint]) -> Iterator[Piece]:
    """The pieces to encode, without the documents that lie whole in shards of an earlier run."""
    number: Counter[Split] = Counter()
    for split, document in selected:
        number[split] += 1
        if number[split] <= done[split].documents:
            continue
        if document.ids is not None:
            yield Piece(split, "", document.ids, True, True)
            continue
        parts = split_at_whitespace(document.text, PIECE_CHARACTERS)
        for index, part in enumerate(parts):
            yield Piece(split, part, None, index == 0, index == len(parts) - 1)


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups large enough to be worth a call of the tokenizer."""
    batch: list[Piece] = []
    characters = 0
    for piece in stream:
        batch.append(piece)
        characters += len(piece.text) if piece.ids is None else len(piece.ids)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pack(
    selected: Iterable[tuple[Split, Document]],
    encoder: Encoder,
    writers: dict[Split, ShardWriter],
    done: dict[Split, ResumePoint],
    threads: int,
    position: Callable[[], float],
    on_batch: Callable[[float, bool], None],
) -> Counter[str]:
    """Encode and write everything, then close the writers. Returns token counts.

    `position()` is how far the source has been read. `on_batch(position, finished)` is called after every written
    batch, with the position up to which the text is done and whether the batch completed a shard.
    """
    counts: Counter[str] = Counter()
    drop = {split: done[split].tokens for split in writers}

    def write(encoded: dict[Split, Encoded], place: float) -> None:
        finished = False
        for split, (tokens, starts) in encoded.items():
            skip = min(drop[split], len(tokens))
            drop[split] -= skip
            tokens, starts = tokens[skip:], starts[starts >= skip] - skip
            counts["unknown_tokens"] += int(np.count_nonzero(tokens == encoder.ids.unk))
            counts["tokens"] += len(tokens)
            finished |= writers[split].append(tokens, starts)
        if counts["tokens"] >= ENOUGH_TOKENS:
            require_fit(counts)
        on_batch(place, finished)

    placed = ((batch, position()) for batch in batches(pieces(selected, done)))
    for encoded, place in _encode_in_order(placed, encoder, threads):
        write(encoded, place)
    require_fit(counts)
    for writer in writers.values():
        writer.close()
    return counts


def _encode_in_order(
    stream: Iterable[tuple[list[Piece], float]], encoder: Encoder, threads: int
) -> Iterator[tuple[dict[Split, Encoded], float]]:
    pending: deque[tuple[Future[dict[Split, Encoded]], float]] = deque()
    with _one_thread_per_call(), ThreadPoolExecutor(threads) as pool:
        try:
            for batch, place in stream:
                pending.append((pool.submit(encoder, batch), place))
                if len(pending) > 2 * threads:
                    future, place = pending.popleft()
                    yield future.result(), place
            while pending:
                future, place = pending.popleft()
                yield future.result(), place
        finally:
            for future, _ in pending:
                future.cancel()


def require_fit(counts: Counter[str]) -> None:
    """UserError when too many tokens are unknown."""
    share = counts["unknown_tokens"] / max(1, counts["tokens"])
    if share > LARGEST_UNKNOWN_SHARE:
        raise UserError(
            f"the tokenizer does not fit this text: {100 * share:.0f} % of the tokens are unknown; train one"
            " (tokenizer.path=null) or name another"
        )


@contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """Our threads are the parallelism; `tokenizers` reads this variable at every call."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
