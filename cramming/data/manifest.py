"""`manifest.json`: everything known about a corpus, and the SHA-256 of every other file of its folder.

It is written last, and guards itself by `checksum`: the SHA-256 of its own text with 64 zeros in the checksum's place.
Format 1, which had neither checksum nor stages, can still be read.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cramming.config import UserError, build, expand_home, settings_hash

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
# Raised when `prepare` makes other bytes of the same text and settings.
TEXT_VERSION = 2
INDEX_DTYPE = np.dtype("<u8")  # of the offsets at which documents begin
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
NO_CHECKSUM = "0" * 64
DAMAGED = "delete the folder and run `cramming prepare` again"
SINCE_FORMAT_2 = ("stages", "statistics", "decontamination", "orders", "files")

_NOT_CONTENT = ("corpus", "workers")  # settings that say where or how fast, not what a corpus contains

Split = Literal["train", "validation"]


class SpecialIds(NamedTuple):
    """Token ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Shard:
    """One finished shard: `file` and, beside it, the index of the same stem."""

    file: str
    tokens: int
    documents: int  # that begin in this shard
    sha256: str
    index_sha256: str

    @property
    def index_file(self) -> str:
        """Name of the file with the document starts."""
        return str(Path(self.file).with_suffix(".idx"))


@dataclass(frozen=True)
class TokenizerInfo:
    """`special` maps pad, unk, cls, sep, mask to their spelling in this vocabulary."""

    kind: str
    vocab_size: int
    lowercase: bool
    sha256: str
    special: dict[str, str]
    special_ids: dict[str, int]

    def __post_init__(self) -> None:
        for name in ("special", "special_ids"):
            found = getattr(self, name)
            if sorted(found) != sorted(SpecialIds._fields):
                raise ValueError(f"{name} has {', '.join(found) or 'none'}, not {', '.join(SpecialIds._fields)}")
        if not all(0 <= number < self.vocab_size for number in self.special_ids.values()):
            raise ValueError(f"special_ids={self.special_ids} must be ids of the vocabulary, below {self.vocab_size}")


@dataclass(frozen=True)
class Dropped:
    """What one stage dropped for one reason; bytes are UTF-8 bytes of text."""

    documents: int
    bytes: int
    examples: list[str]  # short excerpts, drawn by a seeded hash


@dataclass(frozen=True)
class StageLine:
    """One stage of the preparation: what came in, what went out, what was dropped and why."""

    name: str
    documents_in: int
    bytes_in: int
    documents_out: int
    bytes_out: int
    dropped: dict[str, Dropped]
    notes: dict[str, Any]  # what only this stage has: counts, parameters


@dataclass(frozen=True)
class Manifest:
    """Everything known about a corpus. It holds no date, so the same text and settings give the same manifest."""

    format: int
    name: str
    suite_version: str
    settings_hash: str
    settings: dict[str, Any]
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerInfo
    sources: list[dict[str, Any]]  # name, kind, license, and for files: path, bytes, mtime_ns, sha256
    counts: dict[str, int]  # documents read, kept, unknown tokens ...
    removed: dict[str, int]  # reason -> documents, over all stages
    splits: dict[Split, list[Shard]] = field(default_factory=dict)
    # since format 2
    stages: list[StageLine] = field(default_factory=list)  # in the order of the pipeline
    statistics: dict[str, Any] = field(default_factory=dict)  # what the corpus card shows
    decontamination: dict[str, Any] = field(default_factory=dict)  # what was compared, and found, per task
    orders: dict[str, str] = field(default_factory=dict)  # name of an order -> its file
    files: dict[str, str] = field(default_factory=dict)  # every further file of the folder -> SHA-256
    checksum: str = NO_CHECKSUM

    def to_json(self) -> str:
        """The text of manifest.json, with its checksum."""
        text = json.dumps({**self._node(), "checksum": NO_CHECKSUM}, indent=1, sort_keys=True) + "\n"
        return text.replace(NO_CHECKSUM, hashlib.sha256(text.encode()).hexdigest(), 1)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read and check `manifest.json`; UserError as `from_json`."""
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; the file was altered: delete the folder") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, place: str) -> "Manifest":
        """Parse; `place` names the file in messages. UserError: not JSON, unknown format, wrong fields, altered."""
        try:
            node = json.loads(text)
            version = node["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{place}: not a corpus manifest; {DAMAGED}") from None
        if version not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise UserError(f"{place}: corpus format {version}, this version reads {readable}; {DAMAGED}")
        # A format-1 manifest has no checksum: one that has is a format-2 manifest whose format was altered.
        if (version >= 2 or "checksum" in node) and _checksum(text, str(node.get("checksum"))) != node.get("checksum"):
            raise UserError(f"{place}: its checksum is not that of its text; {DAMAGED}")
        return build(cls, node, place)

    def sha256(self) -> str:
        """Fingerprint of the corpus's content: the manifest without the times of its source files."""
        node = self._node()
        for source in node["sources"]:
            source.pop("mtime_ns", None)
        return hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()

    def _node(self) -> dict[str, Any]:
        """As plain data, without the checksum and what its format does not have."""
        node = dataclasses.asdict(self)
        for name in ("checksum", *(SINCE_FORMAT_2 if self.format == 1 else ())):
            del node[name]
        return node

    def hashes(self) -> dict[str, str]:
        """Every file that the folder holds beside the manifest, with its SHA-256."""
        shards = [shard for part in self.splits.values() for shard in part]
        data = {s.file: s.sha256 for s in shards} | {s.index_file: s.index_sha256 for s in shards}
        return {TOKENIZER: self.tokenizer.sha256, **data, **self.files}


def _checksum(text: str, written: str) -> str:
    return hashlib.sha256(text.replace(written, NO_CHECKSUM, 1).encode()).hexdigest() if written else ""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of the two on-disk types that holds every id."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")


def content_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a corpus contains: `data` and `tokenizer`."""
    data = {key: value for key, value in config["data"].items() if key not in _NOT_CONTENT}
    return {"data": data, "tokenizer": dict(config["tokenizer"])}


def corpus_hash(config: Mapping[str, Any]) -> str:
    """The hash that names a corpus: of its content settings, the format version, and that of the rules for text."""
    return settings_hash(FORMAT_VERSION, TEXT_VERSION, content_settings(config))


def corpus_folder(config: Mapping[str, Any]) -> Path:
    """Where the corpus of these settings lies: `data.corpus`, or `<corpora>/<data>-<tokenizer>-<vocab>-<hash>`."""
    data, tokenizer = config["data"], config["tokenizer"]
    if data.get("corpus"):
        return expand_home(data["corpus"], "data.corpus")
    kind = "file" if tokenizer.get("path") else f"{tokenizer['kind']}-{tokenizer['vocab_size']}"
    return expand_home(config["corpora"], "corpora") / f"{data['name']}-{kind}-{corpus_hash(config)}"
