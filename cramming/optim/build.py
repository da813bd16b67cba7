"""Table of optimizers: torch's, torchao's with 8- and 4-bit state, LAMB, LARS, Muon and NorMuon.

To add an optimizer, add a row to `BUILDERS`, a YAML file, and a section if it has settings that no other
optimizer has. The fields of that class have the names of the optimizer's arguments. An optimizer whose update of a
matrix is not elementwise also goes into `NEED_WHOLE_MATRICES`.
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
    """Settings of every optimizer: the peak learning rate, and the largest global gradient norm (null: no clipping)."""

    name: str
    weight_decay: NotNegative
    clip: Positive | None

    def groups(self, model: nn.Module) -> Groups:
        """Return the model's parameters in the groups that this optimizer treats differently."""
        return parameter_groups(model, self.weight_decay)

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        """Return the optimizer over these parameter groups."""
        return BUILDERS[self.name][1](groups, self)


class AdamConfig(OptimConfig):
    """Settings of Adam and its variants."""

    betas: tuple[Fraction, Fraction]
    eps: NotNegative


class AdagradConfig(OptimConfig):
    """Settings of Adagrad (Duchi et al. 2011)."""

    eps: NotNegative


class MomentumConfig(OptimConfig):
    """Settings of SGD and LARS."""

    momentum: Fraction


class MuonConfig(AdamConfig):
    """Settings of Muon.

    `betas`, `eps` and the learning rate `rest_lr * lr` are those of AdamW for all parameters but the matrices.
    """

    momentum: Fraction
    iterations: Annotated[int, Field(ge=1, le=5)]
    rest_lr: Positive
    cautious_weight_decay: bool

    def groups(self, model: nn.Module) -> Groups:
        """Return the matrices of blocks and head apart from the other parameters."""
        from cramming.optim.muon import with_matrices

        return with_matrices(super().groups(model), model, self.weight_decay)


class NorMuonConfig(MuonConfig):
    """Settings of NorMuon: `row_beta` is the decay of the second moment of each neuron's update."""

    row_beta: Fraction


COMMON = OptimConfig.model_fields.keys()


def _build_by_name(
    module: str, class_name: str, **fixed: Any
) -> Callable[[Groups, Any], torch.optim.Optimizer]:
    """Return a function that imports a module and builds an optimizer of its class `class_name`.

    The arguments are the settings that are not in COMMON, and `fixed`.
    """

    def build(groups: Groups, config: Any) -> Any:
        settings = {name: value for name, value in vars(config).items() if name not in COMMON}
        optimizer = getattr(import_module(module), class_name)
        return optimizer(groups, lr=config.lr, **settings, **fixed)

    return build


# name -> (class of its settings, function of parameter groups and settings that returns the optimizer)
BUILDERS: dict[str, tuple[type[OptimConfig], Callable[[Groups, Any], torch.optim.Optimizer]]] = {
    # Loshchilov & Hutter 2019; one fused kernel: on the CPU 4 to 6 times faster than the default loop
    "adamw": (AdamConfig, _build_by_name("torch.optim", "AdamW", fused=True)),
    "adamw-cwd": (AdamConfig, _build_by_name("cramming.optim.cautious", "CautiousAdamW")),
    "nadamw": (
        AdamConfig,
        _build_by_name("torch.optim", "NAdam", decoupled_weight_decay=True),
    ),  # Dozat 2016
    "adagrad": (AdagradConfig, _build_by_name("torch.optim", "Adagrad")),
    "sgd": (
        MomentumConfig,
        lambda g, c: torch.optim.SGD(g, c.lr, momentum=c.momentum, nesterov=c.momentum > 0),
    ),
    "lamb": (AdamConfig, _build_by_name("cramming.optim.layerwise", "Lamb")),
    "lars": (MomentumConfig, _build_by_name("cramming.optim.layerwise", "Lars")),
    "muon": (MuonConfig, _build_by_name("cramming.optim.muon", "Muon")),
    "normuon": (NorMuonConfig, _build_by_name("cramming.optim.muon", "Muon")),
    # moments in blocks of 8 or 4 bits (Dettmers et al. 2022; Li et al. 2023)
    "adamw8bit": (AdamConfig, _build_by_name("torchao.optim", "AdamW8bit")),
    "adamw4bit": (AdamConfig, _build_by_name("torchao.optim", "AdamW4bit")),
}
OPTIMIZERS = {name: settings for name, (settings, _) in BUILDERS.items()}
LOW_BIT = ("adamw8bit", "adamw4bit")
NEED_WHOLE_MATRICES = ("muon", "normuon", *LOW_BIT)  # their update of a part of a matrix differs


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Return every trainable parameter in one of two groups, as in BERT.

    Matrices decay; vectors (biases, norm gains) do not.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in trainable if p.ndim >= 2]
    no_decay = [p for p in trainable if p.ndim < 2]
    groups: Groups = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups.

    torchao stores the rate in a tensor, which its compiled step reads; it must be filled in place.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
