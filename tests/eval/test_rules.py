"""Every rule can be broken, a good record breaks none, and docs/rules.md says what the code checks."""

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming.record import RULES_VERSION
from cramming.record_schema import read_record
from eval.finetune.history import history_file
from eval.rules import table
from eval.rules.evidence import files_of, made_later
from eval.rules.load import load_run, load_runs
from eval.rules.table import RULES, Finding, Verdict, foreseen
from eval.rules.validity import COMPARABLE

Record = dict[str, Any]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "rules.md"


def judge(record: Record) -> Verdict:
    return table.judge(read_record(record))


def broken(record: Record) -> list[str]:
    return [finding.rule for finding in judge(record).broken]


def find(number: str, record: Record) -> Finding:
    return next(rule for rule in RULES if rule.number == number)(read_record(record))


@pytest.fixture
def glue(tmp_path: Path, make_record: Any, write_run: Any) -> Record:
    """A record of GLUE with the evidence beside it, as the loader reads them."""
    return copy.deepcopy(load_run(write_run(tmp_path / "first", make_record())).record.raw)


@pytest.fixture(params=["glue", "embedded"])
def good(
    request: pytest.FixtureRequest, tmp_path: Path, make_record: Any, write_run: Any
) -> Record:
    """The same, of either suite."""
    return copy.deepcopy(
        load_run(write_run(tmp_path / "first", make_record(request.param))).record.raw
    )


def test_telling_replaced_tokens_is_the_open_division(glue: Record) -> None:
    """Such a run has a loss of its own, and no other stands for it."""
    assert judge(glue).division == "closed"
    own = {"loss": None, "replaced_token_loss": 0.3}
    glue["pretrain"].update(objective="rtd", validation={**glue["pretrain"]["validation"], **own})
    assert judge(glue).division == "open" and broken(glue) == ["R12"]
    glue["pretrain"]["validation"].update(loss=2.0, replaced_token_loss=None)
    assert judge(glue).division == "invalid" and broken(glue) == ["R3", "R12"]


def test_a_good_record_of_every_comparable_version_is_in_the_closed_division(good: Record) -> None:
    assert judge(good).broken == ()
    for version in COMPARABLE:
        assert judge({**good, "rules_version": version}).division == "closed"
    assert judge({**good, "division_requested": "open"}).division == "open"  # a run may claim it


def test_a_record_cannot_claim_to_be_older_than_it_is(glue: Record) -> None:
    """Which version a record names, anybody can write; known ones are so by their SHA-256."""
    older = {**glue, "rules_version": "3", "contradictions": None}
    del older["history_file"], older["history"]
    assert broken(older | {"known": False}) == ["R1", "R7", "R27"]
    assert judge(older | {"known": True}).division == "closed"
    assert "no history" in find("R7", older | {"known": True}).evidence


def test_what_is_broken_before_the_first_step_is_foreseen(good: Record) -> None:
    """By the same checks, on a record without steps and scores."""
    known = {
        key: good["pretrain"][key]
        for key in ("start", "devices", "objective", "forced", "compiled")
    }
    begun = {
        **good,
        "pretrain": {**known, "compile_cache": "own", "budget": {"spent_seconds": 86400.0}},
    }
    del begun["glue"]
    assert foreseen(begun) == []
    begun["environment"] = {**begun["environment"], "git": {"commit": None}}
    begun["corpus"] = {**begun["corpus"], "sources": [{"name": "a.txt", "license": None}]}
    begun["pretrain"] |= {
        "compile_cache": "given",
        "devices": 2,
        "budget": {"spent_seconds": 90000.0},
    }
    assert [line.split(":")[0] for line in foreseen(begun)] == ["R10", "R11", "R15", "R23", "R25"]
    assert foreseen(begun)[2] == "R15: source 'a.txt' has no license"


def test_what_stands_in_the_record_is_no_file_beside_it(
    tmp_path: Path, make_record: Any, write_run: Any
) -> None:
    """Neither a journal nor a history: both are read from their files alone."""
    folder = write_run(tmp_path / "first", make_record())
    (folder / "record.json").write_text(json.dumps(load_run(folder).record.raw))
    (folder / "budget.jsonl").unlink()
    history_file(folder).unlink()
    found = load_run(folder).record
    assert found.journal is None and found.history_file is None
    assert broken(found.raw) == ["R5", "R7"]


