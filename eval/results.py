"""What fine-tuning leaves on disk, and the summary over seeds.

    runs/<name>/glue/<init>/
        pieces/<task>-seed<k>.json          metrics of one run, with a key of everything they depend on
        predictions/<task>-seed<k>.npz      its predictions: `dev.<entry>`, `test.<entry>` and `test_ids.<entry>`
        glue.json                           the summary; bit for bit the same however often the work was interrupted
        timing.json                         the machine and the seconds of every run, which are not

A piece is written after its predictions, both atomically; a run whose piece has the right key is not done again.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from cramming.files import overwrite_atomically, write_atomically
from cramming.record import finite
from eval import superglue
from eval.datasets import Split, TaskData, examples_sha256
from eval.finetune import Predictions, Selection
from eval.metrics import score
from eval.tasks import AVERAGES, Source, Task

FORMAT_VERSION = 1
SELECTIONS: dict[Selection, str] = {"last": "last epoch", "best": "best epoch of each run by its own dev score"}


@dataclass(frozen=True)
class Pieces:
    """The stored results of single runs under `glue/<init>/`."""

    folder: Path

    def load(self, task: Task, seed: int, key: str) -> dict[str, Any] | None:
        """The stored result of this run, or None if there is none with this key."""
        path = self._path(task, seed)
        if not path.exists():
            return None
        try:
            piece = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # damaged from outside: it is only a cache, the run is done again
            return None
        return piece if isinstance(piece, dict) and piece.get("key") == key else None

    def save(self, data: TaskData, seed: int, key: str, found: Predictions) -> dict[str, Any]:
        """Store predictions and metrics of one run; returns the piece."""
        task = data.task
        arrays = {f"dev.{name}": values for name, values in found.scored.items()}
        arrays |= {f"test.{name}": values for name, values in found.blind.items()}
        arrays |= {f"test_ids.{s.source.entry}": np.array(s.ids) for s in data.blind if s.ids is not None}
        path = self.folder / "predictions" / f"{task.name}-seed{seed}.npz"
        overwrite_atomically(path, lambda temporary: _save_arrays(temporary, arrays))
        piece = {
            "key": key,
            "entries": {s.source.entry: _scores(task, found.scored[s.source.entry], s.labels) for s in data.scored},
            "train_loss": found.train_loss,
            "epoch": found.epoch,
            "seconds": round(found.seconds, 3),
        }
        write_json(self._path(task, seed), piece)
        return piece

    def _path(self, task: Task, seed: int) -> Path:
        return self.folder / "pieces" / f"{task.name}-seed{seed}.json"


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as handle:
        np.savez_compressed(handle, **arrays)  # type: ignore[arg-type]


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as JSON; numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def _scores(task: Task, predictions: np.ndarray, labels: np.ndarray | None) -> dict[str, Any]:
    assert labels is not None
    found = score(task.metrics, predictions, labels)
    return {"metrics": finite(found.values), "problems": found.problems, "notes": found.notes}


def summarise(
    model: Mapping[str, Any],
    suite: str,
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


def _entry(task: Task, source: Source, pieces: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
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


def _sizes(suite: str, data: TaskData, split: Split) -> dict[str, Any]:
    """Examples used beside the official numbers, which only GLUE itself has."""
    official, examples, source = suite != "embedded", len(split), split.source
    return {
        "train_examples": len(data.train),
        "official_train_examples": data.task.train.examples if official else None,
        "eval_examples": examples,
        "official_eval_examples": source.examples if official else None,
        "subset": official and (data.subset or examples != source.examples),
        "skipped_rows": data.train.skipped,
    }


def _averages(suite: str, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    averages = {}
    for name, average in (AVERAGES | {"superglue": superglue.AVERAGES})[suite].items():
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
