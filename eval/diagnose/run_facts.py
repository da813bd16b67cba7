"""Facts of a run that its log holds: losses of each step, gradient norms, rates, sizes of a step."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cramming.objectives.masking import MaskedTargets
from cramming.record_schema import Record
from cramming.runlog import Training
from eval.diagnose.evidence import RunFacts

if TYPE_CHECKING:
    from cramming.recipe import Config


def run_facts(record: Record, training: Training, config: "Config") -> RunFacts:
    """Return the facts of a run from its record, its log and its recipe."""
    by_step: dict[int, float] = {}
    for row in training.steps:
        first = row.step - len(row.each_loss) + 1
        for step, loss in enumerate(row.each_loss, first):
            by_step[step] = math.nan if loss is None else loss
    validations = [(each.step, each.loss) for each in training.validations if each.loss is not None]
    final = training.final_validation
    counters: Mapping[str, Any] = training.counters
    windows = training.setup.windows if training.setup else 0
    phase = config.objective.at(0.5)
    train = config.train
    return RunFacts(
        status=str(record.training.status),
        steps=counters.get("steps", 0),
        epochs=counters.get("sequences", 0) / windows if windows else 0.0,
        losses_S=np.array([by_step[step] for step in sorted(by_step)]),
        norms_R=np.array([row.grad_norm for row in training.steps if row.grad_norm is not None]),
        clip=config.optim.clip,
        skipped=counters.get("skipped_steps", 0),
        validations=tuple(validations),
        all_mask_loss=final.all_mask_loss if final else None,
        objective=config.objective.name,
        predicts_tokens=config.objective.has_masked_lm,
        rate=phase.rate,
        form=phase if isinstance(phase, MaskedTargets) else None,
        sequences_per_step=train.batch_size,
        sequence_length=train.sequence_length,
        peak_rate=config.peak_learning_rate,
        precision=training.setup.training.get("precision", "") if training.setup else "",
    )
