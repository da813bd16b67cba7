"""An optimizer whose state lives in main memory, updated by the CPU (Ren et al. 2021, ZeRO-Offload).

For AdamW that frees eight bytes per parameter on the device; what remains there are weights and gradients. A step costs
the copy of all gradients to the host and of all weights back, once per step whatever the number of micro-batches, so it
suits long accumulation. torchao's CPUOffloadOptimizer is not used: it needs CUDA, has one optimizer per parameter, and
its checkpoints fit no other optimizer.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from cramming.parallel.lane import Lane

Groups = list[dict[str, Any]]


class HostOptimizer(torch.optim.Optimizer):
    """Runs `build(groups)` on fp32 host copies of the parameters in `groups`.

    Outside it looks like that optimizer on the device's parameters: same groups, same state dictionary. Parameters in
    `at_home` are on the host already and are updated in place. Weights are the model's to save: they must be loaded
    before this optimizer's state.
    """

    def __init__(
        self,
        groups: Groups,
        build: Callable[[Groups], torch.optim.Optimizer],
        lane: Lane,
        at_home: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        self._lane = lane
        self._parameters: list[list[nn.Parameter]] = [group["params"] for group in groups]
        self._masters = {p: p if p in at_home else _host_copy(p, lane) for ps in self._parameters for p in ps}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._inner = build([{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups])
        super().__init__(self._outer_groups(), {"fused": self._inner.defaults.get("fused")})
        self.state = self._inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Gradients to the host, one step there, weights back. The host waits for the gradients only."""
        assert closure is None, "the engine computes the gradients"
        all_groups = self._inner.param_groups
        away = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        away = [p for p in away if self._masters[p] is not p]
        for p in away:
            if p not in self._gradients:
                self._gradients[p] = self._lane.host_empty(p)
        buffers = [self._gradients[p] for p in away]
        arrived = self._lane.copy(buffers, [p.grad for p in away])
        if arrived is not None:
            arrived.synchronize()
        for p, buffer in zip(away, buffers):
            self._masters[p].grad = buffer
        try:
            # Made anew in each step: rates change.
            self._inner.param_groups = [
                {**group, "params": [self._masters[p] for p in group["params"]]} for group in self.param_groups
            ]
            self._inner.grad_scale = getattr(self, "grad_scale", None)  # type: ignore[attr-defined]  # clips, if fused
            self._inner.step()
        finally:
            self._inner.param_groups = all_groups
        for p in away:
            p.copy_(self._masters[p], non_blocking=True)
            self._masters[p].grad = None

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer inside would have it."""
        for inner, outer in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        return self._inner.state_dict()

    @torch.no_grad()
    def take_weights(self) -> None:
        """The model's weights were set from outside: go on from those that it has now."""
        for p, master in self._masters.items():
            if master is not p:
                master.copy_(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state, and the weights that the model has now."""
        self.take_weights()
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._outer_groups()
        self.state = self._inner.state

    def _outer_groups(self) -> Groups:
        return [{**inner, "params": own} for inner, own in zip(self._inner.param_groups, self._parameters, strict=True)]


def _host_copy(parameter: nn.Parameter, lane: Lane) -> nn.Parameter:
    return nn.Parameter(lane.host_empty(parameter).copy_(parameter.detach()))
