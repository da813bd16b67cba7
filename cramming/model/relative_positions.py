"""Trained terms of attention scores for each distance (Raffel et al. 2020, T5, section 2.1), one table for all layers.

Shapes: R rows of the table, H heads, B rows of tokens, Q queries, L keys of a row.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .packing import MASK_MULTIPLE, Layout

MAX_DISTANCE = 128  # of tokens; all pairs that are farther apart share a row of each direction


def buckets(distances: Tensor, num_rows: int) -> Tensor:
    """Return the row of the table for each distance from a query to a key.

    The second half of the rows is for keys later than the query. In each half the first half of the rows has one
    distance each; the distances of the others grow by a factor.
    """
    per_direction = num_rows // 2
    exact = per_direction // 2
    lengths = distances.abs()
    # the order of operations of transformers, where a rounded logarithm decides about a row
    logarithms = torch.log(lengths.clamp(min=exact).float() / exact)
    steps = logarithms / math.log(MAX_DISTANCE / exact) * (per_direction - exact)
    far = (exact + steps.long()).clamp(max=per_direction - 1)
    rows = torch.where(lengths < exact, lengths, far)
    return rows + per_direction * (distances > 0)


def biased(
    mask: Tensor | None, table_RH: Tensor, places_BQ: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the additive mask [B, H, Q, L] of queries at these places in their rows.

    It holds the terms of the table, and minus infinity where the boolean `mask` is false. The terms are rounded to
    `dtype` behind the table, whose gradient is a sum over L^2 pairs: in bf16 a CPU loses most of it.
    """
    keys_L = torch.arange(length, device=places_BQ.device)
    rows_BQL = buckets(keys_L - places_BQ[:, :, None], table_RH.shape[0])
    bias = F.embedding(rows_BQL, table_RH).permute(0, 3, 1, 2)
    bias = bias.to(dtype).contiguous()  # a GPU's fused attention takes no other masks
    return bias if mask is None else bias.masked_fill(~mask, float("-inf"))


def with_bias(layout: Layout, table_RH: Tensor, dtype: torch.dtype) -> Layout:
    """Return the layout of all tokens with the table's terms in its masks, which are boolean or None before.

    Scores will have the type `dtype`.
    """
    masks = []
    for (_, length), mask in zip(layout.groups, layout.masks):
        places_L = torch.arange(length, device=table_RH.device)
        if layout.packing.causal and mask is None:
            mask = places_L <= places_L[:, None]
        # as in `attention_kernels.additive`: rows that begin where a GPU's kernels want it
        padding = -length % MASK_MULTIPLE
        mask = None if mask is None else F.pad(mask, (0, padding))
        bias = biased(mask, table_RH, places_L[None], length + padding, dtype)
        masks.append(bias[..., :length])
    return layout._replace(masks=tuple(masks), table_RH=table_RH)
