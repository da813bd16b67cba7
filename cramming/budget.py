"""The budget and its clock: what the whole benchmark rests on.

The clock counts everything from the first instruction of the training process to the last synchronised optimizer step:
imports, compilation, waiting for data, checkpoints, and the work that a crash threw away. Its truth is an append-only
journal, `budget.jsonl`, synced to disk at least every few seconds by a thread of its own, not a number in a checkpoint:
whoever restores an old or broken checkpoint gets the weights back but not the time.

Each line is one JSON object:
    {"event": "start", "process": 0, "elapsed": 2.1, "steps": 0, ...}      a process begins to charge
    {"event": "heartbeat", "process": 0, "elapsed": 7.1, "steps": 40, ...}
    {"event": "end", "process": 0, "elapsed": 61.0, "steps": 512, "reason": "finished", ...}
`elapsed` are seconds of `time.monotonic` since that process began. What a run has spent is the sum over its processes
of the last elapsed time each one wrote.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from cramming.config import UserError, file_sha256
from cramming.files import UNSUPPORTED

Unit = Literal["hours", "exaflops", "tokens", "steps"]
EndReason = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class BudgetConfig:
    """Exactly one limit: wall-clock hours, exaFLOPs of model compute, tokens, or optimizer steps."""

    hours: float | None
    exaflops: float | None
    tokens: float | None
    steps: int | None
    heartbeat_seconds: float

    def __post_init__(self) -> None:
        given = {u: getattr(self, u) for u in get_args(Unit) if getattr(self, u) is not None}
        if len(given) != 1:
            found = " and ".join(f"{u}={v:g}" for u, v in given.items()) or "none"
            raise ValueError(
                f"exactly one limit counts, found {found}; give one, for example budget.steps=1000 or budget.hours=24"
            )
        for unit, value in given.items():
            if value <= 0:
                raise ValueError(f"{unit}={value:g} is not above 0")
        if not 0 < self.heartbeat_seconds <= 5:
            raise ValueError(f"heartbeat_seconds={self.heartbeat_seconds} is not above 0 and at most 5 (docs/rules.md)")

    @property
    def unit(self) -> Unit:
        """The unit that is set."""
        units: tuple[Unit, ...] = get_args(Unit)
        return next(u for u in units if getattr(self, u) is not None)

    @property
    def limit(self) -> float:
        """The limit in that unit."""
        return float(getattr(self, self.unit))


@dataclass
class Work:
    """What the weights have seen so far; saved with them.

    `flops` by the formula of `model.config.flops_per_token`; `last_step_seconds` are the seconds charged to the run
    when its last optimizer step was synchronised. `skipped_steps` moved no weight, `partly_skipped_steps` some only.
    `data_wait_seconds` are those in which steps waited for their batches, `recompilations` the graphs that were
    compiled after a process's first update; checkpoints made before these two were counted have none of them.
    """

    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    flops: float = 0.0
    skipped_steps: int = 0
    partly_skipped_steps: int = 0
    last_step_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    recompilations: int = 0

    def add_step(
        self,
        *,
        sequences: int,
        tokens: int,
        flops: float,
        skipped: bool,
        partly_skipped: bool = False,
        data_wait_seconds: float = 0.0,
        recompilations: int = 0,
    ) -> None:
        """Count one optimizer step."""
        self.steps += 1
        self.sequences += sequences
        self.tokens += tokens
        self.flops += flops
        self.skipped_steps += skipped
        self.partly_skipped_steps += partly_skipped
        self.data_wait_seconds += data_wait_seconds
        self.recompilations += recompilations


def process_age_seconds() -> float:
    """Seconds since the operating system started this process (interpreter start-up and imports are charged too)."""
    stat = Path("/proc/self/stat")
    if stat.exists() and hasattr(time, "CLOCK_BOOTTIME"):
        started_ticks = float(stat.read_text().rsplit(")", 1)[1].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))
    import psutil  # elsewhere: the wall clock, good to some milliseconds

    return max(0.0, time.time() - psutil.Process().create_time())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The journal's events. A last line cut short by a crash is dropped; damage anywhere else is a UserError."""
    if not path.exists():
        return []
    events = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # a torn line has no newline behind it
        try:
            event = json.loads(line)
            amounts = [event["elapsed"], event["process"], event.get("charged_flops", 0.0)]
            if not isinstance(event["process"], int) or not all(map(_is_amount, amounts)):
                raise ValueError
            if event["event"] == "end" and event["reason"] not in get_args(EndReason):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path}:{number}: damaged budget journal; the run cannot be continued or ranked") from None
        events.append(event)
    return events


