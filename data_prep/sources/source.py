"""Where text comes from. A source is a stream of documents that can be opened again and again.

    embedded   generated from a seed, no download (data_prep/sources/generated.py)
    text       local files, plain or compressed: text, JSON lines, CSV, TSV, parquet (data_prep/sources/files.py reads
    them),
               Wikipedia's XML dumps and WET files (data_prep/sources/dumps.py)
    hub        a data set of the Hugging Face hub, streamed (data_prep/sources/hub.py)

A source also says what it consists of (`inventory`), so that the manifest can name it and a later run can tell that a
file has changed, and how far it has been read, for the progress bar.
"""

import abc
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from cramming.config import UserError, expand_home, file_sha256, folder_name
from cramming.data.corpus import Curriculum
from data_prep.dedup.decontaminate import DecontaminationConfig
from data_prep.dedup.near import NearDuplicateConfig
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.quality import FilterConfig
from data_prep.sources import dumps, files

MOST_WORKERS = 8  # by themselves: the main process reads and normalises for about so many


class Damage(NamedTuple):
    """Why something that the source holds cannot be read as text, and how many bytes it has."""

    reason: str
    bytes: int


class Document(NamedTuple):
    """One document. `ids` are its tokens where the source is already tokenized; `text` is empty then.

    A long one may come in parts, numbered from 0, with nothing of the same `source` between them. With `damage` it is
    none: it stands for what had to be left out, so that the ledger can count it.
    """

    text: str
    id: str
    source: str
    ids: np.ndarray | None = None
    damage: Damage | None = None
    part: int = 0

    @property
    def length(self) -> int:
        """Characters, or tokens where the source is tokenized."""
        return len(self.text) if self.ids is None else len(self.ids)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`, the part that every source has."""

    name: str
    source: str
    corpus: str | None = None  # folder of the corpus; null: named by the hash of the settings, in `corpora`
    workers: int | None = None  # processes; null: one per usable core, at most `MOST_WORKERS`
    seed: int = 0
    license: str | None = None
    validation_fraction: float = 0.01
    max_documents: int | None = None
    clean: CleanConfig = field(default_factory=CleanConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    deduplicate: bool = True
    near_duplicates: NearDuplicateConfig = field(default_factory=NearDuplicateConfig)
    decontaminate: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    orders: list[Curriculum] = field(default_factory=lambda: ["sentence_length", "compressibility"])
    shard_tokens: int = 1 << 26

    def __post_init__(self) -> None:
        folder_name(self.name, "data.name", "corpora")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is not between 0 and 2^63")
        for name in ("workers", "max_documents", "shard_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if (self.workers or 0) > 256:
            raise ValueError(f"workers={self.workers} is above 256; more than one per core only takes memory")

    @property
    def processes(self) -> int:
        """Worker processes beside the main one: as set, else one per usable core."""
        if self.workers:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MOST_WORKERS)


@dataclass(frozen=True, kw_only=True)
class TextConfig(DataConfig):
    """`data=text`."""

    paths: list[str]
    # null: by each file's name
    format: Literal["txt", "jsonl", "csv", "tsv", "parquet", "wikipedia", "wet"] | None = None
    documents: Literal["block", "line", "file", "record"] = "block"
    text_field: str = "text"
    damaged: Literal["refuse", "drop"] = "refuse"  # empty and binary files, bytes that are not UTF-8


ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of a byte that is not UTF-8


class Source(abc.ABC):
    """What a source can do. `total` is the amount to read (None: unknown) and `position` the amount read so far."""

    config: DataConfig
    total: float | None = None
    position: float = 0
    unit: str = "documents"
    costly: bool = False  # to read it twice takes too long
    in_parts: bool = False  # long documents may come so
    earlier: list[dict[str, Any]] | None = None  # the inventory of the run that this one goes on with

    @abc.abstractmethod
    def inventory(self) -> list[dict[str, Any]]:
        """What the source consists of, for the manifest: name, kind, license and what identifies the content."""

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """What differs from the inventory of an earlier run, in words; None if nothing does."""
        now = self.inventory()
        return None if inventory == now else ", ".join(entry["name"] for entry in now)

    def pin(self, inventory: list[dict[str, Any]]) -> None:
        """Read what an earlier run with this inventory has read, where the source can still be had as it was then."""
        self.earlier = inventory

    def parts(self) -> list[str]:
        """The values of `Document.source`, where they are not the names of the inventory."""
        return []

    @abc.abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents from the beginning, in the same order at every call."""

    def remark(self) -> str | None:
        """What a user should know of how the documents ended, once `documents` was read."""
        return None

    def sample_documents(self, characters: float) -> Iterator[Document]:
        """The documents to draw a sample of so many characters from: all of them, unless the source is `costly`."""
        return self.documents()

    def tokenizer_file(self) -> Path | None:
        """The tokenizer that the source's own token ids belong to."""
        return None


class TextSource(Source):
    """Local files, read one after the other in the order of `paths`; a glob's matches are sorted."""

    config_class: ClassVar[type[DataConfig]] = TextConfig
    config: TextConfig
    unit = "B"

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        self.paths = [path for pattern in config.paths for path in _matches(pattern)]
        if not self.paths:
            raise UserError("data.paths is empty; name text files, for example data.paths='[a.txt,\"wiki/*.xz\"]'")
        if duplicates := {str(path) for path in self.paths if self.paths.count(path) > 1}:
            raise UserError(f"data.paths names a file twice: {', '.join(sorted(duplicates))}")
        self.formats = [config.format or files.format_of(path) for path in self.paths]
        if config.documents == "record" and "txt" in self.formats:
            path = self.paths[self.formats.index("txt")]
            raise UserError(f"{path}: plain text has no records; set data.documents=block, line or file")
        for kind in self.formats:
            dumps.require_package(kind)
        self.in_parts = "txt" in self.formats
        self._sizes = [_readable_size(path) for path in self.paths]
        self.total = sum(self._sizes)

    def inventory(self) -> list[dict[str, Any]]:
        return [
            {"name": str(path), "kind": "text", "license": self.config.license}
            | {
                "bytes": path.stat().st_size,
                "mtime_ns": path.stat().st_mtime_ns,
                "sha256": file_sha256(path),
            }
            for path in self.paths
        ]

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        then = {entry["name"]: entry for entry in inventory}
        if then.keys() != set(map(str, self.paths)):
            return ", ".join(sorted(then.keys() ^ set(map(str, self.paths))))
        for path in self.paths:
            if not path.is_file():
                return str(path)
            old, now = then[str(path)], path.stat()
            same_time = now.st_size == old["bytes"] and now.st_mtime_ns == old["mtime_ns"]
            if not same_time and (now.st_size != old["bytes"] or file_sha256(path) != old["sha256"]):
                return str(path)
        return None

    def documents(self) -> Iterator[Document]:
        self.position = before = 0
        for path, kind, size in zip(self.paths, self.formats, self._sizes):
            file = files.OpenFile(path, lenient=self.config.damaged == "drop")
            number = -1
            try:
                for text, part in self._texts(file, kind):
                    number += part == 0
                    self.position = before + file.position
                    damage = _damage_of(text, file)
                    name = f"{path}:{number} from its part {part + 1} on" if part else f"{path}:{number}"
                    yield Document(text, name, str(path), damage=damage, part=part)
            except files.UnreadableError as error:
                if not file.lenient:
                    raise
                yield Document("", str(path), str(path), damage=Damage(error.reason, size))
            else:
                if number < 0 and file.lenient:
                    yield Document("", str(path), str(path), damage=Damage("empty_file", size))
            before += size
        self.position = before

    def _texts(self, file: files.OpenFile, kind: str) -> Iterator[files.Part]:
        if reader := (files.RECORD_READERS | dumps.READERS).get(kind):
            return ((text, 0) for text in reader(file, self.config.text_field))
        return files.documents_of(files.read_lines(file), self.config.documents, self.config.clean.max_characters)


def _damage_of(text: str, file: files.OpenFile) -> Damage | None:
    """Only what stands in the file: a record's own escape for NUL is a control character as any other."""
    broken, binary = file.escaped and ESCAPED_BYTE.search(text), file.binary and "\0" in text
    reason = "not_utf8" if broken else "binary" if binary else None
    return Damage(reason, len(text.encode(errors="replace"))) if reason else None  # an escaped byte becomes one again


def _matches(pattern: str) -> list[Path]:
    path = expand_home(pattern, "data.paths")
    if path.is_dir():
        raise UserError(f"data.paths: {pattern} is a folder; name its files, for example '{pattern}/*.txt'")
    if path.is_file():
        return [_with_a_name(path)]
    if path.exists():
        raise UserError(f"data.paths: {pattern} is no regular file, and text is read more than once; copy it into one")
    if not any(sign in pattern for sign in "*?["):
        raise UserError(f"data.paths: no file {pattern} (relative to {Path.cwd()})")
    root = Path(path.anchor) if path.is_absolute() else Path()
    found = sorted(match for match in root.glob(str(path.relative_to(root))) if match.is_file())
    if not found:
        raise UserError(f"data.paths: nothing matches {pattern} (relative to {Path.cwd()})")
    return list(map(_with_a_name, found))


def _with_a_name(path: Path) -> Path:
    """The path itself. UserError: the manifest, which is UTF-8, could not name it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode(errors="backslashreplace").decode()
        raise UserError(f"data.paths: the name of {shown} is not UTF-8; rename it") from None
    return path


def _readable_size(path: Path) -> int:
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def limited(documents: Iterator[Document], source: Source) -> Iterator[Document]:
    """The first `max_documents` of these, which are the source's; one in parts counts once.

    Where documents come whole nothing is read behind the last.
    """
    begun, limit = 0, source.config.max_documents
    for document in documents:
        begun += document.part == 0
        if limit is not None and begun > limit:
            return
        yield document
        if begun == limit and not source.in_parts:
            return
