"""`cramming export`: a whole folder with a true card, or one line that says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from cramming import launch
from cramming.config import UserError
from cramming.invocation import Invocation
from cramming.model.export import CODE, file_hashes
from cramming.model.hf_adapter import CrammingForMaskedLM
from cramming.model.load import load_exported
from cramming.record import load_record
from cramming.record_schema import Budget, Corpus, Environment, Pretraining, Validation
from eval import export, export_check, export_clients
from eval.report.model_card import Exported, write_card
from eval.rules.load import load_run
from tests.eval.runs import score_run, write_run

Export = Callable[..., Path]
SPLIT_WORDS = '[words[0], *(" " + word for word in words[1:])]'  # docs/guides/export.md says it too
MODEL = Exported(
    name="a",
    family=None,
    parameters=10,
    has_head=True,
    max_length=128,
    table_length=512,
    positions="rope",
    pooling="mean",
    clients=(),
    distilled=(),
    token_types=1,
    weights_sha256="ab" * 32,
    license=None,
    language=None,
)
OWN = "model.first_attn_norm=true"  # a choice that stock transformers lacks


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
) -> Path:
    """Two finished runs: `stock` of an architecture that transformers has, `own` of one that it lacks."""
    runs = tmp_path_factory.mktemp("runs")
    launch.main(compose(*tiny_overrides), Invocation(runs=runs, name="stock", device="cpu"))
    launch.main(compose(*tiny_overrides, OWN), Invocation(runs=runs, name="own", device="cpu"))
    return runs


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Those runs, for one test alone."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def run_export(runs: Path) -> Export:
    """`run_export(name="stock", ...)`: where the folder should be."""

    def call(name: str = "default", out: Path | None = None, **options: Any) -> Path:
        arguments = {"model": None, "license": None, "language": None, **options}
        export.main(Invocation(name=name, runs=runs), out=out, **arguments)
        return out or runs / name / "export"

    return call


def card(folder: Path) -> tuple[dict[str, Any], str]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    _, header, body = text.split("---\n", 2)
    return yaml.safe_load(header), body


def test_the_folder_is_complete_and_the_weights_are_those_of_the_run(
    runs: Path, run_export: Export
) -> None:
    common = {
        "1_Pooling",
        "README.md",
        "config.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
    }
    for name, more in (("stock", set()), ("own", set(CODE))):
        folder = run_export(name=name)
        assert {path.name for path in folder.iterdir()} == common | {"tokenizer_config.json"} | more
        for file in ("model.safetensors", "tokenizer.json"):
            assert (folder / file).read_bytes() == (runs / name / "final" / file).read_bytes(), file
        assert [
            path.name for path in (runs / name).iterdir() if path.name.endswith((".tmp", ".old"))
        ] == []
    assert "auto_map" not in json.loads((runs / "stock" / "export" / "config.json").read_text())


def test_a_stock_architecture_loads_without_remote_code(run_export: Export) -> None:
    folder = run_export(name="stock")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForMaskedLM.from_pretrained(folder),
    )
    assert (
        model(**tokenizer(["w7 w8 w9", "w5"], padding=True, return_tensors="pt"))
        .logits.isfinite()
        .all()
    )


def test_the_card_says_what_the_record_says(runs: Path, run_export: Export) -> None:
    score_run(runs / "own", change={"scoring": {"entries": {"rte": {"subset": True}}}})
    record = load_record(runs / "own")
    section = record["glue"]["pretrained"]
    folder = run_export(license="apache-2.0", language="en", name="own")
    header, body = card(folder)
    assert header["license"] == "apache-2.0" and header["language"] == "en"
    assert header["library_name"] == "transformers" and header["pipeline_tag"] == "fill-mask"
    assert "custom_code" in header["tags"]
    shown = {
        (r.dataset_config, r.dataset_split): r
        for r in ModelCard.load(folder / "README.md").data.eval_results
    }
    cola = shown["cola", "validation"]
    assert (cola.metric_type, cola.metric_value) == (
        "matthews_correlation",
        round(section["tasks"]["cola"]["score"], 2),
    )
    assert ("mnli", "validation_mismatched") in shown and ("rte", "validation") not in shown
    corpus = record["corpus"]
    for text in (
        corpus["manifest_sha256"],
        corpus["tokenizer"]["sha256"],
        record["pretrain"]["final_sha256"],
        record["log"]["head"],
        corpus["sources"][0]["license"],
        "12 of 12 steps",
        "weight_decay 0.01",
        "first_attn_norm True",
        "trust_remote_code=True",
        section["averages"]["avg9"]["definition"].split("; ")[0],
    ):
        assert text in body, text
    broken = load_run(runs / "own").verdict.broken
    assert all(finding.rule in body for finding in broken)
    assert str(runs) not in body and corpus["folder"] not in body
    assert SPLIT_WORDS not in body


def numbers_of(folder: Path) -> dict[str, Any]:
    nodes = {}
    for name in ("config", "tokenizer_config", "sentence_bert_config", "1_Pooling/config"):
        nodes[name] = json.loads((folder / f"{name}.json").read_text())
    return nodes


@pytest.mark.parametrize("pooling", ["cls", "mean", "pairs"])
def test_texts_are_pooled_as_in_the_scores_and_cut_as_in_training(
    pooling: str, runs: Path, run_export: Export
) -> None:
    """The runs trained on 32 tokens with tables of 512 positions."""
    score_run(runs / "own", change={"scoring": {"hyperparameters": {"pooling": pooling}}})
    folder = run_export(name="own")
    nodes = numbers_of(folder)
    takes_first = pooling == "cls"
    assert nodes["1_Pooling/config"]["pooling_mode_cls_token"] == takes_first
    assert nodes["1_Pooling/config"]["pooling_mode_mean_tokens"] == (not takes_first)
    assert nodes["config"]["classifier_pooling"] == ("cls" if takes_first else "mean")
    assert nodes["config"]["model"]["max_length"] == 32
    assert nodes["tokenizer_config"]["model_max_length"] == 32
    assert nodes["sentence_bert_config"]["max_seq_length"] == 32
    _, body = card(folder)
    assert ("first token's state" if takes_first else "mean of the tokens") in body
    assert "at most 32 tokens" in body and "Rotary" in body


def test_learned_positions_keep_their_table(
    tmp_path: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> None:
    learned = ["model.positions=learned", "model.max_length=48"]
    launch.main(
        compose(*tiny_overrides, *learned), Invocation(runs=tmp_path, name="a", device="cpu")
    )
    options = {"model": None, "license": None, "language": None, "out": None}
    export.main(Invocation(name="a", runs=tmp_path), **options)
    nodes = numbers_of(tmp_path / "a" / "export")
    assert nodes["config"]["model"]["max_length"] == 48
    assert nodes["tokenizer_config"]["model_max_length"] == 32
    assert "The table of positions ends at 48." in card(tmp_path / "a" / "export")[1]


def test_a_fine_tuned_head_is_dropped_with_a_word(
    runs: Path, run_export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_export(name="stock")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tuned")
    classifier.save_pretrained(tmp_path / "tuned")
    capsys.readouterr()
    exported = run_export(model=str(tmp_path / "tuned"), out=tmp_path / "out")
    assert f"{type(classifier).__name__} is dropped" in capsys.readouterr().out
    architectures = json.loads((exported / "config.json").read_text())["architectures"]
    assert architectures == [type(classifier.base_model).__name__]


def test_clients_that_fail_or_are_missing_are_rows(
    runs: Path, run_export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row for each client, in the card too; a fake interpreter says what becomes of each."""
    fake = runs / "python"
    results = {
        "transformers": """echo '{"version": "9", "text": "equal"}'""",
        "faiss": "kill -SEGV $$",
        "SetFit": "sleep 60",
        "ONNX Runtime, fp32": "echo a warning",
        "ONNX Runtime, int8": """echo '{"text": "close"}'; echo '{"bye": 1'""",
        "*": """echo '{"text": "not installed"}'""",
    }
    cases = "\n".join(f"{name.replace(' ', '?')}) {action};;" for name, action in results.items())
    fake.write_text(f'#!/bin/bash\ncase "$2" in\n{cases}\nesac\n')
    fake.chmod(0o755)
    monkeypatch.setattr(export_check, "TIMEOUT_SECONDS", 2)
    monkeypatch.chdir(runs)
    folder = run_export(name="own", test=True, python="./python")
    _, body = card(folder)
    rows = [line for line in body.splitlines() if line.startswith("|")]
    for row in (
        "| transformers | 9 | equal |",
        "| faiss |  | not loadable: ended with code -11 () |",
        "| SetFit |  | not done after 2 seconds |",
        "| ONNX Runtime, fp32 |  | not loadable: ended with code 0 () |",
        "| ONNX Runtime, int8 |  | close |",
        "| sentence-transformers |  | not installed |",
    ):
        assert row in rows, body
    (runs / "text").write_text("")
    for name in ("no", "text"):
        with pytest.raises(UserError, match="--python="):
            run_export(name="own", test=True, python=str(runs / name))


