"""The clock and its journal: nothing that happened is ever refunded."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cramming import budget
from cramming.budget import BudgetClock, BudgetConfig, Work, process_age_seconds, processes_of, read_journal
from cramming.config import UserError

UNITS = ("hours", "exaflops", "tokens", "steps")


def config(heartbeat: float = 0.05, **limit: Any) -> BudgetConfig:
    return BudgetConfig(**{**dict.fromkeys(UNITS), **limit}, heartbeat_seconds=heartbeat)


@pytest.fixture
def young(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has run tests for a while; here a clock is to begin at zero."""
    monkeypatch.setattr(budget, "process_age_seconds", lambda: 0.0)


class TestConfig:
    def test_no_limit_and_two_limits_are_refused(self) -> None:
        with pytest.raises(ValueError, match="exactly one limit counts, found none"):
            config()
        with pytest.raises(ValueError, match="found hours=1 and steps=5"):
            config(hours=1, steps=5)

    @pytest.mark.parametrize("unit", UNITS)
    @pytest.mark.parametrize("value", [0, -1])
    def test_a_limit_is_above_zero(self, unit: str, value: int) -> None:
        with pytest.raises(ValueError, match=f"{unit}={value} is not above 0"):
            config(**{unit: value})

    @pytest.mark.parametrize("heartbeat", [0, -1, 5.1])
    def test_the_heartbeat_is_at_most_five_seconds(self, heartbeat: float) -> None:
        with pytest.raises(ValueError, match="heartbeat_seconds"):
            config(heartbeat, steps=1)

    @pytest.mark.parametrize("unit", UNITS)
    def test_unit_and_limit(self, unit: str) -> None:
        assert (config(**{unit: 3}).unit, config(**{unit: 3}).limit) == (unit, 3.0)


