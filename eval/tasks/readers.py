"""Readers of official files, tab-separated (GLUE) or JSON lines (SuperGLUE), and of GLUE on the hub.

GLUE's files have no quoting, one example per line; CoLA's training and dev files have no header. Every reader is
strict: a deviation ends with one line naming file, line and what was expected, because a silently misread column still
trains and still gives a number. What SuperGLUE gives beside plain texts becomes text (`TEXTS`), as is usual for an
encoder without span heads.
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
    """Read one official file, by its suffix; UserError with file and line where it is not as the layout says."""
    if path.suffix == ".jsonl":
        return read_jsonl(path, task, source)
    return read_tsv(path, task, source, labelled)


def read_tsv(path: Path, task: Task, source: ExampleFile, labelled: bool) -> Split:
    """Read one file of GLUE."""
    lines, whole = _lines(path)
    columns, first = _header(path, lines, task, labelled)
    text_at = [columns.index(name) for name in task.text]
    label_at = columns.index(task.label) if labelled else 0
    id_at = next((columns.index(name) for name in ID_COLUMNS if name in columns), None)
    may_skip = task.broken_rows if source is task.train else 0
    rows, labels, ids, skipped, number = list[list[str]](), list[float](), list[int](), 0, first
    try:
        for number, line in enumerate(lines[first:], start=first + 1):
            fields = line.rstrip("\r").split("\t")
            if len(fields) != len(columns):
                skipped, last = skipped + 1, number == len(lines)
                require(skipped <= may_skip and not last, _wrong_count(line, columns, last))
                continue
            rows.append([fields[place] for place in text_at])
            if labelled:
                labels.append(_label(task, fields[label_at]))
            elif id_at is not None:
                ids.append(_next_id(ids, fields[id_at]))
    except ValueError as error:
        raise UserError(f"{path}:{number}: {error}") from None
    require(rows, f"{path}: no examples in this file; {task.title} needs rows with {', '.join(columns)}")
    require(
        whole or len(rows) >= source.examples,
        f"{path}:{len(lines)}: the last line has no newline, and there are {len(rows)} of {source.examples} examples;"
        " is the file cut short? If it is meant to be a part, end it with a newline",
    )
    return Split(source, _columns(rows), _numbers(task, labels) if labelled else None, ids or None, skipped)


def read_jsonl(path: Path, task: Task, source: ExampleFile) -> Split:
    """Read one file of SuperGLUE."""
    rows, labels = list[tuple[str, ...]](), list[float]()
    lines, _ = _lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            texts, label = _json_example(line, task)
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"a field is not as {task.title} has it ({type(error).__name__}: {error})"
            raise UserError(f"{path}:{number}: {reason}") from None
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        rows.append(texts)
        labels.append(label)
    require(rows, f"{path}: no examples in this file; {task.title} needs lines of JSON")
    return Split(source, _columns(rows), _numbers(task, labels))


def _lines(path: Path) -> tuple[list[str], bool]:
    """The lines, and whether a newline ends the last one."""
    content = path.read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line, byte = content[: error.start].count(b"\n") + 1, content[error.start]
        raise UserError(f"{path}:{line}: not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8") from None
    whole = lines[-1] == ""
    return (lines[:-1] if whole else lines), whole


def _header(path: Path, lines: list[str], task: Task, labelled: bool) -> tuple[list[str], int]:
    """Column names, and the index of the first line with an example."""
    require(lines, f"{path}: the file is empty; {task.title} needs tab-separated rows")
    found = lines[0].rstrip("\r").split("\t")
    if task.headerless and labelled:
        columns = list(task.headerless)
        require(len(found) == len(columns), f"{path}:1: {_wrong_count(lines[0], columns, last=False)}")
        return columns, 0
    expected = [*task.text, task.label] if labelled else list(task.text)
    missing = [name for name in expected if name not in found]
    require(
        not missing,
        f"{path}:1: expected a header with the columns {', '.join(expected)}; {', '.join(missing)} not in the header"
        f" found: {', '.join(found)[:200]}",
    )
    return found, 1


def _wrong_count(line: str, columns: list[str], last: bool) -> str:
    if not line.strip():
        return "the line is empty; remove it (each line is an example)"
    found = len(line.split("\t"))
    hint = "; is the file cut short?" if last and found < len(columns) else ""
    return f"expected {len(columns)} tab-separated fields ({', '.join(columns)}), found {found}{hint}"


def _label(task: Task, text: str) -> float:
    """The class number or score that this label stands for; UserError without a place."""
    if task.score_range is None:
        if text not in task.labels:
            raise UserError(f"{task.label} {text!r} is not one of {', '.join(task.labels)}")
        return task.labels.index(text)
    low, high = task.score_range
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    require(low <= value <= high, f"{task.label} {text!r} is not a number from {low:g} to {high:g}")
    return value


def _next_id(ids: list[int], text: str) -> int:
    """The example number; test files must be in the official order, for the answers are handed in by position."""
    require(text.isdecimal(), f"example number {text!r} is not a whole number")
    previous = ids[-1] if ids else -1
    require(int(text) > previous, f"example number {text} follows {previous}; test files keep the official order")
    return int(text)


def _columns(rows: list[Any]) -> tuple[list[str], ...]:
    return tuple(list(column) for column in zip(*rows))


def _numbers(task: Task, labels: Any) -> np.ndarray:
    return np.array(labels, np.float32 if task.regression else np.int64)


def _json_example(line: str, task: Task) -> tuple[tuple[str, ...], float]:
    """The texts and the label of a row; UserError without a place, or what a field of another type ends in."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"not a line of JSON ({error}); is the file cut short?") from None
    missing = [name for name in (*task.text, "label") if not isinstance(row, dict) or name not in row]
    require(not missing, f"expected the fields {', '.join(task.text)}, label; {', '.join(missing)} not found")
    label = str(row["label"]).lower() if isinstance(row["label"], bool) else str(row["label"])
    number = _label(task, label)
    texts = TEXTS[task.name](row) if task.name in TEXTS else tuple(row[name] for name in task.text)
    "".join(texts).encode()  # every one a text, and none with half a character
    return texts, number


