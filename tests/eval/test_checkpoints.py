"""Scores along the way: kept checkpoints as models, their sections of the record, and the rules."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError, build, file_sha256
from cramming.overrides import compose
from cramming.record import load_record, read_run
from cramming.runlog import training_of
from eval.finetune.checkpoints import nearest_checkpoint, open_checkpoint, written_model
from eval.finetune.config import EvalConfig
from eval.glue import settings_of_checkpoint
from eval.rules.load import load_run
from tests.eval.runs import score_run, write_run

AVERAGE = "train.average={start: 0.3, every: 0.1}"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [AVERAGE],
        ["model=modern", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"],
        ["objective=rtd"],
        ["objective=rtd", AVERAGE],
    ],
    ids=" ".join,
)
def test_the_last_checkpoint_as_a_model_is_the_final_model(
    train: Callable[..., Path], overrides: Sequence[str]
) -> None:
    run = train(*overrides)
    last = training_of(read_run(run)).saved[-1]
    assert last.steps == 8
    with written_model(run, last) as folder:
        names = sorted(path.name for path in folder.iterdir())
        assert names == sorted(path.name for path in (run / "final").iterdir())
        for name in names:
            assert file_sha256(folder / name) == file_sha256(run / "final" / name)


def test_the_nearest_checkpoint_is_opened_and_others_are_refused_in_one_line(
    train: Callable[..., Path],
) -> None:
    run = train()
    with open_checkpoint(run, 0.45) as source:
        kept = nearest_checkpoint(run, 0.5)
        assert source.checkpoint == kept.sha256 and kept.steps == 4
        assert source.sha256 != file_sha256(run / "final" / "model.safetensors")
    for share in (0.3, 1.0):
        with pytest.raises(UserError, match=r"has checkpoints at 0\.000, 0\.500 of its budget"):
            nearest_checkpoint(run, share)
    file = run / "checkpoints" / "kept-00000004.pt"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="not as the run saved it"), open_checkpoint(run, 0.5):
        pass
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"no kept checkpoint. checkpoint.keep_at=\[0.5\]"):
        nearest_checkpoint(run, 0.5)


@pytest.mark.parametrize(
    ("override", "model", "problem"),
    [
        ("eval.sweep=true", None, "eval.sweep=True"),
        ("eval.minimal_pairs=pairs", None, "eval.minimal_pairs=pairs"),
        ("eval.hyperparameters.freeze=true", None, "eval.hyperparameters.freeze=True"),
        ("eval.workers=1", "models/bert", "--model=models/bert"),
    ],
)
def test_settings_of_the_final_model_are_refused(
    override: str, model: str | None, problem: str
) -> None:
    settings = build(EvalConfig, compose(["eval=glue_sane", override])["eval"], "eval")
    with pytest.raises(UserError, match=problem):
        settings_of_checkpoint(settings, model)


def scored_run(folder: Path, retained: bool = True) -> tuple[Path, str]:
    """Return a run whose checkpoint after 40 of 100 steps is kept, and its SHA-256."""
    write_run(folder, change={"checkpoint": {"retained": retained}})
    return folder, hashlib.sha256(f"checkpoint of {folder.name}".encode()).hexdigest()


def score_checkpoint(folder: Path, sha256: str, **options: Any) -> None:
    files = {"model.safetensors": "ab" * 32}
    score_run(
        folder, values=0.6, files=files, change={"scoring": {"checkpoint": sha256}}, **options
    )


def test_a_checkpoint_has_a_section_of_its_own_with_what_was_spent(tmp_path: Path) -> None:
    run, sha256 = scored_run(tmp_path / "a")
    before = load_record(run)
    score_checkpoint(run, sha256)
    record = load_record(run)
    assert record["glue"] == before["glue"] and "unfinished" not in record
    section = record["checkpoints"][sha256]
    assert (
        section["averages"]["avg9"]["value"]
        < record["glue"]["pretrained"]["averages"]["avg9"]["value"]
    )
    loaded = load_run(run)
    assert loaded.verdict.division == "closed"
    spent = loaded.spent[sha256]
    assert spent["step"] == 40 and spent["tokens"] == 4000 and spent["energy_kwh"] is None
    assert spent["seconds"] == pytest.approx(18.5)


@pytest.mark.parametrize(
    ("options", "division", "evidence"),
    [
        ({}, "closed", ""),
        ({"seeds": (0,)}, "closed", ""),
        ({"fine_tunings": 2}, "closed", ""),
        ({"hyperparameters": {"learning_rate": 1e-4}}, "open", "one of 2 sets"),
        ({"retained": False}, "invalid", "a checkpoint that was not kept"),
    ],
    ids=str,
)
def test_rules_accept_scores_of_a_kept_checkpoint_by_the_same_settings(
    tmp_path: Path, options: dict[str, Any], division: str, evidence: str
) -> None:
    run, sha256 = scored_run(tmp_path / "a", retained=options.pop("retained", True))
    score_checkpoint(run, sha256, **options)
    verdict = load_run(run).verdict
    assert verdict.division == division
    assert all(evidence in finding.evidence for finding in verdict.broken)


def test_a_frozen_probe_neither_replaces_nor_excludes_the_scores(tmp_path: Path) -> None:
    run, _ = scored_run(tmp_path / "a")
    before = load_record(run)["glue"]
    score_run(run, values=0.6, hyperparameters={"freeze": True, "learning_rate": 1e-3})
    record = load_record(run)
    assert record["glue"] == before and list(record["probe"]) == ["pretrained"]
    assert load_run(run).verdict.division == "closed"
