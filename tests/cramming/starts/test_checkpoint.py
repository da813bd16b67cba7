"""A start from a published checkpoint: the same weights, model and tokenizer, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetTokenizer,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from cramming import launch
from cramming.config import UserError, build
from cramming.data.corpus import Corpus
from cramming.invocation import Invocation
from cramming.model.config import ModelConfig
from cramming.model.export import save_pretrained
from cramming.model.heads import MaskedLM
from cramming.model.load import load_encoder_config, load_masked_lm
from cramming.overrides import compose as compose_recipe
from cramming.recipe import Config, Hardware, check
from cramming.record import load_record
from cramming.starts.checkpoint import load_checkpoint
from data_prep.tokenizer.load import load, special_tokens

VOCABULARY = 300  # of the small corpus
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}
DISTIL_SIZES = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 48,
    "max_position_embeddings": 48,
}
MODERN_IDS = {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
MPNET_TOKENS = (*ROBERTA_TOKENS[:4], *BERT_TOKENS, ROBERTA_TOKENS[4])  # BERT's are mere entries
STOCK: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, ...]]] = {
    "bert": (lambda: BertForMaskedLM(BertConfig(**SIZES)), BERT_TOKENS),
    "distilbert": (lambda: DistilBertForMaskedLM(DistilBertConfig(**DISTIL_SIZES)), BERT_TOKENS),
    "modernbert": (
        lambda: ModernBertForMaskedLM(ModernBertConfig(**SIZES, **MODERN_IDS)),
        BERT_TOKENS,
    ),
    "roberta": (
        lambda: RobertaForMaskedLM(RobertaConfig(**SIZES, type_vocab_size=1)),
        ROBERTA_TOKENS,
    ),
    "xlm-roberta": (
        lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**SIZES, type_vocab_size=1)),
        ROBERTA_TOKENS,
    ),
    "mpnet": (lambda: MPNetForMaskedLM(MPNetConfig(**SIZES)), MPNET_TOKENS),
}


def write_tokenizer(file: Path, special: tuple[str, ...]) -> None:
    words = [*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    vocabulary = {word: i for i, word in enumerate(words)}
    if special == MPNET_TOKENS:
        MPNetTokenizer(vocab=vocabulary).backend_tokenizer.save(str(file))
        return
    unknown = next(token for token in special if "unk" in token.lower())
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(file))


def write_stock(folder: Path, kind: str = "bert") -> Path:
    """Write a random stock model with a tokenizer of the small corpus's size."""
    make, special = STOCK[kind]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json", special)
    return folder


@pytest.fixture
def bert(tmp_path: Path, tiny_corpus: Path) -> Path:
    """A random BERT with the tokenizer of the small corpus."""
    folder = write_stock(tmp_path / "bert")
    shutil.copyfile(tiny_corpus / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.fixture
def train_from(tmp_path: Path, tiny_overrides: list[str]) -> Callable[..., Path]:
    """`train_from(checkpoint, *overrides)` trains and returns the run folder."""
    plain = [word for word in tiny_overrides if not word.startswith("model")]

    def call(checkpoint: Path, *overrides: str) -> Path:
        words = [*plain, "start=checkpoint", f"start.path={checkpoint}", *overrides]
        invocation = Invocation(runs=tmp_path / "runs", name="a", device="cpu")
        launch.main(compose_recipe(words), invocation)
        return invocation.run_folder

    return call


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForMaskedLM.from_pretrained(folder).state_dict()


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = weights_of(first), weights_of(second)
    assert set(ours) == set(theirs)
    assert all(torch.equal(mine, theirs[name]) for name, mine in ours.items())


@pytest.mark.parametrize("kind", STOCK)
def test_an_untrained_checkpoint_is_exported_as_it_was(
    kind: str, tmp_path: Path, tiny_corpus: Path
) -> None:
    source = write_stock(tmp_path / "source", kind)
    model = MaskedLM(load_encoder_config(source))
    assert load_checkpoint(model, source, Corpus.open(tiny_corpus))
    tokenizer = load(source / "tokenizer.json")
    names = {f"{role}_token": token for role, token in special_tokens(tokenizer).items()}
    save_pretrained(model, tmp_path / "out", source / "tokenizer.json", names)
    assert_same_weights(source, tmp_path / "out")
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("source", "out")]
    assert configs[0]["pad_token_id"] == configs[1]["pad_token_id"]
    assert configs[1]["pad_token_id"] == tokenizer.token_to_id(names["pad_token"])


