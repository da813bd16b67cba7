"""Where text comes from: a source is a stream of documents that can be opened again and again.

It also says what it consists of (`inventory`), so that the manifest can name it and a later run can tell that it has
changed, and how far it has been read, for the progress bar. To add one: a module here with a `DataConfig` and a
`Source`, a row in the table `SOURCES` (mix.py), and conf/data/<name>.yaml.
"""

import abc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import model_validator

from cramming.config import Count, Fraction, Section, Seed, folder_name
from cramming.data.corpus import Curriculum
from data_prep.dedup.decontaminate import DecontaminationConfig
from data_prep.dedup.near import NearDuplicateConfig
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.quality import FilterConfig
from data_prep.sources.plain_text import Stretch
from data_prep.workers import grouped

CHUNK_DOCUMENTS = 512
CHUNK_CHARACTERS = 1 << 20


class Damage(NamedTuple):
    """Why something that the source holds cannot be read as text, and how many bytes it has."""

    reason: str
    bytes: int


class Document(NamedTuple):
    """One document. `ids` are its tokens where the source is already tokenized; `text` is empty then.

    A long one may come in parts, numbered from 0, with nothing of the same `source` between them. With `damage` it is
    none: it stands for what had to be left out, so that it is counted.
    """

    text: str
    id: str
    source: str
    ids: np.ndarray | None = None
    damage: Damage | None = None
    part: int = 0

    @property
    def content(self) -> str | np.ndarray:
        """The text, or the tokens where the source is tokenized."""
        return self.text if self.ids is None else self.ids

    @property
    def is_text(self) -> bool:
        """Whether there is text to work on."""
        return self.ids is None and self.damage is None


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


@dataclass(frozen=True)
class Documents:
    """A chunk's documents in columns [D]: which part of a document each is, and its place among `sources`. `name` gives
    its `Document.id`; `others`, by place, are those that are no text."""

    part_D: np.ndarray
    source_D: np.ndarray
    sources: list[str]
    name: Callable[[int], str]
    others: Mapping[int, Document] = field(default_factory=dict)


class Parts(NamedTuple):
    """What a worker read of a chunk's stretches: the number of documents of each, and which part each document is."""

    documents_S: list[int]
    part_D: np.ndarray


Task = Sequence[str | np.ndarray | None] | Sequence[Stretch]


class Chunk(abc.ABC):
    """Documents that follow each other in a source, with the work on their text left to the workers.

    `task` is what a worker gets: for each document its text, its token ids, or None where it is damaged; or stretches
    of files that it is to read.
    """

    task: Task
    void: bool = False  # its documents come from what `again` of another chunk gave

    @abc.abstractmethod
    def documents(self, parts: Parts) -> Documents:
        """The documents, of which a worker has read `parts`."""

    def again(self) -> "Iterator[Chunk]":
        """What to do in place of a task that no worker could do."""
        return iter(())


class ReadChunk(Chunk):
    """Documents that are read already."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents
        self.task = [None if document.damage else document.content for document in documents]

    def documents(self, parts: Parts) -> Documents:
        given = self._documents
        index = {
            source: place
            for place, source in enumerate(dict.fromkeys(document.source for document in given))
        }
        return Documents(
            np.array([document.part for document in given]),
            np.array([index[document.source] for document in given]),
            list(index),
            lambda place: given[place].id,
            {place: document for place, document in enumerate(given) if not document.is_text},
        )


def in_chunks(documents: Iterable[Document]) -> Iterator[Chunk]:
    """These documents for the workers."""
    return map(
        ReadChunk,
        grouped(
            documents, CHUNK_DOCUMENTS, lambda document: len(document.content), CHUNK_CHARACTERS
        ),
    )


class Source(abc.ABC):
    """What a source can do. `total` is the amount to read (None: unknown) and `position` the amount read so far."""

    config: DataConfig
    total: float | None = None
    position: float = 0
    unit: str = "documents"
    costly: bool = False  # to read it twice takes too long
    large: bool = False  # known to have work for many processes
    in_parts: bool = False  # long documents may come so
    packages: Sequence[Package] = ()
    earlier: list[dict[str, Any]] | None = (
        None  # the inventory of the run that this one goes on with
    )

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

    def chunks(self) -> Iterator[Chunk]:
        """The documents up to `max_documents`, with what can be done elsewhere left to do."""
        return in_chunks(limited(self.documents(), self))

    def remark(self) -> str | None:
        """What a user should know of how the documents ended, once `documents` was read."""
        return None

    def sample_documents(self) -> Iterator[Document]:
        """The documents to draw a sample from. Of a `costly` source no more are read than the sample needs."""
        return self.documents()

    def tokenizer_file(self) -> Path | None:
        """The tokenizer that the source's own token ids belong to."""
        return None


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
