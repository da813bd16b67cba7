"""Every field that a report reads is missed when it is gone, named when it is of another kind, and stops nothing."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.report.render import markdown
from eval.report.standings import comma_separated, entrants
from eval.report.summary import blocks
from eval.rules.fields import EVERY, FINISHED, TRAINED, wrong_fields
from eval.rules.reading import Run
from eval.rules.table import judge

Make = Callable[..., dict[str, Any]]
PATHS = [(kind, path) for fields in (EVERY, TRAINED, FINISHED) for kind, paths in fields.items() for path in paths]


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


def test_a_whole_record_lacks_nothing(make_record: Make) -> None:
    for suite in ("glue", "embedded"):
        assert wrong_fields(make_record(suite)) == []


@pytest.mark.parametrize(("kind", "path"), PATHS, ids=[path for _, path in PATHS])
def test_each_field_is_missed_and_each_other_kind_named(make_record: Make, kind: str, path: str) -> None:
    record, place = make_record(), tuple(path.split("."))
    assert wrong_fields(put(record, place, ...)) == [f"{path} is missing"]
    assert wrong_fields(put(record, place, None)) == [f"{path} is missing"]
    assert wrong_fields(put(record, place, True)) == [f"{path} is True, not {kind}"]


@pytest.mark.parametrize(
    ("place", "value", "phrase"),
    [
        ("pretrain", "soon", "pretrain is 'soon', not a section"),
        ("pretrain.status", 3, "pretrain.status is 3, not one of running, interrupted, finished, diverged, exhausted"),
        ("pretrain.steps", float("nan"), "pretrain.steps is nan, not a finite number"),
        ("glue", [1], "glue is list of 1, not a section"),
        ("glue.random", None, "glue.random is missing"),
        ("glue.pretrained.suite", ..., "glue.pretrained.suite is missing"),
        ("glue.pretrained.tasks.rte", 0.7, "glue.pretrained.tasks.rte is 0.7, not a section"),
        (
            "glue.pretrained.tasks.rte.score",
            "good",
            "glue.pretrained.tasks.rte.score is 'good', not a finite number, and no problem is named",
        ),
    ],
)
def test_the_phrase_says_what_is_there_and_what_should_be(
    make_record: Make, place: str, value: Any, phrase: str
) -> None:
    assert wrong_fields(put(make_record(), tuple(place.split(".")), value)) == [phrase]


def test_what_a_run_cannot_have_yet_is_not_missed(make_record: Make) -> None:
    record = make_record()
    del record["glue"], record["corpus"]
    record["pretrain"] = {"status": "running"}
    assert wrong_fields(record) == []
    whole = make_record()
    whole["pretrain"].update(status="interrupted", validation=None, final_sha256=None, train_loss=None)
    assert wrong_fields(whole) == []


@pytest.mark.parametrize("value", [..., "many", 3, [[1]]], ids=str)
def test_no_content_of_a_field_stops_a_page(make_record: Make, value: Any) -> None:
    record = make_record()
    del record["glue"]["random"]
    for place in places(record):
        changed = put(record, place, value)
        run = Run(Path("runs/a"), "a", changed, [])
        rows = entrants([run])
        assert markdown(blocks(run, judge(changed), rows, [], [], 1)) and comma_separated(rows)
