"""The update inside the backward pass: each parameter moves as soon as its gradient is complete, which is then freed.

At no time does more than a few gradients exist, so four bytes per parameter are saved (Lv et al. 2023, LOMO, but with
any optimizer). The price: nothing can be decided from all gradients together, neither clipping nor skipping.
"""

import math
import threading
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For all groups. torchao keeps the rate in a tensor, which its compiled step reads, and wants it filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Update(NamedTuple):
    """What became of a step's gradients: their norm, nan if any was not finite, and whether any weight moved."""

    norm: float
    moved: bool


class UpdateInBackward:
    """Hooks on all parameters of `optimizer`, one step of one parameter each.

    A parameter whose gradient is not finite stays as it is, as does its state, while the others move: nothing is known
    of those to come when a parameter's turn is there. What one backward pass found is asked by `finish`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._norms: list[Tensor] = []
        # A fused optimizer reads on the device whether to leave its parameters alone. For others the host must know,
        # and waits for every parameter's gradient.
        self._skips_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        # Gradients of parameters on the host and of those on a GPU arrive in different threads of autograd.
        self._lock = threading.Lock()
        for p in self._group_of:
            p.register_post_accumulate_grad_hook(self._update)

    def finish(self) -> Update:
        """What the backward pass that has ended came to; here the host waits for the device."""
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for norm in self._norms:
            by_device[norm.device].append(norm)
        self._norms = []
        norms = [norm for tensors in by_device.values() for norm in torch.stack(tensors).tolist()]
        finite = [norm for norm in norms if math.isfinite(norm)]
        return Update(math.hypot(*norms) if len(finite) == len(norms) else math.nan, bool(finite))

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        with self._lock:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._norms.append(norm)
            if self._skips_on_device:
                self.optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
                self._step(parameter)
                del self.optimizer.found_inf  # type: ignore[attr-defined]
            elif math.isfinite(norm.item()):
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
