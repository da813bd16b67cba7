"""Our model in transformers computes, on padded batches, what it computes on packed tokens.

Each case is a combination of choices that stock transformers lacks. The adapter is imported here as a module of the
package; that it loads from a folder without this package is shown in tests/end_to_end/test_export_process.py.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from cramming.config import UserError
from cramming.model import hf_adapter
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.export import AUTO_CLASSES, CODE, load_encoder, load_masked_lm
from cramming.model.heads import MaskedLM
from cramming.model.hf_adapter import (
    CrammingForMaskedLM,
    CrammingForQuestionAnswering,
    CrammingForSequenceClassification,
    CrammingForTokenClassification,
    CrammingModel,
)
from cramming.model.stock import stock_family

Save = Callable[[MaskedLM, Path], None]

CRAMMED = ModelConfig(
    vocab_size=128, hidden_size=16, num_layers=3, num_heads=2, intermediate_size=24, max_length=48,
    norm_order="pre", final_norm=True, positions="scaled_sinusoidal", mlp="glu", attention_bias=False, mlp_bias=False,
    head_transform=False, head_bias=False, decoder_bias=False, token_types=0,
)  # fmt: skip
ROPE = replace(CRAMMED, positions="rope", local_window=6, global_every=2, rope_theta_local=500.0)
CASES = {
    "crammed": CRAMMED,
    "crammed with BERT's head": replace(CRAMMED, head_transform=True, head_bias=True, decoder_bias=True),
    "windows": ROPE,
    "windows, learned positions": replace(ROPE, positions="learned", local_window=7, global_every=3),
    "no positions": replace(CRAMMED, positions="none", tie_embeddings=False, decoder_bias=True),
    "query-key norms": replace(ROPE, qk_norm=True, norm_eps=1e-5, first_attn_norm=False, token_types=3),
    "RMS norm": replace(CRAMMED, norm="rmsnorm", norm_bias=False, embedding_norm=False, activation="silu"),
    "post-norm": replace(CRAMMED, norm_order="post", final_norm=False, mlp="plain", activation="relu", token_types=2),
    "BERT, untied": ModelConfig(
        vocab_size=128, hidden_size=16, num_layers=2, num_heads=4, intermediate_size=24, max_length=48,
        tie_embeddings=False, activation="gelu_tanh",
    ),
}  # fmt: skip
LENGTHS = [40, 3, 17, 1]


def perturbed(config: ModelConfig) -> MaskedLM:
    """A model whose every parameter is off its initial value: zeros and ones would hide a swapped bias or norm."""
    assert stock_family(config) is None
    model = MaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def documents() -> list[Tensor]:
    return [torch.randint(5, 128, (length,)) for length in LENGTHS]


def own_logits(model: MaskedLM, texts: list[Tensor]) -> list[Tensor]:
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packing = Packing(bounds, None, max(LENGTHS))
    return list(model.logits(torch.cat(texts), positions, packing, torch.arange(sum(LENGTHS))).split(LENGTHS))


def padded(texts: list[Tensor], side: str) -> dict[str, Tensor]:
    ids, mask = torch.zeros(len(texts), 40, dtype=torch.long), torch.zeros(len(texts), 40, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(40 - len(text), 40)
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_our_model(case: str, tmp_path: Path, save: Save) -> None:
    own = perturbed(CASES[case])
    save(own, tmp_path / "final")
    theirs, info = CrammingForMaskedLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info.values()), info
    texts = documents()
    expected = own_logits(own, texts)
    for side in ("right", "left"):
        inputs = padded(texts, side)
        logits = theirs(**inputs).logits
        assert logits.isfinite().all()
        for row, mine in enumerate(expected):
            torch.testing.assert_close(logits[row][inputs["attention_mask"][row] == 1], mine, atol=1e-4, rtol=0)
    alone = theirs(input_ids=texts[0][None]).logits[0]
    torch.testing.assert_close(alone, expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_saved_by_transformers_and_read_again_is_the_same_model(case: str, tmp_path: Path, save: Save) -> None:
    own = perturbed(CASES[case])
    save(own, tmp_path / "final")
    model = CrammingForMaskedLM.from_pretrained(tmp_path / "final")
    model.save_pretrained(tmp_path / "again")
    again = load_masked_lm(tmp_path / "again")
    assert again.config == own.config
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in again.state_dict().items())
    CrammingModel.from_pretrained(tmp_path / "final").save_pretrained(tmp_path / "bare")  # no head
    bare = load_encoder(tmp_path / "bare").state_dict()
    assert all(torch.equal(tensor, bare[name]) for name, tensor in own.encoder.state_dict().items())


def test_every_choice_of_an_architecture_has_a_case() -> None:
    """A field of ModelConfig that no case changes would be one that the folder's code may ignore."""
    trained_only = {"dropout", "attention_dropout", "init", "init_std", "attention_init"}
    sizes = {"vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_length"}
    sizes |= {"rope_theta_global"}
    for field in fields(ModelConfig):
        if field.name not in trained_only | sizes:
            assert len({getattr(config, field.name) for config in CASES.values()}) > 1, field.name