def test_the_content_of_the_tasks_is_evidence_and_what_is_not_known_is_said(good: Record) -> None:
    """Of generated tasks there is no official content; of official ones it must be on record."""
    said = "every task, on all of its data"
    if good["glue"]["pretrained"]["suite"] == "glue":
        evidence = find("R22", good).evidence
        assert evidence.startswith(f"{said}; official by SHA-256: cola, sst2, stsb, rte, wnli; ")
        assert "official SHA-256 not known: mrpc (cdcdcdcdcdcd), qqp (" in evidence
        del _tasks(good)["rte"]["data_sha256"]
        assert find("R22", good).evidence == "SHA-256 of the data not recorded: rte" and broken(
            good
        ) == ["R22"]
    else:
        assert find("R22", good) == ("R22", True, said) and judge(good).division == "closed"
    del _tasks(good)["rte"]["seen_in_training"]
    assert (
        "rte: how many scored examples are training examples too is not on record"
        in find("R22", good).evidence
    )


def test_the_own_records_of_this_project_are_valid() -> None:
    for run in load_runs(DOCS.parents[1] / "eval" / "records"):
        assert run.problem is None and run.record.problems == []
        assert table.judge(run.record).division != "invalid"


def _tasks(record: Record) -> dict[str, Any]:
    return record["glue"]["pretrained"]["tasks"]


def _average(record: Record) -> dict[str, Any]:
    return next(iter(record["glue"]["pretrained"]["averages"].values()))


def _official(record: Record) -> None:
    _tasks(record)["cola"].update(official_train_examples=8551, train_examples=100)


def _few_examples_and_nothing_to_compare(record: Record) -> None:
    _tasks(record)["rte"].update(train_examples=100, eval_examples=10)
    _tasks(record)["rte"].update(official_train_examples=None, official_eval_examples=None)


def _accuracy_instead(record: Record) -> None:
    """Every number agrees with the others; only the metric is not the task's."""
    for name in ("cola", "mrpc", "qqp"):
        _tasks(record)[name].update(main_metric="accuracy")


def _scored_before(record: Record, **change: Any) -> None:
    """The history has a fine-tuning of the trained model more, with a change."""
    runs = record["history_file"]["entries"]
    runs.append({**next(run for run in runs if run["init"] == "pretrained"), **change})


def _value(record: Record, task: str, value: float) -> None:
    """The same value for every seed, in the section and in all of the history."""
    found = _tasks(record)[task]
    found.update(score=100 * value)
    found["metrics"][found["main_metric"]].update(per_seed=[value] * 3)
    for run in record["history_file"]["entries"]:
        if run["init"] == "pretrained" and run["task"] == task:
            run["scores"] = {task: value}


def _two_values(record: Record, named: int) -> None:
    """The better value is in lines that the record does not name (1), or in those of an earlier scoring (2)."""
    lines = record["history_file"]["entries"]
    before = copy.deepcopy(lines)
    _value(record, "rte", 0.9)
    record["history_file"]["entries"] = [*before, *lines] if named == 1 else [*lines, *before]
    record["history"].update(entries=named * len(lines))
    record["glue"]["pretrained"].update(history_entries=named * len(lines))


