"""Documents to token shards: workers tokenize (data_prep/workers.py), the main process writes.

A document's ids depend on nothing but its text (data_prep/tokenizer/encode.py) and results are taken in order, so the
shards are the same for any number of workers and any batch size.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from cramming.config import UserError
from cramming.data.corpus import SPLITS
from cramming.data.manifest import INDEX_DTYPE, Shard, SpecialIds, Split
from cramming.files import overwrite_atomically, sync
from data_prep.columns import Group, TextBlock
from data_prep.document_stats import DocumentStats
from data_prep.filters.quality import FilterConfig, too_many_tokens
from data_prep.resume_state import Decisions
from data_prep.stage_stats import Stage
from data_prep.tokenizer.encode import TextEncoder
from data_prep.workers import Workers

TOO_MANY_TOKENS = too_many_tokens.__name__
ENCODE = "tokens"  # the workers' function: Encoder
LARGEST_UNKNOWN_SHARE = 0.2  # above it, the tokenizer is for another language
ENOUGH_TOKENS = 100_000  # to judge that share


class ShardWriter:
    """Writes one split of a corpus as a stream. A shard becomes visible whole, by renaming; memory is one append.

    `finished` are the shards of an earlier, interrupted run: writing goes on behind them (see `resume_point`).
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        dtype: np.dtype[Any],
        shard_tokens: int,
        finished: list[Shard],
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards = list(finished)
        self._part: BinaryIO | None = None
        self._tokens = 0

    @property
    def open_tokens(self) -> int:
        """Tokens in the shard that is being written."""
        return 0 if self._part is None else self._tokens

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> bool:
        """Append `tokens` [n]; `starts` are the offsets in it where documents begin. True if a shard was finished."""
        before = len(self.shards)
        while len(tokens):
            if self._part is None:
                self._file = f"{self.split}-{len(self.shards):05d}.bin"
                self._part = (self.folder / f"{self._file}.part").open("wb")
                self._hash, self._tokens, self._starts = hashlib.sha256(), 0, list[np.ndarray]()
            room = self.shard_tokens - self._tokens
            inside = int(np.searchsorted(starts, room))
            self._write(tokens[:room], starts[:inside])
            tokens, starts = tokens[room:], starts[inside:] - room
            if self._tokens == self.shard_tokens:
                self.close()
        return len(self.shards) > before

    def _write(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        assert self._part is not None
        self._starts.append(starts.astype(INDEX_DTYPE) + INDEX_DTYPE.type(self._tokens))
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self._part.write(data)
        self._hash.update(data)
        self._tokens += len(tokens)

    def close(self) -> None:
        """Finish the shard that is being written, if any: sync it, then give it and its index their names."""
        if self._part is None:
            return
        self._part.flush()
        sync(self._part.fileno())
        self._part.close()
        self._part = None
        index = b"".join(starts.tobytes() for starts in self._starts)
        documents, index_hash = (
            len(index) // INDEX_DTYPE.itemsize,
            hashlib.sha256(index).hexdigest(),
        )
        shard = Shard(self._file, self._tokens, documents, self._hash.hexdigest(), index_hash)
        overwrite_atomically(self.folder / shard.index_file, lambda path: path.write_bytes(index))
        (self.folder / f"{self._file}.part").rename(self.folder / self._file)
        self.shards.append(shard)


class ResumePoint(NamedTuple):
    """Where an interrupted split goes on: leave out `documents` whole documents, then `tokens` of the next one."""

    documents: int
    tokens: int


def resume_point(folder: Path, shards: list[Shard]) -> ResumePoint:
    """From the finished shards alone: the document that the last of them was cut in (or ended with) is done again."""
    base = end = sum(shard.tokens for shard in shards)
    documents = sum(shard.documents for shard in shards)
    for shard in reversed(shards):
        base -= shard.tokens
        if shard.documents:
            last_start = base + int(np.fromfile(folder / shard.index_file, INDEX_DTYPE)[-1])
            return ResumePoint(documents - 1, end - last_start)
    return ResumePoint(0, 0)


class Batch(NamedTuple):
    """Documents to encode: texts, token ids of those that have such instead (by row), and which are held out."""

    texts: TextBlock
    ids: dict[int, np.ndarray]
    held_out_N: np.ndarray


class Encoded(NamedTuple):
    """One batch: for each split tokens [n], the offsets in it where documents begin, and how often each entry is among
    the tokens [V]; and whether a document has too many tokens and is left out [N]."""

    tokens: dict[Split, np.ndarray]
    starts: dict[Split, np.ndarray]
    use: dict[Split, np.ndarray]
    too_many_N: np.ndarray


@dataclass(frozen=True)
class Encoder:
    """Documents to tokens, with [CLS] and [SEP] around each."""

    encode: TextEncoder
    ids: SpecialIds
    vocab_size: int
    dtype: np.dtype[np.generic]
    filters: FilterConfig = field(default_factory=FilterConfig)

    def __call__(self, batch: Batch) -> Encoded:
        texts = list(batch.texts)
        encoded = self.encode(text for n, text in enumerate(texts) if n not in batch.ids)
        tokens: dict[Split, list[np.ndarray]] = {
            split: [np.empty(0, self.dtype)] for split in SPLITS
        }
        cls, sep = np.array([[self.ids.cls], [self.ids.sep]], self.dtype)
        starts: dict[Split, list[int]] = {split: [] for split in SPLITS}
        lengths, too_many = dict.fromkeys(SPLITS, 0), list[bool]()
        for n, (text, held_out) in enumerate(zip(texts, batch.held_out_N.tolist())):
            split: Split = "validation" if held_out else "train"
            ids = batch.ids.get(n)
            body = next(encoded) if ids is None else ids.astype(self.dtype)
            limit = self.filters.max_tokens_per_character if ids is None else None
            too_many.append(too_many_tokens(len(text), len(body), limit) is not None)
            if not too_many[-1]:
                starts[split].append(lengths[split])
                tokens[split] += [cls, body, sep]
                lengths[split] += len(body) + 2
        joined = {split: np.concatenate(found) for split, found in tokens.items()}
        return Encoded(
            joined,
            {split: np.array(found, dtype=np.int64) for split, found in starts.items()},
            {split: self.use_of(found).astype(np.int32) for split, found in joined.items()},
            np.array(too_many, dtype=bool),
        )

    def use_of(self, tokens: np.ndarray) -> np.ndarray:
        """How often each entry is among these tokens: [V]."""
        return np.bincount(tokens, minlength=self.vocab_size)

    def shown(self, text: str) -> str:
        """What a text with too many tokens has of them per character, the limit, and its beginning."""
        limit = self.filters.max_tokens_per_character
        violation = too_many_tokens(len(text), len(next(self.encode([text]))), limit)
        assert violation, "this text has not too many tokens"
        return violation.explain(text, "max_tokens_per_character")


class CorpusWriter:
    """Both splits of a corpus behind the shards that are `finished`; `finished_use` [V]: how often each entry of the
    vocabulary stands in them, empty where there are none.

    It fills `stage`, `decisions`, `documents` (the measures of each split) and `token_use` [V], tokens of each entry.
    """

    def __init__(
        self,
        folder: Path,
        finished: dict[Split, list[Shard]],
        finished_use: Sequence[int],
        shard_tokens: int,
        encoder: Encoder,
        stage: Stage,
        decisions: Decisions,
        sources: list[str],
    ) -> None:
        self.encoder, self.stage, self.decisions = encoder, stage, decisions
        self.writers = {
            s: ShardWriter(folder, s, encoder.dtype, shard_tokens, finished[s]) for s in SPLITS
        }
        self.documents = {split: DocumentStats(sources) for split in SPLITS}
        self.finished_use = np.zeros(encoder.vocab_size, dtype=np.int64)
        if finished_use:
            self.finished_use += finished_use
        self._open_use = {
            split: np.zeros_like(self.finished_use) for split in SPLITS
        }  # in shards being written
        self._done = {split: resume_point(folder, finished[split]) for split in SPLITS}

    @property
    def shards(self) -> dict[Split, list[Shard]]:
        """The finished shards of each split."""
        return {split: writer.shards for split, writer in self.writers.items()}

    @property
    def token_use(self) -> np.ndarray:
        """How often each entry stands in all that was written: [V]."""
        return self.finished_use + self._open_use["train"] + self._open_use["validation"]

    def write(
        self,
        selected: Iterable[tuple[Group, np.ndarray]],
        workers: Workers,
        position: Callable[[], float],
    ) -> Iterator[tuple[float, bool]]:
        """Encode and write everything, then close the writers. `selected`: documents, and whether each is held out.

        Yields after each group `position()`, how far the source was read when it came, and whether it completed a
        shard.
        """
        drop = {split: done.tokens for split, done in self._done.items()}
        placed = (
            ((group, held_out_N, position()), Batch(group.texts, group.ids(), held_out_N))
            for group, held_out_N in self._to_encode(selected)
        )
        for (group, held_out_N, place), encoded in workers.map(ENCODE, placed):
            too_many = dict.fromkeys(np.flatnonzero(encoded.too_many_N).tolist(), TOO_MANY_TOKENS)
            self.decisions.set(group.places, self.stage.name, too_many)
            self._count(group, held_out_N)
            finished = [self._append(split, encoded, drop) for split in SPLITS]
            if self.token_use.sum() >= ENOUGH_TOKENS:
                self._require_fit()
            yield place, any(finished)
        self._require_fit()
        for writer in self.writers.values():
            writer.close()

    def _append(self, split: Split, encoded: Encoded, drop: dict[Split, int]) -> bool:
        """Write a split's tokens behind its first `drop`, which are in finished shards; True if they finish one."""
        tokens, starts, use_V = encoded.tokens[split], encoded.starts[split], self._open_use[split]
        use_V += encoded.use[split]
        skip = min(drop[split], len(tokens))
        drop[split] -= skip
        if skip:
            use_V -= self.encoder.use_of(tokens[:skip])
        finished = self.writers[split].append(tokens[skip:], starts[starts >= skip] - skip)
        if finished:
            open_V = self.encoder.use_of(tokens[len(tokens) - self.writers[split].open_tokens :])
            self.finished_use += use_V - open_V
            self._open_use[split] = open_V
        return finished

    def _to_encode(
        self, selected: Iterable[tuple[Group, np.ndarray]]
    ) -> Iterator[tuple[Group, np.ndarray]]:
        """The documents that are not in finished shards, and not known to have too many tokens."""
        for group, held_out_N in selected:
            known_N = np.zeros(len(group), dtype=bool)
            known_N[list(self.decisions.dropped(group.places, self.stage.name))] = True
            done_N = known_N.copy()
            for split in SPLITS:
                left = self._done[split].documents - self.documents[split].documents
                of_split_N = ~known_N & (held_out_N == (split == "validation"))
                done_N |= of_split_N & (np.cumsum(of_split_N) <= left)
            if done_N.any():
                self._count(group.chosen(done_N), held_out_N[done_N])
                group, held_out_N = group.chosen(~done_N), held_out_N[~done_N]
            if len(group):
                yield group, held_out_N

    def _count(self, group: Group, held_out_N: np.ndarray) -> None:
        """Count documents of which it is known whether they have too many tokens."""
        dropped = self.decisions.dropped(group.places, self.stage.name)
        group.through(self.stage, dropped, lambda *_: self.encoder.shown)
        source_N, measures_N3 = group.documents.source_D[group.origin], group.measures
        for split in SPLITS:
            kept_N = held_out_N == (split == "validation")
            kept_N[list(dropped)] = False
            measures, sizes = measures_N3[kept_N], group.sizes[kept_N]
            self.documents[split].add(measures, sizes, source_N[kept_N], group.documents.sources)

    def _require_fit(self) -> None:
        """UserError when too many tokens are unknown."""
        share = self.token_use[self.encoder.ids.unk] / max(1, self.token_use.sum())
        if share > LARGEST_UNKNOWN_SHARE:
            raise UserError(
                f"the tokenizer does not fit this text: {100 * share:.0f} % of the tokens are unknown; train one"
                " (tokenizer.path=null), for scripts without spaces with tokenizer=bpe, or name another"
            )
