"""Changes to run logs as a forger makes them: events edited, and every line linked anew."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cramming.runlog import RUN_LOG

Event = dict[str, Any]


def read_events(folder: Path) -> list[Event]:
    """Return the events of a log as JSON, without their links."""
    lines = (folder / RUN_LOG).read_bytes().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        del event["previous"]
    return events


def write_events(folder: Path, events: Sequence[Event]) -> None:
    """Write a log of these events with a whole chain; what was derived from the one before goes."""
    lines: list[bytes] = []
    previous = ""
    for event in events:
        body = json.dumps(event, separators=(",", ":"), ensure_ascii=False)
        line = f'{body[:-1]},"previous":"{previous}"}}'.encode()
        previous = hashlib.sha256(line).hexdigest()
        lines.append(line)
    (folder / RUN_LOG).write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / "record.json").unlink(missing_ok=True)


def of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    """Return the events of one kind."""
    return [event for event in events if event["event"] == kind]


def forge(folder: Path, change: Callable[[list[Event]], object]) -> None:
    """Change the events of a run's log, and link its lines anew."""
    events = read_events(folder)
    change(events)
    write_events(folder, events)
