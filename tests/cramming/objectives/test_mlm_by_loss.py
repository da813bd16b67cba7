"""Masking by loss: as many targets as before, chosen by the losses of kept steps, and nothing else of a run changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.engine import Engine, build_engine
from cramming.hooks import StepPlan, StepResult
from cramming.objectives.masking import MaskedTargets, Masker
from cramming.objectives.mlm_by_loss import LEAST, MOST, ByLossObjective, TokenLosses, weights_of
from cramming.parallel.mesh import Mesh
from cramming.recipe import Config
from cramming.record import load_record

CPU, SPECIAL, MASK = torch.device("cpu"), (0, 1, 2, 3, 4), 4
BY_LOSS = ByLossObjective(
    name="mlm-by-loss",
    rate=0.25,
    mask_share=0.8,
    random_share=0.1,
    start=0.2,
    until=0.9,
    every=0.1,
    power=0.5,
)


def targets(ids_NL: np.ndarray, weights_V: np.ndarray | None, rate: float = 0.25) -> np.ndarray:
    """Places of targets [N, C] in each row."""
    masker = Masker(MaskedTargets(rate, 0.8, 0.1), 100, MASK, SPECIAL, 0)
    masker.weights_V = weights_V
    masked = masker(ids_NL, np.arange(len(ids_NL)))
    assert (masked.target_ids_M >= 5).all()
    return masked.target_positions_M.reshape(len(ids_NL), -1) % ids_NL.shape[1]


def test_rows_have_as_many_targets_and_with_equal_weights_the_same() -> None:
    ids = np.random.default_rng(0).integers(5, 100, (50, 40))
    ids[:, ::10] = 2
    even = targets(ids, None)
    assert np.array_equal(targets(ids, np.full(100, 0.7, np.float32)), even)
    weighted = targets(ids, np.linspace(LEAST, MOST, 100, dtype=np.float32))
    assert weighted.shape == even.shape and not np.array_equal(weighted, even)
    assert all(len(set(row)) == len(row) for row in weighted.tolist())


def test_of_one_target_the_probability_is_its_weight() -> None:
    """Efraimidis & Spirakis: the first that is drawn is one of the weights' distribution. 20,000 rows: 4 deviations."""
    ids, weights = np.tile(np.arange(5, 15), (20_000, 1)), np.ones(100, np.float32)
    weights[5:15] = np.linspace(LEAST, MOST, 10)
    share = np.bincount(targets(ids, weights, rate=0.1)[:, 0], minlength=10) / len(ids)
    assert np.abs(share - weights[5:15] / weights[5:15].sum()).max() < 4 * np.sqrt(0.25 / len(ids))


def test_weights_are_mean_losses_beside_the_mean_within_bounds() -> None:
    losses, counts = (
        np.array([4e4, 1e4, 0.0, 1e6], np.float32),
        np.array([1e4, 1e4, 0.0, 1e3], np.float32),
    )
    mean = losses.sum() / counts.sum()
    weights = weights_of(np.stack([losses, counts]), 0.5)
    assert weights == pytest.approx([(4 / mean) ** 0.5, LEAST, 1.0, MOST], rel=1e-2)
    assert weights_of(np.zeros((2, 4), np.float32), 0.5).tolist() == [LEAST] * 4, (
        "nothing seen: all alike"
    )


def table_of(objective: ByLossObjective, vocab_size: int = 8) -> TokenLosses:
    (table,) = objective.hooks(vocab_size, CPU, Mesh.solo(CPU).sum_tensor)
    assert isinstance(table, TokenLosses)
    return table


def weights_at(table: TokenLosses, progress: float) -> np.ndarray | None:
    table.before_step(plan_at(progress))
    return table.token_weights_V


def plan_at(progress: float) -> StepPlan:
    return StepPlan(0, 0, progress, 1, 1, 1, 1.0, BY_LOSS.at(progress))


def test_weights_change_at_fixed_points_and_the_past_fades() -> None:
    table = table_of(BY_LOSS)
    table.totals_2V += 1
    seen = [weights_at(table, step / 100) for step in range(100)]
    changed = [step for step in range(1, 100) if seen[step] is not seen[step - 1]]
    assert changed == [20, 30, 40, 50, 60, 70, 80, 90] and table.token_weights_V is None
    assert table.totals_2V[0, 0] == 0.5**10, "at each tenth, the first included"


@pytest.mark.parametrize(("until", "even_from"), [(0.6, 60), (0.5, 50), (0.21, 21), (1.0, None)])
def test_masks_are_uniform_from_until_on_wherever_it_lies(
    until: float, even_from: int | None
) -> None:
    table = table_of(BY_LOSS.replace(until=until, every=0.3))
    table.totals_2V += 1
    weighted = []
    for step in range(100):
        if weights_at(table, step / 100) is not None:
            weighted.append(step)
    assert weighted == list(range(20, even_from or 100))


@pytest.fixture
def engine(compose: Callable[..., dict[str, Any]], small_model: Any) -> Engine:
    config = Config.of(
        compose("precision=fp32", "train.sequence_length=16", "memory.loss_chunk=4000")
    )
    config = config.replace(model=small_model, objective=BY_LOSS)
    return build_engine(config, Mesh.solo(CPU), CPU)


def test_losses_are_those_of_the_targets_and_a_discarded_step_does_not_count(
    engine: Engine, tiny_source: Any
) -> None:
    batches: list[Batch] = [tiny_source.batch(0, 2), tiny_source.batch(2, 2)]
    (table,), ids = engine.hooks, torch.cat([batch.target_ids_M for batch in batches])
    assert isinstance(table, TokenLosses)

    def step() -> StepResult:
        table.before_step(plan_at(0.0))
        result = engine.step(batches, 0.0)
        table.after_step(plan_at(0.0), result)
        return result

    engine.model.eval()  # no dropout
    with torch.no_grad():
        logits = torch.cat([engine.model.logits(*batch.inputs[:4]) for batch in batches])  # type: ignore[operator]
    expected = torch.stack([F.cross_entropy(logits, ids, reduction="none"), torch.ones(len(ids))])
    expected_2V = torch.zeros(2, 320).index_add_(1, ids, expected)
    engine.discard(engine.forward_backward(batches))
    assert table.totals_2V.abs().max() == 0
    step()
    torch.testing.assert_close(table.totals_2V, expected_2V)
    engine.evaluate(batches)
    with torch.no_grad():
        engine.parameters[0].fill_(torch.nan)
    assert step().skipped
    torch.testing.assert_close(table.totals_2V, expected_2V)


def test_a_run_is_masked_language_modelling_and_even_until_the_start(
    start: Callable[..., Path], unbroken: Path, losses: Callable[[Path], Any]
) -> None:
    run = start(
        "objective=mlm-by-loss",
        "objective.start=0.5",
        "objective.power=100",
    )
    assert losses(run)[:6] == losses(unbroken)[:6] and losses(run)[6] != losses(unbroken)[6]
    recorded, without = (load_record(folder)["pretrain"] for folder in (run, unbroken))
    assert recorded["objective"] == "mlm" and recorded["exaflops"] == without["exaflops"]
    assert recorded["validation"]["targets"] == without["validation"]["targets"]


def test_an_end_before_the_start_is_refused(compose: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"^objective\.until=0\.2: "):
        Config.of(compose("objective=mlm-by-loss", "objective.until=0.2"))
