"""The corpus folder: the one on-disk format between `prepare` and `pretrain`.

    manifest.json                        written last; a folder without it is not a corpus (cramming/data/manifest.py)
    tokenizer.json                       a `tokenizers` file; and tokenizer_config.json, for AutoTokenizer
    train-00000.bin  train-00000.idx     one shard: tokens, and the offsets of the documents that begin in it
    validation-00000.bin ...
    order-<name>.npy                     document numbers of the training split in another order (see `Corpus.stream`)
    corpus_card.md                       description of the corpus for people
    dropped.jsonl                        only on request: a line for each dropped document
    tasks/                               only the embedded corpus: its fine-tuning tasks

A shard is a flat little-endian token stream, uint16, or uint32 when the vocabulary has more than 65,536 entries.
Every document is `[CLS] tokens [SEP]`, and documents lie back to back. The `.idx` file holds the uint64 offsets, from
the start of its shard, of the documents that begin there. All shards of a split but the last hold the same number of
tokens, so a document may extend over several shards. Sequence length is not part of the format: readers take windows
of any length at any offset. data_prep/shard_writer.py writes the format.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cramming.config import UserError, file_sha256
from cramming.data.manifest import (
    DAMAGED,
    INDEX_DTYPE,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    SpecialIds,
    Split,
)

TASKS = "tasks"
SPLITS: tuple[Split, ...] = get_args(Split)
# ascending orders, an order file each
Curriculum = Literal["sentence_length", "compressibility", "token_prevalence"]
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)
REVERSED = "_reversed"
_ASCENDING = ("source", *CURRICULA)
ORDERS = ("shuffled", *_ASCENDING, *(name + REVERSED for name in _ASCENDING))


class TokenStream:
    """Flat stream of tokens over all shards of a split, memory-mapped; a window is copied on request.

    `shards` is an array of tokens each, `document_starts` int64 [num_documents] the ascending stream offsets of each
    [CLS], and `mapped` the stamp of the file that each shard's tokens come from.
    """

    def __init__(
        self, folder: Path, shards: list[Shard], dtype: np.dtype[Any], name: str = "stream"
    ) -> None:
        self.name = name  # for messages
        self.num_documents = sum(shard.documents for shard in shards)
        self._index_files = [folder / shard.index_file for shard in shards]
        self.mapped: dict[str, Stamp] = {}
        tokens = []
        for shard in shards:
            with (folder / shard.file).open("rb") as file:
                self.mapped[shard.file] = Stamp.of(os.fstat(file.fileno()))
                # np.asarray: fancy indexing of the memmap subclass itself is slower.
                tokens.append(np.asarray(np.memmap(file, dtype=dtype, mode="r")))
        self._set_shards(tokens)

    @classmethod
    def of_array(cls, ids: np.ndarray, document_starts: np.ndarray) -> "TokenStream":
        """Return a stream in memory, for measurements without a corpus folder."""
        stream = cls(Path(), [], ids.dtype, "array")
        stream.num_documents = len(document_starts)
        stream.document_starts = document_starts.astype(np.int64)
        stream._set_shards([ids])
        return stream

    def _set_shards(self, shards: list[np.ndarray]) -> None:
        self.shards = shards
        self._bases = np.cumsum([0] + [len(shard) for shard in shards])
        self.num_tokens = int(self._bases[-1])
        self._views: dict[int, list[np.ndarray]] = {}

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Stream offsets of the documents, read from the index files on first use: `packing: rows` never needs them."""
        starts = []
        for file, base in zip(self._index_files, self._bases):
            starts.append(np.fromfile(file, INDEX_DTYPE).astype(np.int64) + base)
        return np.concatenate(starts)

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of one document: int64 [tokens]."""
        start, end = [*self.document_starts[number : number + 2], self.num_tokens][:2]
        return self.gather(np.array([start]), end - start)[0]

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Return the windows `[start, start + length)` of the stream: int64 [N, length].

        A window may extend over several shards.
        """
        order_N = np.argsort(starts_N)  # groups windows by shard, and reads pages in order
        sorted_N = starts_N[order_N]
        is_inside = len(sorted_N) == 0 or (
            sorted_N[0] >= 0 and sorted_N[-1] + length <= self.num_tokens
        )
        assert is_inside, (
            f"a window of {length} tokens reaches outside the stream of {self.num_tokens}"
        )
        out_NL = np.empty((len(starts_N), length), dtype=np.int64)
        edges = np.searchsorted(sorted_N, self._bases)
        used_shards = np.flatnonzero(np.diff(edges)).tolist()
        for shard in used_shards:
            base, windows = self._bases[shard], self._windows(length)[shard]
            first, last = edges[shard : shard + 2].tolist()
            # The windows up to `end_whole` lie in this shard; the others extend into the next.
            end_whole = first + int(np.searchsorted(sorted_N[first:last], base + len(windows)))
            if end_whole > first:
                out_NL[order_N[first:end_whole]] = windows[sorted_N[first:end_whole] - base]
            if last > end_whole:
                offsets_NL = sorted_N[end_whole:last, None] + np.arange(length)
                out_NL[order_N[end_whole:last]] = self.take(offsets_NL)
        return out_NL

    def _windows(self, length: int) -> list[np.ndarray]:
        """Return for each shard a view [tokens - length + 1, length] of the windows that lie in it as a whole."""
        if length not in self._views:
            self._views[length] = [_window_view(shard, length) for shard in self.shards]
        return self._views[length]

    def take(self, offsets: np.ndarray) -> np.ndarray:
        """Return the tokens at these offsets of the stream: int64, of the same shape."""
        shard_of = np.searchsorted(self._bases, offsets, side="right") - 1
        out = np.empty(offsets.shape, dtype=np.int64)
        for shard in np.unique(shard_of):
            is_in_shard = shard_of == shard
            out[is_in_shard] = self.shards[shard][offsets[is_in_shard] - self._bases[shard]]
        return out


