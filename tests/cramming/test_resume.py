"""A run that was stopped, or that crashed, goes on just where it was, its time charged, or is refused in one line."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming.budget import BudgetClock
from cramming.config import UserError
from cramming.data.batches import BatchSource
from cramming.engine import Engine
from cramming.hooks import StepResult
from cramming.model.heads import MaskedLM
from cramming.plan import micro_batch
from cramming.record import load_metrics, load_record
from cramming.runlog import RUN_LOG, Steps, Validation, read_log, training_of
from cramming.train_parts import Checkpointer
from tests.conftest import before_step

Start = Callable[..., Path]
Losses = Callable[[Path], list[tuple[int, float]]]
Result = Callable[[Path], dict[str, Any]]
Refused = Callable[..., str]
Break = Callable[..., BaseException]


def endings(run: Path) -> list[str]:
    """Return how each process of a run ended."""
    processes = load_record(run)["pretrain"]["budget"]["processes"]
    return [process["ended"] for process in processes]


def checkpoints(run: Path) -> list[int]:
    """Return after which steps the run's checkpoints were made."""
    return [saved.steps for saved in training_of(read_log(run / RUN_LOG)).saved]


class Crash(BaseException):
    """Nobody catches it: the process would be gone."""


def crash() -> None:
    raise Crash


@pytest.fixture
def break_run(start: Start) -> Break:
    """`break_run(5, "stop", *overrides)`: SIGTERM in a process's step 5, or a "crash" there; how it ended."""

    def call(step: int, how: str, *overrides: str, **options: Any) -> BaseException:
        action = crash if how == "crash" else lambda: os.kill(os.getpid(), signal.SIGTERM)
        with pytest.MonkeyPatch.context() as patch, pytest.raises((Crash, SystemExit)) as ended:
            before_step(patch, step, action)
            start(*overrides, **options)
        return ended.value

    return call


RAMP = ["schedule=triangle", "train.batch_ramp={start: 0.5, until: 0.8}"]
AVERAGE = "train.average={start: 0.3, every: 0.1}"
BY_LOSS = [
    "objective=mlm-by-loss",
    "objective.power=100",
]  # a tiny model's losses differ little
PHASES = "objective.phases=[{at: 0.2, rate: 0.15}, {at: 0.7, rate: 0.05}]"
CAUSAL = ["objective=causal-then-mlm", "objective.until=0.5"]
DISTILL = ["objective=distill", "objective.teacher=TEACHER", "start=teacher", "model.dropout=0.2"]


@pytest.mark.usefixtures("each_saver")
@pytest.mark.parametrize(
    "settings",
    [
        [],
        [*RAMP, PHASES, "model.dropout=0.2", "train.packing=documents"],
        CAUSAL,
        ["optim=lamb", AVERAGE, *BY_LOSS],
        ["objective=rtd", "model.dropout=0.2"],
        DISTILL,
        ["memory=offload-all"],
    ],
)
def test_stopped_and_resumed_equals_unbroken_bit_for_bit(
    start: Start,
    unbroken: Path,
    break_run: Break,
    settings: list[str],
    losses: Losses,
    result: Result,
    teacher: Path,
) -> None:
    """SIGTERM in step 5, SIGTERM again in the second process, then to the end. Also with a batch ramp, phases of the
    objective and dropout, our own optimizer, masks by loss, sampled replacements, a teacher, everything offloaded."""
    settings = [word.replace("TEACHER", str(teacher)) for word in settings]
    whole = start(*settings, name="whole") if settings else unbroken
    for resume in (False, True):
        ended = break_run(5, "stop", *settings, name="a", resume=resume)
        assert isinstance(ended, SystemExit) and ended.code == 128 + signal.SIGTERM
    stopped = load_record(whole.parent.parent / "runs" / "a") if settings else None
    assert stopped is None or (stopped["pretrain"]["status"], stopped["pretrain"]["steps"]) == (
        "interrupted",
        8,
    )
    run = start(*settings, name="a", resume=True)
    assert losses(run) == losses(whole)
    assert result(run) == result(whole)
    assert endings(run) == [
        "stopped",
        "stopped",
        "finished",
    ]


