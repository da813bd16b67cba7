"""Atomic checkpoints: everything that the next step depends on, in one file that is whole or not there.

A checkpoint holds weights (and their mean, where one is made), optimizer state, loss scale, random states (dropout),
losses by token where masks follow them, and the work counters; the data position is `sequences` of the counters. Time
is the journal's (cramming/journal.py), of which every checkpoint is an entry before it gets its name: a kill in between
leaves an entry without a file; a file without an entry is not ours.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from cramming.budget import Work
from cramming.config import Count, Positive, UserError, file_sha256
from cramming.device import random_states, set_random_states
from cramming.files import overwrite_atomically
from cramming.journal import Saved
from cramming.progress import say

KEEP = 2


class Part(Protocol):
    """What a run may have beside model and optimizer: a mean of weights, or losses by token."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save: every so many minutes, and every so many steps if given."""

    every_minutes: Positive
    every_steps: Count | None

    def is_due(self, steps: int, seconds_since_last: float) -> bool:
        """Whether to save after step number `steps`."""
        by_steps = self.every_steps is not None and steps % self.every_steps == 0
        return by_steps or seconds_since_last >= 60 * self.every_minutes


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, work: Work,
    enter: Callable[[str], None], parts: Mapping[str, Part] | None = None,
) -> Path:  # fmt: skip
    """Write `folder/step-<n>.pt` and remove all but the newest two; `enter` puts its SHA-256 on record."""
    cpu_state, gpu_state = random_states()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "work": asdict(work),
        "rng": cpu_state,
        "cuda_rng": gpu_state,
        **{name: part.state_dict() for name, part in (parts or {}).items()},
    }
    path = path_of(folder, work.steps)
    overwrite_atomically(path, lambda temporary: enter(_write(state, temporary)))
    for old in _files(folder)[KEEP:]:
        old.unlink()
    return path


class _Hashed(BufferedWriter):
    """A file whose SHA-256 is known once it is written: training waits, so nothing is read again."""

    def __init__(self, path: Path):
        super().__init__(FileIO(path, "wb"))
        self.sha256 = hashlib.sha256()

    def write(self, buffer: Any, /) -> int:
        self.sha256.update(buffer)
        return super().write(buffer)


def _write(state: dict[str, Any], path: Path) -> str:
    """The file's SHA-256. It is a file of Python's, whose errors are the system's; torch makes its own of most."""
    try:
        with _Hashed(path) as handle:
            torch.save(state, handle)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    return handle.sha256.hexdigest()


def newest_steps(folder: Path) -> int | None:
    """The number in the newest file's name, whosever it is; None where there is none."""
    return next((_steps(path) for path in _files(folder)), None)


def newest_of(folder: Path, known: Sequence[Saved]) -> Saved | None:
    """The newest of the `known` checkpoints that is there, whole; None if there is no file at all.

    The SHA-256 tells damage as well (torch writes checksums but does not compare them: a flipped bit would pass as a
    weight). UserError where there are files, but none of them is known.
    """
    files = _files(folder)
    for path in files:
        saved = Saved(_steps(path), file_sha256(path))
        if saved in known:
            return saved
        say(f"{path}: damaged checkpoint, or another run's: not as it was saved; trying the one before it")
    if files:
        raise UserError(f"{folder}: no checkpoint there is as it was saved; start again under another name")
    return None


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
    parts: Mapping[str, Part] | None = None,
) -> Work:  # fmt: skip
    """Restore a checkpoint."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    for name, part in (parts or {}).items():
        part.load_state_dict(state[name])
    set_random_states((state["rng"], state["cuda_rng"]))
    return Work(**state["work"])


def path_of(folder: Path, steps: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return folder / f"step-{steps:08d}.pt"


def _steps(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _files(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)), reverse=True)
