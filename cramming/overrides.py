"""The words behind a verb, before Hydra reads them: flags, settings, and what settings imply."""

import argparse
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast, get_args

from cramming.config import UserError, config_folder, require

JSON = "--json"  # what the verb prints is for a program
WITH_JSON = ("duel", "project", "replay", "verify")
CHECK = "--check"  # with a verb of the pipeline or `run`: check the settings, and what they name, and end
SHORT = (  # what may be typed as well -> as Hydra reads it; each choice has settings of its own, so it is a group
    (r"(optim|schedule|start)\.name=(?!null$)(.*)", r"\1=\2"),
    (r"parallel\.compression=(?!\{|null$)(.*)", r"parallel/compression=\1"),
    (r"precision=(?!fp32$|null$)([\w,]+)", r"precision.mode=\1"),
)
SIDE = re.compile(r"\+{0,2}(base|candidate)")


class Words(NamedTuple):
    """`flags` are Hydra's own, `--check` is ours."""

    overrides: list[str]
    flags: list[str]
    check: bool
    multirun: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{message}; settings have no dashes, for example name=a seed=1; `{self.prog} --help`"
        )


def parse(verb: str, words: Sequence[str]) -> Words:
    """Tell flags from settings; UserError for a flag that neither we nor Hydra know."""
    parser = _Parser(prog=f"cramming {verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in ((CHECK,), (JSON,), ("--resolve",), ("--shell-completion", "-sc")):
        parser.add_argument(*names, action="store_true")
    for names in (("--package", "-p"), ("--config-dir", "-cd")):
        parser.add_argument(*names)
    one_of = parser.add_mutually_exclusive_group()
    for names in (("--multirun", "-m"), ("--help", "-h"), ("--hydra-help",)):
        one_of.add_argument(*names, action="store_true")
    one_of.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    one_of.add_argument("--info", "-i", nargs="?")
    found = parser.parse_intermixed_args(list(words))
    require(
        not found.json or verb in WITH_JSON, f"{JSON}: is for the verbs {' and '.join(WITH_JSON)}"
    )
    overrides = [*found.overrides, *[f"{verb}.json=true"] * found.json]
    if found.config_dir is not None:
        typed = [word for word in overrides if word.startswith("hydra.searchpath=")]
        require(
            not typed,
            f"--config-dir={found.config_dir} {' '.join(typed)}: give one of the two, with all folders",
        )
        overrides.insert(0, searchpath(found.config_dir))
    flags = [word for word in words if word not in (CHECK, JSON, *found.overrides)]
    return Words(with_quotes(with_implied(overrides)), flags, found.check, found.multirun)


def searchpath(config_dir: str) -> str:
    """`--config-dir`, a folder of groups beside ours, as an override, which goes to child processes as well.

    Ours come first in Hydra's search, so that a name that both have would be ignored: it is refused.
    """
    folder = Path(config_dir).absolute()
    require(folder.is_dir(), f"--config-dir={config_dir}: no such folder")
    for name in (file.relative_to(folder) for file in folder.rglob("*.yaml")):
        require(
            not (config_folder() / name).exists(),
            f"--config-dir={config_dir}: {name} is in conf/ too; rename it",
        )
    return f"hydra.searchpath=[{literal(f'file://{folder}')}]"


def given_overrides() -> list[str]:
    """What the user wrote behind the verb that runs, for verbs in processes of their own."""
    from hydra.core.hydra_config import HydraConfig

    found = HydraConfig.get().overrides
    return [*(word for word in found.hydra if word.startswith("hydra.searchpath=")), *found.task]


def compose(overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The root configuration with these overrides, as every verb's `main` gets it; UserError for mistakes."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    running = GlobalHydra.instance().is_initialized()  # within a verb; it has the same folder
    try:
        with (
            nullcontext()
            if running
            else initialize_config_dir(str(config_folder()), version_base="1.3")
        ):
            settings = OmegaConf.to_container(
                hydra_compose("config", with_implied(overrides)), resolve=True
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(error)) from None
    return cast(dict[str, Any], settings)


def with_implied(overrides: Iterable[str]) -> list[str]:
    """The overrides as Hydra reads them, and before them what they mean besides.

    `eval.data_dir=` means real GLUE: the paper's hyperparameters then, unless `eval=` or `experiment=` chooses. A
    budget that is typed replaces the one that is set; two that are typed stay, to be refused.
    """
    from cramming.runlog import Unit

    found = [_written_out(override) for override in overrides]
    if empty := [
        word for word in found if re.fullmatch(r"(?!hydra\.|duel\.(base|candidate)=)[^=]+=", word)
    ]:
        raise UserError(
            f"{empty[0]} has no value; give one, or leave it out, or {empty[0]}null where that is allowed"
        )
    typed = dict(override.lstrip("+").partition("=")[::2] for override in found)
    implied = (
        ["eval=glue_sane"]
        if "eval.data_dir" in typed and not typed.keys() & {"eval", "experiment"}
        else []
    )
    units = [f"budget.{unit}" for unit in (*get_args(Unit), "minutes")]
    if any(typed.get(unit, "null") != "null" for unit in units):
        implied += [f"{unit}=null" for unit in units if unit not in typed]
    return [*implied, *found]


def _written_out(override: str) -> str:
    name, _, value = override.partition("=")
    if side := SIDE.fullmatch(
        name
    ):  # its value is a line of overrides, which Hydra's grammar wants in quotes
        quoted = f'"{value}"' if '"' not in value else "'" + value.replace("'", r"\'") + "'"
        return f"duel.{side[1]}={quoted}"
    if re.fullmatch(r"\d[\d.]*|true|false|null", value) and (config_folder() / name).is_dir():
        return f"{name}='{value}'"  # the name of a file, which Hydra says that there is not
    if name.lstrip("+") == "precision" and "," in value and "fp32" in value.split(","):
        raise UserError(
            f"{override}: precision=fp32 also switches TF32 off; sweep precision.mode={value}"
        )
    for form, meant in SHORT:
        if re.fullmatch(rf"\+{{0,2}}{form}", override):
            return re.sub(rf"^\+{{0,2}}{form}$", meant, override)
    return override


def with_quotes(overrides: Sequence[str]) -> list[str]:
    """`data.paths=[~/a.txt,b.txt,größe]` with `~/a.txt` and `größe` in quotes, which Hydra's grammar wants there."""
    in_quotes, value = (
        r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"",
        r"(?<=[=\[,])[^,=\[\]{}()\s'\"][^,=\[\]{}()'\"]*",
    )

    def quoted(found: re.Match[str]) -> str:
        word = found[0]
        plain = word[0] in "'\"" or (word.isascii() and not word.startswith("~"))
        return word if plain else f'"{word}"'

    return [re.sub(f"{in_quotes}|{value}", quoted, override) for override in overrides]


def literal(text: str) -> str:
    """A text as a value that Hydra's grammar and OmegaConf's interpolation give back as it is."""
    text = re.sub(
        r"(\\*)\$\{", r"\1\1\\${", text
    )  # OmegaConf: a backslash before it; of those before that, two for one
    text = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def points_of(overrides: Sequence[str]) -> list[list[str]]:
    """The points of a multirun, as Hydra's own sweeper has them; none where another sweeper chooses them."""
    from hydra import initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import (
        BasicSweeper,
    )  # the same in 1.3.2 and 1.3.8
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if any(override.startswith("hydra/sweeper=") for override in overrides):
        return []
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        parser = OverridesParser.create(
            GlobalHydra.instance().config_loader()
        )  # model=glob(b*) asks it
        (points,) = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
    return points


def one_line(error: Exception) -> str:
    """What Hydra or OmegaConf says, on one line and without its dumps."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import ConfigTypeError

    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if isinstance(error.__cause__, ConfigTypeError):
        return (
            f"{error.__cause__.full_key}: a list [a,b] and a mapping {{a: b}} do not replace each other; `cramming"
            " <verb> --cfg job` prints which of them stands there"
        )
    text = str(error)
    for dump in ("\nTo append to your", "\nConfig search path", "\nSee https:", "object_type="):
        text = text.partition(dump)[0]
    if text.startswith("Could not override"):
        text += " There is no such setting, or not with these choices; `cramming <verb> --cfg job` prints all that"
        text += " there are, conf/config.yaml explains them"
    return " ".join(text.split())


def _unreadable(override: str) -> str:
    """What to do about an override that Hydra's grammar does not have: almost always text that wants quotes."""
    name, sign, value = override.partition("=")
    if not sign:
        return f"{override}: a setting has a value, as in {name}=..."
    items = ",".join(f'"{item.strip()}"' for item in value.strip("[]").split(","))
    quoted = f"[{items}]" if value.startswith("[") else f'"{value}"'
    example = "" if set(value) & set("'\"{}$\\") else f", as in '{name}={quoted}'"
    return (
        f"{override}: cannot be read as one setting; text with other characters than letters, digits and / - + . % @ ?"
        f" : _ needs quotes, and the whole word others for the shell{example}"
    )
