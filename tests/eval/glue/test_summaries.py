"""The protocols as presets, and how runs become spreads and averages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats

from cramming.config import build, config_folder
from cramming.data.task_files import ENTRIES, GLUE
from eval.finetune.config import EvalConfig
from eval.finetune.summary import spread, summarise
from eval.rules.validity import subsets_marked
from eval.tasks.datasets import Split, TaskData

Section = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("name", sorted(f.stem for f in (config_folder() / "eval").glob("*.yaml")))
def test_every_preset_is_valid(name: str, eval_section: Section) -> None:
    assert build(EvalConfig, eval_section(name), "eval").hyperparameters.epochs <= 5


def test_the_default_protocol_is_the_papers(eval_section: Section) -> None:
    hyper = build(EvalConfig, eval_section("glue_sane"), "eval").hyperparameters
    assert (hyper.epochs, hyper.batch_size, hyper.learning_rate, hyper.schedule) == (5, 16, 4e-5, "cosine")
    assert hyper.dropout == 0.1 and hyper.max_length == 128


def test_the_other_protocols_are_the_baselines_and_izsaks(eval_section: Section) -> None:
    sane, bert, izsak = (
        build(EvalConfig, eval_section(name), "eval").hyperparameters
        for name in ("glue_sane", "bert_baseline", "izsak")
    )
    assert bert == replace(sane, batch_size=32, learning_rate=2e-5)
    assert (izsak.epochs, izsak.batch_size, izsak.learning_rate, izsak.weight_decay) == (5, 32, 5e-5, 0.01)


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


def summary_of(
    main_metrics: dict[str, float | None], hyperparameters: dict[str, Any], more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A summary of one seed in which each entry's main metric has the given value and all examples are there, and one
    too many in the files `more`, such as `QNLI/train.tsv`.
    """
    data, pieces = [], {}
    for task in GLUE.values():
        if task.name == "wnli":
            continue

        def split(source: Any, columns: int = len(task.text)) -> Split:
            extra = f"{source.folder}/{source.file}" in more
            return Split(source, ([""] * (source.examples + extra),) * columns, None)

        data.append(TaskData(task, split(task.train), tuple(split(s) for s in task.scored)))
        entries = {}
        for source in task.scored:
            value = main_metrics[source.entry]
            problems = ["constant"] if value is None else []
            entries[source.entry] = {"metrics": dict.fromkeys(task.metrics, value), "problems": problems, "notes": []}
        pieces[task.name, 0] = {"entries": entries, "epoch": hyperparameters["epochs"]}
    return summarise({"init": "pretrained"}, "glue", data, pieces, [0], hyperparameters, {}, "last epoch")


def test_averages_are_the_papers_and_stay_empty_when_an_entry_is_missing(eval_section: Section) -> None:
    hyper = eval_section("glue_sane")["hyperparameters"]
    # The crammed BERT on an A6000 (model card): 78.6 over nine entries.
    paper = {"mnli_matched": 0.839, "mnli_mismatched": 0.841, "qqp": 0.873, "qnli": 0.895, "sst2": 0.922}
    paper |= {"cola": 0.445, "stsb": 0.846, "mrpc": 0.875, "rte": 0.538}
    summary = summary_of(paper, hyper)
    assert round(summary["averages"]["avg9"]["value"], 1) == 78.6
    assert round(summary["averages"]["avg8"]["value"], 1) == 77.9
    assert not any(task["subset"] for task in summary["tasks"].values())
    incomplete = summary_of({**paper, "stsb": None}, hyper)
    assert incomplete["averages"]["avg9"]["value"] is None and incomplete["averages"]["avg9"]["missing"] == ["stsb"]
    assert incomplete["tasks"]["stsb"]["score"] is None and incomplete["tasks"]["stsb"]["problem"] == "seed 0: constant"


@pytest.mark.parametrize(("file", "entries"), [
    ("QNLI/train.tsv", {"qnli"}),
    ("QNLI/dev.tsv", {"qnli"}),
    ("MNLI/train.tsv", {"mnli_matched", "mnli_mismatched"}),
    ("MNLI/dev_matched.tsv", {"mnli_matched"}),
])  # fmt: skip
def test_more_examples_than_the_official_ones_are_marked_as_fewer_are(
    eval_section: Section, file: str, entries: set[str]
) -> None:
    """As in an older release of QNLI; and the rule on marks holds. The scored epoch is beside them."""
    summary = summary_of(dict.fromkeys(ENTRIES, 0.5), eval_section("glue_sane")["hyperparameters"], (file,))
    assert {name for name, task in summary["tasks"].items() if task["subset"]} == entries
    ok, evidence = subsets_marked({"glue": {"pretrained": summary}})
    assert ok and all(name in evidence for name in entries)
    assert all(task["scored_epochs"] == [5] for task in summary["tasks"].values())
