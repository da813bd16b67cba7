"""Masked language modelling by what the model still gets wrong: ids with a high loss are targets more often.

A target that is predicted already teaches little. Masking by how well the model predicts a token: Edman & Fraser 2025,
"Mask and You Shall Receive"; masked content that changes during training: Yang et al. 2023, "Learning Better Masking".
InforMask (Sadeq et al. 2022) chooses by mutual information, before training. Shapes: V vocabulary, M targets.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from cramming.config import Fraction, Positive, Share
from cramming.hooks import Hook, StepPlan, StepResult
from cramming.objectives.mlm import MaskedObjective

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST, MOST = 0.25, 4.0  # weights: nothing is never a target, nor always
PRIOR = 4.0  # targets of the mean loss that each id is taken to have had, for those seen seldom


class ByLossObjective(MaskedObjective):
    """Prediction of hidden tokens, more often of those with a high mean loss, from progress `start` to `until`.

    `rate` decides how many tokens are targets, and weights which ones: an id's mean loss over that of all targets, to
    the `power`, computed at `start` and then at every `every` of the budget.

    The model also learns how often which token is hidden, and where hard ones are preferred, [MASK] stands for them
    more often than in uniform masks: hence `until`, from where on masks are uniform. Meanwhile training losses are
    those of harder targets.
    """

    start: Fraction
    until: Share
    every: Positive
    power: Positive
    gives_losses: ClassVar[bool] = True

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> Self:
        if self.until <= self.start:
            raise ValueError(
                f"until={self.until:g}: not after start={self.start:g}. Raise it, or lower start."
            )
        return self

    @property
    def kind(self) -> str:
        """Name in the record: what the model learns."""
        return "mlm"

    def describe(self, length: int) -> str:
        """Return the targets of each phase in words, in rows of `length` tokens."""
        chosen = f"chosen by loss from {self.start:.0%} to {self.until:.0%} of the budget"
        return f"{super().describe(length)}, {chosen}"

    def hooks(
        self,
        vocab_size: int,
        device: "torch.device",
        sum_over_ranks: "Callable[[Tensor], None]",
    ) -> list[Hook]:
        """Return the sums of losses that the choice of targets follows."""
        import torch

        totals_2V = torch.zeros(2, vocab_size, device=device)
        return [TokenLosses(self, totals_2V, sum_over_ranks)]


class TokenLosses(Hook):
    """Sums of the losses of each id as a target, and the weights in force. Repeatable bit for bit on a CPU.

    Batches are prefetched, so weights change at fixed points of the budget only: `start`, `start + every` and so on,
    and `until`. At each of the former, and at those that lie before `start`, all sums are halved: the losses of a
    weaker model fade. `sum_over_ranks` sums a tensor over the processes with other samples, in place.
    """

    name = "token_losses"

    def __init__(
        self,
        config: ByLossObjective,
        totals_2V: "Tensor",
        sum_over_ranks: "Callable[[Tensor], None]",
    ) -> None:
        self.config, self.sum_over_ranks = config, sum_over_ranks
        self.totals_2V = totals_2V  # losses in nats, and targets
        self.step_2V = totals_2V.clone()  # of the step that is not yet kept
        self.point: int | None = None  # the last that was passed, 0 at `start`

    def before_step(self, plan: StepPlan) -> None:
        """Compute weights anew where they are due, and forget what a discarded step has added."""
        self.weigh_if_due(plan.progress)
        self.step_2V.zero_()

    def after_pass(self, target_ids_M: "Tensor", outputs: "tuple[Tensor, ...]") -> None:
        """Add the targets of one micro-batch; negative ones do not count. The host does not wait."""
        (losses_M,) = outputs
        ids_M = target_ids_M.to(losses_M.device, non_blocking=True)
        losses_V, counts_V = self.step_2V
        losses_V.index_add_(0, ids_M.clamp(min=0), losses_M.detach())
        counts_V.index_add_(0, ids_M.clamp(min=0), (ids_M >= 0).float())

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the losses of a step that has moved the weights."""
        if not result.skipped:
            self.sum_over_ranks(self.step_2V)
            self.totals_2V += self.step_2V

    def weigh_if_due(self, progress: float) -> None:
        """Compute weights anew if a step at `progress` has passed a point."""
        config = self.config
        point = math.floor((progress - config.start) / config.every + 1e-9)
        is_weighted = point >= 0 and progress < config.until - 1e-9
        if point == self.point and is_weighted == (self.token_weights_V is not None):
            return
        self.point = point
        self.token_weights_V = None
        if is_weighted:
            self.token_weights_V = weights_of(self.totals_2V.cpu().numpy(), config.power)
        self.totals_2V /= 2

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        weights = None
        if self.token_weights_V is not None:
            weights = self.totals_2V.cpu().new_tensor(self.token_weights_V)
        return {"totals": self.totals_2V, "weights": weights, "point": self.point}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state of a checkpoint."""
        self.totals_2V.copy_(state["totals"])
        self.token_weights_V = None if state["weights"] is None else state["weights"].numpy()
        self.point = state["point"]


def weights_of(totals_2V: np.ndarray, power: float) -> np.ndarray:
    """Return weights [V] within `LEAST` and `MOST`: mean losses over the mean of all targets, to the `power`."""
    losses_V, counts_V = totals_2V
    mean = losses_V.sum() / max(counts_V.sum(), 1.0)
    relative_V = (losses_V + PRIOR * mean) / ((counts_V + PRIOR) * max(mean, 1e-9))
    return np.clip(relative_V**power, LEAST, MOST)


OBJECTIVE = ByLossObjective
