"""The chosen micro-batch fits, is found without a trace, and does not change the result."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cramming import device
from cramming.config import UserError
from cramming.engine import Engine, build_engine
from cramming.model.config import ModelConfig
from cramming.parallel.mesh import Mesh
from cramming.plan import memory, micro_batch
from cramming.plan.memory import Simulation
from cramming.precision import Precision, PrecisionConfig
from cramming.recipe import Config, Hardware
from cramming.record import load_metrics, load_record
from cramming.runlog import MicroBatch, Training

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=320, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_length=32
)


@pytest.fixture
def make_config(compose: Callable[..., dict[str, Any]]) -> Callable[..., Config]:
    """A small model in rows of 16 tokens with 4 targets."""

    def make(mode: str = "fp32", **model: Any) -> Config:
        config = Config.of(compose("optim=adamw", f"precision={mode}", "train.sequence_length=16"))
        return config.replace(model=replace(MODEL, **model))

    return make


def engine_of(config: Config, device: torch.device = CPU) -> Engine:
    torch.manual_seed(0)
    return build_engine(config, Mesh.solo(device), device)


def plain_engine(model: nn.Module) -> Engine:
    precision = Precision(PrecisionConfig(mode="fp32", tf32=False), CPU)
    return Engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), precision, None, Mesh.solo(CPU), CPU
    )


def everything(engine: Engine) -> list[Any]:
    states = (
        engine.model.state_dict(),
        engine.optimizer.state_dict()["state"],
        engine.precision.scaler.state_dict(),
    )
    return copy.deepcopy(
        [*states, torch.get_rng_state(), [p.grad for p in engine.model.parameters()]]
    )


@pytest.mark.parametrize(("mode", "begun"), [("fp32", True), ("fp16", False), ("fp16", True)])
def test_a_try_leaves_no_trace(
    make_config: Callable[..., Config], tiny_source: Any, mode: str, begun: bool
) -> None:
    engine = engine_of(make_config(mode, dropout=0.5))
    if begun:
        engine.step([tiny_source.batch(0, 2)], 1e-3)
    before = everything(engine)
    micro_batch.try_step(engine, [tiny_source.batch(0, 2), tiny_source.batch(2, 2)])
    micro_batch.release(engine)
    torch.testing.assert_close(everything(engine), before, rtol=0, atol=0)


class Greedy(nn.Module):
    """A model that runs out of memory above some number of tokens, in its forward or its backward pass."""

    def __init__(self, tokens: int, where: str, error: Exception):
        super().__init__()
        self.weight, self.tokens, self.where, self.error = (
            nn.Parameter(torch.ones(3)),
            tokens,
            where,
            error,
        )

    def forward(self, ids_T: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.weight**2).sum()
        if len(ids_T) > self.tokens:
            if self.where == "forward":
                self._fail()
            loss.register_hook(self._fail)
        return loss, torch.tensor(1)

    def _fail(self, *_: Any) -> None:
        raise self.error


class Compiling(nn.Module):
    """A model that is compiled, and calls what compiles itself, as FlexAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.compiled = nn.Parameter(torch.ones(3)), list[str]()
        self.inner = torch.compile(lambda x: x * 2, backend=self._seen("inner"))
        self.compile(backend=self._seen("whole"))

    def _seen(self, name: str) -> Any:
        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.compiled.append(name)
            return graph.forward

        return backend

    def forward(self, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(self.weight).sum(), torch.tensor(1)


def test_what_compiles_itself_is_compiled_in_a_try_too(tiny_source: Any) -> None:
    """FlexAttention would else make all scores, and hardly a size would fit; the model itself is compiled later."""
    model = Compiling()
    engine = plain_engine(model)
    assert micro_batch.a_step_fits(engine, tiny_source.batch, 2, reserved_bytes=0)
    assert set(model.compiled) == {"inner"}
    model.compiled.clear()
    engine.step([tiny_source.batch(0, 2)], 0.1)
    assert set(model.compiled) == {"whole"}


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("forward", RuntimeError("Triton Error [CUDA]: out of memory")),
        ("backward", torch.OutOfMemoryError("CUDA out of memory")),
    ],
)
@pytest.mark.parametrize("limit", [1, 5, 100])
def test_running_out_of_memory_is_survived(
    tiny_source: Any, where: str, limit: int, error: Exception
) -> None:
    model = Greedy(16 * limit, where, error)
    engine = plain_engine(model)
    sizes = [
        rows
        for rows in (1, 2, 4, 8)
        if micro_batch.a_step_fits(engine, tiny_source.batch, rows, reserved_bytes=1000)
    ]
    assert sizes == [rows for rows in (1, 2, 4, 8) if rows <= limit]
    assert model.weight.grad is None
    assert torch.equal(model.weight, torch.ones(3))


