"""Bounds of the sequences in a batch, and the layout that attention derives from them once per forward pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MASK_MULTIPLE = 8  # row stride of an additive mask, in elements


class Packing(NamedTuple):
    """Bounds of the sequences of a batch.

    `bounds_S` (int32, one more than sequences) holds 0, the end of each sequence, and T; it may end in repeats of T
    (empty sequences), so that its size never changes. `row_length` is L when the sequences are exactly the rows 0, L,
    2L ... T, else None. `max_length` is a bound on the longest sequence. `aligned_length` may be set when ragged
    sequences never cross a multiple of it: documents packed into rows. `causal`: no token sees a later one.

    To read numbers of the GPU the host must wait for it. Callers who know them can pass `lengths`, the lengths
    between the bounds, and `one_query_each`: a query subset has exactly one token of each sequence.
    """

    bounds_S: Tensor
    row_length: int | None
    max_length: int
    aligned_length: int | None = None
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    one_query_each: bool = False

    @property
    def whole_rows(self) -> int | None:
        """Length of the rows that no sequence crosses, None where there are none."""
        return self.row_length or self.aligned_length

    def is_cut_by(self, half_window: int | None) -> bool:
        """Return whether a window of so many tokens to each side hides any token."""
        return half_window is not None and half_window < self.max_length - 1


class Layout(NamedTuple):
    """Attention layout of a batch for the layers of one window size; `groups` are [rows, length] blocks of equal rows.

    With a query subset only the M tokens `queries_M` get an output; keys and values are those of all T tokens.
    """

    kernel: str
    packing: Packing
    half_window: int | None
    groups: tuple[tuple[int, int], ...] = ()
    masks: tuple[Tensor | None, ...] = ()
    gather_P: Tensor | None = None  # token of each padded position
    scatter_T: Tensor | None = None  # padded position of each token
    queries_M: Tensor | None = None  # the query subset, ascending; None: all tokens
    query_bounds_S: Tensor | None = None  # bounds of the sequences within the subset, for varlen
    query_gather_M: Tensor | None = None  # query of each row, where every sequence has one query
    block_mask: Any = None  # `BlockMask` of FlexAttention
    table_RH: Tensor | None = None  # terms of relative positions for each head, which `masks` hold

    def at_queries(self, x_TX: Tensor) -> Tensor:
        """Return the rows of `x_TX` that belong to the query subset."""
        return x_TX if self.queries_M is None else x_TX.index_select(0, self.queries_M)


def sequence_ids(bounds_S: Tensor, num_tokens: int) -> Tensor:
    """Return the index of each token's sequence, int64 [T]."""
    tokens_T = torch.arange(num_tokens, device=bounds_S.device, dtype=bounds_S.dtype)
    return torch.searchsorted(bounds_S, tokens_T, right=True) - 1
