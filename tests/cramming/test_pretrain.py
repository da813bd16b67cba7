"""The timed part in one process: what a run leaves behind, and what does not change it.

Each run here takes 12 steps of a model of some 20,000 parameters. Stopping and going on is in test_resume.py, what is
refused in test_refusals.py; what needs a process of its own (kill -9, the time budget, Ctrl-C) in tests/end_to_end.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import launch, progress
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.engine import Engine
from cramming.invocation import Invocation
from cramming.record import load_metrics, load_record
from cramming.runlog import RUN_LOG, read_log, training_of

Start = Callable[..., Path]
Losses = Callable[[Path], list[tuple[int, float]]]
Result = Callable[[Path], dict[str, Any]]
TOKENS = ["budget.steps=null"]


def test_a_run_learns_and_leaves_everything_behind(unbroken: Path, losses: Losses) -> None:
    record = load_record(unbroken)
    section = record["pretrain"]
    assert section["status"] == "finished"
    assert section["steps"] == 12
    assert section["sequences"] == 12 * 8
    assert section["tokens"] == 12 * 8 * 32
    assert section["budget"]["unit"] == "steps"
    assert section["budget"]["spent"] == section["budget"]["limit"] == 12
    assert section["budget"]["overrun_seconds"] == 0
    assert 0.14 * 512 < section["validation"]["targets"] <= 0.15 * 512 + 3
    assert section["validation"]["tokens"] == 512
    assert [step for step, _ in losses(unbroken)] == list(range(1, 13))
    assert losses(unbroken)[-1][1] < losses(unbroken)[0][1]
    assert section["train_loss"] == losses(unbroken)[-1][1]
    assert {"config", "environment", "corpus", "pretrain"} <= record.keys()
    assert record["corpus"]["changed"] == {} and section["gate"] == {"all tricks": "untested"}
    names = {p.name for p in unbroken.iterdir()}
    assert names == {"run.jsonl", "checkpoints", "final", "record.json"}
    saved = training_of(read_log(unbroken / RUN_LOG)).saved
    assert [checkpoint.steps for checkpoint in saved] == [3, 6, 9, 12]
    assert len(list((unbroken / "checkpoints").iterdir())) == 2
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (unbroken / "final").iterdir()
    }
    assert not [p for p in unbroken.rglob("*") if ".tmp" in p.name or ".old" in p.name]
    rates = [row["lr"] for row in load_metrics(unbroken) if "lr" in row]
    assert rates[0] == 0.0  # progress 0 of a schedule with warm-up
    assert max(rates) == pytest.approx(record["config"]["optim"]["lr"])
    assert (
        sum("validation_loss" in row for row in load_metrics(unbroken)) == 3 - 1
    )  # half way, and the end


def test_the_logs_last_row_has_all_of_the_last_validation(start: Start, unbroken: Path) -> None:
    for run, kind in (
        (unbroken, ""),
        (start("objective=rtd", "budget.steps=2", name="a"), "replaced_token_"),
    ):
        validation, last = load_record(run)["pretrain"]["validation"], load_metrics(run)[-1]
        assert validation[f"{kind}loss"] == last[f"validation_{kind}loss"]
        assert (validation["all_mask_loss"] is None) == bool(kind)
        assert validation["tokens"] == 512


def test_each_phase_of_the_objective_has_its_own_number_of_targets(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch, result: Result
) -> None:
    """It goes on where the one before ended: one with as many targets changes nothing. Validation stays what it is."""
    seen, original = [], Engine.forward_backward

    def noted(self: Engine, batches: list[Batch], *rest: Any) -> Any:
        seen.append([len(batch.target_ids_M) for batch in batches])
        return original(self, batches, *rest)

    monkeypatch.setattr(Engine, "forward_backward", noted)
    run = start("objective.phases=[{at: 0.5, rate: 0.15}, {at: 0.75, rate: 0.05}]", name="a")
    assert seen == [[4 * 8] * 2] * 6 + [[4 * 5] * 2] * 3 + [[4 * 2] * 2] * 3
    recorded, without = (load_record(folder)["pretrain"] for folder in (run, unbroken))
    assert recorded["validation"]["targets"] == without["validation"]["targets"]
    assert without["exaflops"] > recorded["exaflops"] > without["exaflops"] / 2
    as_many = start(
        "objective.phases=[{at: 0.3, rate: 0.26}]", "checkpoint.every_steps=3", name="b"
    )
    assert result(as_many) == {**result(unbroken), "exaflops": result(as_many)["exaflops"]}


def test_a_causal_phase_is_on_record_and_comes_before_masks(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is the masked one all along, and masked steps are those of a run without."""
    seen, original = [], Engine.forward_backward

    def noted(self: Engine, batches: list[Batch], *rest: Any) -> Any:
        seen.append([(len(batch.target_ids_M), batch.packing.causal) for batch in batches])
        return original(self, batches, *rest)

    monkeypatch.setattr(Engine, "forward_backward", noted)
    run = start("objective=causal-then-mlm", name="a")
    assert seen == [[(4 * 8, True)] * 2] * 5 + [[(4 * 8, False)] * 2] * 7
    recorded, without = (load_record(folder)["pretrain"] for folder in (run, unbroken))
    assert (recorded["objective"], without["objective"]) == ("causal, then mlm", "mlm")
    assert recorded["exaflops"] == without["exaflops"]
    assert recorded["validation"]["targets"] == without["validation"]["targets"]


