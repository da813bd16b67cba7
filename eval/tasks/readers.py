"""Readers of official files, tab-separated (GLUE) or JSON lines (SuperGLUE), and of GLUE on the hub.

GLUE's files have no quoting, one example per line; CoLA's training and dev files have no header. Every reader is
strict: a deviation is an error that names file, line and the expected content, because a misread column still trains
and still gives a number. SuperGLUE's words and spans are written into the texts (`TEXTS`), as is usual for an encoder
without span heads.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError, require
from cramming.data.task_files import ExampleFile, Task
from cramming.hub import prepare_hub
from eval.tasks.datasets import Split, TaskData

HUB_DATASET = "nyu-mll/glue"
ID_COLUMNS = ("index", "id")


def read_file(path: Path, task: Task, source: ExampleFile, labelled: bool) -> Split:
    """Return the examples of one official file, by its suffix; raise UserError with file and line for a deviation."""
    content = path.read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line, byte = content[: error.start].count(b"\n") + 1, content[error.start]
        raise UserError(
            f"{path}:{line}: not UTF-8 (byte 0x{byte:02x}). Save the file as UTF-8."
        ) from None
    ends_with_newline = lines[-1] == ""
    if ends_with_newline:
        del lines[-1]
    read_lines = _read_jsonl if path.suffix == ".jsonl" else _read_tsv
    split = read_lines(path, lines, task, source, labelled)
    require(
        len(split) > 0, f"{path}: no examples in this file, {task.title} has {source.examples}."
    )
    require(
        ends_with_newline or len(split) >= source.examples,
        f"{path}:{len(lines)}: the last line has no newline, and there are {len(split)} of {source.examples} examples."
        " If the file is not truncated but a subset, end it with a newline.",
    )
    return split


def _read_tsv(
    path: Path, lines: list[str], task: Task, source: ExampleFile, labelled: bool
) -> Split:
    """Return the examples of a file of GLUE."""
    columns, first_row = _columns_of_tsv(path, lines, task, labelled)
    text_indices = [columns.index(name) for name in task.text]
    label_index = columns.index(task.label) if labelled else 0
    id_indices = [columns.index(name) for name in ID_COLUMNS if name in columns]
    may_skip = task.broken_rows if source is task.train else 0
    rows, labels, ids = list[list[str]](), list[float](), list[int]()
    skipped = 0
    for number, line in enumerate(lines[first_row:], start=first_row + 1):
        fields = line.rstrip("\r").split("\t")
        place = f"{path}:{number}"
        if len(fields) != len(columns):
            skipped += 1
            # A short last line is never a known broken row, but a sign of a truncated file.
            require(
                skipped <= may_skip and number < len(lines),
                f"{place}: expected {len(columns)} tab-separated fields ({', '.join(columns)}), found {len(fields)}",
            )
            continue
        rows.append([fields[index] for index in text_indices])
        if labelled:
            labels.append(_label(task, fields[label_index], place))
        elif id_indices:
            ids.append(_next_id(fields[id_indices[0]], ids, place))
    numbers = _numbers(task, labels) if labelled else None
    return Split(source, _columns(rows), numbers, ids or None, skipped)


def _columns_of_tsv(
    path: Path, lines: list[str], task: Task, labelled: bool
) -> tuple[list[str], int]:
    """Return the names of the columns, and the index of the first line with an example."""
    if task.headerless and labelled:
        return list(task.headerless), 0
    header = lines[0] if lines else ""
    columns = header.rstrip("\r").split("\t")
    expected = [*task.text, task.label] if labelled else task.text
    require(
        set(expected) <= set(columns),
        f"{path}:1: expected a header with the columns {', '.join(expected)}",
    )
    return columns, 1


def _next_id(field: str, ids: list[int], place: str) -> int:
    """Return the number of an example; raise UserError unless it is larger than that of the example before.

    Predictions are stored without these numbers, so a test file must be in the official order.
    """
    previous = ids[-1] if ids else -1
    is_ordered = field.isdecimal() and int(field) > previous
    require(is_ordered, f"{place}: example number {field!r} is not in the official order")
    return int(field)


def _read_jsonl(
    path: Path, lines: list[str], task: Task, source: ExampleFile, labelled: bool
) -> Split:
    """Return the examples of a file of SuperGLUE."""
    assert labelled, "SuperGLUE's test files are not read"
    rows, labels = list[tuple[str, ...]](), list[float]()
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
            label = str(row["label"])
            if isinstance(row["label"], bool):
                label = label.lower()
            if task.name in TEXTS:
                texts = TEXTS[task.name](row)
            else:
                texts = tuple(row[name] for name in task.text)
            "".join(texts).encode()  # raises unless all are texts without lone surrogates
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{place}: no example of {task.title} ({type(error).__name__}: {error})"
            ) from None
        rows.append(texts)
        labels.append(_label(task, label, place))
    return Split(source, _columns(rows), _numbers(task, labels))


def _label(task: Task, text: str, place: str) -> float:
    """Return the class number or score of a label."""
    if task.score_range is None:
        require(
            text in task.labels,
            f"{place}: {task.label} {text!r} is not one of {', '.join(task.labels)}",
        )
        return task.labels.index(text)
    low, high = task.score_range
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    require(
        low <= value <= high,
        f"{place}: {task.label} {text!r} is not a number from {low:g} to {high:g}",
    )
    return value


def _columns(rows: list[Any]) -> tuple[list[str], ...]:
    return tuple(list(column) for column in zip(*rows)) or ([],)


def _numbers(task: Task, labels: Any) -> np.ndarray:
    return np.array(labels, np.float32 if task.regression else np.int64)


def _wsc(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text, and the text with the candidate in place of the pronoun, as in WNLI.

    Span 1 is the candidate, span 2 the pronoun, whose index counts words.
    """
    words = row["text"].split(" ")
    target = row["target"]
    index = int(target["span2_index"])
    size = len(target["span2_text"].split(" "))
    if not 0 <= index <= len(words) - size:
        raise IndexError(
            f"span2_index {index} with {size} words lies outside the text's {len(words)} words"
        )
    words[index : index + size] = [target["span1_text"]]
    return row["text"], " ".join(words)