BREAKS: dict[str, list[Callable[[Record], Any]]] = {
    "R1": [
        lambda r: r.update(rules_version="0"),
        lambda r: r.update(rules_version="7"),
        lambda r: r.pop("rules_version"),
        lambda r: r.pop("suite_version"),
    ],
    "R2": [
        lambda r: r["pretrain"].update(train_loss=math.inf),
        lambda r: r["corpus"].update(counts=[1, math.nan]),
    ],
    "R3": [
        lambda r: r["pretrain"].update(status="interrupted"),
        lambda r: r["pretrain"].update(tokens=None),
    ],
    "R4": [
        lambda r: r["pretrain"]["budget"].update(overrun_seconds=0.1),
        lambda r: r["pretrain"]["budget"].update(spent=r["pretrain"]["budget"]["limit"] * 1.01),
        lambda r: r["pretrain"]["budget"].pop("unit"),
        lambda r: r["pretrain"].pop("budget"),
    ],
    "R5": [
        lambda r: r.pop("journal"),
        lambda r: r.update(journal={"problems": ["budget.jsonl:3: damaged"]}),
    ],
    "R6": [
        lambda r: r.pop("glue"),
        lambda r: r["glue"].pop("pretrained"),
        lambda r: r["glue"]["pretrained"].update(split="test"),
        lambda r: r["glue"]["pretrained"].update(suite="mine"),
        lambda r: r["glue"]["random"].pop("selection"),
    ],
    "R7": [
        lambda r: _tasks(r)["rte"].update(score=99.0),
        lambda r: _tasks(r)["rte"].update(score=None),
        lambda r: _tasks(r)["rte"]["metrics"]["accuracy"]["per_seed"].pop(),
        _accuracy_instead,
        lambda r: _tasks(r)["mrpc"].pop("main_metric"),
        lambda r: r.pop("history_file"),
        lambda r: r.pop("history"),
        lambda r: r["history"].update(sha256="0" * 64),
        lambda r: r.update(history_file={"problem": "damaged"}),
        lambda r: r["history_file"]["entries"].clear(),
        lambda r: r["history"].update(entries=0),
        lambda r: r["glue"]["pretrained"].pop("history_entries"),
        lambda r: (r.pop("history_file"), r.pop("glue")),
        lambda r: _two_values(r, named=1),
        lambda r: _two_values(r, named=2),
        lambda r: _value(r, "rte", 1.7),
        lambda r: _value(r, "rte", -0.5),
        lambda r: _value(r, "cola", -1.5),
        lambda r: _tasks(r)["cola"]["metrics"].update(accuracy={"per_seed": [0.5, 2.0, 0.5]}),
        lambda r: _tasks(r)["rte"].update(
            score=95.0, metrics={"accuracy": {"per_seed": [0.95, 0.95, 0.95]}}
        ),
        lambda r: r["glue"]["random"]["hyperparameters"].update(epochs=4),
        lambda r: (
            r["glue"]["pretrained"].update(seeds=[]),
            _tasks(r)["rte"]["metrics"]["accuracy"].clear(),
        ),
    ],
    "R8": [
        lambda r: _average(r).update(value=_average(r)["value"] + 1),
        lambda r: _average(r).update(value=None),
        lambda r: _average(r).pop("definition"),
        lambda r: _tasks(r).pop("rte"),
        lambda r: r["glue"]["pretrained"].pop("averages"),
    ],
    "R9": [
        _official,
        _few_examples_and_nothing_to_compare,
        lambda r: _tasks(r)["rte"].update(official_train_examples=None),
        lambda r: _tasks(r)["rte"].update(official_eval_examples=10, subset=True),
        lambda r: _tasks(r)["rte"].pop("train_examples"),
        lambda r: _tasks(r)["qnli"].update(train_examples=108436, eval_examples=5732),
    ],
    "R10": [
        lambda r: r["pretrain"].update(devices=2),
        lambda r: r["environment"].pop("device"),
        lambda r: r.update(
            resumed=[{**r["environment"], "device": {"kind": "cpu", "name": "another"}}]
        ),
    ],
    "R11": [
        lambda r: r["pretrain"]["budget"].update(spent_seconds=24 * 3600 + 1.0),
        lambda r: r["pretrain"]["budget"].update(clock="cpu"),
    ],
    "R12": [lambda r: r["pretrain"].update(objective="causal, then mlm")],
    "R13": [
        lambda r: r["pretrain"].update(start="bert-base-uncased"),
        lambda r: r["pretrain"].update(start=["random"]),
        lambda r: r["pretrain"].pop("start"),
    ],
    "R14": [
        lambda r: r["glue"]["pretrained"].update(model_sha256="0" * 64),
        lambda r: r["glue"]["pretrained"]["model_files"].update({"config.json": "0" * 64}),
        lambda r: r["glue"]["pretrained"]["model_files"].pop("tokenizer.json"),
        lambda r: r["glue"]["pretrained"]["model_files"].update({"vocab.txt": "0" * 64}),
        lambda r: r["pretrain"].pop("final_files"),
        lambda r: r["glue"]["pretrained"].update(model_files=None),
        lambda r: r["glue"]["pretrained"].pop("model_sha256"),
    ],
    "R15": [
        lambda r: r["corpus"].update(manifest_sha256=None),
        lambda r: r["corpus"]["sources"][0].pop("license"),
        lambda r: r["corpus"]["changed"].update({"c/train-00000.bin": True}),
        lambda r: r["corpus"].pop("changed"),
    ],
    "R16": [
        lambda r: r["corpus"].update(sources=[]),
        lambda r: r["corpus"]["sources"].append(
            {"name": "data/GLUE/RTE/train.tsv", "license": "x"}
        ),
        lambda r: r["corpus"]["sources"].append(
            {"name": "rajpurkar/squad", "kind": "hub", "license": "x"}
        ),
        lambda r: r["corpus"]["sources"].append(
            {"name": "x/y", "dataset": "nyu-mll/glue", "license": "x"}
        ),
        lambda r: r["corpus"].pop("decontamination"),
        lambda r: r["corpus"]["decontamination"].update(ngram=50),
        lambda r: r["corpus"]["decontamination"].pop("development"),
        lambda r: r["corpus"]["decontamination"]["development"].pop("QQP/dev.tsv"),
        lambda r: r["corpus"]["decontamination"]["development"].pop("MNLI/dev_mismatched.tsv"),
        lambda r: r["corpus"]["decontamination"]["development"]["RTE/dev.tsv"].update(texts=2),
        lambda r: r["corpus"]["decontamination"]["development"]["RTE/dev.tsv"].update(
            sha256="0" * 64
        ),
        lambda r: _tasks(r)["mrpc"].pop("texts_sha256"),
    ],
    "R17": [
        lambda r: r["corpus"]["tokenizer"].pop("sha256"),
        lambda r: r["pretrain"]["final_files"].update({"tokenizer.json": "0" * 64}),
        lambda r: r["glue"]["pretrained"]["model_files"].update({"tokenizer.json": "0" * 64}),
    ],
    "R18": [
        lambda r: _tasks(r)["cola"]["hyperparameters"].update(learning_rate=1e-3),
        lambda r: r["glue"]["random"]["tasks"]["cola"].pop("hyperparameters"),
        lambda r: r["glue"]["pretrained"].pop("hyperparameters"),
    ],
    "R19": [lambda r: r["glue"]["random"]["hyperparameters"].update(epochs=6)],
    "R20": [
        lambda r: r["glue"]["pretrained"].update(selection="best epoch"),
        lambda r: r["glue"]["pretrained"].update(sweep={"points": [{}, {}]}),
        lambda r: r["glue"]["random"].update(sweep={}),
        lambda r: _tasks(r)["cola"].update(scored_epochs=[5, 5, 4]),
        lambda r: _tasks(r)["cola"].update(scored_epochs=[5, 5]),
        lambda r: _tasks(r)["cola"].pop("scored_epochs"),
        lambda r: _scored_before(r, hyperparameters={"epochs": 5, "learning_rate": 1e-3}),
        lambda r: _scored_before(r, selection="best epoch of each run by its own dev score"),
        lambda r: _scored_before(r, threads_per_run=7),
        lambda r: _scored_before(r, scores={"cola": 0.75}),
    ],
    "R21": [
        lambda r: r["glue"]["pretrained"].update(seeds=[0, 1]),
        lambda r: r["glue"]["pretrained"].update(seeds=[1, 1, 1]),
        lambda r: r["glue"]["pretrained"].update(seeds=[3, 7, 11]),
        lambda r: r["glue"]["pretrained"].update(seeds=[1, 2, 3]),
        lambda r: _scored_before(r, seed=3),
        lambda r: r["glue"].pop("pretrained"),
    ],
    "R22": [
        lambda r: _tasks(r)["rte"].update(subset=True),
        _few_examples_and_nothing_to_compare,
        lambda r: _tasks(r)["rte"].update(data_sha256="0" * 64),
        lambda r: _tasks(r)["mrpc"].update(seen_in_training=408),
        lambda r: _tasks(r)["wnli"].update(data_sha256="0" * 64),
        lambda r: _average(r).update(value=None, missing=["rte"]),
    ],
    "R23": [
        lambda r: r["environment"]["git"].update(dirty=True),
        lambda r: r["environment"]["git"].update(commit=None),
        lambda r: r.update(
            resumed=[r["environment"], {**r["environment"], "git": {"commit": "c", "dirty": True}}]
        ),
        lambda r: r["glue"]["pretrained"]["environment"]["git"].update(dirty=None),
        lambda r: r["history_file"]["entries"][0].update(git={"commit": "c", "dirty": True}),
    ],
    "R24": [
        lambda r: r["pretrain"].update(forced=["budget"]),
        lambda r: r["pretrain"].pop("forced"),
    ],
    "R25": [
        lambda r: r["pretrain"].update(compile_cache="given"),
        lambda r: r["resumed"][0].update(compile_cache="given"),
        lambda r: r["pretrain"].pop("compile_cache"),
        lambda r: r["pretrain"].pop("compiled"),
    ],
    "R26": [
        lambda r: r.pop("beside"),
        lambda r: r["beside"]["predictions"].pop("rte-seed1.npz"),
        lambda r: r["beside"]["predictions"].update({"rte-seed1.npz": "0" * 64}),
        lambda r: r["history_file"]["entries"][0].update(model_sha256="0" * 64),
        lambda r: r["history_file"]["entries"][0].pop("predictions_sha256"),
        lambda r: r["beside"].update(final={"model.safetensors": "0" * 64}),
    ],
    "R27": [
        lambda r: r["contradictions"].append("budget.jsonl: step 3: tokens falls"),
        lambda r: r.pop("contradictions"),
    ],
}


