"""What several rules look at: the history of fine-tunings, predictions, sizes of tasks, the wording of evidence."""

import io
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cramming.data.task_files import ENTRIES
from cramming.record_schema import FineTuning, Record, Scores, Source, TaskScore
from eval.finetune.history import PROTOCOL

Outcome = tuple[bool, str]  # of a check: whether the rule holds, and the evidence
NO_SCORES = "no scores yet"  # the evidence of each rule that a run breaks until it is scored
MOST_BYTES = 2**24  # of predictions; those of QQP's test set, the largest, take a fifth


def all_or(problems: Iterable[str], fine: str) -> Outcome:
    """A failure with the first problems as evidence, or success with `fine`."""
    found = list(problems)
    return (False, few(found, 4, "; ")) if found else (True, fine)


def failed(*checks: tuple[object, str]) -> list[str]:
    """Of (holds, problem) the problems of those that do not hold."""
    return [problem for holds, problem in checks if not holds]


def few(names: Sequence[str], most: int = 6, between: str = ", ") -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def names_of(sources: Sequence[Source]) -> str:
    """The first names of a list of sources, which may be as long as a folder of files."""
    return few([str(source.name) for source in sources])


def fine_tuned(record: Record, init: str, named: bool = False) -> list[FineTuning]:
    """What the history has of an initialisation, on the suite that the record holds; in full, with what a scoring that
    was interrupted has added, or the lines that the record has `named` and the section came after."""
    section = record.glue.get(init)
    if section is None or record.history_file is None:
        return []
    lines = record.history_file.entries
    if named:
        recorded = record.history.entries if record.history else None
        lines = lines[: int(min(recorded or 0, section.history_entries or 0))]
    return [line for line in lines if line.init == init and line.suite == section.suite]


def made_with(scored: Scores | FineTuning) -> dict[str, Any]:
    """The settings that the scores of a section, or a line of the history, were made with."""
    return {key: getattr(scored, key) for key in PROTOCOL}


def kept(record: Record, init: str) -> list[FineTuning]:
    """The lines of the history that the results of a section were kept with."""
    if (section := record.glue.get(init)) is None:
        return []
    seeds = set(map(str, section.seeds))
    lines = fine_tuned(record, init, named=True)
    return [
        line for line in lines if made_with(line) == made_with(section) and str(line.seed) in seeds
    ]


def made_later(record: Record, init: str) -> list[FineTuning]:
    """The history's lines written after the record's section, by a scoring with other settings that was broken off: its
    results have replaced the section's files. R20, R21 and R26 judge them.
    """
    section, entries = (
        record.glue.get(init),
        record.history_file.entries if record.history_file else [],
    )
    count, own = (
        int(section.history_entries or 0) if section else 0,
        {line.key for line in kept(record, init)},
    )
    return [line for line in entries[count:] if line.init == init and line.key not in own]


def files_of(lines: Sequence[FineTuning]) -> set[tuple[str, str | None]]:
    """The names of their files of predictions, each with its SHA-256: two seeds of a task may predict the same."""
    return {(f"{line.task}-seed{line.seed}.npz", line.predictions_sha256) for line in lines}


def predicted(file: Path, name: str) -> np.ndarray:
    """The numbers [N] of this name in a file of predictions, none where it has no such; ValueError for all else.

    No more is unpacked, and made of it, than a run's predictions take, whatever a stranger's file says that it holds.
    """
    try:
        with zipfile.ZipFile(file) as arrays:
            entry = next(
                (entry for entry in arrays.infolist() if entry.filename == f"{name}.npy"), None
            )
            if entry is None:
                return np.empty(0)
            if entry.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):  # others unpack more than asked
                raise ValueError(f"compression {entry.compress_type}")
            with arrays.open(entry) as packed:
                content = io.BytesIO(packed.read(MOST_BYTES))
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
        values = np.frombuffer(content.getbuffer()[content.tell() :], dtype)
        if values.shape != shape or dtype.kind not in "iuf":
            raise ValueError(f"{values.size} numbers as {dtype} of shape {shape}")
    except Exception as error:  # the header is parsed as Python, of which nearly anything can come
        raise ValueError(
            f"{file.name}: no predictions ({type(error).__name__}: {str(error)[:80]})"
        ) from None
    return values


def official_sizes(record: Record, init: str, entry: str) -> dict[str, int]:
    """By the task table, whatever the record says; only GLUE itself has official sizes."""
    section = record.glue.get(init)
    if section is None or section.suite != "glue" or entry not in ENTRIES:
        return {}
    task, source = ENTRIES[entry]
    return {"train_examples": task.train.examples, "eval_examples": source.examples}


def other_sizes(record: Record, init: str, entry: str, task: TaskScore) -> list[str]:
    """Such as `train 100 of 8551`, where a task's examples are not as many as the official."""
    return [
        f"{key.removesuffix('_examples')} {count_of(task, key)} of {size}"
        for key, size in official_sizes(record, init, entry).items()
        if getattr(task, key) != size
    ]


def count_of(task: TaskScore, key: str) -> str:
    """A number of examples in words."""
    value = getattr(task, key)
    return "not on record" if value is None else f"{value:.0f}"


def swept(section: Scores) -> str:
    """Such as `best of 6 sets of hyperparameters`; empty where nothing was chosen in a sweep."""
    return (
        ""
        if section.sweep is None
        else f"best of {len(section.sweep.points)} sets of hyperparameters"
    )