def _wic(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return both sentences, the first after the word whose meanings are compared."""
    return row["word"] + ": " + row["sentence1"], row["sentence2"]


# Tasks whose texts are not just fields of the row
TEXTS: dict[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {"wic": _wic, "wsc": _wsc}


def read_hub_task(task: Task) -> TaskData:
    """Return a task from the hub's `nyu-mll/glue`; raise UserError at once without a network and a cached copy."""
    prepare_hub()
    blind = tuple(_hub_split(task, source, labelled=False) for source in task.blind)
    scored = tuple(_hub_split(task, source, labelled=True) for source in task.scored)
    return TaskData(task, _hub_split(task, task.train, labelled=True), scored, blind)


def _hub_split(task: Task, source: ExampleFile, labelled: bool) -> Split:
    import datasets

    where = f"{HUB_DATASET} ({source.hub_config}, {source.hub_split})"
    try:
        rows: Any = datasets.load_dataset(HUB_DATASET, source.hub_config, split=source.hub_split)
    except (OSError, ValueError) as error:  # no connection, or no entry in the cache
        reason = " ".join(str(error).split())[:150]
        hint = "Without a network set eval.data_dir=<folder with CoLA/, SST-2/, ...>."
        raise UserError(f"eval=hub: cannot load {where}: {reason}. {hint}") from None
    texts = tuple(list(rows[name]) for name in task.hub_text or task.text)
    if not labelled:
        return Split(source, texts, None, [int(i) for i in rows["idx"]])
    labels = _numbers(task, rows["label"])
    known = task.regression or np.isin(labels, range(task.outputs)).all()
    require(known, f"{where}: labels outside 0..{task.outputs - 1}")
    return Split(source, texts, labels)
