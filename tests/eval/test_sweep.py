"""One grid for all tasks: the point with the best mean is chosen, for every initialisation, and the record says so."""

from collections.abc import Sequence
from typing import Any

import pytest

from cramming.runlog import Finetuned, LabelledSet, Scoring, SetScores
from cramming.scores import Scores

TASKS = ("cola", "rte")
BOTH = ("pretrained", "random")


def score(
    scores: Scores,
    init: str,
    rate: float,
    values: Sequence[float | None],
    *,
    inits: Sequence[str] | None = BOTH,
    finish: bool = True,
    **changes: Any,
) -> None:
    """Log a point of the sweep of `inits` (a plain scoring without them), with a score for each task."""
    seeds = changes.get("seeds", [0])
    keys = {f"{task}-seed{seed}": f"{init} {rate} {changes}" for task in TASKS for seed in seeds}
    example = LabelledSet(
        title="",
        task="",
        metrics=["accuracy"],
        main_metric="accuracy",
        train_examples=1,
        eval_examples=1,
        subset=False,
        skipped_rows=0,
        data_sha256="0" * 64,
        texts_sha256="0" * 64,
        seen_in_training=0,
    )
    facts: dict[str, Any] = {
        "time": "",
        "section": "glue",
        "suite": "embedded",
        "init": init,
        "version": 1,
        "model": "m",
        "selection": "last epoch",
        "seeds": seeds,
        "hyperparameters": {"learning_rate": rate, "epochs": 5},
        "sweep": inits,
        "entries": {task: example.model_copy(update={"task": task}) for task in TASKS},
        "absent": {},
        "keys": keys,
    }
    scoring = Scoring(**{**facts, **changes})
    scores.add(scoring)
    for task, value in zip(TASKS, values, strict=True):
        for seed in seeds if finish else ():
            scores.add(
                Finetuned(
                    time="",
                    task=task,
                    seed=seed,
                    key=keys[f"{task}-seed{seed}"],
                    predictions="0" * 64,
                    entries={task: SetScores(metrics={"accuracy": value})},
                    epoch=5,
                    seconds=1,
                )
            )


def rates(scores: Scores) -> dict[str, float]:
    """The learning rate of each initialisation's section."""
    return {
        init: section["hyperparameters"]["learning_rate"]
        for (_, init), section in scores.sections.items()
    }


def test_the_best_mean_wins_for_every_initialisation_and_is_marked() -> None:
    """The second point has the best single task; the random row by itself would like the third."""
    scores = Scores()
    grid = {1e-5: [0.7, 0.7], 2e-5: [0.9, 0.4], 3e-5: [0.5, 0.5]}
    for rate, values in grid.items():
        score(scores, "pretrained", rate, values)
        score(scores, "random", rate, [0.1, 0.99 if rate == 3e-5 else 0.1])
    assert rates(scores) == {"pretrained": 1e-5, "random": 1e-5}
    for section in scores.sections.values():
        sweep = section["sweep"]
        listed = {
            point["hyperparameters"]["learning_rate"]: point["mean"] for point in sweep["points"]
        }
        assert listed == pytest.approx({1e-5: 70, 2e-5: 65, 3e-5: 50})
        assert all(set(point["hyperparameters"]) == {"learning_rate"} for point in sweep["points"])
        assert (
            sweep["mean"] == pytest.approx(70) and "pretrained over cola, rte" in sweep["chosen_by"]
        )
    # All points were before the choice.
    assert scores.sections["glue", "random"]["history_entries"] == len(scores.history)


def test_an_unfinished_point_changes_no_choice() -> None:
    """Wherever a sweep is interrupted, all initialisations have the same hyperparameters."""
    scores = Scores()
    score(scores, "pretrained", 1e-5, [0.5, 0.5])
    assert rates(scores) == {}, "the random row has no point yet"
    score(scores, "random", 1e-5, [0.1, 0.1])
    before = dict(scores.sections)
    score(scores, "pretrained", 2e-5, [0.9, 0.9], finish=False)
    assert scores.unfinished == ["embedded, pretrained: 2 of 2 not fine-tuned"]
    score(scores, "pretrained", 2e-5, [0.9, 0.9])
    score(scores, "random", 2e-5, [0.1, 0.1], finish=False)
    assert scores.sections == before
    score(scores, "random", 2e-5, [0.1, 0.1])
    assert rates(scores) == {"pretrained": 2e-5, "random": 2e-5} and not scores.unfinished


def test_the_order_of_points_is_of_no_account() -> None:
    grid = {1e-5: 0.6, 2e-5: 0.6, 3e-5: 0.1}
    marks = []
    for order in ([1e-5, 2e-5, 3e-5], [3e-5, 2e-5, 1e-5], [2e-5, 3e-5, 1e-5, 2e-5]):
        scores = Scores()
        for rate in order:
            score(scores, "pretrained", rate, [grid[rate]] * 2, inits=["pretrained"])
        section = scores.sections["glue", "pretrained"]
        marks.append((section["hyperparameters"], section["sweep"]))
    assert marks[0] == marks[1] == marks[2]


@pytest.mark.parametrize("stale", BOTH)
@pytest.mark.parametrize(
    ("changes", "compares"),
    [
        ({"seeds": [7, 8]}, False),
        ({"conditions": {"cola": "before"}}, False),
        ({"suite": "glue"}, False),
        ({}, True),
    ],
)
def test_points_that_do_not_compare_with_the_latest_do_not_count(
    stale: str, changes: dict[str, Any], compares: bool
) -> None:
    """For whichever row: a random baseline of older code does not stand beside new scores either."""
    scores = Scores()
    for rate, value in ((9e-5, 0.9), (5e-5, 0.5)):
        for init in BOTH:
            changed = changes if (rate, init) == (9e-5, stale) else {}
            score(scores, init, rate, [value, value], **changed)
    chosen = 9e-5 if compares else 5e-5
    assert rates(scores) == {"pretrained": chosen, "random": chosen}


def test_nothing_is_chosen_before_a_point_has_all_its_scores() -> None:
    scores = Scores()
    score(scores, "pretrained", 1e-5, [0.9, None], inits=["pretrained"])
    assert not scores.sections
    score(scores, "pretrained", 2e-5, [0.1, 0.1], inits=["pretrained"])
    assert rates(scores) == {"pretrained": 2e-5}
    means = [point["mean"] for point in scores.sections["glue", "pretrained"]["sweep"]["points"]]
    assert sorted(means, key=str) == [pytest.approx(10), None]


def test_a_plain_scoring_takes_the_place_of_a_sweep_whose_points_stay() -> None:
    scores = Scores()
    for rate, value in ((1e-5, 0.5), (2e-5, 0.6)):
        score(scores, "pretrained", rate, [value, value], inits=["pretrained"])
    score(scores, "pretrained", 1e-5, [0.5, 0.5], inits=None)
    assert rates(scores) == {"pretrained": 1e-5}
    assert "sweep" not in scores.sections["glue", "pretrained"]
    score(scores, "pretrained", 3e-5, [0.1, 0.1], inits=["pretrained"])
    assert rates(scores) == {"pretrained": 2e-5}
    assert len(scores.sections["glue", "pretrained"]["sweep"]["points"]) == 3
