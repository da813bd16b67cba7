"""Reading run folders for the rules and the report, without believing them.

A record may come from another machine, an older version, an interrupted run or an editor. `load_runs` therefore never
stops at one bad folder: it hands back each run with its record or with one line that says what is wrong. The accessors
`at`, `number` and `entries` are total: a missing or misshapen part reads as None or as empty, never as an exception and
never as a number that nobody measured.
"""

import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cramming.config import UserError, file_sha256
from cramming.journal import JOURNAL
from cramming.record import load_metrics, load_record
from eval.finetune.history import history_file, read_history
from eval.rules.journal import last_logged_seconds, summarise_journal

Record = Mapping[str, Any]
Outcome = tuple[bool, str]  # of a check: whether the rule holds, and the evidence
# What numpy raises for a damaged file of arrays.
DAMAGED_ARRAYS = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Run:
    """One run folder. `record` is empty when `problem` says why it could not be read."""

    folder: Path
    label: str  # what the report calls it: unique within one report
    record: Record = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None


def load_runs(runs: Path) -> list[Run]:
    """Every run folder directly inside `runs`, by name; UserError where there is none."""
    if not runs.is_dir():
        raise UserError(f"runs={runs}: no such folder; pretrain something first, or give runs=<folder of run folders>")
    loaded = [load_run(folder) for folder in sorted(runs.iterdir()) if has_traces(folder)]
    if not loaded:
        raise UserError(f"runs={runs}: no run folder with a record.json inside; pretrain or score something first")
    labels = [run.label for run in loaded]
    named = [
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.label} ({run.folder.name})")
        for run in loaded
    ]
    return [
        replace(run, record={**run.record, "elsewhere": found}) if (found := list(_elsewhere(run, named))) else run
        for run in named
    ]


def _elsewhere(run: Run, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """The other runs that scored the weights of this one, each with its lines of fine-tuning them."""
    sha256 = at(run.record, "glue.pretrained.model_sha256")
    for other in (other for other in runs if sha256 and other is not run):
        past = entries(at(other.record, "scorings.entries"))
        lines = [line for line in past if at(line, "model_sha256") == sha256]
        if lines or at(other.record, "glue.pretrained.model_sha256") == sha256:
            yield {"run": other.label, "lines": lines}


RUN_FILES = ("record.json", "budget.jsonl", "metrics.jsonl")


def has_traces(folder: Path) -> bool:
    """Whether a folder holds anything of a run; a run that died early has no record yet but is still to be listed."""
    return folder.is_dir() and any((folder / name).exists() for name in RUN_FILES)


def load_run(folder: Path) -> Run:
    """Read one run folder; what is wrong with it ends in `problem`."""
    try:
        record = load_record(folder)
    except UserError as error:
        return Run(folder, folder.name, problem=str(error))
    except OSError as error:
        return Run(folder, folder.name, problem=f"{folder / 'record.json'}: {error.strerror}")
    # These are read from their files; what a record has in their place is nobody's evidence.
    record = {key: value for key, value in record.items() if key not in ("scorings", "journal", "beside", "elsewhere")}
    try:
        record["beside"] = _beside(folder)
    except OSError as error:
        return Run(folder, folder.name, problem=f"{error.filename}: {error.strerror}")
    if (past := history_file(folder)).exists():
        record = {**record, "scorings": read_history(past, record.get("history"))}
    try:
        metrics = [row for row in load_metrics(folder) if isinstance(row, dict)]
    except (OSError, KeyError, TypeError, ValueError):  # plots are a bonus: a damaged log must not hide the scores
        metrics = []
    journal = folder / JOURNAL
    if journal.exists():
        logged = {"logged_seconds": last_logged_seconds(metrics)}
        record = {**record, "journal": {**summarise_journal(journal), **logged}}
    name = record.get("name")
    return Run(folder, name if isinstance(name, str) and name.strip() else folder.name, record, metrics)


def _beside(folder: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of the trained model's predictions and of the files of final/, by name; of what is there."""
    places = {"predictions": folder / "glue" / "pretrained" / "predictions", "final": folder / "final"}
    return {
        name: {file.name: file_sha256(file) for file in sorted(place.iterdir()) if file.is_file()}
        for name, place in places.items()
        if place.is_dir()
    }


def at(record: Any, path: str) -> Any:
    """The value at a dotted path, or None where any part of it is missing."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def number(record: Any, path: str = "") -> float | None:
    """The finite number at `path` (or `record` itself), else None."""
    value = at(record, path) if path else record
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # JSON allows whole numbers of any length
        return None
    return found if math.isfinite(found) else None


def mean_of(names: Iterable[str], scores: Mapping[str, float | None]) -> float | None:
    """Mean of the named scores; None as soon as one is missing."""
    values = [scores.get(name) for name in names]
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def entries(value: Any) -> list[Any]:
    """`value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def sections(record: Record) -> dict[str, Mapping[str, Any]]:
    """The record's score sections by initialisation (`pretrained`, `random`, `designed`)."""
    glue = at(record, "glue")
    return {str(k): v for k, v in glue.items() if isinstance(v, Mapping)} if isinstance(glue, Mapping) else {}


# Baselines without an encoder, which no rule judges: the record's section -> the initialisation it is said to have.
WITHOUT_ENCODER = {"floor": "bag of words", "constant": "constant class"}


def without_encoder(record: Record) -> dict[str, Mapping[str, Any]]:
    """The sections of `WITHOUT_ENCODER` that are there, by initialisation."""
    found = {init: at(record, name) for name, init in WITHOUT_ENCODER.items()}
    return {init: section for init, section in found.items() if isinstance(section, Mapping)}


def tasks_of(record: Record) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """All scored tasks as (initialisation, name, entry); the names are the record's, so anything may be in them."""
    for init, section in sections(record).items():
        tasks = section.get("tasks")
        for name, task in tasks.items() if isinstance(tasks, Mapping) else ():
            yield init, str(name), task if isinstance(task, Mapping) else {}


def not_written(record: Record, paths: Iterable[str]) -> list[str]:
    """Those of the dotted paths at which nothing is written."""
    return [path for path in paths if at(record, path) in (None, "", [])]


def few(names: list[str], most: int = 6) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def names_of(sources: list[Any]) -> str:
    """The first names of a list of sources, which may be as long as a folder of files."""
    return few([str(at(source, "name")) for source in sources])


def all_or(problems: list[str], fine: str) -> Outcome:
    """A failure with the first problems as evidence, or success with `fine`."""
    shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
    return (False, shown) if problems else (True, fine)
