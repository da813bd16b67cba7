"""The tables of events in docs/run_log.md, generated from the models of the events.

python -m eval.report.log_page        # writes docs/run_log.md anew
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from cramming.runlog import COUNTERS, Counted, Event, LabelledSet, RunEvent, SetScores, Timed
from eval.duel.duel_log import DuelEvent, SideResult, SideTerms

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run_log.md"
_GENERATED = re.compile(r"(<!-- (run|duels): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)


def log_page(page: str) -> str:
    """Return the page with its tables of events generated anew; the rest of the text stays."""
    tables = {
        "run": _table([*_events(RunEvent), LabelledSet, SetScores]),
        "duels": _table([*_events(DuelEvent), SideTerms, SideResult]),
    }
    return _GENERATED.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n{match[3]}", page)


def _events(annotated: Any) -> tuple[type[Event], ...]:
    """Return the models of a union of events."""
    union, *_ = get_args(annotated)
    return get_args(union)


def _table(models: Iterable[type[BaseModel]]) -> str:
    rows = ["| event | what it says | fields |", "|---|---|---|"]
    for model in models:
        meaning = " ".join((model.__doc__ or "").split()).replace("|", "\\|")
        rows.append(f"| {_title(model)} | {meaning} | {', '.join(_fields(model))} |")
    return "\n".join(rows) + "\n"


def _title(model: type[BaseModel]) -> str:
    if issubclass(model, Event):
        return f"`{model.model_fields['event'].default}`"
    return f"({model.__name__})"


def _fields(model: type[BaseModel]) -> list[str]:
    """Return the fields, those of all events of a kind by one word; in brackets those that may be missing."""
    words: list[str] = []
    shared: set[str] = set()
    if issubclass(model, Event):
        shared.add("event")
    if issubclass(model, Timed):
        words.append("times")
        shared |= set(Timed.model_fields)
    if issubclass(model, Counted):
        words.append("counters")
        shared |= set(COUNTERS)
    for name, field in model.model_fields.items():
        if name not in shared:
            words.append(f"`{name}`" if field.is_required() else f"(`{name}`)")
    return words


if __name__ == "__main__":
    PAGE.write_text(log_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
