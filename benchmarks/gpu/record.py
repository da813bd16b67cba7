"""The record of a measurement: one JSON line per event of a row, synced to disk, below a head on device and code.

A row is begun, may note partial results, and ends with a result, an error or the reason why it was skipped. What a
killed process has noted stays. Nothing here imports torch: the watching process uses it, too.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "rows.jsonl"
ENDED = ("result", "error", "skipped")
MEASURED = ("result", "error")  # not measured again

State = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """Append-only file in the folder `work`."""

    work: Path

    def add(self, **line: Any) -> None:
        """Append a line."""
        append(self.work / FILE, line)

    def rows(self) -> dict[str, State]:
        """Return each row's last state by name."""
        return rows_of(self.work / FILE)

    def names(self) -> list[str]:
        """Return the names of all rows, measured or not, in their order."""
        names: dict[str, None] = {}
        for line in lines_of(self.work / FILE):
            names |= dict.fromkeys(line.get("names", ()))
        return list(names)

    def about(self) -> dict[str, Any]:
        """Return the head: date, commit, scale, device and versions; empty if nothing was measured."""
        return next((line["about"] for line in lines_of(self.work / FILE) if "about" in line), {})

    def result(self, row: str) -> dict[str, Any]:
        """Return what a row has measured so far; empty if nothing."""
        state = self.rows().get(row, {})
        return {**state.get("partial", {}), **state.get("result", {})}

    def row_under_way(self) -> tuple[str, State] | None:
        """Return the row that has begun and not ended."""
        for name, state in self.rows().items():
            if not state.keys() & set(ENDED):
                return name, state
        return None


def kind_of(state: State) -> str:
    """Return `failed` (with an error, or in a part of the result), `refused`, `measured` or `missing`."""
    result = state.get("result", {})
    if "error" in state or result.get("failed"):
        return "failed"
    if "refused" in result:
        return "refused"
    return "measured" if "result" in state else "missing"


def bytes_of(file: Path) -> bytes:
    """Return the content of a file; nothing if there is none."""
    return file.read_bytes() if file.exists() else b""


def append(file: Path, line: dict[str, Any]) -> None:
    """Append a line and sync it. A line that a kill has cut off stays a line of its own."""
    data = json.dumps(line, default=str).encode() + b"\n"
    written = bytes_of(file)
    if written and not written.endswith(b"\n"):
        data = b"\n" + data
    with file.open("ab") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return all whole lines."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:  # cut off by a kill
            continue
    return lines


def rows_of(file: Path) -> dict[str, State]:
    """Return each row's last state: `begun`, how it ended, and `partial`, which outlives a new beginning."""
    rows: dict[str, State] = {}
    for line in lines_of(file):
        if "row" not in line:
            continue
        name = line.pop("row")
        state = rows.get(name, {})
        partial = {**state.get("partial", {}), **line.pop("partial", {})}
        rows[name] = {**({} if "begun" in line else state), **line, "partial": partial}
    return rows


def last_line(text: str) -> str:
    """Return the last line of an error, which names it; a line of carets only marks another."""
    lines = [line for line in text.splitlines() if line.strip(" ^~")]
    return lines[-1] if lines else ""
