"""The one place that knows cramming/experimental: its modules by name, imported when a setting selects one."""

from importlib import import_module
from types import ModuleType

EXPERIMENTS = {
    "compression": "cramming.experimental.compression",  # parallel.compression, but for none
    "pipeline": "cramming.experimental.pipeline",  # parallel=pp
    "pipeline_study": "cramming.experimental.pipeline_study",  # the study of pipelines
    "stages": "cramming.experimental.stages",  # what parallel=pp can cut
    "tensor": "cramming.experimental.tensor",  # parallel.tp above 1
}


def load_experiment(name: str) -> ModuleType:
    """Return the module of an experiment of the table."""
    return import_module(EXPERIMENTS[name])
