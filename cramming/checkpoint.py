"""Atomic checkpoints: everything that the next step depends on, in one file that is whole or does not exist.

A checkpoint holds weights (and their mean, where one is computed), optimizer state, loss scale, random states
(dropout), the state of hooks (such as the losses by token that weight masks) and the work counters, whose `sequences`
is the data position. Time is stored in the run log (cramming/runlog.py), where every checkpoint is an event before its
file gets its name: a kill in between leaves an event without a file, and a file without an event belongs to another
run. The event has the number of steps of the saved state and the time at which the file was complete. Files are the
newest two, `step-<n>.pt`, and those retained for a replay (cramming/replay.py), `kept-<n>.pt`.
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

MAX_NEWEST = 2  # older `step-<n>.pt` are removed
NEWEST, KEPT = "step", "kept"  # beginnings of file names
BACKGROUND_DEVICES = {"cuda"}  # types of devices for which a thread writes the checkpoints


class Saver:
    """Writer of one run's checkpoints, at most one at a time.

    On a GPU the training thread copies the state to main memory, and another thread hashes and writes the copy while
    training continues: only the copy, and the wait for a checkpoint that is still being written, take training time.
    An error of that thread is raised by the next `check`, `save` or exit. On a CPU, and with several processes, the
    training thread writes: there a copy costs as much as the write, which would compete for the same cores
    (docs/log.md).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *rest: object) -> None:
        """Wait for the last checkpoint; raise its error unless another error is being handled."""
        self._thread.shutdown()
        if error_type is None:
            self.wait()

    def save(
        self,
        folder: Path,
        engine: Engine,
        work: Work,
        log_sha256: Callable[[str], None],
        retain: bool,
    ) -> None:
        """Save as the function `save` does; on a GPU, return once the state is copied."""
        self.wait()
        if engine.device.type not in BACKGROUND_DEVICES or engine.strategy:
            save(folder, engine, work, log_sha256, retain)
            return
        state = copy_to_host(contents(engine, work))
        synchronize(engine.device)
        path = _path(folder, work, retain)
        self._pending = self._thread.submit(_write_checkpoint, path, state, log_sha256)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, without waiting for one that is being written."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written; raise the error of the last one."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()


def save(
    folder: Path,
    engine: Engine,
    work: Work,
    log_sha256: Callable[[str], None],
    retain: bool = False,
) -> Path:
    """Write `folder/step-<n>.pt` and remove all but the newest two of these; `log_sha256` gets the file's hash.

    With `retain` the file is `kept-<n>.pt`, which is never removed. All processes must call this; rank 0 writes.
    """
    state = contents(engine, work)
    path = _path(folder, work, retain)
    if engine.mesh.is_main:
        _write_checkpoint(path, state, log_sha256)
    return path


def _path(folder: Path, work: Work, retain: bool) -> Path:
    kind = KEPT if retain else NEWEST
    return folder / f"{kind}-{work.steps:08d}.pt"


def _write_checkpoint(path: Path, state: dict[str, Any], log_sha256: Callable[[str], None]) -> None:
    overwrite_atomically(path, lambda temporary: log_sha256(_write(state, temporary)))
    for old in _files(path.parent, NEWEST)[MAX_NEWEST:]:
        old.unlink()


def contents(engine: Engine, work: Work) -> dict[str, Any]:
    """Return the contents of a checkpoint of the present state: the whole model, however it is divided among ranks.

    The random states are those of rank 0.
    """
    cpu_state, gpu_state = random_states()
    model, optimizer, strategy = engine.model, engine.optimizer, engine.strategy
    if strategy:
        weights, optimizer_state = strategy.state(optimizer)
    else:
        weights, optimizer_state = model.state_dict(), optimizer.state_dict()
    return {
        "model": weights,
        "optimizer": optimizer_state,
        "scaler": engine.precision.scaler.state_dict(),
        "work": asdict(work),
        "rng": cpu_state,
        "cuda_rng": gpu_state,
        **{hook.name: hook.state_dict() for hook in engine.hooks if hook.name},
    }


