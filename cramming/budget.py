"""The budget and its clock: what the whole benchmark rests on.

The clock counts everything from the first instruction of the training process to the last synchronised optimizer step:
imports, compilation, waiting for data, checkpoints, and the work that a crash threw away. Its truth is the run log
(cramming/runlog.py), to which a thread appends a heartbeat every few seconds, not a number in a checkpoint.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self, get_args

import psutil
from pydantic import Field, model_validator

from cramming import __version__
from cramming.config import Count, Positive, Section
from cramming.runlog import (
    MAX_HEARTBEAT_SECONDS,
    Checkpoint,
    Counted,
    End,
    EndReason,
    EventLog,
    Heartbeat,
    Resume,
    Start,
    Timed,
    Training,
    Unit,
)

RULES_VERSION = "7"
TIMERS: dict[str, Callable[[], float]] = {"wall": time.monotonic, "cpu": time.process_time}


class BudgetConfig(Section):
    """Exactly one limit: hours, exaFLOPs of model compute, tokens, or optimizer steps.

    `clock` says which seconds count: those of the wall, or those for which this process's threads had a core, so that
    waiting for the machine's other work costs nothing. The closed division has the wall clock.
    """

    hours: Positive | None
    exaflops: Positive | None
    tokens: Positive | None
    steps: Count | None
    heartbeat_seconds: Annotated[float, Field(gt=0, le=MAX_HEARTBEAT_SECONDS)]
    minutes: Positive | None = None  # another way to write hours
    clock: Literal["wall", "cpu"] = "wall"

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        limits = {name: getattr(self, name) for name in (*get_args(Unit), "minutes")}
        typed = [f"{name}={limit:g}" for name, limit in limits.items() if limit is not None]
        if not typed:
            raise ValueError("hours=null: no limit. Set one, for example budget.hours=24.")
        if len(typed) > 1:
            others = " and ".join(typed[:-1])
            raise ValueError(f"{typed[-1]}: a second limit beside {others}. Set one to null.")
        return self

    @property
    def unit(self) -> Unit:
        return next(iter(limits_of(vars(self))))

    @property
    def limit(self) -> float:
        return float(limits_of(vars(self))[self.unit])

    @property
    def timer(self) -> Callable[[], float]:
        """Seconds of `clock`, from an arbitrary start."""
        return TIMERS[self.clock]


def limits_of(budget: Mapping[str, Any]) -> dict[Unit, Any]:
    """Return the limits that a section `budget` sets; a valid one sets exactly one."""
    units: tuple[Unit, ...] = get_args(Unit)
    limits = dict(budget)
    if limits.get("minutes") is not None:
        limits["hours"] = float(limits["minutes"]) / 60
    return {unit: limits[unit] for unit in units if limits[unit] is not None}


def unit_on(clock: str | None, unit: str | None) -> str | None:
    """Return a budget's unit with its clock: hours of the wall clock and hours of CPU time are two units."""
    return f"{unit} by the CPU clock" if clock == "cpu" else unit


@dataclass
class Work:
    """Counters of the training that the weights have had; saved with them.

    `flops` follows the formula of `model.config.flops_per_token`. `skipped_steps` moved no weight. `last_step_seconds`
    is the charged time when the last step was synchronised, `data_wait_seconds` the time in which steps waited for
    their batches. `recompilations` counts graphs compiled after a process's first update.
    """

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    flops: float = 0.0
    skipped_steps: int = 0
    last_step_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    recompilations: int = 0

    def add(self, more: "Work") -> None:
        """Add the counters of `more`, by one `update`: another thread may write a heartbeat meanwhile."""
        sums = {name: amount + vars(more)[name] for name, amount in vars(self).items()}
        vars(self).update(sums)


def process_age_seconds() -> float:
    """Return the seconds since the operating system started this process: interpreter start-up and imports count."""
    stat = Path("/proc/self/stat")
    if stat.exists() and hasattr(time, "CLOCK_BOOTTIME"):
        started_ticks = float(stat.read_text().rsplit(")", 1)[1].split()[19])
        started_seconds = started_ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_seconds)
    # The wall clock is accurate to some milliseconds.
    return max(0.0, time.time() - psutil.Process().create_time())


