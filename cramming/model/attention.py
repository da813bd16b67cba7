"""Attention over packed tokens; with its kernels the only code that knows whether rows are equal or ragged.

Everything above works on `[T, D]`: the tokens of all sequences, end to end. A `Packing` says which of them form a
sequence. `prepare` turns it into one `Layout` per window size, once per forward pass, and `attend` runs a layer on it
with one of the kernels of attention_kernels.py. Shapes: T tokens, H heads, K head size, M queries.
"""

import torch
from torch import Tensor

from .attention_kernels import KERNELS, additive, restrict_rows
from .packing import Layout, Packing, sequence_ids

__all__ = [
    "KERNELS",
    "Layout",
    "Packing",
    "attend",
    "choose",
    "prepare",
    "reason_against",
    "reason_against_dropout",
    "refusal",
    "restrict",
    "sequence_ids",
]


def choose(packing: Packing, half_window: int | None, dtype: torch.dtype, dropout: float) -> str:
    """The kernel that `auto` stands for: the first in the table that suits; one of them suits everything."""
    suited = [
        name
        for name, kernel in KERNELS.items()
        if kernel.suits(packing, half_window, dtype, dropout)
    ]
    return suited[0]


def reason_against(
    kernel: str, device: torch.device, dtype: torch.dtype, dropout: float
) -> str | None:
    """Why a kernel cannot run so, with what to do; None if it can."""
    reason = KERNELS[kernel].reason_against(device, dtype)
    return refusal(kernel, reason) if reason else reason_against_dropout(kernel, dropout)


def reason_against_dropout(kernel: str, dropout: float) -> str | None:
    """The same, of what holds on every device."""
    lacks = dropout and not KERNELS[kernel].has_dropout
    return (
        refusal(kernel, f"has no dropout, and model.attention_dropout={dropout:g}")
        if lacks
        else None
    )


def refusal(kernel: str, reason: str) -> str:
    return f"attention.kernel={kernel}: {reason}. Set it to auto, sdpa or padded."


def prepare(
    kernel: str,
    packing: Packing,
    num_tokens: int,
    half_window: int | None,
    dtype: torch.dtype,
    dropout: float,
) -> Layout:
    """The layout for all layers of one window. `dtype` is what queries will have, `dropout` the rate in force now."""
    if kernel == "auto":
        kernel = choose(packing, half_window, dtype, dropout)
    elif reason := reason_against(kernel, packing.bounds_S.device, dtype, dropout):
        raise ValueError(reason)
    layout = KERNELS[kernel].prepare(packing, num_tokens, half_window)
    if not KERNELS[kernel].adds_mask:
        return layout
    return layout._replace(masks=tuple(additive(mask, dtype) for mask in layout.masks))


def restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    """The layout for the query subset `queries_M`, ascending, as many in each row; None if no kernel can do that.

    Where the layout's own kernel cannot (FlashAttention with a window), SDPA can: `flops_per_token` counts on it.
    """
    restricted = KERNELS[layout.kernel].restrict(layout, queries_M, num_tokens)
    restricted = restricted or restrict_rows(layout, queries_M, num_tokens)
    return None if restricted is None else restricted._replace(queries_M=queries_M)


def attend(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float = 0.0
) -> Tensor:
    """Attention of every query to the tokens that it sees, scaled by K^-0.5: [T or M, H, K]."""
    return KERNELS[layout.kernel].attend(q_THK, k_THK, v_THK, layout, dropout)
