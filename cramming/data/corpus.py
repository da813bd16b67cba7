"""The corpus folder: the one on-disk format between `prepare` and `pretrain`.

    manifest.json                        written last; a folder without it is not a corpus
    tokenizer.json                       a `tokenizers` file; beside it tokenizer_config.json, for AutoTokenizer
    train-00000.bin  train-00000.idx     one shard: tokens, and where documents begin in it
    validation-00000.bin ...
    order-<name>.npy                     document numbers of the training split in another order (see `Corpus.stream`)
    corpus_card.md  card/*.svg           what a person reads about the corpus
    tasks/                               only the embedded corpus: its fine-tuning tasks

The manifest (cramming/data/manifest.py) names every file with its SHA-256.

A shard is a flat little-endian token stream, uint16, or uint32 when the vocabulary has more than 65,536 entries. Every
document is `[CLS] tokens [SEP]` and documents lie back to back. The `.idx` file holds the uint64 offsets, from the
start of its shard, of the documents that begin there. All shards of a split but the last hold the same number of
tokens: the stream is cut where the shard is full, so a document may lie across shards and may even be longer than one.
Sequence length is not part of the format: readers take windows of any length at any place (cramming/data/stream.py).
"""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import numpy as np

from cramming.config import UserError, file_sha256
from cramming.data.manifest import (
    FORMAT_VERSION,
    INDEX_DTYPE,
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
from cramming.data.stream import OrderedStream, TokenStream
from cramming.files import Stamp, overwrite_atomically, sync

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
Curriculum = Literal["sentence_length", "compressibility", "token_prevalence"]  # each an order file; ascending
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)
REVERSED = "_reversed"
ORDERS = ("shuffled", *(name + end for name in ("source", *CURRICULA) for end in ("", REVERSED)))


class ShardWriter:
    """Writes one split of a corpus as a stream. A shard becomes visible whole, by renaming; memory is one append.

    `finished` are the shards of an earlier, interrupted run: writing goes on behind them (see `resume_point`).
    """

    def __init__(
        self, folder: Path, split: Split, dtype: np.dtype[Any], shard_tokens: int, finished: list[Shard]
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
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
        sync(self._part.fileno())
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
    """A whole corpus folder, opened for reading; shards are memory-mapped, nothing is loaded.

    So what is read hours later is what the files hold then. Of each file that is hashed the times are noted: `changed`
    names those that were written to since, whatever they hold by now.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.manifest_sha256 = manifest.sha256()
        self.vocab_size = manifest.tokenizer.vocab_size
        self.special_ids = SpecialIds(**manifest.tokenizer.special_ids)
        self._checked: dict[str, Stamp] = {}  # the files whose SHA-256 was compared
        self._mapped: dict[str, Stamp] = {}

    @classmethod
    def open(cls, folder: Path, *, verify: bool | Split = False) -> "Corpus":
        """Open and check: the manifest's checksum, file sizes, the tokenizer's SHA-256.

        `verify`: every file's SHA-256, or, named, those of one split.

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

    def _check(self, verify: bool | Split) -> None:
        itemsize = np.dtype(self.manifest.dtype).itemsize
        for shard in (shard for split in SPLITS for shard in self.manifest.splits[split]):
            _check_size(self.folder / shard.file, shard.tokens * itemsize)
            _check_size(self.folder / shard.index_file, shard.documents * INDEX_DTYPE.itemsize)
        hashes = self.manifest.hashes()
        split = [n for n in hashes if n.startswith(f"{verify}-")]
        for name in hashes if verify is True else (TOKENIZER, *split):
            stamp = Stamp.at(self.folder / name)
            if problem := damage(self.folder / name, hashes[name]):
                raise UserError(f"{problem}; delete the folder and run `cramming prepare` again")
            assert stamp, "what could be hashed could be opened"
            self._checked[name] = stamp

    def changed(self, *, last: bool = False) -> list[str]:
        """Names of the checked files that were written to, exchanged or taken away since; nothing of them is read.

        One that the system tells nothing of for the moment counts at the `last` look only: the next one sees as much.
        """
        return [name for name, stamp in self._checked.items() if not self._is_as_checked(name, stamp, last)]

    def _is_as_checked(self, name: str, stamp: Stamp, last: bool) -> bool:
        try:
            is_unchanged = stamp.is_unchanged(Stamp.at(self.folder / name))
        except OSError:
            is_unchanged = not last
        return is_unchanged and self._mapped.get(name, stamp) == stamp

    def is_as_prepared(self, name: str) -> bool | None:
        """Whether a file now has the SHA-256 that the manifest knows; None where it cannot be read."""
        try:
            return damage(self.folder / name, self.manifest.hashes()[name]) is None
        except OSError:
            return None

    @property
    def tokenizer_file(self) -> Path:
        """The corpus's tokenizer.json."""
        return self.folder / TOKENIZER

    def stream(self, split: Split, order: str = "source") -> TokenStream:
        """The tokens of one split as one flat stream, its documents in this order (`shuffled` is the reader's task).

        UserError: the corpus has no such order.
        """
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        stream = TokenStream(self.folder, self.manifest.splits[split], dtype, f"{self.folder}, {split} split")
        self._mapped |= stream.mapped
        if order in ("shuffled", "source"):
            return stream
        order_D = self._order(order.removesuffix(REVERSED), stream)
        return OrderedStream(stream, order_D[::-1] if order.endswith(REVERSED) else order_D)

    def _order(self, name: str, stream: TokenStream) -> np.ndarray:
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
