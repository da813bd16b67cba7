"""The update inside the backward pass: each parameter moves as soon as its gradient is complete, which is then freed.

At no time does more than a few gradients exist, so four bytes per parameter are saved (Lv et al. 2023, LOMO, but with
any optimizer). The price: nothing can be decided from all gradients together, neither clipping nor skipping.
"""

import math
import threading

import torch
from torch import Tensor, nn


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For all groups. torchao keeps the rate in a tensor, which its compiled step reads, and wants it filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class UpdateInBackward:
    """Hooks on all parameters of `optimizer`, one step of one parameter each.

    A parameter whose gradient is not finite stays as it is, without its state. What one backward pass found is asked
    by `finish`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._norms: list[float] = []
        # Gradients of parameters on the host and of those on a GPU arrive in different threads of autograd.
        self._lock = threading.Lock()
        for p in self._group_of:
            p.register_post_accumulate_grad_hook(self._update)

    def finish(self) -> float:
        """The norm of all gradients of the backward pass that has ended; not finite if any was left out."""
        norms, self._norms = self._norms, []
        return math.hypot(*norms) if all(map(math.isfinite, norms)) else math.nan

    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        with self._lock:
            norm = torch.linalg.vector_norm(parameter.grad).item()
            self._norms.append(norm)
            if math.isfinite(norm):
                self._step(parameter)
            parameter.grad = None

    def _step(self, parameter: nn.Parameter) -> None:
        """A step of the one optimizer that sees only this one; its state dictionary stays that of a plain run."""
        everything = self.optimizer.param_groups
        group = everything[self._group_of[parameter]]
        try:
            self.optimizer.param_groups = [{**group, "params": [parameter]}]
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = everything
