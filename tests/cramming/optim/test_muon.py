"""Muon and NorMuon treat each matrix alone, whatever it is stored and batched with; decay can be cautious."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cramming import checkpoint
from cramming.budget import Work
from cramming.engine import Engine, build_engine
from cramming.hooks import StepResult
from cramming.optim.cautious import CautiousAdamW
from cramming.optim.muon import UPDATE_RMS, Muon, orthogonalize
from cramming.parallel.mesh import Mesh
from cramming.plan.memory import Simulation
from cramming.recipe import Config, Hardware

LR, DECAY, BETAS, MOMENTUM, ROW_BETA = 0.1, 0.05, (0.9, 0.98), 0.95, 0.9
Make = Callable[..., Engine]


def polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def polynomials(matrix: Tensor) -> Tensor:
    """Return `orthogonalize` of a single matrix, in 5 iterations."""
    return orthogonalize(matrix[None], 5)[0]


def muon(groups: list[dict[str, Any]], **changes: Any) -> Muon:
    plain: dict[str, Any] = {
        "momentum": MOMENTUM,
        "iterations": 5,
        "rest_lr": 0.5,
        "cautious_weight_decay": False,
    }
    bias = {"name": "no_decay", "params": [nn.Parameter(torch.zeros(1))], "weight_decay": 0.0}
    return Muon([*groups, bias], lr=LR, betas=BETAS, eps=1e-8, **(plain | changes))


@pytest.mark.parametrize(("iterations", "smallest"), [(5, 1e-3), (4, 4.2e-3), (3, 0.017)])
@pytest.mark.parametrize("shape", [(32, 32), (24, 40), (40, 24)])
def test_singular_values_come_near_to_one_and_directions_stay(
    iterations: int, smallest: float, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    values = (
        torch.logspace(0, torch.tensor(smallest).log10(), min(shape)) ** 0.7
    )  # the bound is above the largest
    scales = torch.tensor([1e-12, 1.0, 1e6])[:, None, None]
    orthogonal = orthogonalize(scales * (left * values) @ right, iterations)
    assert (torch.linalg.svdvals(orthogonal) - 1).abs().max() < 0.15
    inner = left.mT @ orthogonal @ right.mT
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 0.01
    assert torch.equal(orthogonalize(torch.zeros(2, *shape), iterations), torch.zeros(2, *shape))


def test_the_direction_is_nearer_to_the_polar_factor_than_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(48, 32)) for _ in range(2))
    ours.grad = theirs.grad = torch.randn(48, 32)
    muon([{"name": "matrices", "params": [ours], "parts": [1], "weight_decay": 0.0}]).step()
    torch.optim.Muon([theirs], lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    exact = -polar(ours.grad)
    near, far = (
        nn.functional.cosine_similarity(p.detach().flatten(), exact.flatten(), dim=0)
        for p in (ours, theirs)
    )
    assert near > 0.99 > far > 0.95
    torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=0.2, atol=0.0)


def written_out(
    start: Tensor, gradients: list[Tensor], row_beta: float | None, cautious: bool
) -> Tensor:
    """The weights of one matrix after a step per gradient."""
    w, m, v = start, torch.zeros_like(start), torch.zeros(len(start), 1)
    for g in gradients:
        m = MOMENTUM * m + (1 - MOMENTUM) * g
        u = polynomials(MOMENTUM * m + (1 - MOMENTUM) * g)
        if row_beta is None:
            u = u * max(u.shape) ** 0.5
        else:
            v = row_beta * v + (1 - row_beta) * u.square().mean(1, keepdim=True)
            u = u / v.sqrt()
            u = u / u.square().mean().sqrt()
        u = UPDATE_RMS * u
        w = w - LR * (u + DECAY * torch.where(w * u >= 0, w, 0.0 if cautious else w))
    return w


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("row_beta", [None, ROW_BETA])
def test_stored_together_and_batched_equals_each_matrix_alone(
    row_beta: float | None, cautious: bool
) -> None:
    """Parameters of three, one, and two matrices; the gradient comes in double and is clipped to half of that."""
    torch.manual_seed(0)
    parts, shapes = [3, 1, 2, 1], [(8, 8), (8, 8), (12, 8), (8, 12)]
    parameters = [nn.Parameter(torch.randn(n * r, c)) for n, (r, c) in zip(parts, shapes)]
    start = [piece.detach().clone() for p, n in zip(parameters, parts) for piece in p.chunk(n)]
    group = {"name": "matrices", "params": parameters, "parts": parts, "weight_decay": DECAY}
    optimizer = muon([group], row_beta=row_beta, cautious_weight_decay=cautious)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    steps = []
    for _ in range(4):
        gradients = [torch.randn_like(p) for p in parameters]
        for p, g in zip(parameters, gradients):
            p.grad = 2 * g
        optimizer.step()
        steps.append([piece for g, n in zip(gradients, parts) for piece in g.chunk(n)])
    matrices = [piece.detach() for p, n in zip(parameters, parts) for piece in p.chunk(n)]
    for i, weights in enumerate(matrices):
        expected = written_out(start[i], [step[i] for step in steps], row_beta, cautious)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-4)


def test_matrices_of_one_shape_on_two_devices_are_updated_apart() -> None:
    """Offloaded weights are such a case: a head's matrix stays on the GPU."""
    matrices = [nn.Parameter(torch.randn(4, 4, device=device)) for device in ("cpu", "meta")]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    group = {"params": matrices, "parts": [1, 1], "weight_decay": 0.1}
    before = matrices[0].detach().clone()
    muon([group], momentum=0.9).step()
    assert not torch.equal(matrices[0], before)


