"""An update made while the backward pass goes on: gradients live shortly, and what is not finite does no harm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming.config import UserError
from cramming.engine import Engine, StepStats
from cramming.parallel.apply import MemoryConfig, refuse_unfit

Train = Callable[..., list[StepStats]]
Weights = Callable[[Engine], list[Tensor]]


def test_gradients_are_gone_when_the_next_is_made(
    make_engine: Callable[..., Engine], tiny_source: Any, train: Train
) -> None:
    engine, alive = make_engine(update_in_backward=True), list[int]()

    def count(_: Tensor) -> None:
        alive.append(sum(p.grad is not None for p in engine.parameters))

    for p in engine.parameters:
        p.register_post_accumulate_grad_hook(count)
    train(engine, tiny_source, range(1))
    assert len(alive) == len(engine.parameters)
    assert max(alive) <= 1


def test_the_deadline_decides_before_anything_has_moved(
    make_engine: Callable[..., Engine], tiny_source: Any, train: Train, weights: Weights
) -> None:
    engine = make_engine(update_in_backward=True)
    before, foreseen = weights(engine), list[float]()

    def no() -> bool:
        foreseen.append(engine.foreseen_seconds)
        return False

    assert engine.step([tiny_source.batch(0, 4)], 0.1, no) is None
    assert foreseen[0] > 0  # nothing was measured yet, so the forward pass must tell
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), before, strict=True))
    assert not engine.optimizer.state_dict()["state"]
    train(engine, tiny_source, range(1))
    assert engine.update_seconds > 0
    assert engine.step([tiny_source.batch(0, 4)], 0.1, no) is None
    assert foreseen[1] == 0


@pytest.mark.parametrize("bad", ["loss", "one gradient"])
def test_what_is_not_finite_reaches_no_weight(
    make_engine: Callable[..., Engine], tiny_source: Any, bad: str, train: Train, weights: Weights
) -> None:
    engine = make_engine(update_in_backward=True)
    train(engine, tiny_source, range(1))
    victim = engine.model.encoder.blocks[0].attn.qkv.weight  # type: ignore[union-attr]
    before, kept = victim.detach().clone(), weights(engine)
    if bad == "loss":
        with torch.no_grad():
            engine.model.decoder_bias.fill_(torch.nan)  # type: ignore[union-attr,operator]
        kept = weights(engine)
    else:
        victim.register_hook(lambda gradient: gradient * torch.inf)
    stats = engine.step([tiny_source.batch(4, 4)], 0.1)
    assert stats is not None
    assert (stats.skipped, stats.partly_skipped) == (bad == "loss", bad == "one gradient")
    assert torch.equal(victim, before)
    if bad == "loss":
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(weights(engine), kept))
    else:
        assert all(w.isfinite().all() for w in weights(engine))
        assert not any(torch.equal(a, b) for a, b in zip(weights(engine), kept) if not torch.equal(a, before))
        steps = {float(s["step"]) for s in engine.optimizer.state_dict()["state"].values()}
        assert steps == {1.0, 2.0}  # the victim's state has not moved either
        stats = engine.step([tiny_source.batch(8, 4)], 0.1)
        assert stats is not None and stats.partly_skipped


@pytest.mark.parametrize(
    "optim",
    [{"name": "sgd", "betas": (0.9, 0.0), "eps": 0.0}, {"name": "lamb"}, {"name": "adamw"}],
    ids=lambda optim: optim["name"],
)
def test_a_first_gradient_that_is_not_finite_leaves_the_rest(
    make_engine: Callable[..., Engine], tiny_source: Any, optim: dict[str, Any]
) -> None:
    ours, plain = (make_engine(update_in_backward=True, optim=optim) for _ in range(2))
    victims = [e.model.encoder.blocks[0].attn.qkv.weight for e in (ours, plain)]  # type: ignore[union-attr]
    before, handle = victims[0].detach().clone(), victims[0].register_hook(lambda g: g * torch.nan)
    for engine in (ours, plain):
        torch.manual_seed(0)
        engine.step([tiny_source.batch(0, 4)], 0.1)
    assert torch.equal(victims[0], before)
    others = [(a, b) for a, b in zip(ours.parameters, plain.parameters) if a is not victims[0]]
    assert all(torch.equal(a, b) for a, b in others)
    handle.remove()
    torch.manual_seed(1)
    stats = ours.step([tiny_source.batch(4, 4)], 0.1)
    assert stats is not None and not stats.skipped and not stats.partly_skipped
    assert not torch.equal(victims[0], before)


def test_the_host_does_not_wait_for_each_parameter(
    make_engine: Callable[..., Engine], tiny_source: Any, train: Train, host_reads: Callable[..., list[str]]
) -> None:
    """It reads a fixed number of times in a step, however many parameters there are."""
    engine = make_engine(update_in_backward=True)
    assert host_reads(lambda: train(engine, tiny_source, range(1))) == ["tolist", "tolist"]
    assert len(engine.parameters) > 2


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"micro_batches": 2}, "train.micro_batch=8"),
        ({"clip": 0.5}, "optim.clip=null"),
        ({"mode": "fp16"}, "precision=bf16"),
        ({"processes": 2}, "one process"),
    ],
)
def test_steps_of_another_kind_are_refused(changes: dict[str, Any], names: str) -> None:
    config = MemoryConfig(0, "full", None, False, False, False, True)
    fit = {"micro_batches": 1, "clip": None, "mode": "fp32", "processes": 1, "fits": "8"}
    refuse_unfit(config, **fit)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=names) as caught:
        refuse_unfit(config, **{**fit, **changes})
    assert "update_in_backward" in str(caught.value)
