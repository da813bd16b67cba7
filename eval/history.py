"""The history of a run's fine-tunings, `glue/history.jsonl`: a line for each that was scored, whatever became of it.

A second scoring replaces the first in the record and on disk. So that nothing can be chosen that way unseen, each
fine-tuning is written down before its result is kept, with the settings that were the user's choice (`SET`), and lines
are only ever appended. A scoring that finds its results stored fine-tunes nothing and adds nothing. The record names
the lines that it knows by number and SHA-256; the rules read the file beside it (R7, R20, R21).
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cramming.config import UserError
from cramming.files import sync
from cramming.record import finite

SET = ("hyperparameters", "selection", "precision", "threads_per_run")  # of a section: what its scores were made with


def history_file(folder: Path) -> Path:
    """Where the run in `folder` has its history."""
    return folder / "glue" / "history.jsonl"


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line with the time, and sync it to disk; a line that a crash cut short never counted, and goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(finite({"time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}), allow_nan=False)
    with path.open("a+b") as handle:
        handle.truncate(len(b"".join(_lines(path))))
        handle.write(line.encode() + b"\n")
        handle.flush()
        sync(handle.fileno())


def stamp(path: Path) -> dict[str, Any]:
    """What the record says of the history as it is now; empty where nothing was ever fine-tuned."""
    lines = _lines(path)
    return {"entries": len(lines), "sha256": _sha256(lines)} if lines else {}


def refuse_altered(path: Path, recorded: Any) -> None:
    """UserError where the history does not begin with the lines that the record names."""
    known = recorded.get("sha256") if isinstance(recorded, Mapping) else recorded
    if known and read_history(path, recorded).get("sha256") != known:
        raise UserError(
            f"{path}: {'is not as the record knows it (by SHA-256)' if path.exists() else 'is missing'}; restore it, or"
            " score the model folder under another name with model_path=<folder>"
        )


def other_set(path: Path, init: str, made_with: Mapping[str, Any]) -> str | None:
    """Where `init` was fine-tuned with something else of `SET` than `made_with` before: what, in words."""
    entries = read_history(path, None).get("entries", [])
    for past in (entry for entry in entries if entry.get("init") == init):
        for name in SET:
            if past.get(name) != made_with[name]:
                return f"{name}={past.get(name)}, not {made_with[name]}"
    return None


def read_history(path: Path, recorded: Any) -> dict[str, Any]:
    """The entries, and the SHA-256 of the lines that the record names; `problem` where the file is damaged."""
    count = recorded.get("entries") if isinstance(recorded, Mapping) else None
    try:
        lines = _lines(path)
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        return {"problem": f"{path}: damaged ({error})"}
    if not all(isinstance(entry, dict) for entry in found):
        return {"problem": f"{path}: damaged (a line is not an object)"}
    return {"entries": found, "sha256": _sha256(lines[:count]) if isinstance(count, int) else None}


def _lines(path: Path) -> list[bytes]:
    """The whole lines; what a crash cut short has no newline behind it."""
    return [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def _sha256(lines: list[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()
