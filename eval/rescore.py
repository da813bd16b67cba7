"""Scores computed once more from what a run keeps: its predictions, and the labels of the task data.

`cramming glue` computes them from the predictions again whenever it takes stored ones; this is the same for whoever
receives a run, with task files of his own. Predictions that were made up show only where the fine-tuning is done again
(docs/rules.md, "What no check here can show").
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cramming.config import file_sha256
from cramming.data.task_files import ExampleFile, Task, texts_sha256
from cramming.record_schema import Record, Scores, TaskScore
from eval.rules.evidence import files_of, kept, made_later, predicted
from eval.tasks.datasets import Split
from eval.tasks.metrics import agree, score
from eval.tasks.readers import read_file
from cramming.data.suites import SUITES, SuiteName


@dataclass
class _Found:
    """How many values were computed again, of how many tasks; in what they differ, and what was not compared."""

    values: int = 0
    entries: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # by entry or initialisation, and why


def suite_of(record: Record) -> SuiteName | None:
    """The suite of the record's scores; None where it has none that this version knows."""
    return next(
        (name for section in record.glue.values() for name in SUITES if name == section.suite), None
    )


def rescore(
    folder: Path, record: Record, suite: SuiteName, data: Path, labels: str
) -> tuple[list[str], str]:
    """Compare each stored value, of every entry, seed and initialisation, with that of its predictions and the labels
    in `data`, a folder with CoLA/, SST-2/ and so on; `labels` says where they are from. What differs, and one sentence
    on what was compared and what not."""
    found, splits = _Found(), dict[str, Split | None]()
    for name, section in {**record.glue, **record.baselines}.items():
        place = folder / "glue" / name / "predictions"
        later = files_of(made_later(record, name)) - files_of(
            kept(record, name)
        )  # it may have predicted the same
        if section.suite != suite or not place.is_dir():
            found.left_out[name] = (
                "no predictions stored" if section.suite == suite else f"of {section.suite}"
            )
            continue
        for entry, scored in section.tasks.items():
            task, source = _entries(suite).get(entry, (None, None))
            if task is None or source is None:
                found.problems.append(f"{name}: {entry} is no task of {suite}")
                continue
            if entry not in splits:
                splits[entry] = _labelled(data, task, source, found)
            if split := splits[entry]:
                problems = _compare(place, section, scored, task, split, later, found)
                found.problems += [f"{name}: {entry} {problem}" for problem in problems]
    left = "".join(f"; not {name}: {why}" for name, why in found.left_out.items())
    differ = (
        f", {len(found.problems)} problems"
        if found.problems
        else ", all agree"
        if found.values
        else ""
    )
    counts = f"{found.values} values of {len(found.entries)} tasks"
    return found.problems, f"{counts} computed again with the labels {labels}{differ}{left}"


def _entries(suite: SuiteName) -> Mapping[str, tuple[Task, ExampleFile]]:
    return {
        source.entry: (task, source)
        for task in SUITES[suite].tasks.values()
        for source in task.scored
    }


def _labelled(data: Path, task: Task, source: ExampleFile, found: _Found) -> Split | None:
    path = data / source.path
    if not path.is_file():
        found.left_out[source.entry] = f"{source.path} is not in {data}"
        return None
    return read_file(path, task, source, labelled=True)


def _compare(
    place: Path,
    section: Scores,
    scored: TaskScore,
    task: Task,
    split: Split,
    later: Container[object],
    found: _Found,
) -> Iterator[str]:
    """The problems of one entry; files made `later` are not the section's. `found` counts what was compared."""
    entry, texts = (
        split.source.entry,
        texts_sha256(text for column in split.texts for text in column),
    )
    same = scored.texts_sha256 in (None, texts)
    other = (
        ""
        if same
        else "; its texts are not those that were scored (by SHA-256), so compare with the same files"
    )
    if len(split) != scored.eval_examples:
        if scored.subset:
            found.left_out[entry] = (
                f"a subset of {scored.eval_examples} of the {len(split)} examples there"
            )
        else:
            yield f"was scored on {scored.eval_examples} examples, {split.source.path} has {len(split)}{other}"
        return
    for index, seed in enumerate(section.seeds):
        file = place / f"{task.name}-seed{seed}.npz"
        if file.is_file() and (file.name, file_sha256(file)) in later:
            found.left_out[f"{entry} seed {seed}"] = (
                "its predictions gave way to a later scoring's, broken off"
            )
            continue
        try:
            predictions = _predictions(file, split)
        except ValueError as error:
            yield f"seed {seed}: {error}"
            continue
        assert split.labels is not None
        for name, value in score(task.metrics, predictions, split.labels).values.items():
            known = scored.metrics.get(name)
            stored = known.per_seed[index] if known and index < len(known.per_seed) else None
            again = value if math.isfinite(value) else None
            if not agree(stored, again):
                yield f"seed {seed}: {name} is {_word(stored)} on record, {_word(again)} by its predictions{other}"
            found.values += 1
        found.entries.add(entry)


def _predictions(file: Path, split: Split) -> np.ndarray:
    """[N], one for each example; ValueError where there are none such."""
    if not file.is_file():
        raise ValueError(f"{file.name} is not there")
    found = predicted(file, f"dev.{split.source.entry}")
    if len(found) != len(split):
        raise ValueError(
            f"{file.name} has {found.size} predictions for {len(split)} examples of {split.source.path}"
        )
    return found


def _word(value: float | None) -> str:
    return "null" if value is None else f"{value:.6g}"