def test_transformers_computes_what_the_engine_does(runs: Path, tmp_path: Path) -> None:
    """The reference and the first client, in this process; the others have the slow test."""
    model = load_exported(runs / "own" / "final")
    reference = export_check.compute_reference(model, runs / "own" / "final", "mean", 32)
    assert min(reference["mask"].sum(1)) < reference["mask"].shape[1]
    torch.save(reference, tmp_path / "reference.pt")
    client = export_clients.Exported(runs / "own" / "final", tmp_path / "reference.pt")
    with torch.no_grad():
        loaded = CrammingForMaskedLM.from_pretrained(runs / "own" / "final")
        logits = loaded(**client.inputs).logits
    assert client.compare(logits=logits).startswith("equal")
    assert client.compare(logits=logits + 0.01).startswith("not equal")
    assert client.compare(logits=logits * float("nan")).startswith("not equal")


def test_a_card_says_how_words_of_a_bpe_tokenizer_are_split(tmp_path: Path) -> None:
    corpus = {"tokenizer": {"kind": "bpe"}}
    write_run(tmp_path / "bpe", change={"setup": {"corpus": corpus}})
    assert SPLIT_WORDS in write_card(MODEL, load_run(tmp_path / "bpe"))


def test_without_scores_or_record_the_card_says_so(
    runs: Path, run_export: Export, tmp_path: Path
) -> None:
    header, body = card(run_export(name="stock"))
    assert (
        "model-index" not in header
        and "license" not in header
        and "custom_code" not in header["tags"]
    )
    assert "cramming glue --name stock" in body and "trust_remote_code" not in body
    shutil.copytree(runs / "own" / "final", tmp_path / "alone" / "final")
    folder = run_export(model=str(tmp_path / "alone" / "final"), out=tmp_path / "alone.exported")
    _, body = card(folder)
    assert "## Corpus" not in body and "## Scores" not in body


