"""A process that dies at its n-th file operation, simulated in this one.

Every write to the run log, every fsync, and every opening for writing, rename, removal and making of a folder below the
watched folder is an operation. The chosen one raises `Crash` (a write is cut in half first), and so do all that follow:
nothing that a dead process could not have done reaches the disk.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from cramming import runlog
from cramming.budget import BudgetClock
from cramming.files import LOCK

_AUDITED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
_active: "Faults | None" = None


class Crash(BaseException):
    """The process is gone; nothing catches it."""


class Faults:
    """Counts the operations below `folder`, and dies at number `crash_at` (from 1; None: never)."""

    def __init__(self, folder: Path, crash_at: int | None = None) -> None:
        self.folder = str(folder)
        self.crash_at = crash_at
        self.names: list[str] = []
        self.is_dead = False

    def operation(self, name: str) -> None:
        """Count an operation; raises Crash if it is the chosen one, or a later one."""
        self.names.append(name)
        if self.is_dead or len(self.names) == self.crash_at:
            self.is_dead = True
            raise Crash(name)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what Python reports of the file system."""
        if event not in _AUDITED or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        if not path.startswith(self.folder) or path.endswith(LOCK):
            return
        is_reading = event == "open" and not _writes(arguments[1], arguments[2])
        if not is_reading:
            self.operation(f"{event} {Path(path).name}")


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


class _LogFile(FileIO):
    """The file of a run log, whose writes are operations."""

    def write(self, data: Any, /) -> int:
        if _active is not None:
            try:
                _active.operation("write run.jsonl")
            except Crash:
                if len(_active.names) == _active.crash_at:
                    super().write(bytes(data)[: len(data) // 2])
                raise
        return super().write(data)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None:
        _active.audit(event, arguments)


sys.addaudithook(_audit)


@contextmanager
def dying_at(folder: Path, crash_at: int | None = None) -> Iterator[Faults]:
    """Watch operations below `folder`; heartbeats are off, so that each run has the same ones."""
    global _active
    faults = Faults(folder, crash_at)
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        faults.operation("fsync")
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", counted)
        patch.setattr(runlog, "FileIO", _LogFile)
        patch.setattr(BudgetClock, "_beat", lambda self: None)
        _active = faults
        try:
            yield faults
        finally:
            _active = None
