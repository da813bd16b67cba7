"""`cramming inspect <corpus>`: what a corpus holds: its splits, document lengths, sources, and documents as text.

A corpus that was altered is shown as it is, and then named as such, as far as can be told at once; `cramming verify`
reads every byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cramming.config import UserError, build
from cramming.data.corpus import SPLITS, Corpus, TokenStream
from cramming.data.integrity import damaged
from cramming.data.manifest import Split, corpus_folder
from cramming.progress import say, show_table

BEGINNING = 400  # characters of a document that is shown by its beginning
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
    shown = list(_documents(corpus, settings))
    altered = list(damaged(corpus.folder, corpus.manifest, COMPARED_BYTES, _shards_of(corpus, settings)))
    show_table(f"{corpus.folder}: splits", ["", "documents", "tokens", "shards"], list(_splits(corpus)))
    show_table("tokens per document", ["", *QUANTILES, "mean"], [_lengths(corpus, split) for split in SPLITS])
    if by_source := corpus.manifest.statistics.get("by_source"):  # format 1 has none
        columns = ["documents", "tokens", "bytes"]
        rows = [[name, *(f"{part[column]:,}" for column in columns)] for name, part in by_source.items()]
        show_table("sources", ["", *columns], rows)
    for title, text in shown:
        say(f"\n{title}\n{text}")
    if altered:
        more = f", and {len(altered) - 1} more" if len(altered) > 1 else ""
        raise UserError(f"shown as it is now, not as it was prepared: {altered[0]}{more}; see `cramming verify`")


def _shards_of(corpus: Corpus, settings: InspectConfig) -> list[str]:
    """The files of the shards in which the documents that are shown begin."""
    shards = corpus.manifest.splits[settings.split]
    last_D = np.cumsum([shard.documents for shard in shards])
    one = settings.document
    numbers = range(settings.documents) if one is None else [one]
    places = np.unique(np.searchsorted(last_D, numbers, side="right"))
    return [name for place in places[places < len(shards)] for name in (shards[place].file, shards[place].index_file)]


def _splits(corpus: Corpus) -> Iterator[list[str]]:
    for split in SPLITS:
        stream = corpus.stream(split)
        yield [split, f"{stream.num_documents:,}", f"{stream.num_tokens:,}", str(len(corpus.manifest.splits[split]))]


def _lengths(corpus: Corpus, split: Split) -> list[str]:
    lengths_D = np.diff(_bounds(corpus.stream(split)))
    values = [*np.quantile(lengths_D, list(QUANTILES.values())), lengths_D.mean()]
    return [split, *(f"{value:,.0f}" for value in values)]


def _bounds(stream: TokenStream) -> np.ndarray:
    """Where each document begins, and where the last ends: int64 [D + 1]."""
    return np.append(stream.document_starts, stream.num_tokens)


def _documents(corpus: Corpus, settings: InspectConfig) -> Iterator[tuple[str, str]]:
    """A title and the text of each document that is asked for."""
    from tokenizers import Tokenizer

    stream, tokenizer = corpus.stream(settings.split), Tokenizer.from_file(str(corpus.tokenizer_file))
    bounds = _bounds(stream)
    one = settings.document
    if one is not None and one >= stream.num_documents:
        raise UserError(
            f"inspect.document={one}: the {settings.split} split of {corpus.folder} has documents 0 to"
            f" {stream.num_documents - 1}"
        )
    for number in range(min(settings.documents, stream.num_documents)) if one is None else [one]:
        ids = stream.take(np.arange(bounds[number], bounds[number + 1]))
        text = tokenizer.decode(ids.tolist())
        text = "".join(sign if sign.isprintable() or sign in "\n\u200c\u200d" else " " for sign in text)
        if one is None and len(text) > BEGINNING:
            text = text[:BEGINNING] + " ..."
        yield f"{settings.split} document {number}, {len(ids):,} tokens:", text
