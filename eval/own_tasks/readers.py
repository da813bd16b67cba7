"""Readers of user files as fine-tuning tasks: CSV, TSV, JSON lines, parquet, CoNLL columns. GLUE as such tasks.

A row that cannot be read raises a UserError with its file and number, counted from 1 after a header.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cramming.config import UserError, require, shown, suggestion
from cramming.data.task_files import ExampleFile, Task
from eval.own_tasks.task_file import OwnTask
from eval.tasks.datasets import Split, TaskData, in_one_order

FOLD_SEED = 0  # the folds are the same for every model
LABEL_SEPARATOR = "|"  # separator in a text column with several labels
DOCUMENT_START = "-DOCSTART-"  # CoNLL 2003's mark between documents, not a sentence

Row = dict[str, Any]


class Example(NamedTuple):
    """Texts and label of a row of a file; `location` names the row in messages."""

    texts: tuple[str, ...]
    label: Any
    location: str


@dataclass(frozen=True)
class OwnTaskData:
    """User-defined task in memory. Each of `parts` is trained on and scored by a model; k folds are k parts.

    The predictions of a labelled set are those of all parts, concatenated.
    """

    name: str
    metric: str
    parts: tuple[TaskData, ...]

    @property
    def task(self) -> Task:
        """Task of the first part; those of other parts differ in their names only."""
        return self.parts[0].task

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the labelled sets."""
        return tuple(split.source.entry for split in self.parts[0].scored)

    def splits(self, name: str) -> list[Split]:
        """Return the split with this name of each part."""
        splits = []
        for part in self.parts:
            splits += [split for split in part.scored if split.source.entry == name]
        return splits

    def labels(self, name: str) -> np.ndarray:
        """Return the labels of a set, as numbers."""
        return np.concatenate([labels_of(split) for split in self.splits(name)])

    def words_per_text(self, name: str) -> np.ndarray:
        """Return the number of words of each text of a set."""
        texts = chain.from_iterable(split.texts[0] for split in self.splits(name))
        return np.array([text.count(" ") + 1 for text in texts])


def labels_of(split: Split) -> np.ndarray:
    """Return the labels of a labelled split."""
    assert split.labels is not None, split.source.path
    return split.labels


def read_own_task(name: str, task: OwnTask) -> OwnTaskData:
    """Return a task with the examples of its files; raise UserError with file and row for an error in them."""
    sets = {part: list(_read_examples(path, task)) for part, path in task.files.paths().items()}
    for part, examples in sets.items():
        require(examples, f"{task.files.paths()[part]}: no examples. Give a file that has some.")
    labels = _labels_of_task(task, list(chain.from_iterable(sets.values())))
    _require_fitting_metric(name, task, labels)
    splits = {part: _make_split(task, part, examples, labels) for part, examples in sets.items()}
    if task.folds:
        return OwnTaskData(name, task.metric, _make_folds(name, task, labels, splits["train"]))
    scored = tuple(split for part, split in splits.items() if part != "train")
    single_task = _task(name, task, labels, scored)
    return OwnTaskData(name, task.metric, (TaskData(single_task, splits["train"], scored),))


def glue_task(data: TaskData) -> OwnTaskData:
    """Return a task of GLUE without its test sets; a labelled set is named by its file: `dev`, or `dev_matched`."""
    scored = []
    for split in data.scored:
        source = replace(split.source, entry=Path(split.source.file).stem)
        scored.append(replace(split, source=source))
    part = replace(in_one_order(data), scored=tuple(scored), blind=())
    return OwnTaskData(data.task.name, data.task.main_metric, (part,))


def _task(name: str, task: OwnTask, labels: tuple[str, ...], scored: Sequence[Split]) -> Task:
    return Task(
        name,
        name,
        task.text or ("words",),
        task.label or "tag",
        labels,
        (task.metric,),
        _file("train", 0),
        tuple(split.source for split in scored),
        kind=task.kind,
        balanced=task.class_weights is not None,
    )


def _file(part: str, examples: int) -> ExampleFile:
    return ExampleFile(part, part, "", part, examples)


# Labels ---------------------------------------------------------------------------------------------------------------


