"""What workers do first with a chunk of documents: read them where that is left to do, normalise, cut, hash.

The result is columns over documents and over the pieces they were cut into: a hundred objects for each document would
cost the main process, which takes all chunks apart, more than the work itself.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from cramming.config import UserError
from data_prep.dedup.exact import content_hash
from data_prep.filters import normalise, quality
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.quality import FilterConfig
from data_prep.sources.plain_text import Stretch
from data_prep.sources.source import Chunk, DataConfig, Document
from data_prep.stage_stats import text_bytes
from data_prep.workers import Workers

READ, NORMALISE = "read", "normalise"  # the workers' functions


class Texts(NamedTuple):
    """A chunk's texts, as read, and for each of its stretches the numbers of its texts as parts of documents."""

    texts: list[str]
    parts: list[list[int]]


class Piece(NamedTuple):
    """What normalisation made of a document, or of a part of it: the text, why it goes by the filters that are always
    on (or ""), its UTF-8 bytes and `content_hash`."""

    text: str
    reason: str
    bytes: int
    key: int
    number: int


class NormalText(NamedTuple):
    """A document's text: UTF-8 bytes as read, what became of it, and, where a filter removes it for that, the text as
    it was read."""

    bytes: int
    pieces: list[Piece]
    broken: str


@dataclass
class Normalised:
    """A chunk's normalised texts, without those that had none: token ids, and what is damaged."""

    parts: list[list[int]]
    bytes_D: list[int]  # as read, UTF-8
    pieces_D: list[int]  # how many each document was cut into
    broken: dict[int, str]  # by the document's place: the text as read, see `NormalText`
    deleted: Counter[str]
    texts: list[str]  # the pieces
    reasons_P: list[str]
    bytes_P: list[int]
    hashes_P: list[int]  # two for each

    def by_document(self) -> Iterator[NormalText]:
        """The columns, document by document."""
        hashes = iter(self.hashes_P)
        pieces = map(Piece, self.texts, self.reasons_P, self.bytes_P, hashes, hashes)
        for place, (size, count) in enumerate(zip(self.bytes_D, self.pieces_D)):
            yield NormalText(size, list(islice(pieces, count)), self.broken.get(place, ""))


def read(task: Sequence[str] | Sequence[Stretch]) -> Texts | None:
    """The texts of `Chunk.task`; None where its files have to be read in another way."""
    texts, parts = list[str](), list[list[int]]()
    try:
        for item in task:
            found = [(item, 0)] if isinstance(item, str) else item.parts()
            texts += [text for text, _ in found]
            parts.append([part for _, part in found])
    except UserError:
        return None
    return Texts(texts, parts)


@dataclass(frozen=True)
class Normaliser:
    """`Chunk.task` to `Normalised`; None where its files have to be read in another way."""

    clean: CleanConfig
    filters: FilterConfig
    seed: int

    @classmethod
    def of(cls, config: DataConfig) -> "Normaliser":
        """That of a corpus."""
        return cls(config.clean, config.filters, config.seed)

    def __call__(self, task: Sequence[str] | Sequence[Stretch]) -> Normalised | None:
        given = read(task)
        if given is None:
            return None
        made, always_on = Normalised(given.parts, [], [], {}, Counter(), [], [], [], []), quality.always_on(self.clean)
        for place, text in enumerate(given.texts):
            if quality.is_broken(text, self.filters):
                made.broken[place] = text
            normal = normalise.normalize(text, self.clean, made.deleted)
            whole = normalise.split_evenly(normal, self.clean.max_characters)
            pieces = [piece for part in whole for piece in normalise.split_by_words(part, self.filters.max_words)]
            made.bytes_D.append(text_bytes(text))
            made.pieces_D.append(len(pieces))
            for piece in pieces:
                data = piece.encode()
                made.texts.append(text := piece.strip())
                made.reasons_P.append(quality.reason_to_remove(text, always_on) or "")
                made.bytes_P.append(len(data))
                made.hashes_P.extend(content_hash(data, self.seed))
        return made


def through_workers(name: str, chunks: Iterable[Chunk], workers: Workers) -> Iterator[tuple[list[Document], Any]]:
    """Each chunk's documents with what the workers' function (`READ` or `NORMALISE`) made of their texts."""
    for chunk, found in workers.map(name, ((chunk, chunk.task) for chunk in chunks)):
        if found is None and not chunk.void:
            yield from through_workers(name, chunk.again(), workers)
        elif not chunk.void:
            yield chunk.documents(found.parts if found else ()), found
