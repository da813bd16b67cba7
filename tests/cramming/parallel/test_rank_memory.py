"""Bytes that a process holds between two micro-batches of a step: those of ZeRO's formula within a tenth."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .rank_worker import launch

BYTES = {  # per parameter, on `n` processes: weights, gradients, and Adam's moments with the weights that they update
    "ddp": lambda n: 16,
    "zero1": lambda n: 8 + 12 / n,
    "zero2": lambda n: 4 + 16 / n,
    "zero3": lambda n: 16 / n,
    "zero3 parallel.shards=2": lambda n: 16 / 2,
}


@pytest.mark.slow
def test_memory_per_rank_follows_the_formula(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    sizes = [
        f"model.{size}"
        for size in ("hidden_size=128", "num_layers=4", "intermediate_size=256", "num_heads=2")
    ]
    typed = [
        "model=tiny",
        *sizes,
        "model.vocab_size=1024",
        "precision=fp32",
        "train.micro_batch=1",
    ]
    listed = {
        name: compose(*typed, "train.sequence_length=32", *f"parallel={name}".split())
        for name in BYTES
    }
    cases = {name: {"settings": settings, "ranks": 4} for name, settings in listed.items()}
    launch(tmp_path, cases, Path(__file__).with_name("memory_worker.py"))
    measured = {name: float((tmp_path / name).read_text()) for name in BYTES}
    print(measured)
    assert measured == pytest.approx({name: formula(4) for name, formula in BYTES.items()}, rel=0.1)
