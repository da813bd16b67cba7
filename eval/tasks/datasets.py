"""The examples of a task in memory, and the hashes that say whether two copies of a data set are the same."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cramming.data.task_files import ExampleFile, Task


@dataclass(frozen=True)
class Split:
    """Examples of one file: texts as one list per text column, and labels (class numbers or scores) where it has them.

    `ids` are the official example numbers of a test set. `skipped` counts known broken rows that were left out.
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
        """Hash of the content, so that a stored result is never taken for one on other data."""
        digest = hashlib.sha256()
        for column in self.texts:
            digest.update("\x1e".join(column).encode())
        digest.update(b"" if self.labels is None else self.labels.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TaskData:
    """One task: training set, labelled sets to score, test sets to predict, why an entry is absent, and test sets that
    are there and not asked for."""

    task: Task
    train: Split
    scored: tuple[Split, ...]
    blind: tuple[Split, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    unasked: tuple[Split, ...] = ()

    @property
    def subset(self) -> bool:
        """Whether the training set has another number of examples than the official one."""
        return len(self.train) != self.task.train.examples

    @property
    def splits(self) -> tuple[Split, ...]:
        """All sets."""
        return (self.train, *self.scored, *self.blind)

    @property
    def whole(self) -> "TaskData":
        """With all test sets: no score depends on them, so a result with their predictions is one without as well."""
        return replace(self, blind=self.blind + self.unasked, unasked=())

    @property
    def sha256(self) -> str:
        """Hash of everything a result depends on."""
        return hashlib.sha256(
            "".join(f"{s.source.entry}:{s.sha256}" for s in self.splits).encode()
        ).hexdigest()


def examples_sha256(*splits: Split) -> str:
    """Hash of several sets' examples that ignores order and white space, in which published copies differ."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update("\x1d".join(sorted(_rows_as_text(split))).encode() + b"\x1c")
    return digest.hexdigest()


def in_one_order(data: TaskData) -> TaskData:
    """The training examples sorted by content, before a seed shuffles them: copies of a data set in another order train
    the same model."""
    train, rows = data.train, _rows_as_text(data.train)
    order = sorted(
        range(len(train)), key=lambda i: (rows[i], [column[i] for column in train.texts])
    )
    labels = None if train.labels is None else train.labels[order]
    texts = tuple([column[i] for i in order] for column in train.texts)
    return replace(data, train=replace(train, texts=texts, labels=labels))


def _rows_as_text(split: Split) -> list[str]:
    labels = [0.0] * len(split) if split.labels is None else split.labels.tolist()
    return [
        "\x1e".join([*map(_plain, texts), f"{label:.3f}"])
        for *texts, label in zip(*split.texts, labels)
    ]


def seen_in_training(train: Split, split: Split) -> int:
    """How many examples of `split` are training examples too, whatever their labels.

    Of GLUE's development sets 1.5 % of CoLA's are, 0.4 % of STS-B's, and none of SST-2's, MRPC's, RTE's, QNLI's and
    MNLI's (the last two in a part of the training set).
    """
    known = {tuple(map(_plain, texts)) for texts in zip(*train.texts)}
    return sum(tuple(map(_plain, texts)) in known for texts in zip(*split.texts))


def _plain(text: str) -> str:
    return " ".join(text.split())
