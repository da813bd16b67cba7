"""The corpus folder: the one on-disk format between `prepare` and `pretrain`.

    manifest.json                        written last; a folder without it is not a corpus
    tokenizer.json                       a `tokenizers` file
    train-00000.bin  train-00000.idx     one shard: tokens, and where documents begin in it
    validation-00000.bin ...
    order-<name>.npy                     document numbers of the training split in another order (see `stream`)
    corpus_card.md  card/*.svg           what a person reads about the corpus
    tasks/                               only the embedded corpus: its fine-tuning tasks

The manifest (cramming/data/manifest.py) names every file with its SHA-256.

A shard is a flat little-endian token stream, uint16, or uint32 when the vocabulary has more than 65,536 entries. Every
document is `[CLS] tokens [SEP]` and documents lie back to back. The `.idx` file holds the uint64 offsets, from the
start of its shard, of the documents that begin there. All shards of a split but the last hold the same number of
tokens: the stream is cut where the shard is full, so a document may lie across shards and may even be longer than one.
Sequence length is not part of the format: readers take windows of any length at any place.
"""

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cramming.config import UserError, file_sha256, overwrite_atomically
from cramming.data.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    SpecialIds,
    Split,
    TokenizerInfo,
    content_settings,
    corpus_folder,
    corpus_hash,
    token_dtype,
)

__all__ = [
    "FORMAT_VERSION",
    "CURRICULA",
    "INDEX_DTYPE",
    "MANIFEST",
    "ORDERS",
    "TASKS",
    "TOKENIZER",
    "Corpus",
    "Curriculum",
    "Manifest",
    "OrderedStream",
    "ResumePoint",
    "Shard",
    "ShardWriter",
    "SpecialIds",
    "Split",
    "TokenStream",
    "TokenizerInfo",
    "content_settings",
    "corpus_folder",
    "corpus_hash",
    "resume_point",
    "token_dtype",
    "token_use",
]

TASKS = "tasks"
SPLITS: tuple[Split, ...] = get_args(Split)
INDEX_DTYPE = np.dtype("<u8")
Curriculum = Literal["sentence_length", "compressibility", "token_prevalence"]  # each an order file; ascending
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)
REVERSED = "_reversed"
ORDERS = ("shuffled", *(name + end for name in ("source", *CURRICULA) for end in ("", REVERSED)))


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
        self.folder, self.split, self.dtype, self.shard_tokens = (
            folder,
            split,
            dtype,
            shard_tokens,
        )
        self.shards = list(finished)
        self._part: BinaryIO | None = None

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> bool:
        """Append `tokens` [n]; `starts` are the offsets in it where documents begin. True if a shard was finished."""
        before = len(self.shards)
        while len(tokens):
            if self._part is None:
                self._begin()
            room = self.shard_tokens - self._tokens
            inside = int(np.searchsorted(starts, room))
            self._write(tokens[:room], starts[:inside])
            tokens, starts = tokens[room:], starts[inside:] - room
            if self._tokens == self.shard_tokens:
                self.close()
        return len(self.shards) > before

    def _begin(self) -> None:
        self._file = f"{self.split}-{len(self.shards):05d}.bin"
        self._part = (self.folder / f"{self._file}.part").open("wb")
        self._hash = hashlib.sha256()
        self._tokens = 0
        self._starts: list[np.ndarray] = []

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
        os.fsync(self._part.fileno())
        self._part.close()
        self._part = None
        starts = np.concatenate(self._starts)
        index_hash = hashlib.sha256(starts.tobytes()).hexdigest()
        shard = Shard(self._file, self._tokens, len(starts), self._hash.hexdigest(), index_hash)
        overwrite_atomically(self.folder / shard.index_file, starts.tofile)
        (self.folder / f"{self._file}.part").rename(self.folder / self._file)
        self.shards.append(shard)


class ResumePoint(NamedTuple):
    """Where an interrupted split goes on: leave out `documents` whole documents, then `tokens` of the next one."""

    documents: int
    tokens: int


