"""A corpus folder while it is being made: who may write, what is finished, what may be removed.

As long as the folder holds `unfinished.json` and no manifest it belongs to `prepare`, which may go on with it or clear
it away. Nothing that `prepare` has not made is ever removed.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cramming.config import UserError, build
from cramming.data.corpus import TASKS, TOKENIZER, Shard, Split
from cramming.files import LOCK, remove, write_atomically
from data_prep.corpus_card import CARD, PLOTS
from data_prep.tokenizer.load import TOKENIZER_CONFIG

UNFINISHED = "unfinished.json"
FATES = "unfinished-fates.bin"
NEAR = "unfinished-near-duplicates.npz"


@dataclass(frozen=True)
class Unfinished:
    """What an interrupted run was about to make, from which sources, and the shards it has finished."""

    settings_hash: str
    sources: list[dict[str, Any]]
    shards: dict[Split, list[Shard]]
    reasons: list[list[str]] = field(default_factory=list)  # of data_prep/decisions.py
    compared: list[dict[str, Any]] = field(default_factory=list)  # the tasks' files, for decontamination

    def save(self, folder: Path) -> None:
        """Write it into the corpus folder, atomically."""
        write_atomically(folder / UNFINISHED, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> "Unfinished | None":
        """The state that an interrupted run left; None if there is none. UserError: other things are in the folder."""
        path = folder / UNFINISHED
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path}: damaged ({error}); delete {folder} and prepare anew") from None
            return build(cls, found, str(path))
        begun = set(folder.glob(f".{UNFINISHED}.*.tmp"))  # all that is there of a run killed at its first write
        if foreign := sorted(item.name for item in folder.iterdir() if item not in begun and item.name != LOCK):
            some = ", ".join(foreign[:3])
            raise UserError(f"{folder}: not a corpus, and not empty ({some}); name another data.corpus")
        for file in begun:
            remove(file)
        return None

    def keep_only_finished(self, folder: Path) -> None:
        """Remove half-written shards and temporary files; the tokenizer, if there, is whole."""
        shards = [shard for part in self.shards.values() for shard in part]
        keep = {UNFINISHED, FATES, NEAR, TOKENIZER} | {
            name for shard in shards for name in (shard.file, shard.index_file)
        }
        for file in _own_files(folder):
            if file.name not in keep:
                remove(file)


def finish(folder: Path) -> None:
    """The manifest is written: remove what only an unfinished corpus needs, the state last."""
    for path in (folder / name for name in (FATES, NEAR, UNFINISHED)):
        if path.exists():  # else a finished corpus may well lie where nothing can be removed
            path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove what an unfinished run has written, and nothing else; the state last, as it says whose the rest is."""
    state = folder / UNFINISHED
    if state.is_file():
        for file in [*(file for file in _own_files(folder) if file != state), state]:
            remove(file)


def _own_files(folder: Path) -> list[Path]:
    """Everything in the folder that `prepare` makes, temporary files included."""
    own = (".bin", ".idx", ".npy", ".part", ".tmp", ".old")
    names = (UNFINISHED, NEAR, TOKENIZER, TOKENIZER_CONFIG, TASKS, CARD, PLOTS)
    return [path for path in sorted(folder.iterdir()) if path.suffix in own or path.name in names]
