"""The results of fine-tuning runs: stored one by one, so that an interrupted scoring goes on, and summed up over seeds.

    runs/<name>/glue/<init>/
        pieces/<task>-seed<k>.json          metrics of one run, with a key of everything they depend on
        predictions/<task>-seed<k>.npz      its predictions: `dev.<entry>`, `test.<entry>` and `test_ids.<entry>`
        glue.json                           the summary; bit for bit the same however often the work was interrupted
        timing.json                         the machine and the seconds of every run, which are not

Results are written under another name first (`.finished`) and get their own once they are in the history: a crash
leaves no line without a result, which could not be repeated to the last bit. Stored scores are not believed: they are
computed again from the predictions.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import file_sha256
from cramming.data.task_files import ExampleFile, Task, texts_sha256
from cramming.files import overwrite_atomically, write_atomically
from cramming.progress import say
from cramming.record import finite
from eval.finetune import history
from eval.finetune.config import SELECTION
from eval.finetune.loop import Predictions
from eval.tasks.datasets import Split, TaskData, examples_sha256, seen_in_training
from eval.tasks.metrics import mean_of, score, spread
from cramming.data.suites import SUITES, Average, SuiteName


@dataclass(frozen=True)
class RunStore:
    """The results of single runs under `glue/<init>/`. A new one is put into the history, `past`, before it is kept.

    A key says behind a hyphen on what machine a result was made; with `anywhere`, results of other machines count too.
    """

    folder: Path
    past: history.Scoring | None = None
    anywhere: bool = False

    def load(self, data: TaskData, seed: int, key: str) -> dict[str, Any] | None:
        """The stored result of this run, or None if there is none with this key and the predictions it was made of."""
        path, file = self._paths(data.task, seed)
        result = self._read(path, key, file)
        if result is None:
            result = self._read(_finished(path), key, _finished(file), file)
            if result is None or (self.past and not self.past.has(result)):
                return None
            _name(file, path)
        with np.load(file, allow_pickle=False) as arrays:
            entries = _entries(
                data, {s.source.entry: arrays[f"dev.{s.source.entry}"] for s in data.scored}
            )
        if result.get("entries") != entries:
            result["entries"] = entries
            write_json(path, result)
        return result

    def save(self, data: TaskData, seed: int, key: str, found: Predictions) -> dict[str, Any]:
        """Store predictions and metrics of one run; returns the result."""
        arrays = {f"dev.{name}": values for name, values in found.scored.items()}
        arrays |= {f"test.{name}": values for name, values in found.blind.items()}
        arrays |= {
            f"test_ids.{s.source.entry}": np.array(s.ids) for s in data.blind if s.ids is not None
        }
        path, file = self._paths(data.task, seed)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as handle:
                np.savez_compressed(handle, **arrays)  # type: ignore[arg-type]

        overwrite_atomically(_finished(file), write)
        result = {
            "key": key,
            "predictions_sha256": file_sha256(_finished(file)),
            "entries": _entries(data, found.scored),
            "train_loss": found.train_loss,
            "epoch": found.epoch,
            "seconds": round(found.seconds, 3),
        }
        write_json(_finished(path), result)
        if self.past:
            self.past.add(data.task, seed, result, is_subset(self.past.suite, data))
        _name(file, path)
        return result

    def _read(self, path: Path, key: str, *predictions: Path) -> dict[str, Any] | None:
        """The result in this file if it has the key and was made of the first of `predictions` that is there."""
        file = next((file for file in predictions if file.exists()), None)
        if file is None or not path.exists():
            return None
        # damaged: it is only a cache, the run is done again
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            parts = 1 if self.anywhere else 2
            same = result["key"].split("-")[:parts] == key.split("-")[:parts]
            return result if same and result["predictions_sha256"] == file_sha256(file) else None
        return None

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


def _entries(data: TaskData, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics of every labelled set."""
    entries = {}
    for split in data.scored:
        assert split.labels is not None
        found = score(data.task.metrics, predictions[split.source.entry], split.labels)
        metrics = {
            "metrics": finite(found.values),
            "problems": found.problems,
            "notes": found.notes,
        }
        entries[split.source.entry] = metrics
    return entries


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as JSON; numbers that are not finite become null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


