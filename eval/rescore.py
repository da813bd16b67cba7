"""Scores computed from a run's stored predictions and the labels of the task data.

Predictions that were made from the labels are detected only if the fine-tuning is repeated (eval/recompute.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from cramming.data.suites import SUITES
from cramming.data.task_files import ENTRIES, ExampleFile, Task, texts_sha256
from cramming.record_schema import Record, Scores, TaskScore
from cramming.scores import run_name
from eval.rules.evidence import predicted
from eval.tasks.datasets import Split
from eval.tasks.metrics import agree, score
from eval.tasks.readers import read_file


def predictions_file(folder: Path, sha256: str) -> Path:
    """Return the path of the predictions with this SHA-256."""
    return folder / "predictions" / f"{sha256}.npz"


def sections_of(record: Record) -> dict[str, Scores]:
    """Return all scored sections: those of the rules, the baselines, checkpoints and frozen probes."""
    sections = {**record.glue, **record.baselines}
    for suite, checkpoints in record.checkpoints.items():
        for sha256, section in checkpoints.items():
            sections[f"checkpoint {sha256[:12]}, {suite}"] = section
    for suite, probes in record.probe.items():
        for init, section in probes.items():
            sections[f"probe, {init}, {suite}"] = section
    return sections


def misfitting_predictions(folder: Path, record: Record) -> Iterator[str]:
    """Yield the problems of predictions that show without labels.

    These are wrong numbers of predictions, unknown classes, and scores without finite predictions.
    """
    for init, section in sections_of(record).items():
        for entry, task in section.tasks.items():
            for seed, sha256 in _files(section, task):
                file = predictions_file(folder, sha256)
                if not file.is_file():
                    continue
                for problem in _misfits(file, entry, task, section.seeds.index(seed)):
                    yield f"predictions/{file.name}: {problem} ({init}/{entry} seed {seed})"


def _files(section: Scores, task: TaskScore) -> Iterator[tuple[int, str]]:
    """Yield each seed of a task with the SHA-256 of its predictions."""
    for seed in section.seeds:
        sha256 = section.predictions.get(run_name(task.task, seed))
        if sha256 is not None:
            yield seed, sha256


def _misfits(file: Path, entry: str, task: TaskScore, index: int) -> Iterator[str]:
    try:
        values = predicted(file, f"dev.{entry}")
    except ValueError as error:
        yield str(error)
        return
    if len(values) != task.eval_examples:
        yield f"{len(values)} predictions for {task.eval_examples} examples"
    labels = ENTRIES[entry][0].labels if entry in ENTRIES else ()
    finite = values[np.isfinite(values)]
    if labels and not np.isin(finite, np.arange(len(labels))).all():
        yield "predictions that are no class of the task"
    if len(finite) < len(values) and task.main.per_seed[index] is not None:
        yield "predictions that are not finite, and a score"


@dataclass
class Rescored:
    """Result of a comparison: number of values computed, problems, and entries left out with the reasons."""

    values: int = 0
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def describe(self, labels: str) -> str:
        """Return one sentence on the result; `labels` names the origin of the labels."""
        left_out = "".join(f"; not {name}: {why}" for name, why in self.left_out.items())
        return f"{self.values} values computed again with the labels {labels}{left_out}"


def rescore(folder: Path, sections: Mapping[str, Scores], data: Path) -> Rescored:
    """Compare each value with that of its predictions and the labels in `data`, a folder with CoLA/ and so on.

    `sections` are of one suite.
    """
    result = Rescored()
    splits: dict[str, Split | None] = {}
    for init, section in sections.items():
        known = _entries(section.suite)
        for entry, task_score in section.tasks.items():
            if entry not in known:
                result.problems.append(f"{init}/{entry}: no labelled set of {section.suite}")
                continue
            if entry not in splits:
                splits[entry] = _read(data, *known[entry], result)
            split = splits[entry]
            if split is not None:
                task = known[entry][0]
                result.problems += _compare(folder, section, task_score, task, split, result)
    return result


def _entries(suite: str) -> Mapping[str, tuple[Task, ExampleFile]]:
    entries: dict[str, tuple[Task, ExampleFile]] = {}
    suites = {str(name): known for name, known in SUITES.items()}
    if suite in suites:
        for task in suites[suite].tasks.values():
            entries |= {source.entry: (task, source) for source in task.scored}
    return entries


def _read(data: Path, task: Task, source: ExampleFile, result: Rescored) -> Split | None:
    path = data / source.path
    if not path.is_file():
        result.left_out[source.entry] = f"{source.path} is not in {data}"
        return None
    return read_file(path, task, source, labelled=True)


def _compare(
    folder: Path,
    section: Scores,
    stored: TaskScore,
    task: Task,
    split: Split,
    result: Rescored,
) -> Iterator[str]:
    """Yield the problems of one labelled set; `result` counts the compared values."""
    entry = split.source.entry
    is_same = stored.texts_sha256 == texts_sha256(chain.from_iterable(split.texts))
    other = "" if is_same else "; the texts are not those that were scored (by SHA-256)"
    if len(split) != stored.eval_examples:
        if stored.subset:
            result.left_out[entry] = f"a subset of {stored.eval_examples} of {len(split)} examples"
        else:
            yield (
                f"{section.init}/{entry} was scored on {stored.eval_examples} examples,"
                f" {split.source.path} has {len(split)}{other}"
            )
        return
    assert split.labels is not None
    for index, (seed, sha256) in enumerate(_files(section, stored)):
        file = predictions_file(folder, sha256)
        try:
            predictions = predicted(file, f"dev.{entry}") if file.is_file() else np.empty(0)
        except ValueError:
            continue  # reported by `misfitting_predictions`
        if len(predictions) != len(split):
            continue
        for name, value in score(task.metrics, predictions, split.labels).values.items():
            metric = stored.metrics.get(name)
            recorded = metric.per_seed[index] if metric else None
            computed = value if math.isfinite(value) else None
            result.values += 1
            if not agree(recorded, computed):
                yield (
                    f"predictions/{file.name} ({section.init}/{entry} seed {seed}): {name} is"
                    f" {recorded} in the log, {computed} by the labels{other}"
                )