@pytest.mark.parametrize("number", [rule.number for rule in RULES])
def test_each_rule_can_be_broken(number: str, glue: Record) -> None:
    division = next(rule.division for rule in RULES if rule.number == number)
    for index, change in enumerate(BREAKS[number]):
        record = copy.deepcopy(glue)
        change(record)
        finding = find(number, record)
        assert not finding.ok and finding.evidence, f"{number}, change {index}"
        assert (
            judge(record).division == "invalid"
            if division == "both"
            else judge(record).division != "closed"
        )


@pytest.mark.parametrize(
    "name",
    [
        "coca-cola/articles.txt",
        "rte/2024/news.txt",
        "mycola/a.txt",
        "cb/train.txt",
        "ax/test.txt",
        "record/a.tsv",
        "hot-glue/all.txt",
        "cola-wars/train.jsonl",
        "diagnostic/train.tsv",
        "text/squadron.txt",
        "a/train-v1.1.json",
        "quorate/a.txt",
        "rte/train/news.txt",
        "squad5/a.txt",
        "record/train/0.csv",
    ],
)
def test_a_word_in_the_path_of_a_text_does_not_make_it_downstream(glue: Record, name: str) -> None:
    glue["corpus"]["sources"].append({"name": name, "kind": "text", "license": "x"})
    assert judge(glue).division == "closed"


