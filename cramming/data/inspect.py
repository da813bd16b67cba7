"""`cramming inspect <corpus>`: its splits, document lengths, sources, what was dropped and why, and documents as text.

A corpus that was altered is shown as it is, and then named as such, as far as a quick look tells; `cramming verify`
reads every byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cramming.config import UserError, build
from cramming.data.corpus import SPLITS, Corpus
from cramming.data.integrity import damaged
from cramming.data.manifest import Manifest, Split, corpus_folder
from cramming.data.stream import TokenStream
from cramming.progress import say, show_table

BEGINNING = 400  # characters shown of one of several documents
COMPARED_BYTES = 1 << 28  # with the manifest's checksums: a second
QUANTILES = {"shortest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "longest": 1.0}


@dataclass(frozen=True)
class InspectConfig:
    """Section `inspect`."""

    split: Split
    documents: int
    document: int | None

    def __post_init__(self) -> None:
        if self.documents < 0 or (self.document or 0) < 0:
            raise ValueError("documents and document must not be negative")


def main(config: Mapping[str, Any]) -> None:
    """The verb `inspect`: prints what `data.corpus` holds.

    UserError: no corpus, no document of this number; at the end, one that was altered.
    """
    settings = build(InspectConfig, config["inspect"], "inspect")
    corpus = Corpus.open(corpus_folder(config))
    manifest = corpus.manifest
    numbers = _numbers(corpus, settings)
    texts = list(_texts(corpus, settings, numbers))
    altered = list(damaged(corpus.folder, manifest, COMPARED_BYTES, _shards_of(manifest, settings.split, numbers)))
    splits = {split: corpus.stream(split) for split in SPLITS}
    counts = [
        [split, f"{found.num_documents:,}", f"{found.num_tokens:,}", str(len(manifest.splits[split]))]
        for split, found in splits.items()
    ]
    show_table(f"{corpus.folder}: splits", ["", "documents", "tokens", "shards"], counts)
    lengths = [_lengths(split, found) for split, found in splits.items()]
    show_table("tokens per document", ["", *QUANTILES, "mean"], lengths)
    if by_source := manifest.statistics.get("by_source"):  # format 1 has none
        columns = ["documents", "tokens", "bytes"]
        rows = [[name, *(f"{row[column]:,}" for column in columns)] for name, row in by_source.items()]
        show_table("sources", ["", *columns], rows)
    if dropped := list(_dropped(manifest)):
        show_table("dropped (corpus_card.md shows examples)", ["", "stage", "documents", "bytes"], dropped)
    for title, text in texts:
        say(f"\n{title}\n{text}")
    if altered:
        more = f", and {len(altered) - 1} more" if len(altered) > 1 else ""
        raise UserError(f"shown as it is now, not as it was prepared: {altered[0]}{more}; see `cramming verify`")


def _numbers(corpus: Corpus, settings: InspectConfig) -> list[int]:
    """Numbers of the documents to show."""
    count, one = corpus.stream(settings.split).num_documents, settings.document
    if one is None:
        return list(range(min(settings.documents, count)))
    if one >= count:
        place = f"the {settings.split} split of {corpus.folder}"
        raise UserError(f"inspect.document={one}: {place} has documents 0 to {count - 1}")
    return [one]


def _shards_of(manifest: Manifest, split: Split, numbers: list[int]) -> list[str]:
    """The files of the shards in which these documents begin."""
    shards = manifest.splits[split]
    last_D = np.cumsum([shard.documents for shard in shards])
    found = [shards[place] for place in np.unique(np.searchsorted(last_D, numbers, side="right"))]
    return [name for shard in found for name in (shard.file, shard.index_file)]


def _lengths(split: str, stream: TokenStream) -> list[str]:
    lengths_D = np.diff(stream.document_starts, append=stream.num_tokens)
    values = [*np.quantile(lengths_D, list(QUANTILES.values())), lengths_D.mean()]
    return [split, *(f"{value:,.0f}" for value in values)]


def _dropped(manifest: Manifest) -> Iterator[list[str]]:
    for stage in manifest.stages:
        for reason, found in stage.dropped.items():
            yield [reason, stage.name, f"{found.documents:,}", f"{found.bytes:,}"]


def _texts(corpus: Corpus, settings: InspectConfig, numbers: list[int]) -> Iterator[tuple[str, str]]:
    """A title and the text of each document."""
    from tokenizers import Tokenizer

    stream, tokenizer = corpus.stream(settings.split), Tokenizer.from_file(str(corpus.tokenizer_file))
    bounds = np.append(stream.document_starts, stream.num_tokens)
    for number in numbers:
        ids = stream.take(np.arange(bounds[number], bounds[number + 1]))
        text = tokenizer.decode(ids.tolist())
        text = "".join(sign if sign.isprintable() or sign in "\n\u200c\u200d" else " " for sign in text)
        if settings.document is None and len(text) > BEGINNING:
            text = text[:BEGINNING] + " ..."
        yield f"{settings.split} document {number}, {len(ids):,} tokens:", text
