"""The table of optimizers: torch's own, torchao's with 8- and 4-bit state, LAMB, LARS, Muon and NorMuon.

To add an optimizer: its row in `BUILDERS`, with a section for settings that no other has, and its YAML file. The
section's own fields have the names of the optimizer class's arguments. One whose update of a matrix is not made
element by element goes into `NEED_WHOLE_MATRICES`, too.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from cramming.config import Fraction, NotNegative, Positive
from cramming.schedule import PeakRate

Groups = list[dict[str, Any]]


class OptimConfig(PeakRate):
    """What all optimizers have: the peak learning rate, and the largest global gradient norm (null: no clipping)."""

    name: str
    weight_decay: NotNegative
    clip: Positive | None

    def groups(self, model: nn.Module) -> Groups:
        """The model's parameters as this optimizer treats them."""
        return parameter_groups(model, self.weight_decay)

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        """The optimizer over these parameter groups."""
        return BUILDERS[self.name][1](groups, self)


class AdamConfig(OptimConfig):
    """Of Adam and those that descend from it."""

    betas: tuple[Fraction, Fraction]
    eps: NotNegative


class AdagradConfig(OptimConfig):
    """Of Adagrad (Duchi et al. 2011)."""

    eps: NotNegative


class MomentumConfig(OptimConfig):
    """Of SGD and LARS."""

    momentum: Fraction


class MuonConfig(AdamConfig):
    """Of Muon; `betas`, `eps` and the learning rate `rest_lr * lr` are those of AdamW for all but the matrices."""

    momentum: Fraction
    iterations: Annotated[int, Field(ge=1, le=5)]
    rest_lr: Positive
    cautious_weight_decay: bool

    def groups(self, model: nn.Module) -> Groups:
        """Matrices of blocks and head apart from the rest."""
        from cramming.optim.muon import with_matrices

        return with_matrices(super().groups(model), model, self.weight_decay)


class NorMuonConfig(MuonConfig):
    """Of NorMuon: `row_beta` is the decay of the second moment of each neuron's update."""

    row_beta: Fraction


COMMON = OptimConfig.model_fields.keys()


def _by(module: str, name: str, **fixed: Any) -> Callable[[Groups, Any], torch.optim.Optimizer]:
    """The class `name` of a module, imported where it is chosen; its arguments are the settings not in COMMON."""
    return lambda groups, c: getattr(import_module(module), name)(
        groups,
        lr=c.lr,
        **{setting: value for setting, value in vars(c).items() if setting not in COMMON},
        **fixed,
    )


# name -> (its settings, the optimizer made of parameter groups and them)
BUILDERS: dict[str, tuple[type[OptimConfig], Callable[[Groups, Any], torch.optim.Optimizer]]] = {
    # Loshchilov & Hutter 2019; one fused kernel: on the CPU 4 to 6 times faster than the default loop
    "adamw": (AdamConfig, _by("torch.optim", "AdamW", fused=True)),
    "adamw-cwd": (AdamConfig, _by("cramming.optim.cautious", "CautiousAdamW")),
    "nadamw": (AdamConfig, _by("torch.optim", "NAdam", decoupled_weight_decay=True)),  # Dozat 2016
    "adagrad": (AdagradConfig, _by("torch.optim", "Adagrad")),
    "sgd": (
        MomentumConfig,
        lambda g, c: torch.optim.SGD(g, c.lr, momentum=c.momentum, nesterov=c.momentum > 0),
    ),
    "lamb": (AdamConfig, _by("cramming.optim.layerwise", "Lamb")),
    "lars": (MomentumConfig, _by("cramming.optim.layerwise", "Lars")),
    "muon": (MuonConfig, _by("cramming.optim.muon", "Muon")),
    "normuon": (NorMuonConfig, _by("cramming.optim.muon", "Muon")),
    # moments in blocks of 8 or 4 bits (Dettmers et al. 2022; Li et al. 2023)
    "adamw8bit": (AdamConfig, _by("torchao.optim", "AdamW8bit")),
    "adamw4bit": (AdamConfig, _by("torchao.optim", "AdamW4bit")),
}
OPTIMIZERS = {name: settings for name, (settings, _) in BUILDERS.items()}
LOW_BIT = ("adamw8bit", "adamw4bit")
NEED_WHOLE_MATRICES = ("muon", "normuon", *LOW_BIT)  # a part of a matrix would get another update


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Every trainable parameter in one of two groups: matrices decay, vectors (biases, norm gains) do not (BERT)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decay, no_decay = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups: Groups = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For all groups. torchao keeps the rate in a tensor, which its compiled step reads, and wants it filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
