"""The stored results of fine-tuning runs, so that an interrupted scoring goes on where it stopped.

    runs/<name>/glue/<init>/
        pieces/<task>-seed<k>.json          metrics of one run, with a key of everything they depend on
        predictions/<task>-seed<k>.npz      its predictions: `dev.<entry>`, `test.<entry>` and `test_ids.<entry>`
        glue.json                           the summary; bit for bit the same however often the work was interrupted
        timing.json                         the machine and the seconds of every run, which are not

Results are written under another name first (`.finished`) and get their own once they are in the history: a crash
leaves no line without a result, which could not be repeated to the last bit. Stored scores are not believed: they are
computed again from the predictions.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import file_sha256
from cramming.data.task_files import Task
from cramming.files import overwrite_atomically, write_atomically
from cramming.progress import say
from cramming.record import finite
from eval.finetune.loop import Predictions
from eval.tasks.datasets import TaskData
from eval.tasks.metrics import score


@dataclass(frozen=True)
class RunStore:
    """The results of single runs under `glue/<init>/`. `record` puts a new one into the history before it is kept, and
    `is_recorded` says whether a finished one got there.

    A key says behind a hyphen on what machine a result was made; with `anywhere`, results of other machines count too.
    """

    folder: Path
    record: Callable[[Task, int, Mapping[str, Any]], None] = lambda task, seed, result: None
    is_recorded: Callable[[Mapping[str, Any]], bool] = lambda result: True
    anywhere: bool = False

    def load(self, data: TaskData, seed: int, key: str) -> dict[str, Any] | None:
        """The stored result of this run, or None if there is none with this key and the predictions it was made of."""
        path, file = self._paths(data.task, seed)
        result = self._read(path, key, file)
        if result is None:
            result = self._read(_finished(path), key, _finished(file), file)
            if result is None or not self.is_recorded(result):
                return None
            _name(file, path)
        with np.load(file, allow_pickle=False) as arrays:
            entries = _entries(data, {s.source.entry: arrays[f"dev.{s.source.entry}"] for s in data.scored})
        if result.get("entries") != entries:
            say(f"{path}: its scores are not those of its predictions; they are computed again")
            result["entries"] = entries
            write_json(path, result)
        return result

    def save(self, data: TaskData, seed: int, key: str, found: Predictions) -> dict[str, Any]:
        """Store predictions and metrics of one run; returns the result."""
        arrays = {f"dev.{name}": values for name, values in found.scored.items()}
        arrays |= {f"test.{name}": values for name, values in found.blind.items()}
        arrays |= {f"test_ids.{s.source.entry}": np.array(s.ids) for s in data.blind if s.ids is not None}
        path, file = self._paths(data.task, seed)
        overwrite_atomically(_finished(file), lambda temporary: _save_arrays(temporary, arrays))
        result = {
            "key": key,
            "predictions_sha256": file_sha256(_finished(file)),
            "entries": _entries(data, found.scored),
            "train_loss": found.train_loss,
            "epoch": found.epoch,
            "seconds": round(found.seconds, 3),
        }
        write_json(_finished(path), result)
        self.record(data.task, seed, result)
        _name(file, path)
        return result

    def _read(self, path: Path, key: str, *predictions: Path) -> dict[str, Any] | None:
        """The result in this file if it has the key and was made of the first of `predictions` that is there."""
        file = next((file for file in predictions if file.exists()), None)
        if file is None or not path.exists():
            return None
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # damaged: it is only a cache, the run is done again
            return None
        wanted = (lambda text: text.partition("-")[0]) if self.anywhere else str
        if not isinstance(result, dict) or wanted(str(result.get("key"))) != wanted(key):
            return None
        return result if result.get("predictions_sha256") == file_sha256(file) else None

    def _paths(self, task: Task, seed: int) -> tuple[Path, Path]:
        name = f"{task.name}-seed{seed}"
        return self.folder / "pieces" / f"{name}.json", self.folder / "predictions" / f"{name}.npz"


def _finished(path: Path) -> Path:
    """The name that a whole file has until its result is recorded."""
    return path.with_name(f"{path.name}.finished")


def _name(*paths: Path) -> None:
    """Give finished files their names, in this order; a crash may have come between two."""
    for path in paths:
        if _finished(path).exists():
            _finished(path).replace(path)


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as handle:
        np.savez_compressed(handle, **arrays)  # type: ignore[arg-type]


def _entries(data: TaskData, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics of every labelled set."""
    entries = {}
    for split in data.scored:
        assert split.labels is not None
        found = score(data.task.metrics, predictions[split.source.entry], split.labels)
        metrics = {"metrics": finite(found.values), "problems": found.problems, "notes": found.notes}
        entries[split.source.entry] = metrics
    return entries


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as JSON; numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")
