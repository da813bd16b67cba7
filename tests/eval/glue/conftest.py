"""A tiny stock BERT, GLUE files in the official layouts, and the settings that score the one on the other."""

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import file_sha256
from cramming.data.corpus import Corpus
from cramming.data.task_files import GLUE
from cramming.model.export import file_hashes
from cramming.overrides import compose
from cramming.record import load_record
from cramming.runlog import (
    RUN_LOG,
    End,
    EventLog,
    Exported,
    Finetuned,
    Scoring,
    Setup,
    Start,
    read_log,
)

WORDS = [f"w{i}" for i in range(20)]


def _section(name: str, **changes: Any) -> dict[str, Any]:
    """The section as conf/eval/<name>.yaml has it, with changes."""
    section = compose([f"eval={name}"])["eval"]
    hyper = changes.pop("hyperparameters", {})
    return {**section, **changes, "hyperparameters": {**section["hyperparameters"], **hyper}}


@pytest.fixture
def eval_section() -> Callable[..., dict[str, Any]]:
    """`eval_section(name, **changes)`: the section as conf/eval/<name>.yaml has it, with changes."""
    return _section


@pytest.fixture
def with_eval() -> Callable[..., dict[str, Any]]:
    """`with_eval(config, **changes)`: the configuration with changes in its section `eval`."""
    return lambda config, **changes: {**config, "eval": {**config["eval"], **changes}}


@pytest.fixture
def section_of() -> Callable[..., dict[str, Any]]:
    """`section_of(config, init="pretrained")`: what the record has of it, without machine and seconds."""

    def read(config: dict[str, Any], init: str = "pretrained") -> dict[str, Any]:
        record = load_record(Path(config["runs"]) / config["name"])
        section = record.get("glue", {}).get(init) or record[init]
        tasks = {name: without_seconds(task) for name, task in section["tasks"].items()}
        return {**without_seconds(section), "tasks": tasks}

    return read


def without_seconds(section: dict[str, Any]) -> dict[str, Any]:
    changing = ("seconds", "environment")
    return {name: value for name, value in section.items() if name not in changing}


@pytest.fixture
def finetuned() -> Callable[..., list[tuple[str, str, int]]]:
    """`finetuned(config)`: initialisation, task and seed of each fine-tuning in the log, in order."""

    def read(config: dict[str, Any]) -> list[tuple[str, str, int]]:
        done, init = [], ""
        for entry in read_log(Path(config["runs"]) / config["name"] / RUN_LOG):
            if isinstance(entry.event, Scoring):
                init = entry.event.init
            if isinstance(entry.event, Finetuned):
                done.append((init, entry.event.task, entry.event.seed))
        return done

    return read


@pytest.fixture
def predictions_of() -> Callable[..., Path]:
    """`predictions_of(config, "cola", 0, init="pretrained")`: the file that the record names."""

    def find(config: dict[str, Any], task: str, seed: int, init: str = "pretrained") -> Path:
        folder = Path(config["runs"]) / config["name"]
        record = load_record(folder)
        section = record.get("glue", {}).get(init) or record[init]
        return folder / "predictions" / f"{section['predictions'][f'{task}-seed{seed}']}.npz"

    return find


@pytest.fixture
def finished_run(config: dict[str, Any], model: Path) -> Path:
    """The run `first`, whose log tells of a finished pretraining that made `model`."""
    folder = Path(config["runs"]) / "first"
    (model / "generation_config.json").write_text("{}")
    shutil.copytree(model, folder / "final")
    with closing(EventLog(folder / RUN_LOG)) as log:
        log.append(
            Start(
                elapsed=0,
                wall=0,
                suite_version="1",
                rules_version="7",
                unit="steps",
                limit=1,
                clock="wall",
                division="open",
                name="first",
                recipe={},
            )
        )
        corpus = {"manifest_sha256": "0" * 64}
        log.append(
            Setup(
                environment={},
                manifest_sha256="0" * 64,
                corpus=corpus,
                devices=1,
                windows=1,
                training={},
            )
        )
        log.append(End(elapsed=1, wall=1, steps=1, reason="finished"))
        log.append(
            Exported(
                files=file_hashes(folder / "final"),
                compiled=False,
                compile_seconds=0,
                peak_memory_bytes=0,
            )
        )
    return folder


@pytest.fixture
def model(tmp_path: Path, write_bert: Callable[..., Path]) -> Path:
    folder = write_bert(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()  # as in folders that only have BERT's names
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> dict[str, Any]:
    """The root configuration for a run on CoLA and MNLI (with AX) in the official layouts."""
    random = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 9)))

    files = {
        "CoLA/train.tsv": ["\t".join(("x", str(i % 2), "", sentence())) for i in range(40)],
        "CoLA/dev.tsv": ["\t".join(("x", str(i % 2), "", sentence())) for i in range(20)],
        "MNLI/train.tsv": _pairs(sentence, 30, labelled=True),
        "MNLI/dev_matched.tsv": _pairs(sentence, 20, labelled=True),
        "MNLI/dev_mismatched.tsv": _pairs(sentence, 20, labelled=True),
        "diagnostic/diagnostic.tsv": _pairs(sentence, 10, labelled=False),
    }
    for name, lines in files.items():
        path = tmp_path / "glue" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    hyper = {"epochs": 1, "max_length": 24, "learning_rate": 1e-3}
    changes = {"seeds": [0, 1], "workers": 1, "baselines": False, "hyperparameters": hyper}
    section = _section("glue_sane", data_dir=tmp_path / "glue", **changes)
    roots = {
        "name": "first",
        "runs": tmp_path / "runs",
        "device": "cpu",
        "division": "open",
        "model_name": str(model),
    }
    return {**roots, "data": {"corpus": str(tmp_path / "corpus")}, "seed": 0, "eval": section}


@pytest.fixture
def corpus(
    config: dict[str, Any],
    tmp_path: Path,
    make_corpus: Callable[..., Path],
) -> Path:
    """A corpus with tasks, where the settings look for it."""
    folder = make_corpus(tmp_path / "corpus", documents=20)
    shutil.copytree(config["eval"]["data_dir"], folder / "tasks")
    files = {
        f.relative_to(folder).as_posix(): file_sha256(f) for f in (folder / "tasks").rglob("*.tsv")
    }
    (folder / "manifest.json").write_text(
        replace(Corpus.open(folder).manifest, files=files).to_json()
    )
    return folder


def _pairs(sentence: Any, rows: int, labelled: bool) -> list[str]:
    header = ["index", "sentence1", "sentence2", *(["gold_label"] if labelled else [])]
    labels = GLUE["mnli"].labels
    lines = [
        [str(i), sentence(), sentence(), *([labels[i % 3]] if labelled else [])]
        for i in range(rows)
    ]
    return ["\t".join(line) for line in [header, *lines]]