def test_the_final_folder_of_a_run_finds_its_record(
    runs: Path, run_export: Export, tmp_path: Path
) -> None:
    folder = run_export(model=str(runs / "stock" / "final"), out=tmp_path / "out")
    assert card(folder) == card(run_export(name="stock"))


def test_the_header_names_data_sets_as_the_hub_does_and_no_path(tmp_path: Path) -> None:
    hub = {"name": "allenai/c4/en/train", "kind": "hub", "dataset": "allenai/c4"}
    folder = "/home/user/sets/mine"
    local = {"name": f"{folder}/train", "kind": "hub", "folder": folder}
    tokenizer_source = [{**hub, "name": "allenai/c4/vocab/tokenizer.json", "kind": "tokenizer"}]
    tokenizer_source += [{**local, "name": f"{folder}/tokenizer.json", "kind": "tokenizer"}]
    sources = [hub, local, {**hub, "dataset": "old"}, *tokenizer_source]
    write_run(tmp_path / "stock", change={"setup": {"corpus": {"sources": sources}}})
    (tmp_path / "README.md").write_text(write_card(MODEL, load_run(tmp_path / "stock")))
    header, body = card(tmp_path)
    assert header["datasets"] == ["allenai/c4"]
    assert "/home/user" not in str(header) + body
    for name in ("mine/train", "mine/tokenizer.json", "allenai/c4/en/train"):
        assert f"| {name} |" in body


