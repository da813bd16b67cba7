"""What fine-tuning leaves on disk, and the summary over seeds.

    runs/<name>/glue/<init>/
        pieces/<task>-seed<k>.json          metrics of one run, with a key of everything they depend on
        predictions/<task>-seed<k>.npz      its predictions: `dev.<entry>`, `test.<entry>` and `test_ids.<entry>`
        glue.json                           the summary; bit for bit the same however often the work was interrupted
        timing.json                         the machine and the seconds of every run, which are not

Both are written under another name first (`.finished`), and get their own once the result is noted: a crash leaves no
note without a result, which could not be repeated to the last bit. A run whose piece has the right key is not done
again. Of a stored piece its scores are not believed: they are computed again from its predictions.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from cramming.config import file_sha256, texts_sha256
from cramming.data.task_files import ExampleFile, Task
from cramming.files import overwrite_atomically, write_atomically
from cramming.progress import say
from cramming.record import finite
from eval.finetune.loop import Predictions, Selection
from eval.rules.load import DAMAGED_ARRAYS
from eval.tasks.datasets import Split, TaskData, examples_sha256, seen_in_training
from eval.tasks.metrics import score
from eval.tasks.suites import SUITES, SuiteName

FORMAT_VERSION = 1
SELECTIONS: dict[Selection, str] = {"last": "last epoch", "best": "best epoch of each run by its own dev score"}


@dataclass(frozen=True)
class Pieces:
    """The stored results of single runs under `glue/<init>/`; `note` hears of a new one before it is kept, and `noted`
    says whether it did.

    A key says behind a hyphen on what a result was made. `anywhere`: one that was made on something else counts too.
    """

    folder: Path
    note: Callable[[Task, int, Mapping[str, Any]], None] = lambda task, seed, piece: None
    noted: Callable[[Mapping[str, Any]], bool] = lambda piece: True
    anywhere: bool = False

    def load(self, data: TaskData, seed: int, key: str) -> dict[str, Any] | None:
        """The stored result of this run, or None if there is none with this key and the predictions it was made of."""
        path, file = self._path(data.task, seed), self._predictions(data.task, seed)
        piece = self._read(path, key, file)
        if piece is None:
            piece = self._read(_finished(path), key, _finished(file), file)
            if piece is None or not self.noted(piece):
                return None
            _name(file, path)
        scored = _read_predictions(file, data)
        if scored is None:
            return None
        entries = _entries(data, scored)
        if piece.get("entries") != entries:
            say(f"{path}: its scores are not those of its predictions; they are computed again")
            piece["entries"] = entries
            write_json(path, piece)
        return piece

    def save(self, data: TaskData, seed: int, key: str, found: Predictions) -> dict[str, Any]:
        """Store predictions and metrics of one run; returns the piece."""
        arrays = {f"dev.{name}": values for name, values in found.scored.items()}
        arrays |= {f"test.{name}": values for name, values in found.blind.items()}
        arrays |= {f"test_ids.{s.source.entry}": np.array(s.ids) for s in data.blind if s.ids is not None}
        path, file = self._path(data.task, seed), self._predictions(data.task, seed)
        overwrite_atomically(_finished(file), lambda temporary: _save_arrays(temporary, arrays))
        piece = {
            "key": key,
            "predictions_sha256": file_sha256(_finished(file)),
            "entries": _entries(data, found.scored),
            "train_loss": found.train_loss,
            "epoch": found.epoch,
            "seconds": round(found.seconds, 3),
        }
        write_json(_finished(path), piece)
        self.note(data.task, seed, piece)
        _name(file, path)
        return piece

    def _read(self, path: Path, key: str, *predictions: Path) -> dict[str, Any] | None:
        """The piece in this file if it has the key and was made of the first of `predictions` that is there."""
        file = next((file for file in predictions if file.exists()), None)
        if file is None or not path.exists():
            return None
        try:
            piece = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # damaged from outside: it is only a cache, the run is done again
            return None
        if not isinstance(piece, dict) or not self._is_of(str(piece.get("key")), key):
            return None
        # None: of an earlier version
        return piece if piece.get("predictions_sha256") in (None, file_sha256(file)) else None

    def _is_of(self, found: str, key: str) -> bool:
        return found == key or (self.anywhere and found.partition("-")[0] == key.partition("-")[0])

    def _path(self, task: Task, seed: int) -> Path:
        return self.folder / "pieces" / f"{task.name}-seed{seed}.json"

    def _predictions(self, task: Task, seed: int) -> Path:
        return self.folder / "predictions" / f"{task.name}-seed{seed}.npz"


def _finished(path: Path) -> Path:
    """The name that a whole file has until it is noted."""
    return path.with_name(f"{path.name}.finished")


def _name(*paths: Path) -> None:
    """Give finished files their names, in this order; a crash may have come between two."""
    for path in paths:
        if _finished(path).exists():
            _finished(path).replace(path)


def _read_predictions(file: Path, data: TaskData) -> dict[str, np.ndarray] | None:
    """The predictions of every labelled set; None where the file is damaged or is not of these data."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {s.source.entry: arrays[f"dev.{s.source.entry}"] for s in data.scored}
    except (KeyError, *DAMAGED_ARRAYS):
        return None
    sound = all(found[s.source.entry].shape == (len(s),) for s in data.scored)
    return found if sound and all(array.dtype.kind in "fiu" for array in found.values()) else None


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as handle:
        np.savez_compressed(handle, **arrays)  # type: ignore[arg-type]


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as JSON; numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def _entries(data: TaskData, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics of every labelled set."""
    entries = {}
    for split in data.scored:
        assert split.labels is not None
        found = score(data.task.metrics, predictions[split.source.entry], split.labels)
        entries[split.source.entry] = {
            "metrics": finite(found.values), "problems": found.problems, "notes": found.notes,
        }  # fmt: skip
    return entries


def summarise(
    model: Mapping[str, Any],
    suite: SuiteName,
    data: Sequence[TaskData],
    pieces: Mapping[tuple[str, int], Mapping[str, Any]],
    seeds: Sequence[int],
    hyper: Mapping[str, Any],
    absent: Mapping[str, str],
    selection: Selection = "last",
) -> dict[str, Any]:
    """The contents of glue.json: every entry over all seeds, and the averages. `model` says what was scored."""
    entries = {}
    for task_data in data:
        of_task = [pieces[task_data.task.name, seed] for seed in seeds]
        for split in task_data.scored:
            entries[split.source.entry] = {
                **_entry(task_data.task, split.source, of_task, seeds),
                **_sizes(suite, task_data, split),
                "data_sha256": examples_sha256(task_data.train, split),
                "texts_sha256": texts_sha256(itertools.chain(*split.texts)),
                "seen_in_training": seen_in_training(task_data.train, split),
                "hyperparameters": dict(hyper),
            }
    missing = dict(absent) | {name: why for task_data in data for name, why in task_data.absent.items()}
    return {
        "format": FORMAT_VERSION,
        **model,
        "suite": suite,
        "split": "dev",
        "selection": SELECTIONS[selection],
        "seeds": list(seeds),
        "hyperparameters": dict(hyper),
        "tasks": entries,
        "absent": missing,
        "averages": _averages(suite, entries),
    }


def _entry(
    task: Task, source: ExampleFile, pieces: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Metrics of one entry over seeds; one missing value leaves the summary of its metric null."""
    found = [piece["entries"][source.entry] for piece in pieces]
    metrics = {name: spread([one["metrics"][name] for one in found]) for name in task.metrics}
    median = metrics[task.main_metric]["median"]
    problems = [f"seed {seed}: {text}" for seed, one in zip(seeds, found) for text in one["problems"]]
    notes = [f"seed {seed}: {text}" for seed, one in zip(seeds, found) for text in one["notes"]]
    return {
        "title": source.title,
        "task": task.name,
        "metrics": metrics,
        "main_metric": task.main_metric,
        "scored_epochs": [piece["epoch"] for piece in pieces],
        "score": None if median is None else 100 * median,
        "problem": "; ".join(problems) or None,
        "notes": notes,
    }


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Values with median, mean, sample standard deviation and `mean_ci95`, Student's interval of the mean.

    All are null if a value is; the last two also for one seed.
    """
    known = [value for value in values if value is not None]
    complete = len(known) == len(values)
    mean = statistics.fmean(known) if complete else None
    std = statistics.stdev(known) if complete and len(known) > 1 else None
    interval = None
    if mean is not None and std is not None:
        half = float(stdtrit(len(known) - 1, 0.975)) * std / len(known) ** 0.5
        interval = [mean - half, mean + half]
    return {
        "per_seed": list(values),
        "median": statistics.median(known) if complete else None,
        "mean": mean,
        "std": std,
        "mean_ci95": interval,
    }


def _sizes(suite: SuiteName, data: TaskData, split: Split) -> dict[str, Any]:
    """Examples used beside the official numbers, which only GLUE itself has."""
    official, examples, source = SUITES[suite].official, len(split), split.source
    return {
        "train_examples": len(data.train),
        "official_train_examples": data.task.train.examples if official else None,
        "eval_examples": examples,
        "official_eval_examples": source.examples if official else None,
        "subset": official and (data.subset or examples != source.examples),
        "skipped_rows": data.train.skipped,
    }


def is_subset(suite: SuiteName, data: TaskData) -> bool:
    """Whether a task was trained or scored on other than the official number of examples."""
    return any(_sizes(suite, data, split)["subset"] for split in data.scored)


def _averages(suite: SuiteName, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    averages = {}
    for name, average in SUITES[suite].averages.items():
        scores = {entry: entries.get(entry, {}).get("score") for entry in average.entries}
        known = [value for value in scores.values() if value is not None]
        missing = [entry for entry, value in scores.items() if value is None]
        averages[name] = {
            "value": None if missing else statistics.fmean(known),
            "tasks": list(average.entries),
            "missing": missing,
            "subsets": [entry for entry in scores if entries.get(entry, {}).get("subset")],
            "definition": average.definition,
        }
    return averages
