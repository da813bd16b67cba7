"""Facts of a run's weights: how far its checkpoints lie apart, and what the last one answers on held-out text.

The answers are to questions that a log cannot hold: which neighbour of a hidden word the model predicts, and whether
its answer depends on the order of the words that it sees. Shapes: M targets, S bounds, T tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cramming import checkpoint
from cramming.data.batches import ALL_MASK, Batch
from cramming.data.run_data import RunData
from cramming.model.heads import MaskedLM
from cramming.objectives.masking import IGNORE
from cramming.recipe import Config
from cramming.runlog import Saved, Training
from eval.diagnose.evidence import ModelFacts

OFFSETS = (-2, -1, 0, 1, 2)
TINY = 1e-30
ROWS, BATCHES = 16, 4  # of held-out text that the model answers for


def model_facts(
    folder: Path, training: Training, config: Config, data: RunData | None
) -> ModelFacts:
    """Return what a run's checkpoints show, as far as there are any; without `data` no answers."""
    paths = checkpoints_of(folder, training)
    states = [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths]
    if not states:
        return ModelFacts()
    weights = [state["model"] for state in states]
    facts = ModelFacts(loss_scale=float(states[-1]["scaler"].get("scale", math.nan)))
    if len(weights) > 1:
        facts = replace(facts, **movement(weights, [state["work"]["steps"] for state in states]))
    if data is None or not config.objective.has_masked_lm:
        return facts
    model = MaskedLM(config.model)  # without the run's kernel, which may need its device
    model.load_state_dict(weights[-1])
    return replace(facts, **answers(model.eval(), data))


def checkpoints_of(folder: Path, training: Training) -> list[Path]:
    """Return the files of the checkpoints that are there, one for each number of steps, in their order."""
    paths: dict[int, Path] = {}
    for saved in training.saved:
        path = checkpoint.path_of(folder / "checkpoints", Saved(saved.steps, saved.sha256))
        if path.is_file():
            paths[saved.steps] = path
    return [paths[steps] for steps in sorted(paths)]


def movement(weights: list[Mapping[str, Tensor]], steps: list[int]) -> dict[str, Any]:
    """Return how far and in which directions parameters moved between checkpoints.

    Lengths count from the state before the first step: without that checkpoint there are none.
    """
    first, last = weights[0], weights[-1]
    facts: dict[str, Any] = {"changes": {name: change(first[name], last[name]) for name in first}}
    if steps[0] > 0:
        return facts
    begin = lengths(weights[0], weights[1])
    facts |= {"distance": begin.distance / begin.length, "distance_steps": steps[1]}
    if len(weights) > 2:
        following = lengths(weights[1], weights[2])
        turned = sum(
            float((weights[1][name] - first[name]).flatten() @ (later - weights[1][name]).flatten())
            for name, later in weights[2].items()
            if later.ndim >= 2
        )
        facts["turn"] = turned / max(begin.distance * following.distance, TINY)
    return facts


class Lengths(NamedTuple):
    """Norms over all matrices: of the earlier state, and of the difference."""

    length: float
    distance: float


def lengths(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Lengths:
    """Return the norms over all matrices of a state and of its change."""
    squares = [0.0, 0.0]
    for name, weight in before.items():
        if weight.ndim >= 2:
            for place, tensor in enumerate((weight, after[name] - weight)):
                squares[place] += float(tensor.float().norm()) ** 2
    return Lengths(*(math.sqrt(square) for square in squares))


def change(first: Tensor, last: Tensor) -> float:
    """Return the length of a parameter's change across its first direction, over its first length.

    Weight decay shrinks a parameter without a gradient, so what lies in its direction does not count.
    """
    before, after = first.flatten().double(), last.flatten().double()
    length = float(before.norm())
    if len(before) == 1 or length == 0.0:
        return float((after - before).norm()) / (length or 1.0)
    along = float(before @ after) / length**2
    return float((after - along * before).norm()) / length


@torch.inference_mode()
def answers(model: MaskedLM, data: RunData) -> dict[str, Any]:
    """Return losses by offset of the answer, and what shuffling the visible words changes."""
    sums = dict.fromkeys(OFFSETS, 0.0)
    counts = dict.fromkeys(OFFSETS, 0)
    squares = {"states": 0.0, "order": 0.0, "context": 0.0}
    shuffled_sum = 0.0
    generator = torch.Generator().manual_seed(0)
    for batch in data.held_out.batches(ALL_MASK, ROWS)[:BATCHES]:
        states_MD = _at_targets(model, batch)
        answers_T = batch.ids_T.clone()
        is_target_M = batch.target_ids_M != IGNORE
        answers_T[batch.target_positions_M[is_target_M]] = batch.target_ids_M[is_target_M]
        for offset in OFFSETS:
            wanted_M = _shifted(answers_T, batch, offset)
            loss, *_ = model.loss(states_MD, wanted_M)
            sums[offset] += float(loss)
            counts[offset] += int((wanted_M != IGNORE).sum())
        bounds = batch.packing.bounds_S.tolist()
        by_sequence_MD = _at_targets(model, with_shuffled_words(batch, bounds, generator))
        ends = [0, len(batch.ids_T)]
        anywhere_MD = _at_targets(model, with_shuffled_words(batch, ends, generator))
        loss, *_ = model.loss(by_sequence_MD, batch.target_ids_M)
        shuffled_sum += float(loss)
        squares["states"] += float(states_MD[is_target_M].norm()) ** 2
        squares["order"] += float((by_sequence_MD - states_MD)[is_target_M].norm()) ** 2
        squares["context"] += float((anywhere_MD - states_MD)[is_target_M].norm()) ** 2
    losses = {offset: sums[offset] / max(1, counts[offset]) for offset in OFFSETS}
    length = math.sqrt(max(squares["states"], TINY))
    return {
        "losses": losses,
        "order_use": math.sqrt(squares["order"]) / length,
        "context_use": math.sqrt(squares["context"]) / length,
        "order_loss": shuffled_sum / max(1, counts[0]) - losses[0],
    }


def _at_targets(model: MaskedLM, batch: Batch) -> Tensor:
    return model.at_targets(batch.ids_T, batch.positions_T, batch.packing, batch.target_positions_M)


def _shifted(answers_T: Tensor, batch: Batch, offset: int) -> Tensor:
    """Return the tokens so many places behind the targets, IGNORE outside the batch and where there is no target."""
    places_M = batch.target_positions_M + offset
    is_inside_M = (places_M >= 0) & (places_M < len(answers_T))
    is_wanted_M = is_inside_M & (batch.target_ids_M != IGNORE)
    wanted_M = answers_T[places_M.clamp(0, len(answers_T) - 1)]
    return torch.where(is_wanted_M, wanted_M, IGNORE)


def with_shuffled_words(batch: Batch, bounds: Sequence[int], generator: torch.Generator) -> Batch:
    """Return the batch with the visible tokens between two bounds in random order; targets stay where they are."""
    ids_T = batch.ids_T.clone()
    is_visible_T = torch.ones(len(ids_T), dtype=torch.bool)
    is_visible_T[batch.target_positions_M[batch.target_ids_M != IGNORE]] = False
    for begin, end in pairwise(bounds):
        places = begin + torch.nonzero(is_visible_T[begin:end]).flatten()
        order = torch.randperm(len(places), generator=generator)
        ids_T[places] = ids_T[places[order]]
    return replace(batch, ids_T=ids_T)
