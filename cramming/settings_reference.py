"""Reference of all settings, generated from the sections' schemas and the comments of the YAML files.

A section's class says names, types and ranges; conf/ says the default of the recipe without overrides, and, behind the
setting or in a comment that goes on below it, what the setting means.
"""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from cramming.config import (
    Schema,
    UserError,
    below,
    config_folder,
    describe,
    options_of,
    shown,
    unknown_choice,
)

# Section -> its class, or the table of its choices. Those of the root itself are the section "root".
SECTIONS = {
    "root": "cramming.config:RootConfig",
    "data": "data_prep.readers.mix:SETTINGS",
    "tokenizer": "data_prep.tokenizer.load:TokenizerConfig",
    "model": "cramming.model.config:ModelConfig",
    "objective": "cramming.objectives:OBJECTIVES",
    "optim": "cramming.optim.build:OPTIMIZERS",
    "schedule": "cramming.schedule:SCHEDULES",
    "start": "cramming.recipe:STARTS",
    "train": "cramming.recipe:TrainConfig",
    "budget": "cramming.budget:BudgetConfig",
    "checkpoint": "cramming.recipe:CheckpointConfig",
    "attention": "cramming.recipe:AttentionConfig",
    "precision": "cramming.precision:PrecisionConfig",
    "memory": "cramming.parallel.apply:MemoryConfig",
    "runtime": "cramming.device:RuntimeConfig",
    "parallel": "cramming.parallel.mesh:STRATEGIES",
    "eval": "eval.finetune.config:EvalConfig",
}
_SETTING = re.compile(r"^( *)([\w.]+):(?: +([^#].*?)?)?(?: +# (.*))?$")
_CONTINUED = re.compile(r"^ +# (.*)$")


class Setting(NamedTuple):
    """One row of the reference; `choices`: the names of the section's choices that have it, empty where all do."""

    name: str
    choices: tuple[str, ...]
    expected: str
    default: str
    comment: str


def main(section: str | None) -> None:
    """Print the reference of a section, or of all; UserError for a section that there is not."""
    print(settings_reference([section] if section else SECTIONS), end="")


def settings_reference(sections: Iterable[str]) -> str:
    """Return the reference of these sections as Markdown, one list of settings for each."""
    from cramming.overrides import compose

    defaults, comments = compose(), _comments()
    pages = []
    for section in sections:
        if section not in SECTIONS:
            raise UserError(unknown_choice("settings", section, SECTIONS))
        lines = [_line(setting) for setting in settings_of(section, defaults, comments)]
        pages.append("\n".join([f"## {section}", "", *lines, ""]))
    return "\n".join(pages)


def settings_of(
    section: str, settings: Mapping[str, Any], comments: Mapping[str, Mapping[str, str]]
) -> Iterator[Setting]:
    """Yield the settings of a section.

    `settings` are the composed defaults. `comments` are those of each setting by dotted name and file name.
    """
    module, _, attribute = SECTIONS[section].partition(":")
    declared = getattr(importlib.import_module(module), attribute)
    table = declared if isinstance(declared, dict) else {"": declared}
    path = "" if section == "root" else section
    defaults = settings if section == "root" else settings[section]
    known = dict[tuple[str, str], list[str]]()  # (name, expected value) -> choices
    for choice, cls in table.items():
        for name, expected in _leaves(TypeAdapter(cls).json_schema(), path):
            known.setdefault((name, expected), []).append(choice)
    kind = "source" if section == "data" else "name"
    for (name, expected), choices in known.items():
        only_of = () if len(choices) == len(table) else tuple(choices)
        key = name.removeprefix(f"{path}.")
        if len(table) > 1 and key == kind:
            expected = ", ".join(table)
        by_file = comments.get(name, {})
        said = [by_file[choice] for choice in choices if choice in by_file]
        said += [text for file, text in by_file.items() if file not in table]
        comment = said[0] if said else ""
        yield Setting(name, only_of, expected, _default(defaults, key), comment)


def _leaves(root: Schema, path: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each setting and what its value must be."""

    def walk(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
        for name, value in schema.get("properties", {}).items():
            options = options_of(root, value)
            sections = [option for option in options if "properties" in option]
            if len(options) == len(sections) == 1:
                yield from walk(sections[0], below(path, name))
            else:
                yield below(path, name), describe(options)

    for schema in options_of(root, root):
        yield from walk(schema, path)


def _default(settings: Any, key: str) -> str:
    """Return the default at a dotted name, empty if the default recipe has no such setting."""
    for part in key.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return ""
        settings = settings[part]
    return shown(settings)


def _comments() -> dict[str, dict[str, str]]:
    """Return the comments of all YAML files: dotted name of the setting -> name of the file -> comment."""
    folder = config_folder()
    files = sorted(folder.glob("*/**/*.yaml"), reverse=True)
    groups = [file for file in files if file.parent.name not in ("experiment", "scale")]
    comments = dict[str, dict[str, str]]()
    for file in [*groups, folder / "config.yaml"]:
        section = ".".join(file.parent.relative_to(folder).parts)
        for name, comment in _comments_of(file, section):
            comments.setdefault(name, {})[file.stem] = comment
    return comments


def _comments_of(file: Path, path: str) -> Iterator[tuple[str, str]]:
    """Yield the comments of one file, whose settings lie in the section `path`."""
    parents: list[tuple[int, str]] = [(-1, path)]
    name, comment = "", ""
    for line in file.read_text(encoding="utf-8").splitlines():
        setting, continued = _SETTING.match(line), _CONTINUED.match(line)
        if continued and comment:
            comment = f"{comment} {continued[1]}"
            continue
        if comment:
            yield name, comment
        comment = ""
        if setting is None:
            continue
        indent = len(setting[1])
        while parents[-1][0] >= indent:
            parents.pop()
        name, comment = below(parents[-1][1], setting[2]), setting[4] or ""
        parents.append((indent, name))
    if comment:
        yield name, comment


def _line(setting: Setting) -> str:
    """Return a setting as an item of a list."""
    name = f"`{setting.name}`"
    if setting.choices:
        name += f" ({', '.join(setting.choices)})"
    sentences = [f"{name}: {setting.expected}."]
    if setting.default:
        sentences.append(f"Default `{setting.default}`.")
    if setting.comment:
        sentences.append(setting.comment[0].upper() + setting.comment[1:].rstrip(".") + ".")
    return f"- {' '.join(sentences)}"
