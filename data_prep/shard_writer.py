"""Documents to token shards: encoding on all cores (data_prep/workers.py) while the main process writes.

A document's ids depend on nothing but its text (data_prep/sources/encoding.py) and results are taken in order, so the
stream is the same for any number of workers and any batch size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cramming.config import UserError
from cramming.data.corpus import SPLITS, ResumePoint, Shard, ShardWriter, SpecialIds, Split
from data_prep.decisions import Fates
from data_prep.filters.quality import FilterConfig, too_many_tokens
from data_prep.pipeline import Candidate
from data_prep.stage_stats import Stage
from data_prep.text_measures import Measure, TextMeasures, measure
from data_prep.tokenizer.encode import TextEncoder
from data_prep.workers import Workers

TOO_MANY_TOKENS = too_many_tokens.__name__
ENCODE = "tokens"  # the workers' function: Encoder
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1 << 12
LARGEST_UNKNOWN_SHARE = 0.2  # above it, the tokenizer is for another language
ENOUGH_TOKENS = 100_000  # to judge that share


class Item(NamedTuple):
    """A document on its way to the shards."""

    split: Split
    candidate: Candidate


class Encoded(NamedTuple):
    """One batch: for each split tokens [n] and the offsets in it where documents begin; for each item its measures,
    or None where it has too many tokens and is left out."""

    tokens: dict[Split, np.ndarray]
    starts: dict[Split, np.ndarray]
    measures: list[Measure | None]


@dataclass(frozen=True)
class Encoder:
    """Documents to tokens, with [CLS] and [SEP] around each."""

    encode: TextEncoder
    ids: SpecialIds
    vocab_size: int
    dtype: np.dtype[np.generic]
    filters: FilterConfig = field(default_factory=FilterConfig)

    def __call__(self, batch: list[Item]) -> Encoded:
        documents = [candidate.document for _, candidate in batch]
        encoded = self.encode(document.text for document in documents if document.ids is None)
        tokens: dict[Split, list[np.ndarray]] = {split: [np.empty(0, self.dtype)] for split in SPLITS}
        cls, sep = np.array([[self.ids.cls], [self.ids.sep]], self.dtype)
        starts: dict[Split, list[int]] = {split: [] for split in SPLITS}
        lengths = dict.fromkeys(SPLITS, 0)
        measures: list[Measure | None] = []
        for split, candidate in batch:
            ids, text = candidate.document.ids, candidate.document.text
            body = next(encoded) if ids is None else self._checked(ids)
            if ids is None and too_many_tokens(len(text), len(body), self.filters.max_tokens_per_character):
                measures.append(None)
                continue
            starts[split].append(lengths[split])
            tokens[split] += [cls, body, sep]
            lengths[split] += len(body) + 2
            measures.append(measure(text, candidate.size))
        return Encoded(
            {split: np.concatenate(parts) for split, parts in tokens.items()},
            {split: np.array(places, dtype=np.int64) for split, places in starts.items()},
            measures,
        )

    def shown(self, text: str) -> str:
        """What a text with too many tokens has of them per character, the limit, and its beginning."""
        limit = self.filters.max_tokens_per_character
        violation = too_many_tokens(len(text), len(next(self.encode([text]))), limit)
        assert violation, "this text has not too many tokens"
        return violation.explain(text, "max_tokens_per_character")

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        """Ids of a tokenized source, without a [CLS] in front and a [SEP] at the end: every document gets its own."""
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise UserError(
                f"data.ids_field holds token {ids.max()}, the tokenizer has {self.vocab_size} entries: it is not the"
                " one that made these ids; set data.tokenizer_file"
            )
        first, last = ids[:1].tolist() == [self.ids.cls], ids[-1:].tolist() == [self.ids.sep]
        return ids[int(first) : len(ids) - last].astype(self.dtype)


@dataclass
class Packing:
    """Everything that `pack` fills: shards, the ledger's stage, verdicts, measures of the text, use of the vocabulary.

    `done` says what lies whole in shards of an earlier run, `token_use` [vocabulary] counts their tokens.
    """

    encoder: Encoder
    writers: dict[Split, ShardWriter]
    done: dict[Split, ResumePoint]
    token_use: np.ndarray
    stage: Stage
    fates: Fates
    texts: dict[Split, TextMeasures]

    def shards(self) -> dict[Split, list[Shard]]:
        """The finished shards of each split."""
        return {split: writer.shards for split, writer in self.writers.items()}

    def to_encode(self, selected: Iterable[tuple[Split, Candidate]]) -> Iterator[Item]:
        """The documents that are not in finished shards, and not known to have too many tokens."""
        for split, candidate in selected:
            self.stage.take(candidate.size)
            if self.fates.get(candidate.place, "tokens"):
                candidate.is_dropped_by(self.stage, TOO_MANY_TOKENS, self.encoder.shown)
            elif self.texts[split].documents < self.done[split].documents:
                self._keep(Item(split, candidate), measure(candidate.document.text, candidate.size))
            else:
                yield Item(split, candidate)

    def _keep(self, item: Item, found: Measure) -> None:
        self.stage.give(found.bytes)
        self.texts[item.split].add(found, item.candidate.document.source)

    def note(self, batch: list[Item], measures: list[Measure | None]) -> None:
        """A batch is encoded: what became of each document."""
        for item, found in zip(batch, measures):
            if found is None:
                self.fates.set(item.candidate.place, "tokens", TOO_MANY_TOKENS)
                item.candidate.is_dropped_by(self.stage, TOO_MANY_TOKENS, self.encoder.shown)
            else:
                self._keep(item, found)

    def require_fit(self) -> None:
        """UserError when too many tokens are unknown."""
        share = self.token_use[self.encoder.ids.unk] / max(1, self.token_use.sum())
        if share > LARGEST_UNKNOWN_SHARE:
            raise UserError(
                f"the tokenizer does not fit this text: {100 * share:.0f} % of the tokens are unknown; train one"
                " (tokenizer.path=null), for scripts without spaces with tokenizer=bpe, or name another"
            )


def batches(stream: Iterable[Item]) -> Iterator[list[Item]]:
    """Documents in groups large enough to be worth a call of the tokenizer."""
    batch: list[Item] = []
    characters = 0
    for item in stream:
        batch.append(item)
        characters += item.candidate.document.length
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pack(
    selected: Iterable[tuple[Split, Candidate]],
    packing: Packing,
    workers: Workers,
    position: Callable[[], float],
    on_batch: Callable[[float, bool], None],
) -> None:
    """Encode and write everything, then close the writers.

    `position()` is how far the source has been read. `on_batch(position, finished)` is called after every written
    batch, with that position when the batch was put together (the workers' groups before it lie somewhat ahead of its
    text) and whether it completed a shard.
    """
    drop = {split: packing.done[split].tokens for split in packing.writers}
    placed = (((batch, position()), batch) for batch in batches(packing.to_encode(selected)))
    for (batch, place), encoded in workers.map(ENCODE, placed):
        packing.note(batch, encoded.measures)
        finished = False
        for split, tokens in encoded.tokens.items():
            skip = min(drop[split], len(tokens))
            drop[split] -= skip
            tokens, starts = tokens[skip:], encoded.starts[split]
            packing.token_use += np.bincount(tokens, minlength=len(packing.token_use))
            finished |= packing.writers[split].append(tokens, starts[starts >= skip] - skip)
        if packing.token_use.sum() >= ENOUGH_TOKENS:
            packing.require_fit()
        on_batch(place, finished)
    packing.require_fit()
    for writer in packing.writers.values():
        writer.close()