class TestJournal:
    def line(self, process: int, elapsed: float, event: str = "heartbeat", **more: Any) -> str:
        return json.dumps({"event": event, "process": process, "elapsed": elapsed, **more}) + "\n"

    def test_spent_is_the_sum_of_each_processes_last_entry(self, tmp_path: Path, young: None) -> None:
        journal = tmp_path / "budget.jsonl"
        journal.write_text(
            self.line(0, 1.0, "start") + self.line(0, 7.5) + self.line(1, 2.0, "start")
            + self.line(1, 4.0, "end", reason="stopped") + self.line(2, 0.5, "start")
        )  # fmt: skip
        assert [p["spent_seconds"] for p in processes_of(read_journal(journal))] == [7.5, 4.0, 0.5]
        assert [p["ended"] for p in processes_of(read_journal(journal))] == ["killed", "stopped", "killed"]
        clock = BudgetClock(config(hours=1), journal)
        clock.close("finished")
        assert clock.process == 3
        assert 12.0 <= clock.elapsed_seconds() < 13.0
        assert [p["ended"] for p in processes_of(read_journal(journal))][-1] == "finished"

    @pytest.mark.parametrize("cut", [1, 10, 30])
    def test_a_torn_last_line_is_dropped_and_cut_away(self, tmp_path: Path, young: None, cut: int) -> None:
        journal = tmp_path / "budget.jsonl"
        journal.write_text(self.line(0, 5.0) + self.line(0, 9.0)[:cut])
        assert [e["elapsed"] for e in read_journal(journal)] == [5.0]
        BudgetClock(config(hours=1), journal).close("finished")
        assert [e["event"] for e in read_journal(journal)][:2] == ["heartbeat", "start"]

    def test_a_line_without_its_newline_counts_the_same_before_and_after(self, tmp_path: Path, young: None) -> None:
        journal = tmp_path / "budget.jsonl"
        journal.write_text(self.line(0, 5.0) + self.line(0, 9.0).rstrip("\n"))
        clock = BudgetClock(config(hours=1), journal)
        clock.close("finished")
        assert clock.earlier_seconds == processes_of(read_journal(journal))[0]["spent_seconds"]

    @pytest.mark.parametrize(
        "damage", ["", "{}", "null", "7", '{"process": 0}', "\0\0\0", '{"event": "x", "process": 0, "elapsed": -5}',
                   '{"event": "x", "process": 0, "elapsed": NaN}', '{"process": 0, "elapsed": 1}',
                   '{"event": "x", "process": "0", "elapsed": 1}', '{"event": "x", "process": 0, "elapsed": Infinity}',
                   '{"event": "end", "process": 0, "elapsed": 1}'],
    )  # fmt: skip
    def test_damage_elsewhere_ends_the_run(self, tmp_path: Path, damage: str) -> None:
        journal = tmp_path / "budget.jsonl"
        journal.write_text(self.line(0, 1.0) + damage + "\n" + self.line(0, 2.0))
        with pytest.raises(UserError, match=r"budget\.jsonl:2: damaged") as caught:
            BudgetClock(config(hours=1), journal)
        assert "\n" not in str(caught.value)

    def test_heartbeats_come_in_time_while_the_process_is_busy(self, tmp_path: Path, young: None) -> None:
        journal = tmp_path / "budget.jsonl"
        clock = BudgetClock(config(0.05, hours=1), journal)
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            sum(range(1000))
        clock.close("finished")
        times = [e["elapsed"] for e in read_journal(journal)]
        assert len(times) >= 6
        assert max(b - a for a, b in pairwise(times)) < 0.3

    def test_a_journal_that_cannot_be_written_ends_the_training(
        self, tmp_path: Path, young: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = BudgetClock(config(0.01, hours=1), tmp_path / "budget.jsonl")
        clock.step_synchronised()
        with monkeypatch.context() as patch:
            patch.setattr(budget.os, "fsync", _no_space)
            clock._thread.join(5)
        with pytest.raises(OSError, match="No space"):
            clock.step_synchronised()
        clock.close("failed")

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
    def test_a_journal_that_cannot_be_synced_is_refused_and_charges_nothing(
        self, tmp_path: Path, young: None, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def refuse(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(budget.os, "fsync", refuse)
        with pytest.raises(UserError, match=r"budget\.jsonl: this file system cannot sync.*runs=<folder>"):
            BudgetClock(config(1, hours=1), tmp_path / "budget.jsonl")
        assert read_journal(tmp_path / "budget.jsonl") == []


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
        clock = BudgetClock(config(**{unit: limit if unit != "steps" else 2}), tmp_path / "budget.jsonl")
        work = Work()
        clock.attach(work)
        done = 0
        while clock.has_room_for(**cost):
            if unit == "hours":
                clock._began -= 0.99  # instead of waiting
            work.add_step(sequences=1, tokens=cost.get("tokens", 1), flops=cost.get("flops", 1.0), skipped=False)
            done += 1
        clock.close("finished")
        assert done == 2 if unit != "hours" else done in (1, 2)
        assert clock.spent() <= clock.config.limit
        assert clock.progress() == pytest.approx(1.0 if unit != "hours" else 0.99 * done / 2, abs=0.1)

    def test_progress_never_passes_one(self, tmp_path: Path, young: None) -> None:
        clock = BudgetClock(config(hours=1e-9), tmp_path / "budget.jsonl")
        time.sleep(0.01)
        assert clock.progress() == 1.0
        clock.close("finished")

    def test_an_old_checkpoint_refunds_no_time(self, tmp_path: Path, young: None) -> None:
        journal = tmp_path / "budget.jsonl"
        clock = BudgetClock(config(hours=1), journal)
        clock.attach(Work(steps=100, last_step_seconds=50.0))
        clock._began -= 60
        clock.close("failed")
        for old in (Work(), Work(steps=50, last_step_seconds=25.0)):
            resumed = BudgetClock(config(hours=1), journal)
            resumed.attach(old)
            assert resumed.elapsed_seconds() >= 60
            resumed.close("failed")

    def test_lost_compute_stays_charged_over_several_crashes(self, tmp_path: Path, young: None) -> None:
        """Each process does 60 exaFLOPs and dies with the last 10 of them not in its checkpoint."""
        journal, saved = tmp_path / "budget.jsonl", 0.0
        for process in range(4):
            clock = BudgetClock(config(5, exaflops=1000), journal)
            work = Work(flops=saved)
            clock.attach(work)
            assert clock.spent() == pytest.approx(60 * process)
            work.add_step(sequences=1, tokens=1, flops=60e18, skipped=False)
            saved = work.flops - 10e18
            clock._write("heartbeat")
            clock.close("failed")

    def test_the_summary_counts_up_to_the_last_step(self, tmp_path: Path, young: None) -> None:
        clock = BudgetClock(config(hours=1 / 3600), tmp_path / "budget.jsonl")
        clock.attach(Work())
        clock._began -= 0.5
        clock.step_synchronised()
        clock._began -= 100  # export, final validation
        clock.close("finished")
        summary = clock.summary()
        assert 0.5 <= summary["spent_seconds"] < 1.0
        assert summary["spent"] == pytest.approx(summary["spent_seconds"] / 3600)
        assert summary["overrun_seconds"] == 0.0

    def test_an_overrun_is_told(self, tmp_path: Path, young: None) -> None:
        clock = BudgetClock(config(hours=1 / 3600), tmp_path / "budget.jsonl")
        clock.attach(Work())
        clock._began -= 3.0
        clock.step_synchronised()
        clock.close("finished")
        assert clock.summary()["overrun_seconds"] == pytest.approx(2.0, abs=0.2)


def test_process_age_counts_from_the_start_of_the_interpreter() -> None:
    code = "import time; time.sleep(0.5); from cramming.budget import process_age_seconds as age; print(age())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age <= time.monotonic() - began + 0.02
    first = process_age_seconds()
    time.sleep(0.1)
    assert process_age_seconds() - first == pytest.approx(0.1, abs=0.08)


def test_the_seconds_of_a_killed_process_stay_spent(tmp_path: Path) -> None:
    journal = tmp_path / "budget.jsonl"
    code = f"""
import time
from pathlib import Path
from cramming.budget import BudgetClock, BudgetConfig
BudgetClock(BudgetConfig(1.0, None, None, None, 0.1), Path({str(journal)!r}))
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
    (killed,) = processes_of(read_journal(journal))
    assert killed["ended"] == "killed"
    assert alive - 0.5 <= killed["spent_seconds"] <= alive + 0.02