FORMAT_VERSION = 1


def summarise(
    model: Mapping[str, Any],
    suite: SuiteName,
    data: Sequence[TaskData],
    results: Mapping[tuple[str, int], Mapping[str, Any]],
    seeds: Sequence[int],
    hyper: Mapping[str, Any],
    absent: Mapping[str, str],
) -> dict[str, Any]:
    """The contents of glue.json from the `results` by task and seed. `model` says what was scored."""
    entries = {}
    for task_data in data:
        of_task = [results[task_data.task.name, seed] for seed in seeds]
        for split in task_data.scored:
            entries[split.source.entry] = {
                **_entry(task_data.task, split.source, of_task, seeds),
                **_sizes(suite, task_data, split),
                "data_sha256": examples_sha256(task_data.train, split),
                "texts_sha256": texts_sha256(itertools.chain(*split.texts)),
                "seen_in_training": seen_in_training(task_data.train, split),
                "hyperparameters": dict(hyper),
            }
    return {
        "format": FORMAT_VERSION,
        **model,
        "suite": suite,
        "split": "dev",
        "selection": SELECTION,
        "seeds": list(seeds),
        "hyperparameters": dict(hyper),
        "tasks": entries,
        "absent": {
            **absent,
            **{name: why for task_data in data for name, why in task_data.absent.items()},
        },
        "averages": {
            name: _average(average, entries) for name, average in SUITES[suite].averages.items()
        },
    }


def _entry(
    task: Task, source: ExampleFile, results: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Metrics of one entry over seeds; one missing value leaves the summary of its metric null."""
    found = [result["entries"][source.entry] for result in results]
    metrics = {name: spread([one["metrics"][name] for one in found]) for name in task.metrics}
    median = metrics[task.main_metric]["median"]
    problems, notes = (
        [f"seed {seed}: {text}" for seed, one in zip(seeds, found) for text in one[kind]]
        for kind in ("problems", "notes")
    )
    return {
        "title": source.title,
        "task": task.name,
        "metrics": metrics,
        "main_metric": task.main_metric,
        "scored_epochs": [result["epoch"] for result in results],
        "score": None if median is None else 100 * median,
        "problem": "; ".join(problems) or None,
        "notes": notes,
    }


def _sizes(suite: SuiteName, data: TaskData, split: Split) -> dict[str, Any]:
    """The numbers of examples, and the official ones."""
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


def _average(average: Average, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    scores = {entry: entries.get(entry, {}).get("score") for entry in average.entries}
    missing = [entry for entry, value in scores.items() if value is None]
    return {
        "value": mean_of(list(scores.values())),
        "tasks": list(average.entries),
        "missing": missing,
        "subsets": [entry for entry in scores if entries.get(entry, {}).get("subset")],
        "definition": average.definition,
    }


def with_seconds(summary: dict[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """The summary with the fine-tuning seconds per entry (those of its task) and in all."""
    tasks = {
        name: {
            **entry,
            "seconds": sum(seconds[f"{entry['task']}-seed{seed}"] for seed in summary["seeds"]),
        }
        for name, entry in summary["tasks"].items()
    }
    return {**summary, "tasks": tasks, "seconds": sum(seconds.values())}


def show_averages(section: Mapping[str, Any]) -> None:
    """The averages, or what they lack."""
    for name, average in section["averages"].items():
        value, missing = average["value"], ", ".join(average["missing"])
        found = f"not computed, missing {missing}" if value is None else f"{value:.2f}"
        say(f"{name} {section['init']}: {found}")