def test_a_run_at_rate_zero_ends_with_the_checkpoints_weights(
    bert: Path, train_from: Callable[..., Path]
) -> None:
    """Through the whole run: its steps are below what fp32 holds."""
    run = train_from(bert, "optim.lr=1e-60")
    assert_same_weights(bert, run / "final")
    record = load_record(run)
    assert record["pretrain"]["start"] == "checkpoint"
    assert record["config"]["model"]["hidden_size"] == 32
    assert record["config"]["start"]["path"] == str(bert)


def test_training_changes_the_weights_and_keeps_the_dropout_that_is_typed(
    bert: Path, train_from: Callable[..., Path]
) -> None:
    run = train_from(bert, "model.dropout=0.05")
    model = load_record(run)["config"]["model"]
    assert (model["dropout"], model["attention_dropout"]) == (0.05, 0.1)
    with pytest.raises(AssertionError):
        assert_same_weights(bert, run / "final")


def test_a_model_of_this_suite_is_a_checkpoint(
    bert: Path, tmp_path: Path, train_from: Callable[..., Path], tiny_corpus: Path
) -> None:
    crammed = compose_recipe(["model=crammed-bert"])["model"]
    sizes = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 320,
    }
    native = MaskedLM(build(ModelConfig, {**crammed, **sizes}, "model"))
    save_pretrained(native, tmp_path / "own", tiny_corpus / "tokenizer.json")
    run = train_from(tmp_path / "own", "optim.lr=1e-60")
    state = load_masked_lm(run / "final").state_dict()
    assert all(torch.equal(native.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_missing_head_is_new_and_knows_the_frequencies(
    tmp_path: Path, tiny_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = BertModel(BertConfig(**SIZES))
    stock.save_pretrained(tmp_path / "bare")
    model, corpus = MaskedLM(load_encoder_config(tmp_path / "bare")), Corpus.open(tiny_corpus)
    assert not load_checkpoint(model, tmp_path / "bare", corpus)
    assert "no masked-LM head in the checkpoint" in capsys.readouterr().out
    table = stock.embeddings.word_embeddings.weight
    assert torch.equal(model.encoder.embeddings.tokens.weight, table)
    assert model.decoder() is model.encoder.embeddings.tokens.weight
    stream = corpus.stream("train")
    counts_V = np.bincount(
        stream.gather(np.array([0]), stream.num_tokens)[0], minlength=VOCABULARY
    ).astype(float)
    counts_V[list(corpus.special_ids)] = 0
    shares_V = (counts_V + 1) / (counts_V + 1).sum()
    assert model.decoder_bias is not None
    np.testing.assert_allclose(model.decoder_bias.exp().detach(), shares_V, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model.num_layers=4"], "model.num_layers=4: the checkpoint has 2"),
        (["model=tiny"], "model=tiny: start.path="),
    ],
)
def test_the_checkpoint_decides_about_the_model(bert: Path, words: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        compose_recipe(["start=checkpoint", f"start.path={bert}", *words])
    assert "\n" not in str(caught.value)


def test_what_does_not_map_is_refused_with_what_is_supported(bert: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    for change in ({"model_type": "electra"}, {"is_decoder": True}, {"hidden_act": "tanh"}):
        (bert / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match="Give a checkpoint of BERT, RoBERTa") as caught:
            compose_recipe(["start=checkpoint", f"start.path={bert}"])
        assert "\n" not in str(caught.value)


def test_a_recipe_without_a_checkpoint_is_refused(compose: Callable[..., dict[str, Any]]) -> None:
    place = Hardware("cpu", "a CPU", "fp32", trains=True)
    with pytest.raises(UserError, match=r"start\.path=null: no checkpoint"):
        check(Config.of(compose("start=checkpoint")), place)
    with pytest.raises(UserError, match=r"objective\.name=rtd: not with start=checkpoint"):
        check(Config.of(compose("start=checkpoint", "objective=rtd", "start.path=x")), place)


def test_a_corpus_of_another_tokenizer_is_refused(
    tmp_path: Path, train_from: Callable[..., Path], make_corpus: Callable[..., Path]
) -> None:
    source = write_stock(tmp_path / "bert")
    corpus = make_corpus(tmp_path / "other", documents=20, spelling="<pad>")
    with pytest.raises(UserError, match="its tokenizer is not the checkpoint's"):
        train_from(source, f"data.corpus={corpus}")


def test_roberta_takes_its_own_layout_of_pairs(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", ROBERTA_TOKENS)
    tokenizer = load(tmp_path / "tokenizer.json")
    pair = tokenizer.encode("w1 w2", "w3")
    assert pair.tokens == ["<s>", "w1", "w2", "</s>", "</s>", "w3", "</s>"]
    assert set(pair.type_ids) == {0}
