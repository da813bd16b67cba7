"""The corpus folder: the one on-disk format between `prepare` and `pretrain`.

    manifest.json                        written last; a folder without it is not a corpus (cramming/data/manifest.py)
    tokenizer.json                       a `tokenizers` file; and tokenizer_config.json, for AutoTokenizer
    train-00000.bin  train-00000.idx     one shard: tokens, and where documents begin in it
    validation-00000.bin ...
    order-<name>.npy                     document numbers of the training split in another order (see `Corpus.stream`)
    corpus_card.md                       what a person reads about the corpus
    tasks/                               only the embedded corpus: its fine-tuning tasks

A shard is a flat little-endian token stream, uint16, or uint32 when the vocabulary has more than 65,536 entries. Every
document is `[CLS] tokens [SEP]`, and documents lie back to back. The `.idx` file holds the uint64 offsets, from the
start of its shard, of the documents that begin there. All shards of a split but the last hold the same number of
tokens, so a document may lie across shards. Sequence length is not part of the format: readers take windows of any
length at any place. data_prep/shard_writer.py writes it.
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
Curriculum = Literal[
    "sentence_length", "compressibility", "token_prevalence"
]  # each an order file; ascending
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)
REVERSED = "_reversed"
ORDERS = ("shuffled", *(name + end for name in ("source", *CURRICULA) for end in ("", REVERSED)))


class TokenStream:
    """One flat stream of tokens over all shards of a split, memory-mapped; a window is copied on request.

    `num_tokens`, `num_documents`; `shards`, an array of tokens each; `document_starts` int64 [num_documents], ascending
    stream offsets of each [CLS]; `mapped`, which file each shard's tokens come from.
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
        """A stream in memory, for measurements: no folder, no files."""
        stream = cls(Path(), [], ids.dtype, "array")
        stream.num_documents, stream.document_starts = (
            len(document_starts),
            document_starts.astype(np.int64),
        )
        stream._set_shards([ids])
        return stream

    def _set_shards(self, shards: list[np.ndarray]) -> None:
        self.shards = shards
        self._bases = np.cumsum([0] + [len(shard) for shard in shards])
        self.num_tokens = int(self._bases[-1])
        self._views: dict[int, list[np.ndarray]] = {}

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Read from the index files on first use: `packing: rows` never needs them."""
        starts = [np.fromfile(file, INDEX_DTYPE).astype(np.int64) for file in self._index_files]
        return np.concatenate(
            [shard_starts + base for shard_starts, base in zip(starts, self._bases)]
        )

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document: int64 [tokens]."""
        start, end = [*self.document_starts[number : number + 2], self.num_tokens][:2]
        return self.gather(np.array([start]), end - start)[0]

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Windows `[start, start + length)` at any places of the stream, also across shards: int64 [N, length]."""
        order_N = np.argsort(starts_N)  # by shard, and kind to the page cache
        sorted_N = starts_N[order_N]
        assert len(sorted_N) == 0 or (
            sorted_N[0] >= 0 and sorted_N[-1] + length <= self.num_tokens
        ), f"a window of {length} tokens reaches outside the stream of {self.num_tokens}"
        out_NL = np.empty((len(starts_N), length), dtype=np.int64)
        edges = np.searchsorted(sorted_N, self._bases)
        for shard in np.flatnonzero(
            np.diff(edges)
        ).tolist():  # of thousands few have a window of this batch
            windows, (first, last) = self._windows(length)[shard], edges[shard : shard + 2].tolist()
            whole = first + int(
                np.searchsorted(sorted_N[first:last], self._bases[shard] + len(windows))
            )
            if whole > first:
                out_NL[order_N[first:whole]] = windows[sorted_N[first:whole] - self._bases[shard]]
            if last > whole:  # windows across shards
                out_NL[order_N[whole:last]] = self.take(
                    sorted_N[whole:last, None] + np.arange(length)
                )
        return out_NL

    def _windows(self, length: int) -> list[np.ndarray]:
        """For each shard a view [tokens - length + 1, length] of all windows that lie whole in it."""
        if length not in self._views:
            self._views[length] = [
                sliding_window_view(shard, length)
                if len(shard) >= length
                else np.empty((0, length), shard.dtype)
                for shard in self.shards
            ]
        return self._views[length]

    def take(self, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of the stream: int64, of the same shape."""
        shard_of = np.searchsorted(self._bases, places, side="right") - 1
        out = np.empty(places.shape, dtype=np.int64)
        for shard in np.unique(shard_of):
            here = shard_of == shard
            out[here] = self.shards[shard][places[here] - self._bases[shard]]
        return out


