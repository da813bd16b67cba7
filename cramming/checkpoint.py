"""Atomic checkpoints: everything that the next step depends on, in one file that is whole or not there.

A checkpoint holds weights (and their mean, where one is made), optimizer state, loss scale, random states (dropout),
losses by token where masks follow them, and the work counters; the data position is `sequences` of the counters. Time
is the journal's (cramming/journal.py), of which every checkpoint is an entry before it gets its name: a kill in between
leaves an entry without a file; a file without an entry is not ours. The newest two are there, `step-<n>.pt`, and those
that are kept for a replay (cramming/replay.py), `kept-<n>.pt`.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cramming.budget import Work
from cramming.config import Count, Fraction, Positive, UserError, file_sha256
from cramming.device import random_states, set_random_states
from cramming.files import overwrite_atomically
from cramming.journal import Saved
from cramming.progress import say

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from cramming.parallel.spread import Spread

KEEP = 2
NEWEST, KEPT = "step", "kept"  # how a file's name begins


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save: every so many minutes, every so many steps if given, and to be kept at these shares of the budget,
    of which 0 is before the first step."""

    every_minutes: Positive
    every_steps: Count | None
    keep_at: tuple[Fraction, ...] = ()

    def is_due(self, steps: int, seconds_since_last: float) -> bool:
        """Whether to save after step number `steps`."""
        by_steps = self.every_steps is not None and steps % self.every_steps == 0
        return by_steps or seconds_since_last >= 60 * self.every_minutes

    def is_to_keep(self, before: float, now: float) -> bool:
        """Whether one of the shares was reached between the ends of two steps, at progress `before` and `now`."""
        return any(before < share <= now for share in self.keep_at)


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, work: Work,
    enter: Callable[[str], None], parts: "Mapping[str, Stateful] | None" = None, kept: bool = False,
    spread: "Spread | None" = None,
) -> Path:  # fmt: skip
    """Write `folder/step-<n>.pt` and remove all but the newest two of these; `enter` puts its SHA-256 on record.

    With `kept` it is `kept-<n>.pt`, which stays. With `spread` all processes call this, and rank 0 writes.
    """
    state = contents(model, optimizer, scaler, work, parts, spread)
    path = folder / f"{KEPT if kept else NEWEST}-{work.steps:08d}.pt"
    if spread and not spread.mesh.is_main:
        return path
    overwrite_atomically(path, lambda temporary: enter(_write(state, temporary)))
    for old in _files(folder, NEWEST)[KEEP:]:
        old.unlink()
    return path


def contents(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, work: Work,
    parts: "Mapping[str, Stateful] | None" = None, spread: "Spread | None" = None,
) -> dict[str, Any]:  # fmt: skip
    """What a checkpoint of the present state holds: the whole model, however it is spread; rank 0's random states."""
    cpu_state, gpu_state = random_states()
    weights, own = spread.state(optimizer) if spread else (model.state_dict(), optimizer.state_dict())
    return {
        "model": weights,
        "optimizer": own,
        "scaler": scaler.state_dict(),
        "work": asdict(work),
        "rng": cpu_state,
        "cuda_rng": gpu_state,
        **{name: part.state_dict() for name, part in (parts or {}).items()},
    }


def read(path: Path) -> dict[str, Any]:
    """The `contents` of a file, in main memory."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


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
    parts: "Mapping[str, Stateful] | None" = None, spread: "Spread | None" = None,
) -> Work:  # fmt: skip
    """Restore a checkpoint, whatever number of processes made it; with `spread` rank 0 alone reads it."""
    state = read(path) if not spread or spread.mesh.is_main else {"model": {}, "optimizer": {}}
    weights, own = state.pop("model"), state.pop("optimizer")
    if spread:
        spread.load_state(optimizer, (weights, own))
        state = spread.mesh.object_from_main(state)
    else:
        model.load_state_dict(weights)
        optimizer.load_state_dict(own)
    if state["scaler"]:  # what other devices and formats leave empty an fp16 scaler would refuse
        scaler.load_state_dict(state["scaler"])
    for name, part in (parts or {}).items():
        part.load_state_dict(state[name])
    set_random_states((state["rng"], state["cuda_rng"]))
    return Work(**state["work"])


def path_of(folder: Path, saved: Saved) -> Path:
    """Where a checkpoint lies, or would lie. Two files, one kept, may have its number: then the SHA-256 tells."""
    found = [path for path in _files(folder) if _steps(path) == saved.steps]
    found = [path for path in found if len(found) == 1 or file_sha256(path) == saved.sha256] or found
    return found[0] if found else folder / f"{NEWEST}-{saved.steps:08d}.pt"


def _steps(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _files(folder: Path, kind: str = f"{NEWEST}|{KEPT}") -> list[Path]:
    """Checkpoints, newest first."""
    return sorted(
        (path for path in folder.glob("*.pt") if re.fullmatch(rf"({kind})-\d+", path.stem)), key=_steps, reverse=True
    )
