"""The table of optimizers. All are torch's own; an entry is one builder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cramming.optim.groups import parameter_groups


@dataclass(frozen=True)
class OptimConfig:
    """`lr` is the peak learning rate; `clip` the largest global gradient norm (null: no clipping)."""

    name: Literal["adamw", "nadamw", "adagrad", "sgd"]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float | None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr={self.lr} is not above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} are not in [0, 1)")
        for name in ("weight_decay", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is below 0")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip} is not above 0; null means no clipping")


def _adamw(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) in one fused kernel: on the CPU 4 to 6 times faster than the default loop."""
    return torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps, fused=True)


def _nadamw(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
    """NAdam with decoupled weight decay (Dozat 2016)."""
    return torch.optim.NAdam(groups, lr=c.lr, betas=c.betas, eps=c.eps, decoupled_weight_decay=True)


def _adagrad(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=c.lr, eps=c.eps)


def _sgd(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
    """SGD with `betas[0]` as Nesterov momentum."""
    return torch.optim.SGD(groups, lr=c.lr, momentum=c.betas[0], nesterov=c.betas[0] > 0)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "nadamw": _nadamw,
    "adagrad": _adagrad,
    "sgd": _sgd,
}


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `config.name` over the model's parameter groups."""
    return OPTIMIZERS[config.name](parameter_groups(model, config.weight_decay), config)
