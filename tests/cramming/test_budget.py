"""The clock and its log: nothing that happened is ever refunded."""

import errno
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cramming import budget
from cramming.budget import BudgetClock, BudgetConfig, StepTimePredictor, Work, process_age_seconds
from cramming.config import UserError, build
from cramming.record import load_record
from cramming.runlog import (
    MAX_HEARTBEAT_SECONDS,
    RUN_LOG,
    EventLog,
    Heartbeat,
    Timed,
    Training,
    read_log,
    training_of,
)

UNITS = ("hours", "exaflops", "tokens", "steps")


def config(heartbeat: float = 0.05, **limit: Any) -> BudgetConfig:
    return BudgetConfig(**{**dict.fromkeys(UNITS), **limit}, heartbeat_seconds=heartbeat)


def start_clock(config: BudgetConfig, folder: Path) -> BudgetClock:
    """Start a process's clock on the log in `folder`, as `pretrain` does."""
    earlier = training_of(read_log(folder / RUN_LOG))
    clock = BudgetClock(config, EventLog(folder / RUN_LOG), earlier)
    if not clock.has_ended:
        clock.start("a", "open", recipe=None if earlier.processes else {})
    return clock


def training(folder: Path) -> Training:
    """Return the content of the log in `folder`."""
    return training_of(read_log(folder / RUN_LOG))


def timed_events(folder: Path) -> list[Timed]:
    """The timed events of the log in `folder`."""
    return [e.event for e in read_log(folder / RUN_LOG) if isinstance(e.event, Timed)]


