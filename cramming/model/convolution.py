"""A convolution over each token's neighbours, before a block.

Shapes: T tokens, D hidden size, N taps, X some tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Convolution(nn.Module):
    """Adds to each token its neighbours, `radius` to each side in its sequence, times trained weights per channel; in
    a `causal` pass only those before it.

    A depthwise convolution on the residual stream: what stands beside a token is there before attention has learned to
    look for it (ConvBERT, Jiang et al. 2020; Primer, So et al. 2021, section 4; canon layers, Allen-Zhu 2025).
    """

    def __init__(self, radius: int, width: int) -> None:
        super().__init__()
        self.radius = radius
        self.taps = nn.Parameter(torch.empty(2 * radius, width))

    def forward(self, x_TD: Tensor, positions_T: Tensor, causal: bool) -> Tensor:
        offsets = [*range(-self.radius, 0), *([] if causal else range(1, self.radius + 1))]
        if not torch.compiler.is_compiling():
            convolved: Tensor = _Convolved.apply(x_TD, self.taps, positions_T, offsets)
            return convolved
        out = x_TD
        for offset, tap_D in zip(offsets, self.taps[: len(offsets)], strict=True):
            is_neighbour_T = positions_T.roll(-offset) == positions_T + offset
            out = out + x_TD.roll(-offset, 0) * (is_neighbour_T[:, None] * tap_D.to(x_TD.dtype))
        return out


class _Convolved(torch.autograd.Function):
    """Eager execution's convolution: half as many passes over memory. It keeps its input alone, where autograd would
    keep two more [T, D] for each tap."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, taps_ND: Tensor, positions_T: Tensor, offsets: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x_TD, taps_ND, positions_T)
        ctx.offsets = offsets
        out = x_TD.clone()
        for offset, tap_D in zip(offsets, taps_ND[: len(offsets)].to(x_TD.dtype), strict=True):
            here, there, mask_X1 = _neighbours(positions_T, offset, x_TD.dtype)
            out[here].addcmul_(x_TD[there] * mask_X1, tap_D)
        return out

    @staticmethod
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TD, taps_ND, positions_T = ctx.saved_tensors
        d_x, d_taps = d_TD.clone(), torch.zeros_like(taps_ND)
        for tap, offset in enumerate(ctx.offsets):
            here, there, mask_X1 = _neighbours(positions_T, offset, x_TD.dtype)
            d_XD = d_TD[here] * mask_X1
            d_x[there].addcmul_(d_XD, taps_ND[tap].to(d_x.dtype))
            d_taps[tap] = d_XD.mul_(x_TD[there]).sum(0, dtype=taps_ND.dtype)
        return d_x, d_taps, None, None


def _neighbours(
    positions_T: Tensor, offset: int, dtype: torch.dtype
) -> tuple[slice, slice, Tensor]:
    """Tokens, those `offset` places further on, and [X, 1]: 1 where both are of one sequence, else 0."""
    last = len(positions_T) - abs(offset)
    places = slice(0, max(0, last)), slice(abs(offset), None)
    here, there = places if offset > 0 else places[::-1]
    is_neighbour_X = positions_T[there] == positions_T[here] + offset
    return (
        here,
        there,
        is_neighbour_X.to(dtype)[:, None],
    )  # a number: a bool is slow to multiply with on a CPU
