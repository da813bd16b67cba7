"""Zip of test predictions for the GLUE server, written only if the server would accept it.

The server (gluebenchmark.com) wants eleven files at the top of a zip, one per test set, each with the header
`index<TAB>prediction` and one line per test example in order. Classes are written as 0 and 1, except in the inference
tasks (MNLI-m, MNLI-mm, AX, QNLI, RTE), which want the words; STS-B is a number from 0 to 5, with three decimals.
Sizes, label order and names come from the task table.

A submission takes the first seed of each task: choosing the seed by its development score would be a selection that
the record does not show.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cramming.config import file_sha256
from cramming.data.task_files import GLUE, ExampleFile, Task
from cramming.files import overwrite_atomically
from cramming.record_schema import Scores
from cramming.scores import run_name
from eval.rules.evidence import predicted
from eval.rules.load import Run

# File name in the zip -> the task whose labels it uses, and the test set.
FILES: dict[str, tuple[Task, ExampleFile]] = {}
for _task in GLUE.values():
    FILES |= {f"{source.title}.tsv": (_task, source) for source in _task.blind}
HEADER = "index\tprediction"


def write_submission(run: Run, folder: Path | None) -> str | None:
    """Write `submission.zip` into a folder if all test predictions are there; return what there is to say."""
    section = run.record.trained
    predictions_folder = run.folder / "predictions"
    if section is None or section.suite != "glue" or not predictions_folder.is_dir():
        return None
    seed = section.seeds[0]
    predictions, missing = collect(predictions_folder, section, seed)
    if folder:
        (folder / "submission.zip").unlink(missing_ok=True)  # an earlier one has other predictions
    if missing:
        reasons = "; ".join(sorted(set(missing.values())))
        return f"No submission to the GLUE server, for want of {', '.join(missing)}: {reasons}."
    if folder is None:
        return None
    content = archive(predictions)
    overwrite_atomically(folder / "submission.zip", lambda path: path.write_bytes(content))
    return f"Submission to the GLUE server: report/submission.zip (seed {seed})."


def collect(
    folder: Path, scores: Scores, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the trained model's test predictions of one seed by file, and why others are missing.

    `folder`: that of the run's predictions. A test set counts only in full and in the official order (`test_ids` 0, 1,
    2, ...), and only where its predictions are, by SHA-256, those of the recorded scores.
    """
    predictions: dict[str, np.ndarray] = {}
    missing: dict[str, str] = {}
    for file, (task, source) in FILES.items():
        sha256 = scores.predictions.get(run_name(task.name, seed))
        if sha256 is None:
            missing[file] = "no scores of this seed"
            continue
        path = folder / f"{sha256}.npz"
        if not path.is_file() or file_sha256(path) != sha256:
            missing[file] = "the stored predictions are not those of the run log"
            continue
        try:
            values = predicted(path, f"test.{source.entry}")
            ids = predicted(path, f"test_ids.{source.entry}")
        except ValueError:
            missing[file] = "the stored predictions are damaged"
            continue
        problem = _problem(values, ids, task, source)
        if problem:
            missing[file] = problem
        else:
            predictions[file] = values
    return predictions, missing


def _problem(values: np.ndarray, ids: np.ndarray, task: Task, source: ExampleFile) -> str | None:
    """Return why the server would refuse the predictions of a test set, or None."""
    if not len(values):
        return "no test set in the data"
    if len(values) != source.examples:
        return f"{len(values)} of {source.examples} test examples"
    if len(ids) and not np.array_equal(ids, np.arange(len(values))):
        return "the test file is not in the official order"
    labels = np.isfinite(values)
    if task.score_range is None:
        labels = np.isin(values, range(len(task.labels)))
    return None if labels.all() else "a prediction is no label of the task"


def to_tsv(file: str, values: Sequence[float] | np.ndarray) -> str:
    """Return one file's text from class numbers (scores for STS-B, clipped to 0..5), in the order of the test set."""
    task, _ = FILES[file]
    if task.score_range is not None:
        words = [f"{np.clip(value, *task.score_range):.3f}" for value in values]
    else:
        words = [task.labels[int(value)] for value in values]
    return "\n".join([HEADER, *(f"{index}\t{word}" for index, word in enumerate(words))]) + "\n"


def archive(predictions: Mapping[str, Sequence[float] | np.ndarray]) -> bytes:
    """Return the zip's bytes, the same for the same predictions; `predictions` has one entry per name in FILES."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for file in FILES:
            bundle.writestr(
                zipfile.ZipInfo(file), to_tsv(file, predictions[file]), zipfile.ZIP_DEFLATED
            )
    return buffer.getvalue()