def _labels_of_task(task: OwnTask, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the labels in the order of the task file, or sorted if it lists none; () for regression."""
    if task.kind == "regression":
        return ()
    seen = set(chain.from_iterable(_names(task, example) for example in examples))
    if task.labels is None:
        require(
            len(seen) > 1,
            f"{examples[0].location}: all labels are {shown(sorted(seen))}. Nothing can be learned from them.",
        )
        return tuple(sorted(seen))
    for example in examples:
        for label in _names(task, example):
            if label not in task.labels:
                known = suggestion(label, task.labels)
                raise UserError(f"{example.location}: label {label!r} is not in `labels`. {known}")
    return task.labels


def _names(task: OwnTask, example: Example) -> list[str]:
    """Return the names of an example's labels: one class, any number of labels, or one tag per word."""
    if task.kind == "classification":
        name = _name(example.label, example.location)
        require(name, f"{example.location}: no label. Fill it in, or remove the row.")
        return [name]
    values = example.label
    if isinstance(values, str):
        values = [part for part in values.split(LABEL_SEPARATOR) if part.strip()]
    require(
        isinstance(values, list),
        f"{example.location}: {shown(values)} is not a list of labels. Write a list, or a{LABEL_SEPARATOR}b.",
    )
    return [_name(value, example.location) for value in values]


def _name(value: Any, location: str) -> str:
    """Return a label as text; 1 and 1.0 are equal, and true is `true`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    require(
        isinstance(value, str | int | float),
        f"{location}: {shown(value)} is not a label. Write text or a number.",
    )
    return str(value).strip()


def _number(example: Example) -> float:
    try:
        value = float(example.label)
    except (TypeError, ValueError):
        value = float("nan")
    require(
        np.isfinite(value),
        f"{example.location}: label {shown(example.label)} is not a number. Correct or remove the row.",
    )
    return value


def _require_fitting_metric(name: str, task: OwnTask, labels: tuple[str, ...]) -> None:
    """Raise UserError if the metric is not defined for these labels."""
    if task.metric == "f1" and task.kind == "classification":
        require(
            len(labels) == 2,
            f"{name}.metric=f1: needs two classes, and the task has {len(labels)}. Choose macro_f1.",
        )
    if task.metric == "span_f1":
        for label in labels:
            require(
                label == "O" or label[:2] in ("B-", "I-"),
                f"{name}.metric=span_f1: tag {label!r} is not O, B-<type> or I-<type>."
                " Write the tags in IOB2, or choose accuracy.",
            )


# Splits ---------------------------------------------------------------------------------------------------------------


def _make_split(
    task: OwnTask, part: str, examples: Sequence[Example], labels: tuple[str, ...]
) -> Split:
    texts = [example.texts for example in examples]
    columns = tuple(map(list, zip(*texts)))
    numbers = {label: number for number, label in enumerate(labels)}
    values: np.ndarray
    if task.kind == "regression":
        values = np.array([_number(example) for example in examples], np.float32)
    elif task.kind == "multilabel":
        values = np.zeros((len(examples), len(labels)), np.float32)
        for row, example in enumerate(examples):
            values[row, [numbers[label] for label in _names(task, example)]] = 1
    else:
        names = chain.from_iterable(_names(task, example) for example in examples)
        values = np.array([numbers[label] for label in names], np.int64)
    return Split(_file(part, len(examples)), columns, values)


def _make_folds(
    name: str, task: OwnTask, labels: tuple[str, ...], whole: Split
) -> tuple[TaskData, ...]:
    """Return k parts, each scored on another k-th of the examples and trained on the rest; classes are stratified."""
    from sklearn.model_selection import KFold, StratifiedKFold

    assert task.folds is not None
    require(
        len(whole) >= task.folds,
        f"{name}.folds={task.folds}: more than the {len(whole)} examples. Choose fewer.",
    )
    values = labels_of(whole)
    is_class = task.kind == "classification"
    if is_class:
        rarest = int(np.unique(values, return_counts=True)[1].min())
        is_class = rarest >= task.folds  # otherwise some folds lack a class anyway
    method = StratifiedKFold if is_class else KFold
    divided = method(task.folds, shuffle=True, random_state=FOLD_SEED)
    texts = np.arange(len(whole))
    parts = []
    for number, (train, held_out) in enumerate(divided.split(texts, values if is_class else None)):
        scored = take(whole, held_out, task.kind == "tokens", "folds")
        fold_task = _task(f"{name}-fold{number}", task, labels, [scored])
        parts.append(
            TaskData(fold_task, take(whole, train, task.kind == "tokens", "train"), (scored,))
        )
    return tuple(parts)


def take(split: Split, rows: np.ndarray, labels_words: bool, name: str) -> Split:
    """Return a split of these examples only."""
    columns = []
    for column in split.texts:
        columns.append([column[row] for row in rows])
    texts = tuple(columns)
    values = labels_of(split)
    if labels_words:
        bounds = np.cumsum([0] + [text.count(" ") + 1 for text in split.texts[0]])
        word_rows = [np.arange(bounds[row], bounds[row + 1]) for row in rows]
        return Split(_file(name, len(rows)), texts, values[np.concatenate(word_rows)])
    return Split(_file(name, len(rows)), texts, values[rows])


# Files ----------------------------------------------------------------------------------------------------------------


def _read_examples(path: Path, task: OwnTask) -> Iterator[Example]:
    if path.suffix not in READERS:
        yield from _read_conll(path)
        return
    assert task.text is not None and task.label is not None
    columns = (*task.text, task.label)
    for number, row in enumerate(READERS[path.suffix](path), start=1):
        location = f"{path}: row {number}"
        for column in columns:
            require(
                column in row,
                f"{location}: no column {column!r}. {suggestion(column, [str(key) for key in row])}",
            )
        if task.kind == "tokens":
            yield _sentence(row[task.text[0]], row[task.label], location)
            continue
        texts = tuple(_text(row[column], column, location) for column in task.text)
        yield Example(texts, row[task.label], location)


def _text(value: Any, column: str, location: str) -> str:
    require(
        isinstance(value, str) and value.strip(),
        f"{location}: column {column!r} has no text. Fill it in, or remove the row.",
    )
    return str(value)


def _sentence(words: Any, tags: Any, location: str) -> Example:
    """Return a sentence as one text with single spaces between its words, and its tags."""
    are_lists = isinstance(words, list) and isinstance(tags, list)
    require(
        are_lists and words and len(words) == len(tags),
        f"{location}: not a list of words with a list of equally many tags. Correct or remove the row.",
    )
    for word in words:
        require(
            isinstance(word, str) and word and not any(map(str.isspace, word)),
            f"{location}: word {shown(word)} is empty or has a space. Split or remove it.",
        )
    return Example((" ".join(words),), tags, location)


def _read_conll(path: Path) -> Iterator[Example]:
    """Yield sentences of lines with a word in the first and its tag in the last column, separated by empty lines."""
    words: list[str] = []
    tags: list[str] = []
    first = 1
    for number, line in enumerate([*_lines(path), ""], start=1):
        fields = line.split()
        if fields:
            require(
                len(fields) > 1,
                f"{path}:{number}: expected a word and its tag, but the line has one column. Add the tag.",
            )
            words.append(fields[0])
            tags.append(fields[-1])
            continue
        if words and words[0] != DOCUMENT_START:
            yield _sentence(words, tags, f"{path}:{first}")
        words, tags, first = [], [], number + 1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8. Save the file as UTF-8.") from None


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _rows(path, csv.reader(file, strict=True))


def _read_tsv(path: Path) -> Iterator[Row]:
    """Yield the rows of a file without quoting, the format of GLUE's files."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _rows(path, csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _rows(path: Path, reader: Any) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    try:
        header: list[str] = next(reader, [])
        for fields in reader:
            if not fields:
                continue
            require(
                len(fields) == len(header),
                f"{path}:{reader.line_num}: {len(fields)} fields, and the header has {len(header)}."
                " Correct the line.",
            )
            yield dict(zip(header, fields))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}. Correct the line.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8. Save the file as UTF-8.") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        require(isinstance(row, dict), f"{path}:{number}: not a JSON object. Correct the line.")
        yield row


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{path}: not readable as parquet ({reason}). Write it again.") from None
    for batch in table.to_batches():
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
