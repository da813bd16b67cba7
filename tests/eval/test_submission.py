"""The GLUE server's zip: names, words and numbers as it wants them, of predictions that it would not refuse."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.data.task_files import ExampleFile, Task
from cramming.record_schema import Scores
from eval.report import submission
from eval.report.submission import FILES, archive, collect, to_tsv
from eval.rules.load import load_run
from tests.eval.runs import write_run


@pytest.fixture(autouse=True)
def small_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten examples per test set instead of up to 390,965."""
    small = {
        name: (task, ExampleFile(**{**source.__dict__, "examples": 10}))
        for name, (task, source) in FILES.items()
    }
    monkeypatch.setattr(submission, "FILES", small)


def _predictions() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.uniform(-1, 6, 10)
        if task.regression
        else rng.integers(0, len(task.labels), 10).astype(float)
        for name, (task, _) in FILES.items()
    }


def test_the_servers_names_and_words() -> None:
    names = "AX CoLA MNLI-m MNLI-mm MRPC QNLI QQP RTE SST-2 STS-B WNLI"
    assert sorted(FILES) == sorted(f"{name}.tsv" for name in names.split())
    with zipfile.ZipFile(io.BytesIO(archive(_predictions()))) as bundle:
        files = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert all(text.startswith("index\tprediction\n0\t") for text in files.values())
    words = {
        name: {line.split("\t")[1] for line in text.splitlines()[1:]}
        for name, text in files.items()
    }
    three = {"entailment", "neutral", "contradiction"}
    assert all(words[f"{name}.tsv"] <= three for name in ("MNLI-m", "MNLI-mm", "AX"))
    assert all(words[f"{name}.tsv"] <= {"entailment", "not_entailment"} for name in ("QNLI", "RTE"))
    assert all(
        words[f"{name}.tsv"] <= {"0", "1"} for name in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI")
    )
    assert archive(_predictions()) == archive(_predictions())


def test_scores_are_clipped_and_have_three_decimals() -> None:
    text = to_tsv("STS-B.tsv", [-1.0, 5.4, 2.34567, *[0.0] * 7])
    assert text.splitlines()[1:4] == ["0\t0.000", "1\t5.000", "2\t2.346"]


def store(folder: Path, predictions: dict[str, np.ndarray], **changed: dict[str, Any]) -> Scores:
    """Write predictions as fine-tuning does, one file per task for seed 3; return the scores that name them."""
    by_task: dict[str, dict[str, Any]] = {}
    for name, (task, source) in FILES.items():
        arrays = by_task.setdefault(task.name, {})
        arrays[f"test.{source.entry}"] = predictions[name]
        arrays[f"test_ids.{source.entry}"] = np.arange(10)

    def content(task: Task, seed: int) -> bytes:
        arrays = by_task[task.name] | changed.get(task.name, {})
        buffer = io.BytesIO()
        present = {name: values for name, values in arrays.items() if values is not None}
        np.savez_compressed(buffer, **present)
        return buffer.getvalue()

    write_run(folder, scores={"pretrained": 0.7}, seeds=[3], predictions=content)
    scores = load_run(folder).record.trained
    assert scores is not None
    return scores


def test_collects_what_fine_tuning_left(tmp_path: Path) -> None:
    predictions = _predictions()
    scores = store(tmp_path, predictions)
    collected, missing = collect(tmp_path / "predictions", scores, 3)
    assert missing == {} and archive(collected) == archive(predictions)
    collected, missing = collect(tmp_path / "predictions", scores, 1)
    assert not collected and set(missing) == set(FILES)


@pytest.mark.parametrize(
    ("task", "arrays", "file", "reason"),
    [
        ("sst2", {"test.sst2": np.zeros(9)}, "SST-2", "9 of 10 test examples"),
        ("rte", {"test.rte": None}, "RTE", "no test set in the data"),
        ("rte", {"test.rte": np.array([None])}, "RTE", "the stored predictions are damaged"),
        (
            "rte",
            {"test_ids.rte": np.arange(10)[::-1]},
            "RTE",
            "the test file is not in the official order",
        ),
        ("cola", {"test.cola": np.full(10, 2.0)}, "CoLA", "a prediction is no label of the task"),
        ("cola", {"test.cola": np.full(10, 0.5)}, "CoLA", "a prediction is no label of the task"),
        (
            "stsb",
            {"test.stsb": np.full(10, np.nan)},
            "STS-B",
            "a prediction is no label of the task",
        ),
    ],
)
def test_what_the_server_would_refuse_is_missing(
    tmp_path: Path, task: str, arrays: dict[str, Any], file: str, reason: str
) -> None:
    scores = store(tmp_path, _predictions(), **{task: arrays})
    assert collect(tmp_path / "predictions", scores, 3)[1] == {f"{file}.tsv": reason}


def test_takes_only_what_the_recorded_scores_are_made_of(tmp_path: Path) -> None:
    scores = store(tmp_path, _predictions())
    rte, wnli = (
        tmp_path / "predictions" / f"{scores.predictions[name]}.npz"
        for name in ("rte-seed3", "wnli-seed3")
    )
    rte.write_bytes(wnli.read_bytes())
    wnli.unlink()
    assert set(collect(tmp_path / "predictions", scores, 3)[1]) == {"RTE.tsv", "WNLI.tsv"}
