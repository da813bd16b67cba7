"""Predicted peak memory against the measured one, configuration by configuration.

Each configuration runs in a fresh process: a step of a very small model first, so that libraries, threads and pools
are there, then the baseline; then the model is built and makes two optimizer steps (the first makes the optimizer's
state). The prediction is `cramming plan`'s, made by the parent, of the same configuration.

    python benchmarks/memory.py --out benchmarks/results/memory_cpu_<date>.md

Measured is, on a GPU, `torch.cuda.max_memory_allocated`; on a CPU, the peak resident set (VmHWM, set back at the
baseline) less the resident set at the baseline. The resident set is only then what tensors need if free memory goes
back to the system. glibc keeps it: blocks below a threshold that grows up to 32 MiB come from heaps that only shrink
at their end. In the measured process, therefore, and only there, MALLOC_MMAP_THRESHOLD_ is fixed (which also stops its
growth), so that every tensor above 64 KiB is a mapping of its own, and MALLOC_TRIM_THRESHOLD_ and MALLOC_ARENA_MAX keep
the rest small. `--malloc default` measures without this, `--malloc kept` as a run with `runtime.keep_heap` does.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cramming.checks import Config, Place
from cramming.data.batches import Batch
from cramming.device import available_bytes, keep_freed_memory, select
from cramming.engine import build_engine
from cramming.environment import cpu_name, system
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.overrides import compose
from cramming.parallel.mesh import Mesh
from cramming.plan.memory import CATEGORIES, Simulation

VOCABULARY, LENGTH, TARGETS = 32768, 128, 32
FAIR_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
SHAPES = {
    "256x4": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "intermediate_size": 1024},
    "768x12": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072},
}
CHECKPOINT, EVERY_SECOND = "memory.checkpoint_every=1", "memory.checkpoint_every=2"
CASES: dict[str, tuple[str, int, int, list[str]]] = {  # shape, micro-batch, micro-batches, overrides
    "256x4, 8": ("256x4", 8, 1, []),
    "256x4, 32": ("256x4", 32, 1, []),
    "256x4, 128": ("256x4", 128, 1, []),
    "256x4, 4 x 32": ("256x4", 32, 4, []),
    "256x4, 128, checkpoint": ("256x4", 128, 1, [CHECKPOINT]),
    "256x4, 128, checkpoint every 2nd": ("256x4", 128, 1, [EVERY_SECOND]),
    "256x4, 128, selective": ("256x4", 128, 1, ["memory=selective"]),
    "256x4, 2 x 64, checkpoint": ("256x4", 64, 2, [CHECKPOINT]),
    "256x4, 64, documents": ("256x4", 64, 1, ["train.packing=documents"]),
    "256x4, 128, last layer whole": ("256x4", 128, 1, ["attention.last_layer=all"]),
    "256x4, 32, sgd": ("256x4", 32, 1, ["optim=sgd"]),
    "256x4, 32, nadamw": ("256x4", 32, 1, ["optim=nadamw"]),
    "256x4, 32, lamb": ("256x4", 32, 1, ["optim=lamb"]),
    "768x12, 2": ("768x12", 2, 1, []),
    "768x12, 8": ("768x12", 8, 1, []),
    "768x12, 2 x 4": ("768x12", 4, 2, []),
    "768x12, 8, checkpoint": ("768x12", 8, 1, [CHECKPOINT]),
    "768x12, 16, checkpoint every 2nd": ("768x12", 16, 1, [EVERY_SECOND]),
}


def config_of(case: str, mode: str) -> Config:
    """The root configuration with the case's changes."""
    shape, _, _, overrides = CASES[case]
    settings = compose(["model=bert-base", "optim=adamw", f"precision={mode}", *overrides])
    return replace(Config.of(settings), model=ModelConfig(vocab_size=VOCABULARY, **SHAPES[shape]))


def run_steps(config: Config, rows: int, count: int, device: torch.device) -> None:
    """Two optimizer steps on random tokens."""
    engine = build_engine(config, Mesh.solo(device), device)
    for _ in range(2):
        engine.step([random_batch(config, rows) for _ in range(count)], 1e-4)


