"""The zip that the GLUE server takes, of predictions that it would not refuse.

The server (gluebenchmark.com) wants eleven files at the top of a zip, one per test set, each with the header
`index<TAB>prediction` and one line per test example in order. Classes are written as 0 and 1, except in the inference
tasks (MNLI-m, MNLI-mm, AX, QNLI, RTE), which want the words; STS-B is a number from 0 to 5, with three decimals.
Sizes, label order and names come from the task table.

A submission takes one seed per task, and always the first: choosing the seed by its development score would be a
selection that the record does not show.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cramming.data.task_files import GLUE, ExampleFile, Task
from cramming.record_schema import Record
from eval.rules.evidence import kept, predicted

# File name in the zip -> the task whose labels it uses, and the test set.
FILES: dict[str, tuple[Task, ExampleFile]] = {
    f"{source.title}.tsv": (task, source) for task in GLUE.values() for source in task.blind
}
HEADER = "index\tprediction"


def collect(
    predictions: Path, record: Record, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The trained model's test predictions of one seed: by file, and why others are missing.

    A test set counts only in full and in the official order (`test_ids` 0, 1, 2, ...), and only where its predictions
    are, by SHA-256, those of the recorded scores.
    """
    named = {
        f"{line.task}-seed{line.seed}.npz": line.predictions_sha256
        for line in kept(record, "pretrained")
    }
    found: dict[str, np.ndarray] = {}
    missing: dict[str, str] = {}
    for file, (task, source) in FILES.items():
        name = f"{task.name}-seed{seed}.npz"
        if name not in named:
            missing[file] = "no scores of this seed in the history"
            continue
        if record.beside.predictions.get(name) != named[name]:
            missing[file] = "the stored predictions are not those of the history"
            continue
        try:
            values, ids = (
                predicted(predictions / name, f"{kind}.{source.entry}")
                for kind in ("test", "test_ids")
            )
        except ValueError:
            missing[file] = "the stored predictions are damaged"
            continue
        if not len(values):
            missing[file] = "no test set in the data"
        elif len(values) != source.examples:
            missing[file] = f"{len(values)} of {source.examples} test examples"
        elif len(ids) and not np.array_equal(ids, np.arange(len(values))):
            missing[file] = "the test file is not in the official order"
        elif not (
            np.isfinite(values) if task.score_range else np.isin(values, range(len(task.labels)))
        ).all():
            missing[file] = "a prediction is no label of the task"
        else:
            found[file] = values
    return found, missing


def to_tsv(file: str, values: Sequence[float] | np.ndarray) -> str:
    """One file's text from class numbers (scores for STS-B, clipped to 0..5), in the order of the test set."""
    task, _ = FILES[file]
    if task.score_range is not None:
        words = [f"{np.clip(value, *task.score_range):.3f}" for value in values]
    else:
        words = [task.labels[int(value)] for value in values]
    return "\n".join([HEADER, *(f"{index}\t{word}" for index, word in enumerate(words))]) + "\n"


def archive(predictions: Mapping[str, Sequence[float] | np.ndarray]) -> bytes:
    """The zip's bytes, the same for the same predictions; `predictions` has one entry per name in FILES."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for file in FILES:
            bundle.writestr(
                zipfile.ZipInfo(file), to_tsv(file, predictions[file]), zipfile.ZIP_DEFLATED
            )
    return buffer.getvalue()
