"""Where text comes from: a table of sources, each a stream of documents that can be opened again and again.

    embedded   generated from a seed, no download (data_prep/embedded)
    text       local files: text, JSON lines, CSV, TSV, parquet, plain or compressed
    hub        a data set of the Hugging Face hub, streamed; with text, or already tokenized (`ids_field`)

A source also says what it consists of (`inventory`), so that the manifest can name it and a later run can tell that a
file has changed, and how far it has been read, for the progress bar.
"""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from cramming.config import UserError
from cramming.data.shards import file_sha256
from data_prep import files
from data_prep.clean import CleanConfig

PROBE_SECONDS = 5


class Document(NamedTuple):
    """One document. `ids` are its tokens where the source is already tokenized; `text` is empty then."""

    text: str
    id: str
    source: str
    ids: np.ndarray | None = None


class ConnectionLostError(UserError):
    """The network failed midway: what was prepared so far is kept and the same command goes on."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`, the part that every source has."""

    name: str
    source: str
    corpus: str | None = None  # folder of the corpus; null: named by the hash of the settings, in `corpora`
    workers: int | None = None  # tokenizing threads; null: one per usable core
    seed: int = 0
    license: str | None = None
    validation_fraction: float = 0.01
    max_documents: int | None = None
    deduplicate: bool = True
    clean: CleanConfig = field(default_factory=CleanConfig)
    shard_tokens: int = 1 << 26

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must be at least 0 and below 1")
        for name in ("workers", "max_documents", "shard_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    @property
    def threads(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class TextConfig(DataConfig):
    """`data=text`."""

    paths: list[str]
    format: Literal["txt", "jsonl", "csv", "tsv", "parquet"] | None = None  # null: by each file's name
    documents: Literal["block", "line", "file", "record"] = "block"
    text_field: str = "text"


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig(DataConfig):
    """`data=embedded`."""

    size: int


@dataclass(frozen=True, kw_only=True)
class HubConfig(DataConfig):
    """`data=hub` and its presets. `dataset` is a hub name, or a local folder that `datasets` can load."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    ids_field: str | None = None  # a column of token ids, instead of text
    tokenizer_file: str | None = None  # the data set's own tokenizer.json, which `ids_field` needs

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ids_field is None) != (self.tokenizer_file is None):
            raise ValueError("ids_field and tokenizer_file belong together: ids mean nothing without their tokenizer")


class Source:
    """What a source can do. `total` is the amount to read (None: unknown) and `position` the amount read so far."""

    total: float | None = None
    position: float = 0
    unit: str = "documents"

    def inventory(self) -> list[dict[str, Any]]:
        """What the source consists of, for the manifest: name, kind, license and what identifies the content."""
        raise NotImplementedError

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """What differs from the inventory of an earlier run, in words; None if nothing does."""
        now, then = ({entry["name"] for entry in part} for part in (self.inventory(), inventory))
        return None if now == then else f"{', '.join(sorted(now ^ then))}"

    def documents(self) -> Iterator[Document]:
        raise NotImplementedError

    def sample_documents(self) -> Iterator[Document]:
        """The documents to train a tokenizer on; every one of them unless reading them twice is too dear."""
        return self.documents()

    def tokenizer_file(self) -> Path | None:
        """The tokenizer that the source's own token ids belong to."""
        return None


class TextSource(Source):
    """Local files, read one after the other in the order of `paths`; a glob's matches are sorted."""

    config_class: ClassVar[type[DataConfig]] = TextConfig
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
        self._sizes = [path.stat().st_size for path in self.paths]
        self.total = sum(self._sizes)

    def inventory(self) -> list[dict[str, Any]]:
        return [
            {"name": str(path), "kind": "text", "license": self.config.license}
            | {"bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": file_sha256(path)}
            for path in self.paths
        ]

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        then = {entry["name"]: entry for entry in inventory}
        if then.keys() != set(map(str, self.paths)):
            return ", ".join(sorted(then.keys() ^ set(map(str, self.paths))))
        for path in self.paths:
            old, now = then[str(path)], path.stat()
            same_time = now.st_size == old["bytes"] and now.st_mtime_ns == old["mtime_ns"]
            if not same_time and (now.st_size != old["bytes"] or file_sha256(path) != old["sha256"]):
                return str(path)
        return None

    def documents(self) -> Iterator[Document]:
        self.position = before = 0
        for path, kind, size in zip(self.paths, self.formats, self._sizes):
            file = files.OpenFile(path)
            for number, text in enumerate(self._texts(file, kind)):
                self.position = before + file.position
                yield Document(text, f"{path}:{number}", str(path))
            before += size
        self.position = before

    def _texts(self, file: files.OpenFile, kind: str) -> Iterator[str]:
        if kind in files.RECORD_READERS:
            return files.RECORD_READERS[kind](file, self.config.text_field)
        group = files.TEXT_DOCUMENTS[self.config.documents]
        return group(files.read_lines(file), self.config.clean.max_characters)


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise UserError(f"data.paths: {pattern} is a folder; name its files, for example '{pattern}/*.txt'")
    if path.is_file():
        return [path]
    if not any(sign in pattern for sign in "*?["):
        raise UserError(f"data.paths: no file {pattern} (relative to {Path.cwd()})")
    root = Path(path.anchor) if path.is_absolute() else Path()
    found = sorted(match for match in root.glob(str(path.relative_to(root))) if match.is_file())
    if not found:
        raise UserError(f"data.paths: nothing matches {pattern} (relative to {Path.cwd()})")
    return found


class EmbeddedSource(Source):
    """The generated corpus: a pure function of seed and size, so its identity is its generator's source code."""

    config_class: ClassVar[type[DataConfig]] = EmbeddedConfig

    def __init__(self, config: EmbeddedConfig) -> None:
        self.config = config

    def inventory(self) -> list[dict[str, Any]]:
        code = hashlib.sha256()
        for path in sorted((Path(__file__).parent / "embedded").glob("*.py")):
            code.update(path.read_bytes())
        return [{"name": "embedded", "kind": "embedded", "license": self.config.license, "sha256": code.hexdigest()}]

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        return None if inventory == self.inventory() else "the generator of the embedded corpus"

    def documents(self) -> Iterator[Document]:
        from data_prep import embedded

        self.position = 0
        for document in embedded.documents(self.config.seed, self.config.size):
            self.position += 1
            yield document


class HubSource(Source):
    """A data set of the hub, streamed. Without network it says so at once instead of retrying for half a minute."""

    config_class: ClassVar[type[DataConfig]] = HubConfig

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        self.local = Path(config.dataset).is_dir()
        self.total = config.max_documents

    def inventory(self) -> list[dict[str, Any]]:
        config = self.config
        name = "/".join(filter(None, (config.dataset, config.subset, config.split)))
        return [{"name": name, "kind": "hub", "license": config.license, "revision": config.revision}]

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        return None if inventory == self.inventory() else self.inventory()[0]["name"]

    def documents(self) -> Iterator[Document]:
        return self._documents(self._open())

    def sample_documents(self) -> Iterator[Document]:
        # A second pass over a whole hub data set is hours of download: take the beginning of a shuffled stream.
        data = self._open()
        return self._documents(data if self.config.max_documents else data.shuffle(self.config.seed, buffer_size=1000))

    def _documents(self, data: Any) -> Iterator[Document]:
        self.position = 0
        field = self.config.ids_field or self.config.text_field
        name = self.inventory()[0]["name"]
        iterator = iter(data)
        while (record := self._next(iterator)) is not None:
            if field not in record:
                raise files.missing_field(name, field, record)
            self.position += 1
            place = f"{name}:{self.position:.0f}"
            if self.config.ids_field:
                yield Document("", place, name, np.asarray(record[field], dtype=np.int64))
            else:
                yield Document(files.text_value(place, field, record[field]), place, name)

    def _next(self, iterator: Iterator[Any]) -> Any:
        try:
            return next(iterator, None)
        except (OSError, ConnectionError, TimeoutError) as error:
            raise ConnectionLostError(
                f"data.dataset={self.config.dataset}: reading broke off after {self.position:.0f} documents"
                f" ({_one_line(error)}); run the same command again to go on"
            ) from None

    def _open(self) -> Any:
        self._require_network()
        import datasets

        config = self.config
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(
                config.dataset, config.subset, split=config.split, revision=config.revision, streaming=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"data.dataset={config.dataset}: cannot be opened: {_one_line(error)}") from None

    def tokenizer_file(self) -> Path | None:
        config = self.config
        if config.tokenizer_file is None:
            return None
        if self.local:
            return Path(config.dataset) / config.tokenizer_file
        self._require_network()
        import huggingface_hub

        try:
            found = huggingface_hub.hf_hub_download(
                config.dataset, config.tokenizer_file, repo_type="dataset", revision=config.revision
            )
        except (OSError, ValueError) as error:
            raise UserError(f"data.tokenizer_file={config.tokenizer_file}: {_one_line(error)}") from None
        return Path(found)

    def _require_network(self) -> None:
        if self.local:
            return
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        reason = "HF_HUB_OFFLINE is set" if offline else _why_unreachable(endpoint)
        if reason:
            raise UserError(
                f"data.dataset={self.config.dataset}: the Hugging Face hub cannot be reached ({reason});"
                " use local files: cramming prepare data=text data.paths='[your.txt]', or data=embedded"
            )


def _why_unreachable(endpoint: str) -> str | None:
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS):
            return None
    except urllib.error.HTTPError:  # an answer, whatever it says
        return None
    except OSError as error:
        return _one_line(getattr(error, "reason", error))


def _one_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


SOURCES: dict[str, Any] = {"embedded": EmbeddedSource, "text": TextSource, "hub": HubSource}


def limited(documents: Iterator[Document], config: DataConfig) -> Iterator[Document]:
    """The first `max_documents`."""
    return islice(documents, config.max_documents)