class OrderedStream(TokenStream):
    """The same shards read as if their documents lay in another order. Memory: 16 bytes per document."""

    def __init__(self, stream: TokenStream, order_D: np.ndarray) -> None:
        self.name, self._stream = stream.name, stream
        self.num_tokens, self.num_documents = stream.num_tokens, stream.num_documents
        lengths_D = np.diff(stream.document_starts, append=stream.num_tokens)[order_D]
        self.document_starts = np.cumsum(lengths_D) - lengths_D
        self._there_D = stream.document_starts[order_D]  # where each document begins in the shards

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Windows `[start, start + length)` of this order: int64 [N, length]."""
        places_NL = starts_N[:, None] + np.arange(length)
        document_NL = np.searchsorted(self.document_starts, places_NL, side="right") - 1
        return self._stream.take(places_NL + (self._there_D - self.document_starts)[document_NL])


class Stamp(NamedTuple):
    """Which file lies at a path, and when it was last written to: whoever puts the content back, and the time of its
    modification, cannot put back the time of the change (`ctime_ns`), which the system alone sets."""

    size: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """From what the system tells."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino)

    @classmethod
    def at(cls, path: Path) -> "Stamp | None":
        """None where there is no file; OSError where the system does not tell.

        Opening lets a network file system ask its server; without a descriptor left the path is looked at all the same.
        """
        with suppress(OSError), path.open("rb") as handle:
            return cls.of(os.fstat(handle.fileno()))
        try:
            return cls.of(path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return None


class Corpus:
    """A whole corpus folder, opened for reading; nothing is loaded.

    What is read hours later is what the files hold by then: `changed` names those that were written to since.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.manifest_sha256 = manifest.sha256()
        self.vocab_size = manifest.tokenizer.vocab_size
        self.special_ids = SpecialIds(**manifest.tokenizer.special_ids)
        self._verified: dict[str, Stamp] = {}  # the files whose SHA-256 was compared
        self._mapped: dict[str, Stamp] = {}

    @classmethod
    def open(cls, folder: Path, *, verify: bool | Split = False) -> "Corpus":
        """Open and check: the manifest's checksum, file sizes, the tokenizer's SHA-256.

        `verify`: every file's SHA-256, or those of one split.

        UserError: no such folder, half-written, unknown format version, a file missing, cut short or altered.
        """
        if not (folder / MANIFEST).is_file():
            if not folder.is_dir():
                raise UserError(
                    f"{folder}: no corpus here; make it with `cramming prepare` and the same data and tokenizer"
                    " settings, or name one with data.corpus=<folder>"
                )
            raise UserError(
                f"{folder}: half-written corpus, or none (no {MANIFEST}); run the same `cramming prepare` again, it"
                " goes on where it stopped"
            )
        corpus = cls(folder, found := Manifest.load(folder / MANIFEST))
        for problem in chain(
            wrong_sizes(folder, found.splits, np.dtype(found.dtype)), corpus._wrong_hashes(verify)
        ):
            raise UserError(f"{problem}; the corpus is damaged: {DAMAGED}")
        return corpus

    def _wrong_hashes(self, verify: bool | Split) -> Iterator[str]:
        """Of the tokenizer and what is to be verified; notes what those are that are right."""
        hashes = self.manifest.hashes()
        names = [
            name
            for name in hashes
            if verify is True or name == TOKENIZER or name.startswith(f"{verify}-")
        ]
        stamps = [Stamp.at(self.folder / name) for name in names]  # from before they are read
        with ThreadPoolExecutor(4) as pool:  # on the clock in training; hashing releases the GIL
            problems = pool.map(lambda name: damage(self.folder / name, hashes[name]), names)
            for name, stamp, problem in zip(names, stamps, problems):
                if problem:
                    yield problem
                assert stamp, "what could be hashed could be opened"
                self._verified[name] = stamp

    def changed(self, *, last: bool = False) -> list[str]:
        """Names of the verified files that were written to, exchanged or removed since; by their times, not read.

        A file whose state the system does not tell for the moment counts at the `last` look only.
        """
        return [
            name
            for name, stamp in self._verified.items()
            if not self._is_as_verified(name, stamp, last)
        ]

    def _is_as_verified(self, name: str, stamp: Stamp, last: bool) -> bool:
        try:  # a network file system may number a file anew meanwhile; its size and times it keeps
            is_unchanged = (Stamp.at(self.folder / name) or ())[:3] == stamp[:3]
        except OSError:
            is_unchanged = not last
        return is_unchanged and self._mapped.get(name, stamp) == stamp

    def is_as_prepared(self, name: str) -> bool | None:
        """Whether a file now has the SHA-256 of the manifest; None where it cannot be read."""
        try:
            return damage(self.folder / name, self.manifest.hashes()[name]) is None
        except OSError:
            return None

    @property
    def tokenizer_file(self) -> Path:
        """The corpus's tokenizer.json."""
        return self.folder / TOKENIZER

    def stream(self, split: Split, order: str = "source") -> TokenStream:
        """The tokens of one split as one flat stream, its documents in this order (the reader shuffles).

        UserError: the corpus has no such order.
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
            cure = f"prepare it with data.orders=[{name}]"
            if name != "token_prevalence" and self.manifest.statistics.get("characters") == 0:
                cure = "ready-made ids have no text to order by"
            raise UserError(
                f"train.order={name}: {self.folder} has no such order file, only: {known}; {cure}"
            )
        order_D: np.ndarray = np.load(self.folder / self.manifest.orders[name])
        assert len(order_D) == documents
        return order_D

    def describe(self) -> dict[str, Any]:
        """What a run's record says about its corpus."""
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
    """Which files of these shards are not there or have another size, in words; nothing of them is read."""
    for shard in chain.from_iterable(splits.values()):
        sizes = {
            shard.file: shard.tokens * dtype.itemsize,
            shard.index_file: shard.documents * INDEX_DTYPE.itemsize,
        }
        for path, size in ((folder / name, size) for name, size in sizes.items()):
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            if found != f"{size} bytes":
                yield f"{path}: {found}, should have {size} bytes"


def damage(path: Path, expected: str) -> str | None:
    """What is wrong with a file whose SHA-256 should be `expected`, in words; None: nothing."""
    if not path.is_file():
        return f"{path}: missing"
    if file_sha256(path) != expected:
        return f"{path}: its SHA-256 is not the manifest's; the file was altered"
    return None
