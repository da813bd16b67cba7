"""Our models compute what stock BertForMaskedLM and ModernBertForMaskedLM compute for the same weights, and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from cramming.config import UserError, build
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.model.load import load_encoder, load_encoder_config, load_masked_lm
from cramming.model.stock import families, stock_family
from cramming.overrides import compose

from .conftest import own_logits, padded, perturbed

IDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
VOCAB = 256


def stock_bert(**changes: object) -> BertForMaskedLM:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    sizes |= {"intermediate_size": 80, "max_position_embeddings": 96}
    return BertForMaskedLM(BertConfig(**{**sizes, **changes}))


ROBERTA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 98,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}


def stock_roberta() -> RobertaForMaskedLM:
    return RobertaForMaskedLM(RobertaConfig(**ROBERTA_SIZES))


def stock_xlm_roberta() -> XLMRobertaForMaskedLM:
    return XLMRobertaForMaskedLM(XLMRobertaConfig(**ROBERTA_SIZES))


def stock_mpnet(**changes: object) -> MPNetForMaskedLM:
    sizes = {key: value for key, value in ROBERTA_SIZES.items() if key != "type_vocab_size"}
    return MPNetForMaskedLM(MPNetConfig(**{**sizes, **changes}))


def stock_distilbert(**changes: object) -> DistilBertForMaskedLM:
    sizes = {"vocab_size": VOCAB, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80}
    return DistilBertForMaskedLM(
        DistilBertConfig(**{**sizes, "max_position_embeddings": 96, **changes})
    )


def stock_modern(**changes: object) -> ModernBertForMaskedLM:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
    }
    sizes |= {"intermediate_size": 72, "max_position_embeddings": 96, "local_attention": 16, **IDS}
    return ModernBertForMaskedLM(ModernBertConfig(**{**sizes, **changes}))


def assert_equal(native: MaskedLM, stock: PreTrainedModel, lengths: list[int]) -> None:
    """Packed, ours; padded and one by one, theirs: within 1e-4 in fp32."""
    texts = [torch.randint(3, native.config.vocab_size or 0, (n,)) for n in lengths]
    together = stock.eval()(**padded(texts)).logits
    for text, mine, row in zip(texts, own_logits(native, texts), together):
        torch.testing.assert_close(mine, stock(input_ids=text[None]).logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(mine, row[: len(text)], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "make",
    [
        stock_bert,
        lambda: stock_bert(hidden_act="gelu_new", type_vocab_size=1, layer_norm_eps=1e-6),
        lambda: stock_bert(hidden_act="relu"),
        lambda: stock_bert(hidden_act="relu2"),
        stock_roberta,
        stock_xlm_roberta,
        stock_mpnet,
        stock_distilbert,
        lambda: stock_distilbert(activation="relu"),
        stock_modern,
        lambda: stock_modern(
            norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True
        ),
        lambda: stock_modern(
            decoder_bias=False, tie_word_embeddings=False, global_attn_every_n_layers=2
        ),
        lambda: stock_modern(
            hidden_activation="silu", classifier_activation="silu", num_hidden_layers=1
        ),
    ],
)
@torch.no_grad()
def test_stock_checkpoint_gives_the_same_logits_here(make: object, tmp_path: Path) -> None:
    stock = perturbed(make(), 0.05)  # type: ignore[operator]
    stock.save_pretrained(tmp_path)
    assert_equal(load_masked_lm(tmp_path), stock, [50, 3, 96, 1, 33])


def test_mpnets_distances_count_far_and_train_the_same_table(tmp_path: Path) -> None:
    """Logits and the table's gradient, beyond the 128 tokens from which on all distances are one."""
    stock = perturbed(stock_mpnet(max_position_embeddings=302), 0.1)
    stock.save_pretrained(tmp_path)
    native = load_masked_lm(tmp_path)
    texts = [torch.randint(3, VOCAB, (n,)) for n in (300, 129, 2, 150)]
    inputs = padded(texts)
    theirs = stock(**inputs).logits[inputs["attention_mask"] == 1]
    ours = torch.cat(own_logits(native, texts))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weights = torch.randn_like(ours)
    for logits in (ours, theirs):
        (logits * weights).sum().backward()
    assert native.encoder.relative_positions is not None
    ours, theirs = native.encoder.relative_positions, stock.mpnet.encoder.relative_attention_bias
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, atol=1e-5, rtol=1e-5)


def model_yaml(name: str, **changes: object) -> ModelConfig:
    return build(ModelConfig, {**compose([f"model={name}"])["model"], **changes}, "model")


