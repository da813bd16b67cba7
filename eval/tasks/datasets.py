"""Examples of a task in memory, and the hashes by which two copies of a data set are compared."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cramming.data.task_files import ExampleFile, Task


@dataclass(frozen=True)
class Split:
    """Examples of one file: one list per text column, and labels (class numbers or scores) if it has them.

    `ids` are the official example numbers of a test set. `skipped` is the number of known broken rows that were left
    out.
    """

    source: ExampleFile
    texts: tuple[list[str], ...]
    labels: np.ndarray | None
    ids: list[int] | None = None
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.texts[0])

    @cached_property
    def sha256(self) -> str:
        """Hash of the content, so that a stored result is never used for other data."""
        digest = hashlib.sha256()
        for column in self.texts:
            digest.update(json.dumps(column).encode())  # says where each text ends
        digest.update(b"" if self.labels is None else self.labels.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TaskData:
    """Data of one task: training set, labelled sets to score, and test sets to predict.

    `absent` holds the reasons for missing entries, `unasked` the test sets that exist but are not to be predicted.
    """

    task: Task
    train: Split
    scored: tuple[Split, ...]
    blind: tuple[Split, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    unasked: tuple[Split, ...] = ()

    @property
    def subset(self) -> bool:
        """True if the training set has another number of examples than the official one."""
        return len(self.train) != self.task.train.examples

    @property
    def splits(self) -> tuple[Split, ...]:
        """Training set, labelled sets and test sets."""
        return (self.train, *self.scored, *self.blind)

    @property
    def whole(self) -> "TaskData":
        """Data with all test sets. A stored result for these data is valid for `self` too: no score depends on them."""
        return replace(self, blind=self.blind + self.unasked, unasked=())

    @property
    def sha256(self) -> str:
        """Hash of all data that a result depends on."""
        parts = [f"{split.source.entry}:{split.sha256}" for split in self.splits]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


def examples_sha256(*splits: Split) -> str:
    """Return a hash of several sets' examples that ignores order and white space, in which published copies differ."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update("\x1d".join(sorted(_rows_as_text(split))).encode() + b"\x1c")
    return digest.hexdigest()


def in_one_order(data: TaskData) -> TaskData:
    """Return the task with its training examples sorted by content, before a seed shuffles them.

    Copies of a data set in another order thus train the same model.
    """
    train = data.train
    rows = _rows_as_text(train)

    def sort_key(index: int) -> tuple[str, list[str]]:
        return rows[index], [column[index] for column in train.texts]

    order = sorted(range(len(train)), key=sort_key)
    labels = None if train.labels is None else train.labels[order]
    texts: list[list[str]] = []
    for column in train.texts:
        texts.append([column[index] for index in order])
    return replace(data, train=replace(train, texts=tuple(texts), labels=labels))


def _rows_as_text(split: Split) -> list[str]:
    labels = np.zeros(len(split)) if split.labels is None else split.labels
    rows = []
    for *texts, label in zip(*split.texts, labels.tolist()):
        rows.append("\x1e".join([*map(_plain, texts), f"{label:.3f}"]))
    return rows


def seen_in_training(train: Split, split: Split) -> int:
    """Return the number of examples of `split` that are training examples too, whatever their labels.

    In GLUE's development sets these are 1.5 % of CoLA, 0.4 % of STS-B, and none of SST-2, MRPC, RTE, QNLI and MNLI
    (for QNLI and MNLI only a part of the training set was searched).
    """
    known = {tuple(map(_plain, texts)) for texts in zip(*train.texts)}
    return sum(tuple(map(_plain, texts)) in known for texts in zip(*split.texts))


def _plain(text: str) -> str:
    return " ".join(text.split())
