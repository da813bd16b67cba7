"""Atomic checkpoints: everything that the next step depends on, in one file that is whole or not there.

A checkpoint holds weights (and their mean, where one is made), optimizer state, loss scale, random states (dropout),
losses by token where masks follow them, and the work counters; the data position is `sequences` of the counters. Time
is the run log's (cramming/runlog.py), in which every checkpoint is an event before it gets its name: a kill in between
leaves an event without a file; a file without an event is not ours. The event has the number of steps of the saved
state and the time at which the file was whole. The newest two are there, `step-<n>.pt`, and those that are kept for a
replay (cramming/replay.py), `kept-<n>.pt`.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_map_only

from cramming.budget import Work
from cramming.config import UserError, file_sha256
from cramming.device import random_states, set_random_states, synchronize
from cramming.engine import Engine
from cramming.files import overwrite_atomically
from cramming.progress import say
from cramming.runlog import Saved, Training

KEEP = 2
NEWEST, KEPT = "step", "kept"  # how a file's name begins
BACKGROUND_DEVICES = {"cuda"}  # where a thread writes the checkpoints


class Saver:
    """Writer of one run's checkpoints, at most one at a time.

    On a GPU the training thread copies the state to main memory, and a thread hashes and writes the copy while training
    continues: nothing but the copy, and the wait for a checkpoint that is still being written, holds training up. An
    error of that thread is raised by the next `check`, `save` or exit. On a CPU, and of several processes, the training
    thread writes: there a copy costs as much as the write does, which would compete for the same cores (docs/log.md).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *rest: object) -> None:
        """Wait for the last checkpoint; its error is raised unless another is already under way."""
        self._thread.shutdown()
        if error_type is None:
            self.wait()

    def save(
        self, folder: Path, engine: Engine, work: Work, enter: Callable[[str], None], kept: bool
    ) -> None:
        """Save as the function `save` does; on a GPU, return once the state is copied."""
        self.wait()
        if engine.device.type not in BACKGROUND_DEVICES or engine.spread:
            save(folder, engine, work, enter, kept)
            return
        state = copy_to_host(contents(engine, work))
        synchronize(engine.device)
        path = _path(folder, work, kept)
        self._pending = self._thread.submit(_write_checkpoint, path, state, enter)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written; do not wait for one that still is."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return once no checkpoint is being written; raise the error of the one that was."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()


def save(
    folder: Path, engine: Engine, work: Work, enter: Callable[[str], None], kept: bool = False
) -> Path:
    """Write `folder/step-<n>.pt` and remove all but the newest two of these; `enter` puts its SHA-256 on record.

    With `kept` it is `kept-<n>.pt`, which stays. Of several processes all call this, and rank 0 writes.
    """
    state = contents(engine, work)
    path = _path(folder, work, kept)
    if engine.mesh.is_main:
        _write_checkpoint(path, state, enter)
    return path


def _path(folder: Path, work: Work, kept: bool) -> Path:
    kind = KEPT if kept else NEWEST
    return folder / f"{kind}-{work.steps:08d}.pt"


def _write_checkpoint(path: Path, state: dict[str, Any], enter: Callable[[str], None]) -> None:
    overwrite_atomically(path, lambda temporary: enter(_write(state, temporary)))
    for old in _files(path.parent, NEWEST)[KEEP:]:
        old.unlink()


def contents(engine: Engine, work: Work) -> dict[str, Any]:
    """What a checkpoint of the present state holds: the whole model, however it is spread; rank 0's random states."""
    cpu_state, gpu_state = random_states()
    model, optimizer, spread = engine.model, engine.optimizer, engine.spread
    weights, own = (
        spread.state(optimizer) if spread else (model.state_dict(), optimizer.state_dict())
    )
    return {
        "model": weights,
        "optimizer": own,
        "scaler": engine.precision.scaler.state_dict(),
        "work": asdict(work),
        "rng": cpu_state,
        "cuda_rng": gpu_state,
        **{hook.name: hook.state_dict() for hook in engine.hooks if hook.name},
    }


@torch.no_grad()
def copy_to_host(state: Any) -> Any:
    """Return a copy of nested tensors in main memory, independent of them; tensors that are one remain one.

    Of a GPU's tensors it is in pinned memory, which torch keeps for the next copy, and complete after a `synchronize`.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):  # an 8-bit state of torchao: codes and scales
            return transform_subclass(tensor, lambda _, part: copied(part))
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if view not in copies:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[view] = copy.copy_(tensor, non_blocking=True)
        return copies[view]

    return tree_map_only(Tensor, copied, state)


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
        say(
            f"{path}: damaged checkpoint, or another run's: not as it was saved; trying the one before it"
        )
    if files:
        raise UserError(
            f"{folder}: no checkpoint there is as it was saved; start again under another name"
        )
    return None


def checkpoint_to_resume(folder: Path, training: Training) -> Saved | None:
    """Return the checkpoint that a process of this run begins with; None where it begins with the first step.

    Raises UserError where the folder holds checkpoints that the log does not have.
    """
    checkpoints, ended = folder / "checkpoints", training.finished_after
    known = [saved for saved in training.saved if ended in (None, saved.steps)]
    newest = newest_of(checkpoints, known)
    if newest is None and ended:
        raise UserError(
            f"{folder}: the run ended after {ended} steps and its last checkpoint is gone."
            " Start again under another name."
        )
    if newest is None and known:
        say(
            f"{checkpoints}: nothing is left of {len(known)} checkpoints; training begins anew, the time stays spent"
        )
    return newest


def load(path: Path, engine: Engine) -> Work:
    """Restore a checkpoint, whatever number of processes made it; of several, rank 0 alone reads it."""
    state = read(path) if engine.mesh.is_main else {"model": {}, "optimizer": {}}
    weights, own = state.pop("model"), state.pop("optimizer")
    if engine.spread:
        engine.spread.load_state(engine.optimizer, (weights, own))
        state = engine.mesh.object_from_main(state)
    else:
        engine.model.load_state_dict(weights)
        engine.optimizer.load_state_dict(own)
    if state["scaler"]:  # what other devices and formats leave empty an fp16 scaler would refuse
        engine.precision.scaler.load_state_dict(state["scaler"])
    for hook in engine.hooks:
        if hook.name:
            hook.load_state_dict(state[hook.name])
    set_random_states((state["rng"], state["cuda_rng"]))
    return Work(**state["work"])


def path_of(folder: Path, saved: Saved) -> Path:
    """Where a checkpoint lies, or would lie. Two files, one kept, may have its number: then the SHA-256 tells."""
    found = [path for path in _files(folder) if _steps(path) == saved.steps]
    found = [
        path for path in found if len(found) == 1 or file_sha256(path) == saved.sha256
    ] or found
    return found[0] if found else folder / f"{NEWEST}-{saved.steps:08d}.pt"


def _steps(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _files(folder: Path, kind: str = f"{NEWEST}|{KEPT}") -> list[Path]:
    """Checkpoints, newest first."""
    return sorted(
        (path for path in folder.glob("*.pt") if re.fullmatch(rf"({kind})-\d+", path.stem)),
        key=_steps,
        reverse=True,
    )
