"""One grid for all tasks: the point with the best mean is chosen, for every initialisation, and the record says so."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.record_schema import read_record
from eval.extras import sweep
from eval.rules.fine_tuning import global_hyperparameters, nothing_selected


def write_point(
    glue: Path, init: str, name: str, section: dict[str, Any], rate: float, scores: list[float]
) -> None:
    """A finished point; `scores` are those of the first entries, the others stay."""
    hyper = {**section["hyperparameters"], "learning_rate": rate}
    tasks = {entry: {**task, "hyperparameters": hyper} for entry, task in section["tasks"].items()}
    for task, value in zip(tasks.values(), scores):
        task["score"] = value
    point = glue / init / "sweep" / name
    for kind in ("pieces", "predictions"):
        (point / kind).mkdir(parents=True)
        (point / kind / "rte-seed0").write_text(name)
    for file in ("glue.json", "timing.json"):
        (point / file).write_text(name)
    changed = {"hyperparameters": hyper, "tasks": tasks, "history_entries": round(rate * 1e6)}
    (point / "section.json").write_text(json.dumps({**section, **changed}))


def test_the_best_mean_wins_for_every_initialisation_and_is_marked(
    tmp_path: Path, make_section: Any
) -> None:
    # b has the best single task, a the best mean; the random row by itself would like c
    for init, wanted in (
        ("pretrained", {"a": [70, 70], "b": [90, 40], "c": [50, 50]}),
        ("random", {"c": [99, 99]}),
    ):
        for rate, name in enumerate("abc", start=1):
            scores = wanted.get(name, [10, 10])
            write_point(tmp_path, init, name, make_section(init, "glue", 0.7), rate / 1e5, scores)
    found = sweep.choose(tmp_path, ["pretrained", "random"])
    for init in ("pretrained", "random"):
        assert found[init]["hyperparameters"]["learning_rate"] == 1e-5
        assert (
            (tmp_path / init / "predictions/rte-seed0").read_text()
            == (tmp_path / init / "glue.json").read_text()
            == "a"
        )
        assert [p["hyperparameters"] for p in found[init]["sweep"]["points"]] == [
            {"learning_rate": rate / 1e5} for rate in (1, 2, 3)
        ]
        assert found[init]["history_entries"] == 30  # all points were before the choice
    assert global_hyperparameters(read_record({"glue": found}))[0]
    assert nothing_selected(read_record({"glue": found})) == (
        False,
        "; ".join(
            f"{init}: last epoch, best of 3 sets of hyperparameters"
            for init in ("pretrained", "random")
        ),
    )


def test_results_of_other_tasks_and_seeds_stay(
    tmp_path: Path, make_section: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [tmp_path / "pretrained" / kind / "cola-seed1" for kind in ("pieces", "predictions")]
    for other in others:
        other.parent.mkdir(parents=True)
        other.write_text("of a scoring before")
        other.with_name("rte-seed0").write_text("of a scoring before")
    write_point(tmp_path, "pretrained", "a", make_section("pretrained", "glue", 0.7), 1e-5, [])
    sweep.choose(tmp_path, ["pretrained"])
    assert capsys.readouterr().out.startswith("sweep: 1 point: "), "a single one is no best"
    assert [other.read_text() for other in others] == ["of a scoring before"] * 2
    assert [other.with_name("rte-seed0").read_text() for other in others] == ["a"] * 2


def other_seeds(section: dict[str, Any]) -> None:
    section["seeds"] = [7, 8, 9]


def a_score_missing(section: dict[str, Any]) -> None:
    next(iter(section["tasks"].values()))["score"] = None


def other_conditions(section: dict[str, Any]) -> None:
    section["conditions"] = {"cola": "before"}


@pytest.mark.parametrize("stale", ["pretrained", "random"])
@pytest.mark.parametrize("change", [other_seeds, a_score_missing, other_conditions, None])
def test_points_that_do_not_compare_do_not_count(
    tmp_path: Path, make_section: Any, stale: str, change: Callable[[dict[str, Any]], None] | None
) -> None:
    """For whichever row: a random baseline of older code does not stand beside new scores either."""
    if (change, stale) == (a_score_missing, "random"):
        pytest.skip("the pretrained row decides")
    for name, score in (("old", 99), ("new", 50)):
        for init in ("pretrained", "random"):
            section = {**make_section(init, "glue", 0.7), "conditions": {"cola": "now"}}
            write_point(tmp_path, init, name, section, score / 1e6, [score] * 9)
            if (name, init) == ("old", stale):
                file = tmp_path / init / "sweep/old/section.json"
                changed = json.loads(file.read_text())
                if change:
                    change(changed)
                    file.write_text(json.dumps(changed))
                else:
                    file.unlink()
            time.sleep(0.01)
    found = sweep.choose(tmp_path, ["pretrained", "random"])
    assert (
        all(section["hyperparameters"]["learning_rate"] == 5e-5 for section in found.values())
        and len(found) == 2
    )


def test_nothing_is_chosen_before_a_point_is_whole(tmp_path: Path, make_section: Any) -> None:
    partial = make_section("pretrained", "glue", 0.9)
    a_score_missing(partial)
    write_point(tmp_path, "pretrained", "partial", partial, 8e-5, [])
    assert sweep.choose(tmp_path, ["pretrained"]) == {}
