"""`prepare` in a process that is killed at a write: `killed_at_write.py <config> <number> <count file>`.

Writes are counted in each process alone: what makes, renames or removes a file or folder, and what is written into one,
of which the half gets there. With number 0 nothing is killed, and the count goes into the file. Worker processes import
this file as their main module, and take their parent with them.
"""

import io
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from data_prep.readers import plain_text
from tests.data_prep.calls import main

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
config, kill_at, count_file = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
plain_text.RANGE_BYTES = 100_000
writes = 0
_open = io.open


def is_last() -> bool:
    """Count a write; return whether the process dies at it."""
    global writes
    writes += 1
    return writes == kill_at


def die() -> None:
    """Kill this process, and the main one if it is another."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def on_change(event: str, _: tuple[Any, ...]) -> None:
    """Die before a file or folder is made, renamed or removed."""
    if event in CHANGES and is_last():
        die()


class Torn:
    """A file whose last write before the kill is torn."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        """Write the data, or half of it and die."""
        if is_last():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            die()
        written: int = self._file.write(data)
        return written


def open_torn(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    """Open a file, as `io.open` does."""
    opened = _open(file, mode, *arguments, **options)
    return opened if mode in ("r", "rb") else Torn(opened)


sys.addaudithook(on_change)
io.open = open_torn  # what pathlib opens files with
if __name__ == "__main__":
    main(config)
    count_file.write_text(str(writes))