def test_a_try_on_a_gpu_leaves_room_for_more(
    make_config: Callable[..., Config], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the optimizer's state, and for what only training shows: a share of what the process may have."""
    config = make_config()
    engine, reserved = engine_of(config), list[int]()
    state_bytes = Simulation(config, Hardware.here(config, CPU)).state()["optimizer"]
    info = device.DeviceInfo("cuda", "a GPU", 1_000_000, None)
    monkeypatch.setattr(device, "describe", lambda _: info)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    engine.device = torch.device("cuda")
    monkeypatch.setattr(Hardware, "here", lambda *_: Hardware("cpu", "a device", "fp32"))

    def a_step_fits(engine: Engine, make: Any, rows: int, reserved_bytes: int) -> bool:
        reserved.append(reserved_bytes)
        return rows <= 4

    monkeypatch.setattr(micro_batch, "a_step_fits", a_step_fits)
    rows, how = micro_batch.find_micro_batch(engine, tiny_source.batch, config, 8)
    assert (rows, set(reserved)) == (4, {state_bytes + 30_000})
    assert how == "auto, tried on cuda: 1 fits, 4 fits, 8 does not fit"


def test_on_a_cpu_the_prediction_decides(
    make_config: Callable[..., Config], tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    engine, simulation = engine_of(config), Simulation(config, Hardware.here(config, CPU))
    weights = simulation.state()["weights"]
    needs = {rows: sum(simulation.peak(rows, rows < 16).values()) for rows in (4, 8, 16)}
    for free, expected in ((needs[16], 16), (needs[8], 8), (needs[4], 4), (needs[8] - 1, 4)):
        available = (free + 0.5) / memory.CPU_SHARE - weights
        monkeypatch.setattr(device, "available_bytes", lambda available=available: available)
        rows, how = micro_batch.find_micro_batch(engine, tiny_source.batch, config, 16)
        assert rows == expected
        assert how.startswith("auto, predicted on cpu: ") and f"{expected} fits" in how
    monkeypatch.setattr(device, "available_bytes", lambda: -1e9)
    with pytest.raises(
        UserError, match=r"train\.micro_batch=auto: not even one sequence of 16 fits"
    ):
        micro_batch.find_micro_batch(engine, tiny_source.batch, config, 16)


@pytest.mark.parametrize(("max_tokens", "rows"), [(131_072, 16), (100, 4), (64, 4), (5, 1)])
def test_no_micro_batch_is_larger_than_what_still_pays(
    make_config: Callable[..., Config],
    tiny_source: Any,
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int,
    rows: int,
) -> None:
    """In tokens, of which a row has 16; a single row is taken whatever its length."""
    config = make_config()
    monkeypatch.setattr(memory, "MAX_TOKENS", max_tokens)
    chosen = micro_batch.find_micro_batch(engine_of(config), tiny_source.batch, config, 16)
    assert chosen[0] == rows


@pytest.mark.parametrize(("sequences", "rows"), [(16, 8), (8, 8), (4, 4), (12, 4), (3, 1)])
def test_a_recorded_number_also_goes_with_more_processes(
    make_config: Callable[..., Config], tiny_source: Any, sequences: int, rows: int
) -> None:
    """Each then has fewer sequences of a step. The number that fits stays on record."""
    training = Training(micro_batch=MicroBatch(sequences=8, how="auto"))
    config = make_config()
    engine = engine_of(config)
    assert (
        micro_batch.micro_batch_of_run(training, None, engine, tiny_source.batch, config, sequences)
        == rows
    )


def test_memory_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    whole = device.available_bytes()
    (tmp_path / "max").write_text("5000\n")
    (tmp_path / "now").write_text("2000\n")
    monkeypatch.setattr(device, "_GROUP_FILES", ((str(tmp_path / "max"), str(tmp_path / "now")),))
    assert device.available_bytes() == 3000
    (tmp_path / "max").write_text("max\n")
    assert device.available_bytes() == pytest.approx(whole, rel=0.5)


def test_a_batch_that_grows_does_so_whatever_fits(start: Callable[..., Path]) -> None:
    """From half of 8 sequences, in steps of 4: also `auto`, with room for all 8, takes what divides these."""
    curves = {}
    for size in ("1", "4", "auto"):
        ramp = ("schedule=triangle", "train.batch_ramp={start: 0.5, until: 0.8}")
        run = start(*ramp, f"train.micro_batch={size}", name=f"m{size}")
        curves[size] = [(row["tokens"], row["loss"]) for row in load_metrics(run) if "loss" in row]
        assert load_record(run)["pretrain"]["sequences"] == curves[size][-1][0] // 32 < 12 * 8
    grown = np.diff([0, *(tokens for tokens, _ in curves["4"])]) // 32
    assert grown[0] == 4 and grown[-1] == 8
    assert load_record(run)["pretrain"]["micro_batch"] == 4
    for size, curve in curves.items():
        assert [tokens for tokens, _ in curve] == [tokens for tokens, _ in curves["4"]], size
        assert [loss for _, loss in curve] == pytest.approx(
            [loss for _, loss in curves["4"]], rel=1e-4
        ), size