class StepTimePredictor:
    """Predictor of the seconds of the next step and validation: 1.1 times the slowest of the last eight.

    Seconds are per micro-batch. A process's first step, steps that compiled, and pauses of the machine (more than four
    times the median) are left out. `slowest_update_seconds` is that of the run's earlier processes, 0 without any.
    """

    def __init__(self, slowest_update_seconds: float) -> None:
        self._earlier_update = slowest_update_seconds
        self._steps, self._updates, self._validations = (deque[float](maxlen=8) for _ in range(3))
        self._first: tuple[float, float] | None = None  # per micro-batch, and of its update

    def note(
        self, micro_batches: int, seconds: float, update_seconds: float, compiled: bool
    ) -> None:
        """Record a step of this many micro-batches."""
        if self._first is None:
            self._first = seconds / micro_batches, update_seconds
        elif not compiled:
            self._steps.append(seconds / micro_batches)
            self._updates.append(update_seconds)

    def note_validation(self, micro_batches: int, seconds: float, compiled: bool) -> None:
        """Record a validation of this many micro-batches."""
        if not compiled:
            self._validations.append(seconds / micro_batches)

    def step_seconds(self, micro_batches: int) -> float:
        """Return the predicted seconds of a whole step; 0 before the first measured step."""
        return 1.1 * micro_batches * _slowest(self._steps, 0.0)

    def update_seconds(self) -> float:
        """Return the predicted seconds of the update alone: twice the slowest, at least 0.1 s.

        The margin is wide because a step that ends after the deadline is lost. The prediction for the second step is
        the first update, which is longer than any that follows, and for the first step those of earlier processes.
        """
        first = self._first[1] if self._first else 0.0
        return max(0.1, 2.0 * _slowest(self._updates, 0.0) or max(first, self._earlier_update))

    def validation_seconds(self, micro_batches: int) -> float:
        """Return the predicted seconds of a validation; before the first one, those of training on the same number."""
        first = self._first[0] if self._first else 0.0
        return 1.1 * micro_batches * _slowest(self._validations or self._steps, first)


def _slowest(lengths: Collection[float], otherwise: float) -> float:
    known = [length for length in lengths if length]
    return max((length for length in known if length <= 4 * median(known)), default=otherwise)


