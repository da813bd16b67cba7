"""SuperGLUE's tasks that are classifications of one or two texts, in the same form as GLUE's: off unless asked for.

The official files are JSON lines, one folder per task with train.jsonl and val.jsonl (Wang et al. 2019). What a task
gives beside plain texts is put into words as is usual for an encoder without span heads: WiC's word stands before its
first sentence, and in WSC the second text is the first one with the candidate in the place of the pronoun, as WNLI has
it. COPA, MultiRC and ReCoRD choose among answers, which this harness has no head for, and are left out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError
from eval.tasks.datasets import Split, TaskData, tasks_in_folder, unbroken
from eval.tasks.glue import TASKS, Average, Source, Task

FOLDER_FILES = ("train.jsonl", "val.jsonl")
_TRUTH = ("false", "true")


def _task(
    name: str,
    title: str,
    sizes: tuple[int, int],
    fields: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...] = ("accuracy",),
    main_metric: str = "accuracy",
) -> Task:
    sources = [Source(name, title, title, file, name, "", size) for file, size in zip(FOLDER_FILES, sizes)]
    return Task(name, title, fields, "label", labels, metrics, main_metric, sources[0], (sources[1],), (), ())


SUPERGLUE: dict[str, Task] = {
    task.name: task
    for task in (
        _task("boolq", "BoolQ", (9427, 3270), ("question", "passage"), _TRUTH),
        _task(
            "cb", "CB", (250, 56), ("premise", "hypothesis"), ("entailment", "contradiction", "neutral"),
            ("accuracy_f1", "accuracy", "f1_macro"), "accuracy_f1",
        ),
        _task("superglue_rte", "RTE", (2490, 277), ("premise", "hypothesis"), ("entailment", "not_entailment")),
        _task("wic", "WiC", (5428, 638), ("word", "sentence1", "sentence2"), _TRUTH),
        _task("wsc", "WSC", (554, 104), ("text", "target"), _TRUTH),
    )
}  # fmt: skip
ALL_TASKS = TASKS | SUPERGLUE
AVERAGES = {
    "superglue5": Average(
        tuple(SUPERGLUE),
        "mean of five of SuperGLUE's eight tasks: BoolQ (accuracy), CB (mean of accuracy and macro F1), RTE, WiC and "
        "WSC (accuracy); each is the median over seeds on the val set, times 100; not the official SuperGLUE score",
    )
}


def _wsc(row: Mapping[str, Any]) -> tuple[str, str]:
    """The text, and the text with the candidate in the pronoun's place, which is counted in words."""
    words, target = row["text"].split(" "), row["target"]
    place, size = int(target["span2_index"]), len(target["span2_text"].split(" "))
    if not 0 <= place <= len(words) - size:
        raise ValueError(f"span2_index {place} with {size} words lies outside the text's {len(words)} words")
    words[place : place + size] = [target["span1_text"]]
    return row["text"], " ".join(words)


TEXTS: dict[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    "boolq": lambda row: (row["question"], row["passage"]),
    "cb": lambda row: (row["premise"], row["hypothesis"]),
    "superglue_rte": lambda row: (row["premise"], row["hypothesis"]),
    "wic": lambda row: (f"{row['word']}: {row['sentence1']}", row["sentence2"]),
    "wsc": _wsc,
}


def tasks_in(folder: Path, wanted: Sequence[str] | None) -> tuple[list[Task], dict[str, str]]:
    """The tasks to run on `folder`, and for each of the others why not."""
    return tasks_in_folder(folder, wanted, SUPERGLUE, "SuperGLUE")


def read_task(folder: Path, task: Task) -> TaskData:
    """Read one task; UserError names the file and the line of what is wrong."""
    train, val = (read_split(folder / s.folder / s.file, task, s) for s in (task.train, task.scored[0]))
    return TaskData(task, train, (val,))


def read_split(path: Path, task: Task, source: Source) -> Split:
    """Read one file of JSON lines."""
    if not unbroken(path).is_file():
        raise UserError(f"{path}: no such file; {task.title} needs {', '.join(FOLDER_FILES)}")
    rows: list[tuple[str, ...]] = []
    labels: list[int] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        texts, label = _example(line, task, f"{path}:{number}")
        rows.append(texts)
        labels.append(label)
    if not rows:
        raise UserError(f"{path}: no examples in this file; {task.title} needs lines of JSON")
    return Split(source, tuple(list(column) for column in zip(*rows)), np.array(labels, np.int64))


def _example(line: bytes, task: Task, place: str) -> tuple[tuple[str, ...], int]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 (byte 0x{line[error.start : error.start + 1].hex()})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not a line of JSON ({error}); is the file cut short?") from None
    missing = [name for name in (*task.text, "label") if not isinstance(row, dict) or name not in row]
    if missing:
        raise UserError(f"{place}: expected the fields {', '.join(task.text)}, label; {', '.join(missing)} not found")
    label = str(row["label"])
    label = label.lower() if isinstance(row["label"], bool) else label
    if label not in task.labels:
        raise UserError(f"{place}: label {label!r} is not one of {', '.join(task.labels)}")
    try:
        texts = TEXTS[task.name](row)
        for text in texts:
            text.encode()  # a text, and one without half a character
        return texts, task.labels.index(label)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{place}: a field is not as {task.title} has it ({type(error).__name__}: {error})") from None
