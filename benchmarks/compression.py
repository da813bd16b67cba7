"""Does a run with compressed gradients learn what one with exact sums learns? Four processes on this machine (gloo).

    python benchmarks/compression.py [--steps 400] [--seeds 0 1 2] > benchmarks/results/compression_<device>_<date>.md

Whole `pretrain` runs of the default model on the embedded text, each setting with the same seeds: the pinned validation
loss, its difference from that of the exact sums with the same seed, and beside it what a seed alone changes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cramming.device import describe
from cramming.invocation import Invocation
from cramming.overrides import compose
from cramming.record import load_record

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "none": [],
    "bf16": ["parallel.compression=bf16"],
    "powersgd, rank 4": ["parallel.compression=powersgd"],
    "powersgd, rank 1": ["parallel.compression=powersgd", "parallel.compression.rank=1"],
    "topk, a tenth": ["parallel.compression=topk", "parallel.compression.density=0.1"],
    "topk, a hundredth": ["parallel.compression=topk"],
    "qsgd": ["parallel.compression=qsgd"],
}


def recipe_of(overrides: list[str], steps: int) -> dict[str, Any]:
    """Return the recipe of a run."""
    common = [f"budget.steps={steps}", "train.micro_batch=4", "precision=fp32"]
    return compose([*common, "runtime.compile=off", *overrides])


def train_all(folder: Path, recipes: dict[str, dict[str, Any]]) -> None:
    """Train one run after another, in each of the processes that torchrun starts; all read one corpus."""
    from cramming import launch

    for name, recipe in recipes.items():
        call = Invocation(name, folder / "runs", folder / "corpora", "cpu")
        launch.main(recipe, call)


def main() -> None:
    """Train all cases with all seeds and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--jobs", type=Path)
    asked = parser.parse_args()
    if asked.jobs:
        train_all(asked.jobs.parent, json.loads(asked.jobs.read_text()))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, environment = (
            Path(name),
            {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        prepare = [sys.executable, "-m", "cramming", "prepare", "--corpora", f"{folder}/corpora"]
        subprocess.run(prepare, check=True, env=environment, stdout=sys.stderr)
        jobs = {
            f"{number}-{seed}": recipe_of([*overrides, f"seed={seed}"], asked.steps)
            for number, overrides in enumerate(CASES.values())
            for seed in asked.seeds
        }
        (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={asked.processes}",
            __file__,
        ]
        command = [sys.executable, *launch, "--jobs", str(folder / "jobs.json")]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        losses = {
            run: load_record(folder / "runs" / run)["pretrain"]["validation"]["loss"]
            for run in jobs
        }
    print(
        f"`python benchmarks/compression.py {' '.join(sys.argv[1:])}`, torch {torch.__version__}, {describe(CPU).name}"
    )
    print(f"\n{asked.processes} processes, {asked.steps} steps, seeds {asked.seeds}\n")
    print(
        "| gradients | validation loss | beside exact sums of the same seed | spread of it |\n|---|---|---|---|"
    )
    for number, case in enumerate(CASES):
        final_losses = [losses[f"{number}-{seed}"] for seed in asked.seeds]
        beside = [losses[f"{number}-{seed}"] - losses[f"0-{seed}"] for seed in asked.seeds]
        spread = (
            statistics.stdev(beside if number else final_losses)
            if len(final_losses) > 1
            else float("nan")
        )
        label = "of the loss over seeds: " * (number == 0)
        print(
            f"| {case} | {statistics.mean(final_losses):.4f} | {statistics.mean(beside):+.4f} | {label}{spread:.4f} |"
        )
    print(f"\nRaw, number of the row and seed:\n\n```json\n{json.dumps(losses)}\n```")


if __name__ == "__main__":
    main()
