"""A resume takes up what the run's own journal knows, and nothing else: no time comes back, no training is given."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import checkpoint, device, pretrain, train_state
from cramming.budget import BudgetClock, Work
from cramming.config import UserError
from cramming.engine import Engine
from cramming.journal import Journal, checkpoints_of, processes_of, read_journal
from cramming.record import load_metrics, load_record, write_record_section
from eval.rules.load import load_run
from eval.rules.table import RULES
from tests.conftest import before_step

Start = Callable[..., Path]
Result = Callable[[Path], dict[str, Any]]
Refused = Callable[..., str]
EVERY = "checkpoint.every_steps=3"


class Crash(BaseException):
    """Nobody catches it: the process would be gone."""


def crash(*_: Any, **__: Any) -> None:
    raise Crash


@pytest.fixture(scope="module")
def crashed_once(
    tmp_path_factory: pytest.TempPathFactory,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> Path:
    """The run that went down in step 9 of 12, with checkpoints of steps 3 and 6; read-only."""
    runs = tmp_path_factory.mktemp("crashed")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        before_step(patch, 9, crash)
        pretrain.main(compose(*tiny_overrides, f"runs={runs}", "name=a", EVERY))
    return runs / "a"


@pytest.fixture
def crashed(crashed_once: Path, tmp_path: Path) -> Path:
    """A copy of it, where `start` and `refused` look for the run "a"."""
    return Path(shutil.copytree(crashed_once, tmp_path / "runs" / "a"))


def steps_of(run: Path) -> list[int]:
    return [saved.steps for saved in checkpoints_of(read_journal(run / "budget.jsonl"))]


def finding(run: Path) -> tuple[bool, str]:
    """What R5 says of a run."""
    found = load_run(run)
    assert found.problem is None
    rule = next(rule for rule in RULES if rule.number == "R5")
    return rule(found.record).ok, rule(found.record).evidence


def test_an_honest_resume_takes_an_entry_of_its_journal_and_keeps_r5(
    start: Start, crashed: Path, unbroken: Path, result: Result
) -> None:
    assert result(start("name=a", "resume=true", EVERY)) == result(unbroken)
    events = read_journal(crashed / "budget.jsonl")
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert (resumed["process"], resumed["steps"]) == (1, 6)
    assert (6, resumed["sha256"]) in checkpoints_of(events)
    assert finding(crashed)[0] and finding(unbroken)[0]


def test_what_a_process_forced_or_compiled_elsewhere_stays_on_record(
    start: Start, crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record_section(crashed, pretrain={"forced": ["fp8"]})
    monkeypatch.setattr(device, "GIVEN_CACHES", {"TORCHINDUCTOR_CACHE_DIR": "/warm"})
    found = load_record(start("name=a", "resume=true", EVERY))
    assert found["pretrain"]["forced"] == ["fp8"]
    caches = [process["compile_cache"] for process in (found["environment"], *found["resumed"])]
    witnesses = {
        event["setup"] for event in read_journal(crashed / "budget.jsonl") if "setup" in event
    }
    assert caches == ["own", "given"] and len(witnesses) == 2


@pytest.mark.parametrize("lines", [None, 0, 1, 2])
def test_a_journal_that_is_lost_or_cut_short_gives_no_time_back(
    crashed: Path, refused: Refused, lines: int | None
) -> None:
    journal = crashed / "budget.jsonl"
    content = journal.read_text().splitlines(keepends=True)
    assert len(content) > 3
    journal.unlink()
    if lines is not None:
        journal.write_text("".join(content[:lines]))
    before = {p: p.read_bytes() for p in crashed.rglob("*") if p.is_file()}
    assert "budget.jsonl" in refused("resume=true", EVERY)
    assert {p: p.read_bytes() for p in crashed.rglob("*") if p.is_file()} == before
    shutil.rmtree(crashed / "checkpoints")  # then the record alone knows that there was a journal
    (crashed / "metrics.jsonl").unlink()
    assert lines or "budget.jsonl: the journal is missing or empty" in refused("resume=true", EVERY)


def test_the_log_knows_of_more_seconds_than_the_journal(crashed: Path, refused: Refused) -> None:
    row = {"step": 8, "seconds": 1e4, "loss": 5.0}
    with (crashed / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert "metrics.jsonl: a step at 10000 s, budget.jsonl ends at" in refused("resume=true", EVERY)


@pytest.mark.parametrize("left", ["nothing", "one row", "other seconds"])
def test_a_log_that_does_not_know_of_the_checkpoint(
    crashed: Path, refused: Refused, left: str
) -> None:
    """Rows that say when steps ended would else be no obstacle to a journal that says less."""
    log = crashed / "metrics.jsonl"
    rows = [{**row, "seconds": 0.5 * row["seconds"]} for row in load_metrics(crashed)]
    log.write_text(
        "".join(json.dumps(row) + "\n" for row in (rows if left == "other seconds" else rows[:1]))
    )
    if left == "nothing":
        log.unlink()
    assert re.search(
        r"metrics\.jsonl: no row of step 6 at .* s, at which its checkpoint",
        refused("resume=true", EVERY),
    )


def test_another_runs_journal(crashed: Path, unbroken: Path, refused: Refused) -> None:
    shutil.copy(unbroken / "budget.jsonl", crashed)
    assert "budget.jsonl: the journal is not the one that this run began with" in refused(
        "resume=true", EVERY
    )


@pytest.mark.parametrize("forged", [{"corpus": "0" * 64}, {}])
def test_another_runs_training_beside_a_record_that_lost_or_forged_its_beginning(
    crashed: Path, refused: Refused, forged: dict[str, str]
) -> None:
    """A run on one corpus must not become a run on another."""
    record = json.loads((crashed / "record.json").read_text())
    begun = record.pop("pretrain")
    (crashed / "record.json").write_text(json.dumps(record))
    assert "record.json does not know that training began" in refused("resume=true", EVERY)
    journal = crashed / "budget.jsonl"
    rows = [{**json.loads(line), "previous": None} for line in journal.read_text().splitlines()]
    journal.unlink()
    writer = Journal(journal)
    for row in rows:
        writer.write({key: value for key, value in row.items() if key != "corpus"} | forged)
    writer.close()
    record["pretrain"] = {**begun, "journal_start": train_state.first_line_sha256(journal)}
    (crashed / "record.json").write_text(json.dumps(record))
    assert "budget.jsonl: a process of this journal read another corpus" in refused(
        "resume=true", EVERY
    )


def test_a_later_checkpoint_of_another_run_is_refused(
    crashed: Path, unbroken: Path, refused: Refused
) -> None:
    shutil.copy(unbroken / "checkpoints" / "step-00000012.pt", crashed / "checkpoints")
    said = refused("resume=true", EVERY)
    assert "checkpoints: a checkpoint of step 12" in said and "another run's" in said


def test_another_runs_checkpoint_under_the_number_of_ours_is_not_taken(
    start: Start, crashed: Path, unbroken: Path, result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = unbroken / "checkpoints" / "step-00000012.pt"
    shutil.copy(foreign, crashed / "checkpoints" / "step-00000006.pt")
    assert result(start("name=a", "resume=true", EVERY)) == result(unbroken)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "step-00000006.pt: damaged checkpoint, or another run's" in said
        and "started at step 3" in said
    )


@pytest.mark.parametrize("resume", ["true", "false"])
def test_a_journal_without_its_record(crashed: Path, refused: Refused, resume: str) -> None:
    """Else another budget could be set for what is trained already."""
    (crashed / "record.json").unlink()
    assert "without its record.json" in refused(f"resume={resume}", "budget.steps=50")
    assert not (crashed / "record.json").exists()


def test_another_limit_than_the_processes_before(crashed: Path, refused: Refused) -> None:
    config = load_record(crashed)["config"]
    write_record_section(crashed, config={**config, "budget": {**config["budget"], "steps": 50}})
    assert "has a process with a limit of 12 steps in budget.jsonl" in refused(
        "resume=true", EVERY, "budget.steps=50"
    )


@pytest.mark.usefixtures("each_saver")
@pytest.mark.parametrize("where", ["enter_checkpoint", "write_record_section", "BudgetClock"])
def test_killed_at_the_worst_moment_a_run_goes_on_and_stays_charged(
    start: Start,
    unbroken: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    result: Result,
    where: str,
) -> None:
    """Between a checkpoint's entry and its name; before the record says that training began; before the journal."""
    with monkeypatch.context() as patch, pytest.raises(Crash):
        if where == "enter_checkpoint":
            original = BudgetClock.enter_checkpoint

            def enter(self: BudgetClock, sha256: str, work: Work, kept: bool) -> None:
                original(self, sha256, work, kept)
                if work.steps == 6:
                    crash()

            patch.setattr(BudgetClock, where, enter)
        else:
            patch.setattr(
                BudgetClock, "_beat", lambda _: None
            )  # this process lives on, and so would its heartbeats
            patch.setattr(train_state, where, crash)
        start("name=a", EVERY)
    run = tmp_path / "runs" / "a"
    entered = steps_of(run)
    assert entered == ([3, 6] if where == "enter_checkpoint" else [])
    assert result(start("name=a", "resume=true", EVERY)) == result(unbroken)
    assert len(processes_of(read_journal(run / "budget.jsonl"))) == (
        1 if where == "BudgetClock" else 2
    )
    assert finding(run)[0]


