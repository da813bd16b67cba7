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

from cramming.schedule import AverageConfig


class WeightAverage:
    """The running mean of some parameters, and how many times they went into it."""

    def __init__(self, config: AverageConfig, parameters: Iterable[Tensor]) -> None:
        self.config, self.parameters = config, list(parameters)
        self.means: list[Tensor] = []
        self.count = self.point = 0

    @torch.no_grad()
    def add_if_due(self, progress: float) -> None:
        """After a step that began at `progress`: the weights count if that passed the next point."""
        point = math.floor((progress - self.config.start) / self.config.every + 1e-9)
        if point < 0 or (self.count and point <= self.point):
            return
        self.count, self.point = self.count + 1, point
        self.means = self.means or [torch.zeros_like(p, device="cpu") for p in self.parameters]
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter.cpu(), 1 / self.count)

    @torch.no_grad()
    def take(self) -> None:
        """Put the mean into the parameters; they stay as they are where nothing was due."""
        for mean, parameter in zip(self.means, self.parameters):
            parameter.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"means": self.means, "count": self.count, "point": self.point}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.means, self.count, self.point = list(state["means"]), state["count"], state["point"]
