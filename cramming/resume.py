"""What a resume goes on with: a run whose record, journal, checkpoints and log know of the same past.

The journal (cramming/journal.py) says what was spent. Were it lost, cut short or replaced, the clock would give time
back; were a checkpoint another run's, training would be given. So whatever knows more than the journal ends the resume
before anything is written. A whole folder that was put back to an earlier moment cannot be told from that moment.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from cramming import checkpoint
from cramming.budget import BudgetConfig
from cramming.config import UserError, file_sha256, shown
from cramming.engine import StepStats
from cramming.journal import (
    JOURNAL,
    MAX_HEARTBEAT_SECONDS,
    Event,
    Saved,
    checkpoints_of,
    ended_after,
    first_line_sha256,
    read_journal,
    spent_seconds,
    unit_on,
)
from cramming.progress import say
from cramming.record import is_run, load_metrics, load_record

_OTHER = "start again under another name"


def checkpoint_to_resume(
    folder: Path, settings: Mapping[str, Any], corpus: Mapping[str, Any], budget: BudgetConfig
) -> Saved | None:
    """The checkpoint that a process on this run folder begins with; None where it begins with the first step.

    UserError where settings or corpus are not the run's, or the folder holds what the journal does not know of.
    """
    record = load_record(folder) if is_run(folder) else {}
    changed = chain(
        changed_settings(folder, record, settings), _changed_corpus(folder, record, corpus)
    )
    _refuse(changed if record else iter(()))
    events, checkpoints = read_journal(folder / JOURNAL), folder / "checkpoints"
    newest = checkpoint.newest_steps(checkpoints)
    _refuse(_other_journal(folder, record, events, newest, corpus, budget))
    _refuse(_more_than_the_journal(folder, events, newest))
    ended = ended_after(events)
    known = [saved for saved in checkpoints_of(events) if ended in (None, saved.steps)]
    found = checkpoint.newest_of(checkpoints, known)
    _refuse(_lost_log(folder, found, events))
    if known and not found:
        say(
            f"{checkpoints}: nothing is left of {len(known)} checkpoints; training begins anew, what was spent is spent"
        )
    return found


def logged_steps(folder: Path, steps: int) -> list[tuple[float, StepStats]]:
    """What a run's loop had of its latest steps when it saved a checkpoint after so many: the log's row of it has the
    progress, loss and accuracy of each. Nothing where an earlier version wrote the row."""
    rows = (row for row in load_metrics(folder) if row["step"] == steps and "each_accuracy" in row)
    row = next(rows, None)
    if row is None:
        return []
    each = zip(row["each_progress"], row["each_loss"], row["each_accuracy"], strict=True)
    return [
        (progress, StepStats(math.nan if loss is None else loss, accuracy, math.nan, skipped=False))
        for progress, loss, accuracy in each
    ]


def altered_since_the_end(folder: Path) -> str | None:
    """What to say of a finished run whose journal is not the one that its record names; None: it is."""
    journal = folder / JOURNAL
    recorded = load_record(folder).get("pretrain", {}).get("budget", {}).get("journal_sha256")
    if recorded is None or (journal.exists() and file_sha256(journal) == recorded):
        return None
    return f"warning: {journal}: not as it was when the run ended, so the run breaks R5; restore it"


def _refuse(problems: Iterator[str]) -> None:
    """UserError with the first problem, if there is any."""
    for problem in problems:
        raise UserError(problem)


def _other_journal(
    folder: Path,
    record: Mapping[str, Any],
    events: Sequence[Event],
    newest: int | None,
    corpus: Mapping[str, Any],
    budget: BudgetConfig,
) -> Iterator[str]:
    """The record names the journal that its run began with, and each process its corpus and its budget.

    A run that was killed while it began has a journal of no step, of which the record does not know yet.
    """
    path, starts = folder / JOURNAL, [event for event in events if event["event"] == "start"]
    begun = record.get("pretrain")
    if not record and (events or newest is not None):
        yield f"{folder}: a run's journal or checkpoints without its record.json; restore it or {_OTHER}"
    if begun is None and any(event["steps"] or event["event"] == "checkpoint" for event in events):
        yield (
            f"{folder}: record.json does not know that training began, and {JOURNAL} has steps; restore the record, or"
            f" {_OTHER}"
        )
    if begun is not None and begun.get("journal_start") != first_line_sha256(path):
        what = (
            "not the one that this run began with"
            if events
            else "missing or empty, and with it the time spent"
        )
        yield f"{path}: the journal is {what}; restore it or {_OTHER}"
    for event in starts:
        if event.get("corpus") != corpus["manifest_sha256"]:
            yield (
                f"{path}: a process of this journal read another corpus than {corpus['folder']} (its manifest differs):"
                f" the journal is another run's; restore it or {_OTHER}"
            )
        unit = unit_on(event.get("clock"), event["unit"])
        if (unit, event["limit"]) != (unit_on(budget.clock, budget.unit), budget.limit):
            yield (
                f"budget.{budget.unit}={budget.limit:g}: the run in {folder} has a process with a limit of"
                f" {event['limit']:g} {unit} in {JOURNAL}; one run has one budget, {_OTHER}"
            )


def _more_than_the_journal(
    folder: Path, events: Sequence[Event], newest: int | None
) -> Iterator[str]:
    """A crash costs the journal what came after its last heartbeat, and no more."""
    if newest is not None and newest > max((event["steps"] for event in events), default=-1):
        yield (
            f"{folder / 'checkpoints'}: a checkpoint of step {newest}, which {folder / JOURNAL} does not reach: it is"
            f" another run's, or the journal was cut short; put back what was there, or {_OTHER}"
        )
    logged = max((row["seconds"] for row in load_metrics(folder) if "loss" in row), default=0.0)
    spent = spent_seconds(events)
    if logged > spent + MAX_HEARTBEAT_SECONDS:
        yield (
            f"{folder / 'metrics.jsonl'}: a step at {logged:.0f} s, {JOURNAL} ends at {spent:.0f} s: the journal was"
            f" cut short; restore it or {_OTHER}"
        )


def _lost_log(folder: Path, saved: Saved | None, events: Sequence[Event]) -> Iterator[str]:
    """A run that ended has its last checkpoint; and before each that holds a step the log has a row, which says as the
    journal does when the step ended."""
    if saved is None:
        if steps := ended_after(events):
            yield f"{folder}: the run ended after {steps} steps and its last checkpoint is gone; {_OTHER}"
        return
    ended = [event["last_step_seconds"] for event in events if event.get("sha256") == saved.sha256]
    rows = [row for row in load_metrics(folder) if "loss" in row and row["step"] == saved.steps]
    if saved.steps and not any(row.get("seconds") in ended for row in rows):
        yield (
            f"{folder / 'metrics.jsonl'}: no row of step {saved.steps} at {ended[0]:.1f} s, at which its checkpoint was"
            f" made; restore it or {_OTHER}"
        )


# Sections and settings that a resume may change: where things lie, what other verbs do, and what the gate lets pass
# (the record keeps what any of its processes forced, and the most devices that one had).
_FREE_TO_CHANGE = {
    "resume",
    "runs",
    "corpora",
    "checkpoint",
    "data.corpus",
    "data.workers",
    "data.ray",
    "eval",
    "report",
    "export",
    "study",
    "bench",
    "plan",
    "inspect",
    "experiment",
    "model_path",
    "division",
    "gates",
    "forced",
    "duel",
    "project",
    "replay",
    "submit",
    "trackers",
    "verify",
    "parallel",
}
_COMPRESSION = "parallel.compression."  # what `parallel` has that changes numbers; strategies without it send all


def changed_settings(
    folder: Path, record: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Each setting in which a resumed run differs from its first start, in words."""
    recorded = _leaves(record.get("config", {}))
    for key, before, now in other_settings(record, settings):
        began, again = f"with {key}={shown(before)}", "resume with the same settings"
        if key not in recorded and key != f"{_COMPRESSION}name":
            began, again = (
                "without this setting",
                "resume with the same settings, and the version that had them",
            )
        yield f"{key}={shown(now)}: the run in {folder} was started {began}; {again}, or {_OTHER}"


