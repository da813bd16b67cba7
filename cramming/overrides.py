"""The words behind a verb, before Hydra reads them: flags, settings, and what settings imply."""

import argparse
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, get_args

import yaml

from cramming.config import UserError, config_folder

CHECK = "--check"  # with a verb of the pipeline or `run`: check the settings, and what they name, and end
CHOICES = ("optim", "schedule", "start")  # groups of which each file has settings of its own


class Words(NamedTuple):
    """`flags` are Hydra's own, `--check` is ours."""

    overrides: list[str]
    flags: list[str]
    check: bool
    multirun: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; settings have no dashes, for example name=a seed=1; `{self.prog} --help`")


def parse(verb: str, words: Sequence[str]) -> Words:
    """Tell flags from settings; UserError for a flag that neither we nor Hydra know."""
    parser = _Parser(prog=f"cramming {verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in ((CHECK,), ("--resolve",), ("--shell-completion", "-sc")):
        parser.add_argument(*names, action="store_true")
    for names in (("--package", "-p"), ("--config-dir", "-cd")):
        parser.add_argument(*names)
    one_of = parser.add_mutually_exclusive_group()
    for names in (("--multirun", "-m"), ("--help", "-h"), ("--hydra-help",)):
        one_of.add_argument(*names, action="store_true")
    one_of.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    one_of.add_argument("--info", "-i", nargs="?")
    found = parser.parse_intermixed_args(list(words))
    flags = [word for word in words if word not in (CHECK, *found.overrides)]
    _refuse_unnamed_groups(found.overrides)
    return Words(with_quotes(with_implied(found.overrides)), flags, found.check, found.multirun)


def _refuse_unnamed_groups(overrides: Sequence[str]) -> None:
    """UserError for `model=` or `model=3`, which Hydra answers with a traceback."""
    for override in overrides:
        group, _, value = override.lstrip("+").partition("=")
        plain = re.fullmatch(r"[\w.~]*", value) is not None
        if "=" in override and plain and (config_folder() / group).is_dir() and not isinstance(_value(value), str):
            raise UserError(f"{override}: give the name of one of its files, for example experiment=none; see --help")


def _value(text: str) -> Any:
    return None if text == "~" else yaml.safe_load(text)


def with_implied(overrides: Sequence[str]) -> list[str]:
    """The overrides, and before them what they mean besides.

    `eval.data_dir=` means real GLUE: the paper's hyperparameters then, unless `eval=` or `experiment=` chooses.
    `optim.name=sgd` is `optim=sgd`: each choice has settings of its own.
    """
    overrides = [re.sub(rf"^\+{{0,2}}({'|'.join(CHOICES)})\.name=", r"\1=", override) for override in overrides]
    real_glue = any(o.startswith("eval.data_dir=") for o in overrides)
    chosen = any(o.startswith(("eval=", "experiment=")) for o in overrides)
    implied = [*["eval=glue_sane"] * (real_glue and not chosen), *_implied_budget(overrides)]
    return [*implied, *overrides]


def _implied_budget(overrides: Sequence[str]) -> list[str]:
    """A budget that is typed, as a group or as a limit, is the whole budget: no limit of an experiment or of the
    defaults stays beside it. Two limits that are both typed stay, to be refused."""
    from omegaconf import OmegaConf

    from cramming.journal import Unit

    found = (re.fullmatch(r"\+{0,2}budget(?:\.(\w+))?=(.*)", override) for override in overrides)
    typed: dict[str | None, str] = {match[1]: match[2] for match in found if match}
    group = typed.pop(None, None)
    file = config_folder() / "budget" / f"{group}.yaml"
    if group and not file.is_file():  # several of them (--multirun, whose jobs come here one by one), or a mistake
        return []
    if not group and all(typed.get(unit, "null") == "null" for unit in get_args(Unit)):
        return []
    limits: Any = OmegaConf.load(file) if group else {}
    values = {unit: limits.get(unit) for unit in get_args(Unit) if unit not in typed}
    return [f"budget.{unit}={'null' if value is None else value}" for unit, value in values.items()]


def with_quotes(overrides: Sequence[str]) -> list[str]:
    """`data.paths=[~/a.txt,b.txt,größe]` with `~/a.txt` and `größe` in quotes, which Hydra's grammar wants there."""
    in_quotes, value = r"'[^']*'|\"[^\"]*\"", r"(?<=[=\[,])[^,=\[\]{}()\s'\"][^,=\[\]{}()'\"]*"

    def quoted(found: re.Match[str]) -> str:
        word = found[0]
        plain = word[0] in "'\"" or (word.isascii() and not word.startswith("~"))
        return word if plain else f'"{word}"'

    return [re.sub(f"{in_quotes}|{value}", quoted, override) for override in overrides]


def points_of(overrides: Sequence[str]) -> list[list[str]]:
    """The points of a multirun, as Hydra's own sweeper has them; none where another sweeper chooses them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if any(override.startswith("hydra/sweeper=") for override in overrides):
        return []
    choices = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [f"{one.get_key_element()}={one.get_value_element_as_str()}"]
        for one in OverridesParser.create().parse_overrides(list(overrides))
    ]
    return [list(point) for point in itertools.product(*choices)]


def one_line(error: Exception) -> str:
    """What Hydra or OmegaConf says, on one line and without its dumps."""
    text = str(error)
    for dump in ("\nTo append to your config", "\nConfig search path", "\nSee https:", "object_type="):
        text = text.partition(dump)[0]
    override = getattr(error, "override", None)
    return " ".join(f"{override}: {text}".split() if override else text.split())
