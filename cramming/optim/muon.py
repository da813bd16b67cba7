"""Muon and NorMuon for the weight matrices of blocks and head, AdamW for all else, in one optimizer.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest orthogonal
matrix, so that every direction moves alike. NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1) then gives every
neuron the same step size by a second moment per row. An update has a root mean square of 0.2, as AdamW's have late
in a run, so that one learning rate can serve both (Liu et al. 2025, arXiv 2502.16982, section 2.2).

A parameter may hold several matrices: queries, keys and values; the halves of a gated layer. Each is orthogonalized
alone, and those of one shape together, in batched products. Shapes: N matrices, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cramming.model.encoder import Attention
from cramming.model.heads import HeadTransform, MaskedLM
from cramming.model.layers import MLP
from cramming.optim.cautious import CautiousAdamW, agreement

UPDATE_RMS = 0.2
MARGIN = 1.01  # the authors', for rounding in 16 bits
# Polar Express (Amsel et al. 2025, arXiv 2505.16932, algorithm 1). A row is u, a, b, c: of all a x + b x^3 + c x^5 it
# brings singular values up to u, and above the lower bound known by then, nearest to 1. All five bring what lies from
# 0.001 to 1 to 0.876 .. 1.124; the last four begin at 0.0042, the last three at 0.017.
POLAR_EXPRESS = [
    (u, a / MARGIN, b / MARGIN**3, c / MARGIN**5)
    for u, a, b, c in (
        (1.0, 8.2872120181, -23.5958865191, 17.3003873125),
        (1.9917128116, 4.1070591115, -2.9478499167, 0.5448431083),
        (1.9659657050, 3.9486908535, -2.9089021160, 0.5518191394),
        (1.8657237433, 3.3184196574, -2.4884880243, 0.5100489401),
        (1.5604174355, 2.3006520200, -1.6689039846, 0.4188073120),
    )
]


def matrices(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The weight matrices of blocks and head, and of how many matrices each is made."""
    for module in model.modules():
        if isinstance(module, Attention):
            yield from ((module.qkv.weight, 3), (module.out.weight, 1))
        elif isinstance(module, MLP):
            yield from ((module.up.weight, 2 if module.gated else 1), (module.down.weight, 1))
        elif isinstance(module, HeadTransform):
            yield module.dense.weight, 1
        elif isinstance(module, MaskedLM) and isinstance(module.transform, nn.Linear):
            yield module.transform.weight, 1


def with_matrices(
    groups: Iterable[dict[str, Any]], model: nn.Module, weight_decay: float
) -> list[dict[str, Any]]:
    """The groups, and before them one of the matrices alone; its `parts` say of how many each parameter is made."""
    parts = {p: count for p, count in matrices(model) if p.requires_grad}
    own = {
        "name": "matrices",
        "params": list(parts),
        "parts": list(parts.values()),
        "weight_decay": weight_decay,
    }
    rest = [{**group, "params": [p for p in group["params"] if p not in parts]} for group in groups]
    return [group for group in (own, *rest) if group["params"]]


def orthogonalize(matrices_NRC: Tensor, iterations: int) -> Tensor:
    """U V^T of each U S V^T, nearly: by the last `iterations` polynomials; in bf16 on a GPU, where that is fast.

    Singular values are divided by a bound of the largest first: (sum of s^4)^(1/4), from a Gram matrix that is needed
    anyway. The usual (sum of s^2)^(1/2) leaves them up to R^(1/4) times smaller, which costs most of an iteration.
    """
    is_tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if is_tall else matrices_NRC  # the smaller Gram matrix
    x = x / _norm(x)  # powers of tiny gradients would underflow
    x = x.bfloat16() if x.is_cuda else x
    gram = x @ x.mT
    polynomials = POLAR_EXPRESS[-iterations:]
    scale = polynomials[0][0] / _norm(gram).sqrt()
    x, gram = x.mul_(scale), gram.mul_(scale.square())
    for k, (_, a, b, c) in enumerate(polynomials):
        gram = torch.bmm(x, x.mT) if k else gram
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices_NRC.dtype)


def _norm(x_NRC: Tensor) -> Tensor:
    """Of each matrix, [N, 1, 1], never 0."""
    return torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=1e-30)


_Alike = tuple[int, int, torch.device]  # rows, columns, and where they are


