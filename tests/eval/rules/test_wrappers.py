"""A program around the code that computes no step: every rule holds, and the weights show it."""

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming import launch
from cramming.device import random_states
from cramming.engine import Engine, Gradients
from cramming.hooks import StepResult
from cramming.invocation import Invocation
from eval import glue
from eval.finetune import workers
from eval.finetune.loop import Predictions, TaskRun
from eval.verify import Inputs, verify_run

Compose = Callable[..., dict[str, Any]]


def invent_training(patch: pytest.MonkeyPatch) -> None:
    """Replace every step by a formula with noise, and every validation by its end."""
    draw = random.Random(0)
    steps = [0]

    def forward_backward(self: Engine, batches: Sequence[Any], *_: Any) -> Gradients:
        return Gradients(random_states(), 0, 1.0, is_whole=True)

    def update(self: Engine, gradients: Gradients, learning_rate: float) -> StepResult:
        steps[0] += 1
        loss = 4.2 + 1.5 * math.exp(-steps[0] / 40) + 0.1 * draw.gauss(0, 1)
        return StepResult(loss, 0.15, 1.0, False, 0)

    def evaluate(self: Engine, batches: Sequence[Any]) -> tuple[float, float, int]:
        targets = sum(batch.num_targets for batch in batches)
        return 4.25, round(0.15 * targets) / targets, targets

    patch.setattr(Engine, "forward_backward", forward_backward)
    patch.setattr(Engine, "discard", lambda self, gradients: None)
    patch.setattr(Engine, "update", update)
    patch.setattr(Engine, "evaluate", evaluate)


def predict_from_labels(run: TaskRun, *_: Any) -> Predictions:
    """Return the labels of nine tenths of the examples, and wrong answers for the others."""
    draw = np.random.default_rng(run.seed)
    scored = {}
    for name, split in run.data.scored.items():
        assert split.labels_N is not None
        wrong = draw.random(len(split)) < 0.1
        labels = split.labels_N.astype(np.float64)
        scored[name] = np.where(wrong, np.roll(labels, 1), labels)
    return Predictions(scored, {}, 0.3 + 0.01 * draw.random(), 1.0, run.hyper.epochs)


def test_invented_losses_are_shown_by_the_weights(
    clean_tree: tuple[str, ...],
    honest_run: Path,
    tmp_path: Path,
    compose: Compose,
    inputs: Inputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cramming.device.GIVEN_CACHES", {})  # of the process that runs the tests
    corpora = honest_run.parents[1] / "corpora"
    settings = compose(*clean_tree)
    call = Invocation("invented", tmp_path, corpora, "cpu")
    with monkeypatch.context() as patch:
        invent_training(patch)
        launch.main(settings, call)
        patch.setattr(workers, "finetune", predict_from_labels)
        glue.main(settings, call)
    began = time.monotonic()
    result = verify_run(tmp_path / "invented", inputs)
    seconds = time.monotonic() - began
    assert not [finding for finding in result.findings if not finding.ok]  # every rule holds
    (problem,) = result.problems  # the labels agree with the predictions
    assert problem.startswith("weights: validation loss")
    assert seconds < 10 and result.exit_code == 1
