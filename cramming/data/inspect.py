"""`cramming inspect <corpus>`: its splits, document lengths, sources, what was dropped and why, and documents as text;
`cramming verify <corpus>`: every byte of it against its manifest.

`inspect` shows an altered corpus as it is, and then names it as such, as far as a quick look tells.
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

BEGINNING = 400  # characters shown of one of several documents
QUANTILES = {"shortest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "longest": 1.0}


def verify(folder: Path) -> list[str]:
    """Print every problem of the corpus in `folder`, and return them all; UserError where there is no corpus."""
    require(
        (folder / MANIFEST).is_file(),
        f"{folder}: no finished corpus here, and no run; name the folder of one behind the verb",
    )
    found = list(problems(folder))
    for problem in found:
        say(problem)
    cure = f"{len(found)} problem(s); delete the folder and run `cramming prepare` again"
    say(f"{folder}: {cure if found else 'every file is as `prepare` wrote it'}")
    return found


def problems(folder: Path) -> Iterator[str]:
    """What differs from the manifest, one line each: files altered or missing, and files that are not in it."""
    try:
        manifest = Manifest.load(folder / MANIFEST)
    except UserError as error:
        yield str(error)
        return
    yield from damaged(folder, manifest.hashes())
    known = {MANIFEST, LOCK, *manifest.hashes()}  # a kill at the very end leaves the lock file
    for path in sorted(folder.rglob("*")):
        if (path.is_file() or path.is_symlink()) and path.relative_to(
            folder
        ).as_posix() not in known:
            yield f"{path}: unexpected; `prepare` has not made this file"


def damaged(folder: Path, hashes: Mapping[str, str]) -> Iterator[str]:
    """Those of the files, by name and SHA-256, that are altered or missing, one line each."""
    with Progress("verify", float(len(hashes)), "files") as bar:
        for name, expected in sorted(hashes.items()):
            if problem := damage(folder / name, expected):
                yield problem
            bar.advance()


def main(*, path: Path, split: Split, documents: int, document: int | None) -> None:
    """Print what the corpus in a folder holds, and the first `documents` of a split, or the one of this number.

    UserError: no corpus, no document of this number; at the end, one that was altered.
    """
    corpus = Corpus.open(path)
    manifest, streams = corpus.manifest, {name: corpus.stream(name) for name in SPLITS}
    shown = streams[split]
    numbers = list(range(min(documents, shown.num_documents)))
    if document is not None:
        numbers = [document]
    if numbers and numbers[-1] >= shown.num_documents:
        place = f"the {split} split of {corpus.folder} has documents 0 to {shown.num_documents - 1}"
        raise UserError(f"--document={numbers[-1]}: {place}")
    altered = list(damaged(corpus.folder, _hashes_of(manifest, split, numbers)))

    counts = [
        [
            name,
            f"{stream.num_documents:,}",
            f"{stream.num_tokens:,}",
            str(len(manifest.splits[name])),
        ]
        for name, stream in streams.items()
    ]
    show_table(f"{corpus.folder}: splits", ["", "documents", "tokens", "shards"], counts)
    lengths = [_lengths(name, stream) for name, stream in streams.items()]
    show_table("tokens per document", ["", *QUANTILES, "mean"], lengths)
    columns = ["documents", "tokens", "bytes"]
    by_source = manifest.statistics.get("by_source", {}).items()
    show_table(
        "sources",
        ["", *columns],
        [[name, *(f"{row[c]:,}" for c in columns)] for name, row in by_source],
    )
    dropped = [
        [reason, stage.name, f"{found.documents:,}", f"{found.bytes:,}"]
        for stage in manifest.stages
        for reason, found in stage.dropped.items()
    ]
    show_table(
        "dropped (corpus_card.md shows examples)", ["", "stage", "documents", "bytes"], dropped
    )
    whole = document is not None
    for number, tokens, text in _texts(shown, corpus.tokenizer_file, numbers):
        shortened = text if whole or len(text) <= BEGINNING else text[:BEGINNING] + " ..."
        for line in [
            "",
            f"{split} document {number}, {tokens:,} tokens:",
            *shortened.split("\n"),
        ]:
            say(line)
    if altered:
        more = f", and {len(altered) - 1} more" if len(altered) > 1 else ""
        raise UserError(
            f"shown as it is now, not as it was prepared: {altered[0]}{more}; see `cramming verify`"
        )


def _hashes_of(manifest: Manifest, split: Split, numbers: list[int]) -> dict[str, str]:
    """The shards in which these documents begin, and all files that are no shards, with their SHA-256."""
    shards = manifest.splits[split]
    last_D = np.cumsum([shard.documents for shard in shards])
    read = [shards[place] for place in np.unique(np.searchsorted(last_D, numbers, side="right"))]
    shown = {shard.file: shard.sha256 for shard in read} | {
        shard.index_file: shard.index_sha256 for shard in read
    }
    return {**manifest.files, **shown}


def _lengths(split: str, stream: TokenStream) -> list[str]:
    lengths_D = np.diff(stream.document_starts, append=stream.num_tokens)
    values = [*np.quantile(lengths_D, list(QUANTILES.values())), lengths_D.mean()]
    return [split, *(f"{value:,.0f}" for value in values)]


def _texts(
    stream: TokenStream, tokenizer_file: Path, numbers: list[int]
) -> Iterator[tuple[int, int, str]]:
    """Number, count of tokens and text of each document."""
    tokenizer = Tokenizer.from_buffer(tokenizer_file.read_bytes())
    for number in numbers:
        ids = stream.document(number)
        yield number, len(ids), tokenizer.decode(ids.tolist())
