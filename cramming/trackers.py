"""Copies of the rows of the run log in TensorBoard and Weights & Biases (`--tracker`).

The log is authoritative, so training waits for no tracker: each is imported, opened, fed and closed by a separate
thread, to which `write` passes a row in about 20 microseconds. A tracker that fails reports it in one line and is off
until the process ends. A resumed run continues in the same place: TensorBoard drops rows after the checkpoint, and
Weights & Biases identifies the run by the first line of its log.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

from cramming.config import require
from cramming.progress import say
from cramming.runlog import RUN_LOG, head_of

CLOSE_SECONDS = 60.0  # time limit for writing queued rows after the end of the run


class Tracked(NamedTuple):
    """Run for a tracker: its folder, the number of steps that this process resumes from, and its settings."""

    folder: Path
    steps: int
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Receiver of rows: numbers by name, among them `step`."""

    def write(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `<run>/tensorboard`; `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(folder, purge_step=run.steps + 1, flush_secs=5)

    def write(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Run in `<run>/wandb`, which `wandb sync` uploads, or online if the variable WANDB_MODE says so.

    WANDB_PROJECT and the other variables of the package apply. Rows of validations have separate steps, and a resume
    repeats steps, so `step` is an axis and not the package's counter, which only grows.
    """

    def __init__(self, run: Tracked) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cramming"),
            name=run.folder.name,
            id=(head_of(run.folder / RUN_LOG) or "")[:32],
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row))

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError for an unknown tracker, or one whose package is not installed."""
    for name in names:
        require(
            name in TRACKERS, f"--tracker={name}: no such tracker. Choose {' or '.join(TRACKERS)}."
        )
        require(
            find_spec(name),
            f"--tracker={name}: the package is not installed. pip install 'cramming[{name}]'.",
        )


class _Feed(Thread):
    """Thread that passes rows to one tracker; None ends it."""

    def __init__(self, tracker: str, run: Tracked) -> None:
        super().__init__(name=tracker, daemon=True)
        self.rows: SimpleQueue[Mapping[str, float] | None] = SimpleQueue()
        self._run = run
        self.start()

    def run(self) -> None:
        try:
            tracker = TRACKERS[self.name](self._run)
            while True:
                row = self.rows.get()
                if row is None:
                    break
                tracker.write(row)
            tracker.close()
        except Exception as error:  # no failure of a tracker may stop the run
            reason = " ".join(str(error).split()) or type(error).__name__
            say(
                f"warning: --tracker={self.name}: {reason}. The tracker is off until this process ends; the run log"
                " has all rows."
            )


class Trackers:
    """Trackers of a run, each of which gets every row."""

    def __init__(self, run: Tracked, names: Sequence[str]) -> None:
        self._feeds = [_Feed(name, run) for name in dict.fromkeys(names)]

    def write(self, row: Mapping[str, float]) -> None:
        """Queue a row; rows for a tracker that hangs stay in its queue."""
        for feed in self._feeds:
            feed.rows.put(row)

    def close(self) -> None:
        """Wait up to a minute for queued rows to be written."""
        for feed in self._feeds:
            feed.rows.put(None)
            feed.join(CLOSE_SECONDS)
            if feed.is_alive():
                say(
                    f"warning: --tracker={feed.name}: not done after {CLOSE_SECONDS:.0f} s. The run log has all rows."
                )
