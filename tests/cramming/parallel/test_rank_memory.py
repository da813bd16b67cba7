"""Bytes that a process holds between two micro-batches of a step: those of ZeRO's formula within a tenth."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Counts every tensor's memory that there is in this process, before the last micro-batch of the second step.
PROGRAM = """
import gc, json, sys, torch
from cramming.checks import Config
from cramming.data.batches import BatchSource
from cramming.data.corpus import TokenStream
from cramming.data.masking import Masker
from cramming.engine import build_engine
from cramming.parallel.mesh import Mesh

def held():
    found = {}
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    for t in tensors:
        storage = (t.to_local() if hasattr(t, "to_local") else t).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())

device = torch.device("cpu")
for settings in json.load(open(sys.argv[1])):
    config = Config.of(settings)
    mesh = Mesh(config.parallel, device)
    stream = TokenStream.of_array(torch.randint(5, 999, (9999,)).numpy(), torch.zeros(1, dtype=int).numpy())
    source = BatchSource(stream, Masker(config.objective, 1024, 4, (0, 1, 2, 3, 4), 0), 32, "rows", 0)
    gc.collect()
    before = held()
    engine = build_engine(config, mesh, device)
    spread, seen = engine.spread, []
    passing = spread.passing
    def counted(is_last):
        if is_last:
            seen.append(held() - before)
        return passing(is_last)
    spread.passing = counted
    for step in range(2):
        engine.step([source.batch(2 * step, 1), source.batch(2 * step + 1, 1)], 1e-3)
    if mesh.is_main:
        print("FOUND", json.dumps([config.parameters.total, seen[-1]]), flush=True)
    del engine, spread, passing, counted
    mesh.close()
"""
BYTES = {  # per parameter, on `n` processes: weights, gradients, and Adam's moments with the weights that they update
    "ddp": lambda n: 16,
    "zero1": lambda n: 8 + 12 / n,
    "zero2": lambda n: 4 + 16 / n,
    "zero3": lambda n: 16 / n,
    "zero3 parallel.shards=2": lambda n: 16 / 2,
}


@pytest.mark.slow
def test_memory_per_rank_follows_the_formula(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    sizes = [f"model.{size}" for size in ("hidden_size=128", "num_layers=4", "intermediate_size=256", "num_heads=2")]
    typed = ["model=tiny", *sizes, "model.vocab_size=1024", "precision=fp32", "device=cpu", "train.micro_batch=1"]
    listed = [compose(*typed, "train.sequence_length=32", *f"parallel={name}".split()) for name in BYTES]
    (tmp_path / "jobs.json").write_text(json.dumps(listed, default=str))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, tmp_path / "program.py", tmp_path / "jobs.json"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = dict(zip(BYTES, (held / parameters for parameters, held in rows), strict=True))
    print(found)
    assert found == pytest.approx({name: formula(4) for name, formula in BYTES.items()}, rel=0.1)
