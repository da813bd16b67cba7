"""Each way to save memory trains exactly as a plain run does: steps, evaluation, resume, export.

On a CPU the offloads make real copies (host and device are then two places in the same memory), so what is tested is
all but the streams.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from cramming import checkpoint
from cramming.budget import Work
from cramming.config import UserError
from cramming.engine import Engine
from cramming.hooks import StepResult
from cramming.model.config import ModelConfig
from cramming.parallel import offload

Make = Callable[..., Engine]
Train = Callable[..., list[StepResult]]
Weights = Callable[[Engine], list[Tensor]]
OFFLOADS = {"offload_weights": True, "offload_activations": True, "offload_optimizer": True}
TRICKS: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint_every": 1},
    "checkpoint 2nd": {"checkpoint_every": 2},
    "selective": {"checkpoint_every": 1, "checkpoint": "selective"},
    "activations": {"offload_activations": True},
    "activations, checkpoint 2nd": {"offload_activations": True, "checkpoint_every": 2},
    "activations, selective": {
        "offload_activations": True,
        "checkpoint_every": 1,
        "checkpoint": "selective",
    },
    "weights": {"offload_weights": True},
    "weights, checkpoint": {"offload_weights": True, "checkpoint_every": 1},
    "weights, activations": {"offload_weights": True, "offload_activations": True},
    "optimizer": {"offload_optimizer": True},
    "all offloads, checkpoint 2nd": {**OFFLOADS, "checkpoint_every": 2},
}


def state(engine: Engine) -> list[Tensor]:
    return [
        v for _, s in sorted(engine.optimizer.state_dict()["state"].items()) for v in s.values()
    ]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
@pytest.mark.parametrize("cut", [1, 2])
def test_a_trick_changes_no_bit(
    make_engine: Make,
    tiny_source: Any,
    memory: dict[str, Any],
    cut: int,
    train: Train,
    weights: Weights,
) -> None:
    ours, reference = make_engine(**memory), make_engine()
    actual, expected = (train(e, tiny_source, range(4), cut) for e in (ours, reference))
    assert [(s.loss, s.accuracy, s.skipped) for s in actual] == [
        (s.loss, s.accuracy, s.skipped) for s in expected
    ]
    assert [s.grad_norm for s in actual] == pytest.approx([s.grad_norm for s in expected], rel=1e-5)
    assert equal(weights(ours), weights(reference))
    assert equal(state(ours), state(reference))
    batches = [tiny_source.batch(50, 3)]
    assert ours.evaluate(batches) == reference.evaluate(batches)


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
def test_resumed_equals_unbroken(
    make_engine: Make,
    tiny_source: Any,
    tmp_path: Path,
    memory: dict[str, Any],
    train: Train,
    weights: Weights,
) -> None:
    unbroken, first, second = (make_engine(seed, **memory) for seed in (0, 0, 1))
    train(unbroken, tiny_source, range(5))
    train(first, tiny_source, range(3))
    resume(first, second, tmp_path)
    train(second, tiny_source, range(3, 5))
    assert equal(weights(second), weights(unbroken))
    assert equal(state(second), state(unbroken))


def resume(first: Engine, second: Engine, folder: Path) -> None:
    saved = checkpoint.save(folder, first, Work(steps=3), lambda _: None)
    assert checkpoint.load(saved, second) == Work(steps=3)


def test_a_checkpoint_fits_a_plain_run(
    make_engine: Make, tiny_source: Any, tmp_path: Path, train: Train, weights: Weights
) -> None:
    ours, plain = make_engine(**TRICKS["all offloads, checkpoint 2nd"]), make_engine(1)
    train(ours, tiny_source, range(3))
    resume(ours, plain, tmp_path)
    for engine in (ours, plain):
        train(engine, tiny_source, range(3, 5))
    assert equal(weights(ours), weights(plain))


@pytest.mark.parametrize("name", ["weights", "weights, activations", "weights, checkpoint"])
def test_fetched_weights_are_lowered_as_autocast_lowers_them(
    make_engine: Make,
    tiny_source: Any,
    name: str,
    train: Train,
    weights: Weights,
    small_model: ModelConfig,
) -> None:
    small = replace(small_model, hidden_size=16, num_layers=2, intermediate_size=16)
    ours, plain = (make_engine(model=small, mode="bf16", **memory) for memory in (TRICKS[name], {}))
    assert [s.loss for s in train(ours, tiny_source, range(2))] == [
        s.loss for s in train(plain, tiny_source, range(2))
    ]
    assert equal(weights(ours), weights(plain))


@pytest.mark.parametrize("name", ["sgd", "nadamw", "adagrad", "lamb", "lars"])
def test_any_optimizer_goes_with_it(
    make_engine: Make, tiny_source: Any, name: str, train: Train, weights: Weights
) -> None:
    optim = {"name": name, "lr": 3e-3, "clip": None}
    engines = [make_engine(optim=optim, **memory) for memory in (TRICKS["optimizer"], {})]
    for engine in engines:
        train(engine, tiny_source, range(3))
    for a, b in zip(*map(weights, engines)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
def test_names_and_types_of_weights_stay(make_engine: Make, memory: dict[str, Any]) -> None:
    ours, plain = make_engine(**memory).model.state_dict(), make_engine().model.state_dict()
    assert [(k, v.dtype, v.shape) for k, v in ours.items()] == [
        (k, v.dtype, v.shape) for k, v in plain.items()
    ]
    assert equal(list(ours.values()), list(plain.values()))


class Late:
    """The arrival of copies that have not begun: they are made when somebody waits, in the order of their stream."""

    queue: ClassVar[list[Callable[[], object]]] = []

    def __init__(self) -> None:
        self.position = len(self.queue)

    def synchronize(self) -> None:
        for i in range(self.position):
            self.queue[i]()
            self.queue[i] = lambda: None


class LateCopies(offload.CopyStream):
    """The slowest side stream there can be; what has not arrived is NaN."""

    def copy(self, targets: Any, sources: Any) -> Any:
        for target, source in zip(targets, sources, strict=True):
            if target.is_floating_point():
                target.fill_(torch.nan)
            Late.queue.append(partial(torch.Tensor.copy_, target, source.detach()))
        return Late()

    def wait(self, event: Any) -> None:
        event.synchronize()


@pytest.mark.parametrize("memory", TRICKS.values(), ids=TRICKS)
def test_nothing_is_read_before_its_copy_was_waited_for(
    make_engine: Make,
    tiny_source: Any,
    monkeypatch: pytest.MonkeyPatch,
    memory: dict[str, Any],
    train: Train,
    weights: Weights,
) -> None:
    plain = make_engine()
    monkeypatch.setattr("cramming.parallel.offload.CopyStream", LateCopies)
    Late.queue.clear()
    ours = make_engine(**memory)
    for step in range(3):  # an evaluation between steps fetches weights too
        steps = range(step, step + 1)
        assert [s.loss for s in train(ours, tiny_source, steps)] == [
            s.loss for s in train(plain, tiny_source, steps)
        ]
        assert ours.evaluate([tiny_source.batch(50, 3)]) == plain.evaluate(
            [tiny_source.batch(50, 3)]
        )
    assert equal(weights(ours), weights(plain))
    assert bool(Late.queue) == any(name.startswith("offload") for name in memory)


def test_what_excludes_each_other_is_refused(make_engine: Make) -> None:
    with pytest.raises(UserError, match=r"memory\.checkpoint=selective"):
        make_engine(offload_weights=True, checkpoint_every=1, checkpoint="selective")
