"""Forged run folders: events of a log changed, and the chain made anew, as whoever has the code can do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cramming.runlog import RUN_EVENTS, RUN_LOG, EventLog

Json = dict[str, Any]


def events_of(run: Path) -> list[Json]:
    """The events of a log as JSON, without their links."""
    events = []
    for line in (run / RUN_LOG).read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        del event["previous"]
        events.append(event)
    return events


def write_events(run: Path, events: list[Json]) -> None:
    """Replace the log by these events, chained anew."""
    (run / RUN_LOG).unlink(missing_ok=True)
    log = EventLog(run / RUN_LOG)
    for event in events:
        log.append(RUN_EVENTS.validate_python(event), sync_now=False)
    log.close()


def forge(run: Path, change: Callable[[Json], Any], *kinds: str) -> None:
    """Change each event of these kinds (all, without any) in place, and chain the log anew."""
    events = events_of(run)
    for event in events:
        if not kinds or event["event"] in kinds:
            change(event)
    write_events(run, events)
