"""What a record lacks or has of another kind is named, place by place, and stops nothing."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.report.leaderboard_csv import comma_separated
from eval.report.ranking import rows_of
from eval.report.render import markdown
from eval.report.run_page import blocks
from eval.rules.load import Run
from eval.rules.record import read_record
from eval.rules.table import judge

Make = Callable[..., dict[str, Any]]
NEEDED = {  # of a finished run
    "a section": "config environment environment.device corpus corpus.tokenizer pretrain.budget pretrain.validation",
    "text": """name created suite_version rules_version environment.python environment.device.name corpus.folder
        corpus.manifest_sha256 pretrain.objective pretrain.budget.unit pretrain.budget.journal_sha256
        pretrain.final_sha256""",
    "a finite number": """corpus.tokens corpus.documents corpus.vocab_size pretrain.devices pretrain.parameters
        pretrain.parameters_without_embeddings pretrain.steps pretrain.tokens pretrain.sequences pretrain.exaflops
        pretrain.corpus_epochs pretrain.seed pretrain.skipped_steps pretrain.budget.limit pretrain.budget.spent
        pretrain.budget.spent_seconds pretrain.budget.overrun_seconds pretrain.train_loss pretrain.tokens_per_second
        pretrain.validation.loss pretrain.validation.accuracy""",
    "a list": "corpus.sources pretrain.budget.processes pretrain.forced glue.pretrained.seeds",
}
PATHS = [(kind, path) for kind, paths in NEEDED.items() for path in paths.split()]


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


def test_each_needed_value_is_missed_and_each_other_kind_named(make_record: Make) -> None:
    record = make_record()
    assert read_record(record).problems == read_record(make_record("embedded")).problems == []
    for kind, path in PATHS:
        place = tuple(path.split("."))
        assert read_record(put(record, place, ...)).problems == [f"{path} is missing"]
        assert read_record(put(record, place, None)).problems == [f"{path} is missing"]
        assert read_record(put(record, place, True)).problems == [f"{path} is True, not {kind}"]


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
        ("glue.pretrained.tasks.rte.score", "x", "glue.pretrained.tasks.rte.score is 'x', not a finite number"),
        ("environment.git.dirty", "no", "environment.git.dirty is 'no', not true or false"),
    ],
)
def test_the_phrase_says_what_is_there_and_what_should_be(
    make_record: Make, place: str, value: Any, phrase: str
) -> None:
    assert read_record(put(make_record(), tuple(place.split(".")), value)).problems == [phrase]


def test_what_a_run_cannot_have_yet_is_not_missed(make_record: Make) -> None:
    record = make_record()
    del record["glue"], record["corpus"]
    record["pretrain"] = {"status": "running"}
    assert read_record(record).problems == []
    whole = make_record()
    whole["pretrain"].update(status="interrupted", validation=None, final_sha256=None, train_loss=None)
    assert read_record(whole).problems == []


@pytest.mark.parametrize("value", [..., "many", 3, [[1]]], ids=str)
def test_no_content_of_a_field_stops_a_page(make_record: Make, value: Any) -> None:
    record = make_record()
    del record["glue"]["random"]
    tasks = record["glue"]["pretrained"]["tasks"]
    record["glue"]["pretrained"]["tasks"] = {name: tasks[name] for name in ("cola", "stsb")}
    for place in places(record):
        run = Run(Path("runs/a"), "a", read_record(put(record, place, value)), [])
        rows = rows_of([run])
        assert markdown(blocks(run, judge(run.record), rows, [], [], 1)) and comma_separated(rows)
