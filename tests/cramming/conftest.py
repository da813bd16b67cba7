"""An engine made from keywords, and steps of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming.engine import Engine, StepStats
from cramming.model.config import ModelConfig
from cramming.parallel.mesh import Mesh, ParallelConfig
from cramming.parts import EngineConfig, build_engine

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """Four layers, so that every second can be treated otherwise, and dropout; the vocabulary of `tiny_source`."""
    return ModelConfig(
        vocab_size=320, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=32, max_length=32, dropout=0.1
    )


@pytest.fixture
def make_engine(compose: Callable[..., dict[str, Any]], small_model: ModelConfig) -> Callable[..., Engine]:
    """`make_engine(model=..., precision=..., optim={...}, **memory)`: an engine with seeded weights."""
    plain = EngineConfig.of(compose("precision=fp32", "optim=adamw-tiny"))

    def make(
        seed: int = 0,
        model: ModelConfig = small_model,
        mode: Any = "fp32",
        optim: dict[str, Any] | None = None,
        device: torch.device = CPU,
        **memory: Any,
    ) -> Engine:
        torch.manual_seed(seed)
        if memory.get("update_in_backward"):
            optim = {"clip": None, **(optim or {})}
        config = replace(
            plain,
            memory=replace(plain.memory, **memory),
            optim=replace(plain.optim, eps=1e-8, **(optim or {})),
            precision=replace(plain.precision, mode=mode, emulate_fp8=mode == "fp8"),
        )
        return build_engine(config, model, Mesh(ParallelConfig("auto"), device), device)

    return make


def train_steps(engine: Engine, source: Any, steps: range, cut: int = 1) -> list[StepStats]:
    found = []
    for step in steps:
        torch.manual_seed(step)
        rows = 4 // cut
        stats = engine.step([source.batch(4 * step + rows * k, rows) for k in range(cut)], 1e-2 / (step + 1))
        assert stats is not None
        found.append(stats)
    return found


@pytest.fixture
def train() -> Callable[..., list[StepStats]]:
    """`train(engine, source, steps, cut=1)`: these steps of four rows in `cut` micro-batches; a seed for each step."""
    return train_steps


@pytest.fixture
def weights() -> Callable[[Engine], list[Tensor]]:
    """`weights(engine)`: copies of all parameters."""
    return lambda engine: [p.detach().clone() for p in engine.model.parameters()]