@dataclass
class _Batch:
    """Matrices that are alike: views of parameters, of directions to orthogonalize, of NorMuon's moments of rows."""

    weights: list[Tensor] = field(default_factory=list)
    directions: list[Tensor] = field(default_factory=list)
    row_moments: list[Tensor] = field(default_factory=list)


class Muon(torch.optim.Optimizer):
    """Muon for groups that say of how many matrices each parameter is made (`parts`), AdamW for the others.

    `row_beta` is the decay of NorMuon's second moments; None is plain Muon. `rest_lr`: AdamW's learning rate as a share
    of Muon's. `cautious_weight_decay`: as in cautious.py, on both sides.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        iterations: int,
        rest_lr: float,
        cautious_weight_decay: bool,
        row_beta: float | None = None,
    ) -> None:
        adamw = CautiousAdamW if cautious_weight_decay else partial(torch.optim.AdamW, fused=True)
        self._rest = adamw([g for g in groups if "parts" not in g], lr=lr, betas=betas, eps=eps)
        self.momentum, self.iterations, self.rest_lr = momentum, iterations, rest_lr
        self.cautious, self.row_beta = cautious_weight_decay, row_beta
        super().__init__(groups, self._rest.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, divided by `grad_scale` where the engine sets it."""
        assert closure is None, "the engine computes the gradients"
        scale = getattr(self, "grad_scale", None)
        rest = [group for group in self.param_groups if "parts" not in group]
        self._rest.param_groups = [{**group, "lr": group["lr"] * self.rest_lr} for group in rest]
        self._rest.state, self._rest.grad_scale = self.state, scale  # type: ignore[attr-defined]
        self._rest.step()
        for group in self.param_groups:
            if "parts" in group:
                self._update(group, scale)

    def _update(self, group: dict[str, Any], scale: Tensor | None) -> None:
        pairs = [
            (p, parts)
            for p, parts in zip(group["params"], group["parts"], strict=True)
            if p.grad is not None
        ]
        lr, decay = group["lr"], group["weight_decay"]
        batches = self._batches(pairs, scale)
        if not self.cautious:
            torch._foreach_mul_([p for p, _ in pairs], 1 - lr * decay)
        for (rows, columns, _), batch in batches.items():
            update = orthogonalize(torch.stack(batch.directions), self.iterations)
            if self.row_beta is None:
                update.mul_(
                    UPDATE_RMS * math.sqrt(max(rows, columns))
                )  # an orthogonal matrix has 1 / this root
            else:
                update = _divide_by_moments(update, batch.row_moments, self.row_beta)
                update.mul_(UPDATE_RMS * math.sqrt(rows * columns) / _norm(update))
            if self.cautious:
                weights = torch.stack(batch.weights)
                update.addcmul_(weights, agreement(weights, update), value=decay)
            torch._foreach_add_(batch.weights, update.unbind(), alpha=-lr)

    def _batches(
        self, pairs: list[tuple[Tensor, int]], scale: Tensor | None
    ) -> dict[_Alike, _Batch]:
        """All matrices, with Nesterov's momentum: what the buffer would be after the same gradient again."""
        gradients: Any = [p.grad for p, _ in pairs]
        if scale is not None:
            gradients = torch._foreach_div(gradients, scale)
        states = [self._state_of(p) for p, _ in pairs]
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        directions: Any = torch._foreach_lerp(gradients, buffers, self.momentum)
        batches: dict[_Alike, _Batch] = defaultdict(_Batch)
        for (p, parts), direction, state in zip(pairs, directions, states):
            batch = batches[p.shape[0] // parts, p.shape[1], p.device]
            batch.weights += p.chunk(parts)
            batch.directions += direction.chunk(parts)
            if self.row_beta is not None:
                batch.row_moments += state["row_moment"].chunk(parts)
        return batches

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
            if self.row_beta is not None:
                state["row_moment"] = p.new_zeros(p.shape[0], 1)
        return state


def _divide_by_moments(update_NRC: Tensor, moments: list[Tensor], beta: float) -> Tensor:
    """Each row by the root of its second moment, which takes in this update first; the norm is set later."""
    moment_NR1 = torch.stack(moments).lerp_(update_NRC.square().mean(-1, keepdim=True), 1 - beta)
    torch._foreach_copy_(moments, moment_NR1.unbind())
    return update_NRC / moment_NR1.sqrt().add_(1e-8)
