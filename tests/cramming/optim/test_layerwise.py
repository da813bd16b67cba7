"""LAMB and LARS against their papers' algorithms, written out for one matrix and one vector."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cramming.optim import build_optimizer
from cramming.optim.build import LambConfig, LarsConfig

LR, DECAY, EPS, BETAS = 0.1, 0.05, 1e-6, (0.9, 0.98)
COMMON: dict[str, Any] = {"lr": LR, "lr_scale": None, "weight_decay": DECAY, "clip": None}
CONFIGS = {
    "lamb": LambConfig(name="lamb", betas=BETAS, eps=EPS, **COMMON),
    "lars": LarsConfig(name="lars", momentum=BETAS[0], **COMMON),
}


def written_out(name: str, start: Tensor, gradients: list[Tensor]) -> Tensor:
    """The weights after one step per gradient; the paper's scaling for matrices only, as in the authors' code."""
    w, m, v = start.double(), torch.zeros_like(start, dtype=torch.double), torch.zeros_like(start, dtype=torch.double)
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
def test_steps_are_the_papers(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    start = [p.detach().clone() for p in model.parameters()]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(4)]
    optimizer = build_optimizer(model, CONFIGS[name])
    for step in gradients:
        for p, g in zip(model.parameters(), step):
            p.grad = g.clone()
        optimizer.step()
    for i, p in enumerate(model.parameters()):
        torch.testing.assert_close(p.detach(), written_out(name, start[i], [g[i] for g in gradients]))


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_parameter_that_comes_later_counts_its_own_steps(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    start = [p.detach().clone() for p in model.parameters()]
    gradients = [torch.randn(3, 3) for _ in range(4)]
    optimizer = build_optimizer(model, CONFIGS[name])
    for step, gradient in enumerate(gradients):
        model[0].weight.grad = gradient.clone()
        model[1].weight.grad = gradient.clone() if step >= 2 else None
        optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), written_out(name, start[0], gradients))
    torch.testing.assert_close(model[1].weight.detach(), written_out(name, start[1], gradients[2:]))


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_zero_matrix_still_moves(name: str) -> None:
    model = nn.Linear(3, 5)
    nn.init.zeros_(model.weight)
    optimizer = build_optimizer(model, CONFIGS[name])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all() and model.weight.abs().sum() > 0