@pytest.mark.parametrize(
    ("kind", "where", "expected", "base_model"),
    [
        ("random", {}, "pretrained from scratch", None),
        (
            "checkpoint",
            {"start": {"path": "/cache/models--org--name/snapshots/1a2b"}},
            "trained further from org/name",
            "org/name",
        ),
        (
            "checkpoint",
            {"start": {"path": "/home/u/m/final"}},
            "trained further from m/final",
            None,
        ),
        (
            "teacher",
            {"objective": {"name": "distill", "teacher": "/home/u/m/final"}},
            "distilled from m/final",
            None,
        ),
    ],
)
def test_a_card_says_where_the_weights_come_from(
    kind: str, where: dict[str, Any], expected: str, base_model: str | None, tmp_path: Path
) -> None:
    training = {"start": kind, "objective": where.get("objective", {}).get("name", "mlm")}
    run = load_run(write_run(tmp_path / "a", change={"setup": {"training": training}}))
    run.record.config.update(where)
    (tmp_path / "README.md").write_text(write_card(MODEL, run))
    header, body = card(tmp_path)
    assert expected in body and header.get("base_model") == base_model
    is_from_scratch = "pretrained-from-scratch" in header["tags"]
    assert is_from_scratch == (kind == "random") == ("pretrained from scratch" in body)
    assert "/home/u" not in str(header) + body


def occupy(runs: Path) -> None:
    (runs / "stock" / "export").mkdir()
    (runs / "stock" / "export" / "mine.txt").write_text("keep")


def test_an_export_takes_the_place_of_an_earlier_one(
    runs: Path, run_export: Export, tmp_path: Path
) -> None:
    """Whole: of the earlier one's files none is left, though another model made it."""
    first = run_export(out=tmp_path / "out", name="own")
    assert (first / "hf_adapter.py").is_file()
    repeated = run_export(out=tmp_path / "out", name="stock")
    assert not (repeated / "hf_adapter.py").exists() and card(repeated) == card(
        run_export(name="stock")
    )
    (repeated / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--out="):
        run_export(out=tmp_path / "out", name="stock")
    assert (repeated / "notes.txt").read_text() == "mine"


def remove(path: Path) -> None:
    shutil.rmtree(path)


def replace_by(folder: Path, **facts: Any) -> None:
    write_run(folder, **facts)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda r: remove(r / "stock"), "--name=stock"),
        (lambda r: replace_by(r / "stock", ended="stopped"), "interrupted"),
        (lambda r: replace_by(r / "stock", ended="diverged"), "diverged"),
        (lambda r: (r / "stock/final/model.safetensors").unlink(), "final"),
        (
            lambda r: shutil.copy(r / "own/final/model.safetensors", r / "stock/final"),
            r"final/model\.safetensors",
        ),
        (lambda r: (r / "stock/final/tokenizer.json").unlink(), r"final/tokenizer\.json"),
        (lambda r: (r / "stock/final/vocab.txt").write_text("a"), r"final/vocab\.txt"),
        (occupy, "--out="),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    damage: Callable[[Path], object], names: str, runs: Path, run_export: Export
) -> None:
    damage(runs)
    before = sorted(path for path in runs.rglob("*"))
    with pytest.raises(UserError, match=names) as caught:
        run_export(name="stock")
    assert "\n" not in str(caught.value)
    assert sorted(path for path in runs.rglob("*")) == before


def test_the_schema_names_what_is_written(runs: Path) -> None:
    """Each attribute of the typed record has its name in the code that derives the record."""
    written = load_record(runs / "own")
    others = {"replaced_token_loss", "replaced_token_accuracy", "residual", "micro_batch"}
    others.add("bits_per_byte")  # of a corpus that knows its bytes
    for section, raw in (
        (Pretraining, written["pretrain"]),
        (Budget, written["pretrain"]["budget"]),
        (Validation, written["pretrain"]["validation"]),
        (Corpus, written["corpus"] | {"validation": None, "decontamination": None}),
        (Environment, written["environment"]),
    ):
        assert set(section.model_fields) - set(raw) <= others, section


def test_the_record_knows_every_file_of_the_model(
    runs: Path, run_export: Export, tmp_path: Path
) -> None:
    """The card of a folder that is no longer the run's does not describe the run."""
    for name in ("stock", "own"):
        record = load_record(runs / name)
        assert record["pretrain"]["final_files"] == file_hashes(runs / name / "final")
        assert (
            record["pretrain"]["final_files"]["tokenizer.json"]
            == record["corpus"]["tokenizer"]["sha256"]
        )
    assert "hf_adapter.py" in record["pretrain"]["final_files"]
    (runs / "stock" / "final" / "vocab.txt").write_text("a")
    _, body = card(run_export(model=str(runs / "stock" / "final"), out=tmp_path / "out"))
    assert "## Scores" not in body
