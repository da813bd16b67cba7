"""FlexAttention: which blocks of keys a block of queries touches, and the one compiled kernel.

A token sees one interval of tokens: its sequence, cut by the window. So the blocks that a block of queries touches, and
those that all of its queries see whole, follow from where these intervals begin and end. `create_block_mask` would find
the same by way of the whole [T, T] mask, which is 4.3 GB at 65,536 tokens.

Shapes: T tokens, H heads, K head size, M tokens that ask, Q blocks of queries, N blocks of keys, B tokens of a block.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cramming.config import UserError
from cramming.model.packing import Layout, Packing, refuse_dropout

BLOCK = 128  # what the kernel's own blocks divide


def refuse(device: torch.device, dtype: torch.dtype, dropout: float) -> None:
    """UserError where FlexAttention cannot run."""
    if device.type != "cuda" and torch.is_grad_enabled():
        raise UserError("attention.kernel=flex: trains on CUDA only; set it to auto, sdpa or padded")
    refuse_dropout("flex", dropout)


def prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    """The layout in which every token asks."""
    everyone_T = torch.arange(num_tokens, device=packing.bounds_S.device)
    return restrict(Layout("flex", packing, half_window), everyone_T, num_tokens)


def restrict(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout:
    """The layout in which only these tokens ask; they ascend."""
    from torch.nn.attention.flex_attention import BlockMask  # imported late: brings the compiler along

    first_M, last_M = _seen(layout, asking_M)

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_M[query] <= key) & (key < last_M[query])

    partial_QN, full_QN = _blocks(first_M, last_M, num_tokens)
    block_mask = BlockMask.from_kv_blocks(
        *_ordered(partial_QN),
        *_ordered(full_QN),
        BLOCK_SIZE=BLOCK,
        mask_mod=may_see,
        seq_lengths=(len(asking_M), num_tokens),
    )
    return layout._replace(block_mask=block_mask)


def _seen(layout: Layout, asking_M: Tensor) -> tuple[Tensor, Tensor]:
    """The first token that each asking one sees, and the one after the last."""
    bounds_S, reach = layout.packing.bounds_S.long(), layout.half_window
    after_M = torch.searchsorted(bounds_S, asking_M, right=True)
    first_M, last_M = bounds_S[after_M - 1], bounds_S[after_M]
    if reach is None:
        return first_M, last_M
    return torch.maximum(first_M, asking_M - reach), torch.minimum(last_M, asking_M + reach + 1)


def _blocks(first_M: Tensor, last_M: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Where some query of a block may see some key of a block but not each all, and where each sees all: bool [Q, N].

    The kernel applies the mask to the first kind only. A block that is not filled, of either, is never of the second.
    """
    missing = -len(first_M) % BLOCK
    first_QB = F.pad(first_M, (0, missing), value=num_tokens).view(-1, BLOCK)
    last_QB = F.pad(last_M, (0, missing), value=0).view(-1, BLOCK)
    begins_N = torch.arange(0, num_tokens, BLOCK, device=first_M.device)
    ends_N = begins_N + BLOCK
    touched_QN = (ends_N > first_QB.amin(1, keepdim=True)) & (begins_N < last_QB.amax(1, keepdim=True))
    full_QN = (begins_N >= first_QB.amax(1, keepdim=True)) & (ends_N <= last_QB.amin(1, keepdim=True))
    return touched_QN & ~full_QN, full_QN


def _ordered(chosen_QN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and the indices with these first: int32, 1 x 1 x Q (x N)."""
    indices_QN = chosen_QN.int().argsort(dim=1, descending=True, stable=True)
    return chosen_QN.sum(1, dtype=torch.int32)[None, None], indices_QN.int()[None, None]


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float) -> Tensor:
    """One layer, compiled on a GPU."""
    assert dropout == 0.0, "refused before"
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
    attention = _compiled() if q.is_cuda else _uncompiled()
    out = attention(q, k, v, block_mask=layout.block_mask)
    return out[0].transpose(0, 1)


def _uncompiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """Uncompiled it would build the whole [T, T] score matrix."""
    return torch.compile(_uncompiled(), dynamic=False)
