"""Parameter groups cover everything once; every entry of the table trains."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from cramming.optim import OptimConfig, build_optimizer, parameter_groups
from cramming.optim.build import OPTIMIZERS

LOW_BIT = ("adamw8bit", "adamw4bit")
BASE = OptimConfig(
    "adamw", lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, clip=None, scale_rule="none", base_batch=0
)
MOMENTUM_ONLY = {"betas": (0.9, 0.0), "eps": 0.0}
UNUSED = {"adagrad": {"betas": (0.0, 0.0)}, "sgd": MOMENTUM_ONLY, "lars": MOMENTUM_ONLY}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"norm_bias": False, "attention_bias": False, "mlp_bias": False},
        {"positions": "scaled_sinusoidal", "mlp": "glu"},
        {"token_types": 0, "head_transform": False, "decoder_bias": False},
        {"qk_norm": True, "positions": "rope", "norm": "rmsnorm", "norm_bias": False},
    ],
)
def test_every_parameter_is_in_exactly_one_group(make_model: Callable[..., Any], changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    groups = parameter_groups(model, 0.1)
    found = [id(p) for group in groups for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    assert len(found) == len(set(found))
    decayed = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert decayed[id(p)] == (0.1 if p.ndim >= 2 else 0.0), name


def test_the_table_has_every_name_of_the_settings() -> None:
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(OptimConfig)["name"]))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_finds_a_minimum_and_decays_only_matrices(name: str) -> None:
    if name in LOW_BIT and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs the extra lowbit")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    rate = {"sgd": 0.05, "adagrad": 0.5, "lars": 2.0}.get(name, 0.05)
    config = dataclasses.replace(BASE, name=name, lr=rate, weight_decay=0.01, **UNUSED.get(name, {}))  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(rate, 0.01), (rate, 0.0)]
    x = torch.randn(64, 4)
    y = x @ torch.randn(4, 4) + 1.0
    losses = []
    for _ in range(200):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def test_decoupled_decay_shrinks_weights_without_a_gradient() -> None:
    for name in ("adamw", "nadamw"):
        model = nn.Linear(4, 4)
        before, bias = model.weight.detach().clone(), model.bias.detach().clone()
        optimizer = build_optimizer(model, dataclasses.replace(BASE, name=name, lr=0.1, weight_decay=0.5))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), before * 0.95)
        assert torch.equal(model.bias, bias)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"clip": 0.0}, "null"),
        ({"eps": -1e-8}, "eps"),
        ({"scale_rule": "sqrt"}, "base_batch=0: scale_rule=sqrt needs .*optim.base_batch=256"),
        ({"base_batch": 256}, "base_batch=256 does nothing with scale_rule=none; set optim.base_batch=0"),
        ({"name": "sgd", "betas": (0.9, 0.0)}, "eps=1e-08 does nothing with name=sgd; choose it by optim=sgd"),
        ({"name": "lars", "eps": 0.0}, r"uses 1 of them; choose it by optim=lars.* optim\.betas=\[0.9,0.0\]"),
        ({"name": "adagrad"}, r"betas=\[0.9, 0.98\]: name=adagrad uses 0 of them; .*optim\.betas=\[0.0,0.0\]"),
    ],
)
def test_values_that_make_no_optimizer(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        dataclasses.replace(BASE, **changes)
