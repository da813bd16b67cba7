"""Passes side by side are the same computation as one after the other, whichever is done first."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming.data.batches import Batch, BatchSource
from cramming.data.corpus import Corpus
from cramming.data.masking import Masker, ObjectiveConfig
from cramming.engine import Engine
from cramming.execution import EngineConfig
from cramming.model.config import ModelConfig
from cramming.model.heads import CHUNK_ELEMENTS
from cramming.parallel import passes
from cramming.parallel.mesh import Mesh, ParallelConfig
from cramming.parallel.passes import can_share, number_of_passes
from cramming.plan.memory import Recipe, Simulation
from cramming.precision import Precision, PrecisionConfig

CPU = torch.device("cpu")
MakeModel = Callable[..., Any]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And batches of a few tokens are worth two passes."""
    monkeypatch.setattr(passes, "MIN_TOKENS", 1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def engine_of(make_model: MakeModel, side_by_side: bool, lr: float = 1e-2) -> Engine:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    precision = Precision(PrecisionConfig(mode="fp32", tf32=False), CPU)
    mesh = Mesh(ParallelConfig("auto"), CPU)
    return Engine(model, optimizer, precision, 1.0, mesh, CPU, side_by_side=side_by_side)


def trained(engine: Engine, source: Any, cut: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of four steps of eight rows in `cut` micro-batches, and the weights behind them."""
    rows = 8 // cut
    losses = []
    for step in range(4):
        stats = engine.step([source.batch(8 * step + rows * k, rows) for k in range(cut)], 1e-2)
        assert stats is not None
        losses.append(stats.loss)
    return losses, [p.detach().clone() for p in engine.parameters]


@pytest.mark.parametrize("cut", [1, 2])
def test_shares_add_up_to_the_whole(
    make_model: MakeModel, tiny_source: Any, two_threads: None, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    split = Batch.split
    monkeypatch.setattr(Batch, "split", lambda batch, number: seen.append(number) or split(batch, number))
    losses, weights = trained(engine_of(make_model, True), tiny_source, cut)
    plain_losses, plain_weights = trained(engine_of(make_model, False), tiny_source, cut)
    assert seen == [2] * 4 * cut
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    torch.testing.assert_close(weights, plain_weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "memory", [{"checkpoint_every": 1}, {"checkpoint_every": 2, "checkpoint": "selective"}, {"offload_optimizer": True}]
)
def test_memory_tricks_that_go_with_passes_do_not_change_a_bit(
    make_engine: Callable[..., Engine],
    small_model: ModelConfig,
    tiny_source: Any,
    two_threads: None,
    memory: dict[str, Any],
) -> None:
    model = replace(small_model, dropout=0.0)
    engine, plain = make_engine(model=model, **memory), make_engine(model=model)
    assert engine.side_by_side and plain.side_by_side
    losses, weights = trained(engine, tiny_source)
    plain_losses, plain_weights = trained(plain, tiny_source)
    assert losses == plain_losses and all(torch.equal(a, b) for a, b in zip(weights, plain_weights))


def test_the_slower_pass_decides_nothing(
    make_model: MakeModel, tiny_source: Any, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one bit depends on which share is done first."""
    found = []
    for slow in (0, 1):
        engine = engine_of(make_model, True)
        forward = engine._forward

        def delayed(batch: Batch, slow: int = slow, forward: Any = forward) -> Any:
            first = bool(batch.target_positions_M.numel() and batch.ids_T.storage_offset() == 0)
            time.sleep(0.02 if first == (slow == 0) else 0.0)
            return forward(batch)

        monkeypatch.setattr(engine, "_forward", delayed)
        found.append(trained(engine, tiny_source))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))


def test_the_calling_thread_keeps_its_cores(make_model: MakeModel, tiny_source: Any, two_threads: None) -> None:
    trained(engine_of(make_model, True), tiny_source)
    assert torch.get_num_threads() == 2


