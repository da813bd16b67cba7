"""Seconds from the start of `cramming pretrain` to its first optimizer step, and how many of them are imports.

    python benchmarks/startup.py --rounds 5 --out benchmarks/results/startup_cpu_<date>.md

A tiny model on the embedded corpus, which is prepared first and not counted; compile off. The time is the run's own
(the run log counts from the operating system's start of the process); the imports are those of another such run under
`python -X importtime`, which slows them a little: the sum of what every module took without those it imported.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from cramming.record import load_metrics

SETTINGS = ["data.size=200000", "tokenizer.vocab_size=1024", "budget.steps=1", "train.log_every=1"]
CPU = ("--device", "cpu")


def call(folder: Path, verb: str, *more: str, python: tuple[str, ...] = ()) -> str:
    """Run a verb in `folder`; what it wrote to stderr."""
    command = [sys.executable, *python, "-m", "cramming", verb, *SETTINGS, *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


def first_step_seconds(folder: Path, name: str) -> float:
    """From the process's start to its first step's end."""
    call(folder, "pretrain", *CPU, "--name", name)
    rows = load_metrics(folder / "runs" / name)
    return float(next(row["seconds"] for row in rows if row["step"] == 1 and "loss" in row))


def import_seconds(folder: Path, name: str) -> float:
    """The sum of all modules' own import times in such a run."""
    log = call(folder, "pretrain", *CPU, "--name", name, python=("-X", "importtime"))
    return (
        sum(int(self_us) for self_us in re.findall(r"^import time:\s+(\d+) \|", log, re.MULTILINE))
        / 1e6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        call(folder, "prepare")
        call(folder, "pretrain", *CPU, "--name", "warm-up")
        steps, imports = [], []
        for turn in range(args.rounds):
            steps.append(first_step_seconds(folder, f"step-{turn}"))
            imports.append(import_seconds(folder, f"imports-{turn}"))
            print(f"first step after {steps[-1]:.2f} s; imports {imports[-1]:.2f} s", flush=True)
    if args.out:
        from cramming.bench.tables import versions
        from cramming.device import describe, select

        about = {**asdict(describe(select("cpu"))), **versions()}
        args.out.write_text(
            f"# From the start of `cramming pretrain` to the first optimizer step\n\n`python benchmarks/startup.py"
            f" --rounds {args.rounds}`: {about}\n\n| | median of {args.rounds} | all |\n|---|---|---|\n"
            f"| first optimizer step | {statistics.median(steps):.2f} s | {[round(s, 2) for s in steps]} |\n"
            f"| imports (-X importtime) | {statistics.median(imports):.2f} s | {[round(s, 2) for s in imports]} |\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
