"""LAMB and LARS: steps scaled by the norm of each matrix, so that training with large batches works.

Both update lists of tensors (`torch._foreach_*`): one kernel launch per operation and parameter group. As in the
authors' code, vectors (the group `no_decay`) are updated without the scaling.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# eta of You et al. 2017, section 4: the step of a layer as a share of its norm
LARS_TRUST = 1e-3


class _Layerwise(torch.optim.Optimizer):
    """Base class of LAMB and LARS: creates state on first use, and updates all tensors of a group together."""

    moments: tuple[str, ...]
    _update: Callable[..., None]  # (group, parameters, gradients, states): updates in place

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, **defaults: Any) -> None:
        super().__init__(groups, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "the engine computes the gradients"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {name: torch.zeros_like(p) for name in self.moments}
                    self.state[p]["step"] = torch.tensor(0.0)
                self.state[p]["step"] += 1
            if parameters:
                states = [self.state[p] for p in parameters]
                self._update(group, parameters, [p.grad for p in parameters], states)


class Lamb(_Layerwise):
    """LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2): Adam's direction times |w| / |direction| per matrix."""

    moments = ("exp_avg", "exp_avg_sq")

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: Any, states: Any
    ) -> None:
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        steps = [int(state["step"]) for state in states]  # on the host; may differ by parameter
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_div(second, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        direction = torch._foreach_div(first, [1 - beta1**step for step in steps])
        torch._foreach_div_(direction, scale)
        torch._foreach_add_(direction, parameters, alpha=group["weight_decay"])
        if group["name"] == "decay":
            norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(direction))
            torch._foreach_mul_(direction, [_ratio(weight, step) for weight, step in norms])
        torch._foreach_add_(parameters, direction, alpha=-group["lr"])


class Lars(_Layerwise):
    """LARS (You et al. 2017, arXiv 1708.03888, algorithm 1): momentum SGD with a rate per matrix.

    The rate is eta |w| / (|g| + wd |w|).
    """

    moments = ("momentum_buffer",)

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: Any, states: Any
    ) -> None:
        velocity = [state["momentum_buffer"] for state in states]
        decay = group["weight_decay"]
        direction = torch._foreach_add(gradients, parameters, alpha=decay)
        if group["name"] == "decay":
            norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(gradients))
            rates = [LARS_TRUST * _ratio(w, g + decay * w) for w, g in norms]
            torch._foreach_mul_(direction, rates)
        torch._foreach_mul_(velocity, group["momentum"])
        torch._foreach_add_(velocity, direction, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocity)


def _ratio(norm: Tensor, other: Tensor) -> Tensor:
    """Return norm / other, or 1 where either is 0, without waiting for the device."""
    is_usable = (norm > 0) & (other > 0)
    return torch.where(is_usable, norm / torch.where(is_usable, other, 1.0), 1.0)