HEADS = {
    CrammingForMaskedLM: lambda tokens: {"labels": torch.randint(5, 128, (4, 40)).where(tokens, -100)},
    CrammingForSequenceClassification: lambda tokens: {"labels": torch.randint(0, 5, (4,))},
    CrammingForTokenClassification: lambda tokens: {"labels": torch.randint(0, 5, (4, 40)).where(tokens, -100)},
    CrammingForQuestionAnswering: lambda tokens: {
        "start_positions": torch.tensor([3, 0, 9, 0]),
        "end_positions": torch.tensor([8, 1, 9, 0]),
    },
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_learn_and_honour_the_number_of_labels(head: type, tmp_path: Path, save: Save) -> None:
    save(perturbed(ROPE), tmp_path / "final")
    model, info = head.from_pretrained(tmp_path / "final", num_labels=5, output_loading_info=True)  # type: ignore[attr-defined]
    assert not info["unexpected_keys"] - {"decoder.weight"}
    assert all(name.startswith(("pooler", "classifier", "qa_outputs")) for name in info["missing_keys"])
    expected = load_encoder(tmp_path / "final").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.encoder.state_dict().items())
    inputs = padded(documents(), "right")
    inputs |= HEADS[head](inputs["attention_mask"] == 1)
    output = model(**inputs)
    if "logits" in output and head is not CrammingForMaskedLM:
        assert output.logits.shape[-1] == 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert loss.item() < 0.7 * output.loss.item()


@pytest.mark.parametrize(
    ("labels", "given", "problem"),
    [
        (1, torch.tensor([0.5, 1.0, -2.0, 3.0]), "regression"),
        (3, torch.tensor([[0.0, 1.0, 1.0]] * 4), "multi_label_classification"),
    ],
)
def test_the_classifier_takes_other_kinds_of_labels(
    labels: int, given: Tensor, problem: str, tmp_path: Path, save: Save
) -> None:
    save(perturbed(CRAMMED), tmp_path / "final")
    model = CrammingForSequenceClassification.from_pretrained(tmp_path / "final", num_labels=labels)
    assert model(**padded(documents(), "right"), labels=given).loss.isfinite()
    assert model.config.problem_type == problem


@torch.no_grad()
def test_pooling_sees_no_padding(tmp_path: Path, save: Save) -> None:
    save(perturbed(CRAMMED), tmp_path / "final")
    texts = documents()
    for pooling in ("mean", "cls"):
        found = CrammingForSequenceClassification.from_pretrained(tmp_path / "final", classifier_pooling=pooling)
        right, left = (found(**padded(texts, side)).logits for side in ("right", "left"))
        alone = found(input_ids=texts[1][None]).logits[0]
        torch.testing.assert_close(right, left, atol=1e-5, rtol=0)
        torch.testing.assert_close(right[1], alone, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="classifier_pooling='max': choose mean or cls"):
        CrammingForSequenceClassification.from_pretrained(tmp_path / "final", classifier_pooling="max")


