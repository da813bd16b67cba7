"""`manifest.json`: everything known about a corpus, and the SHA-256 of every other file of its folder.

It is written last, and guards itself by `checksum`: the SHA-256 of its own text with 64 zeros in the checksum's place.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cramming.config import UserError, build, expand_home, plain_numbers, settings_hash

FORMAT_VERSION = 2
TEXT_VERSION = 5  # raised when `prepare` makes other bytes of the same text and settings
FILTER_VERSIONS = {
    "max_duplicate_lines": 2
}  # raised when one filter alone removes other documents at the same limit
INDEX_DTYPE = np.dtype("<u8")  # of the offsets at which documents begin
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
NO_CHECKSUM = "0" * 64
DAMAGED = "delete the folder and run `cramming prepare` again"
_NOT_CONTENT = (
    "corpus",
    "workers",
    "ray",
)  # settings that say where or how fast, not what a corpus contains

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
                raise ValueError(
                    f"{name} has {', '.join(found) or 'none'}, not {', '.join(SpecialIds._fields)}"
                )


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
    sources: list[
        dict[str, Any]
    ]  # name, kind, license, and for files: path, bytes, mtime_ns, sha256
    counts: dict[str, int]  # documents read, kept, unknown tokens ...
    removed: dict[str, int]  # reason -> documents, over all stages
    splits: dict[Split, list[Shard]] = field(default_factory=dict)
    stages: list[StageLine] = field(default_factory=list)  # in the order of the pipeline
    statistics: dict[str, Any] = field(default_factory=dict)  # what the corpus card shows
    decontamination: dict[str, Any] = field(
        default_factory=dict
    )  # what was compared, and found, per task
    orders: dict[str, str] = field(default_factory=dict)  # name of an order -> its file
    files: dict[str, str] = field(
        default_factory=dict
    )  # every further file of the folder -> SHA-256
    checksum: str = NO_CHECKSUM

    def to_json(self) -> str:
        """The text of manifest.json, with its checksum."""
        text = (
            json.dumps({**self._node(), "checksum": NO_CHECKSUM}, indent=1, sort_keys=True) + "\n"
        )
        return text.replace(NO_CHECKSUM, hashlib.sha256(text.encode()).hexdigest(), 1)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read and check `manifest.json`. UserError: not JSON, another format, wrong fields, altered."""
        node, problem = {}, None
        try:
            text = path.read_text(encoding="utf-8")
            node = json.loads(text)
            checksum = str(node.get("checksum"))
            unsigned = text.replace(checksum, NO_CHECKSUM, 1) if checksum else ""
            if node["format"] != FORMAT_VERSION:
                problem = f"corpus format {node['format']}, this version reads {FORMAT_VERSION}"
            elif hashlib.sha256(unsigned.encode()).hexdigest() != checksum:
                problem = "its checksum is not that of its text"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problem = "not a corpus manifest"
        if problem:
            raise UserError(f"{path}: {problem}; {DAMAGED}")
        return build(cls, node, str(path))

    def sha256(self) -> str:
        """Fingerprint of the corpus's content: the manifest without the times of its source files."""
        node = self._node()
        for source in node["sources"]:
            source.pop("mtime_ns", None)
        return hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()

    def _node(self) -> dict[str, Any]:
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name != "checksum"
        }

    def hashes(self) -> dict[str, str]:
        """Every file that the folder holds beside the manifest, with its SHA-256."""
        shards = [shard for part in self.splits.values() for shard in part]
        data = {s.file: s.sha256 for s in shards} | {s.index_file: s.index_sha256 for s in shards}
        return {TOKENIZER: self.tokenizer.sha256, **data, **self.files}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of the two on-disk types that holds every id."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")


def content_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a corpus contains: `data` and `tokenizer`."""
    data = {key: value for key, value in config["data"].items() if key not in _NOT_CONTENT}
    return {"data": plain_numbers(data), "tokenizer": plain_numbers(config["tokenizer"])}


def corpus_hash(config: Mapping[str, Any]) -> str:
    """The hash that names a corpus: of its content settings, the format version, and those of the rules for text.
    Filters that are off are left out: a new one renames no corpus."""
    settings = content_settings(config)
    limits = settings["data"].get("filters") or {}
    active = {
        name: limit for name, limit in limits.items() if limit is not None and limit is not False
    }
    active |= {f"{name} version": FILTER_VERSIONS[name] for name in active.keys() & FILTER_VERSIONS}
    return settings_hash(
        FORMAT_VERSION, TEXT_VERSION, {**settings, "data": {**settings["data"], "filters": active}}
    )


def corpus_folder(recipe: Mapping[str, Any], corpora: Path) -> Path:
    """Return the corpus of a recipe: `data.corpus`, or `<corpora>/<data>-<tokenizer>-<vocab>-<hash>`."""
    given = recipe["data"].get("corpus")
    if given:
        return expand_home(given, "data.corpus")
    data, tokenizer = content_settings(recipe).values()
    kind = "file" if tokenizer.get("path") else f"{tokenizer['kind']}-{tokenizer['vocab_size']}"
    return corpora / f"{data['name']}-{kind}-{corpus_hash(recipe)}"
