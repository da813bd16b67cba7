"""Readers of GLUE: the official TSV folders, the same layouts written for the embedded suite, and the hub.

The official files are tab-separated without any quoting, UTF-8, one example per line; CoLA's training and dev files
have no header. Every reader is strict: a file that is not what it should be ends with one line naming the file, the
line and what was expected, because a silently misread column still trains and still gives a number. A folder may hold
only some of the tasks, and a training file may be a sample of the official one: that is allowed and marked
(`TaskData.subset`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError
from cramming.hub import prepare_hub
from eval.tasks.glue import TASKS, Source, Task, find_tasks

HUB_DATASET = "nyu-mll/glue"
ID_COLUMNS = ("index", "id")


@dataclass(frozen=True)
class Split:
    """Examples of one file: texts as one list per text column, and labels (class numbers or scores) where it has them.

    `ids` are the official example numbers of a test set. `skipped` counts known broken rows that were left out.
    """

    source: Source
    texts: tuple[list[str], ...]
    labels: np.ndarray | None
    ids: list[int] | None = None
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.texts[0])

    @cached_property
    def sha256(self) -> str:
        """Hash of the content, so that a stored result is never taken for one on other data."""
        digest = hashlib.sha256()
        for column in self.texts:
            digest.update("\x1e".join(column).encode())
        digest.update(b"" if self.labels is None else self.labels.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TaskData:
    """All that is there of one task: training set, labelled sets to score, test sets to predict; and what is absent."""

    task: Task
    train: Split
    scored: tuple[Split, ...]
    blind: tuple[Split, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def subset(self) -> bool:
        """Whether the training set has another number of examples than the official one."""
        return len(self.train) != self.task.train.examples

    @property
    def sha256(self) -> str:
        """Hash of everything a result depends on."""
        splits = (self.train, *self.scored, *self.blind)
        return hashlib.sha256("".join(f"{s.source.entry}:{s.sha256}" for s in splits).encode()).hexdigest()


def examples_sha256(*splits: Split) -> str:
    """Hash of the examples of several sets, the same for all copies of a data set: neither the order within a set nor
    white space counts, which its publishers (the official files, hubs) treat differently."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update("\x1d".join(sorted(_rows_in_words(split))).encode() + b"\x1c")
    return digest.hexdigest()


def in_one_order(data: TaskData) -> TaskData:
    """The same with the training examples in an order that they alone decide, before a seed shuffles them: copies of a
    data set train the same model, and rows in another order are no other seed."""
    train, rows = data.train, _rows_in_words(data.train)
    order = sorted(range(len(train)), key=lambda i: (rows[i], [column[i] for column in train.texts]))
    labels = None if train.labels is None else train.labels[order]
    texts = tuple([column[i] for i in order] for column in train.texts)
    return replace(data, train=replace(train, texts=texts, labels=labels))


def _rows_in_words(split: Split) -> list[str]:
    labels = [0.0] * len(split) if split.labels is None else split.labels.tolist()
    return ["\x1e".join([*map(_plain, texts), f"{label:.3f}"]) for *texts, label in zip(*split.texts, labels)]


def seen_in_training(train: Split, split: Split) -> int:
    """How many examples of `split` are training examples too, whatever their labels.

    Of GLUE's development sets 1.5 % of CoLA's are, 0.4 % of STS-B's, and none of SST-2's, MRPC's, RTE's, QNLI's and
    MNLI's (of the last two in a part of the training set).
    """
    known = {tuple(map(_plain, texts)) for texts in zip(*train.texts)}
    return sum(tuple(map(_plain, texts)) in known for texts in zip(*split.texts))


def _plain(text: str) -> str:
    return " ".join(text.split())


