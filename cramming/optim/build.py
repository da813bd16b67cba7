"""The table of optimizers: torch's own, torchao's with 8- and 4-bit state, LAMB and LARS.

To add an optimizer: a dataclass with its settings and `build`, its row in `OPTIMIZERS`, and its YAML file.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cramming.optim.groups import parameter_groups

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class LearningRateScale:
    """`optim.lr` is for a batch of `base_batch` sequences; `rule` carries it over to others.

    Linear (Goyal et al. 2017, section 2.1) keeps the sum of SGD's steps per epoch, the square root (Krizhevsky 2014,
    section 5) the variance of the noise; the latter suits Adam and LAMB (You et al. 2020, section 4.2).
    """

    rule: Literal["linear", "sqrt"]
    base_batch: int

    def __post_init__(self) -> None:
        if self.base_batch < 1:
            raise ValueError(f"base_batch={self.base_batch} is below 1")

    def factor(self, batch_size: int) -> float:
        """Of the learning rate, at this batch."""
        ratio = batch_size / self.base_batch
        return ratio if self.rule == "linear" else ratio**0.5


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """What all optimizers have: the peak learning rate, and the largest global gradient norm (null: no clipping)."""

    name: str
    lr: float
    lr_scale: LearningRateScale | None
    weight_decay: float
    clip: float | None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr={self.lr} is not above 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay} is below 0")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip} is not above 0; null means no clipping")

    def peak_learning_rate(self, batch_size: int) -> float:
        """The peak for a batch of `batch_size` sequences."""
        return self.lr * (self.lr_scale.factor(batch_size) if self.lr_scale else 1)

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        """The optimizer over these parameter groups."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimConfig):
    """AdamW (Loshchilov & Hutter 2019) in one fused kernel: on the CPU 4 to 6 times faster than the default loop."""

    betas: tuple[float, float]
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} are not in [0, 1)")
        if self.eps < 0:
            raise ValueError(f"eps={self.eps} is below 0")

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class NAdamW(AdamW):
    """NAdam with decoupled weight decay (Dozat 2016)."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.NAdam(groups, lr=self.lr, betas=self.betas, eps=self.eps, decoupled_weight_decay=True)


class LowBitAdamW(AdamW):
    """AdamW whose moments are kept in blocks of 8 or 4 bits (Dettmers et al. 2022; Li et al. 2023), by torchao."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        import torchao.optim

        make = {"adamw8bit": torchao.optim.AdamW8bit, "adamw4bit": torchao.optim.AdamW4bit}[self.name]
        optimizer: torch.optim.Optimizer = make(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        return optimizer


class LambConfig(AdamW):
    """LAMB (You et al. 2020)."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        from cramming.optim.layerwise import Lamb, adapting_matrices

        return Lamb(adapting_matrices(groups), lr=self.lr, betas=self.betas, eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class Adagrad(OptimConfig):
    """Adagrad (Duchi et al. 2011)."""

    eps: float

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups, lr=self.lr, eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimConfig):
    """SGD with Nesterov momentum."""

    momentum: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} is not in [0, 1)")

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


class LarsConfig(SGD):
    """LARS (You et al. 2017)."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        from cramming.optim.layerwise import Lars, adapting_matrices

        return Lars(adapting_matrices(groups), lr=self.lr, momentum=self.momentum)


OPTIMIZERS: dict[str, type[OptimConfig]] = {
    "adamw": AdamW,
    "nadamw": NAdamW,
    "adagrad": Adagrad,
    "sgd": SGD,
    "lamb": LambConfig,
    "lars": LarsConfig,
    "adamw8bit": LowBitAdamW,
    "adamw4bit": LowBitAdamW,
}
LOW_BIT = tuple(name for name, kind in OPTIMIZERS.items() if kind is LowBitAdamW)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over the model's parameter groups."""
    return config.build(parameter_groups(model, config.weight_decay))


def build_host_optimizer(
    model: nn.Module, config: OptimConfig, device: torch.device, at_home: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same with state and arithmetic on the host; parameters `at_home` are there themselves."""
    from cramming.parallel.offload import CopyStream, HostOptimizer

    groups = parameter_groups(model, config.weight_decay)
    return HostOptimizer(groups, config.build, CopyStream(device), at_home)
