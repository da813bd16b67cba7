"""The tables of events in run.jsonl and duels.jsonl, generated from the models of the events.

python -m eval.report.log_page        # prints both; the site's page of the run log shows the same
"""

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel

from cramming.runlog import COUNTERS, Counted, Event, LabelledSet, RunEvent, SetScores, Timed
from eval.duel.duel_log import DuelEvent, SideResult, SideTerms


def run_events() -> str:
    """Return the table of the events of a run log as Markdown."""
    return _table([*_events(RunEvent), LabelledSet, SetScores])


def duel_events() -> str:
    """Return the table of the events of duels.jsonl as Markdown."""
    return _table([*_events(DuelEvent), SideTerms, SideResult])


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
    print(run_events(), duel_events(), sep="\n")