def tasks_in_folder(
    folder: Path, wanted: Sequence[str] | None, table: Mapping[str, Task] = TASKS, suite: str = "GLUE"
) -> tuple[list[Task], dict[str, str]]:
    """The tasks of `table` to run on `folder`, and for each of the others why not.

    With `wanted` exactly those, present or not (reading an absent one is then an error); else those with a folder.
    """
    expected = ", ".join(f"{task.train.folder}/" for task in table.values())
    if not unbroken(folder).is_dir():
        raise UserError(f"eval.data_dir={folder}: no such folder; it should hold {expected}")
    if wanted is not None:
        tasks = find_tasks(wanted, table)
        reason = "not in eval.tasks"
    else:
        tasks = [task for task in table.values() if unbroken(folder / task.train.folder).is_dir()]
        reason = f"no such task folder in {folder}"
    if not tasks:
        raise UserError(f"eval.data_dir={folder}: no {suite} task found; expected one or more of {expected}")
    return tasks, {task.name: reason for task in table.values() if task not in tasks}


def read_task(folder: Path, task: Task) -> TaskData:
    """Read one task from its official TSV files in `folder`.

    The training file and at least one labelled dev file must be there; of MNLI's two dev sets one may be missing, test
    files and the diagnostic set are optional. UserError names a missing file, or the file and line of what is wrong.
    """
    needed = ", ".join([task.train.file, *(s.file for s in task.scored)])
    train_path = folder / task.train.folder / task.train.file
    if not unbroken(train_path).is_file():
        raise UserError(f"{train_path}: no such file; {task.title} needs {needed}")
    scored, absent = [], {}
    for source in task.scored:
        path = folder / source.folder / source.file
        if unbroken(path).is_file():
            scored.append(read_tsv(path, task, source, labelled=True))
        else:
            absent[source.entry] = f"{source.folder}/{source.file} is not in the data folder"
    if not scored:
        first = task.scored[0]
        raise UserError(f"{folder / first.folder / first.file}: no such file; {task.title} needs {needed}")
    train = read_tsv(train_path, task, task.train, labelled=True)
    blind = [
        read_tsv(path, task, source, labelled=False)
        for source in task.blind
        if unbroken(path := folder / source.folder / source.file).is_file()
    ]
    return TaskData(task, train, tuple(scored), tuple(blind), absent)


def unbroken(path: Path) -> Path:
    """`path`; UserError where it or its folder is a link that leads nowhere, which nobody means by leaving it out."""
    for place in (path.parent, path):
        if place.is_symlink() and not place.exists():
            raise UserError(f"{place}: is a link to {place.readlink()}, which is not there; mend or remove it")
    return path


def read_tsv(path: Path, task: Task, source: Source, labelled: bool) -> Split:
    """Read one official TSV file; UserError with file and line where it is not as the layout says."""
    lines = _decode(path).split("\n")
    whole = lines[-1] == ""  # a newline ends the last line
    if whole:
        lines.pop()
    columns, first = _header(path, lines, task, labelled)
    text_at = [columns.index(name) for name in task.text]
    label_at = columns.index(task.label) if labelled else -1
    id_at = next((columns.index(name) for name in ID_COLUMNS if name in columns), None)
    allowed = task.broken_rows if source is task.train else 0
    rows = list(_rows(path, lines, first, columns, allowed))
    texts = tuple([fields[place] for _, fields in rows] for place in text_at)
    labels = [_label(task, fields[label_at], path, number) for number, fields in rows] if labelled else []
    ids: list[int] = []
    if id_at is not None and not labelled:
        for number, fields in rows:
            ids.append(_next_id(ids, fields[id_at], path, number))
    if not rows:
        raise UserError(f"{path}: no examples in this file; {task.title} needs rows with {', '.join(columns)}")
    if not whole and len(rows) < source.examples:
        raise UserError(
            f"{path}:{len(lines)}: the last line has no newline, and there are {len(rows)} of {source.examples} "
            "examples; is the file cut short? If it is meant to be a part, end it with a newline"
        )
    kind = np.float32 if task.regression else np.int64
    skipped = len(lines) - first - len(rows)
    return Split(source, texts, np.array(labels, kind) if labelled else None, ids or None, skipped)