def other_settings(
    record: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Each setting that no resume may change and that a run's record has otherwise: its name, the value then, and now;
    None where there is no such setting."""
    before, now = (
        {f"{_COMPRESSION}name": "none", **_leaves(each)}
        for each in (record.get("config", {}), settings)
    )
    for key in sorted(before.keys() | now.keys()):
        free = key in _FREE_TO_CHANGE or key.split(".")[0] in _FREE_TO_CHANGE
        if (not free or key.startswith(_COMPRESSION)) and before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


def _changed_corpus(
    folder: Path, record: Mapping[str, Any], corpus: Mapping[str, Any]
) -> Iterator[str]:
    """The same folder may hold another corpus than the run began with."""
    before = record.get("corpus", {})
    for was, now in (
        (before, corpus),
        (before.get("validation", {}), corpus.get("validation", {})),
    ):
        if was.get("manifest_sha256") not in (None, now.get("manifest_sha256")):
            yield (
                f"{now['folder']}: not the corpus that the run in {folder} was started with (its manifest differs);"
                f" restore that one, or {_OTHER}"
            )


def _leaves(node: Any, path: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; lists count as leaves."""
    if isinstance(node, Mapping):
        return {
            k: v
            for key, child in node.items()
            for k, v in _leaves(child, f"{path}.{key}".lstrip(".")).items()
        }
    return {path: list(node) if isinstance(node, tuple) else node}
