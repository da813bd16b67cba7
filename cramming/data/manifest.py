"""The file `manifest.json`: the description of a corpus, with the SHA-256 of every other file of its folder.

It is written last. `checksum` is the SHA-256 of its text with 64 zeros in the place of the checksum.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cramming.config import UserError, build, expand_home, plain_numbers, settings_hash

FORMAT_VERSION = 2
TEXT_VERSION = 7  # raised when `prepare` writes other bytes for the same text and settings
# raised when one filter alone removes other documents at the same limit
FILTER_VERSIONS = {"max_duplicate_lines": 2, "max_tokens_per_character": 2}
LARGEST_VOCABULARY = 32768  # of tokenizer.vocab_size=auto
INDEX_DTYPE = np.dtype("<u8")  # type of the offsets at which documents begin
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
NO_CHECKSUM = "0" * 64
DAMAGED = "Delete the folder and run `cramming prepare` again."
# settings of `data` that do not change the content of a corpus
_NOT_CONTENT = ("corpus", "workers", "ray")

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
    """Finished shard: `file` and, beside it, the index of the same stem."""

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
    """Description of the tokenizer; `special` maps pad, unk, cls, sep, mask to their spelling in this vocabulary."""

    kind: str
    vocab_size: int
    lowercase: bool
    sha256: str
    special: dict[str, str]
    special_ids: dict[str, int]

    def __post_init__(self) -> None:
        for name in ("special", "special_ids"):
            keys = getattr(self, name)
            if sorted(keys) != sorted(SpecialIds._fields):
                raise ValueError(
                    f"{name} has {', '.join(keys) or 'none'}, not {', '.join(SpecialIds._fields)}"
                )


@dataclass(frozen=True)
class Dropped:
    """Documents that one stage dropped for one reason; bytes are UTF-8 bytes of text."""

    documents: int
    bytes: int
    examples: list[str]  # short excerpts, drawn by a seeded hash


@dataclass(frozen=True)
class StageLine:
    """Counts of one stage of the preparation: input, output, and dropped documents by reason."""

    name: str
    documents_in: int
    bytes_in: int
    documents_out: int
    bytes_out: int
    dropped: dict[str, Dropped]
    notes: dict[str, Any]  # counts and parameters that only this stage has


@dataclass(frozen=True)
class Manifest:
    """Description of a corpus. It holds no date, so the same text and settings give the same manifest."""

    format: int
    name: str
    suite_version: str
    settings_hash: str
    settings: dict[str, Any]
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerInfo
    # name, kind, license, and for files: path, bytes, mtime_ns, sha256
    sources: list[dict[str, Any]]
    counts: dict[str, int]  # documents read, kept, unknown tokens ...
    removed: dict[str, int]  # reason -> documents, over all stages
    splits: dict[Split, list[Shard]] = field(default_factory=dict)
    stages: list[StageLine] = field(default_factory=list)  # in the order of the pipeline
    statistics: dict[str, Any] = field(default_factory=dict)  # shown in the corpus card
    # the comparison with each task and its result
    decontamination: dict[str, Any] = field(default_factory=dict)
    orders: dict[str, str] = field(default_factory=dict)  # name of an order -> its file
    # every other file of the folder, beside shards, tokenizer.json and the manifest -> SHA-256
    files: dict[str, str] = field(default_factory=dict)
    checksum: str = NO_CHECKSUM

    def to_json(self) -> str:
        """Return the text of manifest.json, with its checksum."""
        node = {**self._node(), "checksum": NO_CHECKSUM}
        text = json.dumps(node, indent=1, sort_keys=True) + "\n"
        return text.replace(NO_CHECKSUM, hashlib.sha256(text.encode()).hexdigest(), 1)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read and check `manifest.json`.

        Raises UserError if it is not JSON, has another format or wrong fields, or was altered.
        """
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
            raise UserError(f"{path}: {problem}. {DAMAGED}")
        return build(cls, node, str(path))

    def sha256(self) -> str:
        """Return the hash of the corpus's content: of the manifest without the times of its source files."""
        node = self._node()
        for source in node["sources"]:
            source.pop("mtime_ns", None)
        return hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()

    def _node(self) -> dict[str, Any]:
        node = dataclasses.asdict(self)
        del node["checksum"]
        return node

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of every file of the folder beside the manifest, by name."""
        shards = list(chain.from_iterable(self.splits.values()))
        data = {shard.file: shard.sha256 for shard in shards}
        indices = {shard.index_file: shard.index_sha256 for shard in shards}
        return {TOKENIZER: self.tokenizer.sha256, **data, **indices, **self.files}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of the two on-disk types that holds every id."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")


def content_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the content of a corpus: `data` and `tokenizer`."""
    data = {key: value for key, value in config["data"].items() if key not in _NOT_CONTENT}
    return {"data": plain_numbers(data), "tokenizer": plain_numbers(config["tokenizer"])}


def corpus_hash(config: Mapping[str, Any]) -> str:
    """Return the hash in the name of a corpus: of its content settings and the versions of format, text and filters.

    Filters that are off are left out: a new filter renames no corpus.
    """
    settings = content_settings(config)
    limits = settings["data"].get("filters") or {}
    active = {
        name: limit for name, limit in limits.items() if limit is not None and limit is not False
    }
    active |= {f"{name} version": FILTER_VERSIONS[name] for name in active.keys() & FILTER_VERSIONS}
    data = {**settings["data"], "filters": active}
    return settings_hash(FORMAT_VERSION, TEXT_VERSION, {**settings, "data": data})


def corpus_folder(recipe: Mapping[str, Any], corpora: Path) -> Path:
    """Return the corpus folder of a recipe: `data.corpus`, or `<corpora>/<data>-<tokenizer>-<vocab>-<hash>`."""
    corpus = recipe["data"].get("corpus")
    if corpus:
        return expand_home(corpus, "data.corpus")
    settings = content_settings(recipe)
    tokenizer = settings["tokenizer"]
    kind = "file" if tokenizer.get("path") else f"{tokenizer['kind']}-{tokenizer['vocab_size']}"
    return corpora / f"{settings['data']['name']}-{kind}-{corpus_hash(recipe)}"
