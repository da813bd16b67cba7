"""Objectives: which targets a model is trained on, which model predicts them, and how it is validated.

An objective is a file here and a YAML file in conf/objective. The file is named as the setting `objective.name` (with _
for -) and its `OBJECTIVE` is a subclass of `Objective`. Importing it must not import torch: the rules read recipes.
"""

from importlib import import_module
from pkgutil import iter_modules

from cramming.objectives.objective import Objective


def _load_objectives() -> dict[str, type[Objective]]:
    """Return the objective of every file of this folder that has one, by its name in the configuration."""
    objectives = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        if hasattr(module, "OBJECTIVE"):
            objectives[file.name.replace("_", "-")] = module.OBJECTIVE
    return objectives


OBJECTIVES = _load_objectives()