def _rows(
    path: Path, lines: Sequence[str], first: int, columns: list[str], allowed: int
) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every example; at most `allowed` broken rows are left out, and never the last one."""
    for number, line in enumerate(lines[first:], start=first + 1):
        fields = line.rstrip("\r").split("\t")
        if len(fields) == len(columns):
            yield number, fields
            continue
        allowed -= 1
        if allowed < 0 or number == len(lines):
            raise UserError(_wrong_count(path, number, line, columns, last=number == len(lines)))


def _decode(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        found = content[error.start : error.start + 1].hex()
        raise UserError(f"{path}:{line}: not UTF-8 (byte 0x{found}); save the file as UTF-8") from None


def _header(path: Path, lines: list[str], task: Task, labelled: bool) -> tuple[list[str], int]:
    """Column names, and the index of the first line with an example."""
    if not lines:
        raise UserError(f"{path}: the file is empty; {task.title} needs tab-separated rows")
    found = lines[0].rstrip("\r").split("\t")
    if task.headerless and labelled:
        if len(found) != len(task.headerless):
            raise UserError(_wrong_count(path, 1, lines[0], list(task.headerless), last=False))
        return list(task.headerless), 0
    expected = [*task.text, task.label] if labelled else list(task.text)
    missing = [name for name in expected if name not in found]
    if missing:
        raise UserError(
            f"{path}:1: expected a header with the columns {', '.join(expected)}; "
            f"{', '.join(missing)} not in the header found: {', '.join(found)[:200]}"
        )
    return found, 1


def _wrong_count(path: Path, line: int, text: str, columns: list[str], last: bool) -> str:
    found = len(text.split("\t"))
    if text.strip() == "":
        return f"{path}:{line}: the line is empty; remove it (each line is an example)"
    hint = "; is the file cut short?" if last and found < len(columns) else ""
    return f"{path}:{line}: expected {len(columns)} tab-separated fields ({', '.join(columns)}), found {found}{hint}"


def _label(task: Task, text: str, path: Path, line: int) -> float:
    if task.score_range:
        low, high = task.score_range
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise UserError(f"{path}:{line}: {task.label} {text!r} is not a number from {low:g} to {high:g}")
        return value
    try:
        return task.labels.index(text)
    except ValueError:
        raise UserError(f"{path}:{line}: {task.label} {text!r} is not one of {', '.join(task.labels)}") from None


def _next_id(ids: list[int], text: str, path: Path, line: int) -> int:
    """The example number; test files must be in the official order, for the answers are handed in by position."""
    if not text.isdecimal():
        raise UserError(f"{path}:{line}: example number {text!r} is not a whole number")
    if ids and int(text) <= ids[-1]:
        raise UserError(f"{path}:{line}: example number {text} follows {ids[-1]}; test files keep the official order")
    return int(text)


def read_hub_task(task: Task) -> TaskData:
    """Read one task from the hub's `nyu-mll/glue`; UserError at once where there is no network and no cached copy."""
    prepare_hub()
    import datasets

    def load(source: Source, labelled: bool) -> Split:
        try:
            rows = datasets.load_dataset(HUB_DATASET, source.hub_config, split=source.hub_split)
        except (OSError, ValueError) as error:  # ConnectionError, LocalEntryNotFoundError, missing cache entry
            reason = " ".join(str(error).split())[:150]
            raise UserError(
                f"eval=hub: cannot load {HUB_DATASET} ({source.hub_config}): {reason}; "
                "without a network give eval.data_dir=<folder with CoLA/, SST-2/, ...>"
            ) from None
        return _split_of_rows(rows, task, source, labelled)

    blind = [load(source, labelled=False) for source in task.blind]
    scored = [load(source, labelled=True) for source in task.scored]
    return TaskData(task, load(task.train, labelled=True), tuple(scored), tuple(blind))


def _split_of_rows(rows: Any, task: Task, source: Source, labelled: bool) -> Split:
    texts = tuple(list(rows[name]) for name in task.hub_text)
    labels = np.array(rows["label"], np.float32 if task.regression else np.int64) if labelled else None
    if labels is not None and not task.regression and not np.isin(labels, range(task.outputs)).all():
        raise UserError(
            f"{HUB_DATASET} ({source.hub_config}, {source.hub_split}): labels outside 0..{task.outputs - 1}"
        )
    return Split(source, texts, labels, None if labelled else [int(i) for i in rows["idx"]])