def _is_amount(value: Any) -> bool:
    """A number that is not negative and that a float can hold: JSON allows whole numbers of any length."""
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def processes_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per process: when it started, what it spent in seconds, and how it ended (`killed` if it never said)."""
    processes: dict[int, dict[str, Any]] = {}
    for event in events:
        entry = processes.setdefault(
            event["process"], {"started": event.get("wall"), "spent_seconds": 0.0, "ended": "killed"}
        )
        entry["spent_seconds"] = max(entry["spent_seconds"], event["elapsed"])
        if event["event"] == "end":
            entry["ended"] = event["reason"]
    return [processes[key] for key in sorted(processes)]


def _synced(journal: Path) -> BinaryIO:
    """The journal, opened to be added to; UserError where what is added might be lost, and time be refunded with it."""
    file = journal.open("ab")
    try:
        os.fsync(file.fileno())
    except OSError as error:
        file.close()
        if error.errno not in UNSUPPORTED:
            raise
        raise UserError(
            f"{journal}: this file system cannot sync a file to disk (fsync: {error.strerror}), so a crash could give"
            " budget back; set runs=<folder> on another"
        ) from None
    return file


class BudgetClock:
    """Measures one run's budget across its processes. Only rank 0 owns one.

    `lost_flops` is compute that an earlier process did after the checkpoint this one resumes from: with an exaFLOP
    budget it stays charged, as time does.
    """

    def __init__(self, config: BudgetConfig, journal: Path):
        self.config, self.journal = config, journal
        self._began = time.monotonic() - process_age_seconds()
        events = read_journal(journal)
        earlier = processes_of(events)
        self.process = len(earlier)
        self.earlier_seconds = sum(p["spent_seconds"] for p in earlier)
        self.journaled_flops = max((float(e.get("charged_flops", 0.0)) for e in events), default=0.0)
        self.lost_flops = 0.0
        self.work = Work()
        self._truncate_torn_line()
        self._file = _synced(journal)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: OSError | None = None
        self._write("start")
        self._thread = threading.Thread(target=self._beat, name="budget-heartbeat", daemon=True)
        self._thread.start()

    def attach(self, work: Work) -> None:
        """Charge for `work`, new or from a checkpoint, from now on."""
        self.work = work
        self.lost_flops = max(0.0, self.journaled_flops - work.flops)

    def step_synchronised(self) -> None:
        """Note that the last counted step has ended now, on the device too."""
        if self._failure:  # without heartbeats a crash would be free: no training then
            raise self._failure
        self.work.last_step_seconds = self.elapsed_seconds()

    def elapsed_seconds(self) -> float:
        """Seconds charged so far, earlier processes included."""
        return self.earlier_seconds + time.monotonic() - self._began

    def charged_flops(self) -> float:
        """Model compute charged so far, the work that crashes threw away included."""
        return self.work.flops + self.lost_flops

    def spent(self) -> float:
        """What is charged so far, in the budget's unit."""
        return {
            "hours": self.elapsed_seconds() / 3600,
            "exaflops": self.charged_flops() / 1e18,
            "tokens": float(self.work.tokens),
            "steps": float(self.work.steps),
        }[self.config.unit]

    def progress(self) -> float:
        """Share of the budget spent, 0 to 1."""
        return min(1.0, self.spent() / self.config.limit)

    def has_room_for(self, *, seconds: float, tokens: int = 0, flops: float = 0.0) -> bool:
        """Whether a step that costs this much ends inside the budget."""
        cost = {"hours": seconds / 3600, "exaflops": flops / 1e18, "tokens": float(tokens), "steps": 1.0}
        return self.spent() + cost[self.config.unit] <= self.config.limit * (1 + 1e-12)

    def close(self, reason: EndReason) -> None:
        """Write the last entry; nothing is charged after it."""
        self._stopped.set()
        self._thread.join()
        self._write("end", reason=reason)
        self._file.close()

    def summary(self) -> dict[str, Any]:
        """The record's `pretrain.budget`. Time is charged up to the last step: what follows is not training."""
        seconds = self.work.last_step_seconds
        timed = self.config.unit == "hours"
        spent = seconds / 3600 if timed else self.spent()
        overrun = max(0.0, seconds - 3600 * self.config.limit) if timed else 0.0
        return {
            "unit": self.config.unit,
            "limit": self.config.limit,
            "spent": spent,
            "spent_seconds": seconds,
            "overrun_seconds": overrun,
            "processes": processes_of(read_journal(self.journal)),
            "journal_sha256": file_sha256(self.journal),
        }

    def _beat(self) -> None:
        try:
            while not self._stopped.wait(self.config.heartbeat_seconds):
                self._write("heartbeat")
        except OSError as error:
            self._failure = error

    def _write(self, event: str, **more: Any) -> None:
        row: Mapping[str, Any] = {
            "event": event,
            "process": self.process,
            "elapsed": round(time.monotonic() - self._began, 3),
            "wall": round(time.time(), 3),
            **asdict(self.work),
            "charged_flops": self.charged_flops(),
            **more,
        }
        with self._lock:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _truncate_torn_line(self) -> None:
        """Cut a half line that a crash left at the end, so that the next entry starts on a line of its own."""
        if self.journal.exists():
            content = self.journal.read_bytes()
            if content and not content.endswith(b"\n"):
                with self.journal.open("r+b") as handle:
                    handle.truncate(content.rfind(b"\n") + 1)
