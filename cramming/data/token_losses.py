"""Masking by what the model still gets wrong: ids whose loss has been high are targets more often.

A target that is predicted already teaches little. Masking by how well the model predicts a token: Edman & Fraser 2025,
"Mask and You Shall Receive"; masked content that changes during training: Yang et al. 2023, "Learning Better Masking".
InforMask (Sadeq et al. 2022) chooses by mutual information, before training. How many are masked stays `rate`.

The model also learns how often which token is hidden, and where hard ones are preferred, [MASK] stands for them more
often than in uniform masks. Hence `until`, from where on masks are uniform again. Training losses are meanwhile those
of harder targets; the validation has its own masks.

Batches are made ahead, so weights change at fixed points of the budget only: `start`, `start + every` and so on, and
`until`. At each of the former, also at those that lie before `start`, all sums are halved: the losses of a weaker model
fade. Shapes: V vocabulary, M targets.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cramming.data.masking import ByLoss

LEAST, MOST = 0.25, 4.0  # weights: nothing is never a target, nor always
PRIOR = 4.0  # targets of the mean loss that each id is taken to have had, for those seen seldom


class TokenLosses:
    """Sums of the losses of each id as a target, and the weights that are in force. Repeatable bit for bit on a CPU."""

    def __init__(self, config: ByLoss, vocab_size: int, device: torch.device) -> None:
        self.config = config
        self.totals_2V = torch.zeros(2, vocab_size, device=device)  # losses in nats, and targets
        self.step_2V = torch.zeros_like(self.totals_2V)  # of the step that is not yet kept
        self.weights_V: np.ndarray | None = None  # None: all ids alike
        self.point: int | None = None  # the last that was passed, 0 at `start`

    def begin_step(self) -> None:
        """What was added since the last kept step does not count: it was discarded."""
        self.step_2V.zero_()

    @torch.no_grad()
    def add(self, target_ids_M: Tensor, losses_M: Tensor) -> None:
        """The targets of one micro-batch; negative ones do not count. The host does not wait."""
        ids_M = target_ids_M.to(losses_M.device, non_blocking=True)
        for sums_V, values_M in zip(self.step_2V, (losses_M, (ids_M >= 0).float())):
            sums_V.index_add_(0, ids_M.clamp(min=0), values_M)

    def end_step(self) -> None:
        """The step is kept."""
        self.totals_2V += self.step_2V

    def weigh_if_due(self, progress: float) -> bool:
        """Before a step at `progress`: whether it passed another point, and with it weights changed."""
        point = math.floor((progress - self.config.start) / self.config.every + 1e-9)
        is_weighted = point >= 0 and progress < self.config.until - 1e-9
        if point == self.point and is_weighted == (self.weights_V is not None):
            return False
        before, self.point = self.weights_V, point
        self.weights_V = (
            weights_of(self.totals_2V.cpu().numpy(), self.config.power) if is_weighted else None
        )
        self.totals_2V /= 2
        return before is not self.weights_V

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        weights = None if self.weights_V is None else torch.from_numpy(self.weights_V)
        return {"totals": self.totals_2V, "weights": weights, "point": self.point}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.totals_2V.copy_(state["totals"])
        self.weights_V = None if state["weights"] is None else state["weights"].numpy()
        self.point = state["point"]


def weights_of(totals_2V: np.ndarray, power: float) -> np.ndarray:
    """Weights [V] within `LEAST` and `MOST`: mean losses beside the mean of all targets, to the `power`."""
    losses_V, counts_V = totals_2V
    mean = losses_V.sum() / max(counts_V.sum(), 1.0)
    beside_V = (losses_V + PRIOR * mean) / ((counts_V + PRIOR) * max(mean, 1e-9))
    return np.clip(beside_V**power, LEAST, MOST)
