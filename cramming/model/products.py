"""Attention as two matrix products and a softmax, for CPUs that multiply in bf16.

torch's fused attention gains nothing from such instructions, and on short rows its backward pass takes several times as
long in bf16 as in fp32 (docs/log.md). Here the products with values and gradients are in the inputs' type; scores are
formed and normalised in fp32, as a fused kernel does it, so that no bits are lost before the softmax. Its result is
kept for the backward pass, in the inputs' type: memory grows with the square of the row.

Shapes: B rows, H heads, M queries and L keys of a row, K head size.
"""

from typing import Any

import torch
from torch import Tensor


def attend(q_BHMK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, attn_mask: Tensor | None, dropout_p: float) -> Tensor:
    """What `F.scaled_dot_product_attention` computes, [B, H, M, K]; there is no dropout."""
    assert dropout_p == 0.0, "refused before, and `auto` does not choose it when there is any"
    mixed: Tensor = _Attention.apply(q_BHMK, k_BHLK, v_BHLK, attn_mask)
    return mixed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-1, -2))
        if mask is not None:  # not minus infinity: a padding token may see nothing at all, and must not become NaN
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(v.dtype)
        ctx.save_for_backward(q, k, v, weights)
        return torch.matmul(weights, v)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights = ctx.saved_tensors
        d_v = torch.matmul(weights.transpose(-1, -2), d_out)
        d_weights = torch.matmul(d_out, v.transpose(-1, -2))
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype) * q.shape[-1] ** -0.5
        return torch.matmul(d_scores, k), torch.matmul(d_scores.transpose(-1, -2), q), d_v, None