@pytest.mark.parametrize("name", ["bert-base", "bert-large", "modern", "small", "tiny"])
@torch.no_grad()
def test_yaml_model_gives_the_same_logits_in_stock_transformers(
    name: str, tmp_path: Path, tokenizer_file: Path, save: object
) -> None:
    config = model_yaml(
        name, vocab_size=VOCAB, num_layers=2 if name.startswith("bert") else 4, max_length=160
    )
    native = perturbed(MaskedLM(config), 0.05)
    save(native, tmp_path / "final")  # type: ignore[operator]
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "final")
    assert type(stock).__name__ == families()[str(stock_family(config))].architecture
    assert_equal(native, stock, [120, 7, 160])


@torch.no_grad()
def test_token_types_enter_as_in_bert(tmp_path: Path) -> None:
    stock = perturbed(stock_bert(), 0.05)
    stock.save_pretrained(tmp_path)
    native, ids = load_masked_lm(tmp_path).eval(), torch.randint(3, VOCAB, (20,))
    types = torch.tensor([0] * 8 + [1] * 12)
    packing = Packing(torch.tensor([0, 20], dtype=torch.int32), 20, 20)
    hidden = native.encoder(ids, torch.arange(20), packing, types)
    theirs = stock.bert(input_ids=ids[None], token_type_ids=types[None]).last_hidden_state[0]
    torch.testing.assert_close(hidden, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [BertModel, BertForPreTraining])
@torch.no_grad()
def test_encoder_loads_from_other_bert_classes_and_from_pickles(
    kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    stock = kind(stock_bert().config).eval()
    torch.save(stock.state_dict(), tmp_path / "pytorch_model.bin")
    stock.config.save_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB, (20,))
    packing = Packing(torch.tensor([0, 20], dtype=torch.int32), 20, 20)
    hidden = load_encoder(tmp_path).eval()(ids, torch.arange(20), packing)
    theirs = (stock.bert if kind is BertForPreTraining else stock)(
        input_ids=ids[None]
    ).last_hidden_state[0]
    torch.testing.assert_close(hidden, theirs, atol=1e-5, rtol=0)
    if kind is BertModel:
        with pytest.raises(UserError, match=r"lack cls\.predictions\."):
            load_masked_lm(tmp_path)


def test_modernbert_files_of_older_transformers_are_read(tmp_path: Path) -> None:
    old = {"model_type": "modernbert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
    old |= {"num_attention_heads": 2, "intermediate_size": 48, "global_attn_every_n_layers": 2}
    old |= {"global_rope_theta": 5000.0, "local_rope_theta": 300.0, "local_attention": 8}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = load_encoder_config(tmp_path)
    assert (config.global_every, config.local_window) == (2, 8)
    assert (config.rope_theta_global, config.rope_theta_local) == (5000.0, 300.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets=16"),
        ("mpnet", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("modern", {"classifier_activation": "relu"}, "classifier_activation"),
        ("modern", {"layer_types": ["sliding_attention"] + ["full_attention"] * 4}, "layer_types"),
        ("modern", {"mlp_dropout": 0.1}, "mlp_dropout"),
    ],
)
def test_what_this_model_cannot_compute_is_refused(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    stock = {"bert": stock_bert, "mpnet": stock_mpnet, "modern": stock_modern}[family]()
    type(stock.config)(**{**stock.config.to_dict(), **changes}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_encoder_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_dropout_of_the_folder_can_be_replaced(tmp_path: Path) -> None:
    ModernBertConfig(**{**stock_modern().config.to_dict(), "mlp_dropout": 0.1}).save_pretrained(
        tmp_path
    )
    config = load_encoder_config(tmp_path, dropout=0.2, attention_dropout=0.3)
    assert (config.dropout, config.attention_dropout) == (0.2, 0.3)


def test_family_follows_from_the_fields() -> None:
    assert stock_family(model_yaml("bert-base")) == "bert"
    assert stock_family(model_yaml("modern")) == "modernbert"
    assert stock_family(model_yaml("crammed-bert")) is None
    assert stock_family(replace(model_yaml("bert-base"), token_types=0)) == "distilbert"
    assert stock_family(replace(model_yaml("bert-base"), position_offset=2)) == "roberta"
    relative = replace(model_yaml("bert-base"), relative_positions=32)
    assert stock_family(relative) is None
    assert stock_family(replace(relative, position_offset=2, token_types=0)) == "mpnet"
    assert stock_family(replace(model_yaml("modern"), first_attn_norm=True)) is None
    assert stock_family(replace(model_yaml("modern"), qk_norm=True)) is None
