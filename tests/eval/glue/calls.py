"""The verb `glue` as a function of one dictionary: a recipe, and beside it the options of the call."""

from pathlib import Path
from typing import Any

from cramming.invocation import Invocation
from eval import glue

OPTIONS = ("name", "runs", "corpora", "device")


def split(config: dict[str, Any]) -> tuple[dict[str, Any], Invocation, str | None]:
    """Return the recipe, the invocation and the model."""
    options = {name: config[name] for name in OPTIONS if name in config}
    for name in ("runs", "corpora"):
        options[name] = Path(options.get(name, name))
    recipe = {name: value for name, value in config.items() if name not in (*OPTIONS, "model_name")}
    return recipe, Invocation(**options), config.get("model_name")


def main(config: dict[str, Any]) -> None:
    """Score a model."""
    glue.main(*split(config))


def check(config: dict[str, Any]) -> list[str]:
    """Return what would be scored."""
    return glue.check(*split(config))