@pytest.mark.parametrize(
    "changes", [{}, {"mlp": "glu", "tie_embeddings": False, "head_transform": False}]
)
def test_every_parameter_is_in_one_group_and_matrices_of_blocks_are_split(
    make_engine: Make, small_model: Any, changes: dict[str, Any]
) -> None:
    engine = make_engine(model=replace(small_model, **changes), optim={"name": "muon"})
    groups = engine.optimizer.param_groups
    names = {p: name for name, p in engine.model.named_parameters()}
    assert sorted(names[p] for group in groups for p in group["params"]) == sorted(names.values())
    assert all(
        group["weight_decay"] == 0 or p.ndim == 2 for group in groups for p in group["params"]
    )
    parts_by_name = {names[p]: parts for p, parts in zip(groups[0]["params"], groups[0]["parts"])}
    in_blocks = {
        name for name, p in engine.model.named_parameters() if ".blocks." in name and p.ndim == 2
    }
    assert parts_by_name.keys() == in_blocks | {
        name for name in names.values() if name == "transform.dense.weight"
    }
    assert {parts for name, parts in parts_by_name.items() if name.endswith("qkv.weight")} == {3}
    assert {parts for name, parts in parts_by_name.items() if name.endswith("up.weight")} == {
        2 if changes else 1
    }


@pytest.mark.parametrize(
    "memory", [{}, {"offload_optimizer": True, "offload_weights": True}], ids=["", "offload"]
)
@pytest.mark.parametrize("name", ["muon", "normuon", "adamw-cwd"])
def test_resumed_equals_unbroken(
    make_engine: Make,
    tiny_source: Any,
    tmp_path: Path,
    train: Callable[..., list[StepResult]],
    name: str,
    memory: dict[str, Any],
) -> None:
    optim = {"name": name, "lr": 3e-3, "weight_decay": 0.1, "clip": 0.5}
    if name == "normuon":
        optim |= {"cautious_weight_decay": True, "rest_lr": 0.5}
    unbroken, first, second = (make_engine(seed, optim=optim, **memory) for seed in (0, 0, 1))
    train(unbroken, tiny_source, range(5))
    train(first, tiny_source, range(3))
    saved = checkpoint.save(tmp_path, first, Work(steps=3), lambda _: None)
    checkpoint.load(saved, second)
    train(second, tiny_source, range(3, 5))
    for a, b in zip(unbroken.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "moments"), [("muon", 0), ("normuon", 1)])
def test_the_plan_counts_one_momentum_for_matrices(
    compose: Callable[..., dict[str, Any]], small_model: Any, name: str, moments: int
) -> None:
    """Two moments and a counter for the rest; NorMuon's moments are one per row."""
    config = Config.of(compose(f"optim={name}", "train.sequence_length=32")).replace(
        model=small_model
    )
    cpu = torch.device("cpu")
    matrices, *others = build_engine(config, Mesh.solo(cpu), cpu).optimizer.param_groups
    rest = [p for group in others for p in group["params"]]
    muon_numbers = sum(p.numel() + moments * len(p) for p in matrices["params"])
    numbers = muon_numbers + 2 * sum(p.numel() for p in rest) + len(rest)
    simulation = Simulation(config, Hardware("cpu", "a device", "fp32"))
    assert simulation.state()["optimizer"] == 4 * numbers


def test_cautious_adamw_decays_only_where_the_update_shrinks() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(6, 5))
    optimizer = CautiousAdamW([p], lr=LR, betas=BETAS, eps=1e-8, weight_decay=DECAY)
    w, m, v = p.detach().clone(), torch.zeros(6, 5), torch.zeros(6, 5)
    for t in range(1, 5):
        p.grad = torch.randn(6, 5)
        m, v = (
            BETAS[0] * m + (1 - BETAS[0]) * p.grad,
            BETAS[1] * v + (1 - BETAS[1]) * p.grad.square(),
        )
        u = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + 1e-8)
        w = w - LR * (u + DECAY * torch.where(u * w >= 0, w, 0.0))
        optimizer.step()
        torch.testing.assert_close(p.detach(), w)
    assert optimizer.param_groups[0]["weight_decay"] == DECAY


@pytest.mark.parametrize("make", [muon, lambda groups: CautiousAdamW(groups[0]["params"], lr=LR)])
def test_a_step_that_overflowed_in_fp16_changes_nothing(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = make([{"name": "matrices", "params": [p], "parts": [1], "weight_decay": DECAY}])
    before, scaler = p.detach().clone(), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    p.grad = torch.full_like(p, torch.inf)
    scaler.step(optimizer)
    assert torch.equal(p, before)
