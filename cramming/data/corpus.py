"""The corpus folder: the one on-disk format between `prepare` and `pretrain`.

    manifest.json                        written last; a folder without it is not a corpus (cramming/data/manifest.py)
    tokenizer.json                       a `tokenizers` file; and tokenizer_config.json, for AutoTokenizer
    train-00000.bin  train-00000.idx     one shard: tokens, and where documents begin in it
    validation-00000.bin ...
    order-<name>.npy                     document numbers of the training split in another order (see `Corpus.stream`)
    corpus_card.md  card/*.svg           what a person reads about the corpus
    tasks/                               only the embedded corpus: its fine-tuning tasks

A shard is a flat little-endian token stream, uint16, or uint32 when the vocabulary has more than 65,536 entries. Every
document is `[CLS] tokens [SEP]`, and documents lie back to back. The `.idx` file holds the uint64 offsets, from the
start of its shard, of the documents that begin there. All shards of a split but the last hold the same number of
tokens, so a document may lie across shards. Sequence length is not part of the format: readers take windows of any
length at any place (cramming/data/stream.py). data_prep/shard_writer.py writes it.
"""

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from cramming.config import UserError, file_sha256
from cramming.data.manifest import DAMAGED, INDEX_DTYPE, MANIFEST, TOKENIZER, Manifest, SpecialIds, Split, corpus_folder
from cramming.data.stream import OrderedStream, TokenStream
from cramming.files import Stamp

__all__ = ["CURRICULA", "MANIFEST", "ORDERS", "SPLITS", "TASKS", "Corpus", "Curriculum", "corpus_folder", "damage"]

TASKS = "tasks"
SPLITS: tuple[Split, ...] = get_args(Split)
Curriculum = Literal["sentence_length", "compressibility", "token_prevalence"]  # each an order file; ascending
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)
REVERSED = "_reversed"
ORDERS = ("shuffled", *(name + end for name in ("source", *CURRICULA) for end in ("", REVERSED)))


class Corpus:
    """A whole corpus folder, opened for reading; shards are memory-mapped, nothing is loaded.

    What is read hours later is what the files hold by then. `changed` names those that were verified and written to
    since.
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
        corpus = cls(folder, Manifest.load(folder / MANIFEST))
        corpus._check_sizes()
        hashes = corpus.manifest.hashes()
        of_split = [name for name in hashes if name.startswith(f"{verify}-")]
        for name in hashes if verify is True else (TOKENIZER, *of_split):
            stamp = Stamp.at(folder / name)
            if problem := damage(folder / name, hashes[name]):
                raise UserError(f"{problem}; {DAMAGED}")
            assert stamp, "what could be hashed could be opened"
            corpus._verified[name] = stamp
        return corpus

    def _check_sizes(self) -> None:
        itemsize = np.dtype(self.manifest.dtype).itemsize
        for shard in (shard for shards in self.manifest.splits.values() for shard in shards):
            expected = {shard.file: shard.tokens * itemsize, shard.index_file: shard.documents * INDEX_DTYPE.itemsize}
            for path, size in ((self.folder / name, size) for name, size in expected.items()):
                found = path.stat().st_size if path.is_file() else None
                if found != size:
                    what = "missing" if found is None else f"{found} bytes instead of {size}"
                    raise UserError(f"{path}: {what}; the corpus is damaged: {DAMAGED}")

    def changed(self, *, last: bool = False) -> list[str]:
        """Names of the verified files that were written to, exchanged or removed since; by their times, not read.

        A file whose state the system does not tell for the moment counts at the `last` look only.
        """
        return [name for name, stamp in self._verified.items() if not self._is_as_verified(name, stamp, last)]

    def _is_as_verified(self, name: str, stamp: Stamp, last: bool) -> bool:
        try:
            is_unchanged = stamp.is_unchanged(Stamp.at(self.folder / name))
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
        stream = TokenStream(self.folder, self.manifest.splits[split], dtype, f"{self.folder}, {split} split")
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
            raise UserError(
                f"train.order={name}: {self.folder} has no such order file, only: {known}; prepare it with"
                f" data.orders=[{name}]"
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
            "tokenizer": {key: getattr(manifest.tokenizer, key) for key in ("kind", "lowercase", "sha256")},
            "sources": manifest.sources,
            "settings": manifest.settings,
            "removed": manifest.removed,
            "decontamination": manifest.decontamination,
        }


def damage(path: Path, expected: str) -> str | None:
    """What is wrong with a file whose SHA-256 should be `expected`, in words; None: nothing."""
    if not path.is_file():
        return f"{path}: missing; the corpus is damaged"
    if file_sha256(path) != expected:
        return f"{path}: its SHA-256 is not the manifest's; the file was altered"
    return None