@pytest.mark.parametrize(
    "name",
    [
        "CoLA/dev.tsv",
        "a/GLUE/mnli/dev_matched.tsv.gz",
        "sst2/train-00000-of-00001.parquet",
        "glue/squad.jsonl",
        "CoLA/original/raw/in_domain_train.tsv",
        "SST-2/original/SOStr.txt",
        "multinli_1.0/multinli_1.0_train.jsonl",
        "multinli_1.0_train.jsonl",
        "SQuAD/train-v1.1.json",
        "squad-train-v1.1.json",
        "stsbenchmark/sts-train.csv",
        "glue/all_train.json",
        "glue_data/a.txt",
        "cola_public_1.1/a.txt",
        "glue_rte.csv",
        "boolq/a.txt",
        "MultiRC.xz",
        "RTE/train.tsv",
        "CB/val.jsonl",
        "ax/test-00000-of-00001.parquet",
        "diagnostic/diagnostic.tsv",
        "AX-b/AX-b.csv",
        "datasets--stanfordnlp--sst2/snapshots/1/data/train-00000-of-00001.parquet",
        "datasets--x--my-rte/a.parquet",
        "SQuAD2.0/a.json",
        "squad_v2/a.json",
        "msr_paraphrase_train.txt",
        "quora_duplicate_questions.tsv",
        "rte/train/0000.parquet",
    ],
)
def test_a_file_in_a_folder_of_a_task_or_called_so_is_downstream(glue: Record, name: str) -> None:
    glue["corpus"]["sources"].append({"name": name, "kind": "text", "license": "x"})
    assert f"downstream data among the sources: {name}" in find("R16", glue).evidence


