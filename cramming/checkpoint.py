"""Atomic checkpoints: everything that the next step depends on, in one file that is whole or not there.

A checkpoint holds weights, optimizer state, loss scale, random states (dropout) and the work counters; the data
position is `sequences` of the counters. It deliberately says nothing about time: that is the journal's
(cramming/budget.py).
"""

import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cramming.budget import Work
from cramming.config import UserError
from cramming.device import random_states, set_random_states
from cramming.files import overwrite_atomically
from cramming.progress import say

KEEP = 2


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save: every so many minutes, and every so many steps if given."""

    every_minutes: float
    every_steps: int | None

    def __post_init__(self) -> None:
        if self.every_minutes <= 0 or (self.every_steps is not None and self.every_steps <= 0):
            raise ValueError("every_minutes and every_steps must be above 0 (every_steps: null turns it off)")

    def is_due(self, steps: int, seconds_since_last: float) -> bool:
        """Whether to save after step number `steps`."""
        by_steps = self.every_steps is not None and steps % self.every_steps == 0
        return by_steps or seconds_since_last >= 60 * self.every_minutes


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, work: Work
) -> Path:
    """Write `folder/step-<n>.pt` and remove all but the newest two."""
    cpu_state, gpu_state = random_states()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "work": asdict(work),
        "rng": cpu_state,
        "cuda_rng": gpu_state,
    }
    path = folder / f"step-{work.steps:08d}.pt"
    overwrite_atomically(path, lambda temporary: _write(state, temporary))
    for old in _files(folder)[KEEP:]:
        old.unlink()
    return path


def _write(state: dict[str, Any], path: Path) -> None:
    """Through a file of Python's, whose errors say what the system said; torch makes its own of most of them."""
    try:
        with path.open("wb") as handle:
            torch.save(state, handle)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_newest(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> Work | None:
    """Restore the newest checkpoint that can be read; None if there is none at all. UserError if all are damaged."""
    files = _files(folder)
    for path in files:
        try:
            state = _read(path)
        except Exception as error:  # a damaged file fails in many ways: zip, pickle, end of file
            say(f"{path}: damaged checkpoint ({type(error).__name__}), trying the one before it")
            continue
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        set_random_states((state["rng"], state["cuda_rng"]))
        return Work(**state["work"])
    if files:
        raise UserError(f"{folder}: no checkpoint there can be read; start again under another name")
    return None


def _read(path: Path) -> dict[str, Any]:
    """The file's content. torch writes checksums but does not compare them: a flipped bit would pass as a weight."""
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken:
        raise zipfile.BadZipFile(broken)
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _files(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    return sorted((p for p in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", p.name)), reverse=True)
