"""Every YAML in conf/model builds and trains one step; counts and costs follow from the configuration alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from cramming.config import UserError, build, config_folder
from cramming.model.attention import Packing
from cramming.model.config import LastLayer, ModelConfig, count_parameters, flops_per_token
from cramming.model.heads import MaskedLM

from .conftest import PARTS

FILES = sorted(path.stem for path in (config_folder() / "model").glob("*.yaml"))


def node(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(
        (config_folder() / "model" / f"{name}.yaml").read_text()
    )
    for base in settings.pop("defaults", []):
        if base != "_self_":
            settings = node(base) | settings
    return settings


def read(name: str) -> ModelConfig:
    return build(ModelConfig, {**node(name), "vocab_size": 512}, "model")


SMALL = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=3, num_heads=2, intermediate_size=24, max_length=32
)
VARIANTS: list[dict[str, Any]] = [
    {},
    {
        "norm_order": "pre",
        "norm": "rmsnorm",
        "norm_bias": False,
        "final_norm": True,
        "first_attn_norm": False,
    },
    {
        "positions": "rope",
        "local_window": 8,
        "global_every": 2,
        "qk_norm": True,
        "mlp": "glu",
        "activation": "silu",
    },
    {
        "positions": "scaled_sinusoidal",
        "token_types": 0,
        "head_transform": False,
        "decoder_bias": False,
    },
    {
        "positions": "none",
        "tie_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "head_bias": False,
    },
    {
        "embedding_norm": False,
        "norm_bias": False,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation": "gelu_tanh",
    },
    {"init": "truncated", "activation": "relu"},
    {"init": "depth_scaled"},
    {"init": "small"},
    *PARTS.values(),
]
FLOPS = [*VARIANTS[:5], *PARTS.values()]


def train_step(config: ModelConfig, rows: int = 2, length: int = 16) -> MaskedLM:
    """One forward and backward pass: the loss is that of a fresh model, and every parameter gets a finite gradient."""
    model = MaskedLM(config).train()
    tokens = rows * length
    ids = torch.randint(0, config.vocab_size or 0, (tokens,))
    packing = Packing(torch.arange(0, tokens + 1, length, dtype=torch.int32), length, length)
    targets = torch.arange(0, tokens - 1, 4)
    # other targets than what stands there: a tied decoder without a transform begins by predicting its own input
    loss, correct = model(ids, torch.arange(tokens) % length, packing, targets, ids[targets + 1])
    loss.backward()
    assert 0 <= int(correct) <= len(targets)
    assert 0.5 < loss.item() / len(targets) / torch.tensor(config.vocab_size or 0).log() < 2.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    return model


def test_the_named_models_are_there() -> None:
    assert set(FILES) >= {"bert-base", "bert-large", "crammed-bert", "modern", "small", "tiny"}


@pytest.mark.parametrize("name", FILES)
def test_yaml_model_trains_one_step(name: str) -> None:
    train_step(replace(read(name), num_layers=3))


@pytest.mark.parametrize("name", FILES)
def test_yaml_model_has_the_parameters_that_are_counted(name: str) -> None:
    config = read(name)
    with torch.device("meta"):
        model = MaskedLM(config)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("changes", VARIANTS)
def test_choices_combine(changes: dict[str, Any]) -> None:
    config = replace(SMALL, **changes)
    model = train_step(config)
    holders = ("encoder.embeddings.", "encoder.value_tokens.", "encoder.relative_positions.")
    tables = sum(
        p.numel() for n, p in model.named_parameters() if n.startswith(holders) and p.ndim == 2
    )
    total = sum(p.numel() for p in model.parameters())
    assert count_parameters(config) == (total, total - tables)


def test_published_sizes() -> None:
    """BertForMaskedLM at 30522 entries has 109.5M parameters, ModernBERT-base at 50368 has 149.7M; small is 10-20M."""
    assert count_parameters(replace(read("bert-base"), vocab_size=30522)).total == 109_514_298
    assert count_parameters(replace(read("modern"), vocab_size=50368)).total == 149_655_232
    assert 10e6 < count_parameters(replace(read("small"), vocab_size=16384)).total < 20e6


@pytest.mark.parametrize("changes", FLOPS)
@pytest.mark.parametrize("length", [8, 32])
@pytest.mark.parametrize("last_layer", ["all", "targets"])
def test_flops_are_those_of_the_matrix_products(
    changes: dict[str, Any], length: int, last_layer: LastLayer
) -> None:
    """FlopCounterMode on the kernel whose attention is matrix products, in one row.

    In bf16, because the counter does not know the in-place product that sums the decoder's gradient in fp32.
    """
    config = replace(SMALL, **{**changes, "local_window": None})
    model = MaskedLM(config, "products", last_layer)
    ids = torch.randint(0, 64, (length,))
    packing = Packing(torch.tensor([0, length], dtype=torch.int32), length, length)
    targets = torch.arange(0, length, 4)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        model(ids, torch.arange(length), packing, targets, ids[targets])[0].backward()
    expected = length * flops_per_token(config, length, 0.25, last_layer)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("length", [4, 9, 40])
def test_flops_count_what_a_window_leaves(length: int) -> None:
    local = replace(SMALL, positions="rope", local_window=8, global_every=2)
    place = torch.arange(length)
    seen = ((place[:, None] - place).abs() <= 4).float().sum(1).mean().item()
    saved = flops_per_token(replace(local, local_window=None), length, 0.15) - flops_per_token(
        local, length, 0.15
    )
    assert saved == pytest.approx(3 * 4 * local.hidden_size * (length - seen), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"hidden_size": 100, "num_heads": 12},
            "hidden_size=100",
        ),
        ({"positions": "alibi"}, "positions=alibi"),
        ({"layers": 3}, "layers: unknown setting"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"norm": "rmsnorm"}, "norm_bias=true"),
        ({"late_layers": 4, "num_layers": 3}, "late_layers=4"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"local_window": 1}, "local_window=1"),
        ({"convolution": -1}, "convolution=-1"),
        ({"relative_positions": 33}, "relative_positions=33"),
        ({"relative_positions": 2}, "relative_positions=2"),
        (
            {"value_embeddings": 2, "num_layers": 3},
            "value_embeddings=2",
        ),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
        ({"positions": "rope", "hidden_size": 12, "num_heads": 4}, "positions=rope"),
    ],
)
def test_impossible_choices_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.{named}"):
        build(ModelConfig, changes, "model")