class TestEnded:
    """A run that ended stays ended, whatever its record says."""

    @pytest.fixture
    def ended(self, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """Killed after the end, before the record was complete."""
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(pretrain, "finish", crash)
            start("name=a", EVERY)
        return tmp_path / "runs" / "a"

    def test_a_resume_completes_its_record_and_trains_no_more(
        self,
        start: Start,
        ended: Path,
        unbroken: Path,
        monkeypatch: pytest.MonkeyPatch,
        result: Result,
    ) -> None:
        assert load_record(ended)["pretrain"]["status"] == "running"
        journal = (ended / "budget.jsonl").read_bytes()
        monkeypatch.setattr(Engine, "forward_backward", lambda *_, **__: pytest.fail("it trained"))
        assert result(start("name=a", "resume=true", EVERY)) == result(unbroken)
        assert (ended / "budget.jsonl").read_bytes() == journal
        assert finding(ended)[0]

    def test_it_does_not_go_on_from_an_older_checkpoint(
        self, ended: Path, refused: Refused
    ) -> None:
        (ended / "checkpoints" / "step-00000012.pt").unlink()
        assert "no checkpoint there is as it was saved" in refused("resume=true", EVERY)
        shutil.rmtree(ended / "checkpoints")
        assert "ended after 12 steps and its last checkpoint is gone" in refused(
            "resume=true", EVERY
        )


@pytest.mark.usefixtures("each_saver")
def test_a_run_has_ended_once_its_last_checkpoint_is_saved(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    unbroken: Path,
    result: Result,
    refused: Refused,
) -> None:
    """A full disk at the end must not cost the run."""

    def full(*_: Any, **__: Any) -> None:
        raise UserError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "overwrite_atomically", full)
        assert refused() == "no room"
    (process,) = processes_of(read_journal(tmp_path / "runs" / "a" / "budget.jsonl"))
    assert process["ended"] == "failed"
    assert result(start("name=a", "resume=true")) == result(unbroken)
