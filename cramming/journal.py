"""A journal: an append-only file of JSON lines, synced one by one, each with the SHA-256 of the line before it.

No line can be changed, added or removed without rewriting all that follow. A run has two: `budget.jsonl`, what it has
spent, and the history of its fine-tunings (eval/finetune/history.py). The budget's events:
    {"event": "start", "process": 0, "elapsed": 2.1, ..., "unit": "hours", "limit": 24.0, "corpus": "c1f0...", ...}
    {"event": "heartbeat", "process": 0, "elapsed": 7.1, "steps": 40, ..., "previous": "9f3c..."}
    {"event": "checkpoint", "process": 0, "elapsed": 9.0, "steps": 50, ..., "sha256": "77ab...", "previous": "01d2..."}
    {"event": "end", "process": 0, "elapsed": 61.0, "steps": 512, ..., "reason": "stopped", "previous": "c4e5..."}
    {"event": "resume", "process": 1, "elapsed": 3.0, "steps": 50, ..., "sha256": "77ab...", "previous": "5b61..."}
`elapsed`: seconds of `time.monotonic` since that process began. `slowest_update_seconds`: the longest update so far,
for a resume's prediction. `joules`: of the GPU (cramming/energy.py). A `resume` within a process takes back a step that
ended after the deadline. Journals of before rules version 5 have no `previous`, no limit and no checkpoints.
"""

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from cramming.config import UserError
from cramming.files import UNSUPPORTED, sync

JOURNAL = "budget.jsonl"
MAX_HEARTBEAT_SECONDS = 5.0  # the most that a killed process can have spent without an entry
EndReason = Literal["finished", "stopped", "failed"]
Unit = Literal["hours", "exaflops", "tokens", "steps"]
Event = dict[str, Any]

_RESTORE = "restore the file, without which the run can neither go on nor be ranked"
_MEASURED = ("charged_flops", "last_step_seconds", "slowest_update_seconds", "joules")  # not in every version's


class Saved(NamedTuple):
    """A checkpoint's entry: after how many steps it was made, and the SHA-256 of its file."""

    steps: int
    sha256: str


def limits_of(budget: Mapping[str, Any]) -> dict[Unit, Any]:
    """The limits that a section `budget` sets; a valid one sets exactly one."""
    units: tuple[Unit, ...] = get_args(Unit)
    minutes = budget.get("minutes")
    limits = budget if minutes is None else {**budget, "hours": minutes / 60}
    return {unit: limits[unit] for unit in units if limits[unit] is not None}


def read_lines(path: Path) -> Iterator[Event]:
    """The lines of a journal; none where there is no file. A last line cut short by a crash is dropped.

    UserError, with the place and what to do, for anything that `Journal` does not write. If the first line is not
    linked (`is_chained`), as before rules version 5, none is.
    """
    previous: str | None = ""
    for number, line in enumerate(_whole_lines(path), 1):
        event = _parsed(line)
        previous = previous if number > 1 or (event and "previous" in event) else None
        problem = _problem(line, event, previous, path.name)
        if event is None or problem:
            raise UserError(f"{path}:{number}: {problem}")
        yield event
        previous = None if previous is None else _sha256(line)


def _problem(line: bytes, event: Event | None, previous: str | None, name: str) -> str | None:
    """Why a line cannot be one of a journal's, and what to do; None if it can."""
    if not line.strip():
        return "damaged journal: an empty line, which no run writes; remove it"
    if line.endswith(b"\r"):
        return (
            "damaged journal: the line ends in CRLF, as copies through Windows, mail or git can make it; restore the"
            f" file, or take the CR away (tr -d '\\r' < {name})"
        )
    if event is None:
        return f"damaged journal: not a line of JSON; {_RESTORE}"
    if event.get("previous") != previous:
        return f"before this line one was changed, added or removed; {_RESTORE}"
    return None


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, a number too long, nested too deep
        return None
    return event if isinstance(event, dict) else None


def lacks_newline(path: Path) -> bool:
    """Whether a whole line stands at the end without its newline, which an editor or a copy can take away."""
    return path.exists() and _parsed(path.read_bytes().rpartition(b"\n")[2]) is not None


def read_journal(path: Path) -> list[Event]:
    """The budget's events; UserError also for an event out of order, or a step later than its own time."""
    events: list[Event] = []
    earlier = 0.0  # seconds of the processes before
    for event in read_lines(path):
        before = events[-1] if events else None
        earlier += before["elapsed"] if before and event.get("event") == "start" else 0.0
        if not _can_follow(event, before, earlier):
            number = len(events) + 1
            raise UserError(f"{path}:{number}: damaged journal: not an event that can follow; {_RESTORE}")
        events.append(event)
    return events


