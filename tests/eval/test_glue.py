"""`cramming glue` end to end on a tiny stock BERT: the record, resuming, independence of workers, one-line errors."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import hydra
import numpy as np
import pytest
import scipy.stats
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForMaskedLM

from cramming.config import UserError, build, config_folder, file_sha256
from cramming.record import load_record, write_record_section
from eval import suites
from eval.datasets import Split, TaskData
from eval.finetune import Predictions
from eval.floor import NAME
from eval.glue import EvalConfig, check, main
from eval.reading import load_run
from eval.render import Paragraph
from eval.results import Pieces, spread, summarise
from eval.rules import judge
from eval.standings import entrants
from eval.summary import beyond_glue
from eval.tasks import TASKS

WORDS = [f"w{i}" for i in range(20)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def eval_section(name: str, **changes: Any) -> dict[str, Any]:
    """The section as conf/eval/<name>.yaml has it, with changes."""
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        section = OmegaConf.to_container(hydra.compose(f"eval/{name}").eval)
    assert isinstance(section, dict)
    hyper = changes.pop("hyperparameters", {})
    return {**section, **changes, "hyperparameters": {**section["hyperparameters"], **hyper}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    shape = {"vocab_size": 25, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    BertForMaskedLM(BertConfig(intermediate_size=32, max_position_embeddings=24, **shape)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> dict[str, Any]:
    """The root configuration for a run on CoLA and MNLI (with AX) in the official layouts."""
    random = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 9)))

    files = {
        "CoLA/train.tsv": ["\t".join(("x", str(i % 2), "", sentence())) for i in range(40)],
        "CoLA/dev.tsv": ["\t".join(("x", str(i % 2), "", sentence())) for i in range(20)],
        "MNLI/train.tsv": _pairs(sentence, 30, labelled=True),
        "MNLI/dev_matched.tsv": _pairs(sentence, 20, labelled=True),
        "MNLI/dev_mismatched.tsv": _pairs(sentence, 20, labelled=True),
        "diagnostic/diagnostic.tsv": _pairs(sentence, 10, labelled=False),
    }
    for name, lines in files.items():
        path = tmp_path / "glue" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    hyper = {"epochs": 1, "max_length": 24, "learning_rate": 1e-3}
    changes = {"seeds": [0, 1], "workers": 1, "floor": False, "hyperparameters": hyper}
    section = eval_section("glue_sane", data_dir=tmp_path / "glue", **changes)
    roots = {"name": "first", "runs": tmp_path / "runs", "device": "cpu", "division": "open", "model_path": str(model)}
    return {**roots, "corpora": tmp_path / "corpora", "seed": 0, "eval": section}


def _pairs(sentence: Any, rows: int, labelled: bool) -> list[str]:
    header = ["index", "sentence1", "sentence2", *(["gold_label"] if labelled else [])]
    labels = TASKS["mnli"].labels
    lines = [[str(i), sentence(), sentence(), *([labels[i % 3]] if labelled else [])] for i in range(rows)]
    return ["\t".join(line) for line in [header, *lines]]


def glue_json(config: dict[str, Any], init: str = "pretrained") -> bytes:
    return (Path(config["runs"]) / config["name"] / "glue" / init / "glue.json").read_bytes()


def test_record_says_what_was_scored_and_how(config: dict[str, Any]) -> None:
    config["eval"]["init"] = ["pretrained", "random"]
    main(config)
    record = load_record(Path(config["runs"]) / "first")
    assert set(record["glue"]) == {"pretrained", "random"} and "pretrain" not in record
    for init, section in record["glue"].items():
        assert section["init"] == init and section["suite"] == "glue" and section["split"] == "dev"
        assert section["selection"] == "last epoch" and section["seeds"] == [0, 1]
        assert set(section["tasks"]) == {"cola", "mnli_matched", "mnli_mismatched"}
        assert set(section["absent"]) == {"sst2", "mrpc", "stsb", "qqp", "qnli", "rte", "wnli"}
        for task in section["tasks"].values():
            per_seed = task["metrics"][task["main_metric"]]["per_seed"]
            assert len(per_seed) == 2 and task["score"] == pytest.approx(100 * np.median(per_seed))
            assert task["subset"] and task["hyperparameters"] == section["hyperparameters"] and task["seconds"] > 0
        assert len({task["data_sha256"] for task in section["tasks"].values()}) == 3
        assert section["averages"]["avg9"]["value"] is None
        assert set(section["averages"]["avg9"]["missing"]) == {"sst2", "mrpc", "stsb", "qqp", "qnli", "rte"}
    assert record["glue"]["pretrained"]["model_sha256"] and record["glue"]["random"]["model_sha256"] is None
    predictions = np.load(Path(config["runs"]) / "first/glue/pretrained/predictions/mnli-seed1.npz")
    assert set(predictions) == {"dev.mnli_matched", "dev.mnli_mismatched", "test.ax", "test_ids.ax"}
    assert predictions["test_ids.ax"].tolist() == list(range(10)) and len(predictions["dev.mnli_matched"]) == 20


def test_a_designed_start_is_refused_where_there_is_none(config: dict[str, Any]) -> None:
    config["eval"]["init"] = ["pretrained", "designed"]
    with pytest.raises(UserError, match=r"eval\.init=.*attention_init=random.*take it out"):
        main(config)
    assert not (Path(config["runs"]) / "first").exists()


def test_an_interrupted_run_goes_on_and_ends_the_same(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    save = Pieces.save

    def stop_at_the_third(self: Pieces, data: TaskData, seed: int, key: str, found: Predictions) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append((data.task.name, seed))
        return save(self, data, seed, key, found)

    monkeypatch.setattr(Pieces, "save", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(config)
    assert done == [("cola", 0), ("cola", 1)]
    monkeypatch.setattr(Pieces, "save", lambda *a: done.append((a[1].task.name, a[2])) or save(*a))
    main(config)
    assert done == [("cola", 0), ("cola", 1), ("mnli", 0), ("mnli", 1)]
    main({**config, "name": "unbroken"})
    assert glue_json(config) == glue_json({**config, "name": "unbroken"})


@pytest.mark.slow
def test_killed_at_ten_random_moments_the_result_is_the_same_bytes(config: dict[str, Any], tmp_path: Path) -> None:
    """`kill -9` of the parent alone: its worker processes have to notice."""
    hyper = ",".join(f"{name}: {config['eval']['hyperparameters'][name]}" for name in ("max_length", "learning_rate"))
    settings = [
        "eval=glue_sane", f"eval.data_dir={config['eval']['data_dir']}", f"runs={config['runs']}", "device=cpu",
        f"model_path={config['model_path']}", "eval.seeds=[0,1,2,3,4,5]", "eval.workers=2",
        f"eval.hyperparameters={{{hyper}}}",
    ]  # fmt: skip

    def start(name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "output.txt").open("ab") as log:
            command = [sys.executable, "-m", "cramming", "glue", *settings, f"name={name}"]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)

    def pieces() -> int:
        return len(list(Path(config["runs"]).glob("killed/glue/pretrained/pieces/*.json")))

    assert start("unbroken").wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    random, kept = np.random.default_rng(0), [0]
    for _ in range(10):
        process, wanted = start("killed"), kept[-1] + random.integers(0, 3)
        while process.poll() is None and pieces() < wanted:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5) if wanted else random.uniform(0, 10))
        process.kill()
        process.wait()
        kept.append(pieces())
    assert start("killed").wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    assert glue_json({**config, "name": "killed"}) == glue_json({**config, "name": "unbroken"})
    assert len(set(kept)) > 3, f"every kill came at the same stage: {kept}"
    assert not list(Path(config["runs"]).rglob("*.tmp")), "what a killed process left half written"


def test_stored_results_of_other_settings_or_data_are_not_taken(config: dict[str, Any]) -> None:
    main(config)
    before = glue_json(config)
    config["eval"]["hyperparameters"]["learning_rate"] = 2e-3
    main(config)
    assert glue_json(config) != before
    fresh = {**config, "name": "fresh"}
    main(fresh)
    assert glue_json(config) == glue_json(fresh)
    dev = Path(config["eval"]["data_dir"]) / "CoLA/dev.tsv"
    dev.write_text("\n".join(dev.read_text().splitlines()[:10]) + "\n")
    main(config)
    assert json.loads(glue_json(config))["tasks"]["cola"]["eval_examples"] == 10


def test_numbers_do_not_depend_on_workers(config: dict[str, Any]) -> None:
    main(config)
    config["eval"]["workers"] = 2
    main({**config, "name": "parallel"})
    assert glue_json(config) == glue_json({**config, "name": "parallel"})
    here, there = (
        sorted((Path(config["runs"]) / n / "glue/pretrained/pieces").iterdir()) for n in ("first", "parallel")
    )
    losses = [[json.loads(file.read_text())["train_loss"] for file in files] for files in (here, there)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_the_best_epoch_is_scored_only_when_asked_and_then_the_record_says_so(config: dict[str, Any]) -> None:
    config["eval"]["hyperparameters"] |= {"epochs": 3, "learning_rate": 1e-2}
    main(config)
    main(with_eval({**config, "name": "best"}, selection="best"))
    last, best = (load_record(Path(config["runs"]) / name)["glue"]["pretrained"] for name in ("first", "best"))
    assert last["selection"] == "last epoch" and best["selection"].startswith("best epoch")
    for entry, task in best["tasks"].items():
        if entry != "mnli_mismatched":  # the epoch is chosen by the mean over both sets
            per_seed = [t["metrics"][t["main_metric"]]["per_seed"] for t in (task, last["tasks"][entry])]
            assert all(a >= b for a, b in zip(*per_seed, strict=True)) or entry == "mnli_matched"
    pieces = Path(config["runs"]) / "best/glue/pretrained/pieces"
    assert {json.loads(f.read_text())["epoch"] for f in pieces.iterdir()} <= {1, 2, 3}
    findings = {f.rule: f.ok for f in judge(load_record(Path(config["runs"]) / "best")).findings}
    assert not findings["R20"]
    config["eval"]["selection"] = "best"  # stored pieces of the last epoch are not taken for it
    main(config)
    assert glue_json(config) == glue_json({**config, "name": "best"})


def test_a_bag_of_words_stands_beside_the_model_and_is_judged_by_no_rule(config: dict[str, Any]) -> None:
    main(config)
    before = judge(load_record(Path(config["runs"]) / "first"))
    main(with_eval(config, floor=True))
    record = load_record(Path(config["runs"]) / "first")
    assert judge(record) == before and set(record["glue"]) == {"pretrained"}
    assert (
        set(record["floor"]["tasks"]) == set(record["glue"]["pretrained"]["tasks"]) and record["floor"]["seconds"] > 0
    )
    rows = entrants([load_run(Path(config["runs"]) / "first")])
    assert {row.init for row in rows} == {"pretrained", NAME} and not any(row.ranked for row in rows)
    stored = (Path(config["runs"]) / "first/glue/floor/glue.json").read_bytes()
    main(with_eval({**config, "name": "again"}, floor=True))
    assert stored == (Path(config["runs"]) / "again/glue/floor/glue.json").read_bytes()


def test_superglue_and_minimal_pairs_stand_beside_glue(config: dict[str, Any], tmp_path: Path) -> None:
    main(config)
    before = judge(load_record(Path(config["runs"]) / "first"))
    words = [f"w{i}" for i in range(20)]
    for name in ("RTE", "CB"):
        (tmp_path / "super" / name).mkdir(parents=True)
        labels = ("entailment", "not_entailment") if name == "RTE" else ("neutral", "entailment", "contradiction")
        rows = [
            {"premise": words[i % 20], "hypothesis": words[i % 7], "label": labels[i % len(labels)]} for i in range(24)
        ]
        for file in ("train.jsonl", "val.jsonl"):
            (tmp_path / "super" / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/one.jsonl").write_text(json.dumps({"sentence_good": "w1 w2", "sentence_bad": "w2 w1"}) + "\n")
    changes = {"data_dir": tmp_path / "super", "minimal_pairs": tmp_path / "pairs", "floor": True}
    main(with_eval(config, source="superglue", **changes))
    record = load_record(Path(config["runs"]) / "first")
    assert judge(record) == before and set(record["superglue"]) == {"pretrained", "floor"}
    section = record["superglue"]["pretrained"]
    assert set(section["tasks"]) == {"superglue_rte", "cb"} and section["averages"]["superglue5"]["value"] is None
    assert section["tasks"]["cb"]["main_metric"] == "accuracy_f1" and section["tasks"]["cb"]["subset"]
    assert record["minimal_pairs"]["accuracy"] in (0, 100)
    said = " ".join(block.text for block in beyond_glue(record) if isinstance(block, Paragraph))
    assert "SuperGLUE, pretrained: CB" in said and "Minimal pairs: " in said


def test_a_trained_run_is_scored_in_its_own_folder(config: dict[str, Any], model: Path) -> None:
    run = Path(config["runs"]) / "first"
    shutil.copytree(model, run / "final")
    (run / "record.json").write_text(json.dumps({"format": 1, "name": "first", "pretrain": {"status": "finished"}}))
    with pytest.raises(UserError, match="is a pretraining run; give another name"):
        main(config)
    main({**config, "model_path": None})
    record = load_record(run)
    assert record["pretrain"] == {"status": "finished"} and record["glue"]["pretrained"]["tasks"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"\x8b", b"[]", b'{"a": 1}x'])
def test_a_damaged_tokenizer_is_named(config: dict[str, Any], model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    if (name, content) == ("tokenizer_config.json", b"[]"):  # JSON, but nothing that names a token
        main(config)
        return
    with pytest.raises(UserError, match=rf"{name}: not ") as caught:
        main(config)
    assert "\n" not in str(caught.value)


def test_a_name_holds_the_scores_of_one_model(config: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Its record says which; scores of another's random or superglue rows would stand beside them."""
    few = with_eval(config, seeds=[0], tasks=["cola"])
    main(few)
    main({**few, "model_path": str(model.parent / "." / "model" / ".." / "model")})
    shutil.copytree(model, tmp_path / "other")
    with pytest.raises(UserError, match=r"model_path=.*other: name=first has the scores of model_path=.*model; give"):
        main({**few, "model_path": str(tmp_path / "other")})


