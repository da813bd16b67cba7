"""Which parameters are trained, and which decay: matrices do, vectors (biases and norm gains) do not, as in BERT."""

from typing import Any

import torch
from torch import Tensor, nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, `decay` and `no_decay`; every trainable parameter is in exactly one."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decay = [p for p in trainable.values() if p.ndim >= 2]
    no_decay = [p for p in trainable.values() if p.ndim < 2]
    groups = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    covered = sorted(id(p) for group in groups for p in group["params"])  # type: ignore[attr-defined]
    assert covered == sorted(id(p) for p in trainable.values()), "a parameter is in no group or in two"
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For all groups. torchao keeps the rate in a tensor, which its compiled step reads, and wants it filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
