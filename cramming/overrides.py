"""Overrides as they are typed, before Hydra reads them, and Hydra's messages after it has: one line, in our words."""

import re
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

from cramming.config import UserError, config_folder

CHOICES = ("optim", "schedule", "start")  # groups of which each file has settings of its own


def with_implied(overrides: Sequence[str]) -> list[str]:
    """The overrides, and before the first of them what they mean besides.

    `eval.data_dir=` means real GLUE: the paper's hyperparameters then, unless `eval=` or `experiment=` chooses.
    `optim.name=sgd` is `optim=sgd`: each choice has settings of its own.
    """
    overrides = [re.sub(rf"^\+{{0,2}}({'|'.join(CHOICES)})\.name=", r"\1=", override) for override in overrides]
    real_glue = any(o.startswith("eval.data_dir=") for o in overrides)
    chosen = any(o.startswith(("eval=", "experiment=")) for o in overrides)
    implied = [*["eval=glue_sane"] * (real_glue and not chosen), *_implied_budget(overrides)]
    # Flags may stand before and after the settings, but not among them.
    first = next((place for place, word in enumerate(overrides) if "=" in word and not word.startswith("-")), 0)
    return [*overrides[:first], *implied, *overrides[first:]]


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


def sweep_of(verb: str, arguments: Sequence[str]) -> list[str]:
    """The overrides of the several jobs that Hydra will run, or empty where it is one, or none.

    UserError for flags that Hydra would answer with a screen of usage or a traceback.
    """
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        words, known = (
            message.removeprefix("unrecognized arguments: "),
            f"`cramming {verb} --hydra-help` lists the flags",
        )
        if words != message:
            kind = "unknown flag" if words.startswith("-") else "cannot stand behind a flag"
            message = (
                f"{words}: {kind}; settings have no dashes and stand together, for example name=a seed=1 --cfg job"
            )
        raise UserError(f"{message}; {known}")

    if {"--version", "--shell-completion", "-sc"}.intersection(arguments):  # these act as soon as they are parsed
        return []
    parser = get_args_parser()
    parser.error = refuse
    flags = parser.parse_args(list(arguments))
    if flags.hydra_help or not flags.multirun:
        return []
    for flag in ("cfg", "info", "help"):
        if getattr(flags, flag):
            refuse(f"--multirun --{flag}: only one job's settings can be printed; give --{flag} with the values of one")
    return flags.overrides


def group_without_a_name(overrides: Sequence[str]) -> UserError:
    """For `model=` or `model=3`, which Hydra answers with a bare ValueError."""
    empty = [o for o in overrides if re.fullmatch(r"\w*=(null|~|[\d.]+)?", o)]
    return UserError(
        f"{', '.join(empty)}: a group of settings needs the name of one of its files, for example experiment=none;"
        " `--help` lists them"
    )


def one_line(error: Exception) -> str:
    """Hydra's and OmegaConf's messages, without their inner stack and key dumps."""
    text = str(error.__cause__ or error) if "Error merging override" in str(error) else str(error)
    text = re.split(r"\n\s*(?:full_key|object_type|reference_type|See https|Config search path)", text)[0]
    key = re.search(r"full_key: (\S+)", str(error) + str(error.__cause__))
    words = " ".join(text.split())
    words = re.sub(r" To append to your .*|^Lexer\w+Exception: ", "", words)
    if "LexerNoViableAlt" in text or re.search("no viable alternative|mismatched input|extraneous input", words):
        place = f"{override}: " if isinstance(override := getattr(error, "override", None), str) else ""
        return f"{place}{words}; put special characters into quotes: 'key=\"value\"'"
    if unknown := re.fullmatch(r"Could not override '(.+?)'\.", words):
        return f"{unknown[1]}: unknown setting; `--cfg job` prints all that there are"
    if isinstance(override := getattr(error, "override", None), str):
        words = f"{override}: {words}"
    if key and key.group(1) not in words:
        words = f"{key.group(1)}: {words}"
    return words
