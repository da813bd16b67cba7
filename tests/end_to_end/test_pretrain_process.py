"""What only a process of its own can show: kill -9, the time budget from the first instruction, Ctrl-C, two ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import launch
from cramming.invocation import Invocation
from cramming.record import load_metrics, load_record

# As `python -m cramming`, but the process kills itself at the beginning of a step: no handler runs, nothing is flushed.
KILLED_AT = """
import os, signal, sys
from cramming import cli
from cramming.engine import Engine
original, calls = Engine.forward_backward, [0]
def forward_backward(self, *arguments, **named):
    calls[0] += 1
    if calls[0] == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *arguments, **named)
Engine.forward_backward = forward_backward
cli.main()
"""

# As `python -m cramming`, but each process keeps the weights that it starts with, in $WEIGHTS-<rank>.pt.
WEIGHTS_AT_THE_START = """
import os, torch
from cramming import cli
from cramming.starts import cooccurrence as start
original = start.set_weights
def set_weights(engine, *arguments):
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    original(engine, *arguments)
    assert any(not torch.equal(p, before[name]) for name, p in engine.model.named_parameters())
    torch.save(engine.model.state_dict(), f"{os.environ['WEIGHTS']}-{engine.mesh.rank}.pt")
start.set_weights = set_weights
cli.main()
"""

NAME = ("--name", "a", "--device", "cpu")


def command(
    tiny_overrides: list[str], runs: Path, *overrides: str, killed_at: int | None = None
) -> list[str]:
    program = ["-m", "cramming"] if killed_at is None else ["-c", KILLED_AT.format(step=killed_at)]
    return [sys.executable, *program, "pretrain", "--runs", str(runs), *tiny_overrides, *overrides]


def processes(run: Path) -> list[dict[str, Any]]:
    """The processes of a run, as its record has them."""
    recorded: list[dict[str, Any]] = load_record(run)["pretrain"]["budget"]["processes"]
    return recorded


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in load_metrics(run) if "loss" in row]


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: list[str]) -> Path:
    """A run that was killed at step 9, after the checkpoint of step 6."""
    runs = tmp_path_factory.mktemp("killed")
    arguments = command(tiny_overrides, runs, *NAME, "checkpoint.every_steps=3", killed_at=9)
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    return runs / "a"


@pytest.fixture(scope="module")
def start_seconds(killed_run: Path) -> float:
    """Return the seconds from the start of a process to its training, on this machine now."""
    return float(processes(killed_run)[-1]["spent_seconds"])


def test_kill_9_and_resume_equals_unbroken_bit_for_bit(
    killed_run: Path,
    start_seconds: float,
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> None:
    """The resumed one and the unbroken one run in this process."""
    run, whole = killed_run, tmp_path / "a"
    assert load_record(run)["pretrain"]["status"] == "running"
    assert not (run / "final").exists()
    recipe = compose(*tiny_overrides, "checkpoint.every_steps=3")
    launch.main(recipe, Invocation("a", run.parent, device="cpu", resume=True))
    launch.main(recipe, Invocation("a", whole.parent, device="cpu"))
    assert losses(run) == losses(whole)
    for key in ("final_sha256", "steps", "tokens", "validation", "train_loss"):
        assert load_record(run)["pretrain"][key] == load_record(whole)["pretrain"][key]
    assert [process["ended"] for process in processes(run)] == [
        "killed",
        "finished",
    ]


def test_a_time_budget_holds_over_kill_9_and_resume(
    start_seconds: float, tmp_path: Path, tiny_overrides: list[str]
) -> None:
    """The processes together, interpreter start and imports included, get no second more than the budget."""
    limit = 2.5 * start_seconds + 2.0
    overrides = [
        *NAME,
        "checkpoint.every_steps=3",
        "budget.steps=null",
        "budget.heartbeat_seconds=0.2",
    ]
    overrides += [f"budget.hours={limit / 3600}", "train.log_every=20"]
    began = time.monotonic()
    killed = subprocess.run(
        command(tiny_overrides, tmp_path, *overrides, killed_at=10), check=False
    )
    if killed.returncode == 2:
        pytest.skip(f"this machine is too busy now to start a process in {limit:.0f} s")
    assert killed.returncode == -signal.SIGKILL
    alive = time.monotonic() - began
    (first,) = processes(tmp_path / "a")
    assert alive - 1.0 < first["spent_seconds"] <= alive

    done = subprocess.run(
        command(tiny_overrides, tmp_path, *overrides, "--resume"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    section = load_record(tmp_path / "a")["pretrain"]
    budget = section["budget"]
    assert section["status"] == "finished"
    assert budget["overrun_seconds"] == 0.0
    assert budget["spent_seconds"] <= limit
    assert [p["ended"] for p in budget["processes"]] == ["killed", "finished"]
    if (
        first["spent_seconds"] < limit / 3
    ):  # else the second process may be too slow to reach a step
        assert section["steps"] > 10
        assert budget["spent_seconds"] > first["spent_seconds"]


def test_ctrl_c_ends_with_130_and_the_run_can_go_on(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    process = subprocess.Popen(
        command(tiny_overrides, tmp_path, *NAME, "budget.steps=1000000", "train.validations=0"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 60
    while len(losses(tmp_path / "a")) < 3 and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    section = load_record(tmp_path / "a")["pretrain"]
    assert section["status"] == "interrupted"
    assert section["steps"] >= 3
    newest = max((tmp_path / "a" / "checkpoints").iterdir())
    assert newest.name == f"step-{section['steps']:08d}.pt"


@pytest.mark.slow
def test_two_ranks_equal_one(
    tmp_path: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> None:
    """Losses are equal, with masks that follow those of all ranks.

    A second start of the finished run has nothing to do, on every rank.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "cramming",
    ]
    by_loss = ["objective=mlm-by-loss", "objective.power=100"]
    arguments = ["pretrain", *tiny_overrides, *by_loss, f"--runs={tmp_path}", "--name=two"]
    subprocess.run(
        [*torchrun, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=180
    )
    launch.main(compose(*tiny_overrides, *by_loss), Invocation("one", tmp_path, device="cpu"))
    single, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [step for step, _ in two] == [step for step, _ in single]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in single], rel=1e-4)
    section = load_record(tmp_path / "two")["pretrain"]
    assert section["devices"] == 2
    assert section["tokens"] == load_record(tmp_path / "one")["pretrain"]["tokens"]
    finished = subprocess.run(
        [*torchrun, *arguments, "--resume"],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert finished.returncode == 0


@pytest.mark.slow
def test_a_start_from_counts_is_the_same_on_both_ranks(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    """Rank 0 alone counts; the other begins with its vectors, and both with those of a run of one process."""
    program = tmp_path / "program.py"
    program.write_text(WEIGHTS_AT_THE_START)
    arguments = [
        "pretrain",
        *tiny_overrides,
        f"--runs={tmp_path}",
        "start=cooccurrence",
        "budget.steps=1",
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, launcher in (("one", []), ("two", torchrun)):
        subprocess.run(
            [sys.executable, *launcher, str(program), *arguments, f"--name={name}"],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "WEIGHTS": str(tmp_path / name)},
            timeout=180,
        )
    single, first, second = (
        torch.load(tmp_path / name) for name in ("one-0.pt", "two-0.pt", "two-1.pt")
    )
    for name, weight in single.items():
        assert torch.equal(first[name], weight) and torch.equal(second[name], weight), name
