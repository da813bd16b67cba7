"""`cramming glue` end to end: what the record says, which model is scored, one-line errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import RobertaProcessing
from transformers import AutoConfig, AutoModel, MPNetConfig, MPNetModel

from cramming.config import UserError, file_sha256
from cramming.model.export import file_hashes
from cramming.record import load_record
from data_prep.dedup.decontaminate import DecontaminationConfig, Decontaminator
from eval import glue
from eval.finetune.models import open_model
from eval.finetune.run_models import find_model
from tests.eval.glue.calls import check, main, split

Change = Callable[..., dict[str, Any]]


def test_record_says_what_was_scored_and_how(
    config: dict[str, Any], predictions_of: Callable[..., Path]
) -> None:
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
            assert (
                task["subset"]
                and task["hyperparameters"] == section["hyperparameters"]
                and task["seconds"] > 0
            )
        assert len({task["data_sha256"] for task in section["tasks"].values()}) == 3
        searched = Decontaminator.from_folder(
            config["eval"]["data_dir"], DecontaminationConfig()
        ).development
        for entry, file in (
            ("cola", "CoLA/dev.tsv"),
            ("mnli_mismatched", "MNLI/dev_mismatched.tsv"),
        ):
            assert section["tasks"][entry]["texts_sha256"] == searched[file]["sha256"], (
                "R16 compares them"
            )
        assert section["averages"]["avg9"]["value"] is None
        assert set(section["averages"]["avg9"]["missing"]) == {
            "sst2",
            "mrpc",
            "stsb",
            "qqp",
            "qnli",
            "rte",
        }
    assert all(
        section["model_files"] == file_hashes(Path(config["model_name"]))
        for section in record["glue"].values()
    )
    assert (
        record["glue"]["pretrained"]["model_sha256"]
        and record["glue"]["random"].get("model_sha256") is None
    )
    predictions = np.load(predictions_of(config, "mnli", 1))
    assert set(predictions) == {"dev.mnli_matched", "dev.mnli_mismatched", "test.ax", "test_ids.ax"}
    assert predictions["test_ids.ax"].tolist() == list(range(10))
    assert len(predictions["dev.mnli_matched"]) == 20


def test_a_run_folder_holds_the_log_the_predictions_and_the_record(config: dict[str, Any]) -> None:
    """Predictions are named by their SHA-256, and the record written for people is the one that the log gives."""
    main(config)
    run = Path(config["runs"]) / "first"
    assert {path.name for path in run.iterdir()} == {"run.jsonl", "predictions", "record.json"}
    files = list((run / "predictions").iterdir())
    assert all(file.stem == file_sha256(file) for file in files)
    named = load_record(run)["glue"]["pretrained"]["predictions"]
    assert len(named) == 4 and {file.stem for file in files} == set(named.values())
    assert json.loads((run / "record.json").read_text()) == load_record(run)


def test_a_trained_run_is_scored_in_its_own_folder(
    config: dict[str, Any], finished_run: Path
) -> None:
    with pytest.raises(UserError, match="is a pretraining run"):
        main(config)
    main({**config, "model_name": None})
    record = load_record(finished_run)
    assert record["pretrain"]["status"] == "finished" and record["glue"]["pretrained"]["tasks"]


def test_a_model_without_a_finished_pretraining_is_refused(
    config: dict[str, Any], finished_run: Path
) -> None:
    """A crash between the export and its event, or a missing log, leaves such a model."""
    log = finished_run / "run.jsonl"
    *lines, _ = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines))
    for damage in (lambda: None, log.unlink):
        damage()
        with pytest.raises(UserError, match="no finished pretraining"):
            main({**config, "model_name": None})
    assert not log.exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", r"config\.json: not a JSON object"),
        (
            "config.json",
            '{"model_type": "t5", "is_encoder_decoder": true}',
            "model type 't5' has a decoder",
        ),
        ("config.json", '{"model_type": "gpt2", "vocab_size": 9}', "this 'gpt2' is a decoder"),
        (
            "config.json",
            '{"model_type": "electra", "vocab_size": 9, "max_position_embeddings": 8, "hidden_act": "none"}',
            "transformers cannot load it .*none",
        ),
        (
            "config.json",
            '{"model_type": "roberta", "vocab_size": 9, "is_decoder": true}',
            "this 'roberta' is a decoder",
        ),
        ("model.safetensors", None, "no weights. Expected model.safetensors"),
        ("tokenizer.json", "[]", r"tokenizer\.json: not a usable tokenizer"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: not a JSON object"),
        (
            "tokenizer_config.json",
            '{"cls_token": "<s>"}',
            r"tokenizer\.json: no token '<s>' \(cls_token\)",
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line(
    config: dict[str, Any], model: Path, file: str, content: str | None, says: str
) -> None:
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        main(config)
    assert "\n" not in str(caught.value)


def test_all_that_can_be_known_beforehand_is_checked(
    config: dict[str, Any],
    compose: Callable[..., dict[str, Any]],
    with_eval: Change,
    tmp_path: Path,
) -> None:
    check(config)
    with pytest.raises(UserError, match=r"RTE/train.tsv: no such file"):
        check(with_eval(config, tasks=["rte"]))
    check(compose("model=tiny", "eval=embedded") | {"runs": tmp_path})
    with pytest.raises(UserError, match=r"eval\.minimal_pairs=.*: no \.jsonl file"):
        check(
            compose("model=tiny", "eval=embedded", f"eval.minimal_pairs={tmp_path}")
            | {"runs": tmp_path}
        )
    with pytest.raises(
        UserError,
        match=r"eval\.minimal_pairs=.*: needs a masked language model, which objective=rtd",
    ):
        check(
            compose(
                "objective=rtd",
                "model=tiny",
                "eval=embedded",
                "eval.minimal_pairs=x",
            )
            | {"runs": tmp_path}
        )
    assert not Path(config["runs"]).exists()


def mpnet(folder: Path, rename: str = "", cut: bool = False) -> Path:
    """The folder's model as an architecture that the suite leaves to transformers, with the damage asked for."""
    shape = {
        "vocab_size": 29,  # four more than the tokenizer: MPNet's class adds its special tokens
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "max_position_embeddings": 26,
    }
    MPNetModel(MPNetConfig(**shape)).save_pretrained(folder)
    file = folder / "model.safetensors"
    if rename:
        save_file(
            {rename + name: tensor for name, tensor in load_file(file).items()},
            file,
            {"format": "pt"},
        )
    if cut:
        file.write_bytes(file.read_bytes()[:-100])
    return folder


