"""The table of optimizers: torch's own, torchao's with 8- and 4-bit state, LAMB and LARS.

To add an optimizer: a dataclass with its settings and `build`, its row in `OPTIMIZERS`, and its YAML file.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cramming.config import check_rules

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
        check_rules((self.base_batch >= 1, f"base_batch={self.base_batch} is below 1"))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """What all optimizers have: the peak learning rate, and the largest global gradient norm (null: no clipping)."""

    name: str
    lr: float
    lr_scale: LearningRateScale | None
    weight_decay: float
    clip: float | None

    def __post_init__(self) -> None:
        check_rules(
            (self.lr > 0, f"lr={self.lr} is not above 0"),
            (self.weight_decay >= 0, f"weight_decay={self.weight_decay} is below 0"),
            (self.clip is None or self.clip > 0, f"clip={self.clip} is not above 0; null means no clipping"),
        )

    def peak_learning_rate(self, batch_size: int) -> float:
        """The peak for a batch of `batch_size` sequences."""
        if self.lr_scale is None:
            return self.lr
        ratio = batch_size / self.lr_scale.base_batch
        return self.lr * (ratio if self.lr_scale.rule == "linear" else ratio**0.5)

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
        check_rules(
            (all(0 <= beta < 1 for beta in self.betas), f"betas={list(self.betas)} are not in [0, 1)"),
            (self.eps >= 0, f"eps={self.eps} is below 0"),
        )

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
        from cramming.optim.layerwise import Lamb

        return Lamb(groups, lr=self.lr, betas=self.betas, eps=self.eps)


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
        check_rules((0 <= self.momentum < 1, f"momentum={self.momentum} is not in [0, 1)"))

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


class LarsConfig(SGD):
    """LARS (You et al. 2017)."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        from cramming.optim.layerwise import Lars

        return Lars(groups, lr=self.lr, momentum=self.momentum)


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


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Every trainable parameter in one of two groups: matrices decay, vectors (biases, norm gains) do not (BERT)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decay, no_decay = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups: Groups = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For all groups. torchao keeps the rate in a tensor, which its compiled step reads, and wants it filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