def _wsc(row: Mapping[str, Any]) -> tuple[str, str]:
    """The text, and the text with the candidate in the pronoun's place (an index of words), as WNLI has it."""
    words, target = row["text"].split(" "), row["target"]
    place, size = int(target["span2_index"]), len(target["span2_text"].split(" "))
    require(
        0 <= place <= len(words) - size,
        f"span2_index {place} with {size} words lies outside the text's {len(words)} words",
    )
    words[place : place + size] = [target["span1_text"]]
    return row["text"], " ".join(words)


# Tasks whose texts are more than the fields of their names: WiC's word stands before its first sentence.
TEXTS: dict[str, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    "wic": lambda row: (f"{row['word']}: {row['sentence1']}", row["sentence2"]),
    "wsc": _wsc,
}


def read_hub_task(task: Task) -> TaskData:
    """Read one task from the hub's `nyu-mll/glue`; UserError at once where there is no network and no cached copy."""
    prepare_hub()
    blind = tuple(_hub_split(task, source, labelled=False) for source in task.blind)
    scored = tuple(_hub_split(task, source, labelled=True) for source in task.scored)
    return TaskData(task, _hub_split(task, task.train, labelled=True), scored, blind)


def _hub_split(task: Task, source: ExampleFile, labelled: bool) -> Split:
    import datasets

    try:
        rows: Any = datasets.load_dataset(HUB_DATASET, source.hub_config, split=source.hub_split)
    except (OSError, ValueError) as error:  # ConnectionError, LocalEntryNotFoundError, missing cache entry
        reason = " ".join(str(error).split())[:150]
        raise UserError(
            f"eval=hub: cannot load {HUB_DATASET} ({source.hub_config}): {reason}; "
            "without a network give eval.data_dir=<folder with CoLA/, SST-2/, ...>"
        ) from None
    texts = tuple(list(rows[name]) for name in task.hub_text)
    if not labelled:
        return Split(source, texts, None, [int(i) for i in rows["idx"]])
    labels = _numbers(task, rows["label"])
    if not task.regression and not np.isin(labels, range(task.outputs)).all():
        where = f"{HUB_DATASET} ({source.hub_config}, {source.hub_split})"
        raise UserError(f"{where}: labels outside 0..{task.outputs - 1}")
    return Split(source, texts, labels)
