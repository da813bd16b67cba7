"""Muon and NorMuon for the weight matrices of blocks and head, AdamW for all other parameters, in one optimizer.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest
orthogonal matrix, so that all directions move equally far. NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1)
then gives every neuron the same step size by a second moment per row. An update has a root mean square of 0.2, as
AdamW's have late in a run, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2).

A parameter may hold several matrices: queries, keys and values; the halves of a gated layer. Each is orthogonalized
alone; those of equal shape are stacked into batched products. Shapes: N matrices, R rows, C columns.
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
MARGIN = 1.01  # the authors' margin for rounding in 16 bits
# Polar Express (Amsel et al. 2025, arXiv 2505.16932, algorithm 1). A row is u, a, b, c: among all a x + b x^3 + c x^5
# the polynomial that brings singular values up to u, and above the lower bound of that iteration, nearest to 1. All
# five together map 0.001 .. 1 to 0.876 .. 1.124; the last four start from 0.0042, the last three from 0.017.
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
    """Yield each weight parameter of blocks and head, and the number of matrices that it holds."""
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
    """Return the parameter groups, preceded by a group of the matrices.

    Its entry `parts` is the number of matrices in each of its parameters.
    """
    parts = {p: count for p, count in matrices(model) if p.requires_grad}
    result = [
        {
            "name": "matrices",
            "params": list(parts),
            "parts": list(parts.values()),
            "weight_decay": weight_decay,
        }
    ]
    for group in groups:
        others = [p for p in group["params"] if p not in parts]
        result.append({**group, "params": others})
    return [group for group in result if group["params"]]


def orthogonalize(matrices_NRC: Tensor, iterations: int) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T.

    The last `iterations` polynomials are applied, on a GPU in bf16, which is faster. Singular values are first
    divided by a bound of the largest: (sum of s^4)^(1/4), from a Gram matrix that is needed anyway. The usual bound
    (sum of s^2)^(1/2) leaves them up to R^(1/4) times smaller, which costs most of an iteration.
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
    """Return the Frobenius norm of each matrix, [N, 1, 1], never 0."""
    return torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=1e-30)


_Shape = tuple[int, int, torch.device]  # rows, columns, device


@dataclass
class _Batch:
    """Matrices of equal shape: views of parameters, of directions to orthogonalize, and of NorMuon's row moments."""

    weights: list[Tensor] = field(default_factory=list)
    directions: list[Tensor] = field(default_factory=list)
    row_moments: list[Tensor] = field(default_factory=list)


class Muon(torch.optim.Optimizer):
    """Muon for groups with `parts`, the number of matrices in each parameter, and AdamW for the other groups.

    `row_beta` is the decay of NorMuon's second moments, or None for plain Muon. `rest_lr` is AdamW's learning rate as
    a share of Muon's. `cautious_weight_decay` applies the decay of cautious.py to both.
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
        pairs = list(zip(group["params"], group["parts"], strict=True))
        pairs = [(p, parts) for p, parts in pairs if p.grad is not None]
        lr, decay = group["lr"], group["weight_decay"]
        batches = self._batches(pairs, scale)
        if not self.cautious:
            torch._foreach_mul_([p for p, _ in pairs], 1 - lr * decay)
        for (rows, columns, _), batch in batches.items():
            update = orthogonalize(torch.stack(batch.directions), self.iterations)
            if self.row_beta is None:
                # the root mean square of an orthogonal matrix is 1 / sqrt(max(rows, columns))
                update.mul_(UPDATE_RMS * math.sqrt(max(rows, columns)))
            else:
                update = _divide_by_moments(update, batch.row_moments, self.row_beta)
                update.mul_(UPDATE_RMS * math.sqrt(rows * columns) / _norm(update))
            if self.cautious:
                weights = torch.stack(batch.weights)
                update.addcmul_(weights, agreement(weights, update), value=decay)
            torch._foreach_add_(batch.weights, update.unbind(), alpha=-lr)

    def _batches(
        self, pairs: list[tuple[Tensor, int]], scale: Tensor | None
    ) -> dict[_Shape, _Batch]:
        """Return all matrices, batched by shape, with Nesterov momentum.

        The direction is the momentum buffer as it would be after the same gradient a second time.
        """
        gradients: Any = [p.grad for p, _ in pairs]
        if scale is not None:
            gradients = torch._foreach_div(gradients, scale)
        states = [self._state_of(p) for p, _ in pairs]
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        directions: Any = torch._foreach_lerp(gradients, buffers, self.momentum)
        batches: dict[_Shape, _Batch] = defaultdict(_Batch)
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
    """Return the update with each row divided by the root of its second moment, after adding this update to the moment.

    The caller sets the norm of the result.
    """
    moment_NR1 = torch.stack(moments).lerp_(update_NRC.square().mean(-1, keepdim=True), 1 - beta)
    torch._foreach_copy_(moments, moment_NR1.unbind())
    return update_NRC / moment_NR1.sqrt().add_(1e-8)
