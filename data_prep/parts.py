"""A part: what a task writes, and what the whole corpus is put together from.

tokens.bin       the tokens of every document that passed the filters, [CLS] and [SEP] included
rows.npz         a row for each of these documents, and what deduplication and decontamination need
signatures.bin   MinHash signatures, where near-duplicates are searched for
excerpts.jsonl   what an example shows of each
dropped.jsonl    what the stages below dropped, where that is to be listed
lines.json       a sample of the lines, to know those that repeat
stats.json       the name of the task, and the counts of the stages
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.repeated_lines import Line, LineSample
from data_prep.stats import Example, Stage
from data_prep.task_grid import DROPPED

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
        ("match_words", "u1"),  # of the longest match of decontamination, 0 without one
        ("cut_bytes", "<u4"),  # that decontamination cut out
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
LINES = "lines.json"
_STREAMS = ("tokens.bin", "signatures.bin", "excerpts.jsonl", DROPPED)
TASK_STAGES = ("source", "normalise", "filters", "tokens")


class PartWriter:
    """Writes a part document by document. Memory: about 70 bytes a document, so that a task may be a large file."""

    def __init__(self, folder: Path, vocab_size: int, lists_dropped: bool) -> None:
        folder.mkdir()
        self.folder = folder
        self.stats = {name: Stage() for name in TASK_STAGES}
        if lists_dropped:
            for stage in self.stats.values():
                stage.listed = []
        self.begun = Counter[str]()  # documents of each origin
        self.lines = LineSample()
        self._files = {name: (folder / name).open("wb") for name in _STREAMS}
        self._token_use = np.zeros(vocab_size, dtype=np.int64)
        self._origins: dict[str, int] = {}
        self._sources: dict[str, int] = {}
        self._added = 0
        self._tokens: list[np.ndarray] = []  # since the last flush, as the next three
        self._rows: list[tuple[Any, ...]] = []
        self._places: list[tuple[int, ...]] = []
        self._shown: list[str] = []
        self._arrays: dict[str, list[np.ndarray]] = {
            "rows": [np.empty(0, ROW)],
            "places": [np.empty(0, PLACE)],
            "matches": [np.empty((0, 2), np.uint32)],
            "ngrams": [np.empty(0, np.uint32)],
        }

    def add_document(
        self,
        origin: str,
        source: str,
        place: tuple[int, int, int, int],
        measures: tuple[int, ...],
        marks: tuple[int, int],
        shown: str,
        tokens: np.ndarray,
    ) -> None:
        """Add a document.

        `place` is as in `PLACE` without the name, `measures` and `marks` are what `ROW` has before the tokens and
        behind the source.
        """
        of_origin = self._origins.setdefault(origin, len(self._origins))
        of_source = self._sources.setdefault(source, len(self._sources))
        self._places.append((of_origin, *place))
        self._rows.append((*measures, len(tokens), of_source, *marks))
        self._shown.append(shown)
        self._tokens.append(tokens)

    def add_matches(self, texts_N: Sequence[np.ndarray]) -> None:
        """Say which of the tasks' texts each document holds that was added since the last flush."""
        for number, texts in enumerate(texts_N, self._added):
            pairs = np.stack([np.full(len(texts), number), texts], axis=1)
            self._arrays["matches"].append(pairs.astype(np.uint32))

    def add_signatures(self, signatures_NP: np.ndarray, ngrams_N: np.ndarray) -> None:
        """Add the signatures and numbers of n-grams of the documents that were added since the last flush."""
        self._files["signatures.bin"].write(signatures_NP.tobytes())
        self._arrays["ngrams"].append(ngrams_N)

    def flush(self) -> None:
        """Write what was added, and what was dropped."""
        for name, stage in self.stats.items():
            self._list_dropped(name, stage.listed or [])
        if not self._rows:
            return
        tokens = np.concatenate(self._tokens)
        self._files["tokens.bin"].write(tokens.tobytes())
        self._token_use += np.bincount(tokens, minlength=len(self._token_use))
        self._arrays["rows"].append(np.array(self._rows, dtype=ROW))
        self._arrays["places"].append(np.array(self._places, dtype=PLACE))
        lines = "".join(f"{json.dumps(shown)}\n" for shown in self._shown)
        self._files["excerpts.jsonl"].write(lines.encode())
        self._added += len(self._rows)
        for added in (self._tokens, self._rows, self._places, self._shown):
            added.clear()

    def _list_dropped(self, name: str, listed: list[tuple[str, Example]]) -> None:
        lines = "".join(f"{json.dumps([name, *dropped])}\n" for dropped in listed)
        self._files[DROPPED].write(lines.encode())
        listed.clear()

    def finish(self, name: str, relative: bool) -> None:
        """Write the rest, the counts last."""
        for file in self._files.values():
            file.close()
        arrays: dict[str, Any] = {
            key: np.concatenate(arrays) for key, arrays in self._arrays.items()
        }
        arrays["token_use"] = self._token_use.astype(np.uint32)
        with (self.folder / "rows.npz").open("wb") as handle:
            np.savez(handle, **arrays)
        (self.folder / LINES).write_text(json.dumps(self.lines.lines()), encoding="utf-8")
        node = {
            "name": name,
            "relative": relative,
            "begun": dict(self.begun),
            "origins": list(self._origins),
            "sources": list(self._sources),
            "stages": {stage: asdict(counts) for stage, counts in self.stats.items()},
            "sizes": {path.name: path.stat().st_size for path in self.folder.iterdir()},
        }
        (self.folder / "stats.json").write_text(json.dumps(node), encoding="utf-8")


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

    def signatures(self) -> np.ndarray:
        """Return the signatures of all documents: [N, bytes] uint8."""
        signatures = np.fromfile(self.folder / "signatures.bin", dtype=np.uint8)
        return signatures.reshape(len(self.array("ngrams")), -1)

    def tokens(self, start: int = 0, count: int = -1) -> np.ndarray:
        """Return the tokens of all documents, one behind the other, or so many from `start` on."""
        dtype = self._token_dtype
        offset = start * dtype.itemsize
        return np.fromfile(self.folder / "tokens.bin", dtype, count, offset=offset)

    def lines(self) -> list[Line]:
        """Return the sample of lines."""
        lines = json.loads((self.folder / LINES).read_text(encoding="utf-8"))
        return [(number, size, beginning) for number, size, beginning in lines]

    def stages(self) -> dict[str, Stage]:
        """Return the counts of the stages that are finished with a task."""
        return {name: self._stage(node) for name, node in self.node["stages"].items()}

    def _stage(self, node: dict[str, Any]) -> Stage:
        stage = Stage(**node | {"dropped": {}, "listed": None})
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
            sizes = {file: (self.folder / file).stat().st_size for file in self.node["sizes"]}
            return bool(self.node["name"] == name and self.node["sizes"] == sizes)
        except (FileNotFoundError, ValueError, KeyError):
            return False

    def dropped(self, stage: str) -> Iterator[tuple[str, Example]]:
        """Yield what a stage of the task dropped: the reason, and what is shown."""
        with (self.folder / DROPPED).open("rb") as lines:
            for name, reason, example in map(json.loads, lines):
                if name == stage:
                    yield reason, self._numbered(Example(*example))

    def example(self, row: int) -> Example:
        """Return what is shown of a document."""
        return next(self.examples([row]))

    def examples(self, rows: Iterable[int]) -> Iterator[Example]:
        """Yield what is shown of documents, whose rows are in order."""
        places, key_N = self.array("places"), self.array("rows")["key"]
        with (self.folder / "excerpts.jsonl").open("rb") as lines:
            next_row = 0
            for row in rows:
                shown = json.loads(next(islice(lines, row - next_row, None)))
                next_row = row + 1
                yield self.placed(places[row])._replace(key=int(key_N[row]), shown=shown)

    def placed(self, place: np.void) -> Example:
        """Return the example of a document at this place, with nothing to show."""
        label = label_of(int(place["part"]), int(place["piece"]), int(place["pieces"]))
        origin = self.node["origins"][place["origin"]]
        return self._numbered(Example(0, origin, int(place["number"]), label, ""))


def label_of(part: int, piece: int, pieces: int) -> str:
    """Return which part of a document is meant, in words; nothing for a whole one."""
    label = f" from its part {part + 1} on" if part else ""
    return label if pieces == 1 else f"{label} part {piece + 1} of {pieces}"
