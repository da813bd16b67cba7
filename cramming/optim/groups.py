"""Which parameters are trained, and which decay: matrices do, vectors (biases and norm gains) do not, as in BERT."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from cramming.config import UserError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter whose whole name matches one of the regular expressions; one that matches none is an error."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        chosen = [p for name, p in named.items() if re.fullmatch(pattern, name)]
        if not chosen:
            raise UserError(
                f"optim.frozen={pattern!r} matches no parameter; they are named like {', '.join(list(named)[:4])}"
            )
        for p in chosen:
            p.requires_grad_(False)
    if not any(p.requires_grad for p in named.values()):
        raise UserError(f"optim.frozen={list(patterns)} leaves no parameter to train")


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