def resume_point(folder: Path, shards: list[Shard]) -> ResumePoint:
    """From the finished shards alone: the document that the last of them was cut in (or ended with) is done again."""
    base = sum(shard.tokens for shard in shards)
    documents = sum(shard.documents for shard in shards)
    end = base
    for shard in reversed(shards):
        base -= shard.tokens
        if shard.documents:
            last_start = base + int(np.fromfile(folder / shard.index_file, INDEX_DTYPE)[-1])
            return ResumePoint(documents - 1, end - last_start)
    return ResumePoint(0, 0)


def token_use(folder: Path, shards: list[Shard], dtype: np.dtype[Any], vocab_size: int) -> np.ndarray:
    """How often each token occurs in these shards: int64 [vocab_size]."""
    use_V = np.zeros(vocab_size, dtype=np.int64)
    for shard in shards:
        use_V += np.bincount(np.memmap(folder / shard.file, dtype=dtype, mode="r"), minlength=vocab_size)
    return use_V


class Corpus:
    """A whole corpus folder, opened for reading; shards are memory-mapped, nothing is loaded."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.manifest_sha256 = manifest.sha256()
        self.vocab_size = manifest.tokenizer.vocab_size
        self.special_ids = SpecialIds(**manifest.tokenizer.special_ids)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> "Corpus":
        """Open and check: the manifest's checksum, file sizes, the tokenizer's SHA-256; `verify`: every file's SHA-256.

        UserError: no such folder, half-written, unknown format version, a file missing, cut short or altered.
        """
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no corpus here; make it with `cramming prepare` and the same data and tokenizer settings,"
                " or name one with data.corpus=<folder>"
            )
        if not (folder / MANIFEST).is_file():
            raise UserError(
                f"{folder}: half-written corpus, or none (no {MANIFEST}); run the same `cramming prepare` again,"
                " it goes on where it stopped"
            )
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{folder / MANIFEST}: not UTF-8; the file was altered: delete the folder") from None
        corpus = cls(folder, Manifest.from_json(text, str(folder / MANIFEST)))
        corpus._check(verify)
        return corpus

    def _check(self, verify: bool) -> None:
        itemsize = np.dtype(self.manifest.dtype).itemsize
        for shard in (shard for split in SPLITS for shard in self.manifest.splits[split]):
            _check_size(self.folder / shard.file, shard.tokens * itemsize)
            _check_size(self.folder / shard.index_file, shard.documents * INDEX_DTYPE.itemsize)
        hashes = self.manifest.hashes()
        for name in hashes if verify else (TOKENIZER,):
            if problem := damage(self.folder / name, hashes[name]):
                raise UserError(f"{problem}; delete the folder and run `cramming prepare` again")

    @property
    def tokenizer_file(self) -> Path:
        """The corpus's tokenizer.json."""
        return self.folder / TOKENIZER

    def stream(self, split: Split, order: str = "source") -> "TokenStream":
        """The tokens of one split as one flat stream, its documents in this order (`shuffled` is the reader's task).

        UserError: the corpus has no such order.
        """
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        stream = TokenStream(self.folder, self.manifest.splits[split], dtype, f"{self.folder}, {split} split")
        if order in ("shuffled", "source"):
            return stream
        return OrderedStream(
            stream, self._order(order.removesuffix(REVERSED), stream)[:: 1 - 2 * order.endswith(REVERSED)]
        )

    def _order(self, name: str, stream: "TokenStream") -> np.ndarray:
        if name == "source":
            return np.arange(stream.num_documents)
        if name not in self.manifest.orders:
            known = ", ".join(("shuffled", "source", *self.manifest.orders))
            raise UserError(
                f"train.order={name}: {self.folder} has no such order file, only: {known}; prepare it with"
                f" data.orders=[{name}]"
            )
        order_D: np.ndarray = np.load(self.folder / self.manifest.orders[name])
        assert len(order_D) == stream.num_documents
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
            "tokenizer": {key: getattr(manifest.tokenizer, key) for key in ("kind", "lowercase", "sha256")},
            "sources": manifest.sources,
            "settings": manifest.settings,
            "removed": manifest.removed,
            "decontamination": manifest.decontamination,
        }


