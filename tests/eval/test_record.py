"""What a record lacks is None; a value of another type is named with its path; neither stops a page."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.record_schema import read_record
from eval.report.leaderboard_csv import comma_separated
from eval.report.ranking import rows_of
from eval.report.render import markdown
from eval.report.run_page import blocks
from eval.rules.load import Run
from eval.rules.table import judge

Make = Callable[..., dict[str, Any]]


def put(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at `path`; the field is gone where that is Ellipsis."""
    changed: Any = copy.deepcopy(record)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is Ellipsis:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed  # type: ignore[no-any-return]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in children:
        yield from places(inner, (*path, key))


@pytest.mark.parametrize(
    ("place", "value", "phrase"),
    [
        ("pretrain", "soon", "pretrain is 'soon', not a section"),
        ("pretrain.status", 3, "pretrain.status is 3, not one of running, interrupted, finished, diverged, exhausted"),
        ("pretrain.steps", float("nan"), "pretrain.steps is nan, not a finite number"),
        ("glue", [1], "glue is list of 1, not a section"),
        ("pretrain.steps", True, "pretrain.steps is True, not a finite number"),
        ("pretrain.budget.processes", 2, "pretrain.budget.processes is 2, not a list"),
        ("name", "", "name is '', not text"),
        ("glue.pretrained.tasks.rte", 0.7, "glue.pretrained.tasks.rte is 0.7, not a section"),
        ("glue.pretrained.tasks.rte.score", "x", "glue.pretrained.tasks.rte.score is 'x', not a finite number"),
        ("environment.git.dirty", "no", "environment.git.dirty is 'no', not true or false"),
    ],
)
def test_the_phrase_says_what_is_there_and_what_should_be(
    make_record: Make, place: str, value: Any, phrase: str
) -> None:
    assert read_record(put(make_record(), tuple(place.split(".")), value)).problems == [phrase]


def small(record: dict[str, Any]) -> dict[str, Any]:
    """The record with one of everything that there are many of."""
    section = record["glue"].pop("pretrained")
    section["tasks"] = {"stsb": section["tasks"]["stsb"]}
    search = record["corpus"]["decontamination"]
    for key in ("examples", "removed", "development"):
        search[key] = dict(list(search[key].items())[:1])
    return record | {"glue": {"pretrained": section}}


def test_what_is_missing_is_none_and_no_problem(make_record: Make) -> None:
    record = small(make_record())
    for place in places(record):
        assert read_record(put(record, place, ...)).problems == read_record(put(record, place, None)).problems == []


@pytest.mark.parametrize("value", [..., "many", 3, [[1]]], ids=str)
def test_no_content_of_a_field_stops_a_page(make_record: Make, value: Any) -> None:
    record = small(make_record())
    for place in places(record):
        run = Run(Path("runs/a"), "a", read_record(put(record, place, value)), [])
        rows = rows_of([run])
        assert markdown(blocks(run, judge(run.record), rows, [], [], 1)) and comma_separated(rows)
