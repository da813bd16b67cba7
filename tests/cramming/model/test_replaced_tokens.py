"""Replaced-token detection is what its paper says, counts what it costs, and exports the encoder alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForSequenceClassification

from cramming.model.attention import Packing
from cramming.model.config import LastLayer, ModelConfig
from cramming.model.export import load_exported
from cramming.model.replaced_tokens import ReplacedTokens, count_parameters, flops_per_token, generator_config, sample

from .conftest import BERT, CRAMMED, MODERN, PARTS, perturbed

ROWS = Packing(torch.tensor([0, 16, 32], dtype=torch.int32), 16, 16)
PLACES = torch.tensor([1, 4, 9, 15, 16, 18, 25, 30])


def batch(missing: int = 0) -> tuple[Any, ...]:
    """Two rows, four targets each behind token 3; the last `missing` places have no target."""
    ids = torch.randint(5, 128, (32,))
    targets = ids[PLACES].clone()
    targets[len(PLACES) - missing :] = -100
    hidden = ids.scatter(0, PLACES[: len(PLACES) - missing], 3)
    return hidden, torch.arange(32) % 16, ROWS, PLACES, targets, torch.rand(len(PLACES))


def make(config: ModelConfig, last_layer: LastLayer = "targets", **more: Any) -> ReplacedTokens:
    return perturbed(ReplacedTokens(config, 0.5, 50.0, last_layer=last_layer, **more), 0.2).train()


def reference(model: ReplacedTokens, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Sections 2 and 3.1 of the paper written out: the training loss of a batch, and which tokens are replaced."""
    ids, positions, packing, places, targets, uniform = given
    logits = model.generator.logits(ids, positions, packing, places)
    shown, replaced = ids.tolist(), [0.0] * len(ids)
    for row, place, target, u in zip(logits.detach().softmax(-1), places.tolist(), targets.tolist(), uniform.tolist()):
        if target >= 0:
            shown[place] = next(v for v, reached in enumerate(row.cumsum(0).tolist()) if reached > u)
            replaced[place] = float(shown[place] != target)
    told = model.classifier(model.transform(model.encoder(torch.tensor(shown), positions, packing))).squeeze(1)
    generated = F.cross_entropy(logits, targets, ignore_index=-100)
    return generated + 50.0 * F.binary_cross_entropy_with_logits(told, torch.tensor(replaced)), torch.tensor(replaced)


@pytest.mark.parametrize("config", [BERT, CRAMMED, MODERN, replace(CRAMMED, **PARTS["value embeddings"])])
@pytest.mark.parametrize("last_layer", ["targets", "all"])
@pytest.mark.parametrize("missing", [0, 2])
def test_loss_and_gradients_are_those_of_the_paper(config: ModelConfig, last_layer: LastLayer, missing: int) -> None:
    torch.manual_seed(0)
    model, given = make(config, last_layer), batch(missing)
    loss, _ = model(*given)
    loss = loss / (len(PLACES) - missing)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    model.zero_grad()
    wanted, replaced = reference(model, given)
    wanted.backward()
    assert 0 < replaced.sum() <= len(PLACES) - missing
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_the_generator_learns_nothing_from_the_encoder_and_evaluation_is_the_encoder_alone() -> None:
    model, given = make(BERT), batch()
    model.eval()
    loss, hits = model(*given)
    loss.backward()
    assert all(p.grad is None for n, p in model.generator.named_parameters() if "embeddings.tokens" not in n)
    assert 0 <= hits / len(PLACES) <= 1
    again, _ = model(*given)
    assert torch.equal(loss, again), "the batch's own numbers decide what is sampled"


def test_tokens_are_sampled_as_often_as_they_are_predicted() -> None:
    model = make(BERT, loss_chunk=128 * 1000)  # several chunks
    states = torch.randn(1, BERT.hidden_size).expand(20_000, -1)
    drawn = sample(model.generator, states, (torch.arange(20_000) + 0.5) / 20_000)
    shares = torch.bincount(drawn, minlength=128) / 20_000
    logits = F.linear(states[:1], model.generator.decoder(), model.generator.decoder_bias)
    torch.testing.assert_close(shares, logits.detach().softmax(-1)[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("config", [BERT, MODERN, CRAMMED, *(replace(CRAMMED, **part) for part in PARTS.values())])
def test_parameters_and_flops_are_counted(config: ModelConfig) -> None:
    """As in test_config.py: in bf16, with attention by plain products, without windows."""
    config = replace(config, local_window=None)
    model = ReplacedTokens(config, 0.5, 50.0, "products")
    tables = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n.split(".")[-2] in TABLES)
    total = sum(p.numel() for p in model.parameters())
    assert count_parameters(config, 0.5) == (total, total - tables)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        model(*batch())[0].backward()
    expected = 32 * flops_per_token(config, 0.5, 16, len(PLACES) / 32, "targets")
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


TABLES = ("tokens", "value_tokens", "positions", "token_types")


def test_a_generator_has_its_share_of_the_heads() -> None:
    config = ModelConfig(vocab_size=512)
    assert generator_config(config, 0.25).hidden_size == 192  # ELECTRA, table 6: a quarter of small and large
    assert (generator_config(config, 0.33).num_heads, generator_config(config, 0.33).intermediate_size) == (4, 1024)


@pytest.mark.parametrize("config", [BERT, MODERN, CRAMMED])
def test_the_encoder_alone_is_exported(
    config: ModelConfig, save: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads in transformers with the encoder's states, as a classifier too, and comes back as an encoder."""
    encoder = make(config).encoder.eval()
    save(encoder, tmp_path / "final")
    back = load_exported(tmp_path / "final")
    assert type(back) is type(encoder)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    stock = AutoModel.from_pretrained(tmp_path / "final", trust_remote_code=True).eval()
    ids, positions, packing = torch.randint(5, 128, (32,)), torch.arange(32) % 16, ROWS
    states = encoder(ids, positions, packing)
    torch.testing.assert_close(back.eval()(ids, positions, packing), states)
    torch.testing.assert_close(stock(ids.view(2, 16)).last_hidden_state.view(32, -1), states, rtol=1e-4, atol=1e-5)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "final", trust_remote_code=True)