class TokenStream:
    """One flat stream of tokens over all shards of a split.

    `num_tokens`, `num_documents`; `document_starts` int64 [num_documents], ascending stream offsets of each [CLS].
    """

    def __init__(self, folder: Path, shards: list[Shard], dtype: np.dtype[Any], name: str = "stream") -> None:
        self.name = name  # for messages
        self.num_tokens = sum(shard.tokens for shard in shards)
        self.num_documents = sum(shard.documents for shard in shards)
        self._index_files = [folder / shard.index_file for shard in shards]
        # np.asarray: fancy indexing of the memmap subclass itself is slower.
        self._shards = [np.asarray(np.memmap(folder / shard.file, dtype=dtype, mode="r")) for shard in shards]
        self._bases = np.cumsum([0] + [shard.tokens for shard in shards])
        self._views: dict[int, list[np.ndarray]] = {}

    @classmethod
    def of_array(cls, ids: np.ndarray, document_starts: np.ndarray) -> "TokenStream":
        """A stream in memory, for measurements: no folder, no files."""
        stream = cls.__new__(cls)
        stream.name = "array"
        stream.num_tokens, stream.num_documents = len(ids), len(document_starts)
        stream.document_starts = document_starts.astype(np.int64)
        stream._index_files, stream._shards = [], [ids]
        stream._bases = np.array([0, len(ids)])
        stream._views = {}
        return stream

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Read from the index files when first asked for: `packing: rows` never needs them."""
        parts = [np.fromfile(file, INDEX_DTYPE).astype(np.int64) for file in self._index_files]
        return np.concatenate([part + base for part, base in zip(parts, self._bases)])

    def gather(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        """Windows `[start, start + length)` at any places of the stream, also across shards: int64 [N, length]."""
        order_N = np.argsort(starts_N)  # by shard, and kind to the page cache
        sorted_N = starts_N[order_N]
        assert len(sorted_N) == 0 or (sorted_N[0] >= 0 and sorted_N[-1] + length <= self.num_tokens), (
            f"a window of {length} tokens reaches outside the stream of {self.num_tokens}"
        )
        out_NL = np.empty((len(starts_N), length), dtype=np.int64)
        edges = np.searchsorted(sorted_N, self._bases).tolist()
        for shard, windows in enumerate(self._windows(length)):
            first, last = edges[shard], edges[shard + 1]
            whole = first + int(np.searchsorted(sorted_N[first:last], self._bases[shard] + len(windows)))
            if whole > first:
                out_NL[order_N[first:whole]] = windows[sorted_N[first:whole] - self._bases[shard]]
            if last > whole:
                out_NL[order_N[whole:last]] = self._gather_across(sorted_N[whole:last], length)
        return out_NL

    def _windows(self, length: int) -> list[np.ndarray]:
        """For each shard a view [tokens - length + 1, length] of all windows that lie whole in it."""
        if length not in self._views:
            self._views[length] = [
                sliding_window_view(shard, length) if len(shard) >= length else np.empty((0, length), shard.dtype)
                for shard in self._shards
            ]
        return self._views[length]

    def _gather_across(self, starts_N: np.ndarray, length: int) -> np.ndarray:
        return self.take(starts_N[:, None] + np.arange(length))

    def take(self, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of the stream: int64, of the same shape."""
        shard_of = np.searchsorted(self._bases, places, side="right") - 1
        out = np.empty(places.shape, dtype=np.int64)
        for shard in np.unique(shard_of):
            here = shard_of == shard
            out[here] = self._shards[shard][places[here] - self._bases[shard]]
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


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        what = "missing" if found is None else f"{found} bytes instead of {size}"
        raise UserError(f"{path}: {what}; the corpus is damaged: delete its folder and run `cramming prepare` again")


def damage(path: Path, expected: str) -> str | None:
    """What is wrong with a file whose SHA-256 should be `expected`, in words; None: nothing."""
    if not path.is_file():
        return f"{path}: missing; the corpus is damaged"
    if file_sha256(path) != expected:
        return f"{path}: its SHA-256 is not the manifest's; the file was altered"
    return None