def test_a_data_set_of_the_hub_is_downstream_by_the_words_of_its_name_and_a_local_one_by_its_path(
    glue: Record,
) -> None:
    for name, folder, ok in [
        ("x/QQP_triplets/train", None, False),
        ("google/boolq/train", None, False),
        ("x/copa/train", None, False),
        ("SetFit/sst5/train", None, False),
        ("quora/train", None, False),
        ("x/squad2/train", None, False),
        ("x/cocacola/train", None, True),
        ("./squad/train", "./squad", False),
        ("./my-squad/train", "./my-squad", True),
    ]:
        source = {
            "name": name,
            "kind": "hub",
            "license": "x",
            "folder": folder,
            "dataset": None if folder else name[:-6],
        }
        changed = {
            **glue,
            "corpus": {**glue["corpus"], "sources": [*glue["corpus"]["sources"], source]},
        }
        assert find("R16", changed).ok == ok, name


def test_results_of_a_scoring_that_was_broken_off_are_known_one_by_one() -> None:
    """Of two seeds that predict the same, such as one class alone, both."""
    lines = [
        {"init": "pretrained", "suite": "glue", "key": key, "predictions_sha256": "same"}
        for key in "abc"
    ]
    section = {"suite": "glue", "seeds": [0], "history_entries": 1}
    record = {
        "glue": {"pretrained": section},
        "history": {"entries": 1},
        "history_file": {"entries": lines},
    }
    assert [line.key for line in made_later(read_record(record), "pretrained")] == ["b", "c"]


def test_a_later_scorings_files_are_told_by_task_and_seed() -> None:
    """Its seed 1 may predict what the section's own seed 0 did."""
    lines = [
        {"task": "rte", "seed": seed, "predictions_sha256": sha256}
        for seed, sha256 in ((0, "a"), (1, "b"), (1, "a"))
    ]
    read = read_record({"history_file": {"entries": lines}}).history_file
    assert read and files_of(read.entries[2:]) - files_of(read.entries[:2]) == {
        ("rte-seed1.npz", "a")
    }


def test_a_claim_of_the_open_division_stays_wherever_it_is_written(good: Record) -> None:
    """The division of a resume, or that of the start, of which config.yaml has another copy."""
    assert judge(good | {"division_requested": "open"}).division == "open"
    assert judge(good | {"config": good["config"] | {"division": "open"}}).division == "open"


def test_the_search_for_downstream_text(glue: Record) -> None:
    """It is demanded of text that was not generated; what it removed is shown."""
    search = glue["corpus"]["decontamination"]
    search["removed"] = {"CoLA": 3, "QNLI": 1700}
    assert (
        find("R16", glue).ok
        and "documents removed: CoLA 3, QNLI 1700" in find("R16", glue).evidence
    )
    unscored = {key: value for key, value in glue.items() if key != "glue"}
    assert find("R16", unscored).ok
    search["development"]["MNLI/dev_mismatched.tsv"].update(texts=0)
    assert find("R16", unscored).evidence.endswith(
        "; 0 texts of MNLI/dev_mismatched.tsv, which has 19664"
    )
    glue["corpus"]["decontamination"] = {"ngram": 13}
    assert "delete the corpus and prepare it anew" in find("R16", glue).evidence
    del glue["corpus"]["decontamination"]
    wanted = "no overlap search on record; prepare with data.decontaminate.tasks=<GLUE folder>"
    assert find("R16", glue) == ("R16", False, wanted)
    glue["corpus"]["sources"] = [{"name": "embedded", "kind": "embedded", "license": "MIT"}]
    assert judge(glue).division == "closed"
    glue["corpus"]["sources"].append({"name": "a.txt", "kind": "text", "license": "MIT"})
    assert judge(glue).division == "open"


