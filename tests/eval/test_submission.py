"""The GLUE server's zip: names, words and numbers as it wants them, of predictions that it would not refuse."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import file_sha256
from cramming.data.task_files import ExampleFile
from cramming.record_schema import Record, read_record
from eval.report import submission
from eval.report.submission import FILES, archive, collect, to_tsv


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


def store(folder: Path, predictions: dict[str, np.ndarray], **changed: dict[str, Any]) -> Record:
    """As eval.finetune.store leaves them, one file per task and seed, and the record of it."""
    by_task: dict[str, dict[str, Any]] = {}
    for name, (task, source) in FILES.items():
        arrays = by_task.setdefault(task.name, {})
        arrays[f"test.{source.entry}"] = predictions[name]
        arrays[f"test_ids.{source.entry}"] = np.arange(10)
    lines = []
    for task_name, arrays in by_task.items():
        path = folder / f"{task_name}-seed3.npz"
        whole = arrays | changed.get(task_name, {})
        np.savez_compressed(
            path, **{name: values for name, values in whole.items() if values is not None}
        )
        line = {"suite": "glue", "init": "pretrained", "task": task_name, "seed": 3}
        lines.append(line | {"predictions_sha256": file_sha256(path)})
    return read_record(
        {
            "glue": {"pretrained": {"suite": "glue", "seeds": [1, 3], "history_entries": 99}},
            "history": {"entries": 99},
            "history_file": {"entries": lines},
            "beside": {
                "predictions": {
                    line["task"] + "-seed3.npz": line["predictions_sha256"] for line in lines
                }
            },
        }
    )


def test_collects_what_fine_tuning_left(tmp_path: Path) -> None:
    predictions = _predictions()
    record = store(tmp_path, predictions)
    found, missing = collect(tmp_path, record, 3)
    assert missing == {} and archive(found) == archive(predictions)
    found, missing = collect(tmp_path, record, 1)
    assert not found and set(missing.values()) == {"no scores of this seed in the history"}


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
    record = store(tmp_path, _predictions(), **{task: arrays})
    assert collect(tmp_path, record, 3)[1] == {f"{file}.tsv": reason}


def test_takes_only_what_the_recorded_scores_are_made_of(tmp_path: Path) -> None:
    record = store(tmp_path, _predictions())
    record.beside.predictions["rte-seed3.npz"] = "0" * 64
    del record.beside.predictions["wnli-seed3.npz"]
    _, missing = collect(tmp_path, record, 3)
    assert missing == dict.fromkeys(
        ("RTE.tsv", "WNLI.tsv"), "the stored predictions are not those of the history"
    )
