"""What the tests share that need a GPU: `pytest -m gpu`.

With CRAMMING_GPU_TESTS=cpu they run on a CPU, as far as it can: smaller, in fp32, and compiled to the operators that
eager execution has, so that the tests themselves are proven before there is a GPU. CRAMMING_GPU_TESTS_GB limits the
memory of the process, which may share the GPU with others.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cramming.bench.worker import cap_memory, topic_batches
from cramming.data.batches import Batch
from cramming.engine import Engine, build_engine
from cramming.hooks import StepResult
from cramming.objectives.masking import MaskedTargets
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config

MEMORY_GB = "CRAMMING_GPU_TESTS_GB"
FORCED = os.environ.get("CRAMMING_GPU_TESTS") == "cpu"
VOCABULARY, ROWS = 512, 8


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU that is to stand for it."""
    if FORCED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    if MEMORY_GB in os.environ:
        cap_memory(device, float(os.environ[MEMORY_GB]))
    return device


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """For what no CPU can stand for."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device


@pytest.fixture(scope="session")
def mode(device: torch.device) -> str:
    """The number format of training."""
    return "bf16" if device.type == "cuda" else "fp32"


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A CPU compiles no kernels here: they take half a minute a model, and are not the GPU's."""
    if device.type == "cpu":
        compile_ = nn.Module.compile
        monkeypatch.setattr(nn.Module, "compile", lambda self: compile_(self, backend="eager"))
    yield
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


SMALL = [
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=128",
    f"model.vocab_size={VOCABULARY}",
    "optim=adamw",
    "optim.lr=0.001",
]


@pytest.fixture
def make_engine(
    device: torch.device, mode: str, compose: Callable[..., dict[str, Any]]
) -> Callable[..., Engine]:
    """`make_engine("model=modern", "runtime.compile=model")`: seeded weights, small unless they say more."""

    def make(*overrides: str) -> Engine:
        settings = compose(f"precision={mode}", *SMALL, *overrides)
        torch.manual_seed(0)
        return build_engine(Config.of(settings), Mesh.solo(device), device)

    return make


@pytest.fixture
def batch_of(device: torch.device, compose: Callable[..., dict[str, Any]]) -> Callable[..., Batch]:
    """`batch_of(first, packing="rows")`: eight sequences, of a length that FlexAttention's blocks divide."""
    targets = MaskedTargets(0.25, 0.8, 0.1)
    length = 128 if device.type == "cuda" else 32

    def make(first: int, packing: str = "rows") -> Batch:
        return topic_batches(targets, VOCABULARY, length, packing, ROWS).batch(first, ROWS)

    return make


@pytest.fixture
def train(batch_of: Callable[..., Batch]) -> Callable[..., list[StepResult]]:
    """`train(engine, 3)`: three steps of a few sequences in two micro-batches; what each came to."""

    def run(engine: Engine, steps: int, packing: str = "rows", cut: int = 2) -> list[StepResult]:
        results = []
        for step in range(steps):
            stats = engine.step(
                [batch_of((cut * step + i) * ROWS, packing) for i in range(cut)], 1e-3
            )
            assert not stats.skipped or engine.precision.mode == "fp16"  # until its scale fits
            results.append(stats)
        return results

    return run
