"""Where text comes from: a source is a stream of documents that can be opened again and again.

It also says what it consists of (`inventory`), so that the manifest can name it and a later run can tell that it has
changed, and how far it has been read, for the progress bar. To add one: a module here with a `DataConfig` and a
`Source`, a row in the table `SOURCES` (mix.py), and conf/data/<name>.yaml.
"""

import abc
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from cramming.config import Count, Fraction, Section, Seed, folder_name
from cramming.data.corpus import Curriculum
from data_prep.dedup.decontaminate import DecontaminationConfig
from data_prep.dedup.near import NearDuplicateConfig
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.quality import FilterConfig

TASK_SIZE = 1 << 21  # characters, or tokens where the source is tokenized
LONGEST_TASK_SIZE = 1 << 26
TASK_DOCUMENTS = 1 << 14


class Damage(NamedTuple):
    """Why something that the source holds cannot be read as text, and how many bytes it has."""

    reason: str
    bytes: int


NULL = Damage("null", 0)  # a record without text
TextField = str | Annotated[list[str], Field(min_length=1)]


def field_names(text_field: TextField) -> tuple[str, ...]:
    """Return the fields whose texts make a document."""
    return (text_field,) if isinstance(text_field, str) else tuple(text_field)


def is_saved_to_disk(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` made the folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


class Document(NamedTuple):
    """One document: number `number` of its `origin`, which is a file or a data set.

    `source` is what counts are kept by: the origin, or a part of a mix. `ids` are its tokens where the source is
    already tokenized; `text` is empty then. A long document may come in parts, numbered from 0, with nothing of the
    same origin between them. With `damage` it stands for what had to be left out, so that it is counted. `lost` are
    templates in its sentences, by name, of which the text is not known.
    """

    text: str
    origin: str
    number: int
    source: str
    ids: np.ndarray | None = None
    damage: Damage | None = None
    part: int = 0
    lost: Mapping[str, int] | None = None

    @property
    def size(self) -> int:
        """Characters, or tokens where the source is tokenized."""
        return len(self.text) if self.ids is None else len(self.ids)


class Task(abc.ABC):
    """Documents that follow each other in a source: the unit of work, whoever does it.

    `name` identifies the documents; `position` is how far the source is read behind them. Where numbers of documents
    are `relative` they count from the origin's first one in this task: those of the tasks in front have to be added.
    """

    name: str
    position: float
    relative: bool = False

    @abc.abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield the documents."""


@dataclass(frozen=True)
class DocumentsTask(Task):
    """Documents that the main process has read."""

    name: str
    position: float
    read: list[Document]

    def documents(self) -> Iterator[Document]:
        """Yield the documents."""
        return iter(self.read)


class DataConfig(Section):
    """Section `data`, the part that every source has."""

    name: str
    source: str
    corpus: str | None = (
        None  # folder of the corpus; null: named by the hash of the settings, in `corpora`
    )
    workers: Count | None = None  # processes; null: one per usable core
    ray: str | None = None  # the address of a Ray cluster that does their work
    seed: Seed = 0
    license: str | None = None
    validation_fraction: Fraction = 0.01
    max_documents: Count | None = None
    clean: CleanConfig = CleanConfig()
    filters: FilterConfig = FilterConfig()
    deduplicate: bool = True
    near_duplicates: NearDuplicateConfig = NearDuplicateConfig()
    decontaminate: DecontaminationConfig = DecontaminationConfig()
    list_dropped: bool = False  # each dropped document is a line of dropped.jsonl
    orders: tuple[Curriculum, ...] = ("sentence_length", "compressibility")
    shard_tokens: Count = 1 << 26

    @model_validator(mode="after")
    def _names_a_folder(self) -> Self:
        folder_name(self.name, "name", "corpora")
        return self

    @property
    def processes(self) -> int | None:
        """Worker processes beside the main one: as set, else None, one per usable core."""
        return self.workers


ESCAPED_BYTE = re.compile(
    "[\udc80-\udcff]"
)  # what `surrogateescape` makes of a byte that is not UTF-8


class Package(NamedTuple):
    """An optional package: its module, the extra of this project that brings it, and what needs it."""

    module: str
    extra: str
    needed_by: str


class Source(abc.ABC):
    """Origin of documents. `total` is the amount to read (None: unknown) and `position` the amount read so far."""

    config: DataConfig
    total: float | None = None
    position: float = 0
    unit: str = "documents"
    costly: bool = False  # to read it twice takes too long
    in_parts: bool = False  # long documents may come so
    packages: Sequence[Package] = ()
    earlier: list[dict[str, Any]] | None = (
        None  # the inventory of the run that this one goes on with
    )

    @abc.abstractmethod
    def inventory(self) -> list[dict[str, Any]]:
        """Return the parts of the source for the manifest: name, kind, license and what identifies the content."""

    def changed(self, inventory: list[dict[str, Any]]) -> str | None:
        """Return in words what differs from the inventory of an earlier run; None if nothing does."""
        now = self.inventory()
        return None if inventory == now else ", ".join(entry["name"] for entry in now)

    def pin(self, inventory: list[dict[str, Any]]) -> None:
        """Read what an earlier run with this inventory has read, where the source can still be had as it was then."""
        self.earlier = inventory

    def parts(self) -> list[str]:
        """Return the values of `Document.source`, where they are not the names of the inventory."""
        return []

    @abc.abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield all documents from the beginning, in the same order at every call."""

    def tasks(self) -> Iterator[Task]:
        """Yield tasks with the documents up to `max_documents`, the same at every call.

        A document in parts is not divided, unless it is very long.
        """
        documents: list[Document] = []
        number = size = 0
        for document in limited(self.documents(), self):
            is_full = size >= TASK_SIZE or len(documents) >= TASK_DOCUMENTS
            if is_full and (document.part == 0 or size >= LONGEST_TASK_SIZE):
                yield DocumentsTask(f"{number}: {len(documents)}, {size}", self.position, documents)
                documents, number, size = [], number + 1, 0
            documents.append(document)
            size += document.size
        if documents:
            yield DocumentsTask(f"{number}: {len(documents)}, {size}", self.position, documents)

    def remark(self) -> str | None:
        """Return a remark for the user about how the documents ended, once `documents` was read."""
        return None

    def sample_documents(self) -> Iterator[Document]:
        """Return the documents to draw a sample from. Of a `costly` source no more are read than the sample needs."""
        return self.documents()

    def tokenizer_file(self) -> Path | None:
        """Return the tokenizer that the source's token ids belong to."""
        return None


def limited(documents: Iterator[Document], source: Source) -> Iterator[Document]:
    """Yield the first `max_documents` of a source's documents; one in parts counts once.

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
