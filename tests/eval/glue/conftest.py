"""A tiny stock BERT, GLUE files in the official layouts, and the settings that score the one on the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.data.task_files import GLUE
from cramming.overrides import compose

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
def glue_json() -> Callable[..., bytes]:
    """`glue_json(config, init="pretrained")`: the file of scores that `main(config)` has written."""
    return lambda config, init="pretrained": (
        Path(config["runs"]) / config["name"] / "glue" / init / "glue.json"
    ).read_bytes()


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
        "model_path": str(model),
    }
    return {**roots, "corpora": tmp_path / "corpora", "seed": 0, "eval": section}


def _pairs(sentence: Any, rows: int, labelled: bool) -> list[str]:
    header = ["index", "sentence1", "sentence2", *(["gold_label"] if labelled else [])]
    labels = GLUE["mnli"].labels
    lines = [
        [str(i), sentence(), sentence(), *([labels[i % 3]] if labelled else [])]
        for i in range(rows)
    ]
    return ["\t".join(line) for line in [header, *lines]]
