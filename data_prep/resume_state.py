"""An unfinished corpus folder: what an interrupted run has finished and decided, and what may be removed.

As long as the folder holds `unfinished.json` and no manifest it belongs to `prepare`, which may go on with it or clear
it away. Nothing that `prepare` has not made is ever removed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError, build, file_sha256
from cramming.data.corpus import TASKS, wrong_sizes
from cramming.data.manifest import TOKENIZER, Shard, Split, token_dtype
from cramming.files import LOCK, remove, sync, write_atomically
from data_prep.tokenizer.load import TOKENIZER_CONFIG

UNFINISHED = "unfinished.json"
DECISIONS = "unfinished-decisions.bin"
NEAR = "unfinished-near-duplicates.npz"
CARD = "corpus_card.md"
DECIDING = (
    "filters",
    "decontamination",
    "tokens",
)  # stages whose decisions are kept, in their order
_FIRST = 1 + len(
    DECIDING
)  # code 0: undecided; 1 ...: passed up to this stage; from _FIRST on: a reason to drop
_BLOCK = 1 << 16


class Decisions:
    """What was decided about each document, by its number in the source: a file of two bytes per document.

    A filter is a pure function of document and settings, so what was decided once stays true: the second pass of
    near-deduplication and a resumed run read it here. For the filter that works on tokens this is even needed, as a
    document of a finished shard is not tokenized again. `reasons` are (stage, reason), in the order of their codes.
    """

    def __init__(self, path: Path, reasons: list[list[str]]) -> None:
        """`reasons` as of the last save: a code beyond them is from work that was lost, and is forgotten."""
        self.path, self.reasons = path, [list(reason) for reason in reasons]
        self._codes = np.fromfile(path, np.uint16) if path.is_file() else np.zeros(0, np.uint16)
        forgotten = np.flatnonzero(self._codes >= _FIRST + len(reasons))
        self._codes[forgotten] = 0
        self._first_changed, self._end_changed = len(self._codes), 0  # since the last save
        self._changed(forgotten)
        self._code_of = {(stage, reason): _FIRST + i for i, (stage, reason) in enumerate(reasons)}

    def undecided(self, numbers_N: np.ndarray, stage: str) -> np.ndarray:
        """Of which documents the stage has not decided whether they go: [N] bool."""
        undecided_N: np.ndarray = self._codes_of(numbers_N) <= DECIDING.index(stage)
        return undecided_N

    def dropped(self, numbers_N: np.ndarray, stage: str) -> dict[int, str]:
        """Those of these documents that the stage drops, by their places in `numbers_N`, and why."""
        code_N = self._codes_of(numbers_N)
        found = (
            (n, self.reasons[code_N[n] - _FIRST]) for n in np.flatnonzero(code_N >= _FIRST).tolist()
        )
        return {n: reason for n, (by, reason) in found if by == stage}

    def set(self, numbers_N: np.ndarray, stage: str, dropped: Mapping[int, str]) -> None:
        """The stage has decided on these documents: those `dropped`, by their places in `numbers_N`, go, others pass.
        What is decided already stays."""
        before_N = self._codes_of(numbers_N)
        code_N = np.maximum(before_N, 1 + DECIDING.index(stage))
        for n, reason in dropped.items():
            if (stage, reason) not in self._code_of:
                self._code_of[stage, reason] = _FIRST + len(self.reasons)
                self.reasons.append([stage, reason])
            code_N[n] = self._code_of[stage, reason]
        self._codes[numbers_N] = code_N
        self._changed(numbers_N[code_N != before_N])

    def _changed(self, numbers_N: np.ndarray) -> None:
        if len(numbers_N):
            self._first_changed = min(self._first_changed, int(numbers_N.min()))
            self._end_changed = max(self._end_changed, int(numbers_N.max()) + 1)

    def _codes_of(self, numbers_N: np.ndarray) -> np.ndarray:
        end = int(numbers_N.max(initial=-1)) + 1
        if end > len(self._codes):
            more = max(_BLOCK, len(self._codes), end - len(self._codes))
            self._codes = np.concatenate([self._codes, np.zeros(more, np.uint16)])
        return self._codes[numbers_N]

    def save(self) -> None:
        """Write what has changed since the last time, in place; the caller keeps `reasons` in `unfinished.json`.

        What is added goes in document order, so this grows with the text since then, not with the corpus. A process
        killed here leaves old codes and new ones, and both hold.
        """
        self.path.touch()
        with self.path.open("r+b") as handle:
            handle.seek(self._first_changed * self._codes.itemsize)
            handle.write(self._codes[self._first_changed : self._end_changed].tobytes())
            handle.flush()
            sync(handle.fileno())
        self._first_changed, self._end_changed = len(self._codes), 0


@dataclass(frozen=True)
class Unfinished:
    """`unfinished.json`: what an interrupted run was about to make, from which sources, and its finished shards."""

    settings_hash: str
    sources: list[dict[str, Any]]
    shards: dict[Split, list[Shard]]
    token_use: list[int]  # how often each entry of the vocabulary stands in them
    reasons: list[list[str]] = field(default_factory=list)  # of `Decisions`
    compared: list[dict[str, Any]] = field(
        default_factory=list
    )  # the tasks' files, for decontamination
    tokenizer_sha256: str | None = None  # None: there is none yet that counts

    def save(self, folder: Path) -> None:
        """Write it into the corpus folder, atomically."""
        write_atomically(folder / UNFINISHED, json.dumps(vars(self), default=vars))

    @classmethod
    def load(cls, folder: Path) -> "Unfinished | None":
        """The state that an interrupted run left; None if there is none. UserError: other things are in the folder."""
        path = folder / UNFINISHED
        if path.is_file():
            try:
                return build(cls, json.loads(path.read_text(encoding="utf-8")), str(path))
            except (ValueError, RecursionError) as error:
                what = str(error).removeprefix(f"{path}: ")
                raise UserError(
                    f"{path}: damaged or of another version ({what}); delete {folder} and prepare anew, or go on with"
                    " the version that began it"
                ) from None
        begun = set(
            folder.glob(f".{UNFINISHED}.*.tmp")
        )  # all that is there of a run killed at its first write
        if foreign := sorted(
            item.name for item in folder.iterdir() if item not in begun and item.name != LOCK
        ):
            some = ", ".join(foreign[:3])
            raise UserError(
                f"{folder}: not a corpus, and not empty ({some}); name another data.corpus"
            )
        for file in begun:
            remove(file)
        return None

    def damaged(self, folder: Path) -> str | None:
        """A file of a finished shard that is not there or has another size, in words. Nothing of them is read: whoever
        trains on them compares their SHA-256. Of the tokenizer, with which the rest is to be made, it is compared here.
        """
        path, expected = folder / TOKENIZER, self.tokenizer_sha256
        if expected and not (path.is_file() and file_sha256(path) == expected):
            return f"{path}: not the tokenizer that it began with"
        return next(wrong_sizes(folder, self.shards, token_dtype(len(self.token_use))), None)

    def keep_only_finished(self, folder: Path) -> None:
        """Remove half-written shards and temporary files, and a tokenizer that is not on record."""
        if self.tokenizer_sha256 is None:
            remove(folder / TOKENIZER)
        shards = [shard for finished in self.shards.values() for shard in finished]
        files = [name for shard in shards for name in (shard.file, shard.index_file)]
        for file in _own_files(folder):
            if file.name not in (UNFINISHED, DECISIONS, NEAR, TOKENIZER, *files):
                remove(file)


def finish(folder: Path) -> None:
    """The manifest is written: remove what only an unfinished corpus needs, the state last."""
    for path in (folder / name for name in (DECISIONS, NEAR, UNFINISHED)):
        if path.exists():  # else a finished corpus may well lie where nothing can be removed
            path.unlink(missing_ok=True)


def has_finished(folder: Path) -> bool:
    """Whether an unfinished run has finished a shard, or the search for near-duplicates."""
    state = Unfinished.load(folder)
    return (folder / NEAR).is_file() or bool(state and any(state.shards.values()))


def discard(folder: Path) -> None:
    """Remove what an unfinished run has written, and nothing else; the state last, as it says whose the rest is."""
    state = folder / UNFINISHED
    if state.is_file():
        for file in [*(file for file in _own_files(folder) if file != state), state]:
            remove(file)


def _own_files(folder: Path) -> list[Path]:
    """Everything in the folder that `prepare` makes, temporary files included."""
    own = (".bin", ".idx", ".npy", ".part", ".tmp", ".old")
    names = (UNFINISHED, NEAR, TOKENIZER, TOKENIZER_CONFIG, TASKS, CARD)
    return [path for path in sorted(folder.iterdir()) if path.suffix in own or path.name in names]