@pytest.mark.parametrize("log_every", [5, 50])
def test_rows_of_the_log_are_means_of_the_same_steps_after_a_resume(
    start: Start, break_run: Break, log_every: int, result: Result
) -> None:
    settings = (f"train.log_every={log_every}", "checkpoint.every_steps=3")
    whole = start(*settings, name="whole")
    for resume, step, how in ((False, 5, "stop"), (True, 4, "crash")):
        break_run(step, how, *settings, name="a", resume=resume)
    run = start(*settings, name="a", resume=True)
    assert result(run) == result(whole)
    same = (
        "step",
        "loss",
        "accuracy",
        "grad_norm",
        "lr",
        "each_progress",
        "each_loss",
        "each_accuracy",
    )
    logs = [
        [{key: row[key] for key in same} for row in load_metrics(r) if "loss" in row]
        for r in (run, whole)
    ]
    assert [row for row in logs[0] if row["step"] != 4] == logs[1]


def test_a_stop_between_micro_batches_rolls_the_step_back(
    start: Start, monkeypatch: pytest.MonkeyPatch, result: Result
) -> None:
    """SIGTERM in the first of the fifth step's two micro-batches: its dropout must not be drawn twice."""
    whole = start("model.dropout=0.2", name="whole")
    original, calls = MaskedLM.forward, [0]

    def counted(self: MaskedLM, *arguments: Any) -> Any:
        calls[0] += self.training
        if calls[0] == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(MaskedLM, "forward", counted)
        start("model.dropout=0.2", name="a")
    assert calls[0] == 9
    assert result(start("model.dropout=0.2", name="a", resume=True)) == result(whole)


def test_ctrl_c_ends_in_order_and_a_second_one_at_once(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch, result: Result
) -> None:
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        before_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
        start(name="a")
    assert ended.value.code == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before_step(patch, 3, twice)
        start(name="a", resume=True)
    run = start(name="a", resume=True)
    assert result(run) == result(unbroken)
    assert endings(run) == [
        "stopped",
        "failed",
        "finished",
    ]


def test_stopped_before_the_first_step_the_name_is_free_again(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        before_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        start("optim.lr=1.0", name="mistyped")
    assert ended.value.code == 130
    assert not (unbroken.parent.parent / "runs" / "mistyped").exists()
    assert start("optim.lr=1e-4", name="mistyped").is_dir()


def test_a_time_budget_is_used_and_never_passed(
    start: Start, unbroken: Path, monkeypatch: pytest.MonkeyPatch, break_run: Break
) -> None:
    """Four seconds, as if this process had just begun (with `unbroken` its imports are done); stopped, resumed."""
    limit = 4.0
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    hours = ["budget.steps=null", f"budget.hours={limit / 3600}", "train.log_every=10"]
    break_run(6, "stop", *hours, name="a")
    run = start(*hours, name="a", resume=True)
    section = load_record(run)["pretrain"]
    assert section["status"] == "finished"
    assert section["steps"] > 6
    assert section["budget"]["overrun_seconds"] == 0.0
    assert limit - 1 < section["budget"]["spent_seconds"] <= limit
    rows = [row for row in load_metrics(run) if "loss" in row]
    assert all(row["seconds"] <= limit for row in rows)
    assert [row["progress"] for row in rows] == sorted(row["progress"] for row in rows)
    assert load_metrics(run)[-1]["step"] == section["steps"]


def test_a_resumes_first_update_is_not_foretold_shorter_than_earlier_ones_were(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less time left than one update takes, it would end after the deadline and the whole run be void."""

    def slow(self: Engine, *arguments: Any) -> StepResult:
        time.sleep(0.3)
        return update(self, *arguments)

    update, room, foretold = Engine.update, BudgetClock.has_room_for, list[float]()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Engine, "update", slow)
        before_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start(name="a")
    monkeypatch.setattr(
        BudgetClock,
        "has_room_for",
        lambda self, **cost: foretold.append(cost["seconds"]) or room(self, **cost),
    )
    start(name="a", resume=True)
    step, update_of_step = foretold[:2]
    assert (step, update_of_step >= 0.3) == (0.0, True)


def test_a_resume_with_other_threads_says_that_bits_may_differ(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        before_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start(name="a")
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    start(name="a", resume=True)
    assert f"threads {threads}, here {threads + 1}" in capsys.readouterr().out


def test_a_run_killed_at_its_last_checkpoint_has_a_loss(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of the log was due before it, and a resume finds no step left to do."""
    settings = (
        "budget.steps=4",
        "checkpoint.every_steps=4",
        "train.log_every=20",
        "train.validations=0",
    )
    save = Checkpointer.save
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(
            Checkpointer, "save", lambda self, *arguments: (save(self, *arguments), crash())
        )
        start(*settings, name="a")
    run = start(*settings, name="a", resume=True)
    assert load_record(run)["pretrain"]["train_loss"] is not None
    assert [row["step"] for row in load_metrics(run) if "loss" in row] == [4]
    assert checkpoints(run) == [4]  # and not once more


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`stall(step)`: the machine stands still for a day in the update of this step."""
    update, calls, clocks, begin = Engine.update, [0], list[BudgetClock](), BudgetClock.attach

    def attach(self: BudgetClock, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        clocks.append(self)

    def of(step: int) -> None:
        def stalled(self: Engine, *arguments: Any) -> StepResult:
            calls[0] += 1
            if calls[0] == step:
                clocks[-1]._began -= 86400
            return update(self, *arguments)

        monkeypatch.setattr(BudgetClock, "attach", attach)
        monkeypatch.setattr(Engine, "update", stalled)

    return of


HOURS = ("budget.steps=null", "budget.hours=1", "schedule=constant", "schedule.warmup=0")


@pytest.mark.usefixtures("each_saver")
def test_a_step_that_ended_after_the_deadline_is_not_in_the_weights(
    start: Start, stall: Callable[[int], None], result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends with the state of its newest checkpoint, and all that is on record is about that state."""
    stall(9)
    run = start("checkpoint.every_steps=3", *HOURS, name="a")
    assert re.search(
        r"step 9 ended 8\d+\.\d s after the deadline and is not kept: rolled back to step 6",
        capsys.readouterr().out,
    )
    section = load_record(run)["pretrain"]
    assert (section["status"], section["steps"], section["tokens"]) == ("finished", 6, 6 * 8 * 32)
    assert section["budget"]["overrun_seconds"] == 0 and section["budget"]["spent_seconds"] < 3600
    rows = load_metrics(run)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 7))
    assert section["train_loss"] == rows[-2]["loss"] and "validation_loss" in rows[-1]
    whole = load_record(
        start("budget.steps=6", "schedule=constant", "schedule.warmup=0", name="whole")
    )["pretrain"]
    for key in ("final_sha256", "validation", "train_loss", "sequences", "exaflops"):
        assert section[key] == whole[key], key


