"""Optimizers: parameter groups, and a table of builders from settings."""

from cramming.optim.build import OptimConfig, build_host_optimizer, build_optimizer, refuse_missing_package
from cramming.optim.groups import parameter_groups, set_learning_rate
from cramming.optim.host import HostOptimizer

__all__ = [
    "HostOptimizer",
    "OptimConfig",
    "build_host_optimizer",
    "build_optimizer",
    "parameter_groups",
    "refuse_missing_package",
    "set_learning_rate",
]