def test_another_architecture_is_scored_and_its_damages_are_one_line(
    config: dict[str, Any], model: Path, with_eval: Change
) -> None:
    small = with_eval(config, tasks=["cola"], seeds=[0])
    main({**small, "model_name": str(mpnet(model))})
    mpnet(model, rename="foo.")
    with pytest.raises(UserError, match=r"its weights lack .*config\.json"):
        main({**small, "name": "renamed"})
    file = mpnet(model) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 48}))
    with pytest.raises(
        UserError,
        match=r"its weights lack encoder\.layer\.0\.intermediate\.dense.* in another shape",
    ):
        main({**small, "name": "reshaped"})
    mpnet(model, cut=True)
    with pytest.raises(UserError, match="transformers cannot load it"):
        main({**small, "name": "cut"})


def test_pairs_are_compared_where_the_tokenizer_tells_two_texts_apart(
    config: dict[str, Any], model: Path, with_eval: Change
) -> None:
    hyper = {**config["eval"]["hyperparameters"], "pooling": "pairs", "pooler": False}
    small = with_eval(config, tasks=["cola", "mnli"], seeds=[0], hyperparameters=hyper)
    main({**small, "name": "bert"})
    untyped = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (model / "tokenizer_config.json").write_text(json.dumps(untyped))
    main(
        {**small, "name": "mpnet", "model_name": str(mpnet(model))}
    )  # its model has no use for the types
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sep, cls = ((token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = RobertaProcessing(sep, cls)
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(
        UserError,
        match=r"model: its tokenizer .*pooling=pairs",
    ):
        main({**small, "name": "roberta"})


def test_a_model_without_a_tokenizer_is_refused(
    config: dict[str, Any], model: Path, with_eval: Change
) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="model: no tokenizer"):
        main(with_eval(config, tasks=["cola"], seeds=[0]))


@pytest.mark.parametrize(
    ("kind", "limit"), [("roberta", 22), ("xmod", 22), ("luke", 22), ("ibert", 22), ("electra", 24)]
)
def test_the_longest_sequence_is_what_the_model_has_positions_for(
    model: Path, kind: str, limit: int
) -> None:
    """Those of RoBERTa's kind begin behind the padding's number, whatever their table holds."""
    file = model / "config.json"
    changes = {
        "model_type": kind,
        "pad_token_id": 1,
        "default_language": "en_XX",
    }  # which X-MOD asks for
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert open_model(model).max_length == limit
    stock = AutoModel.from_config(AutoConfig.from_pretrained(model))
    stock(torch.full((1, limit), 7))
    with pytest.raises((IndexError, RuntimeError)):
        stock(torch.full((1, limit + 1), 7))


def test_a_name_holds_the_scores_of_one_model(
    config: dict[str, Any], model: Path, tmp_path: Path, with_eval: Change
) -> None:
    """Its record says which; scores of another's random or superglue rows would stand beside them."""
    small = with_eval(config, seeds=[0], tasks=["cola"])
    main(small)
    main({**small, "model_name": str(model.parent / "." / "model" / ".." / "model")})
    shutil.copytree(model, tmp_path / "other")
    with pytest.raises(
        UserError,
        match=r"--model=.*other: .*first has the scores of the model .*model\. Give",
    ):
        main({**small, "model_name": str(tmp_path / "other")})


def reversed_vocabulary(final: Path) -> None:
    node = json.loads((final / "tokenizer.json").read_text())
    node["model"]["vocab"] = dict(
        zip(node["model"]["vocab"], reversed(node["model"]["vocab"].values()))
    )
    (final / "tokenizer.json").write_text(json.dumps(node))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reversed_vocabulary, r"tokenizer\.json: is not as pretraining wrote it"),
        (
            lambda f: (f / "config.json").write_text((f / "config.json").read_text() + "\n"),
            r"config\.json: is not as",
        ),
        (
            lambda f: (f / "vocab.txt").write_text("[UNK]\n"),
            r"vocab\.txt: was not written by pretraining",
        ),
        (lambda f: (f / "generation_config.json").unlink(), r"generation_config\.json: is missing"),
    ],
)
def test_a_model_folder_that_changed_after_pretraining_is_not_scored(
    config: dict[str, Any], finished_run: Path, change: Callable[[Path], object], says: str
) -> None:
    """Nothing is written; what only people read may change."""
    config["model_name"] = None
    (finished_run / "final" / "README.md").write_text("mine")
    assert find_model(split(config)[1], None).is_native
    change(finished_run / "final")
    before = sorted(finished_run.rglob("*"))
    with pytest.raises(UserError, match=says) as caught:
        main(config)
    assert "\n" not in str(caught.value) and sorted(finished_run.rglob("*")) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_is_exchanged_while_it_waits_to_be_scored_is_refused(
    config: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Files are read long after the model was opened: another model of the same shape must not score under its name."""
    weights = load_file(model / "model.safetensors")
    for file in weights.values():
        file.mul_(1.5)
    other = {"model.safetensors": tmp_path / "other", "config.json": tmp_path / "settings"}
    save_file(weights, other["model.safetensors"], metadata={"format": "pt"})
    other["config.json"].write_text((model / "config.json").read_text().replace('"gelu"', '"relu"'))
    real = glue.score_model

    def exchange(*arguments: Any) -> dict[str, Any]:
        shutil.copy(other[name], model / name)
        return real(*arguments)

    monkeypatch.setattr(glue, "score_model", exchange)
    with pytest.raises(UserError, match=f"{name}: changed while"):
        main(config)
    assert "glue" not in load_record(Path(config["runs"]) / "first")


def test_mistakes_are_one_line(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, with_eval: Change
) -> None:
    long = {**config["eval"]["hyperparameters"], "max_length": 25}
    cases = [
        (
            {**config, "model_name": None},
            r"first/final: no trained model.*`cramming pretrain --name first`",
        ),
        (with_eval(config, data_dir=None), r"eval.data_dir is not set"),
        (
            with_eval(config, source="embedded"),
            r"^eval\.data_dir=.*eval=glue_sane",
        ),
        (
            with_eval(config, source="embedded", data_dir=None),
            r"corpus/tasks: no embedded tasks",
        ),
        (with_eval(config, seeds=[0, 0]), r"^eval\.seeds="),
        (with_eval(config, seeds=[-1]), r"eval.seeds"),
        (with_eval(config, tasks=[]), r"^eval\.tasks="),
        (
            {**config, "model_name": __file__},
            r"test_glue.py: is a file",
        ),
        (with_eval(config, tasks=["snli"]), r"eval\.tasks.*snli"),
        (
            with_eval(config, tasks=["rte"]),
            r"RTE/train.tsv: no such file",
        ),
        (
            with_eval(config, hyperparameters=long),
            r"max_length=25: .*24 positions",
        ),
        (with_eval(config, optimizer="sgd"), r"eval.optimizer: unknown setting"),
    ]
    for broken, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            main(broken)
        assert "\n" not in str(caught.value)
    assert not Path(config["runs"]).exists()


def test_without_a_network_the_hub_fails_at_once(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, with_eval: Change
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match="someone/model-x: no such folder, and no connection to the hub"
    ):
        main({**config, "model_name": "someone/model-x"})
    with pytest.raises(
        UserError, match=r"eval=hub: cannot load nyu-mll/glue .*eval.data_dir=<folder"
    ):
        main(with_eval(config, source="hub", data_dir=None))
