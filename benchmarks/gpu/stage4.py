"""Stage 4: `experiment=best` against the crammed BERT's recipe at one size: minutes of training each, then fine-tuning.

A first look at a size that no duel on a CPU reaches: one seed a side, so a difference agrees with a duel's in its sign,
or does not; it finds nothing by itself. The sides have one corpus, one seed, and one budget by the wall clock,
compilation included.
"""

import os
import subprocess
import sys
from functools import partial
from typing import Any

from lab import Lab, Row
from run import end_with_parent

from cramming import CACHE_VARIABLES
from cramming.files import remove
from cramming.record import load_metrics, load_record
from cramming.record_schema import read_record

SIDES = {"crammed BERT": "crammed-bert-day", "best": "best"}
KEPT = (
    "status",
    "steps",
    "tokens",
    "parameters",
    "train_loss",
    "validation",
    "micro_batch",
    "tokens_per_second",
    "model_flops_utilization",
    "compile_seconds",
    "peak_memory_bytes",
    "energy_kwh",
)


def rows(lab: Lab) -> list[Row]:
    """Training first: two calls of run.py are enough for these."""
    trained = [Row(f"minutes: {side}", 530, partial(trained_side, lab, side)) for side in SIDES]
    return [
        *trained,
        *(Row(f"scores: {side}", 120, partial(scored_side, lab, side)) for side in SIDES),
    ]


def overrides(lab: Lab, side: str) -> list[str]:
    """Of both verbs."""
    assert lab.bundle, "--bundle: corpus and tasks are in it"
    return [
        f"experiment={SIDES[side]}",
        *lab.scale.contest,
        f"name={SIDES[side]}",
        f"runs={lab.work / 'contest'}",
        f"data.corpus={lab.bundle / 'corpus'}",
        f"eval.data_dir={lab.bundle / 'glue'}",
        f"device={lab.device.type}",
        f"precision={lab.scale.mode}",
        f"runtime.compile={lab.scale.compiled}",
        f"gates={lab.work / 'gates.json'}",
        "division=open",
    ]


def call(lab: Lab, verb: str, *more: str) -> None:
    command = [sys.executable, "-m", "cramming", verb, *more]
    # A run's own folder for compiled code: in a common one the second side would find what the first has paid for.
    env = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    done = subprocess.run(
        command,
        cwd=lab.work,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        raise RuntimeError(f"{verb} ended with code {done.returncode}: {done.stderr[-1500:]}")


def trained_side(lab: Lab, side: str) -> dict[str, Any]:
    """The record's section, and the validations by seconds on the clock."""
    folder = lab.work / "contest" / SIDES[side]
    remove(folder)  # of a run that was killed: a resume would be charged for starting twice
    call(lab, "pretrain", *overrides(lab, side))
    section, metrics = load_record(folder)["pretrain"], load_metrics(folder)
    curve = [
        (row["seconds"], row["validation_loss"]) for row in metrics if "validation_loss" in row
    ]
    return {"record": {key: section.get(key) for key in KEPT}, "curve": curve}


def scored_side(lab: Lab, side: str) -> dict[str, Any]:
    """Scores of the bundle's tasks by name, three fine-tuning seeds each."""
    folder = lab.left_by(f"minutes: {side}", "contest", SIDES[side])
    call(
        lab,
        "glue",
        *overrides(lab, side),
        *lab.scale.scoring,
        "eval.init=[pretrained]",
        "eval.baselines=false",
    )
    found = read_record(load_record(folder)).trained
    assert found
    return {"scores": {name: task.score for name, task in found.tasks.items()}}
