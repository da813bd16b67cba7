"""Generated parts of the site: `mkdocs build` replaces a marker in a page by text that the code gives.

A marker is a line `<!-- generated: verbs -->`. No generated text is committed, so none can go stale.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from cramming import cli
from cramming.settings_reference import SECTIONS, settings_reference
from data_prep.corpus_card import reasons_table
from eval.diagnose.table import diagnoses_list
from eval.report.log_page import duel_events, run_events
from eval.rules.page import rules_list

_MARKER = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
_CODE = re.compile(r"(`[^`]*`)")
_MARKUP = str.maketrans({"<": "&lt;", ">": "&gt;", "*": r"\*", "_": r"\_", "[": r"\[", "]": r"\]"})

_ROOT = Path(__file__).resolve().parents[1]
# Path in the site -> picture that lies beside its raw numbers.
PICTURES = {
    "results/curves_10M.svg": "benchmarks/results/duels_5M_10M_cpu_2026-11-23/curves_10M.svg",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures that are not in docs/; mkdocs calls it once."""
    from mkdocs.structure.files import File

    for site_path, path in PICTURES.items():
        files.append(File.generated(config, site_path, abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with each marker replaced; mkdocs calls it for every page."""
    return _MARKER.sub(lambda marker: GENERATED[marker[1]](), markdown)


def settings() -> str:
    """Return the reference of all settings, as `cramming settings` prints it."""
    lines = settings_reference(SECTIONS).splitlines()
    return "\n".join(escape(line) for line in lines)


def verbs() -> str:
    """Return the reference of all verbs: what each does, its words and its options."""
    group = typer.main.get_command(cli.app)
    parts: list[str] = []
    for panel in (cli.EVERYDAY, cli.OTHERS):
        parts += [f"## {panel}", ""]
        for name, command in group.commands.items():
            if command.rich_help_panel == panel:
                parts += verb_reference(name, command)
    return "\n".join(parts)


def verb_reference(name: str, command: Any) -> list[str]:
    """Return the lines on one verb; `command` is typer's."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    words = [argument.metavar for argument in arguments]
    usage = " ".join([f"cramming {name}", *words])
    lines = [f"### {name}", "", command.help, "", "```text", f"{usage} [OPTIONS]", "```", ""]
    lines += ["| | meaning | default |", "|---|---|---|"]
    lines += [f"| `{each.metavar}` | {cell(each.help)} | |" for each in arguments]
    for option in options:
        names = " / ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
        lines.append(f"| {names} | {cell(option.help)} | {cell(default_of(option))} |")
    return [*lines, ""]


def default_of(option: Any) -> str:
    """Return the default of an option as it is typed, or nothing where none is worth typing."""
    if isinstance(option.default, bool | None) or callable(option.default):
        return ""
    return f"`{getattr(option.default, 'value', option.default)}`"


def cell(text: str | None) -> str:
    """Return text for a cell of a table."""
    return escape(text or "").replace("|", "\\|")


def escape(text: str) -> str:
    """Return text in which only code and the sign of a list item or heading are Markdown."""
    return "".join(_escaped_segments(text))


def _escaped_segments(text: str) -> Iterator[str]:
    for segment in _CODE.split(text):
        if segment.startswith("`"):
            yield segment
        else:
            yield segment.translate(_MARKUP)


GENERATED: dict[str, Callable[[], str]] = {
    "settings": settings,
    "verbs": verbs,
    "rules": rules_list,
    "diagnoses": diagnoses_list,
    "run events": run_events,
    "duel events": duel_events,
    "reasons": reasons_table,
}
