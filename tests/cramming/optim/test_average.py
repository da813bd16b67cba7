"""The final weights of a run with `train.average` are the mean of its last ones, and nothing else of it changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cramming.engine import Engine
from cramming.hooks import StepPlan, StepResult
from cramming.model.load import load_masked_lm
from cramming.objectives.masking import MaskedTargets
from cramming.optim.average import WeightAverage
from cramming.schedule import AverageConfig


def test_the_mean_is_of_the_points_that_were_passed() -> None:
    weight = torch.zeros(3)
    average = WeightAverage(AverageConfig(start=0.5, every=0.2), [weight])
    average.finish()
    assert weight.sum() == 0
    for step in range(10):
        weight.fill_(step)
        plan = StepPlan(step, step, step / 10, 1, 1, 1, 1.0, MaskedTargets(0.15, 0.8, 0.1))
        average.after_step(plan, StepResult(1.0, 0.0, 1.0, skipped=False))
    average.finish()
    assert average.count == 3 and torch.allclose(weight, torch.tensor((5 + 7 + 9) / 3))


def test_a_mean_of_no_point_is_said(
    start: Callable[..., Path],
    unbroken: Path,
    result: Callable[[Path], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = start("train.average={start: 0.99, every: 0.01}", "checkpoint.every_steps=3", name="a")
    assert (
        "the last ones, as no step began from its start on (train.average)"
        in capsys.readouterr().out
    )
    assert result(run) == result(unbroken)


def test_final_weights_are_the_mean_of_the_last_and_training_is_the_same(
    start: Callable[..., Path],
    unbroken: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: Callable[[Path], Any],
) -> None:
    seen: list[dict[str, Tensor]] = []
    original = Engine.update

    def noted(self: Engine, *arguments: Any) -> Any:
        stats = original(self, *arguments)
        seen.append({name: p.detach().clone() for name, p in self.model.state_dict().items()})
        return stats

    monkeypatch.setattr(Engine, "update", noted)
    run = start("train.average={start: 0.5, every: 0.01}", name="a")
    assert losses(run) == losses(unbroken)
    for name, tensor in load_masked_lm(run / "final").state_dict().items():
        torch.testing.assert_close(tensor, torch.stack([state[name] for state in seen[6:]]).mean(0))
