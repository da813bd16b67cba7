"""Print the bytes at the peak of two training steps: `measured_peak.py <settings as JSON> <rows> <micro-batches>`.

That is the peak resident set (VmHWM, set back at the baseline) less the resident set at the baseline, after a step of a
very small model, so that libraries, threads and pools exist. Malloc has to give freed memory back to the system: with a
fixed MALLOC_MMAP_THRESHOLD_ every tensor above 64 KiB is a mapping of its own.
"""

import json
import sys
from pathlib import Path

import torch

from cramming.data.batches import Batch
from cramming.engine import build_engine
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config

CPU = torch.device("cpu")
SMALL = ModelConfig(vocab_size=256, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64)


def main() -> None:
    """Measure the steps of the settings."""
    config, rows, count = Config.of(json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    train_two_steps(config.replace(model=SMALL), rows=2, count=1)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    baseline = status_bytes("VmRSS")
    train_two_steps(config, rows, count)
    print(status_bytes("VmHWM") - baseline)


def train_two_steps(config: Config, rows: int, count: int) -> None:
    engine = build_engine(config, Mesh.solo(CPU), CPU)
    for _ in range(2):
        engine.step([random_batch(config, rows) for _ in range(count)], 1e-4)


def random_batch(config: Config, rows: int) -> Batch:
    """Return random tokens; documents are half a row long."""
    length, tokens = config.train.sequence_length, rows * config.train.sequence_length
    targets = rows * config.targets_per_row
    whole_rows = config.train.packing == "rows"
    size = length if whole_rows else length // 2
    bounds = torch.arange(0, tokens + 1, size, dtype=torch.int32)
    places = torch.arange(0, tokens, length // config.targets_per_row)[:targets]
    ids = torch.randint(config.model.vocab_size or 1, (tokens,))
    packing = Packing(bounds, length if whole_rows else None, length, length)
    positions = torch.arange(size).repeat(tokens // size)
    return Batch(ids, positions, packing, places, ids[places], len(places))


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
