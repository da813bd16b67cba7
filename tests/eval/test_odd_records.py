"""Records that lack values, have odd ones or are no JSON: the leaderboard comes out, and names what is wrong.

A missing value is None; one of another type is None too, and named with its path.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cramming.record_schema import read_record
from eval.report import plots
from eval.report.main import main
from eval.rules.load import load_run
from eval.rules.table import judge

pytestmark = pytest.mark.usefixtures("records_only")

LONGEST = 10**4299  # more than a float holds, and the last that Python turns into text
ODD = [
    None,
    True,
    "",
    "NaN",
    "=1+1",
    "half \ud800",
    -1,
    0,
    0.5,
    1e308,
    -1e308,
    LONGEST,
    -(10**400),
    float("nan"),
    float("inf"),
    [],
    [[]],
    [1.0, "x", None],
    {},
    {"a/b": {"c": 1}},
    {"": 0},
]
NAMES = ["a/b", "/", "", "a.b", "\n|<b>", "pretrained", "avg9"]


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take most of a report's time."""
    monkeypatch.setattr(plots, "training", lambda curves: None)
    monkeypatch.setattr(plots, "scores", lambda bars, title: None)


def leaderboard(runs: Path) -> str:
    settings = {"out": None, "each_run": True, "ledger": "no duels", "repository": None}
    main({"runs": str(runs), "report": settings})
    return (runs / "report" / "leaderboard.md").read_text(encoding="utf-8")


def mutate(node: Any, draw: random.Random) -> None:
    """Replace, rename or remove one value of a tree, as likely near its root as deep in it."""
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        child = node[key]
        if not isinstance(child, dict | list) or not child or draw.random() < 0.15:
            break
        node = child
    kind = draw.randrange(8)
    if kind == 0:
        del node[key]
    elif kind < 3 and isinstance(node, dict):
        node[draw.choice(NAMES)] = node.pop(key)
    else:
        node[key] = draw.choice(ODD)


def full_record(make_record: Any, make_section: Any, suite: str) -> dict[str, Any]:
    """A good record with every section that a report reads."""
    task = {
        "title": "CB",
        "score": 70.0,
        "main_metric": "accuracy",
        "metrics": {"accuracy": {"std": 0.02}},
    }
    superglue = {
        "tasks": {"cb": task},
        "absent": {"boolq": "none"},
        "averages": {"superglue5": {"value": 70.0}},
    }
    record: dict[str, Any] = make_record(suite) | {
        "floor": make_section("bag of words", suite, 0.4),
        "superglue": {"pretrained": superglue},
        "minimal_pairs": {
            "accuracy": 60.0,
            "paradigms": {"a": {"accuracy": 60.0}},
            "definition": "mean",
        },
    }
    record["resumed"] = [record["environment"]]
    record["glue"]["random"]["sweep"] = {"points": [{"mean": 50.0}]}
    return record


@pytest.mark.parametrize("seed", range(3))
def test_no_odd_record_stops_the_leaderboard(
    tmp_path: Path, make_record: Any, write_run: Any, make_section: Any, seed: int
) -> None:
    """One good run between records that have one to four random changes each, in the record and beside it."""
    draw = random.Random(seed)
    write_run(tmp_path / "good", make_record() | {"name": "good"})
    for place in range(25):
        folder = tmp_path / f"odd-{place}"
        record = full_record(make_record, make_section, draw.choice(["glue", "embedded"]))
        write_run(folder, record)
        for _ in range(draw.choice([1, 1, 2, 4])):
            mutate(record, draw)
        (folder / "record.json").write_text(json.dumps(record))
        for name in ("budget.jsonl", "metrics.jsonl"):
            rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            if draw.random() < 0.3:
                mutate(rows, draw)
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = leaderboard(tmp_path)
    assert any(line.startswith("| 1 | good<br>") for line in text.splitlines())
    (tables, _, _) = text.partition("## Reference")
    unread = [
        run.folder.name
        for place in range(25)
        if (run := load_run(tmp_path / f"odd-{place}")).problem
    ]
    assert all(f"| {name} | " in tables for name in unread)
    assert len(list(tmp_path.glob("*/report/report.md"))) == 26 - len(unread)


def put(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The record with another value at `path`."""
    *above, last = path.split(".")
    place: Any = record
    for key in above:
        place = place[key]
    place[last] = value
    return record


@pytest.mark.parametrize(
    ("place", "value", "phrase"),
    [
        ("pretrain", "soon", "pretrain is 'soon', not a section"),
        (
            "pretrain.status",
            3,
            "pretrain.status is 3, not one of running, interrupted, finished, diverged, exhausted",
        ),
        ("pretrain.steps", float("nan"), "pretrain.steps is nan, not a finite number"),
        ("pretrain.steps", 10**400, f"pretrain.steps is 1{39 * '0'}, not a finite number"),
        ("pretrain.steps", True, "pretrain.steps is True, not a finite number"),
        ("pretrain.budget.processes", 2, "pretrain.budget.processes is 2, not a list"),
        ("name", "", "name is '', not text"),
        ("glue", [1], "glue is list of 1, not a section"),
        ("glue.pretrained.tasks.rte", 0.7, "glue.pretrained.tasks.rte is 0.7, not a section"),
        (
            "glue.pretrained.tasks.rte.score",
            "x",
            "glue.pretrained.tasks.rte.score is 'x', not a finite number",
        ),
        ("environment.git.dirty", "no", "environment.git.dirty is 'no', not true or false"),
    ],
)
def test_a_wrong_type_is_one_problem_with_its_path(
    make_record: Any, place: str, value: Any, phrase: str
) -> None:
    assert read_record(put(make_record(), place, value)).problems == [phrase]
    assert read_record(put(make_record(), place, None)).problems == []


def test_a_slash_in_the_name_of_a_section_or_task_is_only_a_name(
    make_record: Any, make_section: Any
) -> None:
    record = make_record()
    record["glue"]["a/b"] = make_section("a/b")
    record["glue"]["a/b"]["tasks"]["c/d"] = {"main_metric": "f1", "metrics": {}, "score": 3.0}
    evidence = {finding.rule: finding.evidence for finding in judge(read_record(record)).broken}
    assert "a/b/c/d: 0 values for 3 seeds" in evidence["R7"]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    "value", ["many", None, [], float("nan"), -1.0, LONGEST], ids=lambda value: repr(value)[:5]
)
@pytest.mark.parametrize("key", ["elapsed", "charged_flops"])
def test_an_odd_number_in_the_journal_is_damage_of_the_journal(
    tmp_path: Path, make_record: Any, write_run: Any, key: str, value: Any
) -> None:
    folder = write_run(tmp_path / "odd", make_record())
    lines = (folder / "budget.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {key: value})
    (folder / "budget.jsonl").write_text("\n".join(lines) + "\n")
    leaderboard(tmp_path)
    assert "budget.jsonl:2: damaged journal" in (folder / "report" / "report.md").read_text(
        encoding="utf-8"
    )
