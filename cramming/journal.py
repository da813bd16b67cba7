"""A journal: an append-only file of JSON lines, synced one by one, each with the SHA-256 of the line before it.

No line can be changed, added or removed without rewriting all that follow. A run has two: `budget.jsonl`, what it has
spent (`Event`), and the history of its fine-tunings (eval/finetune/history.py).
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, cast, get_args

from cramming.config import UserError
from cramming.files import sync

JOURNAL = "budget.jsonl"
MAX_HEARTBEAT_SECONDS = 5.0  # the most that a killed process can have spent without an entry
EndReason = Literal["finished", "stopped", "failed"]
Unit = Literal["hours", "exaflops", "tokens", "steps"]
_RESTORE = "restore the file: what it records can neither go on nor be ranked without it"


class Event(TypedDict):
    """One line of `budget.jsonl`, for example {"event": "heartbeat", "process": 0, "elapsed": 7.1, "steps": 40, ...}.

    Seconds are of `time.monotonic`, or of `time.process_time` where a start says `clock: cpu`. A `resume` within a
    process takes back a step that ended after the deadline.
    """

    event: Literal["start", "heartbeat", "checkpoint", "resume", "end"]
    process: int
    elapsed: float  # seconds since this process began
    steps: int
    tokens: NotRequired[int]
    charged_flops: NotRequired[float]
    last_step_seconds: NotRequired[float]  # of all processes, when the last step had ended
    slowest_update_seconds: NotRequired[
        float
    ]  # the longest update so far, for a resume's prediction
    joules: NotRequired[float]  # of the GPU, in this process
    wall: NotRequired[float]
    unit: NotRequired[Unit]  # of a start, as are the next four
    limit: NotRequired[float]
    clock: NotRequired[str]
    corpus: NotRequired[str | None]  # the SHA-256 of its manifest
    setup: NotRequired[str]  # the hash of the process's environment (cramming/record.py)
    sha256: NotRequired[str]  # of a checkpoint and a resume
    kept: NotRequired[bool]  # of a checkpoint that stays
    reason: NotRequired[EndReason]
    previous: str


class Saved(NamedTuple):
    """A checkpoint's entry: after how many steps it was made, and the SHA-256 of its file."""

    steps: int
    sha256: str


def limits_of(budget: Mapping[str, Any]) -> dict[Unit, Any]:
    """The limits that a section `budget` sets; a valid one sets exactly one."""
    units: tuple[Unit, ...] = get_args(Unit)
    limits = dict(budget)
    if limits.get("minutes") is not None:
        limits["hours"] = float(limits["minutes"]) / 60
    return {unit: limits[unit] for unit in units if limits[unit] is not None}


def unit_on(clock: str | None, unit: str | None) -> str | None:
    """A budget's unit with its clock: hours of the wall clock and hours of CPU time are two units."""
    return f"{unit} by the CPU clock" if clock == "cpu" else unit


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; none where there is no file. A last line cut short by a crash is dropped.

    UserError, with place and cure, for a line that is damaged or does not name the one before it.
    """
    previous = ""
    for number, line in enumerate(_whole_lines(path), 1):
        event, problem = parsed(line), None
        if not line.strip():
            problem = "damaged journal: an empty line, which no run writes; remove it"
        elif line.endswith(b"\r"):
            problem = (
                "damaged journal: the line ends in CRLF, as copies through Windows, mail or git can make it; restore"
                f" the file, or take the CR away (tr -d '\\r' < {path.name})"
            )
        elif event is None:
            problem = f"damaged journal: not a line of JSON; {_RESTORE}"
        elif number == 1 and "previous" not in event:
            problem = "its lines are not linked, as an earlier version wrote them, and prove nothing; begin another"
        elif event.get("previous") != previous:
            problem = f"before this line one was changed, added or removed; {_RESTORE}"
        if event is None or problem:
            raise UserError(f"{path}:{number}: {problem}")
        yield event
        previous = _sha256(line)


def parsed(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, a number too long, nested too deep
        return None
    return found if isinstance(found, dict) else None


def lacks_newline(path: Path) -> bool:
    """Whether a whole line stands at the end without its newline, which an editor or a copy can take away."""
    return path.exists() and parsed(path.read_bytes().rpartition(b"\n")[2]) is not None


def read_journal(path: Path) -> list[Event]:
    """The budget's events; UserError also for an event out of order, or a step later than its own time."""
    events: list[Event] = []
    earlier = 0.0  # seconds of the processes before
    for number, line in enumerate(read_lines(path), 1):
        before = events[-1] if events else None
        earlier += before["elapsed"] if before and line.get("event") == "start" else 0.0
        if not _can_follow(line, before, earlier):
            raise UserError(
                f"{path}:{number}: damaged journal: not an event that can follow; {_RESTORE}"
            )
        events.append(cast(Event, line))
    return events


def _can_follow(line: Mapping[str, Any], before: Event | None, earlier: float) -> bool:
    """Whether a run can write this after `before`, its earlier processes having taken `earlier` seconds."""
    kind, process, elapsed, steps = (
        line.get(name) for name in ("event", "process", "elapsed", "steps")
    )
    optional = ("charged_flops", "last_step_seconds", "slowest_update_seconds", "joules")
    amounts = [elapsed, process, steps, *(line.get(name, 0.0) for name in optional)]
    if not all(isinstance(n, int | float) and 0 <= n <= sys.float_info.max for n in amounts):
        return False
    if not isinstance(process, int) or not isinstance(steps, int) or elapsed is None:
        return False
    if kind == "start":
        is_next = process == (before["process"] + 1 if before else 0)
    else:
        is_next = before is not None and before["event"] != "end" and process == before["process"]
        is_next = is_next and before is not None and elapsed >= before["elapsed"]
    has_reason = kind != "end" or line.get("reason") in get_args(EndReason)
    has_file = kind not in ("checkpoint", "resume") or isinstance(line.get("sha256"), str)
    is_in_time = line.get("last_step_seconds", 0.0) <= earlier + elapsed + 1.0  # times are rounded
    return is_next and has_reason and has_file and is_in_time


def line_hashes(path: Path) -> list[str]:
    """The SHA-256 of each whole line."""
    return list(map(_sha256, _whole_lines(path)))


def first_line_sha256(path: Path) -> str | None:
    """What tells this journal from another run's; None where it has no line."""
    return next(map(_sha256, _whole_lines(path)), None)


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
    return [
        Saved(event["steps"], event["sha256"]) for event in events if event["event"] == "checkpoint"
    ]


def has_trained(events: Sequence[Event]) -> bool:
    """Whether any process made a step, kept or not."""
    return any(event["steps"] for event in events)


def ended_after(events: Sequence[Event]) -> int | None:
    """After how many steps the run ended as finished; None if it has not."""
    ends = (
        event["steps"]
        for event in events
        if event["event"] == "end" and event["reason"] == "finished"
    )
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
        if not sync(self._file.fileno()) and durable:
            raise UserError(
                f"{path}: this file system cannot sync a file to disk, so a crash could give budget back; set"
                " runs=<folder> on another"
            )
        self._file.truncate(self._end)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event. On an error nothing of it is left behind."""
        line = json.dumps({**event, "previous": self._previous}).encode()
        left = line + b"\n"
        try:
            while left:  # a write that stops short of a limit: the next one says which
                left = left[self._file.write(left) :]
            sync(self._file.fileno())
        except OSError as error:
            error.filename = str(self.path)
            self._file.truncate(self._end)
            raise
        self._previous = _sha256(line)
        self._end += len(line) + 1

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[bytes]:
    """Without their newlines; a torn line has none."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
