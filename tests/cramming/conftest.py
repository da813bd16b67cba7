"""An engine made from keywords and steps of it; runs of 12 steps made from overrides, and what they left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming import checkpoint, launch
from cramming.config import UserError, choose
from cramming.engine import Engine, build_engine
from cramming.hooks import StepResult
from cramming.invocation import Invocation
from cramming.model.config import ModelConfig
from cramming.optim.build import OPTIMIZERS
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config
from cramming.record import load_metrics, load_record

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """Four layers, so that every second can be treated otherwise, and dropout; the vocabulary of `tiny_source`."""
    return ModelConfig(
        vocab_size=320,
        hidden_size=32,
        num_layers=4,
        num_heads=2,
        intermediate_size=32,
        max_length=32,
        dropout=0.1,
    )


@pytest.fixture
def make_engine(
    compose: Callable[..., dict[str, Any]], small_model: ModelConfig
) -> Callable[..., Engine]:
    """`make_engine(model=..., mode=..., optim={...}, **memory)`: an engine with seeded weights."""
    plain = Config.of(compose("precision=fp32", "optim=adamw-tiny", "train.sequence_length=16"))

    def make(
        seed: int = 0,
        model: ModelConfig = small_model,
        mode: Any = "fp32",
        optim: dict[str, Any] | None = None,
        device: torch.device = CPU,
        residual: Any = "fp32",
        **memory: Any,
    ) -> Engine:
        torch.manual_seed(seed)
        defaults = compose(f"optim={(optim or {}).get('name', 'adamw-tiny')}")["optim"]
        defaults = {key: 1e-8 if key == "eps" else value for key, value in defaults.items()}
        config = plain.replace(
            model=model,
            memory=plain.memory.replace(**memory),
            optim=choose(OPTIMIZERS, {**defaults, **(optim or {})}, "optim"),
            precision=plain.precision.replace(
                mode=mode, emulate_fp8=mode == "fp8", residual=residual
            ),
        )
        return build_engine(config, Mesh(plain.parallel, device), device)

    return make


def train_steps(engine: Engine, source: Any, steps: range, cut: int = 1) -> list[StepResult]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        rows = 4 // cut
        losses.append(
            engine.step(
                [source.batch(4 * step + rows * k, rows) for k in range(cut)], 1e-2 / (step + 1)
            )
        )
    return losses


@pytest.fixture
def train() -> Callable[..., list[StepResult]]:
    """`train(engine, source, steps, cut=1)`: these steps of four rows in `cut` micro-batches; a seed for each step."""
    return train_steps


@pytest.fixture
def weights() -> Callable[[Engine], list[Tensor]]:
    """`weights(engine)`: copies of all parameters."""
    return lambda engine: [p.detach().clone() for p in engine.model.parameters()]


@pytest.fixture
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """`host_reads(work)`: how tensors were read as numbers while it ran; on a GPU the host waits for each."""

    def count(work: Callable[[], object]) -> list[str]:
        reads: list[str] = []
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                read = getattr(Tensor, name)
                patch.setattr(
                    Tensor,
                    name,
                    lambda self, read=read, name=name: (reads.append(name), read(self))[1],
                )
            work()
        return reads

    return count


@pytest.fixture
def start(
    tmp_path: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> Callable[..., Path]:
    """`start(*overrides, name="a", ...)` trains and returns the run folder."""

    def call(*overrides: str, runs: Path = tmp_path / "runs", **options: Any) -> Path:
        invocation = Invocation(runs=runs, **{"device": "cpu", **options})
        launch.main(compose(*tiny_overrides, *overrides), invocation)
        return invocation.run_folder

    return call


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread writes the checkpoints, as on a GPU."""
    monkeypatch.setattr(checkpoint, "BACKGROUND_DEVICES", {"cpu"})


@pytest.fixture(params=["training thread", "background"])
def each_saver(request: pytest.FixtureRequest) -> None:
    """First the training thread writes the checkpoints, then another."""
    if request.param == "background":
        request.getfixturevalue("in_background")


@pytest.fixture(scope="session")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> Path:
    """The run that others are compared with; read-only."""
    runs = tmp_path_factory.mktemp("unbroken")
    launch.main(
        compose(*tiny_overrides, "checkpoint.every_steps=3"),
        Invocation(runs=runs, name="a", device="cpu"),
    )
    return runs / "a"


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], list[tuple[int, float]]]:
    """`losses(run)`: step and training loss, as the run logged them."""
    return lambda run: [(row["step"], row["loss"]) for row in load_metrics(run) if "loss" in row]


@pytest.fixture(scope="session")
def result() -> Callable[[Path], dict[str, Any]]:
    """`result(run)`: what must be the same in two runs that are the same."""
    keys = (
        "status",
        "final_sha256",
        "steps",
        "tokens",
        "sequences",
        "exaflops",
        "train_loss",
        "validation",
    )

    def read(run: Path) -> dict[str, Any]:
        section = load_record(run)["pretrain"]
        return {key: section[key] for key in keys}

    return read


@pytest.fixture
def refused(start: Callable[..., Path]) -> Callable[..., str]:
    """`refused(*overrides)`: the one line in which a run of the name "a" is refused."""

    def call(*overrides: str, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            start(*overrides, **{"name": "a", **options})
        message = str(caught.value)
        assert "\n" not in message
        return message

    return call
