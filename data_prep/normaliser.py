"""What workers do first with a chunk of documents: read where that is left to do, normalise, cut, measure, hash."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cramming.config import UserError
from data_prep.columns import Normalised, TextBlock
from data_prep.dedup.exact import HASHES, content_hash
from data_prep.document_stats import measured
from data_prep.filters import normalise, quality
from data_prep.filters.normalise import CleanConfig
from data_prep.filters.quality import FilterConfig
from data_prep.sources.plain_text import Stretch
from data_prep.sources.source import Chunk, Documents, Parts, Task
from data_prep.stage_stats import text_bytes
from data_prep.workers import Workers

READ, NORMALISE = "read", "normalise"  # the workers' functions


class Texts(NamedTuple):
    """A chunk's documents as read: texts, token ids, None where damaged."""

    contents: list[str | np.ndarray | None]
    parts: Parts


def read(task: Task) -> Texts | None:
    """The documents of `Chunk.task`; None where its files have to be read in another way."""
    contents, counts, numbers = list[str | np.ndarray | None](), list[int](), list[int]()
    try:
        for item in task:
            found = item.parts() if isinstance(item, Stretch) else [(item, 0)]
            contents += [content for content, _ in found]
            numbers += [number for _, number in found]
            counts.append(len(found))
    except UserError:
        return None
    return Texts(contents, Parts(counts, np.array(numbers, dtype=np.int64)))


@dataclass(frozen=True)
class Normaliser:
    """`Chunk.task` to `Normalised`; None where its files have to be read in another way."""

    clean: CleanConfig
    filters: FilterConfig
    seed: int

    def __call__(self, task: Task) -> Normalised | None:
        given = read(task)
        if given is None:
            return None
        always_on, bytes_read, pieces = quality.always_on(self.clean), 0, list[int]()
        broken, deleted, reasons = dict[int, str](), Counter[str](), dict[int, str]()
        texts, cut_sizes, hashes, measures = (
            list[bytes](),
            list[int](),
            list[bytes](),
            list[tuple[int, int, int]](),
        )
        for place, content in enumerate(given.contents):
            before = len(texts)
            if isinstance(content, np.ndarray):
                if not len(content) and (reason := quality.reason_to_remove("", always_on)):
                    reasons[len(texts)] = reason
                texts.append(b"")
                measures.append(measured(""))
                cut_sizes.append(0)
                hashes.append(content_hash(content.tobytes(), self.seed))
            elif content is not None:
                bytes_read += text_bytes(content)
                if quality.is_broken(content, self.filters):
                    broken[place] = content
                for piece in self._pieces(content, deleted):
                    text, data = piece.strip(), piece.encode()
                    reason = quality.reason_to_remove(text, always_on)
                    if reason or place in broken:
                        reasons[len(texts)] = reason or "broken_characters"
                    texts.append(data if len(text) == len(piece) else text.encode())
                    measures.append(measured(text))
                    cut_sizes.append(len(data))
                    hashes.append(content_hash(data, self.seed))
            pieces.append(len(texts) - before)
        return Normalised(
            given.parts,
            bytes_read,
            np.array(pieces, dtype=np.int64),
            broken,
            deleted,
            TextBlock.of(texts),
            reasons,
            np.array(cut_sizes, dtype=np.int64),
            np.array(measures, dtype=np.int64).reshape(-1, 3),
            np.frombuffer(b"".join(hashes), HASHES),
        )

    def _pieces(self, text: str, deleted: Counter[str]) -> Iterator[str]:
        whole = normalise.split_evenly(
            normalise.normalize(text, self.clean, deleted), self.clean.max_characters
        )
        return (
            piece
            for part in whole
            for piece in normalise.split_by_words(part, self.filters.max_words)
        )


def through_workers(
    name: str, chunks: Iterable[Chunk], workers: Workers
) -> Iterator[tuple[Documents, Any]]:
    """Each chunk's documents with what the workers' function (`READ` or `NORMALISE`) made of them."""
    for chunk, found in workers.map(name, ((chunk, chunk.task) for chunk in chunks)):
        if found is None and not chunk.void:
            yield from through_workers(name, chunk.again(), workers)
        elif not chunk.void:
            yield chunk.documents(found.parts), found
