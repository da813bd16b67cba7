"""Replaced-token detection is what its paper says, counts what it costs, and exports the encoder alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForSequenceClassification

from cramming.config import UserError
from cramming.data.batches import BERT_MASKING, BatchSource, HeldOut
from cramming.data.corpus import Corpus
from cramming.model import residual
from cramming.model.attention import Packing
from cramming.model.config import LastLayer, ModelConfig
from cramming.model.load import load_exported, load_masked_lm
from cramming.model.replaced_tokens import (
    ReplacedTokens,
    count_parameters,
    flops_per_token,
    generator_config,
    sample,
)
from cramming.objectives.masking import Masker
from cramming.objectives.rtd import SampledTargets
from cramming.optim.muon import matrices

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


def reference(model: ReplacedTokens, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The paper written out: the training loss of a batch, which tokens are replaced, and the share told right.

    A row without all of its targets counts as much less.
    """
    ids, positions, packing, places, targets, uniform = arguments
    logits = model.generator.logits(ids, positions, packing, places)
    shown, replaced = ids.tolist(), [0.0] * len(ids)
    for row, place, target, u in zip(
        logits.detach().softmax(-1), places.tolist(), targets.tolist(), uniform.tolist()
    ):
        if target >= 0:
            shown[place] = next(
                v for v, reached in enumerate(row.cumsum(0).tolist()) if reached > u
            )
            replaced[place] = float(shown[place] != target)
    told = model.classifier(
        model.transform(model.encoder(torch.tensor(shown), positions, packing))
    ).squeeze(1)
    generated, truth = F.cross_entropy(logits, targets, ignore_index=-100), torch.tensor(replaced)
    shares = (targets >= 0).view(2, 4).sum(1) / (targets >= 0).sum()
    rows = [
        F.binary_cross_entropy_with_logits(told[k : k + 16], truth[k : k + 16]) for k in (0, 16)
    ]
    right = ((told.sigmoid() > 0.5) == truth.bool()).float().view(2, 16).mean(1)
    return generated + 50.0 * (shares[0] * rows[0] + shares[1] * rows[1]), truth, right @ shares


