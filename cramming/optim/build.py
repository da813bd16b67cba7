"""The table of optimizers: torch's own, torchao's with 8- and 4-bit state, LAMB and LARS. An entry is one builder."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cramming.optim.groups import parameter_groups
from cramming.optim.host import HostOptimizer
from cramming.optim.layerwise import Lamb, Lars
from cramming.parallel.lane import Lane

# What an optimizer looks at: how many of `betas` where not both, and whether `eps`. The rest must be 0: a setting that
# does nothing is a mistake.
BETAS_USED = {"adagrad": 0, "sgd": 1, "lars": 1}
WITHOUT_EPS = ("sgd", "lars")


@dataclass(frozen=True)
class OptimConfig:
    """`lr` is the peak learning rate for a batch of `base_batch` sequences; `scale_rule` carries it over to others.

    Without a rule `base_batch` is 0, as is of `betas` and `eps` what the optimizer does not use.
    `clip` is the largest global gradient norm (null: no clipping).
    """

    name: Literal["adamw", "nadamw", "adagrad", "sgd", "lamb", "lars", "adamw8bit", "adamw4bit"]
    lr: float
    scale_rule: Literal["none", "linear", "sqrt"]
    base_batch: int
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
        if self.scale_rule != "none" and self.base_batch < 1:
            raise ValueError(
                f"base_batch={self.base_batch}: scale_rule={self.scale_rule} needs the batch that lr is meant for; set"
                " for example optim.base_batch=256"
            )
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip} is not above 0; null means no clipping")
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        if self.scale_rule == "none" and self.base_batch:
            raise ValueError(f"base_batch={self.base_batch} does nothing with scale_rule=none; set optim.base_batch=0")
        choose = f"choose it by optim={self.name}, which has"
        if self.name in WITHOUT_EPS and self.eps:
            raise ValueError(f"eps={self.eps} does nothing with name={self.name}; {choose} eps=0, or set optim.eps=0")
        used = BETAS_USED.get(self.name, 2)
        if any(self.betas[used:]):
            neutral = str([*self.betas[:used], *[0.0] * (2 - used)]).replace(" ", "")
            raise ValueError(
                f"betas={list(self.betas)}: name={self.name} uses {used} of them; {choose} its own, or set"
                f" optim.betas={neutral}"
            )

    def peak_learning_rate(self, batch_size: int) -> float:
        """The peak for a batch of `batch_size` sequences.

        Linear (Goyal et al. 2017, section 2.1) keeps the sum of SGD's steps per epoch, the square root (Krizhevsky
        2014, section 5) the variance of the noise; the latter suits Adam and LAMB (You et al. 2020, section 4.2).
        """
        if self.scale_rule == "none":
            return self.lr
        ratio = batch_size / self.base_batch
        return self.lr * {"linear": ratio, "sqrt": ratio**0.5}[self.scale_rule]


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


def _lamb(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
    return Lamb(_adapting_matrices(groups), lr=c.lr, betas=c.betas, eps=c.eps)


def _lars(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
    """With `betas[0]` as momentum."""
    return Lars(_adapting_matrices(groups), lr=c.lr, momentum=c.betas[0])


def _adapting_matrices(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "adapt": group["name"] == "decay"} for group in groups]


def _low_bit(kind: str) -> Callable[[list[dict[str, Any]], OptimConfig], torch.optim.Optimizer]:
    """AdamW whose moments are kept in blocks of 8 or 4 bits (Dettmers et al. 2022; Li et al. 2023), by torchao."""

    def builder(groups: list[dict[str, Any]], c: OptimConfig) -> torch.optim.Optimizer:
        import torchao.optim

        make = getattr(torchao.optim, kind)
        optimizer: torch.optim.Optimizer = make(groups, lr=c.lr, betas=c.betas, eps=c.eps)
        return optimizer

    return builder


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "nadamw": _nadamw,
    "adagrad": _adagrad,
    "sgd": _sgd,
    "lamb": _lamb,
    "lars": _lars,
    "adamw8bit": _low_bit("AdamW8bit"),
    "adamw4bit": _low_bit("AdamW4bit"),
}
LOW_BIT = ("adamw8bit", "adamw4bit")


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `config.name` over the model's parameter groups."""
    return OPTIMIZERS[config.name](parameter_groups(model, config.weight_decay), config)


def build_host_optimizer(
    model: nn.Module, config: OptimConfig, device: torch.device, at_home: Collection[nn.Parameter]
) -> HostOptimizer:
    """The same with state and arithmetic on the host; parameters `at_home` are there themselves."""
    groups = parameter_groups(model, config.weight_decay)
    return HostOptimizer(groups, lambda own: OPTIMIZERS[config.name](own, config), Lane(device), at_home)
