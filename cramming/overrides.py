"""The recipe: composed by Hydra from conf/ and the overrides that were typed; UserError for mistakes in them."""

import copy
import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from cramming.config import UserError, config_folder, require, shown

SHORT = (  # what may be typed as well -> as Hydra reads it; each choice has settings of its own, so it is a group
    (r"(optim|schedule|start)\.name=(?!null$)(.*)", r"\1=\2"),
    (r"parallel\.compression=(?!\{|null$)(.*)", r"parallel/compression=\1"),
    (r"precision=(?!fp32$|null$)([\w,]+)", r"precision.mode=\1"),
)
WHOLE_RECIPE = ("experiment", "scale")  # groups whose choices set several sections
SEARCH_PATH = "hydra.searchpath="


def compose(overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the recipe with these overrides, as every verb's `main` gets it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = hydra_words(overrides)
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = hydra_compose("config", list(words))
        recipe = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(error, words)) from None
    except (TypeError, ValueError) as error:  # Hydra fails so at train=[1] and data.paths.x=3
        if isinstance(error, UserError | UnicodeError):
            raise
        raise UserError(
            f"{' '.join(words)}: one of these has a form that its place cannot have"
            f" ({one_line(error, words)}). A group takes the name of a choice, a list is set as a whole."
        ) from None
    start = recipe["start"]
    if isinstance(start, dict) and start.get("name") == "checkpoint":
        completed = importlib.import_module("cramming.starts.checkpoint").completed
        return cast(dict[str, Any], completed(recipe, words.values()))
    return recipe


