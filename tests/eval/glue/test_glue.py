"""`cramming glue` end to end: what the record says, which model is scored, one-line errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from transformers import DistilBertConfig, DistilBertModel

from cramming.config import UserError, file_sha256
from cramming.model.export import file_hashes
from cramming.record import load_record, write_record_section
from data_prep.dedup.decontaminate import DecontaminationConfig, Decontaminator
from eval import glue
from eval.finetune.models import open_model
from eval.glue import check, find_model, main
from eval.tasks import locate

Change = Callable[..., dict[str, Any]]


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
        searched = Decontaminator.from_folder(config["eval"]["data_dir"], DecontaminationConfig()).development
        for entry, file in (("cola", "CoLA/dev.tsv"), ("mnli_mismatched", "MNLI/dev_mismatched.tsv")):
            assert section["tasks"][entry]["texts_sha256"] == searched[file]["sha256"], "R16 compares them"
        assert section["averages"]["avg9"]["value"] is None
        assert set(section["averages"]["avg9"]["missing"]) == {"sst2", "mrpc", "stsb", "qqp", "qnli", "rte"}
    assert all(section["model_files"] == file_hashes(Path(config["model_path"])) for section in record["glue"].values())
    assert record["glue"]["pretrained"]["model_sha256"] and record["glue"]["random"]["model_sha256"] is None
    predictions = np.load(Path(config["runs"]) / "first/glue/pretrained/predictions/mnli-seed1.npz")
    assert set(predictions) == {"dev.mnli_matched", "dev.mnli_mismatched", "test.ax", "test_ids.ax"}
    assert predictions["test_ids.ax"].tolist() == list(range(10)) and len(predictions["dev.mnli_matched"]) == 20


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
@pytest.mark.parametrize("content", [b"\x8b", b"[]"])
def test_a_damaged_tokenizer_is_named(config: dict[str, Any], model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: (not |expected a JSON object)") as caught:
        main(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([], "expected a JSON object, found list"),
        ({"hidden_size": "big"}, "hidden_size='big' must be a whole number above 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None must be"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings='x' must be"),
        ({"is_encoder_decoder": True}, "model type 'bert' has a decoder; give an encoder"),
    ],
)
def test_a_configuration_of_no_encoder_is_named(model: Path, change: Any, says: str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change} if change else change))
    with pytest.raises(UserError, match=rf"config\.json: {says}"):
        open_model(model)


def distilbert(folder: Path, rename: str = "", cut: bool = False) -> Path:
    """The folder's model as an architecture that the suite leaves to transformers, with the damage asked for."""
    shape = {"vocab_size": 25, "dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 32, "max_position_embeddings": 24}
    DistilBertModel(DistilBertConfig(**shape)).save_pretrained(folder)
    file = folder / "model.safetensors"
    if rename:
        save_file({rename + name: tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    if cut:
        file.write_bytes(file.read_bytes()[:-100])
    return folder


def test_another_architecture_is_scored_and_its_damages_are_one_line(
    config: dict[str, Any], model: Path, with_eval: Change
) -> None:
    few = with_eval(config, tasks=["cola"], seeds=[0])
    main({**few, "model_path": str(distilbert(model))})
    distilbert(model, rename="foo.")
    with pytest.raises(UserError, match=r"its weights lack .* and \d+ more; they are not of this config\.json"):
        main({**few, "name": "renamed"})
    distilbert(model, cut=True)
    with pytest.raises(UserError, match="transformers cannot load it"):
        main({**few, "name": "cut"})


def test_a_roberta_has_fewer_positions_than_it_says(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "roberta", "pad_token_id": 1}))
    assert open_model(model).max_length == 22


def test_a_tokenizer_without_its_unknown_token_is_named(config: dict[str, Any], model: Path) -> None:
    tokenizer = Tokenizer(WordPiece({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "w": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot encode an unknown word \(.*\[UNK\]"):
        main(config)


def test_a_name_holds_the_scores_of_one_model(
    config: dict[str, Any], model: Path, tmp_path: Path, with_eval: Change
) -> None:
    """Its record says which; scores of another's random or superglue rows would stand beside them."""
    few = with_eval(config, seeds=[0], tasks=["cola"])
    main(few)
    main({**few, "model_path": str(model.parent / "." / "model" / ".." / "model")})
    shutil.copytree(model, tmp_path / "other")
    with pytest.raises(UserError, match=r"model_path=.*other: name=first has the scores of model_path=.*model; give"):
        main({**few, "model_path": str(tmp_path / "other")})


def reversed_vocabulary(final: Path) -> None:
    node = json.loads((final / "tokenizer.json").read_text())
    node["model"]["vocab"] = dict(zip(node["model"]["vocab"], reversed(node["model"]["vocab"].values())))
    (final / "tokenizer.json").write_text(json.dumps(node))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reversed_vocabulary, r"tokenizer\.json: is not as pretraining wrote it"),
        (lambda f: (f / "config.json").write_text((f / "config.json").read_text() + "\n"), r"config\.json: is not as"),
        (lambda f: (f / "vocab.txt").write_text("[UNK]\n"), r"vocab\.txt: was not written by pretraining"),
        (lambda f: (f / "generation_config.json").unlink(), r"generation_config\.json: is missing"),
    ],
)
def test_a_model_folder_that_changed_after_pretraining_is_not_scored(
    config: dict[str, Any], model: Path, change: Callable[[Path], object], says: str
) -> None:
    """Nothing is written, and nobody's eye is on what only people read."""
    run = Path(config["runs"]) / "first"
    (model / "generation_config.json").write_text("{}")
    shutil.copytree(model, run / "final")
    write_record_section(run, pretrain={"status": "finished", "final_files": file_hashes(run / "final")})
    (run / "final" / "README.md").write_text("mine")
    assert find_model(config | {"model_path": None}, run).own
    change(run / "final")
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError, match=says) as caught:
        main(config | {"model_path": None})
    assert "\n" not in str(caught.value) and sorted(run.rglob("*")) == before


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
    with pytest.raises(UserError, match=f"{name}: was changed while the model was being scored"):
        main(config)
    assert "glue" not in load_record(Path(config["runs"]) / "first")


def flipped_bit(final: Path) -> None:
    """The file of weights is still valid."""
    weights = bytearray((final / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (final / "model.safetensors").write_bytes(weights)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (flipped_bit, r"model\.safetensors: is not as pretraining wrote it .* model_path="),
        (reversed_vocabulary, r"tokenizer\.json: is not as pretraining wrote it"),
    ],
)
def test_an_older_record_knows_weights_and_tokenizer(
    config: dict[str, Any], model: Path, change: Callable[[Path], object], says: str
) -> None:
    run = Path(config["runs"]) / "first"
    shutil.copytree(model, run / "final")
    weights, tokenizer = (file_sha256(run / "final" / name) for name in ("model.safetensors", "tokenizer.json"))
    write_record_section(run, pretrain={"final_sha256": weights}, corpus={"tokenizer": {"sha256": tokenizer}})
    assert find_model(config | {"model_path": None}, run).sha256 == weights
    change(run / "final")
    with pytest.raises(UserError, match=says):
        find_model(config | {"model_path": None}, run)


def test_minimal_pairs_are_read_beforehand(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    settings = compose("model=tiny", "eval=embedded", f"eval.minimal_pairs={tmp_path}")
    with pytest.raises(UserError, match=r"eval\.minimal_pairs=.*: no \.jsonl file there"):
        check(settings)


def test_mistakes_are_one_line(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, with_eval: Change) -> None:
    monkeypatch.setattr(locate, "corpus_folder", lambda config: Path(config["corpora"]) / "embedded-0")
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
        (with_eval(config, tasks=[]), r"eval: tasks must name at least one"),
        ({**config, "model_path": __file__}, r"test_glue.py: is a file; give the folder it is in"),
        ({**config, "model_path": "~nobody-here/m"}, r"model_path=~nobody-here/m: there is no such home folder"),
        (with_eval(config, threads=100_000), r"eval: threads=100000: this machine has \d+ cores"),
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


def test_without_a_network_the_hub_fails_at_once(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, with_eval: Change
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="someone/model-x: no such folder, and no connection to the hub"):
        main({**config, "model_path": "someone/model-x"})
    with pytest.raises(UserError, match=r"eval=hub: cannot load nyu-mll/glue .*eval.data_dir=<folder"):
        main(with_eval(config, source="hub", data_dir=None))
