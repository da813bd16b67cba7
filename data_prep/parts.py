"""A part: what a task writes, and what the whole corpus is put together from.

tokens.bin     the tokens of every document that passed the filters, [CLS] and [SEP] included
rows.npz       a row for each of these documents, and what deduplication and decontamination need
excerpts.json  what an example shows of each
stats.json     the name of the task, and the counts of the stages that are finished with it
"""

import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.stats import Example, Stage, excerpt

ROW = np.dtype(
    [
        ("key", "<u8"),  # of the content: equal documents have equal keys
        ("split_number", "<u8"),  # of the content: decides whether the document is held out
        ("bytes", "<u4"),
        ("characters", "<u4"),
        ("words", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
        ("source", "<u2"),
        ("too_many_tokens", "?"),
    ]
)
PLACE = np.dtype(
    [
        ("origin", "<u4"),
        ("number", "<u8"),  # of the document
        ("part", "<u4"),  # in which the document was read
        ("piece", "<u4"),  # that the part was cut into
        ("pieces", "<u4"),
    ]
)
_TASK_STAGES = ("source", "normalise", "filters")


class PartWriter:
    """Writes a part document by document. Memory: about 300 bytes a document, and its signature."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.stats = {name: Stage() for name in _TASK_STAGES}
        self.begun = Counter[str]()  # documents of each origin
        self._tokens = (folder / "tokens.bin").open("wb")
        self._token_use = np.zeros(vocab_size, dtype=np.int64)
        self._buffer: list[np.ndarray] = []
        self._origins: dict[str, int] = {}
        self._sources: dict[str, int] = {}
        self._rows: list[tuple[Any, ...]] = []
        self._places: list[tuple[int, ...]] = []
        self._excerpts: list[str] = []
        self._explanations: dict[int, str] = {}
        self._matches: list[tuple[int, int]] = []
        self._signatures: list[np.ndarray] = []
        self._ngrams: list[np.ndarray] = []

    def add_document(
        self,
        origin: str,
        source: str,
        place: tuple[int, int, int, int],
        row: tuple[Any, ...],
        text: str,
        tokens: np.ndarray,
    ) -> int:
        """Add a document and return its row. `place` and `row` are as in `PLACE` and `ROW`, without the names."""
        *fields, too_many = row
        of_origin = self._origins.setdefault(origin, len(self._origins))
        of_source = self._sources.setdefault(source, len(self._sources))
        self._places.append((of_origin, *place))
        self._rows.append((*fields, len(tokens), of_source, too_many))
        self._excerpts.append(excerpt(text))
        self._buffer.append(tokens)
        return len(self._rows) - 1

    def flush(self) -> None:
        """Write the tokens of the documents added so far; counting them one by one would take long."""
        if self._buffer:
            tokens = np.concatenate(self._buffer)
            self._tokens.write(tokens.tobytes())
            self._token_use += np.bincount(tokens, minlength=len(self._token_use))
            self._buffer.clear()

    def explain(self, row: int, explanation: str) -> None:
        """Say why a document goes by what it holds."""
        self._explanations[row] = explanation

    def add_matches(self, row: int, task_texts: Sequence[int]) -> None:
        """Say which of the tasks' texts a document holds."""
        self._matches += [(row, number) for number in task_texts]

    def add_signatures(self, signatures_NP: np.ndarray, ngrams_N: np.ndarray) -> None:
        """Add the next documents' signatures and numbers of n-grams."""
        self._signatures.append(signatures_NP)
        self._ngrams.append(ngrams_N)

    def finish(self, name: str, relative: bool) -> None:
        """Write what is not written yet."""
        self._tokens.close()
        arrays: dict[str, Any] = {
            "rows": np.array(self._rows, dtype=ROW),
            "places": np.array(self._places, dtype=PLACE),
            "token_use": self._token_use.astype(np.uint32),
            "matches": np.array(self._matches, dtype=np.uint32).reshape(-1, 2),
        }
        if self._signatures:
            arrays["signatures"] = np.concatenate(self._signatures)
            arrays["ngrams"] = np.concatenate(self._ngrams)
        with (self.folder / "rows.npz").open("wb") as handle:
            np.savez(handle, **arrays)
        self._write_json("excerpts", [self._excerpts, list(self._explanations.items())])
        node = {
            "name": name,
            "relative": relative,
            "begun": dict(self.begun),
            "origins": list(self._origins),
            "sources": list(self._sources),
            "stages": {stage: asdict(counts) for stage, counts in self.stats.items()},
        }
        self._write_json("stats", node)

    def _write_json(self, name: str, node: Any) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(node), encoding="utf-8")


class Part:
    """A part to read; each of its files is loaded when it is first needed."""

    def __init__(self, folder: Path, token_dtype: np.dtype[Any]) -> None:
        self.folder, self._token_dtype = folder, token_dtype
        self.before: dict[str, int] = {}  # documents of its origins in the parts in front

    @cached_property
    def node(self) -> dict[str, Any]:
        """`stats.json`."""
        node: dict[str, Any] = json.loads((self.folder / "stats.json").read_text(encoding="utf-8"))
        return node

    def array(self, name: str) -> np.ndarray:
        """Return an array of `rows.npz`."""
        with np.load(self.folder / "rows.npz") as arrays:
            array: np.ndarray = arrays[name]
            return array

    def tokens(self) -> np.ndarray:
        """Return the tokens of all documents, one behind the other."""
        return np.fromfile(self.folder / "tokens.bin", dtype=self._token_dtype)

    def stages(self) -> dict[str, Stage]:
        """Return the counts of the stages that are finished with a task."""
        return {name: self._stage(node) for name, node in self.node["stages"].items()}

    def _stage(self, node: dict[str, Any]) -> Stage:
        stage = Stage(**node | {"dropped": {}})
        for reason, count in node["dropped"].items():
            examples = [Example(*example) for example in count["examples"]]
            numbered = [self._numbered(example) for example in examples]
            stage.drop(reason, count["documents"], count["bytes"], numbered)
        return stage

    def _numbered(self, example: Example) -> Example:
        return example._replace(number=example.number + self.before.get(example.origin, 0))

    def is_whole(self, name: str) -> bool:
        """Return whether this is the part of the task of that name, and none of its files is cut short."""
        try:
            tokens = int(self.array("rows")["tokens"].sum())
            size = (self.folder / "tokens.bin").stat().st_size
            return self.node["name"] == name and size == tokens * self._token_dtype.itemsize
        except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False

    def example(self, row: int) -> Example:
        """Return what is shown of a document."""
        place, key = self.array("places")[row], int(self.array("rows")["key"][row])
        node = json.loads((self.folder / "excerpts.json").read_text(encoding="utf-8"))
        excerpts, explanations = node[0], dict(node[1])
        label = label_of(int(place["part"]), int(place["piece"]), int(place["pieces"]))
        origin = self.node["origins"][place["origin"]]
        shown = explanations.get(row, excerpts[row])
        return self._numbered(Example(key, origin, int(place["number"]), label, shown))


def label_of(part: int, piece: int, pieces: int) -> str:
    """Return which part of a document is meant, in words; nothing for a whole one."""
    label = f" from its part {part + 1} on" if part else ""
    return label if pieces == 1 else f"{label} part {piece + 1} of {pieces}"