@pytest.mark.parametrize(
    ("late", "said"),
    [(1, "budget: not one step"), (2, "there was no checkpoint to roll back to")],
)
def test_without_a_checkpoint_before_it_no_step_is_left(
    start: Start,
    stall: Callable[[int], None],
    refused: Refused,
    tmp_path: Path,
    late: int,
    said: str,
) -> None:
    """A run that has made steps stays, with its log."""
    stall(late)
    assert said in refused(*HOURS)
    run = tmp_path / "runs" / "a"
    assert run.exists() == (late > 1)
    if late > 1:
        assert load_record(run)["pretrain"]["status"] == "exhausted"
        assert (
            max(e.event.steps or 0 for e in read_log(run / RUN_LOG) if hasattr(e.event, "steps"))
            == 1
        )


@pytest.mark.parametrize("pause", [0.0, 0.001])
def test_a_budget_of_hours_is_saved_shortly_before_its_end(
    start: Start, stall: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """At step 6, and validated: 99 % pass in it, or just before it, in a `pause` after step 5."""
    asked = set[int]()

    def progress(self: BudgetClock) -> float:
        is_repeated = self.work.steps in asked
        asked.add(self.work.steps)
        return 0.9695 + 0.004 * self.work.steps + pause * is_repeated

    monkeypatch.setattr(BudgetClock, "progress", progress)
    stall(9)
    run = start(*HOURS, "train.validations=100", name="a")
    assert load_record(run)["pretrain"]["steps"] == 6
    validations = [e.event for e in read_log(run / RUN_LOG) if isinstance(e.event, Validation)]
    assert [event.step for event in validations].count(6) == 2  # and at the end


def test_the_last_update_leaves_a_share_of_the_budget_free(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stands still there for a moment would else end after the deadline. 0.36 s an hour."""
    room, foretold = BudgetClock.has_room_for, list[float]()
    monkeypatch.setattr(
        BudgetClock,
        "has_room_for",
        lambda self, **cost: foretold.append(cost["seconds"]) or room(self, **cost),
    )
    before_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        start("budget.steps=null", "budget.hours=100", name="a")
    assert foretold[1::2] == [36.0, 36.0]


def test_crashed_and_resumed_equals_unbroken_bit_for_bit(
    start: Start, unbroken: Path, tmp_path: Path, losses: Losses, result: Result, break_run: Break
) -> None:
    """Dies in step 9 with a checkpoint at 6, resumes with the newest checkpoint damaged: goes on from step 3."""
    break_run(9, "crash", "checkpoint.every_steps=3", name="a")
    files = sorted((tmp_path / "runs/a/checkpoints").iterdir())
    assert [f.name for f in files] == ["step-00000003.pt", "step-00000006.pt"]
    files[-1].write_bytes(files[-1].read_bytes()[:-1000])
    run = start("checkpoint.every_steps=3", name="a", resume=True)
    assert losses(run) == losses(unbroken)
    assert result(run) == result(unbroken)
    steps = [e.event.step for e in read_log(run / RUN_LOG) if isinstance(e.event, Steps)]
    assert steps.count(5) == 2  # done twice; the record counts it once
    rows = [row["step"] for row in load_metrics(run) if "loss" in row]
    assert rows == list(range(1, 13))


def test_a_crash_before_the_first_checkpoint_starts_again_but_stays_charged(
    start: Start, unbroken: Path, result: Result, break_run: Break
) -> None:
    break_run(4, "crash", name="a")
    run = start(name="a", resume=True)
    assert result(run) == result(unbroken)
    processes = load_record(run)["pretrain"]["budget"]["processes"]
    assert len(processes) == 2
    assert load_record(run)["pretrain"]["budget"]["spent_seconds"] > processes[0]["spent_seconds"]


def test_a_resume_without_time_for_a_step_is_told_apart_from_a_run_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, refused: Refused, tmp_path: Path, break_run: Break
) -> None:
    break_run(4, "crash", *HOURS, name="a")
    with monkeypatch.context() as patch:
        patch.setattr("cramming.budget.process_age_seconds", lambda: 3600.0)
        assert "there was no checkpoint to roll back to" in refused(*HOURS, resume=True)
    record = load_record(tmp_path / "runs" / "a")
    assert (record["pretrain"]["status"], record["pretrain"]["steps"]) == ("exhausted", 0)
    assert "budget is spent, without a completed step" in refused(*HOURS, resume=True)


@pytest.mark.parametrize("killed", [False, True])
def test_a_shard_that_held_something_else_for_a_while_is_on_record(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    make_corpus: Callable[..., Path],
    tmp_path: Path,
    killed: bool,
) -> None:
    """Overwritten in step 2, put back in step 5, with or without a kill there: the checkpoint of step 3 has seen it."""
    corpus = make_corpus(tmp_path / "corpus", documents=100)
    settings = (f"data.corpus={corpus}", "checkpoint.every_steps=3", "budget.steps=6")
    path = corpus / "train-00000.bin"
    content, times = path.read_bytes(), path.stat()

    def write(tokens: bytes) -> None:
        with path.open("r+b") as file:  # cut short, what is mapped would end the process
            file.write(tokens)

    def put_back() -> None:
        write(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if killed:
            crash()

    before_step(monkeypatch, 2, lambda: write(bytes(len(content))))
    before_step(monkeypatch, 5, put_back)
    if killed:
        with pytest.raises(Crash):
            start(*settings, name="a")
    run = start(*settings, name="a", resume=killed)
    assert load_record(run)["corpus"]["changed"] == {str(path): None if killed else True}


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def run_out_of_memory_on_a_cpu() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("step", [1, 5])
def test_out_of_memory_with_an_automatic_micro_batch_resumes_with_less(
    start: Start,
    unbroken: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    refused: Refused,
    step: int,
) -> None:
    auto = ["train.micro_batch=auto", "checkpoint.every_steps=3"]
    monkeypatch.setattr(micro_batch, "find_micro_batch", lambda *_: (8, "auto, as told"))
    for resume, before, after in ((False, 8, 4), (True, 4, 2)):
        with monkeypatch.context() as patch:
            before_step(patch, 1 if resume else step, run_out_of_memory)
            said = refused(*auto, resume=resume)
        assert said.startswith(f"train.micro_batch={before}: cpu ran out of memory in training")
        assert said.endswith(f"Resume with --resume, which takes {after}.")
    assert endings(tmp_path / "runs" / "a") == ["failed"] * 2
    section = load_record(start(*auto, name="a", resume=True))["pretrain"]
    assert (section["status"], section["steps"], section["micro_batch"]) == ("finished", 12, 2)
    assert section["micro_batch_found"].endswith("4 did not fit in training")
    whole = load_record(unbroken)["pretrain"]
    assert section["tokens"] == whole["tokens"]
    assert section["validation"]["loss"] == pytest.approx(whole["validation"]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "step", "says"),
    [
        ([], 1, "train.micro_batch=4: cpu ran out of memory in training. Set train.micro_batch=2."),
        (
            [],
            5,
            "Set train.micro_batch=2 under another name, or resume with --resume if something else",
        ),
        (["train.batch_size=9", "train.micro_batch=9"], 1, "Set train.micro_batch=3"),
        (["train.micro_batch=1"], 1, "Use memory.checkpoint_every=1 or a smaller model"),
    ],
)
@pytest.mark.parametrize("action", [run_out_of_memory, run_out_of_memory_on_a_cpu])
def test_out_of_memory_with_a_given_micro_batch_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    refused: Refused,
    settings: list[str],
    step: int,
    says: str,
    action: Callable[[], None],
) -> None:
    before_step(monkeypatch, step, action)
    assert says in refused(*settings)
    assert (tmp_path / "runs" / "a").exists() == (step > 1)


def test_the_record_is_about_all_processes(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow data in the first process, and a graph compiled in every step of both."""
    calls, make = [0], BatchSource.batch

    def graphs() -> int:
        calls[0] += 1
        return calls[0]

    def slow(self: BatchSource, first: int, rows: int) -> Any:
        time.sleep(0.1)
        return make(self, first, rows)

    monkeypatch.setattr("cramming.engine.compiled_graphs", graphs)
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(BatchSource, "batch", slow)
        before_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start(name="a")
    section = load_record(start(name="a", resume=True))["pretrain"]
    seconds = section["budget"]["spent_seconds"]
    assert section["tokens_per_second"] == pytest.approx(section["tokens"] / seconds)
    assert (
        section["recompilations"] == 3 + 7
    )  # four steps, then eight, of which the first ones are no recompilations
    assert section["data_wait_share"] * seconds > 0.4  # of four steps with two batches of 0.1 s
    assert "training waited for batches for" in capsys.readouterr().out
    assert section["energy_kwh"] is section["energy_source"] is None  # a CPU's is not measured


def test_a_resume_that_finds_nothing_says_so(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start(name="first")
    assert "no run" not in capsys.readouterr().out
    run = start(name="frist", resume=True)
    said = f"--resume: no run in {run} to resume, a new one begins"
    assert said in " ".join(capsys.readouterr().out.split())
    start(name="frist", resume=True)
    assert "no run" not in capsys.readouterr().out


def test_a_finished_run_is_refused_or_with_resume_left_alone(start: Start, unbroken: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in unbroken.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="already has a finished run"):
        start(name="a", runs=unbroken.parent)
    start(name="a", resume=True, runs=unbroken.parent)
    assert {p: p.stat().st_mtime_ns for p in unbroken.rglob("*") if p.is_file()} == before


def test_an_unfinished_run_and_a_resume_with_other_settings(
    refused: Refused, break_run: Break
) -> None:
    break_run(4, "crash", "optim.lr=0.001", name="a")
    assert "--resume" in refused()
    message = refused("optim.lr=0.5", resume=True)
    assert message.startswith("optim.lr=0.5: ")
    assert "0.001" in message


def test_a_resume_may_find_the_corpus_elsewhere(
    start: Start, make_corpus: Callable[..., Path], tmp_path: Path, break_run: Break
) -> None:
    """Newer settings may name its folder otherwise; the manifest identifies the corpus."""
    corpus = make_corpus(tmp_path / "corpus", documents=50)
    break_run(4, "crash", f"data.corpus={corpus}", name="a")
    moved = corpus.rename(tmp_path / "moved")
    assert (
        load_record(start(f"data.corpus={moved}", name="a", resume=True))["pretrain"]["status"]
        == "finished"
    )


@pytest.mark.parametrize("setting", ["data.corpus", "train.validation_corpus"])
@pytest.mark.parametrize("parent", ["{tmp_path}", "~"])
def test_a_resume_with_another_corpus_in_the_same_place(
    make_corpus: Callable[..., Path],
    tmp_path: Path,
    refused: Refused,
    setting: str,
    parent: str,
    break_run: Break,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus = make_corpus(tmp_path / "corpus", documents=50)
    override = f"{setting}={parent.format(tmp_path=tmp_path)}/corpus"
    break_run(4, "crash", override, name="a")
    corpus.rename(tmp_path / "old")
    make_corpus(corpus, documents=50, seed=1)
    assert "not the corpus that" in refused(override, resume=True)