@torch.no_grad()
def test_the_plain_encoder(tmp_path: Path, save: Save) -> None:
    own = perturbed(ROPE)
    save(own, tmp_path / "final")
    model = CrammingModel.from_pretrained(tmp_path / "final")
    text = documents()[0]
    packing = Packing(torch.tensor([0, 40], dtype=torch.int32), 40, 40)
    expected = own.encoder(text, torch.arange(40), packing)
    output = model(input_ids=text[None], output_hidden_states=True)
    torch.testing.assert_close(output.last_hidden_state[0], expected, atol=1e-5, rtol=0)
    assert len(output.hidden_states) == 4 and torch.equal(output.hidden_states[-1], output.last_hidden_state)
    embedded = model(inputs_embeds=model.get_input_embeddings()(text[None]), return_dict=False)
    assert torch.equal(embedded[0], output.last_hidden_state)
    assert model.to(torch.bfloat16)(input_ids=text[None, :4]).last_hidden_state.dtype == torch.bfloat16


def test_what_users_of_transformers_do_to_a_model(tmp_path: Path, save: Save) -> None:
    """Resize the vocabulary, change the dropout, save memory, make one with random weights."""
    save(perturbed(CASES["crammed with BERT's head"]), tmp_path / "final")
    model = CrammingForMaskedLM.from_pretrained(tmp_path / "final", hidden_dropout_prob=0.5)
    assert model.encoder.blocks[0].dropout.p == 0.5
    model.resize_token_embeddings(131)
    assert model(input_ids=torch.tensor([[5, 130]])).logits.shape == (1, 2, 131)
    assert model.config.model["vocab_size"] == 131 and model.decoder.weight is model.get_input_embeddings().weight
    model.gradient_checkpointing_enable()
    ids = torch.randint(5, 128, (2, 9))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    fresh = CrammingForMaskedLM(model.config)
    assert all(parameter.isfinite().all() for parameter in fresh.parameters())
    with pytest.raises(ValueError, match="49 tokens in a row, but this model has 48 positions"):
        model(input_ids=torch.ones(1, 49, dtype=torch.long))


def test_the_folder_has_all_files_and_classes_that_it_names() -> None:
    """transformers 4 copies only what the first file imports itself."""
    folder, (adapter, *others) = Path(hf_adapter.__file__).parent, CODE
    text = (folder / adapter).read_text()
    direct = set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
    needed = {Path(file).name for file in get_relative_import_files(folder / adapter)}
    assert needed == {f"{name}.py" for name in direct} == set(others)
    assert all(hasattr(hf_adapter, name) for name in AUTO_CLASSES.values())
    packages = {package for name in CODE for package in get_imports(folder / name)}
    assert packages - sys.stdlib_module_names == {"torch", "transformers", "numpy"}  # which transformers needs itself


def test_folders_of_the_first_format_are_read(tmp_path: Path, save: Save) -> None:
    own = perturbed(CASES["no positions"])
    save(own, tmp_path / "final")
    names = {"decoder.weight": "decoder_weight", "decoder.bias": "decoder_bias"}
    state = load_file(tmp_path / "final" / "model.safetensors")
    save_file({names.get(name, name): tensor for name, tensor in state.items()}, tmp_path / "final/model.safetensors")
    config = (tmp_path / "final" / "config.json").read_text()
    (tmp_path / "final" / "config.json").write_text(config.replace('"format": 2', '"format": 1'))
    again = load_masked_lm(tmp_path / "final").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in own.state_dict().items())
    (tmp_path / "final" / "config.json").write_text(config.replace('"format": 2', '"format": 3'))
    with pytest.raises(UserError, match="format 3 is not 1 or 2"):
        load_masked_lm(tmp_path / "final")
