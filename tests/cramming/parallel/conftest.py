"""What a run of several processes is told, and what one process finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .rank_worker import train

SMALL = [
    "precision=fp32",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.num_layers=3",
    "model.intermediate_size=48",
    "model.max_length=64",
    "train.sequence_length=32",
    "train.batch_size=8",
    "train.micro_batch=8",
    "train.validation_tokens=512",
    "optim.clip=0.3",
]


@pytest.fixture(scope="session")
def case(
    compose: Callable[..., dict[str, Any]], tiny_corpus: Path
) -> Callable[..., dict[str, Any]]:
    """`case(overrides, ranks=1, steps=30, load=None, save=None)`: what `train` is given; the files are checkpoints."""

    def of(overrides: list[str], ranks: int = 1, steps: int = 30, **files: str) -> dict[str, Any]:
        groups = [o for o in overrides if "." not in o.split("=")[0]]
        plain = [o for o in overrides if o not in groups]
        settings = compose(
            "optim=adamw-tiny", *groups, f"data.corpus={tiny_corpus}", *SMALL, *plain
        )
        return {"settings": settings, "ranks": ranks, "steps": steps, **files}

    return of


@pytest.fixture(scope="session")
def alone(case: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Results of one process by case."""
    results: dict[str, Any] = {}

    def of(overrides: list[str], steps: int = 30) -> dict[str, Any]:
        key = " ".join([*overrides, str(steps)])
        if key not in results:
            results[key] = train(case(overrides, steps=steps))
        return results[key]

    return of
