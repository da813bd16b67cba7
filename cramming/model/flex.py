"""FlexAttention: the block mask of a batch, and the one compiled kernel.

A token sees one interval of tokens: its sequence within the window and, in a causal pass, up to the token itself. So
the blocks follow from the ends of the intervals. `create_block_mask` would build the whole [T, T] mask, 4.3 GB at
65,536 tokens. Shapes: T tokens, H heads, K head size, M queries, Q blocks of queries, N blocks of keys, B tokens of a
block.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .packing import Layout, Packing

BLOCK = 128  # a multiple of the block sizes inside the kernel


def prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    """Return the layout of a batch in which every token is a query."""
    all_T = torch.arange(num_tokens, device=packing.bounds_S.device)
    return restrict(Layout("flex", packing, half_window), all_T, num_tokens)


def restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout:
    """Return the layout for the query subset `queries_M`."""
    # imported late: loads the compiler
    from torch.nn.attention.flex_attention import BlockMask

    bounds_S, reach = layout.packing.bounds_S.long(), layout.half_window
    after_M = torch.searchsorted(bounds_S, queries_M, right=True)
    first_M, last_M = bounds_S[after_M - 1], bounds_S[after_M]  # the interval that each query sees
    if reach is not None:
        first_M = torch.maximum(first_M, queries_M - reach)
        last_M = torch.minimum(last_M, queries_M + reach + 1)
    if layout.packing.causal:
        last_M = torch.minimum(last_M, queries_M + 1)

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_M[query] <= key) & (key < last_M[query])

    partial_QN, full_QN = _blocks(first_M, last_M, num_tokens)
    lengths = (len(queries_M), num_tokens)
    block_mask = BlockMask.from_kv_blocks(
        *_ordered(partial_QN),
        *_ordered(full_QN),
        BLOCK_SIZE=BLOCK,
        mask_mod=may_see,
        seq_lengths=lengths,
    )
    return layout._replace(block_mask=block_mask)


def _blocks(first_M: Tensor, last_M: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return two bool [Q, N]: blocks with some but not all pairs visible, and blocks with all pairs visible.

    The kernel applies the mask to blocks of the first kind only. A last block that is not filled is never of the
    second.
    """
    missing = -len(first_M) % BLOCK
    first_QB = F.pad(first_M, (0, missing), value=num_tokens).view(-1, BLOCK)
    last_QB = F.pad(last_M, (0, missing), value=0).view(-1, BLOCK)
    begins_N = torch.arange(0, num_tokens, BLOCK, device=first_M.device)
    ends_N = begins_N + BLOCK
    touched_QN = (ends_N > first_QB.amin(1, keepdim=True)) & (
        begins_N < last_QB.amax(1, keepdim=True)
    )
    full_QN = (begins_N >= first_QB.amax(1, keepdim=True)) & (
        ends_N <= last_QB.amin(1, keepdim=True)
    )
    return touched_QN & ~full_QN, full_QN


def _ordered(chosen_QN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of visible key blocks of each query block, and all key blocks with the visible ones first.

    Both are int32: [1, 1, Q] and [1, 1, Q, N].
    """
    indices_QN = chosen_QN.int().argsort(dim=1, descending=True, stable=True)
    return chosen_QN.sum(1, dtype=torch.int32)[None, None], indices_QN.int()[None, None]


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float) -> Tensor:
    """Return the attention of every query to the tokens that it sees: [T or M, H, K]."""
    assert dropout == 0.0
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
    out = flex_attention(q.is_cuda)(q, k, v, block_mask=layout.block_mask)
    return out[0].transpose(0, 1)


@functools.cache
def flex_attention(compiled: bool) -> Callable[..., Tensor]:
    """Return torch's function, compiled on a GPU, where the plain one would build the whole [T, T] score matrix."""
    from torch.nn.attention import flex_attention as module

    function: Callable[..., Tensor] = module.flex_attention
    return torch.compile(function, dynamic=False) if compiled else function
