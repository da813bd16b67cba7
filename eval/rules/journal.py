"""R5's evidence: a run's journal, and what lies beside it, against what the record claims."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from cramming.config import UserError, file_sha256
from cramming.journal import (
    JOURNAL,
    MAX_HEARTBEAT_SECONDS,
    Event,
    Saved,
    first_line_sha256,
    lacks_newline,
    limits_of,
    processes_of,
    spent_seconds,
    unit_on,
)
from cramming.record_schema import Journal, Record
from eval.rules.evidence import failed

ROUNDING_SECONDS = 0.01
Read = Callable[[], list[Event]]  # reads a journal, or fails as `read_journal` does
_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # ten times as fast, where PyYAML was built with it


@lru_cache(1)  # a run's configuration is asked for by one rule after the other
def parsed(text: str) -> Any:
    """What a YAML text holds; not to be changed. No run writes aliases: with a few, a text is larger than a machine."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _LOADER)):
        raise yaml.YAMLError("an alias")
    return yaml.load(text, _LOADER)


def journal_evidence(
    folder: Path, read: Read, record: Record, rows: Sequence[Mapping[str, Any]]
) -> Journal:
    """The record's section `journal`: what of R5 does not hold, or what else is to be told. `rows` of metrics.jsonl."""
    path = folder / JOURNAL
    try:
        events = read()
    except UserError as error:
        return Journal([str(error)], None)
    except OSError as error:
        return Journal([f"{path}: {error.strerror}"], None)
    if not events:
        return Journal([f"{path}: no event"], None)
    total, uncharged = spent_seconds(events), uncharged_seconds(events)
    summary = f"{len(processes_of(events))} process(es), {total:.1f} s in the journal"
    if uncharged > 60 + 0.01 * total:  # beyond what setting a clock by the network comes to
        summary += (
            f"; by the wall clock {uncharged:.0f} s more: the machine slept, or a clock was set"
        )
    return Journal(list(_disagrees(path, events, record, rows)), summary)


def _disagrees(
    path: Path, events: Sequence[Event], record: Record, rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    training, steps = record.training, events[-1]["steps"]
    yield from failed(
        (
            file_sha256(path) == training.budget.journal_sha256,
            f"the SHA-256 of {path.name} is not the recorded one",
        ),
        (
            first_line_sha256(path) == training.journal_start,
            f"{path.name} is not the journal that the run began with",
        ),
        (
            processes_of(events) == training.budget.processes,
            f"the processes in {path.name} are not the record's",
        ),
        (steps == training.steps, f"{steps} steps in {path.name}, {training.steps} in the record"),
        (
            not lacks_newline(path),
            f"the last line of {path.name} has no newline, which an editor or a copy can take away; add it",
        ),
    )
    yield from _other_seconds(events, training.budget.spent_seconds, rows)
    yield from trained_after_the_end(events)
    yield from foreign_checkpoints(events)
    yield from _other_budget(path, events, record)


def _other_seconds(
    events: Sequence[Event], seconds: float | None, rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    total, last = spent_seconds(events), events[-1].get("last_step_seconds")
    steps = (
        row["seconds"]
        for row in rows
        if "loss" in row and isinstance(row.get("seconds"), int | float)
    )
    logged = max(steps, default=None)  # the last validation comes after the end
    if last is None or seconds is None:
        yield "no seconds to compare"
    elif abs(seconds - last) > ROUNDING_SECONDS or seconds > total + ROUNDING_SECONDS:
        yield f"{JOURNAL} has the last step at {last:.2f} s of {total:.2f} s, the record at {seconds:.2f} s"
    if logged is None:
        yield "metrics.jsonl is not beside the record, or has no training step: restore it"
    elif logged > total + MAX_HEARTBEAT_SECONDS:
        yield f"metrics.jsonl has a step at {logged:.2f} s, {JOURNAL} ends at {total:.2f} s"


def _other_budget(path: Path, events: Sequence[Event], record: Record) -> Iterator[str]:
    """Of the whole run what was spent, and of each process its corpus and its limit."""
    budget, last = record.training.budget, events[-1]
    flops = last.get("charged_flops")
    spent = {
        "steps": last["steps"],
        "tokens": last.get("tokens"),
        "exaflops": None if flops is None else flops / 1e18,
    }
    if budget.unit != "hours" and spent.get(str(budget.unit)) != budget.spent:
        yield f"{spent.get(str(budget.unit))} {budget.unit} spent in {path.name}, {budget.spent} in the record"
    limits = {"the record": (budget.limit, unit_on(budget.clock, budget.unit))}
    if (limit := config_limit(path.with_name("config.yaml"))) is None:
        yield "config.yaml is not beside the record, or has no limit that can be read: restore it"
    else:
        limits["config.yaml"] = limit
    for event in events:
        if event["event"] != "start":
            continue
        process, manifest = f"process {event['process']}", event.get("corpus")
        if manifest is None or manifest != record.corpus.manifest_sha256:
            yield f"{process} read another corpus than the record's (by SHA-256 of the manifest)"
        own = (event.get("limit"), unit_on(event.get("clock"), event.get("unit")))
        for name, other in limits.items():
            if other != own:
                yield f"{process} had a limit of {own[0]} {own[1]}, {name} has {other[0]} {other[1]}"


def uncharged_seconds(events: Sequence[Event]) -> float:
    """The machine slept, somebody set its clock, or the seconds: none of these shows which. Time of the CPU is another
    clock, and tells nothing of it."""
    if any(event.get("clock") == "cpu" for event in events):
        return 0.0
    found: dict[int, list[float]] = {}
    for event in events:
        if isinstance(wall := event.get("wall"), float):
            found.setdefault(event["process"], []).append(wall - event["elapsed"])
    return sum(max(0.0, late[-1] - late[0]) for late in found.values())


def trained_after_the_end(events: Sequence[Event]) -> Iterator[str]:
    """Earlier versions completed the record of a run that was killed after its end in a process without a step."""
    ended: int | None = None
    for event in events:
        if ended is not None and event["steps"] > ended:
            yield f"process {event['process']} trained after the run had ended at step {ended}"
            return
        if ended is None and event["event"] == "end" and event["reason"] == "finished":
            ended = event["steps"]


def foreign_checkpoints(events: Sequence[Event]) -> Iterator[str]:
    saved: set[Saved] = set()
    for event in events:
        if event["event"] == "checkpoint":
            saved.add(Saved(event["steps"], event["sha256"]))
        elif event["event"] == "resume" and Saved(event["steps"], event["sha256"]) not in saved:
            yield f"process {event['process']} went on from a checkpoint of step {event['steps']} that is not in it"


def config_limit(path: Path) -> tuple[float, str | None] | None:
    """Limit and unit, with its clock, by config.yaml; None where it cannot be read, or does not have exactly one."""
    try:
        section = parsed(path.read_text(encoding="utf-8"))["budget"]
        ((unit, limit),) = limits_of(section).items()
        return float(limit), unit_on(section.get("clock"), unit)
    except (
        OSError,
        yaml.YAMLError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RecursionError,
    ):
        return None
