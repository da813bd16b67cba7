"""A journal: an append-only file of JSON lines, synced one by one, each with the SHA-256 of the line before it.

So a line cannot be changed, added or taken out of the middle without writing all that follow anew, and the SHA-256 of
any line stands for all up to it. A run has two: what it spent, `budget.jsonl`, whose events are below, and its
fine-tunings (eval/finetune/history.py). The budget's is the truth about what a run has spent:
    {"event": "start", "process": 0, "elapsed": 2.1, ..., "unit": "hours", "limit": 24.0, "corpus": "c1f0...", ...}
    {"event": "heartbeat", "process": 0, "elapsed": 7.1, "steps": 40, ..., "previous": "9f3c..."}
    {"event": "checkpoint", "process": 0, "elapsed": 9.0, "steps": 50, ..., "sha256": "77ab...", "previous": "01d2..."}
    {"event": "end", "process": 0, "elapsed": 61.0, "steps": 512, ..., "reason": "stopped", "previous": "c4e5..."}
    {"event": "start", "process": 1, ...}
    {"event": "resume", "process": 1, "elapsed": 3.0, "steps": 50, ..., "sha256": "77ab...", "previous": "5b61..."}
`elapsed` are seconds of `time.monotonic` since that process began. What a run has spent is the sum over its processes
of the last elapsed time each one wrote. `slowest_update_seconds` is how long an update took at most so far: a resume
must not begin one that ends too late. `joules` are those of the GPU since that process opened the journal, behind
imports and the corpus's hashing, where they are measured (cramming/energy.py). A `resume` inside a process took back a
step that ended after the deadline. Journals of before rules version 5 have no `previous`, no limit and no checkpoints.
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
MAX_HEARTBEAT_SECONDS = 5.0  # so much of a killed process's time may be on record nowhere
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
    """The limits that a section `budget` sets; one that is in order has exactly one."""
    units: tuple[Unit, ...] = get_args(Unit)
    return {unit: budget[unit] for unit in units if budget[unit] is not None}


def read_lines(path: Path) -> Iterator[Event]:
    """The lines of a journal; none where there is no file. A last line cut short by a crash is dropped.

    UserError, with the place and what to do, for anything that `Journal` does not write. Where the first line is not
    linked (`is_chained`), as before rules version 5, none is.
    """
    previous: str | None = ""
    for number, line in enumerate(_whole_lines(path), 1):
        place = f"{path}:{number}"
        if not line.strip():
            raise UserError(f"{place}: damaged journal: an empty line, which no run writes; remove it")
        if line.endswith(b"\r"):
            raise UserError(
                f"{place}: damaged journal: the line ends in CRLF, as copies through Windows, mail or git can make it;"
                f" restore the file, or take the CR away (tr -d '\\r' < {path.name})"
            )
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, a number too long, sections too deep
            event = None
        if not isinstance(event, dict):
            raise UserError(f"{place}: damaged journal: not a line of JSON; {_RESTORE}")
        previous = previous if number > 1 or is_chained([event]) else None
        if event.get("previous") != previous:
            raise UserError(f"{place}: before this line one was changed, added or removed; {_RESTORE}")
        yield event
        previous = None if previous is None else _sha256(line)


def lacks_newline(path: Path) -> bool:
    """Whether a whole line stands at the end without its newline, which an editor or a copy can take away."""
    try:
        return path.exists() and isinstance(json.loads(path.read_bytes().rpartition(b"\n")[2]), dict)
    except (ValueError, RecursionError):
        return False


def read_journal(path: Path) -> list[Event]:
    """The budget's events, as `read_lines` reads them.

    UserError also for one that is no event, out of order, or with a step later than its own time.
    """
    events: list[Event] = []
    earlier = 0.0  # seconds of the processes before
    for event in read_lines(path):
        before = events[-1] if events else None
        try:
            _check(event, before)
            earlier += before["elapsed"] if before and event["event"] == "start" else 0.0
            # Times are rounded. Before rules version 5 a checkpoint, and its resume, could know more than the journal.
            if "previous" in event and event.get("last_step_seconds", 0.0) > earlier + event["elapsed"] + 1.0:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            number = len(events) + 1
            raise UserError(f"{path}:{number}: damaged journal: not an event that can follow; {_RESTORE}") from None
        events.append(event)
    return events


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
        entry = processes.setdefault(
            event["process"], {"started": event.get("wall"), "spent_seconds": 0.0, "ended": "killed"}
        )
        entry["spent_seconds"] = event["elapsed"]
        if event["event"] == "end":
            entry["ended"] = event["reason"]
    return list(processes.values())


def spent_seconds(events: Sequence[Event]) -> float:
    """What all processes together have spent."""
    return float(sum(process["spent_seconds"] for process in processes_of(events)))


def checkpoints_of(events: Sequence[Event]) -> list[Saved]:
    """The checkpoints that were made, oldest first."""
    return [Saved(event["steps"], event["sha256"]) for event in events if event["event"] == "checkpoint"]


def has_trained(events: Sequence[Event]) -> bool:
    """Whether any process made a step, kept or not."""
    return any(event["steps"] for event in events)


def ended_after(events: Sequence[Event]) -> int | None:
    """After how many steps the run ended as finished; None if it has not."""
    ends = [event["steps"] for event in events if event["event"] == "end" and event["reason"] == "finished"]
    return ends[0] if ends else None


class Journal:
    """Appends events; each is on the disk when `write` returns."""

    def __init__(self, path: Path, *, durable: bool = True):
        """Continue `path`, from its last whole line on: the next entry needs a line of its own.

        UserError where the file system cannot sync and lines must be `durable`.
        """
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
    """UserError where what is added might be lost, and time be refunded with it."""
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


def _check(event: Any, before: Event | None) -> None:
    """ValueError, KeyError or TypeError for what cannot follow `before` in any journal."""
    process, elapsed = event["process"], event["elapsed"]
    amounts = [elapsed, process, event["steps"], *(event.get(name, 0.0) for name in _MEASURED)]
    if not all(map(_is_amount, amounts)) or not isinstance(process, int) or not isinstance(event["steps"], int):
        raise ValueError
    if event["event"] == "end" and event["reason"] not in get_args(EndReason):
        raise ValueError
    if event["event"] in ("checkpoint", "resume") and not isinstance(event["sha256"], str):
        raise ValueError
    if event["event"] != "start":
        follows = before and process == before["process"] and elapsed >= before["elapsed"] and before["event"] != "end"
    else:
        follows = process == (before["process"] + 1 if before else 0)
    if not follows:
        raise ValueError


def _is_amount(value: Any) -> bool:
    """A number that is not negative and that a float can hold: JSON allows whole numbers of any length."""
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def _whole_lines(path: Path) -> list[bytes]:
    """Without their newlines; a torn line has none behind it."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
