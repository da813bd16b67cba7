"""The protocols as presets, and how runs become spreads and averages."""

from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats

from cramming.config import build, config_folder
from cramming.data.task_files import GLUE, ExampleFile
from cramming.runlog import Finetuned, Scoring, SetScores
from cramming.scores import Scores, spread
from eval.finetune.config import EvalConfig, Hyperparameters
from eval.finetune.store import describe_sets
from eval.tasks.datasets import Split, TaskData

Section = Callable[..., dict[str, Any]]


def test_every_preset_is_valid_and_the_protocols_are_the_published_ones(
    eval_section: Section,
) -> None:
    presets: dict[str, Hyperparameters] = {
        name: build(EvalConfig, eval_section(name), "eval").hyperparameters
        for name in (file.stem for file in (config_folder() / "eval").glob("*.yaml"))
    }
    assert all(hyper.epochs <= 5 for hyper in presets.values())
    sane, izsak = presets["glue_sane"], presets["izsak"]
    assert (sane.epochs, sane.batch_size, sane.learning_rate, sane.schedule) == (
        5,
        16,
        4e-5,
        "cosine",
    )
    assert sane.dropout == 0.1 and sane.max_length == 128
    assert presets["bert_baseline"] == sane.replace(batch_size=32, learning_rate=2e-5)
    assert (izsak.epochs, izsak.batch_size, izsak.learning_rate, izsak.weight_decay) == (
        5,
        32,
        5e-5,
        0.01,
    )


def test_spread_is_null_as_soon_as_one_value_is() -> None:
    low, high = scipy.stats.t.interval(0.95, 2, 3.0, scipy.stats.sem([1.0, 2.0, 6.0]))
    assert spread([1.0, 2.0, 6.0]) == {
        "per_seed": [1.0, 2.0, 6.0],
        "median": 2.0,
        "mean": 3.0,
        "std": pytest.approx(7**0.5),
        "mean_ci95": [pytest.approx(low), pytest.approx(high)],
    }
    nothing = dict.fromkeys(("median", "mean", "std", "mean_ci95"))
    assert spread([1.0, None]) == {"per_seed": [1.0, None], **nothing}
    assert spread([1.0])["std"] is None and spread([1.0])["mean_ci95"] is None


def split(source: ExampleFile, examples: int) -> Split:
    return Split(source, ([""] * examples,), None)


def section_of(main_metrics: dict[str, float | None]) -> dict[str, Any]:
    """The section of one seed of GLUE in which each entry's main metric has the given value."""
    scores, key = Scores(), "key"
    tasks = [task for name, task in GLUE.items() if name != "wnli"]
    sets = {}
    for task in tasks:
        data = TaskData(task, split(task.train, 1), tuple(split(s, 1) for s in task.scored))
        sets |= describe_sets("glue", data)
    scoring = Scoring(
        time="",
        section="glue",
        suite="glue",
        init="pretrained",
        version=1,
        model="m",
        selection="last epoch",
        seeds=[0],
        hyperparameters={},
        entries=sets,
        absent={},
        keys={f"{task.name}-seed0": key for task in tasks},
    )
    scores.add(scoring)
    for task in tasks:
        entries = {}
        for source in task.scored:
            value = main_metrics[source.entry]
            problems = ["constant"] if value is None else []
            entries[source.entry] = SetScores(
                metrics=dict.fromkeys(task.metrics, value), problems=problems
            )
        scores.add(
            Finetuned(
                time="",
                task=task.name,
                seed=0,
                key=key,
                predictions="0" * 64,
                entries=entries,
                epoch=5,
                seconds=1,
            )
        )
    return scores.sections["glue", "pretrained"]


def test_averages_are_the_papers_and_stay_empty_when_an_entry_is_missing() -> None:
    # The crammed BERT on an A6000 (model card): 78.6 over nine entries.
    paper: dict[str, float | None] = {
        "mnli_matched": 0.839,
        "mnli_mismatched": 0.841,
        "qqp": 0.873,
        "qnli": 0.895,
        "sst2": 0.922,
        "cola": 0.445,
        "stsb": 0.846,
        "mrpc": 0.875,
        "rte": 0.538,
    }
    averages = section_of(paper)["averages"]
    assert round(averages["avg9"]["value"], 1) == 78.6
    assert round(averages["avg8"]["value"], 1) == 77.9
    incomplete = section_of({**paper, "stsb": None})
    assert incomplete["averages"]["avg9"]["value"] is None
    assert incomplete["averages"]["avg9"]["missing"] == ["stsb"]
    task = incomplete["tasks"]["stsb"]
    assert task["score"] is None and task["scored_epochs"] == [5]
    assert task["problem"] == "seed 0: constant"


@pytest.mark.parametrize(("train", "dev"), [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1)])
def test_other_numbers_of_examples_than_the_official_ones_are_marked(train: int, dev: int) -> None:
    """More too, as in an older release of QNLI; the embedded tasks have no official numbers."""
    task = GLUE["rte"]
    dev_split = split(task.scored[0], task.scored[0].examples + dev)
    data = TaskData(task, split(task.train, task.train.examples + train), (dev_split,))
    assert describe_sets("glue", data)["rte"].subset == bool(train or dev)
    assert not describe_sets("embedded", data)["rte"].subset
