"""Attention over packed tokens; only this module and its kernels distinguish equal rows from ragged sequences.

The rest of the model works on `[T, D]`: the tokens of all sequences, end to end. A `Packing` gives the bounds of each
sequence. `prepare` turns it into one `Layout` per window size, once per forward pass, and `attend` runs a layer on it
with a kernel of attention_kernels.py. Shapes: T tokens, H heads, K head size, M queries.
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
    """Return the kernel that `auto` stands for: the first in `KERNELS` that suits the batch.

    `padded` suits every batch.
    """
    suited = [
        name
        for name, kernel in KERNELS.items()
        if kernel.suits(packing, half_window, dtype, dropout)
    ]
    return suited[0]


def reason_against(
    kernel: str, device: torch.device, dtype: torch.dtype, dropout: float
) -> str | None:
    """Return why a kernel cannot run on this device, with the setting to change, or None if it can."""
    reason = KERNELS[kernel].reason_against(device, dtype)
    if reason:
        return refusal(kernel, reason)
    return reason_against_dropout(kernel, dropout)


def reason_against_dropout(kernel: str, dropout: float) -> str | None:
    """Return why a kernel cannot run with this dropout on any device, or None if it can."""
    if not dropout or KERNELS[kernel].has_dropout:
        return None
    return refusal(kernel, f"has no dropout, and model.attention_dropout={dropout:g}")


def refusal(kernel: str, reason: str) -> str:
    """Return the error message for a kernel that cannot run."""
    return f"attention.kernel={kernel}: {reason}. Set it to auto, sdpa or padded."


def prepare(
    kernel: str,
    packing: Packing,
    num_tokens: int,
    half_window: int | None,
    dtype: torch.dtype,
    dropout: float,
) -> Layout:
    """Return the layout for all layers of one window size.

    `dtype` is the type that queries will have, `dropout` the rate of this pass (0 in evaluation).
    """
    if kernel == "auto":
        kernel = choose(packing, half_window, dtype, dropout)
    else:
        reason = reason_against(kernel, packing.bounds_S.device, dtype, dropout)
        if reason:
            raise ValueError(reason)
    layout = KERNELS[kernel].prepare(packing, num_tokens, half_window)
    if not KERNELS[kernel].adds_mask:
        return layout
    return layout._replace(masks=tuple(additive(mask, dtype) for mask in layout.masks))


def restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    """Return the layout for the query subset `queries_M`, or None if no kernel can compute it.

    Queries ascend, and each row has equally many. SDPA takes over where the layout's own kernel cannot restrict
    queries (FlashAttention with a window); `flops_per_token` relies on that.
    """
    restricted = KERNELS[layout.kernel].restrict(layout, queries_M, num_tokens)
    restricted = restricted or restrict_rows(layout, queries_M, num_tokens)
    return None if restricted is None else restricted._replace(queries_M=queries_M)


def attend(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float = 0.0
) -> Tensor:
    """Return the attention of every query to the tokens that it sees, scaled by K^-0.5: [T or M, H, K]."""
    return KERNELS[layout.kernel].attend(q_THK, k_THK, v_THK, layout, dropout)