@pytest.fixture
def young(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has run tests for a while; here a clock is to begin at zero."""
    monkeypatch.setattr(budget, "process_age_seconds", lambda: 0.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "budget.hours=null: no limit"),
        ({"hours": 1, "steps": 5}, "budget.steps=5: a second limit"),
        *(({unit: value}, f"budget.{unit}={value}") for unit in UNITS for value in (0, -1)),
        *(
            ({"steps": 1, "heartbeat_seconds": seconds}, "heartbeat_seconds")
            for seconds in (0, -1, 5.1)
        ),
    ],
)
def test_a_budget_has_one_limit_above_zero_and_a_heartbeat_of_at_most_five_seconds(
    settings: dict[str, Any], says: str
) -> None:
    plain = {**dict.fromkeys(UNITS), "heartbeat_seconds": 1.0}
    with pytest.raises(UserError, match=says):
        build(BudgetConfig, plain | settings, "budget")


def test_the_cpu_clock_charges_work_and_no_waiting(tmp_path: Path) -> None:
    """It counts since the process began, whatever this one has done before."""
    clock = start_clock(config(hours=1, clock="cpu"), tmp_path)
    began = clock.elapsed_seconds()
    assert 0 < began <= time.process_time()
    time.sleep(0.3)
    waited = clock.elapsed_seconds() - began
    until = time.process_time() + 0.2
    while time.process_time() < until:
        sum(range(1000))
    clock.close("finished")
    assert waited < 0.2 <= clock.elapsed_seconds() - began
    assert training(tmp_path).processes[0].start.clock == "cpu"


class TestHeartbeat:
    def test_heartbeats_come_in_time_while_the_process_is_busy(
        self, tmp_path: Path, young: None
    ) -> None:
        clock = start_clock(config(0.05, hours=1), tmp_path)
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            sum(range(1000))
        clock.close("finished")
        times = [event.elapsed for event in timed_events(tmp_path)]
        assert len(times) >= 6
        assert max(b - a for a, b in pairwise(times)) < 0.3

    def test_a_log_that_cannot_be_written_ends_the_training(
        self, tmp_path: Path, young: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = start_clock(config(0.01, hours=1), tmp_path)
        clock.step_synchronised(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _no_space)
            time.sleep(0.2)
        with pytest.raises(OSError, match="No space"):
            clock.step_synchronised(0.1)
        clock.close("failed")

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
    def test_a_log_that_cannot_be_synced_is_refused_and_charges_nothing(
        self, tmp_path: Path, young: None, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def refuse(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(UserError, match=r"runs=.*cannot sync"):
            start_clock(config(1, hours=1), tmp_path)
        assert read_log(tmp_path / RUN_LOG) == []

    @pytest.mark.parametrize("kind", ["cpu", "wall"])
    def test_no_step_is_more_than_five_seconds_behind_the_log(
        self, tmp_path: Path, young: None, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """In the log's own seconds: threads of a step spend 4 s of CPU time in no time, or the disk takes 8 s to
        sync. A crash would else give back more, and a resume take the log for one that was cut short."""
        now = [0.0]
        monkeypatch.setitem(budget.TIMERS, kind, lambda: now[0])
        if kind == "wall":
            monkeypatch.setattr(os, "fsync", lambda _: now.__setitem__(0, now[0] + 8))
        clock = start_clock(config(5, hours=1, clock=kind), tmp_path)
        for _ in range(6):
            now[0] += 4
            clock.step_synchronised(0.1)
            assert (
                clock.work.last_step_seconds
                <= training(tmp_path).spent_seconds + MAX_HEARTBEAT_SECONDS
            )
        clock.close("finished")

    def test_a_step_that_ends_while_a_heartbeat_is_made_is_in_it_whole_or_not_at_all(
        self, tmp_path: Path, young: None
    ) -> None:
        """Between any two lines of code of the heartbeat's thread. Rule 27 compares the counters of one entry."""
        clock, before = start_clock(config(5, hours=1), tmp_path), sys.gettrace()
        clock.attach(work := Work())

        def count_a_step(frame: FrameType, kind: str, _: object) -> Any:
            sys.settrace(None)
            work.add(Work(steps=1, sequences=2, tokens=8, flops=16.0))
            sys.settrace(count_a_step)
            return count_a_step

        sys.settrace(count_a_step)
        clock.beat()
        sys.settrace(before)
        clock.close("finished")
        event = timed_events(tmp_path)[2]
        assert isinstance(event, Heartbeat) and event.steps and 0 < event.steps < work.steps
        assert (event.tokens, event.flops) == (8 * event.steps, 16 * event.steps)

    def test_a_heartbeat_that_is_made_while_a_step_is_counted_has_it_whole_or_not_at_all(
        self,
    ) -> None:
        work, seen, before = Work(), [], sys.gettrace()

        def look(*_: object) -> Any:
            seen.append((work.steps, work.tokens, work.flops))
            return look

        sys.settrace(look)
        work.add(Work(steps=1, tokens=8, flops=16.0))
        sys.settrace(before)
        assert set(seen) == {(0, 0, 0.0), (1, 8, 16.0)}


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")


class TestClock:
    @pytest.mark.parametrize(
        ("unit", "limit", "cost"),
        [
            ("hours", 2 / 3600, {"seconds": 1.0}),
            ("exaflops", 2e-6, {"seconds": 9e9, "flops": 1e12}),
            ("tokens", 2000, {"seconds": 9e9, "tokens": 1000}),
            ("steps", 2, {"seconds": 9e9, "tokens": 10**9, "flops": 1e30}),
        ],
    )
    def test_room_is_counted_in_the_budgets_own_unit(
        self, tmp_path: Path, young: None, unit: str, limit: float, cost: dict[str, Any]
    ) -> None:
        clock = start_clock(config(**{unit: limit}), tmp_path)
        work = Work()
        clock.attach(work)
        done = 0
        while clock.has_room_for(**cost):
            if unit == "hours":
                clock._began -= 0.99  # instead of waiting
            work.add(
                Work(
                    steps=1, sequences=1, tokens=cost.get("tokens", 1), flops=cost.get("flops", 1.0)
                )
            )
            done += 1
        clock.close("finished")
        assert done == 2 if unit != "hours" else done in (1, 2)
        assert clock.spent() <= clock.config.limit
        assert clock.progress() == pytest.approx(
            1.0 if unit != "hours" else 0.99 * done / 2, abs=0.1
        )

    def test_an_old_checkpoint_refunds_no_time(self, tmp_path: Path, young: None) -> None:
        clock = start_clock(config(hours=1), tmp_path)
        clock._began -= 60
        clock.attach(Work(steps=100, last_step_seconds=50.0))
        clock.close("failed")
        for old in (Work(), Work(steps=50, last_step_seconds=25.0)):
            resumed = start_clock(config(hours=1), tmp_path)
            resumed.attach(old)
            assert resumed.elapsed_seconds() >= 60
            resumed.close("failed")

    def test_lost_compute_stays_charged_over_several_crashes(
        self, tmp_path: Path, young: None
    ) -> None:
        """Each process does 60 exaFLOPs and dies with the last 10 of them not in its checkpoint."""
        saved = 0.0
        for process in range(4):
            clock = start_clock(config(5, exaflops=1000), tmp_path)
            work = Work(flops=saved)
            clock.attach(work)
            assert clock.spent() == pytest.approx(60 * process)
            work.add(Work(steps=1, sequences=1, tokens=1, flops=60e18))
            saved = work.flops - 10e18
            clock.beat()
            clock.close("failed")

    def test_the_progress_of_the_weights_is_without_lost_compute(
        self, tmp_path: Path, young: None
    ) -> None:
        """A share of the budget that was reached in the lost part is reached again, and kept then."""
        clock = start_clock(config(5, exaflops=1000), tmp_path)
        clock.attach(Work(steps=6, flops=600e18))
        clock.close("failed")
        clock = start_clock(config(5, exaflops=1000), tmp_path)
        clock.attach(Work(steps=4, flops=400e18))
        assert (clock.progress_of_work(), clock.progress()) == (0.4, 0.6)
        clock.close("failed")

    def test_what_is_spent_ended_with_the_last_step(self, tmp_path: Path, young: None) -> None:
        clock = start_clock(config(hours=1 / 3600), tmp_path)
        clock.attach(Work())
        clock._began -= 0.5
        clock.step_synchronised(0.1)
        clock._began -= 100  # export, final validation
        clock.close("finished")
        budget = load_record(tmp_path)["pretrain"]["budget"]
        assert 0.5 <= budget["spent_seconds"] < 1.0
        assert budget["spent"] == pytest.approx(budget["spent_seconds"] / 3600)
        assert budget["overrun_seconds"] == 0.0

    @pytest.mark.parametrize(
        ("unit", "limit", "is_recorded"), [("hours", 1 / 3600, False), ("tokens", 5.0, True)]
    )
    def test_a_step_that_ended_after_the_deadline_is_not_noted(
        self, tmp_path: Path, young: None, unit: str, limit: float, is_recorded: bool
    ) -> None:
        """Only where time is what the budget limits."""
        clock = start_clock(config(**{unit: limit}), tmp_path)
        clock.attach(Work())
        assert clock.step_synchronised(0.1)
        before = clock.work.last_step_seconds
        clock._began -= 3.0
        assert clock.step_synchronised(2.0) == is_recorded
        assert (clock.slowest_update_seconds, clock.work.last_step_seconds > before) == (
            (0.1, 2.0)[is_recorded],
            is_recorded,
        )
        clock.close("finished")
        assert load_record(tmp_path)["pretrain"]["budget"]["overrun_seconds"] == 0


class TestStepTimePredictor:
    def test_the_step_that_compiles_is_no_measure(self) -> None:
        """A budget of 300 s, 40 s of start-up, a first step of 130 s, then steps of 1.5 s each."""
        predictor, left = StepTimePredictor(0.0), 300.0 - 40.0
        predictor.note(1, 130.0, 0.2, compiled=True)
        left -= 130.0
        assert predictor.step_seconds(1) <= left
        predictor.note(1, 1.5, 0.2, compiled=False)
        assert 1.5 <= predictor.step_seconds(1) < 2.0
        predictor.note(1, 60.0, 30.0, compiled=True)  # a recompilation
        assert 1.5 <= predictor.step_seconds(1) < 2.0
        assert predictor.update_seconds() == pytest.approx(0.4)

    def test_a_resumed_runs_first_update_is_foretold_by_the_processes_before(
        self, tmp_path: Path, young: None
    ) -> None:
        """The slowest counts, even if it came after the last checkpoint: like the time, it is in the log."""
        for seconds in (3.0, 2.0):
            clock = start_clock(config(5, hours=1), tmp_path)
            clock.attach(Work())
            clock.step_synchronised(seconds)
            clock.step_synchronised(0.5)
            clock.close("stopped")
        clock = start_clock(config(5, hours=1), tmp_path)
        predictor = StepTimePredictor(clock.slowest_update_seconds)
        clock.close("stopped")
        assert predictor.update_seconds() == 3.0
        predictor.note(1, 9.0, 0.0, compiled=False)  # skipped: it says nothing
        predictor.note(1, 9.0, 0.0, compiled=False)
        assert predictor.update_seconds() == 3.0
        predictor.note(1, 9.0, 0.5, compiled=False)
        assert predictor.update_seconds() == 1.0

    def test_a_prediction_is_on_the_safe_side(self) -> None:
        predictor = StepTimePredictor(0.0)
        assert predictor.step_seconds(4) == 0.0  # the first step is simply tried
        for seconds in (100.0, 1.0, 3.0, 2.0):
            predictor.note(2, seconds, seconds / 10, compiled=False)
        assert 6.0 <= predictor.step_seconds(4) < 7.0
        assert predictor.update_seconds() >= 0.3
        for _ in range(8):  # a slow step is forgotten
            predictor.note(2, 1.0, 0.1, compiled=False)
        assert predictor.step_seconds(2) < 1.5

    def test_a_pause_foretells_no_other(self) -> None:
        """Else a run whose machine paused late would end at once, before its learning rate came down."""
        predictor = StepTimePredictor(0.0)
        for seconds in (1.0, 1.0, 1.2, 1.1, 900.0, 1.0):
            predictor.note(1, seconds, seconds / 10, compiled=False)
        assert predictor.update_seconds() == pytest.approx(0.24)
        assert predictor.step_seconds(1) == pytest.approx(1.32) and predictor.validation_seconds(
            10
        ) == pytest.approx(13.2)
        for _ in range(4):
            predictor.note(1, 900.0, 0.1, compiled=False)
        assert predictor.step_seconds(1) == pytest.approx(990), "it has become slow"

    def test_validations_are_foretold_like_steps(self) -> None:
        """The first is predicted like training on as many micro-batches, later ones by those without compilation."""
        predictor = StepTimePredictor(0.0)
        predictor.note(2, 4.0, 0.1, compiled=False)
        assert predictor.validation_seconds(10) == pytest.approx(22.0)
        predictor.note(2, 2.0, 0.1, compiled=False)
        assert predictor.validation_seconds(10) == pytest.approx(11.0)
        predictor.note_validation(10, 90.0, compiled=True)
        assert predictor.validation_seconds(10) == pytest.approx(11.0)
        predictor.note_validation(10, 3.0, compiled=False)
        assert predictor.validation_seconds(10) == pytest.approx(3.3)


class TestEnded:
    def test_a_run_that_ended_stays_ended(self, tmp_path: Path, young: None) -> None:
        clock = start_clock(config(hours=1), tmp_path)
        clock.attach(Work())
        clock.step_synchronised(0.1)
        clock.close("finished")
        content = (tmp_path / RUN_LOG).read_bytes()
        later = start_clock(config(hours=1), tmp_path)
        later.attach(clock.work, "ab" * 32)
        later.close("finished")
        assert later.has_ended
        assert (tmp_path / RUN_LOG).read_bytes() == content


def test_process_age_counts_from_the_start_of_the_interpreter() -> None:
    code = "import time; time.sleep(0.5); from cramming.budget import process_age_seconds as age; print(age())"
    began = time.monotonic()
    age = float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )
    assert 0.5 <= age <= time.monotonic() - began + 0.02
    first = process_age_seconds()
    time.sleep(0.1)
    assert process_age_seconds() - first == pytest.approx(0.1, abs=0.08)


def test_the_seconds_of_a_killed_process_stay_spent(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from cramming.budget import BudgetClock, BudgetConfig
from cramming.runlog import EventLog, Training
limits = dict(exaflops=None, tokens=None, steps=None)
budget = BudgetConfig(hours=1.0, heartbeat_seconds=0.1, **limits)
clock = BudgetClock(budget, EventLog(Path({str(tmp_path / RUN_LOG)!r})), Training())
clock.start("a", "open", recipe={{}})
print("on", flush=True)
time.sleep(60)
"""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == "on\n"
    time.sleep(0.7)
    os.kill(process.pid, signal.SIGKILL)
    alive = time.monotonic() - began
    process.wait()
    (killed,) = training(tmp_path).processes
    assert killed.ended == "killed"
    assert alive - 0.5 <= killed.spent_seconds <= alive + 0.02
