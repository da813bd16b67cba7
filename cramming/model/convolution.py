"""Convolution over each token's neighbours, before a block.

Shapes: T tokens, D hidden size, N taps, X a subset of the tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Convolution(nn.Module):
    """Depthwise convolution on the residual stream: neighbours times trained weights per channel, added to each token.

    Each token receives `radius` neighbours to each side in its sequence, in a `causal` pass only those before it.
    Neighbours are thus available before attention has learned to attend to them (ConvBERT, Jiang et al. 2020; Primer,
    So et al. 2021, section 4; canon layers, Allen-Zhu 2025).
    """

    def __init__(self, radius: int, width: int) -> None:
        super().__init__()
        self.radius = radius
        self.taps = nn.Parameter(torch.empty(2 * radius, width))

    def forward(self, x_TD: Tensor, positions_T: Tensor, causal: bool) -> Tensor:
        offsets = list(range(-self.radius, 0))
        if not causal:
            offsets += range(1, self.radius + 1)
        if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            convolved: Tensor = _Convolved.apply(x_TD, self.taps, positions_T, offsets)
            return convolved
        out = x_TD
        for offset, tap_D in zip(offsets, self.taps[: len(offsets)], strict=True):
            is_neighbour_T = positions_T.roll(-offset, 0) == positions_T + offset
            out = out + x_TD.roll(-offset, 0) * (is_neighbour_T[:, None] * tap_D.to(x_TD.dtype))
        return out


class _Convolved(torch.autograd.Function):
    """The convolution of eager execution, with half as many passes over memory as separate operations.

    It saves its input alone, where autograd would save two more [T, D] per tap.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, taps_ND: Tensor, positions_T: Tensor, offsets: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x_TD, taps_ND, positions_T)
        ctx.offsets = offsets
        out = x_TD.clone()
        for offset, tap_D in zip(offsets, taps_ND[: len(offsets)].to(x_TD.dtype), strict=True):
            target, source, mask_X1 = _neighbours(positions_T, offset, x_TD.dtype)
            out[target].addcmul_(x_TD[source] * mask_X1, tap_D)
        return out

    @staticmethod
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TD, taps_ND, positions_T = ctx.saved_tensors
        d_x, d_taps = d_TD.clone(), torch.zeros_like(taps_ND)
        for tap, offset in enumerate(ctx.offsets):
            target, source, mask_X1 = _neighbours(positions_T, offset, x_TD.dtype)
            d_XD = d_TD[target] * mask_X1
            d_x[source].addcmul_(d_XD, taps_ND[tap].to(d_x.dtype))
            d_taps[tap] = d_XD.mul_(x_TD[source]).sum(0, dtype=taps_ND.dtype)
        return d_x, d_taps, None, None


def _neighbours(
    positions_T: Tensor, offset: int, dtype: torch.dtype
) -> tuple[slice, slice, Tensor]:
    """Return slices of target and source tokens, `offset` apart, and [X, 1]: 1 if both are in one sequence, else 0."""
    last = len(positions_T) - abs(offset)
    target, source = slice(0, max(0, last)), slice(abs(offset), None)
    if offset < 0:
        target, source = source, target
    is_neighbour_X = positions_T[source] == positions_T[target] + offset
    # a number: multiplication with a bool is slow on a CPU
    return target, source, is_neighbour_X.to(dtype)[:, None]
