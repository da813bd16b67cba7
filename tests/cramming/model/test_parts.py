"""Every part that an architecture may have is what its paper says, and works with all that is done to a model.

A new part is a row of `PARTS` in conftest.py and its lines in `plain_logits`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from cramming.engine import Engine
from cramming.hooks import StepResult
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.model.stock import stock_family

from .conftest import BERT, IN_STOCK, MODERN, PARTS, own_logits, perturbed, relative_terms

# The plainest model that has blocks: no biases, norms without parameters' names to look up, one text.
PLAIN = replace(
    MODERN,
    num_layers=4,
    vocab_size=60,
    local_window=None,
    mlp="plain",
    positions="none",
    head_transform=False,
    decoder_bias=False,
    first_attn_norm=True,
    embedding_norm=False,
)
EVERYTHING = {name: value for part in PARTS.values() for name, value in part.items()}
ROWS = Packing(torch.tensor([0, 16, 32, 48], dtype=torch.int32), 16, 16)
DOCUMENTS = Packing(torch.tensor([0, 5, 16, 32, 40, 48], dtype=torch.int32), None, 16, 16)
CAUSAL = DOCUMENTS._replace(causal=True)
PLACES = torch.tensor([0, 3, 15, 16, 17, 30, 33, 40, 47])  # three in each row


def plain_logits(config: ModelConfig, w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the logits of one text, computed from the weights by name."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], None, config.norm_eps)

    activation = {"gelu": F.gelu, "relu2": lambda x: F.relu(x) ** 2}[config.activation]
    hidden = w["encoder.embeddings.tokens.weight"][ids]
    states: list[Tensor] = []
    outputs: list[Tensor] = []
    used_values: list[Tensor] = []
    last = config.num_layers - 1
    for layer in range(config.num_layers):
        prefix = f"encoder.blocks.{layer}."
        if config.unet_skips and last - layer < layer:
            hidden = hidden + w["encoder.skip_scales"][last - layer] * outputs[last - layer]
        if config.convolution and layer <= config.num_layers - config.late_layers:
            taps, radius = w[f"encoder.convolutions.{layer}.taps"], config.convolution
            padded = F.pad(hidden, (0, 0, radius, radius))
            sides = [*range(radius), *range(radius + 1, 2 * radius + 1)]
            hidden = hidden + sum(
                padded[i : i + len(ids)] * tap for i, tap in zip(sides, taps, strict=True)
            )
        states.append(hidden)
        context = states[min(layer, config.num_layers - config.late_layers)]
        weights_q, weights_kv = w[prefix + "attn.qkv.weight"].split(
            [config.hidden_size, 2 * config.hidden_size]
        )
        q = (norm(hidden, prefix + "attn_norm") @ weights_q.T).view(len(ids), config.num_heads, -1)
        kv = norm(context, prefix + "attn_norm") @ weights_kv.T
        k, v = kv.view(len(ids), 2, config.num_heads, -1).unbind(1)
        others = (
            [w["encoder.value_tokens.weight"][ids]]
            if config.value_embeddings and layer in (0, last)
            else []
        )
        others += used_values[:1] if config.value_residual else []
        if others:
            v = sum(
                c * x.view_as(v)
                for c, x in zip(w[prefix + "attn.value_scales"], [v, *others], strict=True)
            )
        used_values.append(v)
        scores = torch.einsum("qhk,lhk->hql", q, k) * config.head_size**-0.5
        if config.relative_positions:
            table = w["encoder.relative_positions.weight"]
            scores = scores + relative_terms(table, len(ids))
        mixed = torch.einsum("hql,lhk->qhk", scores.softmax(-1), v)
        if config.attention_gate:
            mixed = (
                mixed
                * torch.sigmoid(
                    norm(hidden, prefix + "attn_norm") @ w[prefix + "attn.gate.weight"].T
                )[:, :, None]
            )
        hidden = hidden + mixed.flatten(1) @ w[prefix + "attn.out.weight"].T
        inner = norm(hidden, prefix + "mlp_norm") @ w[prefix + "mlp.up.weight"].T
        if config.mlp == "glu":
            value, gate = inner.chunk(2, dim=-1)
            inner = activation(value) * gate
        else:
            inner = activation(inner)
        hidden = hidden + inner @ w[prefix + "mlp.down.weight"].T
        outputs.append(hidden)
    logits = norm(hidden, "encoder.final_norm") @ w["encoder.embeddings.tokens.weight"].T
    return (
        config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        if config.logit_softcap
        else logits
    )


def variant(part: str, config: ModelConfig = PLAIN) -> ModelConfig:
    return replace(config, **(EVERYTHING if part == "everything" else PARTS[part]))


def batch(packing: Packing) -> tuple[Tensor, Tensor, Packing, Tensor, Tensor]:
    ids = torch.randint(0, 60, (48,))
    positions = torch.cat([torch.arange(n) for n in packing.bounds_S.diff().tolist()])
    return ids, positions, packing, PLACES, ids[PLACES]


@pytest.mark.parametrize("part", [*PARTS, "everything"])
@torch.no_grad()
def test_it_computes_what_is_written_here(part: str) -> None:
    config = variant(part)
    model, ids = perturbed(MaskedLM(config), 0.2), torch.randint(0, 60, (20,))
    torch.testing.assert_close(
        own_logits(model, [ids])[0], plain_logits(config, model.state_dict(), ids)
    )


@pytest.mark.parametrize("packing", [ROWS, DOCUMENTS, CAUSAL], ids=["rows", "documents", "causal"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("part", [*PARTS, "everything"])
def test_the_last_layer_at_the_targets_is_the_same_model(
    part: str, norm_order: Any, packing: Packing
) -> None:
    """Loss and gradients; the loss is also that of the logits."""
    config, arguments, results = (
        variant(part, replace(PLAIN, norm_order=norm_order)),
        batch(packing),
        [],
    )
    for last_layer in ("all", "targets"):
        torch.manual_seed(0)
        model = perturbed(MaskedLM(config, last_layer=last_layer))
        loss, correct = model(*arguments)
        loss.backward()
        results.append([loss, correct, *(p.grad for p in model.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        results[0][0], F.cross_entropy(model.logits(*arguments[:4]), arguments[4], reduction="sum")
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("part", [*PARTS, "everything"])
@torch.no_grad()
def test_in_a_causal_pass_nothing_knows_what_comes_later(part: str, window: int | None) -> None:
    """Another token changes the states from it to the end of its document, and those alone."""
    local = replace(variant(part), local_window=window, global_every=2)
    model, (ids, positions, _, *_) = perturbed(MaskedLM(local), 0.2), batch(DOCUMENTS)
    before = model.encoder(ids, positions, CAUSAL)
    for place, end in ((0, 5), (7, 16), (31, 32), (35, 40)):
        other = ids.clone()
        other[place] = (other[place] + 1) % 60
        changed = (model.encoder(other, positions, CAUSAL) != before).any(1)
        assert (
            changed[place]
            and changed[end - 1]
            and not changed[:place].any()
            and not changed[end:].any()
        )


@pytest.mark.parametrize("part", [*PARTS, "everything"])
@torch.no_grad()
def test_packed_documents_equal_separate_ones(part: str) -> None:
    model, texts = (
        perturbed(MaskedLM(variant(part))),
        [torch.randint(0, 60, (n,)) for n in (7, 13, 28)],
    )
    for text, logits in zip(texts, own_logits(model, texts), strict=True):
        torch.testing.assert_close(logits, own_logits(model, [text])[0], atol=1e-5, rtol=1e-4)


def test_a_compiler_takes_all_of_it_as_one_graph() -> None:
    model, arguments = (
        perturbed(MaskedLM(variant("everything", replace(PLAIN, num_layers=2)))),
        batch(ROWS),
    )
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    causal = (*arguments[:2], ROWS._replace(causal=True), *arguments[3:])
    for now, graphs in (
        (arguments, 1),
        (causal, 2),
        (causal, 2),
        (arguments, 2),
    ):  # one more for a causal phase
        torch.testing.assert_close(compiled(*now), model(*now))
        assert counter.frame_count == graphs


MEMORY: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 2},
    {"checkpoint_every": 1, "checkpoint": "selective"},
    {"offload_activations": True},
    {"offload_weights": True, "offload_optimizer": True},
)


@pytest.mark.parametrize(
    "stream", [{}, {"mode": "bf16", "residual": "bf16"}], ids=["fp32", "bf16 residual"]
)
@pytest.mark.parametrize("memory", MEMORY, ids=lambda memory: next(iter(memory)))
def test_a_trick_for_memory_changes_no_bit_of_it(
    make_engine: Callable[..., Engine],
    tiny_source: Any,
    small_model: ModelConfig,
    memory: dict[str, Any],
    stream: dict[str, Any],
    train: Callable[..., list[StepResult]],
    weights: Callable[[Engine], list[Tensor]],
) -> None:
    model = variant("everything", small_model)
    engines = [make_engine(model=model, **stream, **changes) for changes in (memory, {})]
    actual, expected = (train(engine, tiny_source, range(3)) for engine in engines)
    assert [s.loss for s in actual] == [s.loss for s in expected]
    assert all(torch.equal(a, b) for a, b in zip(*map(weights, engines), strict=True))


@pytest.mark.parametrize("part", PARTS)
def test_no_stock_export_is_written_for_what_stock_classes_lack(part: str) -> None:
    for config, name in ((BERT, "bert"), (MODERN, "modernbert")):
        expected = name if part in IN_STOCK and config.mlp == variant(part, config).mlp else None
        assert stock_family(variant(part, config)) == expected