def test_a_share_that_is_not_finite_skips_the_step(
    make_model: MakeModel, tiny_source: Any, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(make_model, True)
    forward, before = engine._forward, [p.detach().clone() for p in engine.parameters]

    def broken(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, correct = forward(batch)
        return loss * (math.nan if batch.ids_T.storage_offset() else 1.0), correct

    monkeypatch.setattr(engine, "_forward", broken)
    stats = engine.step([tiny_source.batch(0, 8)], 1e-2)
    assert stats is not None and stats.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters))


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_in_a_pass_is_the_steps_and_nothing_computes_on(
    make_model: MakeModel, tiny_source: Any, two_threads: None, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    engine, done = engine_of(make_model, True), list[bool]()
    forward = engine._forward

    def full(batch: Batch) -> Any:
        if bool(batch.ids_T.storage_offset()) == bool(fails):
            raise torch.OutOfMemoryError("no memory")
        time.sleep(0.1)
        found = forward(batch)
        done.append(True)
        return found

    monkeypatch.setattr(engine, "_forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step([tiny_source.batch(0, 8)], 1e-2)
    assert done


def test_a_pass_alone_adds_its_gradients_in_place(
    make_model: MakeModel, tiny_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one thread: no second set of gradients beside those of the micro-batches before."""
    monkeypatch.setattr(torch.autograd, "grad", None)
    trained(engine_of(make_model, True), tiny_source, cut=2)


def test_frozen_parameters_and_packed_documents(
    make_engine: Callable[..., Engine], tiny_corpus: Path, small_model: ModelConfig, two_threads: None
) -> None:
    corpus = Corpus.open(tiny_corpus)
    masker = Masker(ObjectiveConfig("mlm", 0.25, 0.8, 0.1), corpus.vocab_size, 4, (0, 1, 2, 3, 4), 0)
    source = BatchSource(corpus.stream("train"), masker, 16, "documents", 0)
    found = []
    for side_by_side in (True, False):
        optim = {"frozen": [r"encoder\.blocks\.0\.attn\..*"]}
        engine = make_engine(model=replace(small_model, dropout=0.0), optim=optim)
        assert engine.side_by_side and any(not p.requires_grad for p in engine.model.parameters())
        engine.side_by_side = engine.side_by_side if side_by_side else None
        found.append(trained(engine, source)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_all_passes_get_the_same_of_rows_and_cores() -> None:
    for threads in range(1, 17):
        for rows in range(1, 65):
            number = number_of_passes(rows, 128, threads)
            assert 1 <= number <= passes.MAX_PASSES and threads % number == 0 and rows % number == 0
            assert number == 1 or rows * 128 // number >= passes.MIN_TOKENS
    assert [number_of_passes(32, 128, threads) for threads in (1, 2, 3, 4, 6, 8, 16)] == [1, 2, 1, 2, 2, 2, 2]
    assert number_of_passes(4, 128, 2) == 1 and number_of_passes(8, 128, 2) == 2


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("runtime", {"side_by_side": False}),
        ("runtime", {"compile": "model"}),
        ("memory", {"update_in_backward": True}),
        ("memory", {"offload_weights": True}),
        ("memory", {"offload_activations": True}),
        ("model", {"dropout": 0.1}),
        ("model", {"attention_dropout": 0.1}),
        ("mode", "bf16"),
        ("device", torch.device("cuda")),
    ],
)
def test_what_passes_would_share_keeps_them_apart(
    compose: Callable[..., dict[str, Any]], section: str, changes: Any
) -> None:
    config = EngineConfig.of(compose())
    plain: dict[str, Any] = {"runtime": config.runtime, "memory": config.memory, "mode": "fp32", "device": CPU}
    plain["model"] = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)
    assert can_share(**plain)
    other = replace(plain[section], **changes) if isinstance(changes, dict) else changes
    assert not can_share(**{**plain, section: other})


def test_a_simulation_counts_what_every_pass_has_for_itself(
    compose: Callable[..., dict[str, Any]],
    small_model: ModelConfig,
    two_threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 8 x 4 x 320 logits one pass holds a chunk of 6,400 at a time, two hold all of them; in fp32."""
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 6400)
    config = EngineConfig.of(compose("precision=fp32", "optim=adamw-tiny"))
    model = replace(small_model, dropout=0.0)
    alone = replace(config, runtime=replace(config.runtime, side_by_side=False))
    costs = {}
    for name, execution in (("shared", config), ("alone", alone)):
        simulation = Simulation(Recipe(model, execution, "fp32", "cpu", 16, 4, "rows"))
        costs[name] = [simulation.step(8, count).peak for count in (1, 2)]
        weights = sum(p.numel() * 4 for p in simulation.engine.parameters)
    more = [shared["gradients"] - alone["gradients"] for shared, alone in zip(costs["shared"], costs["alone"])]
    assert more == [weights, 2 * weights]
    assert [s["head"] - a["head"] for s, a in zip(costs["shared"], costs["alone"])] == [4 * (10240 - 6400)] * 2
