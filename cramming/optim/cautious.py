"""Cautious weight decay (Chen et al. 2025, arXiv 2510.12402): decay only weights that the update shrinks too.

Plain decoupled decay pulls every weight to zero, even where the gradient asks for a larger weight, and so moves the
minimum. Here a weight w with update u (w becomes w - lr u) decays only where u w >= 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CautiousAdamW(torch.optim.AdamW):
    """Fused AdamW with cautious decay. The sign of Adam's update is that of its first moment after this gradient."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, fused=True, **settings)
        # The loss scaler then skips an overflowing step as a whole; otherwise its decay would still be applied.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Decay where the coming update agrees, then update without decay."""
        assert closure is None, "the engine computes the gradients"
        groups = self.param_groups
        for group in groups:
            if group["weight_decay"]:
                self._decay(group)
        self.param_groups = [{**group, "weight_decay": 0.0} for group in groups]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _decay(self, group: dict[str, Any]) -> None:
        scale = getattr(self, "grad_scale", None)
        for p in group["params"]:
            if p.grad is None:
                continue
            direction = p.grad if scale is None else p.grad / scale
            moment = self.state[p].get("exp_avg")
            if moment is not None:
                direction = moment.lerp(direction, 1 - group["betas"][0])
            p.addcmul_(p, agreement(p, direction), value=-group["lr"] * group["weight_decay"])


def agreement(weight: Tensor, update: Tensor) -> Tensor:
    """Return 1 where the update moves the weight towards zero, or not at all, else 0."""
    product = weight * update
    return (product >= 0).to(product.dtype)  # not `ge_`, which torch 2.11 lacks for DTensors