class BudgetClock:
    """Clock of one run's budget across its processes, with their energy in joules. Only rank 0 has one.

    `earlier` is the content of the run log from the processes before this one. `lost_flops` is compute that an earlier
    process did after the checkpoint that this one resumes from: with an exaFLOP budget it stays charged, as time does.
    The clock of a finished run stands still and writes nothing.
    """

    def __init__(self, config: BudgetConfig, log: EventLog, earlier: Training) -> None:
        self.config = config
        self.log = log
        self.earlier_seconds = earlier.spent_seconds
        self.earlier_flops = earlier.charged_flops
        self.slowest_update_seconds = earlier.slowest_update_seconds
        self.has_ended = earlier.finished_after is not None
        self.has_trained = earlier.has_trained
        self.lost_flops = 0.0
        self.work = Work(**_work_counters(earlier.counters))
        self._began = config.timer() - process_age_seconds() if config.clock == "wall" else 0.0
        self._joules: Callable[[], float | None] = lambda: None
        self._joules_before: float | None = None
        self._written: dict[str, Any] = dict(earlier.counters)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: OSError | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        name: str,
        division: Literal["closed", "open"],
        *,
        recipe: Mapping[str, Any] | None = None,
        changed: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the start event, start the heartbeats, and return the SHA-256 of the event's line.

        `recipe` is given by a run's first process, `changed` by the others.
        """
        sha256 = self._write(
            Start,
            name=name,
            suite_version=__version__,
            rules_version=RULES_VERSION,
            unit=self.config.unit,
            limit=self.config.limit,
            clock=self.config.clock,
            division=division,
            recipe=None if recipe is None else dict(recipe),
            changed=dict(changed or {}),
        )
        self._thread = threading.Thread(target=self._beat, name="budget-heartbeat", daemon=True)
        self._thread.start()
        return sha256

    def measure_energy(self, joules: Callable[[], float | None]) -> None:
        """Record the energy used from now on. `joules` returns the value of a counter, or None without one."""
        self._joules = joules
        self._joules_before = joules()

    def attach(self, work: Work, sha256: str | None = None, *, resumed: bool = True) -> None:
        """Charge for `work` from now on: new work, or that of the checkpoint with this SHA-256.

        With `resumed` an event in the log supersedes everything after that checkpoint.
        """
        with self._lock:
            self.work = work
            self.lost_flops = max(0.0, self.earlier_flops - work.flops)
        if resumed and not self.has_ended:
            self._write(Resume, sha256=sha256)

    def enter_checkpoint(self, sha256: str, step: int, *, retained: bool = False) -> None:
        """Log that the state after `step` steps is in a file with this SHA-256; a `retained` file is never removed.

        Any thread may call this, even after further steps.
        """
        self._write(Checkpoint, sha256=sha256, step=step, retained=retained)

    def step_synchronised(self, update_seconds: float) -> bool:
        """Record that a step has ended now, on the device too, and how long its update took.

        Return False and record nothing after the deadline: the step must then be rolled back.
        """
        if self._failure:  # without heartbeats the time before a crash would not be charged
            raise self._failure
        seconds = self.elapsed_seconds()
        if self.config.unit == "hours" and seconds > 3600 * self.config.limit:
            self.beat()  # the steps before it may be rolled back too
            return False
        self.slowest_update_seconds = max(self.slowest_update_seconds, update_seconds)
        self.work.last_step_seconds = seconds
        self.has_trained = True
        if self.config.timer() - self._noted > MAX_HEARTBEAT_SECONDS:
            self.beat()  # a slow disk, or CPU time of many threads
        return True

    def beat(self) -> None:
        """Append a heartbeat, which charges everything spent until now."""
        self._write(Heartbeat)

    def elapsed_seconds(self) -> float:
        """Return the seconds charged so far, earlier processes included."""
        return self.earlier_seconds + self.config.timer() - self._began

    def spent(self) -> float:
        """Return the charged amount in the budget's unit."""
        work = self.work
        return self._in_unit(
            self.elapsed_seconds(), work.flops + self.lost_flops, work.tokens, work.steps
        )

    def progress(self) -> float:
        """Return the share of the budget that is spent, 0 to 1."""
        return min(1.0, self.spent() / self.config.limit)

    def progress_of_work(self) -> float:
        """Return the progress at the end of the last step in the weights, without work that a crash lost."""
        work = self.work
        spent = self._in_unit(work.last_step_seconds, work.flops, work.tokens, work.steps)
        return min(1.0, spent / self.config.limit)

    def seconds_left(self) -> float:
        """Return the seconds until the deadline; infinity for a budget that is not one of time."""
        if self.config.unit != "hours":
            return math.inf
        return 3600 * self.config.limit - self.elapsed_seconds()

    def has_room_for(self, *, seconds: float, tokens: int = 0, flops: float = 0.0) -> bool:
        """Return whether a step of this cost ends inside the budget."""
        spent_after = self.spent() + self._in_unit(seconds, flops, tokens, 1)
        return spent_after <= self.config.limit * (1 + 1e-12)

    def has_room_for_update(self, seconds: float) -> bool:
        """Return whether an update of this length that begins now ends inside the budget.

        A ten-thousandth of a budget of time is left free after it, because a stall there would cost the step.
        """
        margin = 0.36 * self.config.limit if self.config.unit == "hours" else 0.0
        return self.has_room_for(seconds=max(seconds, margin))

    def close(self, reason: EndReason) -> None:
        """Write the end of this process, once; the charged time ended with the last step."""
        if self.has_ended or self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None
        self._write(End, reason=reason)
        self.has_ended = reason == "finished"

    def _in_unit(self, seconds: float, flops: float, tokens: int, steps: int) -> float:
        amounts = {
            "hours": seconds / 3600,
            "exaflops": flops / 1e18,
            "tokens": float(tokens),
            "steps": float(steps),
        }
        return amounts[self.config.unit]

    def _beat(self) -> None:
        try:
            while not self._stopped.wait(self.config.heartbeat_seconds):
                self.beat()
        except OSError as error:
            self._failure = error

    def _energy_used(self) -> float | None:
        """Return the joules of this process; None where the driver does not tell, or was loaded anew meanwhile."""
        before, now = self._joules_before, self._joules()
        if before is None or now is None or now < before:
            self._joules_before = None
            return None
        return round(now - before, 1)

    def _write(self, kind: type[Timed], **more: Any) -> str:
        """Append a timed event; a heartbeat has the counters that changed, an end or a resume all of them."""
        with self._lock:
            counters: dict[str, Any] = {}
            if issubclass(kind, Counted):
                counters = {**vars(self.work), "lost_flops": self.lost_flops}
                counters["slowest_update_seconds"] = self.slowest_update_seconds
                counters["joules"] = self._energy_used()
            now = self.config.timer()  # after the counters: no step ended after this time
            if kind is Heartbeat:
                counters = {k: v for k, v in counters.items() if self._written.get(k) != v}
            elapsed = round(now - self._began, 3)
            event = kind(elapsed=elapsed, wall=round(time.time(), 3), **counters, **more)
            sha256 = self.log.append(event)
            self._written |= counters
            self._noted = now
            return sha256


def _work_counters(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of `Work` among those of a log."""
    return {name: counters[name] for name in Work.__dataclass_fields__ if name in counters}
