"""The summary over seeds that glue.json and the record hold: every entry, and the averages."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from cramming.config import texts_sha256
from cramming.data.task_files import ExampleFile, Task
from eval.tasks.datasets import Split, TaskData, examples_sha256, seen_in_training
from eval.tasks.suites import SUITES, SuiteName

FORMAT_VERSION = 1


def summarise(
    model: Mapping[str, Any],
    suite: SuiteName,
    data: Sequence[TaskData],
    results: Mapping[tuple[str, int], Mapping[str, Any]],
    seeds: Sequence[int],
    hyper: Mapping[str, Any],
    absent: Mapping[str, str],
    selection: str,
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
    missing = dict(absent) | {name: why for task_data in data for name, why in task_data.absent.items()}
    return {
        "format": FORMAT_VERSION,
        **model,
        "suite": suite,
        "split": "dev",
        "selection": selection,
        "seeds": list(seeds),
        "hyperparameters": dict(hyper),
        "tasks": entries,
        "absent": missing,
        "averages": _averages(suite, entries),
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
