"""Trackers get the rows of the run log; training neither waits for them nor ends with them."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cramming import trackers
from cramming.config import UserError
from cramming.record import load_metrics
from cramming.runlog import RUN_LOG, head_of
from cramming.trackers import Tracked, Trackers
from tests.conftest import before_step

ROW = {"step": 1, "loss": 5.5}


class Held:
    """Opens once it may, and keeps the rows."""

    may_open, rows = Event(), list[Mapping[str, float]]()

    def __init__(self, run: Tracked) -> None:
        assert self.may_open.wait(60)

    def write(self, row: Mapping[str, float]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.rows.append({"step": -1})


def test_training_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Held)
    feeds = Trackers(Tracked(tmp_path, 0, {}), ["wandb"])
    feeds.write(ROW)
    assert not Held.rows
    Held.may_open.set()
    feeds.close()
    assert Held.rows == [ROW, {"step": -1}]


def test_a_tracker_that_fails_is_off_and_the_run_goes_on(
    start: Callable[..., Path],
    unbroken: Path,
    losses: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Full(Held):
        def write(self, row: Mapping[str, float]) -> None:
            raise OSError("no room\nleft")

    Held.may_open.set()
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Full)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    assert losses(start(trackers=("tensorboard",))) == losses(unbroken)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "--tracker" in line]
    assert len(warnings) == 1 and warnings[0].startswith(
        "warning: --tracker=tensorboard: no room left"
    )


def test_a_package_that_is_missing_is_said_before_the_run(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--tracker=wandb: the package is not installed"):
        start(trackers=("wandb",))
    assert not (tmp_path / "runs" / "default" / "record.json").exists()


def stopped_and_resumed(
    start: Callable[..., Path], *trackers: str, folder: Path | None = None
) -> Path:
    """Stopped after 7 steps. The checkpoint of that is lost in `folder`, so steps 6 and 7 are tracked twice."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        before_step(patch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
        start("checkpoint.every_steps=5", trackers=trackers)
    if folder:
        (newest,) = folder.glob("runs/*/checkpoints/step-00000007.pt")
        newest.unlink()
    return start(resume=True, trackers=trackers)


@pytest.mark.parametrize("loses", [False, True])
def test_tensorboard_has_the_rows_of_a_stopped_and_resumed_run(
    start: Callable[..., Path], tmp_path: Path, loses: bool
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = stopped_and_resumed(start, "tensorboard", folder=tmp_path if loses else None)
    events = reader.EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0}
    ).Reload()
    rows = load_metrics(run)
    numbers = {
        name for row in rows for name, value in row.items() if isinstance(value, int | float)
    }
    assert numbers - {"step"} | {"tokens_per_second"} == set(events.Tags()["scalars"])
    for name in ("loss", "lr", "validation_loss"):
        expected = [
            (row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row
        ]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected, name


@pytest.mark.slow
def test_weights_and_biases_offline_has_one_run(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = stopped_and_resumed(start, "wandb")
    name = (head_of(run / RUN_LOG) or "")[:32]
    files = [
        file.read_bytes()
        for file in sorted((run / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    ]
    assert len(files) == 2  # of one run, a file for each process
    for row in load_metrics(run):
        assert any(json.dumps(row["tokens"]).encode() in file for file in files)