def test_embedded_tasks_are_those_of_the_corpus(
    tmp_path: Path, make_record: Any, write_run: Any
) -> None:
    """A folder of anybody's making, or another seed's, is none."""
    record = copy.deepcopy(
        load_run(write_run(tmp_path / "first", make_record("embedded"))).record.raw
    )
    for sha256 in ("0" * 64, None):
        record["glue"]["pretrained"]["tasks_corpus_sha256"] = sha256
        assert broken(record) == ["R22"]


@pytest.mark.parametrize("change", [{"subset": True}, {"version": 4}, {}], ids=str)
def test_what_is_no_other_outcome(glue: Record, change: Record) -> None:
    """A part of the data, another version of the code, or the same once more."""
    _scored_before(glue, **({"scores": {"cola": 0.75}} if change else {}), **change)
    assert judge(glue).division == "closed"


def test_rows_that_do_not_compete_may_have_fewer_seeds(
    tmp_path: Path, make_record: Any, write_run: Any, make_section: Any
) -> None:
    record = make_record()
    record["glue"]["random"] = make_section("random", seeds=[0])
    found = load_run(write_run(tmp_path / "first", record)).record
    assert (
        table.judge(found).division == "closed"
        and "random: seeds [0]" in find("R21", found.raw).evidence
    )


def test_what_lies_beside_the_record_is_looked_at(
    tmp_path: Path, make_record: Any, write_run: Any
) -> None:
    """A model need not lie there, and what only people read may."""
    record = make_record()
    record["pretrain"]["final_files"].pop("model.safetensors")
    record["glue"]["pretrained"]["model_files"].pop("model.safetensors")
    folder = write_run(tmp_path / "first", record)
    assert table.judge(load_run(folder).record).division == "closed"
    (folder / "final").mkdir()
    (folder / "final/README.md").write_text("mine")
    assert table.judge(load_run(folder).record).division == "closed"
    (folder / "final/config.json").write_text("{}")
    (folder / "glue/pretrained/predictions/rte-seed1.npz").write_text("x")
    (folder / "glue/pretrained/predictions/cola-seed0.npz").unlink()
    (finding,) = table.judge(load_run(folder).record).broken
    lost, altered = (
        "not beside the record: cola-seed0.npz",
        "not those of the history: rte-seed1.npz",
    )
    assert finding.rule == "R26" and all(
        said in finding.evidence for said in (lost, altered, "final/config.json")
    )


def test_a_model_from_elsewhere_is_open_not_invalid(good: Record) -> None:
    """`cramming glue model_path=...` records have no pretraining."""
    for key in ("pretrain", "corpus", "journal"):
        del good[key]
    assert judge(good).division == "open"


def test_scores_on_marked_subsets_with_missing_tasks_are_open(
    good: Record, recompute_averages: Any
) -> None:
    for section in good["glue"].values():
        del section["tasks"]["qqp"]
        section["tasks"]["qnli"].update(train_examples=13459, subset=True)
        section["averages"] = recompute_averages(section)
    assert judge(good).division == "open" and broken(good) == ["R22"]


def test_a_failed_seed_leaves_its_score_missing_and_the_record_valid(
    good: Record, recompute_averages: Any
) -> None:
    section = good["glue"]["pretrained"]
    section["tasks"]["cola"].update(
        score=None, problem="seed 1: the loss is not finite", scored_epochs=[5, 2, 5]
    )
    section["tasks"]["cola"]["metrics"]["matthews_correlation"]["per_seed"][1] = None
    section["averages"] = recompute_averages(section)
    assert broken(good) == ["R22"]  # R20 holds: what was scored is the last epoch
    section["tasks"]["cola"]["score"] = (
        50.0  # a median of the seeds that did not fail is a substitute
    )
    assert "R7" in broken(good)


def test_docs_and_table_have_the_same_version_numbers_and_sentences() -> None:
    text = DOCS.read_text(encoding="utf-8")
    found = re.findall(r"^- \*\*(R\d+)\*\* \((both|closed)\) (.+)$", text, re.MULTILINE)
    assert found == [(rule.number, rule.division, rule.sentence) for rule in RULES]
    assert [rule.number for rule in RULES] == [f"R{n}" for n in range(1, len(RULES) + 1)]
    assert f"# Rules, version {RULES_VERSION}\n" in text and RULES_VERSION in COMPARABLE
    assert tuple(re.findall(r"\d", RULES[0].sentence)) == COMPARABLE