def resumed(
    logged: Mapping[str, Any], overrides: Sequence[str], composed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recipe of a run's log with what the overrides set in it.

    `composed`: the recipe of the overrides alone. Choices of an experiment or a scale stand for all of it.
    """
    recipe = copy.deepcopy(dict(logged))
    for word in with_implied(overrides):
        name = name_of(word)
        if name in WHOLE_RECIPE:
            return dict(composed)
        if word.startswith("hydra"):
            continue
        *sections, last = name.replace("/", ".").split(".")
        target: Any = recipe
        source: Any = composed
        for section in sections:
            target = target.setdefault(section, {})
            source = source[section]
        if last in source:
            target[last] = source[last]
    return recipe


def name_of(override: str) -> str:
    """Return the setting or group that an override is about."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def search_path(config_dir: Path) -> str:
    """Return the override by which Hydra finds a folder of groups beside ours.

    Ours come first in Hydra's search, so a file that both have would be ignored: it is refused.
    """
    folder = config_dir.absolute()
    require(folder.is_dir(), f"--config-dir={config_dir}: no such folder. Check the path.")
    for name in (file.relative_to(folder) for file in folder.rglob("*.yaml")):
        require(
            not (config_folder() / name).exists(),
            f"--config-dir={config_dir}: {name} is in conf/ too. Rename it.",
        )
    return f"{SEARCH_PATH}[{_literal(f'file://{folder}')}]"


def setting(name: str, value: str) -> str:
    """Return the override that sets a text, whatever characters it has."""
    return f"{name}={_literal(value)}"


def in_words(value: object) -> str:
    """Return a list, a mapping or a scalar as the value of an override."""
    return shown(value, _literal)


def hydra_words(overrides: Iterable[str]) -> dict[str, str]:
    """Return the overrides as Hydra reads them, with what they imply -> the same as they were typed."""
    return {_with_quotes(word): word for word in with_implied(overrides)}


def with_implied(overrides: Iterable[str]) -> list[str]:
    """Return the overrides, and before them what they imply.

    `eval.data_dir=` means real GLUE: the paper's hyperparameters then, unless `eval=` or `experiment=` chooses. A
    budget that is typed replaces the one that is set; two that are typed stay, to be refused.
    """
    from cramming.runlog import Unit

    words = [_written_out(override) for override in overrides]
    for word in words:
        require(
            word.startswith("hydra.") or not re.fullmatch(r"[^=]+=", word),
            f"{word}: has no value. Give one, leave it out, or write {word}null where that is allowed.",
        )
    typed = dict(word.lstrip("+").partition("=")[::2] for word in words)
    implied = []
    if "eval.data_dir" in typed and not typed.keys() & {"eval", "experiment"}:
        implied.append("eval=glue_sane")
    units = [f"budget.{unit}" for unit in (*get_args(Unit), "minutes")]
    if any(typed.get(unit, "null") != "null" for unit in units):
        implied += [f"{unit}=null" for unit in units if unit not in typed]
    return [*implied, *words]


def _written_out(override: str) -> str:
    """Return a short form in full, and the number or word that names a file in quotes."""
    name, _, value = override.partition("=")
    if re.fullmatch(r"\d[\d.]*|true|false|null", value) and (config_folder() / name).is_dir():
        return f"{name}='{value}'"
    if name.lstrip("+") == "precision" and "," in value and "fp32" in value.split(","):
        raise UserError(
            f"{override}: precision=fp32 also switches TF32 off. Sweep precision.mode={value}."
        )
    for form, meant in SHORT:
        if re.fullmatch(rf"\+{{0,2}}{form}", override):
            return re.sub(rf"^\+{{0,2}}{form}$", meant, override)
    return override


def _with_quotes(override: str) -> str:
    """Return `data.paths=[~/a.txt,größe]` with its values in quotes, which Hydra's grammar asks for there."""
    in_quotes = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
    value = r"(?<=[=\[,])[^,=\[\]{}()\s'\"][^,=\[\]{}()'\"]*"

    def quoted(match: re.Match[str]) -> str:
        word = match[0]
        if word[0] in "'\"" or (word.isascii() and not word.startswith("~")):
            return word
        return f'"{word}"'

    return re.sub(f"{in_quotes}|{value}", quoted, override)


def _literal(text: str) -> str:
    """Return a text as a value that Hydra's grammar and OmegaConf's interpolation give back unchanged."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)
    return f"'{text}'"


def points_of(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each point of a sweep, by Hydra's grammar: `a,b`, `range(...)`, `glob(...)`."""
    from hydra import initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import (
        BasicSweeper,  # the same in 1.3.2 and 1.3.8
    )
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    words = hydra_words(overrides)
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()  # model=glob(b*) asks it for choices
            parsed = OverridesParser.create(loader).parse_overrides(list(words))
            (points,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise UserError(one_line(error, words)) from None
    return points


def one_line(error: Exception, words: Mapping[str, str]) -> str:
    """Return what Hydra or OmegaConf says of `hydra_words`, on one line and without its dumps."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import ConfigTypeError

    if isinstance(error, OverrideParseException):
        return _unreadable(words.get(str(error.override), str(error.override)))
    if isinstance(error.__cause__, ConfigTypeError):
        return (
            f"{error.__cause__.full_key}: a list [a,b] and a mapping {{a: b}} do not replace each other."
            " `--show-config` prints which of them is set."
        )
    text = str(error)
    sweep = re.match(r"Ambiguous value for argument '(.*?)'|Sweep parameters '(.*?)'", text)
    if sweep:
        return f"{sweep[1] or sweep[2]}: several values. Add --sweep for a run with each of them."
    unknown = re.match(r"Could not override '(.*?)'", text)
    if unknown:
        return _unknown_setting(unknown[1], words)
    choice = re.search(
        r"Could not find '(.*)/(.*?)'\s+Available options in '\1':(.*)", text, re.DOTALL
    )
    if choice:
        group, name, rest = choice.groups()
        return _unknown_choice(group, name, rest.partition("Config search path")[0].split())
    for dump in ("\nTo append to your", "\nConfig search path", "\nSee https:", "object_type="):
        text = text.partition(dump)[0]
    return " ".join(text.split())


def _unknown_setting(name: str, words: Mapping[str, str]) -> str:
    """Return what to say of a setting that there is not, with the one most like it."""
    typed = next((typed for typed in words.values() if name_of(typed) == name), name)
    choices = [word for word in words if (config_folder() / name_of(word)).is_dir()]
    like = difflib.get_close_matches(name, setting_names(compose(choices)), n=1)
    hint = f"Did you mean {like[0]}?" if like else "`--show-config` prints the settings."
    return f"{typed}: no such setting, or not with these choices. {hint}"


def _unknown_choice(group: str, name: str, known: Sequence[str]) -> str:
    """Return what to say of a choice that a group does not have."""
    like = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {group}={like[0]}? " if like else ""
    return f"{group}={name}: no such choice. {hint}There are {', '.join(known)}."


def setting_names(node: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted names of a recipe's settings."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from setting_names(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _unreadable(override: str) -> str:
    """Return what to do about an override that Hydra's grammar does not have: mostly text that wants quotes."""
    name, sign, value = override.partition("=")
    if not sign:
        return f"{override}: a setting has a value, as in {name}=..."
    items = ",".join(f'"{item.strip()}"' for item in value.strip("[]").split(","))
    quoted = f"[{items}]" if value.startswith("[") else f'"{value}"'
    example = "" if set(value) & set("'\"{}$\\") else f", as in '{name}={quoted}'"
    return (
        f"{override}: not readable as one setting. Text with other characters than letters, digits and"
        f" / - + . % @ ? : _ needs quotes, and the whole word others for the shell{example}"
    )


def offer(incomplete: str) -> list[str]:
    """Return how a word of the recipe may go on, for the shell: choices of a group, or settings."""
    name, sign, _ = incomplete.partition("=")
    if sign:
        files = sorted((config_folder() / name).glob("*.yaml"))
        return [f"{name}={file.stem}" for file in files]
    groups = sorted(path for path in config_folder().rglob("*") if path.is_dir())
    names = [path.relative_to(config_folder()).as_posix() for path in groups]
    names += setting_names(compose())
    return [f"{each}=" for each in names if each.startswith(incomplete)]
