"""Scores along the way: kept checkpoints as models, their sections of the record, and the rules."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError, build, file_sha256
from cramming.data.suites import SuiteName
from cramming.overrides import compose
from cramming.record import load_record, read_run
from cramming.record_schema import read_record
from cramming.runlog import training_of
from eval.finetune.config import EvalConfig
from eval.finetune.run_models import nearest_checkpoint, open_checkpoint, written_model
from eval.glue import settings_of_checkpoint
from eval.report.main import main
from eval.rescore import sections_of
from eval.rules.load import load_run
from tests.eval.runs import score_checkpoint, score_run, write_run

KEPT = {"checkpoint": {"retained": True}}
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
        ("eval.sweep=true", None, "eval.sweep=true"),
        ("eval.minimal_pairs=pairs", None, "eval.minimal_pairs=pairs"),
        ("eval.hyperparameters.freeze=true", None, "eval.hyperparameters.freeze=true"),
        ("eval.workers=1", "models/bert", "--model=models/bert"),
    ],
)
def test_settings_of_the_final_model_are_refused(
    override: str, model: str | None, problem: str
) -> None:
    settings = build(EvalConfig, compose(["eval=glue_sane", override])["eval"], "eval")
    with pytest.raises(UserError, match=problem):
        settings_of_checkpoint(settings, model)


def test_a_checkpoint_has_a_section_of_its_own_with_what_was_spent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", change=KEPT)
    before = load_record(run)
    sha256 = score_checkpoint(run)
    record = load_record(run)
    assert record["glue"] == before["glue"] and "unfinished" not in record
    section = record["checkpoints"]["glue"][sha256]
    assert (
        section["averages"]["avg9"]["value"]
        < record["glue"]["pretrained"]["averages"]["avg9"]["value"]
    )
    loaded = load_run(run)
    assert loaded.verdict.division == "closed"
    spent = loaded.spent[sha256]
    assert spent["steps"] == 40 and spent["tokens"] == 4000 and spent["energy_kwh"] is None
    assert spent["spent_seconds"] == pytest.approx(18.5)


def test_energy_until_a_checkpoint_is_what_the_log_has_by_then(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", change=KEPT | {"heartbeat": {"joules": 3.6e6}})
    sha256 = score_checkpoint(run)
    loaded = load_run(run)
    assert loaded.spent[sha256]["energy_kwh"] == 1.0
    assert loaded.record.training.energy_kwh == 2.0  # of both processes


@pytest.mark.parametrize(
    ("options", "retained", "division", "evidence"),
    [
        ({}, True, "closed", ""),
        ({"seeds": (0,)}, True, "closed", ""),
        ({"fine_tunings": 2}, True, "closed", ""),
        ({"hyperparameters": {"learning_rate": 1e-4}}, True, "open", "one of 2 sets"),
        ({}, False, "invalid", "a checkpoint that was not kept"),
    ],
    ids=str,
)
def test_rules_accept_scores_of_a_kept_checkpoint_by_the_same_settings(
    tmp_path: Path, options: dict[str, Any], retained: bool, division: str, evidence: str
) -> None:
    run = write_run(tmp_path / "a", change={"checkpoint": {"retained": retained}})
    score_checkpoint(run, **options)
    verdict = load_run(run).verdict
    assert verdict.division == division
    assert all(evidence in finding.evidence for finding in verdict.broken)


def test_the_report_has_a_line_and_a_table_of_the_scores_along_the_way(tmp_path: Path) -> None:
    """The ranked score stays that of the final model."""
    for name in ("a", "b"):
        score_checkpoint(write_run(tmp_path / name, change=KEPT))
    main(runs=tmp_path, out=None, each_run=True, duels=Path("no duels"), repository=None)
    text = (tmp_path / "a" / "report" / "report.md").read_text(encoding="utf-8")
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith(("| 30.8 %", "| 100 %"))
    ]
    assert [row[0].strip("| ") for row in rows] == ["30.8 %", "100 %"]
    assert [row[1] for row in rows] == ["40", "100"] and rows[0][2] == "18 s"
    with (tmp_path / "report" / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        lines = [row for row in csv.DictReader(file) if row["run"] == "a"]
    scores = {row["kind"]: float(row["avg9"]) for row in lines if row["init"] == "pretrained"}
    assert scores["checkpoint"] < scores["run"]
    (line,) = [row for row in lines if row["kind"] == "checkpoint"]
    assert line["reached_steps"] == "40" and line["reached_tokens"] == "4000"


def test_scores_of_a_checkpoint_that_the_log_lacks_are_invalid_and_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", change=KEPT)
    files = {"model.safetensors": "ab" * 32}
    score_run(run, values=0.6, files=files, change={"scoring": {"checkpoint": "cd" * 32}})
    assert load_run(run).verdict.division == "invalid"
    main(runs=tmp_path, out=None, each_run=True, duels=Path("no duels"), repository=None)
    assert (tmp_path / "report" / "leaderboard.csv").is_file()


def test_a_frozen_probe_neither_replaces_nor_excludes_the_scores(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    before = load_record(run)["glue"]
    score_run(run, values=0.6, hyperparameters={"freeze": True, "learning_rate": 1e-3})
    record = load_record(run)
    assert record["glue"] == before and list(record["probe"]["glue"]) == ["pretrained"]
    assert load_run(run).verdict.division == "closed"


@pytest.mark.parametrize("other", ["embedded", "superglue"])
@pytest.mark.parametrize("place", ["checkpoints", "probe"])
def test_no_suite_replaces_the_scores_of_another(
    tmp_path: Path, place: str, other: SuiteName
) -> None:
    run = write_run(tmp_path / "a", change=KEPT)
    records = []
    for suite in ("glue", other):
        if place == "checkpoints":
            score_checkpoint(run, suite=suite)
        else:
            score_run(run, suite=suite, hyperparameters={"freeze": True})
        records.append(load_record(run))
    before, after = (record[place] for record in records)
    assert after.keys() == {"glue", other} and after["glue"] == before["glue"]
    sections = sections_of(read_record(records[1]))
    assert len(sections) == len(sections_of(read_record(records[0]))) + 1


def test_a_baseline_of_another_suite_replaces_no_score_of_a_model(tmp_path: Path) -> None:
    """A frozen probe on another suite has such baselines beside it."""
    run = write_run(tmp_path / "a")
    before = load_record(run)["glue"]
    score_run(run, "floor", suite="embedded")
    assert load_record(run)["glue"] == before
    score_run(run, suite="embedded")
    score_run(run, "floor", suite="embedded")
    record = load_record(run)
    assert {record["glue"]["pretrained"]["suite"], record["floor"]["suite"]} == {"embedded"}