@torch.no_grad()
def copy_to_host(state: Any) -> Any:
    """Return an independent copy of nested tensors in main memory; a tensor that occurs twice is copied once.

    Copies of a GPU's tensors are in pinned memory, which torch reuses for the next copy, and complete after
    `synchronize`.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):  # 8-bit state of torchao: codes and scales
            return transform_subclass(tensor, lambda _, part: copied(part))
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if view not in copies:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[view] = copy.copy_(tensor, non_blocking=True)
        return copies[view]

    return tree_map_only(Tensor, copied, state)


def read(path: Path) -> dict[str, Any]:
    """Return the `contents` of a file, in main memory."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class _Hashed(BufferedWriter):
    """File whose SHA-256 is computed while it is written, so that training need not wait for reading it."""

    def __init__(self, path: Path):
        super().__init__(FileIO(path, "wb"))
        self.sha256 = hashlib.sha256()

    def write(self, buffer: Any, /) -> int:
        self.sha256.update(buffer)
        return super().write(buffer)


def _write(state: dict[str, Any], path: Path) -> str:
    """Write a state and return the SHA-256 of the file.

    An OSError is raised as such: torch turns most of them into a RuntimeError.
    """
    try:
        with _Hashed(path) as handle:
            torch.save(state, handle)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return handle.sha256.hexdigest()


def newest_of(folder: Path, known: Sequence[Saved]) -> Saved | None:
    """Return the newest whole checkpoint among the `known` ones, or None if there is no file.

    The SHA-256 detects damage: torch writes checksums but does not compare them, so a flipped bit would pass as a
    weight. Raises UserError if there are files, but none of them is known.
    """
    files = _files(folder)
    for path in files:
        saved = Saved(_steps(path), file_sha256(path))
        if saved in known:
            return saved
        say(f"{path}: damaged, or a checkpoint of another run. Trying the previous one.")
    if files:
        raise UserError(
            f"{folder}: every checkpoint is damaged or of another run. Start again under another name."
        )
    return None


def checkpoint_to_resume(folder: Path, training: Training) -> Saved | None:
    """Return the checkpoint that a process of this run resumes from, or None to begin with the first step.

    Raises UserError if the folder holds checkpoints, but none that the log has.
    """
    checkpoints, ended = folder / "checkpoints", training.finished_after
    known = training.saved
    if ended is not None:
        known = [saved for saved in known if saved.steps == ended]
    newest = newest_of(checkpoints, known)
    if newest is None and ended:
        raise UserError(
            f"{folder}: the run ended after {ended} steps and its last checkpoint is gone."
            " Start again under another name."
        )
    if newest is None and known:
        say(
            f"{checkpoints}: all {len(known)} checkpoints are missing. Training starts anew; the spent time stays"
            " charged."
        )
    return newest


def load(path: Path, engine: Engine) -> Work:
    """Restore a checkpoint, whatever number of processes wrote it; rank 0 alone reads it."""
    state = read(path) if engine.mesh.is_main else {"model": {}, "optimizer": {}}
    weights, optimizer_state = state.pop("model"), state.pop("optimizer")
    if engine.strategy:
        engine.strategy.load_state(engine.optimizer, (weights, optimizer_state))
        state = engine.mesh.object_from_main(state)
    else:
        engine.model.load_state_dict(weights)
        engine.optimizer.load_state_dict(optimizer_state)
    if state["scaler"]:  # empty unless saved in fp16; an fp16 scaler refuses an empty state
        engine.precision.scaler.load_state_dict(state["scaler"])
    for hook in engine.hooks:
        if hook.name:
            hook.load_state_dict(state[hook.name])
    set_random_states((state["rng"], state["cuda_rng"]))
    return Work(**state["work"])


def path_of(folder: Path, saved: Saved) -> Path:
    """Return the path of a checkpoint, whether or not it exists.

    Two files, one of them retained, may have its number: the SHA-256 then decides.
    """
    paths = [path for path in _files(folder) if _steps(path) == saved.steps]
    if not paths:
        return folder / f"{NEWEST}-{saved.steps:08d}.pt"
    if len(paths) > 1:
        for path in paths:
            if file_sha256(path) == saved.sha256:
                return path
    return paths[0]


def _steps(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _files(folder: Path, kind: str = f"{NEWEST}|{KEPT}") -> list[Path]:
    """Return the checkpoints of a folder, newest first."""
    pattern = re.compile(rf"({kind})-\d+")
    paths = [path for path in folder.glob("*.pt") if pattern.fullmatch(path.stem)]
    return sorted(paths, key=_steps, reverse=True)
