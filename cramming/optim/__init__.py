"""Optimizers: parameter groups, and a table of builders from settings."""

from cramming.optim.build import LOW_BIT, OPTIMIZERS, OptimConfig, build_host_optimizer, build_optimizer
from cramming.optim.groups import parameter_groups, set_learning_rate

__all__ = [
    "LOW_BIT",
    "OPTIMIZERS",
    "OptimConfig",
    "build_host_optimizer",
    "build_optimizer",
    "parameter_groups",
    "set_learning_rate",
]