@pytest.mark.parametrize(
    "config", [BERT, CRAMMED, MODERN, replace(CRAMMED, **PARTS["value embeddings"])]
)
@pytest.mark.parametrize("last_layer", ["targets", "all"])
@pytest.mark.parametrize("missing", [0, 2])
def test_loss_and_gradients_are_those_of_the_paper(
    config: ModelConfig, last_layer: LastLayer, missing: int
) -> None:
    torch.manual_seed(0)
    model, arguments = make(config, last_layer), batch(missing)
    targets = len(PLACES) - missing
    loss, hits = (x / targets for x in model(*arguments))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    model.zero_grad()
    wanted, replaced, right = reference(model, arguments)
    wanted.backward()
    assert 0 < replaced.sum() <= targets
    torch.testing.assert_close((loss, hits), (wanted, right), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    model.zero_grad()
    parts = [model(*part) for part in cut(arguments)]
    torch.testing.assert_close(sum(part for part, _ in parts) / targets, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(part for _, part in parts) / targets, hits)
    sum((part / targets for part, _ in parts), torch.zeros(())).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def cut(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Each row a micro-batch of its own."""
    ids, positions, _, places, targets, uniform = arguments
    packing = Packing(ROWS.bounds_S[:2], 16, 16)
    rows = [(slice(16 * k, 16 * k + 16), slice(4 * k, 4 * k + 4)) for k in (0, 1)]
    return [
        (ids[t], positions[t], packing, places[m] % 16, targets[m], uniform[m]) for t, m in rows
    ]


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_validation_is_one_number_whatever_fills_the_last_batch(
    tiny_corpus: Path, packing: Any
) -> None:
    corpus = Corpus.open(tiny_corpus)
    targets = SampledTargets(0.15, 1.0, 0.0)
    masker = Masker(
        targets, corpus.vocab_size, corpus.special_ids.mask, tuple(corpus.special_ids), 0
    )
    text = HeldOut(BatchSource(corpus.stream("validation"), masker, 24, packing, 0), 250)
    model = make(replace(BERT, vocab_size=corpus.vocab_size)).eval()
    losses = []
    for rows in (1, 2, 3, 4, 5):
        batches = text.batches(BERT_MASKING, rows)
        losses.append(
            [sum(numbers).item() for numbers in zip(*(model(*b.inputs) for b in batches))]
        )
        losses[-1].append(sum(b.num_targets for b in batches))
    assert all(numbers == pytest.approx(losses[0], rel=1e-5) for numbers in losses)


@pytest.mark.parametrize("config", [BERT, CRAMMED, MODERN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_streams_of_both_are_of_one_type(
    config: ModelConfig, dtype: torch.dtype
) -> None:
    """Under autocast, which makes 16 bits of the projected token vectors."""
    model, seen = make(config), list[torch.dtype]()
    for encoder in (model.encoder, model.generator.encoder):
        if dtype == torch.bfloat16:
            residual.lower(encoder, dtype)
        for block in encoder.blocks:
            block.register_forward_hook(
                lambda module, inputs, output: seen.extend((inputs[0].dtype, output.dtype))
            )
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch())
    assert seen == [dtype] * 4 * config.num_layers


def test_the_generator_learns_nothing_from_the_encoder_and_evaluation_is_the_encoder_alone() -> (
    None
):
    model, arguments = make(BERT), batch()
    model.eval()
    loss, hits = model(*arguments)
    loss.backward()
    assert all(
        p.grad is None
        for n, p in model.generator.named_parameters()
        if "embeddings.tokens" not in n
    )
    torch.testing.assert_close(hits / len(PLACES), reference(model, arguments)[2])
    repeated, _ = model(*arguments)
    assert torch.equal(loss, repeated), "the batch's own numbers decide what is sampled"


def test_tokens_are_sampled_as_often_as_they_are_predicted() -> None:
    model = make(BERT, loss_chunk=128 * 1000)  # several chunks
    states = torch.randn(1, BERT.hidden_size).expand(20_000, -1)
    drawn = sample(model.generator, states, (torch.arange(20_000) + 0.5) / 20_000)
    shares = torch.bincount(drawn, minlength=128) / 20_000
    logits = F.linear(states[:1], model.generator.decoder(), model.generator.decoder_bias)
    torch.testing.assert_close(shares, logits.detach().softmax(-1)[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "config", [BERT, MODERN, CRAMMED, *(replace(CRAMMED, **part) for part in PARTS.values())]
)
def test_parameters_and_flops_are_counted(config: ModelConfig) -> None:
    """Counted in bf16, with attention by plain products, without windows, as in test_config.py."""
    config = replace(config, local_window=None)
    model = ReplacedTokens(config, 0.5, 50.0, "products")
    tables = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n.split(".")[-2] in TABLES
    )
    total = sum(p.numel() for p in model.parameters())
    assert count_parameters(config, 0.5) == (total, total - tables)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        model(*batch())[0].backward()
    expected = 32 * flops_per_token(config, 0.5, 16, len(PLACES) / 32, "targets")
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("config", [BERT, MODERN, CRAMMED])
def test_muon_has_the_matrices_of_both_and_of_their_heads(config: ModelConfig) -> None:
    model = make(config)
    names = {p: name for name, p in model.named_parameters()}
    heads = {
        "transform.dense.weight",
        "generator.transform.dense.weight",
        "generator.transform.weight",
    }
    in_blocks = {name for p, name in names.items() if ".blocks." in name and p.ndim == 2}
    assert {names[p] for p, _ in matrices(model)} == in_blocks | (heads & {*names.values()})


@pytest.mark.parametrize("config", [BERT, CRAMMED])
def test_a_compiler_takes_all_of_it_as_one_graph(config: ModelConfig) -> None:
    model, arguments, counter = make(config), batch(2), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*arguments), model(*arguments))
    assert counter.frame_count == 1


TABLES = ("tokens", "value_tokens", "positions", "token_types", "relative_positions")


def test_a_generator_has_its_share_of_the_heads() -> None:
    config = ModelConfig(vocab_size=512)
    assert generator_config(config, 0.25).hidden_size == 192
    assert (
        generator_config(config, 0.33).num_heads,
        generator_config(config, 0.33).intermediate_size,
    ) == (4, 1024)
    model = make(BERT)
    num_parameters = sum(
        p.numel() for p in set(model.generator.parameters()) - set(model.encoder.parameters())
    )
    assert (
        model.describe_generator()
        == f"; generator {model.generator.config.hidden_size} wide with {num_parameters:,} of the parameters"
    )


@pytest.mark.parametrize("config", [BERT, MODERN, CRAMMED])
def test_the_encoder_alone_is_exported(
    config: ModelConfig, save: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads in transformers with the encoder's states, as a classifier too, and comes back as an encoder."""
    encoder = make(config).encoder.eval()
    save(encoder, tmp_path / "final")
    back = load_exported(tmp_path / "final")
    with pytest.raises(UserError, match=r"final: an encoder without a masked-LM head"):
        load_masked_lm(tmp_path / "final")
    assert type(back) is type(encoder)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    stock = AutoModel.from_pretrained(tmp_path / "final", trust_remote_code=True).eval()
    ids, positions, packing = torch.randint(5, 128, (32,)), torch.arange(32) % 16, ROWS
    states = encoder(ids, positions, packing)
    torch.testing.assert_close(back.eval()(ids, positions, packing), states)
    torch.testing.assert_close(
        stock(ids.view(2, 16)).last_hidden_state.view(32, -1), states, rtol=1e-4, atol=1e-5
    )
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "final", trust_remote_code=True)