def random_batch(config: Config, rows: int) -> Batch:
    """Random tokens in the form that `BatchSource` gives; documents, where they are, are half a row long."""
    train, targets = config.train, rows * config.targets_per_row
    length = train.sequence_length
    size = length if train.packing == "rows" else length // 2
    bounds = torch.arange(0, rows * length + 1, size, dtype=torch.int32)
    places = torch.arange(0, rows * length, length // config.targets_per_row)[:targets]
    ids = torch.randint(config.model.vocab_size or 1, (rows * length,))
    packing = Packing(bounds, length if train.packing == "rows" else None, length, length)
    return Batch(ids, torch.arange(size).repeat(rows * length // size), packing, places, ids[places], len(places))


def measure(case: str, mode: str, device: torch.device) -> int:
    """Bytes at the peak of this process, less what there was before the model."""
    _, rows, count, _ = CASES[case]
    config = config_of(case, mode)
    small = ModelConfig(vocab_size=256, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64)
    run_steps(replace(config, model=small), 2, 1, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run_steps(config, rows, count, device)
        return torch.cuda.max_memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is resident now
    before = status_bytes("VmRSS")
    run_steps(config, rows, count, device)
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """A size of this process as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--modes", nargs="+", default=["fp32"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--malloc", default="fair", choices=["fair", "default", "kept"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the measured process
    args = parser.parse_args()
    device = select(args.device)
    if args.one:
        if args.malloc == "kept":
            keep_freed_memory()
        print(json.dumps({"bytes": measure(args.one, args.modes[0], device)}))
        return
    rows = [compare(case, mode, device, args.malloc) for mode in args.modes for case in args.cases]
    if args.out:
        args.out.write_text(report([row for row in rows if row], args, device), encoding="utf-8")


def compare(case: str, mode: str, device: torch.device, malloc: str) -> dict[str, Any] | None:
    """Prediction and measurement of one case; None where this machine has too little memory for it."""
    _, rows, count, _ = CASES[case]
    began, config = time.perf_counter(), config_of(case, mode)
    cost = Simulation(config, Place.here(config, device)).step(rows, count)
    seconds = time.perf_counter() - began
    if device.type == "cpu" and cost.peak_bytes > 0.7 * available_bytes():
        print(f"{case}: left out, {cost.peak_bytes / 2**30:.1f} GiB are too much here", flush=True)
        return None
    command = [sys.executable, __file__, "--one", case, "--modes", mode, "--device", device.type, "--malloc", malloc]
    environment = os.environ | (FAIR_MALLOC if malloc == "fair" else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    measured = json.loads(done.stdout.splitlines()[-1])["bytes"]
    row = {"case": case, "mode": mode, "predicted": cost.peak_bytes, "measured": measured, "seconds": seconds}
    print(f"{case}, {mode}: {cost.peak_bytes / 2**20:.0f} : {measured / 2**20:.0f} MiB,"
          f" {cost.peak_bytes / measured - 1:+.1%}, predicted in {seconds:.1f} s", flush=True)  # fmt: skip
    return row | {"by_category": cost.peak}


def report(rows: list[dict[str, Any]], args: argparse.Namespace, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    worst = max(abs(r["predicted"] / r["measured"] - 1) for r in rows)
    lines = [
        "# Peak memory of a training step, predicted and measured", "",
        f"`python benchmarks/memory.py --modes {' '.join(args.modes)} --malloc {args.malloc}`: BERT of two shapes,"
        f" vocabulary {VOCABULARY}, sequences of {LENGTH} with {TARGETS} targets, AdamW unless said, fresh process per"
        " row; what is measured and how is said at the top of the script. Sizes in MiB.", "",
        f"{name}, {torch.get_num_threads()} threads, {system()}, Python {platform.python_version()},"
        f" torch {torch.__version__}. Largest deviation: {worst:.1%}.", "",
        f"| configuration | mode | {' | '.join(CATEGORIES)} | predicted | measured | deviation |",
        "|---|---|" + "---:|" * (len(CATEGORIES) + 3),
    ]  # fmt: skip
    for r in rows:
        parts = " | ".join(f"{r['by_category'][name] / 2**20:.0f}" for name in CATEGORIES)
        lines.append(
            f"| {r['case']} | {r['mode']} | {parts} | {r['predicted'] / 2**20:.0f} | {r['measured'] / 2**20:.0f}"
            f" | {r['predicted'] / r['measured'] - 1:+.1%} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
