"""What a run's journal says by itself, and what lies beside it, whatever the record claims: the evidence of R5."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from cramming.config import UserError, file_sha256
from cramming.journal import (
    Event,
    Saved,
    first_line_sha256,
    lacks_newline,
    limits_of,
    processes_of,
    read_journal,
    spent_seconds,
    unit_on,
)

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it


@lru_cache(1)  # a run's configuration is asked for by one rule after the other
def parsed(text: str) -> Any:
    """What a YAML text holds; not to be changed."""
    return yaml.load(text, _LOADER)


def summarise_journal(journal: Path) -> dict[str, Any]:
    """The record's section `journal`; `problem` where it cannot be read.

    `last_step_seconds` is the time, all processes together, at which the last counted step had ended; `total_seconds`
    is everything that was charged; `uncharged_seconds` is how much longer the processes took by the wall clock;
    `problems` are what no run of this suite leaves; `config_budget` is what config.yaml allows; `corpora` what each
    process read, by the SHA-256 of its manifest; `budgets` its unit and limit.
    """
    try:
        events, sha256 = read_journal(journal), file_sha256(journal)
    except UserError as error:
        return {"problem": str(error)}
    except OSError as error:
        return {"problem": f"{journal}: {error.strerror}"}
    if not events:
        return {"problem": f"{journal}: no event"}
    starts, last = [event for event in events if event["event"] == "start"], events[-1]
    flops = last.get("charged_flops")
    return {
        "sha256": sha256,
        "start": first_line_sha256(journal),
        "processes": processes_of(events),
        "steps": last["steps"],
        "spent": {
            "steps": last["steps"], "tokens": last.get("tokens"), "exaflops": None if flops is None else flops / 1e18
        },
        "last_step_seconds": last.get("last_step_seconds"),
        "total_seconds": spent_seconds(events),
        "uncharged_seconds": _uncharged_seconds(events),
        "problems": [*_cut_off(journal), *_trained_after_the_end(events), *_foreign_checkpoints(events)],
        "budgets": [[unit_on(event.get("clock"), event.get("unit")), event.get("limit")] for event in starts],
        "corpora": [event.get("corpus") for event in starts],
        "config_budget": _config_budget(journal.with_name("config.yaml")),
    }  # fmt: skip


def _uncharged_seconds(events: Sequence[Event]) -> float:
    """The machine slept, somebody set its clock, or the seconds: none of these shows which. Time of the CPU is another
    clock, and tells nothing of it."""
    if any(event.get("clock") == "cpu" for event in events):
        return 0.0
    found: dict[int, list[float]] = {}
    for event in events:
        if isinstance(wall := event.get("wall"), float):
            found.setdefault(event["process"], []).append(wall - event["elapsed"])
    return sum(max(0.0, late[-1] - late[0]) for late in found.values())


def _cut_off(journal: Path) -> Iterator[str]:
    if lacks_newline(journal):
        yield f"the last line of {journal.name} has no newline, which an editor or a copy can take away; add it"


def _trained_after_the_end(events: Sequence[Event]) -> Iterator[str]:
    """Earlier versions completed the record of a run that was killed after its end in a process without a step."""
    ended: int | None = None
    for event in events:
        if ended is not None and event["steps"] > ended:
            yield f"process {event['process']} trained after the run had ended at step {ended}"
            return
        if ended is None and event["event"] == "end" and event["reason"] == "finished":
            ended = event["steps"]


def _foreign_checkpoints(events: Sequence[Event]) -> Iterator[str]:
    saved: set[Saved] = set()
    for event in events:
        if event["event"] == "checkpoint":
            saved.add(Saved(event["steps"], event["sha256"]))
        elif event["event"] == "resume" and Saved(event["steps"], event["sha256"]) not in saved:
            yield f"process {event['process']} went on from a checkpoint of step {event['steps']} that is not in it"


def _config_budget(path: Path) -> list[Any] | None:
    """Unit, with its clock, and limit by config.yaml; None where it cannot be read, or does not have exactly one."""
    try:
        section = parsed(path.read_text(encoding="utf-8"))["budget"]
        ((unit, limit),) = limits_of(section).items()
        return [unit_on(section.get("clock"), unit), float(limit)]
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        return None


def last_logged_seconds(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest `seconds` of a training step in metrics.jsonl; None where there is none."""
    found = (row["seconds"] for row in metrics if "loss" in row and isinstance(row.get("seconds"), int | float))
    return max(found, default=None)
