"""The verbs `inspect` and `verify` of a corpus.

`cramming inspect <corpus>` shows splits, document lengths, sources, dropped documents with reasons, and documents as
text. Of an altered corpus it shows the present content, then fails; it hashes only the files that it reads. `cramming
verify <corpus>` compares every byte with the manifest.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cramming.config import UserError, require
from cramming.data.corpus import SPLITS, Corpus, TokenStream, damage
from cramming.data.manifest import MANIFEST, Manifest, Split
from cramming.files import LOCK
from cramming.progress import Progress, say, show_table

EXCERPT_CHARACTERS = 400  # shown of each document; `--document` shows a whole one
SOURCE_COLUMNS = ("documents", "tokens", "bytes")
QUANTILES = {"shortest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "longest": 1.0}


def verify(folder: Path) -> list[str]:
    """Print every problem of the corpus in `folder`, and return them; raise UserError if there is no corpus."""
    require(
        (folder / MANIFEST).is_file(),
        f"{folder}: no finished corpus and no run here. Give the folder of one: cramming verify <folder>.",
    )
    messages = list(problems(folder))
    for message in messages:
        say(message)
    if messages:
        say(
            f"{folder}: {len(messages)} problem(s). Delete the folder and run `cramming prepare` again."
        )
    else:
        say(f"{folder}: every file is as `prepare` wrote it")
    return messages


def problems(folder: Path) -> Iterator[str]:
    """Yield a message for each difference from the manifest: files altered, missing or unexpected."""
    try:
        manifest = Manifest.load(folder / MANIFEST)
    except UserError as error:
        yield str(error)
        return
    yield from damaged(folder, manifest.hashes())
    # A process killed at the very end of `prepare` leaves the lock file.
    known = {MANIFEST, LOCK, *manifest.hashes()}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() and not path.is_symlink():
            continue
        if path.relative_to(folder).as_posix() not in known:
            yield f"{path}: unexpected; `prepare` did not write this file"


def damaged(folder: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each altered or missing file of `hashes` (name -> SHA-256)."""
    with Progress("verify", float(len(hashes)), "files") as bar:
        for name, expected in sorted(hashes.items()):
            problem = damage(folder / name, expected)
            if problem:
                yield problem
            bar.advance()


def main(*, path: Path, split: Split, documents: int, document: int | None) -> None:
    """Print the content of the corpus in a folder, and the first `documents` of a split or only document `document`.

    Raises UserError if there is no corpus or no document of this number, and at the end for an altered corpus.
    """
    corpus = Corpus.open(path)
    manifest = corpus.manifest
    streams = {name: corpus.stream(name) for name in SPLITS}
    stream = streams[split]
    numbers = list(range(min(documents, stream.num_documents)))
    if document is not None:
        numbers = [document]
    if numbers and numbers[-1] >= stream.num_documents:
        raise UserError(
            f"--document={numbers[-1]}: the {split} split of {corpus.folder} has documents 0 to"
            f" {stream.num_documents - 1}."
        )
    altered = list(damaged(corpus.folder, _hashes_of(manifest, split, numbers)))

    show_table(
        f"{corpus.folder}: splits",
        ["", "documents", "tokens", "shards"],
        _split_rows(manifest, streams),
    )
    lengths = [_length_row(name, stream) for name, stream in streams.items()]
    show_table("tokens per document", ["", *QUANTILES, "mean"], lengths)
    show_table("sources", ["", *SOURCE_COLUMNS], _source_rows(manifest))
    show_table(
        "dropped (corpus_card.md shows examples)",
        ["", "stage", "documents", "bytes"],
        _dropped_rows(manifest),
    )
    for number, tokens, text in _texts(stream, corpus.tokenizer_file, numbers):
        if document is None and len(text) > EXCERPT_CHARACTERS:
            text = text[:EXCERPT_CHARACTERS] + " ..."
        say("")
        say(f"{split} document {number}, {tokens:,} tokens:")
        for line in text.split("\n"):
            say(line)
    if altered:
        more = f", and {len(altered) - 1} more" if len(altered) > 1 else ""
        raise UserError(
            f"{corpus.folder}: altered since `prepare` wrote it: {altered[0]}{more}. Run `cramming verify` on it."
        )


def _split_rows(manifest: Manifest, streams: Mapping[Split, TokenStream]) -> list[list[str]]:
    rows = []
    for split, stream in streams.items():
        counts = (stream.num_documents, stream.num_tokens, len(manifest.splits[split]))
        rows.append([split, *(f"{count:,}" for count in counts)])
    return rows


def _source_rows(manifest: Manifest) -> list[list[str]]:
    rows = []
    for name, counts in manifest.statistics.get("by_source", {}).items():
        rows.append([name, *(f"{counts[column]:,}" for column in SOURCE_COLUMNS)])
    return rows


def _dropped_rows(manifest: Manifest) -> list[list[str]]:
    rows = []
    for stage in manifest.stages:
        for reason, dropped in stage.dropped.items():
            rows.append([reason, stage.name, f"{dropped.documents:,}", f"{dropped.bytes:,}"])
    return rows


def _hashes_of(manifest: Manifest, split: Split, numbers: list[int]) -> dict[str, str]:
    """Return the SHA-256, by name, of the shards in which these documents begin and of `manifest.files`."""
    shards = manifest.splits[split]
    last_D = np.cumsum([shard.documents for shard in shards])
    hashes = dict(manifest.files)
    for index in np.unique(np.searchsorted(last_D, numbers, side="right")):
        shard = shards[index]
        hashes[shard.file] = shard.sha256
        hashes[shard.index_file] = shard.index_sha256
    return hashes


def _length_row(split: str, stream: TokenStream) -> list[str]:
    lengths_D = np.diff(stream.document_starts, append=stream.num_tokens)
    values = [*np.quantile(lengths_D, list(QUANTILES.values())), lengths_D.mean()]
    return [split, *(f"{value:,.0f}" for value in values)]


def _texts(
    stream: TokenStream, tokenizer_file: Path, numbers: list[int]
) -> Iterator[tuple[int, int, str]]:
    """Yield the number, the token count and the text of each document."""
    tokenizer = Tokenizer.from_buffer(tokenizer_file.read_bytes())
    for number in numbers:
        ids = stream.document(number)
        yield number, len(ids), tokenizer.decode(ids.tolist())
