"""The mean of the last weights, taken as the final ones.

Weights late in a run go around a minimum whose middle is better than most points on the way: averaging stands in for a
part of the learning rate's decay (Kaddour 2022, latest weight averaging; Izmailov et al. 2018, stochastic weight
averaging). The sum is made inside the timed loop, so its time is part of the budget. The mean lies in main memory, in
fp32: 4 bytes a parameter, none of a GPU's.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cramming.hooks import Hook, StepPlan, StepResult
from cramming.schedule import AverageConfig


class WeightAverage(Hook):
    """Running mean of the parameters, and how many times they went into it."""

    name = "average"

    def __init__(self, config: AverageConfig, parameters: Iterable[Tensor]) -> None:
        self.config, self.parameters = config, list(parameters)
        self.means: list[Tensor] = []
        self.count = self.point = 0

    @torch.no_grad()
    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Add the weights after a step that has passed the next point."""
        point = math.floor((plan.progress - self.config.start) / self.config.every + 1e-9)
        if point < 0 or (self.count and point <= self.point):
            return
        self.count, self.point = self.count + 1, point
        self.means = self.means or [torch.zeros_like(p, device="cpu") for p in self.parameters]
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter.cpu(), 1 / self.count)

    @torch.no_grad()
    def finish(self) -> str:
        """Put the mean into the parameters; they stay as they are where nothing was due."""
        for mean, parameter in zip(self.means, self.parameters):
            parameter.copy_(mean)
        if not self.count:
            return "the final weights are the last ones, as no step began from its start on (train.average)"
        return f"the final weights are the mean of {self.count} along the way (train.average)"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"means": self.means, "count": self.count, "point": self.point}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state of a checkpoint."""
        self.means, self.count, self.point = list(state["means"]), state["count"], state["point"]
