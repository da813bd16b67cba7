"""Parameter groups cover everything once; every entry of the table trains; LAMB and LARS are their papers'."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cramming.config import choose
from cramming.optim.build import LOW_BIT, OPTIMIZERS, OptimConfig, parameter_groups

LR, DECAY, EPS, BETAS = 0.1, 0.05, 1e-6, (0.9, 0.98)
COMMON = {"lr": 1e-2, "lr_scale": None, "lr_width": None, "weight_decay": 0.01, "clip": None}
OWN: dict[str, dict[str, Any]] = {
    "adagrad": {"eps": 1e-8},
    "sgd": {"momentum": 0.9},
    "lars": {"momentum": 0.9},
}
ADAM = {"betas": [0.9, 0.98], "eps": 1e-8}
MUON = {**ADAM, "momentum": 0.95, "iterations": 5, "rest_lr": 1.0, "cautious_weight_decay": False}
OWN |= {"muon": MUON, "normuon": {**MUON, "row_beta": 0.95}}


def config(name: str, **changes: Any) -> OptimConfig:
    return choose(OPTIMIZERS, {"name": name, **COMMON, **OWN.get(name, ADAM), **changes}, "optim")


def build(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    return config.build(config.groups(model))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False, "positions": "scaled_sinusoidal", "mlp": "glu"},
        {
            "token_types": 0,
            "head_transform": False,
            "decoder_bias": False,
            "qk_norm": True,
            "positions": "rope",
        },
    ],
)
def test_every_parameter_is_in_exactly_one_group(
    make_model: Callable[..., Any], changes: dict[str, Any]
) -> None:
    model = make_model(**changes)
    decayed = {
        id(p): group["weight_decay"]
        for group in parameter_groups(model, 0.1)
        for p in group["params"]
    }
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == len(decayed)
    assert decayed == {id(p): 0.1 if p.ndim >= 2 else 0.0 for p in model.parameters()}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_finds_a_minimum_and_decays_only_matrices(name: str) -> None:
    if name in LOW_BIT and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs the extra lowbit")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    rate = {"sgd": 0.05, "adagrad": 0.5, "lars": 2.0}.get(name, 0.05)
    optimizer = build(model, config(name, lr=rate))
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (rate, 0.01),
        (rate, 0.0),
    ]
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


@pytest.mark.parametrize("name", ["adamw", "nadamw"])
def test_decoupled_decay_shrinks_weights_without_a_gradient(name: str) -> None:
    model = nn.Linear(4, 4)
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = build(model, config(name, lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * 0.95)
    assert torch.equal(model.bias, bias)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("adamw", {"lr": 0.0}, "optim.lr=0: "),
        ("adamw", {"betas": [0.9, 1.0]}, "betas"),
        ("adamw", {"weight_decay": -1.0}, "weight_decay"),
        ("adamw", {"clip": 0.0}, "optim.clip=0: "),
        ("adamw", {"eps": -1e-8}, "eps"),
        ("sgd", {"momentum": 1.0}, "optim.momentum=1: "),
        ("lamb", {"lr_scale": {"rule": "sqrt", "base_batch": 0}}, "base_batch=0"),
        (
            "lamb",
            {"lr_scale": {"rule": "cube", "base_batch": 9}},
            "rule=cube: ",
        ),
        ("muon", {"iterations": 6}, "iterations=6: "),
        ("muon", {"row_beta": 0.9}, "optim.row_beta: unknown setting"),
        ("sgd", {"eps": 1e-8}, "optim.eps: unknown setting"),
        ("lion", {}, "optim.name=lion: "),
    ],
)
def test_values_that_make_no_optimizer(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(name, **changes)


@pytest.mark.parametrize(("rule", "rate"), [("linear", 0.04), ("sqrt", 0.02)])
def test_the_learning_rate_follows_the_batch(rule: str, rate: float) -> None:
    scaled = config("lamb", lr_scale={"rule": rule, "base_batch": 8})
    assert scaled.peak_learning_rate(32, 64) == pytest.approx(rate)


def test_the_learning_rate_follows_the_width() -> None:
    by_width = {"base_width": 768, "power": -0.5}
    assert config("adamw").peak_learning_rate(32, 192) == config("adamw").lr
    assert config("adamw", lr_width=by_width).peak_learning_rate(32, 768) == config("adamw").lr
    both = config("adamw", lr_width=by_width, lr_scale={"rule": "linear", "base_batch": 8})
    assert both.peak_learning_rate(32, 192) == pytest.approx(2 * 4 * config("adamw").lr)


def layerwise(name: str) -> OptimConfig:
    options: dict[str, Any] = (
        {"betas": list(BETAS), "eps": EPS} if name == "lamb" else {"momentum": BETAS[0]}
    )
    return config(name, lr=LR, weight_decay=DECAY, **options)


def written_out(name: str, start: Tensor, gradients: list[Tensor]) -> Tensor:
    """The weights after one step per gradient; the paper's scaling for matrices only, as in the authors' code."""
    w, m, v = (
        start.double(),
        torch.zeros_like(start, dtype=torch.double),
        torch.zeros_like(start, dtype=torch.double),
    )
    matrix = start.ndim >= 2
    decay = DECAY if matrix else 0.0
    for t, g in enumerate((g.double() for g in gradients), 1):
        if name == "lamb":
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            u = (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS) + decay * w
            w = w - LR * (w.norm() / u.norm() if matrix else 1.0) * u
        else:
            rate = 1e-3 * w.norm() / (g.norm() + decay * w.norm()) if matrix else 1.0
            m = BETAS[0] * m + LR * rate * (g + decay * w)
            w = w - m
    return w.float()


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_layerwise_steps_are_the_papers(name: str) -> None:
    """A parameter whose first gradient comes later counts its own steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    start = [p.detach().clone() for p in model.parameters()]
    first = [0, 0, 2, 2]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(4)]
    optimizer = build(model, layerwise(name))
    for t, step in enumerate(gradients):
        for p, g, begin in zip(model.parameters(), step, first):
            p.grad = g.clone() if t >= begin else None
        optimizer.step()
    for i, p in enumerate(model.parameters()):
        expected = written_out(name, start[i], [g[i] for g in gradients[first[i] :]])
        torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_zero_matrix_still_moves(name: str) -> None:
    model = nn.Linear(3, 5)
    nn.init.zeros_(model.weight)
    optimizer = build(model, layerwise(name))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all() and model.weight.abs().sum() > 0