def _window_view(shard: np.ndarray, length: int) -> np.ndarray:
    if len(shard) < length:
        return np.empty((0, length), shard.dtype)
    return sliding_window_view(shard, length)


class OrderedStream(TokenStream):
    """Stream over the same shards with the documents in another order. It takes 16 bytes of memory per document."""

    def __init__(self, stream: TokenStream, order_D: np.ndarray) -> None:
        self.name, self._stream = stream.name, stream
        self.num_tokens, self.num_documents = stream.num_tokens, stream.num_documents
        lengths_D = np.diff(stream.document_starts, append=stream.num_tokens)[order_D]
        self.document_starts = np.cumsum(lengths_D) - lengths_D
        self._source_starts_D = stream.document_starts[order_D]  # offsets in the shards

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Return the windows `[start, start + length)` of this order: int64 [N, length]."""
        offsets_NL = starts_N[:, None] + np.arange(length)
        document_NL = np.searchsorted(self.document_starts, offsets_NL, side="right") - 1
        shifts_D = self._source_starts_D - self.document_starts
        return self._stream.take(offsets_NL + shifts_D[document_NL])


class Stamp(NamedTuple):
    """Identity of a file and the time of its last change.

    Content and modification time can be restored after a change, but not the time of the change (`ctime_ns`), which
    only the system sets.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """Return the stamp of a file's status."""
        return cls(
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            device=status.st_dev,
            inode=status.st_ino,
        )

    @classmethod
    def at(cls, path: Path) -> "Stamp | None":
        """Return the stamp of the file at a path, or None if there is no file; OSError if its status cannot be read.

        Opening the file makes a network file system query its server. If no descriptor is left, the path's status is
        read.
        """
        with suppress(OSError), path.open("rb") as handle:
            return cls.of(os.fstat(handle.fileno()))
        try:
            return cls.of(path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return None


class Corpus:
    """Corpus folder, opened for reading; nothing is loaded.

    Files are read during the whole run and may change meanwhile: `changed` names those that were written to since.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.manifest_sha256 = manifest.sha256()
        self.vocab_size = manifest.tokenizer.vocab_size
        self.special_ids = SpecialIds(**manifest.tokenizer.special_ids)
        self._verified: dict[str, Stamp] = {}  # files whose SHA-256 was compared
        self._mapped: dict[str, Stamp] = {}

    @classmethod
    def open(cls, folder: Path, *, verify: bool | Split = False) -> "Corpus":
        """Open a corpus, and check the manifest's checksum, the file sizes and the tokenizer's SHA-256.

        `verify` extends the check to the SHA-256 of every file, or of one split. Raises UserError if the folder does
        not exist, is half-written or has an unknown format version, or if a file is missing, truncated or altered.
        """
        if not (folder / MANIFEST).is_file():
            if not folder.is_dir():
                raise UserError(
                    f"{folder}: no corpus here. Make it with `cramming prepare` and the same data and tokenizer"
                    " settings, or name one with data.corpus=<folder>."
                )
            raise UserError(
                f"{folder}: half-written corpus, or none (no {MANIFEST}). Run the same `cramming prepare` again to"
                " resume it."
            )
        manifest = Manifest.load(folder / MANIFEST)
        corpus = cls(folder, manifest)
        size_problems = wrong_sizes(folder, manifest.splits, np.dtype(manifest.dtype))
        for problem in chain(size_problems, corpus._wrong_hashes(verify)):
            raise UserError(f"{problem}: the corpus is damaged. {DAMAGED}")
        return corpus

    def _wrong_hashes(self, verify: bool | Split) -> Iterator[str]:
        """Yield the problems of the tokenizer and the files to verify, and store the stamps of the intact ones."""
        hashes = self.manifest.hashes()
        names = list(hashes)
        if verify is not True:
            names = [name for name in hashes if name == TOKENIZER or name.startswith(f"{verify}-")]
        stamps = [Stamp.at(self.folder / name) for name in names]  # taken before the files are read
        # Threads, because the budget's clock is running and hashing releases the GIL.
        with ThreadPoolExecutor(4) as pool:
            problems = pool.map(lambda name: damage(self.folder / name, hashes[name]), names)
            for name, stamp, problem in zip(names, stamps, problems):
                if problem:
                    yield problem
                assert stamp, "a file that was hashed exists"
                self._verified[name] = stamp

    def changed(self, *, last: bool = False) -> list[str]:
        """Return the names of verified files that were written to, exchanged or removed since, from their stamps.

        A file whose status cannot be read at the moment counts as changed only with `last`.
        """
        verified = self._verified.items()
        return [name for name, stamp in verified if not self._is_as_verified(name, stamp, last)]

    def _is_as_verified(self, name: str, stamp: Stamp, last: bool) -> bool:
        # A network file system may change a file's inode meanwhile, but not its size and times.
        try:
            is_unchanged = (Stamp.at(self.folder / name) or ())[:3] == stamp[:3]
        except OSError:
            is_unchanged = not last
        return is_unchanged and self._mapped.get(name, stamp) == stamp

    def is_as_prepared(self, name: str) -> bool | None:
        """Return whether a file now has the SHA-256 of the manifest, or None if it cannot be read."""
        try:
            return damage(self.folder / name, self.manifest.hashes()[name]) is None
        except OSError:
            return None

    @property
    def tokenizer_file(self) -> Path:
        """Path of the corpus's tokenizer.json."""
        return self.folder / TOKENIZER

    def stream(self, split: Split, order: str = "source") -> TokenStream:
        """Return the tokens of one split as one flat stream, with its documents in this order.

        Shuffling is done by the reader. Raises UserError if the corpus has no such order.
        """
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        stream = TokenStream(
            self.folder, self.manifest.splits[split], dtype, f"{self.folder}, {split} split"
        )
        self._mapped |= stream.mapped
        if order in ("shuffled", "source"):
            return stream
        order_D = self._order(order.removesuffix(REVERSED), stream.num_documents)
        return OrderedStream(stream, order_D[::-1] if order.endswith(REVERSED) else order_D)

    def _order(self, name: str, documents: int) -> np.ndarray:
        if name == "source":
            return np.arange(documents)
        if name not in self.manifest.orders:
            known = ", ".join(("shuffled", "source", *self.manifest.orders))
            remedy = f"Prepare it with data.orders=[{name}]."
            if name != "token_prevalence" and self.manifest.statistics.get("characters") == 0:
                remedy = "Ready-made ids have no text to order by."
            raise UserError(
                f"train.order={name}: {self.folder} has no such order file, only: {known}. {remedy}"
            )
        order_D: np.ndarray = np.load(self.folder / self.manifest.orders[name])
        assert len(order_D) == documents
        return order_D

    def describe(self) -> dict[str, Any]:
        """Return the description of the corpus for the run log."""
        manifest, train = self.manifest, self.manifest.splits["train"]
        return {
            "folder": str(self.folder),
            "manifest_sha256": self.manifest_sha256,
            "tokens": sum(shard.tokens for shard in train),
            "validation_tokens": sum(shard.tokens for shard in manifest.splits["validation"]),
            "documents": sum(shard.documents for shard in train),
            "vocab_size": self.vocab_size,
            "tokenizer": {
                key: getattr(manifest.tokenizer, key) for key in ("kind", "lowercase", "sha256")
            },
            "sources": manifest.sources,
            "settings": manifest.settings,
            "removed": manifest.removed,
            "decontamination": manifest.decontamination,
        }


def wrong_sizes(
    folder: Path, splits: dict[Split, list[Shard]], dtype: np.dtype[Any]
) -> Iterator[str]:
    """Yield a message for each missing file of these shards and each of another size; no file is read."""
    for shard in chain.from_iterable(splits.values()):
        sizes = {
            shard.file: shard.tokens * dtype.itemsize,
            shard.index_file: shard.documents * INDEX_DTYPE.itemsize,
        }
        for name, size in sizes.items():
            path = folder / name
            state = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            if state != f"{size} bytes":
                yield f"{path}: {state}, should have {size} bytes"


def damage(path: Path, expected: str) -> str | None:
    """Return a message if a file is missing or its SHA-256 is not `expected`, else None."""
    if not path.is_file():
        return f"{path}: missing"
    if file_sha256(path) != expected:
        return f"{path}: its SHA-256 is not the manifest's; the file was altered"
    return None
