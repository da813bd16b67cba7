"""The options of a call that are no part of its recipe: a run's name, its folders, the device, and what was typed.

The recipe is what is hashed, compared and replayed (conf/). An invocation says where one call finds its files, on which
device it works and whether it resumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cramming.config import UserError, folder_name

DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Invocation:
    """Options that several verbs share. `overrides`: the recipe as it was typed."""

    name: str = "default"
    runs: Path = Path("runs")
    corpora: Path = Path("corpora")
    device: DeviceKind = "auto"
    resume: bool = False
    trackers: tuple[str, ...] = ()
    nonce: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def run_folder(self) -> Path:
        """Folder of the run, `<runs>/<name>`; UserError where the name cannot be a folder's."""
        name = folder_name(self.name, "--name", self.runs)
        if name == "report":
            raise UserError(
                f"--name=report: the leaderboard of {self.runs} has that name. Give another."
            )
        return self.runs / name

    def arguments(self, *names: str) -> list[str]:
        """Return the words of a child process that has these options, and the recipe behind them."""
        words = []
        for name in names:
            value = getattr(self, name)
            if name == "resume":
                words += ["--resume"] if value else []
            elif name == "trackers":
                words += [f"--tracker={tracker}" for tracker in value]
            elif value is not None:
                words.append(f"--{name}={value}")
        return [*words, *self.overrides]


@dataclass(frozen=True)
class Call:
    """A verb as it was called. `options`: further keyword arguments of the verb's `main`."""

    verb: str
    invocation: Invocation
    options: Mapping[str, Any] = field(default_factory=dict)
    has_recipe: bool = True
    check: bool = False
    show_config: bool = False
    sweep: bool = False


def whole_numbers(option: str, text: str) -> list[int]:
    """Return the numbers of an option such as `--seeds 0,1,2`; UserError for anything else, or one named twice."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(numbers) < len(words) or len(set(numbers)) < len(numbers):
        raise UserError(f"{option}={text}: not a list of numbers, each once. Write them as 1,2,3.")
    return numbers