def test_final_loads_in_stock_transformers(unbroken: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(unbroken / "final")
    assert model(torch.arange(10)[None]).logits.isfinite().all()


def test_special_tokens_spelled_otherwise_reach_the_exported_tokenizer(
    start: Start, make_corpus: Callable[..., Path], tmp_path: Path
) -> None:
    """The corpus of the cramming paper has such tokens: they must not end in an error after the training."""
    corpus = make_corpus(tmp_path / "corpus", spelling="<pad>")
    run = start("budget.steps=2", f"data.corpus={corpus}", name="a")
    saved = json.loads((run / "final" / "special_tokens_map.json").read_text())
    assert (saved["pad_token"], saved["mask_token"]) == ("<pad>", "<mask>")


def test_files_that_the_run_did_not_make_outlive_a_budget_without_a_step(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not one step"):
        start(*TOKENS, "budget.tokens=10", name="a")
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(
    start: Start, unbroken: Path, losses: Losses, result: Result
) -> None:
    repeated = start("checkpoint.every_steps=5", name="a")  # when it saves must not matter
    assert losses(repeated) == losses(unbroken)
    assert result(repeated) == result(unbroken)
    other = start("seed=1", "budget.steps=2", name="b")
    assert losses(other)[0] != losses(unbroken)[0]


def test_a_run_says_at_its_start_what_keeps_it_out_of_the_closed_division(
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = []

    def judge(record: Any) -> list[str]:
        seen.append(record)
        return ["R20: dirty", "R12: no license"]

    overrides = [*tiny_overrides, "budget.steps=1", "division=closed"]
    here = Invocation(runs=tmp_path, device="cpu")
    launch.main(compose(*overrides), replace(here, name="a"), judge)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 2 and lines[0].endswith("R20: dirty") and "division=open" in lines[0]
    (record,) = seen
    assert {"environment", "corpus", "config"} <= record.keys() and record["pretrain"][
        "devices"
    ] == 1
    launch.main(compose(*overrides, "division=open"), replace(here, name="b"), judge)
    assert "warning" not in capsys.readouterr().out and len(seen) == 1


@pytest.mark.parametrize("limit", ["hours=25", "minutes=1500"])
def test_what_is_judged_at_the_start_is_the_whole_budget_of_time(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str], tmp_path: Path, limit: str
) -> None:
    def judge(record: Any) -> list[str]:
        raise UserError(f"{record['pretrain']['budget']['spent_seconds']:.0f} seconds")

    overrides = [override for override in tiny_overrides if not override.startswith("budget.")]
    with pytest.raises(UserError, match="90000 seconds"):
        launch.main(
            compose(*overrides, "division=closed", f"budget.{limit}"),
            Invocation(runs=tmp_path, device="cpu"),
            judge,
        )


def test_another_corpus_can_be_what_is_validated_on(
    start: Start, make_corpus: Callable[..., Path], unbroken: Path, losses: Losses, tmp_path: Path
) -> None:
    """Same training, other validation text (the first step has a learning rate of 0); the record names it."""
    other, foreign = (
        make_corpus(tmp_path / "other", seed=1),
        make_corpus(tmp_path / "foreign", spelling="<pad>"),
    )
    assert losses(start(f"train.validation_corpus={other}", name="a")) == losses(unbroken)
    theirs = start(f"data.corpus={other}", "budget.steps=1", name="b")
    ours = start(f"train.validation_corpus={other}", "budget.steps=1", name="c")
    same, default = load_record(ours), start("budget.steps=1", name="d")
    assert same["pretrain"]["validation"] == load_record(theirs)["pretrain"]["validation"]
    assert same["pretrain"]["validation"] != load_record(default)["pretrain"]["validation"]
    assert same["corpus"]["validation"] == {
        "folder": str(other),
        "manifest_sha256": load_record(theirs)["corpus"]["manifest_sha256"],
    }
    with pytest.raises(
        UserError,
        match=r"validation_corpus=.*foreign: it has another tokenizer .* tokenizer\.path=",
    ):
        start(f"train.validation_corpus={foreign}", name="e")
    with pytest.raises(UserError, match=r"validation_corpus=.*nowhere: no corpus there"):
        start(f"train.validation_corpus={tmp_path / 'nowhere'}", name="e")


@pytest.mark.parametrize(
    ("steps", "says"),
    [(12, r"not finite after 12 steps.*Lower optim.lr"), (60, r"not finite in 50 steps in a row")],
)
def test_a_diverged_run_is_no_result(start: Start, tmp_path: Path, steps: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        start("optim.lr=1e30", "train.validations=0", f"budget.steps={steps}", name="a")
    section = load_record(tmp_path / "runs" / "a")["pretrain"]
    assert (
        section["status"] == "diverged"
        and 0 < section["steps"] <= steps
        and section["final_files"] is None
    )
    assert not (tmp_path / "runs" / "a" / "final").exists()
    before = (tmp_path / "runs" / "a" / "record.json").read_bytes()
    with pytest.raises(UserError, match=r"diverged.*Give another name"):
        start(name="a")
    assert (tmp_path / "runs" / "a" / "record.json").read_bytes() == before


@pytest.mark.parametrize(
    "setting",
    [
        "memory.checkpoint_every=1",
        "memory=selective",
        "memory.offload_activations=true",
        "runtime.prefetch=1",
    ],
)
def test_memory_settings_do_not_change_a_bit(
    start: Start, unbroken: Path, setting: str, result: Result
) -> None:
    assert result(start(setting, name="a")) == result(unbroken)


def test_an_automatic_micro_batch_is_recorded_and_changes_nothing(
    start: Start, unbroken: Path, losses: Losses, result: Result
) -> None:
    """Here the whole batch of 8 fits: the same run, bit for bit, as with that number given."""
    run, fixed = (
        start("train.micro_batch=auto", name="auto"),
        start("train.micro_batch=8", name="m8"),
    )
    assert result(run) == result(fixed)
    section = load_record(run)["pretrain"]
    assert section["micro_batch"] == 8
    assert section["micro_batch_found"].startswith("auto, predicted ")
    assert [loss for _, loss in losses(run)] == pytest.approx(
        [loss for _, loss in losses(unbroken)], rel=1e-4
    )


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ([*TOKENS, "budget.tokens=1000"], 3),
        ([*TOKENS, "budget.tokens=1024"], 4),
        (["budget.steps=1"], 1),
    ],
)
def test_budgets_in_tokens_and_steps_are_never_passed(
    start: Start, budget: list[str], steps: int
) -> None:
    section = load_record(start(*budget, name="a"))["pretrain"]
    assert section["steps"] == steps
    assert section["tokens"] == steps * 8 * 32
    assert section["budget"]["spent"] <= section["budget"]["limit"]


def test_the_progress_line_has_speed_and_learning_rate(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    start("optim.lr=1e-3", "schedule=constant", "schedule.warmup=0", "budget.steps=2", name="a")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pretrain: ")]
    assert re.search(r"step 1, loss \d+\.\d\d, \S+ tokens/s, lr 0\.001$", said[0]), said


def test_a_validation_that_leaves_no_time_for_a_step_is_left_out(
    start: Start,
    unbroken: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    losses: Losses,
) -> None:
    """The first of two is due at half the budget and would take longer than the rest of it."""
    monkeypatch.setattr("cramming.budget.StepTimePredictor.validation_seconds", lambda *_: 1e6)
    monkeypatch.setattr("cramming.budget.BudgetClock.seconds_left", lambda *_: 40.0)
    run = start(name="a")
    said = capsys.readouterr().out
    assert (
        "no validation, which would take about 1000000 s of the 40 s left (train.validations"
        in said
    )
    assert losses(run) == losses(unbroken)
    assert sum("validation_loss" in row for row in load_metrics(run)) == 1  # the end's
