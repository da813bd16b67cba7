"""Inputs that several rules share: the log, fine-tunings, sizes of tasks, and the wording of evidence."""

import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cramming.data.task_files import ENTRIES
from cramming.record_schema import FineTuning, Record, Scores, Source, TaskScore
from cramming.runlog import Checkpoint, Entry, Resume, Start, Steps, Timed, Training
from cramming.runlog import Counted as TimedCounters
from eval.rules.recipe_facts import RecipeFacts

Outcome = tuple[bool, str]  # whether the rule holds, and the evidence
NO_SCORES = "no scores yet"  # evidence of each rule that a run breaks until it is scored
# settings of a section that are the user's choice
PROTOCOL = ("hyperparameters", "selection", "precision", "threads_per_run")
MAX_BYTES = 2**24  # largest array of predictions to read; QQP's takes 0.3 MB


COUNTED = ("steps", "sequences", "tokens", "flops", "last_step_seconds")


class Counted(NamedTuple):
    """Counters after a line of the log."""

    line: int
    event: Timed | None
    total_seconds: float
    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    flops: float = 0.0
    last_step_seconds: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """Run as the plausibility rules read it: its record, and the log that the record was computed from.

    `record_sha256` is the hash of the content that `record.json` must have.
    """

    record: Record
    training: Training = field(default_factory=Training)
    entries: Sequence[Entry] = ()
    record_sha256: str = ""

    @cached_property
    def facts(self) -> RecipeFacts | None:
        """Facts of the recipe, or None for a run that has not logged its corpus yet and so has no steps."""
        return None if self.training.setup is None else RecipeFacts.of(self.record)

    @cached_property
    def counters(self) -> list[Counted]:
        """Counters after each timed event of the work that no resume superseded, in the order of the lines."""
        counters: list[Counted] = []
        earlier = 0.0
        values: dict[str, Any] = {}
        seconds = 0.0
        for entry in self.entries:
            event = entry.event
            if not isinstance(event, Timed):
                continue
            if isinstance(event, Start):
                earlier = seconds
            values |= counters_of(event)
            seconds = earlier + event.elapsed
            if isinstance(event, Resume):
                counters = [each for each in counters if each.steps <= values["steps"]]
            counters.append(Counted(entry.line, event, seconds, **values))
        return counters

    def spent_until(self, sha256: str) -> dict[str, Any]:
        """Return what the run had spent at a checkpoint, by the names of the report's facts.

        Energy is None if that of a process is unknown. Returns {} for a checkpoint that the log does not have.
        """
        joules: list[float | None] = []
        reached: dict[str, Any] = dict.fromkeys(("progress", "steps", "spent_seconds", "tokens"), 0)
        for entry in self.entries:
            event = entry.event
            if isinstance(event, Start):
                joules.append(None)
            elif isinstance(event, TimedCounters) and event.joules is not None:
                joules[-1] = event.joules
            elif isinstance(event, Steps):
                reached = {
                    "progress": event.progress,
                    "steps": event.step,
                    "spent_seconds": event.seconds,
                    "tokens": event.tokens,
                }
            elif isinstance(event, Checkpoint) and event.sha256 == sha256:
                known = [value for value in joules if value is not None]
                is_complete = len(known) == len(joules)
                return {**reached, "energy_kwh": sum(known) / 3.6e6 if is_complete else None}
        return {}


def counters_of(event: Timed) -> dict[str, Any]:
    """Return the counters of an event; the log leaves out those that have not changed."""
    values = {name: getattr(event, name, None) for name in COUNTED}
    return {name: value for name, value in values.items() if value is not None}


def all_or(problems: Iterable[str], fine: str) -> Outcome:
    """Return a failure with the first problems as evidence, or a success with `fine`."""
    messages = list(problems)
    if messages:
        return False, abbreviated(messages, 4, "; ")
    return True, fine


def abbreviated(names: Sequence[str], limit: int = 6, between: str = ", ") -> str:
    """Return the first of the names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return between.join(names[:limit]) + more


def names_of(sources: Sequence[Source]) -> str:
    """Return the first names of a list of sources, which may be as long as a folder of files."""
    return abbreviated([str(source.name) for source in sources])


def fine_tuned(record: Record, init: str) -> list[FineTuning]:
    """Return all fine-tunings of an initialisation on the record's suite, including those of unfinished scorings.

    Frozen probes and checkpoints are left out: neither can become the score of the final model.
    """
    section = record.glue.get(init)
    if section is None:
        return []
    lines = [line for line in record.history if line.init == init and line.suite == section.suite]
    return [line for line in lines if competes(line)]


def competes(line: FineTuning) -> bool:
    """Return whether a result is one of the final model's scores: of no checkpoint, and no frozen probe."""
    return line.checkpoint is None and not line.is_probe


def made_with(scored: Scores | FineTuning) -> dict[str, Any]:
    """Return the settings that the user chose for the scores of a section, or for one fine-tuning."""
    return {key: getattr(scored, key) for key in PROTOCOL}


def predicted(file: Path, name: str) -> np.ndarray:
    """Return the array [N] of this name in a file of predictions, empty if it has none.

    No more bytes are unpacked than a run's predictions take, whatever size the file states. Raises ValueError for a
    file that no run writes.
    """
    try:
        with zipfile.ZipFile(file) as arrays:
            content = _array_bytes(arrays, f"{name}.npy")
        if content is None:
            return np.empty(0)
        np.lib.format.read_magic(content)
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
        values = np.frombuffer(content.getbuffer()[content.tell() :], dtype)
        if values.shape != shape or dtype.kind not in "iuf":
            raise ValueError(f"{values.size} numbers as {dtype} of shape {shape}")
    except Exception as error:  # the header is parsed as Python, which may raise errors of any type
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        raise ValueError(f"predictions/{file.name}: no predictions ({reason})") from None
    return values


def _array_bytes(arrays: zipfile.ZipFile, name: str) -> io.BytesIO | None:
    for entry in arrays.infolist():
        if entry.filename != name:
            continue
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # readers of other compressions unpack more bytes than asked for
            raise ValueError(f"compression {entry.compress_type}")
        with arrays.open(entry) as packed:
            return io.BytesIO(packed.read(MAX_BYTES))
    return None


def official_sizes(record: Record, init: str, entry: str) -> dict[str, int]:
    """Return the official numbers of examples by the task table; only GLUE has any."""
    section = record.glue.get(init)
    if section is None or section.suite != "glue" or entry not in ENTRIES:
        return {}
    task, source = ENTRIES[entry]
    return {"train_examples": task.train.examples, "eval_examples": source.examples}


def other_sizes(record: Record, init: str, entry: str, task: TaskScore) -> list[str]:
    """Return the deviations of a task's numbers of examples from the official ones, such as `train 100 of 8551`."""
    deviations = []
    for key, size in official_sizes(record, init, entry).items():
        if getattr(task, key) != size:
            deviations.append(f"{key.removesuffix('_examples')} {count_of(task, key)} of {size}")
    return deviations


def count_of(task: TaskScore, key: str) -> str:
    """Return a number of examples as text."""
    value = getattr(task, key)
    return "not on record" if value is None else f"{value:.0f}"


def swept(section: Scores) -> str:
    """Return text such as `best of 6 sets of hyperparameters`, or "" without a sweep."""
    if section.sweep is None:
        return ""
    return f"best of {len(section.sweep.points)} sets of hyperparameters"
