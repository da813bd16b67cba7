"""The residual stream in 16 bits: hidden states between blocks, and the outputs of norms.

Autocast lowers matrix products only. Here the output of the embeddings is lowered, and so are all later sums of the
stream; each norm computes in fp32 and returns the type of its input. Weights, their gradients, and the norms within the
embeddings and of queries and keys stay fp32. Shapes: T tokens, D hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .encoder import Block, Encoder
from .layers import RMSNorm

Normalize = Callable[..., Tensor]

NORMALIZE: dict[type[nn.Module], Normalize] = {
    nn.LayerNorm: lambda x, eps, weight, bias=None: F.layer_norm(
        x, weight.shape, weight, bias, eps
    ),
    RMSNorm: lambda x, eps, weight: F.rms_norm(x, weight.shape, weight, eps),
}


def lower(encoder: Encoder, dtype: torch.dtype) -> None:
    """Set the type of the residual stream of `encoder`; parameters and their names do not change."""
    encoder.embeddings.register_forward_hook(
        lambda module, arguments, hidden_TD: hidden_TD.to(dtype)
    )
    norms = [encoder.final_norm]
    for module in encoder.blocks:
        block = cast(Block, module)
        norms += (block.attn_norm, block.mlp_norm)
    for norm in norms:
        if not isinstance(norm, nn.Identity):
            norm.forward = partial(_normed, norm)


def _normed(norm: nn.Module, x_TD: Tensor) -> Tensor:
    """Return `norm(x_TD)`, computed in fp32, in the type of `x_TD`."""
    normalize, eps, weights = NORMALIZE[type(norm)], norm.eps, tuple(norm.parameters())
    if torch.compiler.is_compiling():
        return normalize(x_TD.float(), eps, *weights).to(x_TD.dtype)
    normed: Tensor = _Normed.apply(normalize, eps, x_TD, *weights)
    return normed


class _Normed(torch.autograd.Function):
    """Norm of eager execution: saves the 16-bit input, where autograd would save a copy in fp32."""

    @staticmethod
    def forward(
        ctx: Any, normalize: Normalize, eps: float, x_TD: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.normalize, ctx.eps = normalize, eps
        ctx.save_for_backward(x_TD, *weights)
        return normalize(x_TD.float(), eps, *weights).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor | None, ...]:
        # Read `saved_tensors` once: activation checkpointing returns recomputed tensors a single time.
        x, *weights = [tensor.detach().float().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            normed = ctx.normalize(x, ctx.eps, *weights)
        d_x, *d_weights = torch.autograd.grad(normed, (x, *weights), d_TD.float())
        return None, None, d_x.to(d_TD.dtype), *d_weights