def _can_follow(event: Event, before: Event | None, earlier: float) -> bool:
    """Whether a run can write this event after `before`, its earlier processes having taken `earlier` seconds."""
    kind, process, elapsed, steps = (event.get(name) for name in ("event", "process", "elapsed", "steps"))
    amounts = [elapsed, process, steps, *(event.get(name, 0.0) for name in _MEASURED)]
    if not all(map(_is_amount, amounts)) or not isinstance(process, int) or not isinstance(steps, int):
        return False
    assert elapsed is not None
    if kind == "end" and event.get("reason") not in get_args(EndReason):
        return False
    if kind in ("checkpoint", "resume") and not isinstance(event.get("sha256"), str):
        return False
    # Times are rounded. Before rules version 5 a checkpoint, and its resume, could know more than the journal.
    if "previous" in event and event.get("last_step_seconds", 0.0) > earlier + elapsed + 1.0:
        return False
    if kind == "start":
        return process == (before["process"] + 1 if before else 0)
    if before is None or before["event"] == "end":
        return False
    return bool(process == before["process"] and elapsed >= before["elapsed"])


def _is_amount(value: Any) -> bool:
    """A number that is not negative and that a float can hold: JSON allows whole numbers of any length."""
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def line_hashes(path: Path) -> list[str]:
    """The SHA-256 of each whole line."""
    return list(map(_sha256, _whole_lines(path)))


def first_line_sha256(path: Path) -> str | None:
    """What tells this journal from another run's; None where it has no line."""
    return next(iter(line_hashes(path)), None)


def is_chained(events: Sequence[Event]) -> bool:
    """Whether every line names the one before it: not so before rules version 5."""
    return bool(events) and "previous" in events[0]


def processes_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Per process: when it started, what it spent in seconds, and how it ended (`killed` if it never said)."""
    processes: dict[int, dict[str, Any]] = {}
    for event in events:
        new = {"started": event.get("wall"), "spent_seconds": 0.0, "ended": "killed"}
        entry = processes.setdefault(event["process"], new)
        entry["spent_seconds"] = event["elapsed"]
        if event["event"] == "end":
            entry["ended"] = event["reason"]
    return list(processes.values())


def spent_seconds(events: Sequence[Event]) -> float:
    """What all processes together have spent: the sum of the last elapsed time of each."""
    return float(sum(process["spent_seconds"] for process in processes_of(events)))


def checkpoints_of(events: Sequence[Event]) -> list[Saved]:
    """The checkpoints that were made, oldest first."""
    return [Saved(event["steps"], event["sha256"]) for event in events if event["event"] == "checkpoint"]


def has_trained(events: Sequence[Event]) -> bool:
    """Whether any process made a step, kept or not."""
    return any(event["steps"] for event in events)


def ended_after(events: Sequence[Event]) -> int | None:
    """After how many steps the run ended as finished; None if it has not."""
    ends = (event["steps"] for event in events if event["event"] == "end" and event["reason"] == "finished")
    return next(ends, None)


class Journal:
    """Appends events; each is on the disk when `write` returns."""

    def __init__(self, path: Path, *, durable: bool = True):
        """Continue `path` after its last whole line; UserError if lines must be `durable` and nothing can be synced."""
        lines = _whole_lines(path)
        self.path = path
        self._previous = _sha256(lines[-1]) if lines else ""
        self._end = sum(len(line) + 1 for line in lines)
        self._file = FileIO(path, "ab")
        if durable:
            _refuse_unsynced(self._file, path)
        self._file.truncate(self._end)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event. On an error nothing of it is left behind."""
        line = json.dumps({**event, "previous": self._previous}).encode()
        try:
            if self._file.write(line + b"\n") <= len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            sync(self._file.fileno())
        except OSError:
            self._file.truncate(self._end)
            raise
        self._previous = _sha256(line)
        self._end += len(line) + 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _refuse_unsynced(file: FileIO, path: Path) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        file.close()
        if error.errno not in UNSUPPORTED:
            raise
        raise UserError(
            f"{path}: this file system cannot sync a file to disk (fsync: {error.strerror}), so a crash could give"
            " budget back; set runs=<folder> on another"
        ) from None


def _whole_lines(path: Path) -> list[bytes]:
    """Without their newlines; a torn line has none."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
