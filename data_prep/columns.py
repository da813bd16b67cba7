"""What the stages hand on: documents in columns, group by group.

An object for each document at each stage would cost the main process more than everything else it does (docs/log.md,
2026-11-23). So workers send what they made of a chunk as one block of text and some arrays, and a stage of the main
process chooses rows of it; a name, and a text by itself, is made only of what is shown. Suffixes: D documents of a
chunk, P pieces that they were cut into, N rows of a group.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from data_prep.sources.source import Documents, Parts
from data_prep.stage_stats import Stage

Show = Callable[[str], str]  # what an example shows of a text


@dataclass(frozen=True)
class TextBlock:
    """Texts as one block of UTF-8 with the places where they end [N]; processes exchange it as fast as it is copied."""

    data: bytes
    ends_N: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> "TextBlock":
        """These texts."""
        texts = list(texts)
        return cls(b"".join(texts), np.cumsum([len(text) for text in texts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends_N)

    def __iter__(self) -> Iterator[str]:
        ends = self.ends_N.tolist()
        return (self.data[start:end].decode() for start, end in zip([0, *ends], ends))

    def chosen(self, rows_M: np.ndarray) -> "TextBlock":
        """The texts of these rows, in this order."""
        starts_M, ends_M = np.concatenate([[0], self.ends_N])[rows_M], self.ends_N[rows_M]
        runs = np.flatnonzero(
            np.append(True, starts_M[1:] != ends_M[:-1])[: len(rows_M)]
        )  # neighbours go together
        bounds = zip(starts_M[runs].tolist(), np.append(ends_M[runs[1:] - 1], ends_M[-1:]).tolist())
        return TextBlock(
            b"".join(self.data[start:end] for start, end in bounds), np.cumsum(ends_M - starts_M)
        )


@dataclass
class Normalised:
    """What a worker made of a chunk. Token ids pass as they are, with an empty text; of what is damaged there is no
    piece."""

    parts: Parts
    bytes_read: int  # UTF-8
    pieces_D: np.ndarray  # how many each document was cut into
    broken: dict[
        int, str
    ]  # by document: the text as read, where a filter removes it for what it was
    deleted: Counter[str]
    texts: TextBlock  # the pieces
    reasons: dict[
        int, str
    ]  # by piece: why it goes by the filters that are always on, or for being `broken`
    bytes_P: np.ndarray  # UTF-8
    measures_P3: np.ndarray  # as `measured`
    hashes_P: np.ndarray  # dtype `HASHES`

    @cached_property
    def origin(self) -> np.ndarray:
        """The document of each piece."""
        return np.repeat(np.arange(len(self.pieces_D)), self.pieces_D)


@dataclass(frozen=True)
class Group:
    """Some of a chunk's pieces, by their `rows_N`; `first`: how many came before the chunk's out of normalisation."""

    chunk: Normalised
    documents: Documents
    first: int
    rows_N: np.ndarray

    def __len__(self) -> int:
        return len(self.rows_N)

    def chosen(self, which: np.ndarray) -> "Group":
        """The group of these of its rows, by their places or as a mask."""
        return replace(self, rows_N=self.rows_N[which])

    @property
    def places(self) -> np.ndarray:
        """How many came before each out of normalisation."""
        return self.first + self.rows_N

    @property
    def sizes(self) -> np.ndarray:
        """UTF-8 bytes of each text."""
        return self.chunk.bytes_P[self.rows_N]

    @property
    def measures(self) -> np.ndarray:
        """Of each text, as `measured`: [N, 3]."""
        return self.chunk.measures_P3[self.rows_N]

    @property
    def hashes(self) -> np.ndarray:
        """Of dtype `HASHES`."""
        return self.chunk.hashes_P[self.rows_N]

    @property
    def origin(self) -> np.ndarray:
        """The document of each row."""
        return self.chunk.origin[self.rows_N]

    @property
    def texts(self) -> TextBlock:
        """The texts."""
        return self.chunk.texts.chosen(self.rows_N)

    def ids(self) -> dict[int, np.ndarray]:
        """The token ids of those rows that are no text."""
        if not self.documents.others:
            return {}
        found = (
            (n, self.documents.others.get(place)) for n, place in enumerate(self.origin.tolist())
        )
        return {n: document.ids for n, document in found if document and document.ids is not None}

    def reasons(self) -> dict[int, str]:
        """Why rows go by what normalisation found."""
        known = self.chunk.reasons
        return (
            {n: known[row] for n, row in enumerate(self.rows_N.tolist()) if row in known}
            if known
            else {}
        )

    def broken(self, n: int) -> str:
        """The text of row `n` as it was read, if a filter removes it for that."""
        return self.chunk.broken.get(int(self.origin[n]), "")

    def name(self, n: int) -> str:
        """What row `n` is called."""
        row = int(self.rows_N[n])
        place = int(self.chunk.origin[row])
        name, count = self.documents.name(place), int(self.chunk.pieces_D[place])
        number = row - int(np.searchsorted(self.chunk.origin, place)) + 1
        return name if count == 1 else f"{name} part {number} of {count}"

    def show(self, n: int, stage: Stage, reason: str, show: Show) -> None:
        """Row `n`, which the stage dropped, is perhaps an example; `show` makes of the text what it shows."""
        (text,) = self.chosen(np.array([n])).texts
        stage.example(reason, self.name(n), text, show)

    def through(self, stage: Stage, reasons: Mapping[int, str], shows: "Shows") -> "Group":
        """What is left behind the stage, which drops the rows that have a reason."""
        sizes_N = self.sizes
        stage.take(int(sizes_N.sum()), len(self))
        for n, reason in reasons.items():
            stage.drop(reason, int(sizes_N[n]))
            if show := shows(self, n, reason):
                self.show(n, stage, reason, show)
        left = self.chosen(np.delete(np.arange(len(self)), list(reasons))) if reasons else self
        stage.give(int(left.sizes.sum()), len(left))
        return left


Shows = Callable[
    [Group, int, str], Show | None
]  # of this row, dropped for this reason; None: it is no example
