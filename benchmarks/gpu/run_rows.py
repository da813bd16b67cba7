"""Rows that start other processes: tests and warm-ups beside each other, and a run that is killed and resumed."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import Lab, Result
from processes import Jobs, kill, start, tail
from shards import Shards, tell_tests

from cramming.config import UserError
from cramming.files import remove
from cramming.record import load_metrics, load_record
from cramming.runlog import RUN_LOG, Checkpoint, Resume, Start, read_log

NAME = "killed-and-resumed"
REMAINING_SECONDS = 90.0
RECORD_FIELDS = (
    "status",
    "steps",
    "tokens",
    "train_loss",
    "validation",
    "micro_batch",
    "energy_kwh",
)
POLL_SECONDS = 0.05
CHECKPOINTS = "step-*.pt"  # not the kept one of the state before the first step


def tests_and_warm_up(lab: Lab) -> Result:
    """Run the quick tests and the warm-ups beside each other for some time; nothing is timed."""
    warm_ups: Jobs = lab.shared["warm-ups"]
    lab.go.touch()
    shards = Shards(lab.work, lab.device.type, lab.scale.tests, lab.scale.shards)
    _run([shards, warm_ups], lab.scale.untimed)
    return {"warmed": warm_ups.outcomes, **shards.summary()}


def remaining_tests(lab: Lab) -> Result:
    """Run the tests that compile for long, and those that were cut off."""
    if lab.device.type == "cpu":
        raise UserError("--device cpu: these tests compile for a GPU. Use --device cuda.")
    shards = Shards(lab.work, lab.device.type, "", lab.scale.shards)
    _run([shards], REMAINING_SECONDS)
    return shards.summary()


def _run(groups: list[Jobs], seconds: float) -> None:
    """Run all jobs until they have ended or the time is over."""
    until = time.monotonic() + seconds
    try:
        running = groups
        while running and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            running = [jobs for jobs in running if jobs.poll()]
    finally:
        for jobs in groups:
            jobs.end()


def tell_warm_up(result: Result) -> str:
    """Return the tests' counts, how each warm-up ended, and the tests that failed."""
    line, *failed = tell_tests(result).splitlines()
    warmed = [f"{name.removeprefix('ours ')} {how}" for name, how in result["warmed"].items()]
    return "\n".join([f"{line}; warm: {', '.join(warmed)}", *failed])


def killed_and_resumed(lab: Lab) -> Result:
    """Pretrain on the bundle's corpus: kill -9 behind the first checkpoint, then resume to the end of the budget."""
    if lab.bundle is None:
        raise UserError("--bundle: the corpus is in it. Name the folder.")
    folder, log = lab.work / "runs" / NAME, lab.work / "pretrain.log"
    remove(folder)  # of a row that was cut off
    command, began = _command(lab, folder), time.monotonic()
    process = start(command, log)
    try:
        while process.poll() is None and not list(folder.rglob(CHECKPOINTS)):
            time.sleep(POLL_SECONDS)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"it ended before it was killed: {tail(log)}")
        lab.note(killed_after=time.monotonic() - began)
        process = start([*command, "--resume"], log)
        if process.wait():
            raise RuntimeError(f"it did not resume: {tail(log)}")
        step = resumed_step(folder)
        if step == 0:
            raise RuntimeError(f"it did not resume from a checkpoint: {tail(log)}")
    finally:
        kill(process)
    section, metrics = load_record(folder)["pretrain"], load_metrics(folder)
    rows = [row for row in metrics if "loss" in row]
    losses = [(row["step"], row["loss"]) for row in rows]
    return {
        "resumed_step": step,
        "record": {key: section.get(key) for key in RECORD_FIELDS},
        "losses": losses[:: max(1, len(losses) // 40)],
        "tokens_per_second": training_rate([row for row in rows if row["step"] > step]),
        "processes": section["budget"]["processes"],
        "exported": (folder / "final").exists(),
    }


def training_rate(rows: Sequence[dict[str, Any]]) -> float:
    """Return the tokens/s between the first and the last of these rows, without a start; 0 with fewer than two."""
    if len(rows) < 2:
        return 0.0
    first, last = rows[0], rows[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def resumed_step(folder: Path) -> int:
    """Return the step of the checkpoint with which the last process of a run began; 0 if it began anew."""
    steps: dict[str | None, int] = {}
    resumed = 0
    has_resumed = False
    for entry in read_log(folder / RUN_LOG):
        event = entry.event
        if isinstance(event, Start):
            resumed, has_resumed = 0, False
        elif isinstance(event, Checkpoint):
            steps[event.sha256] = event.step
        elif isinstance(event, Resume) and not has_resumed:  # later ones roll back
            resumed, has_resumed = steps.get(event.sha256, 0), True
    return resumed


def tell_run(result: Result) -> str:
    """Return how far the run came, and its loss."""
    record, losses = result["record"], result["losses"]
    validation = (record["validation"] or {}).get("loss", float("nan"))
    return (
        f"{record['status']}, {record['steps']} steps, {record['tokens']:,} tokens,"
        f" {result['tokens_per_second']:,.0f} tok/s, killed after {result['killed_after']:.0f} s,"
        f" resumed from step {result['resumed_step']},"
        f" loss {losses[0][1]:.2f} to {losses[-1][1]:.2f}, validation {validation:.2f}"
        + ("" if result["exported"] else ", NOT exported")
    )


def _command(lab: Lab, folder: Path) -> list[str]:
    """Return the verb `pretrain` with the step of the row of bert-base, whose code is compiled already."""
    scale = lab.scale
    length = scale.lengths[0]
    overrides = lab.overrides("bert-base", length)
    return [
        *(sys.executable, "-m", "cramming", "pretrain"),
        *(text for text in overrides if not text.startswith("model.vocab_size")),
        *scale.budget,
        *("--name", folder.name, "--runs", str(folder.parent), "--device", lab.device.type),
        f"data.corpus={lab.bundle}/corpus",
        f"gates={lab.work / 'gates.json'}",
        f"train.batch_size={scale.batch // length}",
        f"train.micro_batch={scale.micro // length}",
        "schedule=linear",
        "optim.lr=0.0005",
        "train.validations=2",
        f"train.validation_tokens={2 * scale.micro}",
        "division=open",
    ]
