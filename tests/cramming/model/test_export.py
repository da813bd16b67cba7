"""Model folders: complete, exact, whole, and refused with a reason when they are not."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from cramming.config import UserError
from cramming.model.config import ModelConfig
from cramming.model.export import save_pretrained
from cramming.model.heads import MaskedLM
from cramming.model.load import load_encoder, load_encoder_config, load_masked_lm

from .conftest import BERT, CRAMMED, MODERN

Save = Callable[[MaskedLM, Path], None]
UNTIED = replace(MODERN, tie_embeddings=False, decoder_bias=False)
MIMETIC = replace(BERT, init="depth_scaled", attention_init="mimetic", zero_residual=True)


@pytest.fixture
def folder(tmp_path: Path, save: Save) -> Path:
    """A saved BERT."""
    save(MaskedLM(BERT), tmp_path / "final")
    return tmp_path / "final"


@pytest.mark.parametrize("config", [BERT, MODERN, replace(CRAMMED, dropout=0.1), UNTIED, MIMETIC])
def test_round_trip_is_exact(config: ModelConfig, tmp_path: Path, save: Save) -> None:
    model = MaskedLM(config)
    save(model, tmp_path / "final")
    reloaded = load_masked_lm(tmp_path / "final")
    assert reloaded.config == config
    state, encoder = reloaded.state_dict(), load_encoder(tmp_path / "final").state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(
        torch.equal(tensor, encoder[name]) for name, tensor in model.encoder.state_dict().items()
    )


@pytest.mark.parametrize("config", [BERT, MODERN, UNTIED, MIMETIC])
def test_stock_transformers_loads_every_weight(
    config: ModelConfig, tmp_path: Path, save: Save
) -> None:
    save(MaskedLM(config), tmp_path / "final")
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info.values()), info
    embedding, decoder = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is decoder) == config.tie_embeddings
    model.save_pretrained(tmp_path / "theirs")
    mine, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("final", "theirs")
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    written, saved = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("final", "theirs")
    )
    for transformers_4 in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        written.pop(transformers_4, None)
    assert {key: saved[key] for key in written} == written


@pytest.mark.parametrize("config", [BERT, MODERN])
def test_stock_classifier_and_tokenizer_load(
    config: ModelConfig, tmp_path: Path, save: Save
) -> None:
    save(MaskedLM(config), tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert (
        tokenizer.mask_token == "[MASK]"
        and tokenizer.pad_token_id == 0
        and tokenizer.model_max_length == 48
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "final", num_labels=3
    ).eval()
    inputs = tokenizer(["a b c", "d"], padding=True, return_tensors="pt")
    assert ("token_type_ids" in inputs) == (config.token_types > 1)
    assert model(**inputs).logits.shape == (2, 3)


def test_a_failed_save_leaves_the_old_folder(
    folder: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("cramming.model.export.shutil.copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        save(MaskedLM(MODERN), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["final"]


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_have_the_mode_that_the_user_set(tmp_path: Path, save: Save, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(MaskedLM(MODERN), tmp_path / "final")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "final").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_saving_again_replaces_the_model_but_no_other_folder(
    folder: Path, tmp_path: Path, save: Save
) -> None:
    save(MaskedLM(MODERN), folder)
    assert load_encoder_config(folder) == MODERN
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    with pytest.raises(UserError, match="not a model folder"):
        save(MaskedLM(MODERN), tmp_path / "letters")
    assert (tmp_path / "letters" / "mother.txt").exists()


def test_tokenizer_must_fit_the_model(tmp_path: Path, tokenizer_file: Path, save: Save) -> None:
    with pytest.raises(UserError, match="do not fit the model's vocabulary of 20"):
        save(MaskedLM(replace(BERT, vocab_size=20)), tmp_path / "final")
    with pytest.raises(UserError, match=r"no entry '<pad>' \(pad_token\)"):
        save_pretrained(MaskedLM(BERT), tmp_path / "final", tokenizer_file, {"pad_token": "<pad>"})
    assert not (tmp_path / "final").exists()


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(state, folder / "model.safetensors")


def add_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors") | {"bert.adapter.weight": torch.zeros(1)}
    save_file(state, folder / "model.safetensors")


def pickle_code(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("code ran",)

    (folder / "model.safetensors").unlink()
    torch.save({"bert.x": Evil()}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not a model configuration"),
        (
            lambda f: (f / "model.safetensors").unlink(),
            "no weights. Expected model.safetensors or pytorch_model.bin",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x10" * 50), "cannot be read"),
        (pickle_code, "cannot be read"),
        (
            lambda f: edit(f, model_type="gpt2"),
            r"model_type 'gpt2'.*cramming, bert, modernbert, roberta",
        ),
        (lambda f: edit(f, model_type="cramming", format=1), "format 1 is not 2"),
        (drop_weight, r"lack bert\.encoder\.layer\.1\.output\.dense\.weight"),
        (add_weight, r"unexpected weight bert\.adapter\.weight"),
        (lambda f: edit(f, num_hidden_layers=1), r"unexpected weight bert\.encoder\.layer\.1"),
        (lambda f: edit(f, vocab_size=40), r"has the shape \[128\], config.json makes it \[40\]"),
        (
            lambda f: edit(f, intermediate_size=40),
            r"intermediate.dense.weight has the shape \[24, 16\], config.json makes it \[40, 16\]",
        ),
    ],
)
def test_damaged_folders_are_refused_by_name(
    damage: Callable[[Path], None], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_masked_lm(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_an_own_folder_with_fewer_layers_than_its_weights_is_refused(
    tmp_path: Path, save: Save
) -> None:
    save(MaskedLM(CRAMMED), tmp_path)
    node = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, model=node["model"] | {"num_layers": 1})
    for load in (load_masked_lm, load_encoder):
        with pytest.raises(UserError, match=r"unexpected weight encoder\.blocks\.1\."):
            load(tmp_path)
