"""Tiny models, and one real run of each kind of log: trained and scored by the code, read-only for all tests."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import environment, launch
from cramming.invocation import Invocation
from cramming.overrides import compose
from cramming.verbs import OPTIONS, main_of
from data_prep.verify_corpus import overlap
from eval.verify import Inputs

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., None]:
    """`write_tokenizer(folder, words)`: one of so many words, w0, w1, ..., behind BERT's five special tokens."""

    def write(folder: Path, words: int) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        vocabulary = [*SPECIAL, *(f"w{i}" for i in range(words))]
        tokenizer = Tokenizer(
            WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {f"{word.strip('[]').lower()}_token": word for word in SPECIAL}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


@pytest.fixture(scope="session")
def write_bert(write_tokenizer: Callable[..., None]) -> Callable[..., Path]:
    """`write_bert(folder, words, **shape)`: a tiny stock BERT with such a tokenizer."""

    def write(folder: Path, words: int = 20, **shape: Any) -> Path:
        import torch
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        small = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
        }
        config = BertConfig(
            vocab_size=len(SPECIAL) + words, **{**small, "max_position_embeddings": 24, **shape}
        )
        BertForMaskedLM(config).save_pretrained(folder)
        write_tokenizer(folder, words)
        return folder

    return write


@pytest.fixture
def train(
    tmp_path: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> Callable[..., Path]:
    """`train(*overrides)` makes eight steps, keeps the checkpoints at 0 and 0.5, and returns the run folder."""

    def call(*overrides: str) -> Path:
        invocation = Invocation(runs=tmp_path / "runs", device="cpu")
        kept = ("budget.steps=8", "checkpoint.keep_at=[0,0.5]")
        launch.main(compose(*tiny_overrides, *kept, *overrides), invocation)
        return invocation.run_folder

    return call


# A closed-division run in seconds: all eight embedded tasks, three seeds, checkpoints, heartbeats.
HONEST_RUN = (
    "division=closed",
    "precision=fp32",
    "data.size=20000",
    "tokenizer.vocab_size=300",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=48",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch=4",
    "train.log_every=10",
    "train.validations=2",
    "train.validation_tokens=512",
    "budget.steps=60",
    "budget.heartbeat_seconds=0.05",
    "checkpoint.every_steps=25",
    "eval.init=[pretrained]",
    "eval.seeds=[0,1,2]",
    "eval.workers=1",
    "eval.baselines=false",
    "eval.hyperparameters.epochs=1",
    "eval.hyperparameters.batch_size=400",
    "eval.hyperparameters.max_length=16",
)
CLEAN = {"commit": "0123456789abcdef0123", "dirty": False, "changed": [], "diff_sha256": None}
# The clock counts from the start of the process, so `pretrain` needs one of its own.
PRETRAIN = f"""
import sys
from cramming import cli, environment, verbs
environment.git_state = lambda: {CLEAN}
verbs.run(cli.parse(["pretrain", *sys.argv[1:]]))
"""


@pytest.fixture(scope="session")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run, `runs/honest`, trained and scored; `corpora/` lies beside `runs`.

    Its code is said to be a clean commit, so that it is of the closed division.
    """
    place = tmp_path_factory.mktemp("honest")
    call = Invocation(
        "honest", place / "runs", place / "corpora", "cpu", overrides=tuple(HONEST_RUN)
    )
    settings = compose(HONEST_RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "git_state", lambda: CLEAN)
        main_of("prepare")(settings, call)
        subprocess.run(
            [sys.executable, "-c", PRETRAIN, *call.arguments(*OPTIONS["pretrain"])],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        main_of("glue")(settings, call)
    return place / "runs" / "honest"


@pytest.fixture
def clean_tree(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Say that the code of this process is a clean commit; returns the overrides of the honest run."""
    monkeypatch.setattr(environment, "git_state", lambda: CLEAN)
    return HONEST_RUN


@pytest.fixture(scope="session")
def inputs(honest_run: Path) -> Inputs:
    """Inputs of a verifier besides the honest run, or a copy of it.

    Its tasks are taken from its corpus, where they are as generated: to generate them takes two seconds.
    """
    (corpus,) = honest_run.parents[1].glob("corpora/*")

    def embedded_tasks(folder: Path, seed: int, generator: str) -> bool:
        shutil.copytree(corpus / "tasks", folder, dirs_exist_ok=True)
        return True

    return Inputs(embedded_tasks, overlap)
