"""The history of a run's fine-tunings, `glue/history.jsonl`: a line for each that was scored, whatever became of it.

A second scoring replaces the first in the record and on disk. So that nothing can be chosen that way unseen, each
fine-tuning is written down before its result is kept, with the settings that were the user's choice (`PROTOCOL`), in a
journal (cramming/journal.py) whose last line the record then names: by number and SHA-256. A scoring that finds its
results stored adds nothing. The rules read the file beside the record (R7, R20, R21).
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cramming.config import UserError, require
from cramming.data.task_files import Task
from cramming.journal import Journal, line_hashes, read_lines
from cramming.record import finite, load_record, write_record_section
from cramming.data.suites import SuiteName

PROTOCOL = (
    "hyperparameters",
    "selection",
    "precision",
    "threads_per_run",
)  # of a section: how its scores were made


def history_file(folder: Path) -> Path:
    """Where the run in `folder` has its history."""
    return folder / "glue" / "history.jsonl"


def append(folder: Path, entry: Mapping[str, Any]) -> None:
    """Add a line with the time to the history of the run in `folder`, and name it in the record."""
    path = history_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(Journal(path, durable=False)) as journal:
        journal.write(finite({"time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}))
    write_record_section(folder, history=stamp(path))


def stamp(path: Path) -> dict[str, Any]:
    """How many lines the history has, and the SHA-256 of the last, which stands for all."""
    hashes = line_hashes(path)
    return {"entries": len(hashes), "sha256": hashes[-1] if hashes else None}


def refuse_altered(folder: Path) -> None:
    """UserError where the history does not begin with the lines that the record names."""
    path, recorded = history_file(folder), load_record(folder).get("history")
    found = read_history(path, recorded)
    require(not found.get("problem"), str(found.get("problem")))
    sha256 = found.get("sha256")
    what = "is not as the record knows it (by SHA-256)" if path.exists() else "is missing"
    require(
        not recorded
        or (
            isinstance(recorded, Mapping)
            and sha256 is not None
            and recorded.get("sha256") == sha256
        ),
        f"{path}: {what}; restore it, or score the model folder under another name with model_path=<folder>",
    )


@dataclass(frozen=True)
class Scoring:
    """What one scoring asks the history of the run in `folder`, and adds to it: of one suite and initialisation."""

    folder: Path
    suite: SuiteName
    init: str
    made_with: Mapping[str, Any]  # by PROTOCOL
    version: int  # of the code that fine-tunes
    by: Mapping[str, Any]  # `model_sha256` and `git`, the state of the code

    def add(self, task: Task, seed: int, result: Mapping[str, Any], subset: bool) -> None:
        """A line for one fine-tuning, whose result has been stored; `subset`: on a part of the official data."""
        what = {
            "suite": self.suite,
            "init": self.init,
            "task": task.name,
            "seed": seed,
            "version": self.version,
        }
        scores = {
            entry: found["metrics"][task.main_metric] for entry, found in result["entries"].items()
        }
        digests = {name: result[name] for name in ("predictions_sha256", "key")}
        append(
            self.folder,
            {**what, **self.made_with, "subset": subset, "scores": scores, **digests, **self.by},
        )

    def has(self, piece: Mapping[str, Any]) -> bool:
        """Whether the history has a line for this result; the record, too late for it in a crash, then names it."""
        kept = {name: piece.get(name) for name in ("key", "predictions_sha256")}
        found = any(kept.items() <= line.items() for line in self._lines())
        if found:
            write_record_section(self.folder, history=stamp(history_file(self.folder)))
        return found

    def entries(self) -> int:
        """How many lines there are by now, of whatever suite and initialisation."""
        return len(line_hashes(history_file(self.folder)))

    def other_set(self) -> str | None:
        """What of `PROTOCOL` was something else in an earlier fine-tuning, in words."""
        for past in self._lines():
            for name in PROTOCOL:
                if past.get(name) != self.made_with[name]:
                    return f"{name}={past.get(name)}, not {self.made_with[name]}"
        return None

    def done(self) -> set[tuple[Any, Any]]:
        """The (task, seed) that were fine-tuned on all of their data with the same settings, by the same version."""
        same = {**self.made_with, "subset": False, "version": self.version}
        return {
            (line.get("task"), line.get("seed"))
            for line in self._lines()
            if same.items() <= line.items()
        }

    def _lines(self) -> list[dict[str, Any]]:
        lines = read_lines(history_file(self.folder))
        return [
            line
            for line in lines
            if (line.get("suite"), line.get("init")) == (self.suite, self.init)
        ]


def read_history(path: Path, recorded: Any) -> dict[str, Any]:
    """The entries, and the SHA-256 of the last that the record names; `problem` where the file is damaged."""
    named = recorded.get("entries") if isinstance(recorded, Mapping) else None
    count = named if isinstance(named, int) else 0
    try:
        entries, hashes = list(read_lines(path)), line_hashes(path)
    except (UserError, OSError) as error:
        return {"problem": str(error)}
    return {"entries": entries, "sha256": hashes[count - 1] if 0 < count <= len(hashes) else None}
