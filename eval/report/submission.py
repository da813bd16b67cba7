"""The zip that the GLUE server takes, and a check of one before anybody waits for the server's refusal.

The server (gluebenchmark.com) wants eleven files at the top of a zip, one per test set, each with the header
`index<TAB>prediction` and one line per test example in order. Classes are written as 0 and 1, except in the inference
tasks (MNLI-m, MNLI-mm, AX, QNLI, RTE), which want the words; STS-B is a number from 0 to 5, with three decimals.
Sizes, label order and names come from the task table.

A submission takes one seed per task, and always the first: choosing the seed by its development score would be a
selection that the record does not show.
"""

import io
import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cramming.data.task_files import GLUE, ExampleFile, Task
from cramming.record_schema import Scores
from eval.rules.load import DAMAGED_ARRAYS

# File name in the zip -> the task whose labels it uses, and the test set.
FILES: dict[str, tuple[Task, ExampleFile]] = {
    f"{source.title}.tsv": (task, source) for task in GLUE.values() for source in task.blind
}
HEADER = "index\tprediction"


def collect(results: Path, section: Scores, seed: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The test predictions of one seed from a run's `glue/<init>/`: by file, and why others are missing.

    A test set counts only in full and in the official order (`test_ids` 0, 1, 2, ...), and only as part of the scores
    in the record's `section`: the folder may hold tasks of earlier calls with other hyperparameters.
    """
    found: dict[str, np.ndarray] = {}
    missing: dict[str, str] = {}
    for file, (task, source) in FILES.items():
        if not _on_record(results / "pieces" / f"{task.name}-seed{seed}.json", section, task, seed):
            missing[file] = "not of the scores on record"
            continue
        path = results / "predictions" / f"{task.name}-seed{seed}.npz"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                values, ids = arrays.get(f"test.{source.entry}"), arrays.get(f"test_ids.{source.entry}")
        except FileNotFoundError:
            missing[file] = "not fine-tuned with this seed"
            continue
        except DAMAGED_ARRAYS:
            missing[file] = "the stored predictions are damaged"
            continue
        if values is None:
            missing[file] = "no test set in the data"
        elif values.ndim != 1 or values.dtype.kind not in "iuf":
            missing[file] = "the stored predictions are damaged"
        elif len(values) != source.examples:
            missing[file] = f"{len(values)} of {source.examples} test examples"
        elif ids is not None and not np.array_equal(ids, np.arange(len(values))):
            missing[file] = "the test file is not in the official order"
        else:
            found[file] = values
    return found, missing


def _on_record(piece: Path, section: Scores, task: Task, seed: int) -> bool:
    """Whether a stored result has just the metrics that the record's section has of this task and seed."""
    try:
        stored = json.loads(piece.read_text(encoding="utf-8"))["entries"]
        place = section.seeds.index(seed)
        for source in task.scored:
            metrics = section.tasks[source.entry].metrics
            if stored[source.entry]["metrics"] != {name: one.per_seed[place] for name, one in metrics.items()}:
                return False
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return True


def to_tsv(file: str, values: Sequence[float] | np.ndarray) -> str:
    """One file's text from class numbers (scores for STS-B, clipped to 0..5), in the order of the test set; what is no
    class's number is written as it is, for `validate` to name."""
    task, _ = FILES[file]
    labels: dict[float, str] = dict(enumerate(task.labels))
    if task.score_range is not None:
        words = [f"{np.clip(value, *task.score_range):.3f}" for value in values]
    else:
        words = [labels.get(value, f"{value:g}") for value in values]
    return "\n".join([HEADER, *(f"{index}\t{word}" for index, word in enumerate(words))]) + "\n"


def archive(predictions: Mapping[str, Sequence[float] | np.ndarray]) -> bytes:
    """The zip's bytes, the same for the same predictions; `predictions` has one entry per name in FILES."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in FILES:
            entry = zipfile.ZipInfo(file, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            bundle.writestr(entry, to_tsv(file, predictions[file]))
    return buffer.getvalue()


def validate(archive: bytes) -> list[str]:
    """What the server would refuse in a zip, one line for each file; empty if the submission is sound."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as bundle:
            names = bundle.namelist()
            contents = {name: bundle.read(name) for name in names if name in FILES}
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # encrypted, or of an unknown method
        return [f"not a readable zip ({error})"]
    problems = [f"{name}: {names.count(name)} times in the zip" for name in FILES if names.count(name) != 1]
    problems += [f"{name}: not a file of a GLUE submission" for name in names if name not in FILES]
    return problems + [wrong for name, content in contents.items() if (wrong := _first_problem(name, content))]


def _first_problem(name: str, content: bytes) -> str:
    task, source = FILES[name]
    header, *lines = content.decode("utf-8", "replace").split("\n")
    if header != HEADER:
        return f"{name}:1: the header must be index<TAB>prediction; found {header!r}"
    if lines[-1:] == [""]:
        lines.pop()
    for index, line in enumerate(lines):
        found, _, label = line.partition("\t")
        if found != str(index) or not _is_label(task, label):
            labels = ", ".join(task.labels) or "a number in the task's range"
            return f"{name}:{index + 2}: {line!r}, expected {index}<TAB>prediction, which is one of: {labels}"
    wrong = len(lines) != source.examples
    return f"{name}: {len(lines)} predictions for {source.examples} test examples" if wrong else ""


def _is_label(task: Task, word: str) -> bool:
    if task.score_range is None:
        return word in task.labels
    low, high = task.score_range
    return bool(re.fullmatch(r"[0-9]+(\.[0-9]+)?", word)) and low <= float(word) <= high