def test_minimal_pairs_are_read_beforehand(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    settings = compose("model=tiny", "eval=embedded", f"eval.minimal_pairs={tmp_path}")
    with pytest.raises(UserError, match=r"eval\.minimal_pairs=.*: no \.jsonl file there"):
        check(settings)


def test_weights_that_changed_after_pretraining_are_not_scored(config: dict[str, Any], model: Path) -> None:
    """One flipped bit is still a valid file of weights."""
    run = Path(config["runs"]) / "first"
    shutil.copytree(model, run / "final")
    digest = file_sha256(run / "final" / "model.safetensors")
    write_record_section(run, pretrain={"status": "finished", "final_sha256": digest})
    trained = config | {"model_path": None}
    main(trained)
    weights = bytearray((run / "final" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (run / "final" / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"not those that pretraining wrote .* model_path="):
        main(trained)


def with_eval(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, "eval": {**config["eval"], **changes}}


def test_embedded_tasks_are_read_from_the_corpus_and_have_no_official_size(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suites, "corpus_folder", lambda config: tmp_path / "corpus")
    shutil.copytree(config["eval"]["data_dir"], tmp_path / "corpus/tasks")
    main(with_eval(config, source="embedded", data_dir=None, predict_test=False, seeds=[0]))
    section = load_record(Path(config["runs"]) / "first")["glue"]["pretrained"]
    assert section["suite"] == "embedded" and set(section["averages"]) == {"embedded"}
    assert all(t["official_train_examples"] is None and not t["subset"] for t in section["tasks"].values())
    predictions = np.load(Path(config["runs"]) / "first/glue/pretrained/predictions/mnli-seed0.npz")
    assert set(predictions) == {"dev.mnli_matched", "dev.mnli_mismatched"}


def test_scores_of_another_suite_leave_the_record(
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As when GLUE follows the embedded tasks without a random baseline: theirs must not stand beside its scores."""
    monkeypatch.setattr(suites, "corpus_folder", lambda config: tmp_path / "corpus")
    shutil.copytree(config["eval"]["data_dir"], tmp_path / "corpus/tasks")
    few = with_eval(config, predict_test=False, seeds=[0], tasks=["cola"])
    main(with_eval(few, source="embedded", data_dir=None, init=["pretrained", "random"], floor=True))
    assert "dropped" not in capsys.readouterr().err
    main(few)
    record = load_record(Path(config["runs"]) / "first")
    assert {init: section["suite"] for init, section in record["glue"].items()} == {"pretrained": "glue"}
    assert "floor" not in record
    said = capsys.readouterr()
    assert "dropped from it glue.pretrained, glue.random, floor of another" in said.out + said.err


def test_mistakes_are_one_line(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "corpus_folder", lambda config: Path(config["corpora"]) / "embedded-0")
    long = {**config["eval"]["hyperparameters"], "max_length": 25}
    cases = [
        ({**config, "model_path": None}, r"first/final: no trained model; run `cramming pretrain name=first`"),
        (with_eval(config, data_dir=None), r"eval.data_dir is not set"),
        (with_eval(config, source="embedded"), r"eval: data_dir is for real GLUE data; add eval=glue_sane"),
        (
            with_eval(config, source="embedded", data_dir=None),
            r"embedded-0/tasks: no embedded tasks; run `cramming prep",
        ),
        (with_eval(config, seeds=[0, 0]), r"eval: seeds=\[0, 0\]"),
        (with_eval(config, seeds=[-1]), r"eval: seeds=\[-1\] must be between 0 and 2\^63"),
        (with_eval(config, tasks=[]), r"eval: tasks=\[\] names none"),
        ({**config, "model_path": __file__}, r"test_glue.py: is a file; give the folder it is in"),
        ({**config, "model_path": "~nobody-here/m"}, r"model_path=~nobody-here/m: there is no such home folder"),
        (with_eval(config, tasks=["snli"]), r"eval.tasks: unknown task 'snli'"),
        (with_eval(config, tasks=["rte"]), r"RTE/train.tsv: no such file; RTE needs train.tsv, dev.tsv"),
        (with_eval(config, hyperparameters=long), r"max_length=25: .* has 24 positions; set it to 24 or less"),
        (with_eval(config, optimizer="sgd"), r"eval.optimizer: unknown setting"),
    ]
    for broken, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            main(broken)
        assert "\n" not in str(caught.value)
    assert not Path(config["runs"]).exists()


def test_without_a_network_the_hub_fails_at_once(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="someone/model-x: no such folder, and no connection to the hub"):
        main({**config, "model_path": "someone/model-x"})
    with pytest.raises(UserError, match=r"eval=hub: cannot load nyu-mll/glue .*eval.data_dir=<folder"):
        main(with_eval(config, source="hub", data_dir=None))


@pytest.mark.parametrize("name", sorted(f.stem for f in (config_folder() / "eval").glob("*.yaml")))
def test_every_preset_is_valid(name: str) -> None:
    assert build(EvalConfig, eval_section(name), "eval").hyperparameters.epochs <= 5


def test_the_default_protocol_is_the_papers() -> None:
    hyper = build(EvalConfig, eval_section("glue_sane"), "eval").hyperparameters
    assert (hyper.epochs, hyper.batch_size, hyper.learning_rate, hyper.schedule) == (5, 16, 4e-5, "cosine")
    assert hyper.dropout == 0.1 and hyper.max_length == 128


def test_the_other_protocols_are_the_baselines_and_izsaks() -> None:
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


def summary_of(main_metrics: dict[str, float | None]) -> dict[str, Any]:
    """A summary of one seed in which each entry's main metric has the given value and all examples are there."""
    data, pieces = [], {}
    for task in TASKS.values():
        if task.name == "wnli":
            continue

        def split(source: Any, columns: int = len(task.text)) -> Split:
            return Split(source, ([""] * source.examples,) * columns, None)

        data.append(TaskData(task, split(task.train), tuple(split(s) for s in task.scored)))
        entries = {}
        for source in task.scored:
            value = main_metrics[source.entry]
            problems = ["constant"] if value is None else []
            entries[source.entry] = {"metrics": dict.fromkeys(task.metrics, value), "problems": problems, "notes": []}
        pieces[task.name, 0] = {"entries": entries}
    hyper = eval_section("glue_sane")["hyperparameters"]
    return summarise({"init": "pretrained"}, "glue", data, pieces, [0], hyper, {})


def test_averages_are_the_papers_and_stay_empty_when_an_entry_is_missing() -> None:
    # The crammed BERT on an A6000 (model card): 78.6 over nine entries.
    paper = {"mnli_matched": 0.839, "mnli_mismatched": 0.841, "qqp": 0.873, "qnli": 0.895, "sst2": 0.922}
    paper |= {"cola": 0.445, "stsb": 0.846, "mrpc": 0.875, "rte": 0.538}
    summary = summary_of(paper)
    assert round(summary["averages"]["avg9"]["value"], 1) == 78.6
    assert round(summary["averages"]["avg8"]["value"], 1) == 77.9
    assert not any(task["subset"] for task in summary["tasks"].values())
    incomplete = summary_of({**paper, "stsb": None})
    assert incomplete["averages"]["avg9"]["value"] is None and incomplete["averages"]["avg9"]["missing"] == ["stsb"]
    assert incomplete["tasks"]["stsb"]["score"] is None and incomplete["tasks"]["stsb"]["problem"] == "seed 0: constant"
