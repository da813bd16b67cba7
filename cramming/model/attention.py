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
    "restrict",
    "sequence_ids",
]


def choose(
    packing: Packing,
    half_window: int | None,
    dtype: torch.dtype,
    dropout: float,
    relative_positions: int = 0,
) -> str:
    """Return the kernel that `auto` stands for: the first in `KERNELS` that suits the batch and the model.

    `padded` suits all.
    """
    suited = [
        name
        for name, kernel in KERNELS.items()
        if (kernel.takes_bias or not relative_positions)
        and kernel.suits(packing, half_window, dtype, dropout)
    ]
    return suited[0]


def reason_against(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    dropout: float,
    relative_positions: int = 0,
) -> str | None:
    """Return why a kernel cannot run a model on this device, with the setting to change, or None if it can."""
    reason = KERNELS[kernel].reason_against(device, dtype)
    if not reason and dropout and not KERNELS[kernel].has_dropout:
        reason = f"has no dropout, and model.attention_dropout={dropout:g}"
    if not reason and relative_positions and not KERNELS[kernel].takes_bias:
        reason = f"adds nothing to scores, and model.relative_positions={relative_positions}"
    if not reason:
        return None
    return f"attention.kernel={kernel}: {reason}. Set it to auto, sdpa or padded."


def prepare(
    kernel: str,
    packing: Packing,
    num_tokens: int,
    half_window: int | None,
    dtype: torch.dtype,
    dropout: float,
    table_RH: Tensor | None = None,
) -> Layout:
    """Return the layout for all layers of one window size.

    `dtype` is the type that queries will have, `dropout` the rate of this pass (0 in evaluation), `table_RH` that of
    relative positions.
    """
    relative_positions = 0 if table_RH is None else len(table_RH)
    if kernel == "auto":
        kernel = choose(packing, half_window, dtype, dropout, relative_positions)
    else:
        device = packing.bounds_S.device
        reason = reason_against(kernel, device, dtype, dropout, relative_positions)
        if reason:
            raise ValueError(reason)
    layout = KERNELS[kernel].prepare(packing, num_tokens, half_window)
    if table_RH is not None:
        from .relative_positions import with_bias  # imported late: most runs have none

        return with_bias(layout, table_RH, dtype)
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
