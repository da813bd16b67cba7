"""`cramming export --as`: a configuration of the stock family, and a student from the run's recipe to its card."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForMaskedLM

from cramming import cli, launch, verbs
from cramming.config import UserError
from cramming.invocation import Invocation
from cramming.model.config import ModelConfig
from cramming.model.stock import stock_family
from cramming.record import load_record
from eval.student import student_config

PLAIN = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=24, norm_order="pre"
)
TEACHERS: dict[str, dict[str, Any]] = {
    "post norm without token types": {"norm_order": "post", "token_types": 0},
    "RMS norm": {"norm": "rmsnorm", "norm_bias": False, "final_norm": True},
    "rotary positions and windows": {"positions": "rope", "local_window": 8, "global_every": 2},
    "no positions": {"positions": "none", "token_types": 0},
    "sinusoidal positions, GLU": {"positions": "scaled_sinusoidal", "mlp": "glu"},
    "U-net skips": {"unet_skips": True},
    "value embeddings": {"value_embeddings": 1, "value_residual": True},
    "convolution": {"convolution": 2, "late_layers": 2},
    "gates, norms of queries, soft cap": {
        "attention_gate": True,
        "qk_norm": True,
        "logit_softcap": 9.0,
    },
    "an untied decoder without bias": {"tie_embeddings": False, "decoder_bias": False},
    "no head": {"head_transform": False, "embedding_norm": False},
    "another activation": {"activation": "relu2"},
    "relative positions": {"relative_positions": 8},
}


@pytest.mark.parametrize("family", ["bert", "modernbert", "roberta", "distilbert", "mpnet"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_student_is_of_the_family_with_the_teachers_sizes(teacher: str, family: str) -> None:
    config = replace(PLAIN, **TEACHERS[teacher])
    student = student_config(config, family, pad_id=1)
    assert stock_family(student) == family
    for size in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
        assert getattr(student, size) == getattr(config, size)
    if family == "modernbert":
        assert student.local_window == config.local_window


@pytest.fixture
def finished(
    tmp_path: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> Invocation:
    """A finished run `own` of an architecture that transformers lacks."""
    invocation = Invocation("own", tmp_path / "runs", device="cpu")
    launch.main(compose(*tiny_overrides, "model.first_attn_norm=true", "optim=lamb"), invocation)
    return invocation


def export(finished: Invocation, *words: str) -> None:
    call = cli.parse(
        ["export", f"--runs={finished.runs}", f"--name={finished.name}", "--device=cpu", *words]
    )
    assert call is not None
    verbs.run(call)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb `pretrain` trains in this process, which saves the seconds of another."""

    def run_here(words: list[str]) -> None:
        call = cli.parse(words)
        assert call is not None
        verbs.run(call)

    monkeypatch.setattr("eval.student.run_or_exit", run_here)


@pytest.mark.usefixtures("in_this_process")
def test_from_a_run_to_a_stock_folder(
    finished: Invocation, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--as=modernbert", "budget.steps=3", "checkpoint.keep_at=[]", "precision=bf16")
    student = finished.runs / "own-modernbert"
    export(finished, *words, "--check")
    assert not student.exists()
    capsys.readouterr()
    export(finished, *words)
    record, teacher = load_record(student), load_record(finished.run_folder)
    assert record["pretrain"]["steps"] == 3 and record["config"]["division"] == "open"
    assert record["config"]["precision"]["mode"] == "bf16"  # as typed
    for section in ("train", "optim", "schedule"):
        assert record["config"][section] == teacher["config"][section], section
    said = capsys.readouterr().out
    card = (student / "export" / "README.md").read_text(encoding="utf-8")
    for text in (said, card):
        assert "95 % interval" in text and "held-out text" in text
    assert str(finished.runs) not in card
    assert str(teacher["pretrain"]["final_sha256"]) in card
    assert "distilled from own/final" in card and "pretrained from scratch" not in card
    model = AutoModelForMaskedLM.from_pretrained(student / "export")
    assert type(model).__name__ == "ModernBertForMaskedLM"
    with pytest.raises(UserError, match=r"own-modernbert: the student .* Add --resume"):
        export(finished, *words)
    export(finished, "--as=modernbert", "--resume")
    assert load_record(student)["pretrain"]["steps"] == 3
    with pytest.raises(UserError, match="already is transformers' modernbert"):
        export(replace(finished, name="own-modernbert"), "--as=modernbert")


def test_what_cannot_be_a_student_is_refused(finished: Invocation) -> None:
    refusals = {
        ("--as=gpt2",): "--as=gpt2: unknown choice. .*modernbert",
        ("--as=mpnet",): "--as=mpnet: its class takes token 1 for padding, which is 0",
        ("optim.lr=1",): "optim.lr=1: settings are of the model that --as trains",
        ("--resume",): "--resume: nothing is trained without --as",
        ("--as=bert", "--model=x"): "--model=x: --as needs a run",
        ("--as=bert", "model.nothing=1"): "model.nothing",
        ("--as=bert", "model.qk_norm=true"): "model.qk_norm=true: with it the student is not",
        ("--as=bert", "model.vocab_size=9"): "model.vocab_size=9: the teacher has",
        ("--as=bert", "model=modern"): "model=modern: with it the student is not",
    }
    for words, message in refusals.items():
        with pytest.raises(UserError, match=message):
            export(finished, *words)
    assert [path.name for path in finished.runs.iterdir()] == ["own"]


def test_without_a_budget_it_is_a_tenth_of_the_teachers_time(
    finished: Invocation, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = load_record(finished.run_folder)["pretrain"]["budget"]["spent_seconds"]
    capsys.readouterr()
    export(finished, "--as=bert", "--check")
    said = capsys.readouterr().out
    assert "none is set, so 10% of the teacher's time" in said
    hours = float(said.partition("budget.hours=")[2].partition(";")[0])
    assert hours * 3600 == pytest.approx(0.1 * spent, rel=0.01)


@pytest.mark.slow
def test_the_student_is_trained_in_a_process_of_its_own(finished: Invocation) -> None:
    command = [sys.executable, "-m", "cramming", "export", "--as=bert", "--device=cpu"]
    command += [f"--runs={finished.runs}", "--name=own", "budget.steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "distilled: own-bert in" in done.stdout
