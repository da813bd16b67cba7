"""The attention kernels, in one table at the end: a new kernel touches this file only.

A `Kernel` is a few functions: `prepare` makes the layout of a batch, `attend` runs one layer on it, `restrict` makes
the layout of a query subset, `suits` says whether `auto` may choose it, and `reason_against` why it cannot run.

Shapes: T tokens, S sequences, H heads, K head size, B rows, L row length, P padded tokens, M queries.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .packing import MASK_MULTIPLE, Layout, Packing, sequence_ids

FLASH_CAPABILITY = (8, 0)  # Ampere; a 2080 Ti and a T4 are 7.5, a V100 is 7.0
FLASH_TORCH = (2, 11)  # the first with the arguments of `varlen_attn` that are used here
FLASH_TYPES = (torch.bfloat16, torch.float16)
FLASH_MULTIPLE = 8  # head sizes that `varlen_attn` accepts are multiples of it; SDPA pads by itself
PRODUCTS_LENGTH = (
    512  # longest row that `auto` gives to `products`; at 1024 SDPA is faster (docs/log.md)
)
# Fixed cost of a group of sequences of similar length, as the number of token pairs that could be computed in that time
# (docs/log.md). The number for a GPU is estimated from 20 kernel launches, not measured.
GROUP_PAIRS = {("padded", "cpu"): 2**12, ("padded", "cuda"): 2**18, ("products", "cpu"): 2**14}


class Kernel(NamedTuple):
    """One implementation of attention; `auto` takes the first kernel of the table whose `suits` returns true."""

    prepare: Callable[[Packing, int, int | None], Layout]
    attend: Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
    restrict: Callable[[Layout, Tensor, int], Layout | None]
    suits: Callable[[Packing, int | None, torch.dtype, float], bool] = lambda *_: False
    reason_against: Callable[[torch.device, torch.dtype], str | None] = lambda *_: None
    has_dropout: bool = False
    adds_mask: bool = False  # whether `attend` needs the boolean masks of `prepare` as 0 and -inf
    takes_bias: bool = False  # whether masks may hold other numbers: those of relative positions


def _band(length: int, half_window: int | None, device: torch.device) -> Tensor | None:
    """Return a boolean [L, L], true where |i - j| <= half_window, or None if that holds everywhere."""
    if half_window is None or half_window >= length - 1:
        return None
    index = torch.arange(length, device=device)
    return (index[:, None] - index[None, :]).abs() <= half_window


def _causal(mask: Tensor | None, packing: Packing) -> Tensor | None:
    """Return the mask [..., L, L] with later keys hidden from each query if the packing is causal.

    A mask of None stays None: `attend` then uses the kernel's own causal mode.
    """
    return mask.tril() if packing.causal and mask is not None else mask


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the conjunction of two masks, where None hides nothing."""
    if a is None:
        return b
    if b is None:
        return a
    return a & b


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 where the mask is true and minus infinity elsewhere.

    SDPA would convert a boolean mask in each layer. Rows begin at multiples of 8 elements: the GPU kernels of SDPA
    need that alignment and would otherwise copy the mask.
    """
    if mask is None:
        return None
    *shape, length = mask.shape
    padded_length = -(-length // MASK_MULTIPLE) * MASK_MULTIPLE
    numbers = torch.zeros((*shape, padded_length), dtype=dtype, device=mask.device)
    return numbers[..., :length].masked_fill_(~mask, float("-inf"))


# sdpa: equal rows -----------------------------------------------------------------------------------------------------


def _sdpa_prepare(
    packing: Packing, num_tokens: int, half_window: int | None, kernel: str = "sdpa"
) -> Layout:
    length = packing.whole_rows
    if length is None:
        raise ValueError(
            f"attention.kernel={kernel}: needs rows of equal length. Set it to auto, padded or varlen for ragged rows."
        )
    assert num_tokens % length == 0, f"{num_tokens} tokens are not rows of {length}"
    mask = _band(length, half_window, packing.bounds_S.device)
    if packing.row_length is None:
        ids_BL = sequence_ids(packing.bounds_S, num_tokens).view(-1, length)
        mask = _both((ids_BL[:, :, None] == ids_BL[:, None, :])[:, None], mask)
    return Layout(
        kernel, packing, half_window, ((num_tokens // length, length),), (_causal(mask, packing),)
    )


def restrict_rows(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    """Return an SDPA layout for a query subset on equal rows, or None for ragged sequences.

    `layout` may be of any kernel.
    """
    packing, length = layout.packing, layout.packing.whole_rows
    if length is None:
        return None
    rows = num_tokens // length
    assert queries_M.shape[0] % rows == 0, (
        f"{queries_M.shape[0]} queries are not as many in each of {rows} rows"
    )
    offset_M = queries_M % length
    mask = _band(length, layout.half_window, queries_M.device)
    if mask is not None:
        mask = mask.index_select(0, offset_M).view(rows, -1, length)
    if packing.row_length is None:
        ids_BL = sequence_ids(packing.bounds_S, num_tokens).view(rows, length)
        query_ids = ids_BL.gather(1, offset_M.view(rows, -1))
        mask = _both(query_ids[:, :, None] == ids_BL[:, None, :], mask)
    if packing.causal:
        offsets_L = torch.arange(length, device=queries_M.device)
        is_visible = offsets_L <= offset_M[:, None]
        mask = _both(is_visible.view(rows, -1, length), mask)
    mask = None if mask is None else mask[:, None]
    of_all = layout.masks[0] if layout.masks else None
    if layout.table_RH is not None and of_all is not None:
        from .relative_positions import biased  # imported late: most runs have none

        places_BQ = offset_M.view(rows, -1)
        mask = biased(mask, layout.table_RH, places_BQ, length, of_all.dtype)
    return Layout("sdpa", packing, layout.half_window, ((rows, length),), (mask,))


# padded: ragged sequences in groups of similar length -----------------------------------------------------------------


@torch.compiler.disable  # numbers of one batch: not for a graph
def group_by_length(lengths: Sequence[int], group_pairs: int) -> list[list[int]]:
    """Return the indices of the non-empty sequences, in groups of similar length with the least total cost.

    The cost of a group is its number of token pairs, rows times the square of the longest sequence, plus
    `group_pairs`.
    """
    lengths_S = np.asarray(lengths)
    sizes, counts = np.unique(lengths_S[lengths_S > 0], return_counts=True)
    ends = np.concatenate([[0], counts.cumsum()])
    # Dynamic programme: the cheapest grouping of the `last` shortest sizes, and the size at which its last group begins
    least_costs = np.zeros(len(sizes) + 1)
    begins = np.zeros(len(sizes) + 1, np.int64)
    for last in range(1, len(sizes) + 1):
        counts_inside = ends[last] - ends[:last]
        costs = least_costs[:last] + counts_inside * sizes[last - 1] ** 2 + group_pairs
        begins[last] = costs.argmin()
        least_costs[last] = costs[begins[last]]
    groups, last = [], len(sizes)
    while last:
        inside = (lengths_S >= sizes[begins[last]]) & (lengths_S <= sizes[last - 1])
        groups.append(inside.nonzero()[0].tolist())
        last = begins[last]
    return groups[::-1]


class _Padded(NamedTuple):
    """Padded groups: [rows, length] of each, and whether any of its rows is padded. Tensors are on the device."""

    groups: list[tuple[int, int]]
    is_ragged: list[bool]
    gather_P: (
        Tensor  # token of each padded position; padding repeats the first token of its sequence
    )
    scatter_T: Tensor  # padded position of each token
    lengths_R: Tensor  # sequence length of each row


@torch.compiler.disable  # numbers of one batch: not for a graph
def _pad(lengths: Sequence[int], group_pairs: int, device: torch.device) -> _Padded:
    """Return the sequences laid out in padded groups.

    All is computed on the host, so that nothing waits for the device.
    """
    lengths_S = np.asarray(lengths, np.int64)
    starts_S = lengths_S.cumsum() - lengths_S
    gather, rows, groups, is_ragged, first = [], [], [], [], 0
    scatter_T = np.empty(int(lengths_S.sum()), np.int64)
    for members in group_by_length(lengths_S, group_pairs):
        starts_R, lengths_R = starts_S[members, None], lengths_S[members]
        longest = int(lengths_R.max())
        offsets = np.arange(longest)
        valid = offsets < lengths_R[:, None]
        tokens = np.where(valid, starts_R + offsets, starts_R)
        scatter_T[tokens[valid]] = first + np.flatnonzero(valid)
        gather.append(tokens.ravel())
        rows.append(lengths_R)
        groups.append((len(members), longest))
        is_ragged.append(longest > int(lengths_R.min()))
        first += tokens.size
    arrays = [np.concatenate(gather), scatter_T, np.concatenate(rows)]
    numbers = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        numbers = numbers.pin_memory()  # otherwise the copy waits for the steps before it
    numbers = numbers.to(device, non_blocking=True)
    return _Padded(groups, is_ragged, *numbers.split([len(array) for array in arrays]))


def _padded_prepare(
    packing: Packing, num_tokens: int, half_window: int | None, kernel: str = "padded"
) -> Layout:
    device = packing.bounds_S.device
    lengths = packing.bounds_S.diff().tolist() if packing.lengths is None else packing.lengths
    group_pairs = GROUP_PAIRS.get((kernel, device.type), GROUP_PAIRS["padded", "cpu"])
    padded = _pad(lengths, group_pairs, device)
    masks, first = [], 0
    for (rows, longest), is_ragged in zip(padded.groups, padded.is_ragged):
        mask = _causal(_band(longest, half_window, device), packing)
        if is_ragged and not packing.causal:  # in a causal pass no token sees the padding behind it
            lengths_R = padded.lengths_R[first : first + rows, None, None, None]
            mask = _both(torch.arange(longest, device=device) < lengths_R, mask)
        masks.append(mask)
        first += rows
    groups = tuple(padded.groups)
    return Layout(
        kernel, packing, half_window, groups, tuple(masks), padded.gather_P, padded.scatter_T
    )


def _padded_restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    """Return a layout with one query per sequence, as a classifier on the first token needs it.

    None where a sequence has no query or several, or where a mask depends on the query.
    """
    if layout.packing.causal:
        return None
    masks = [mask for mask in layout.masks if mask is not None]
    if any(mask.shape[-2] != 1 for mask in masks):
        return None
    if len(queries_M) != sum(rows for rows, _ in layout.groups):
        return None
    assert layout.gather_P is not None
    begins, first = [], 0
    for rows, length in layout.groups:
        last = first + rows * length
        begins.append(torch.arange(first, last, length, device=queries_M.device))
        first = last
    begins_R = layout.gather_P[torch.cat(begins)]
    bounds_S = layout.packing.bounds_S.long()
    sequence_R = torch.searchsorted(bounds_S, begins_R, right=True)
    sequence_M = torch.searchsorted(bounds_S, queries_M, right=True)
    is_known = layout.packing.one_query_each  # otherwise the comparison below waits for the device
    if not is_known and not torch.equal(sequence_R.sort().values, sequence_M):
        return None
    query_R = torch.searchsorted(sequence_M, sequence_R)
    return layout._replace(query_gather_M=query_R, scatter_T=query_R.argsort())


def _grouped_attend(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    layout: Layout,
    dropout: float,
    function: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    heads, size = q_THK.shape[1:]
    one_each = layout.query_gather_M is not None
    if layout.gather_P is not None:
        gather = layout.gather_P if layout.query_gather_M is None else layout.query_gather_M
        q_THK = q_THK.index_select(0, gather)
        k_THK, v_THK = (x.index_select(0, layout.gather_P) for x in (k_THK, v_THK))
    outputs, first, first_row = [], 0, 0
    for (rows, length), mask in zip(layout.groups, layout.masks):
        last = first + rows * length
        # There may be fewer queries than keys: one per row, or any number where a single group holds all tokens.
        queries = q_THK[first_row : first_row + rows] if one_each else q_THK[first:last]
        q, k, v = (
            x.view(rows, -1, heads, size).transpose(1, 2)
            for x in (queries, k_THK[first:last], v_THK[first:last])
        )
        out = function(q, k, v, mask, dropout, is_causal=layout.packing.causal and mask is None)
        outputs.append(out.transpose(1, 2).reshape(-1, heads, size))
        first, first_row = last, first_row + rows
    out_PHK = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_PHK if layout.scatter_T is None else out_PHK.index_select(0, layout.scatter_T)


# products: for CPUs that multiply in bf16 -----------------------------------------------------------------------------


class _Products(torch.autograd.Function):
    """Attention as two matrix products and a softmax: inputs [B, H, L, K], fewer queries than keys allowed.

    torch's fused attention gains nothing from bf16 instructions, and on short rows its backward pass takes several
    times as long in bf16 as in fp32 (docs/log.md). Scores are formed and normalised in fp32, as a fused kernel does it;
    the weights are kept for the backward pass: memory grows with the square of the row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-1, -2))
        # not minus infinity: a padding token may see nothing at all, and must not become NaN
        least = torch.finfo(scores.dtype).min
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, least)
        elif mask is not None:
            scores.add_(mask).clamp_(min=least)
        weights = scores.softmax(-1).to(v.dtype)
        ctx.save_for_backward(q, k, v, weights)
        ctx.mask_shape = None if mask is None else mask.shape
        return torch.matmul(weights, v)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, weights = ctx.saved_tensors
        d_v = torch.matmul(weights.transpose(-1, -2), d_out)
        d_weights = torch.matmul(d_out, v.transpose(-1, -2))
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        d_mask = d_scores.sum_to_size(ctx.mask_shape) if ctx.needs_input_grad[3] else None
        d_scores = d_scores * q.shape[-1] ** -0.5
        return torch.matmul(d_scores, k), torch.matmul(d_scores.transpose(-1, -2), q), d_v, d_mask


def products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """Return attention as `F.scaled_dot_product_attention` computes it, without dropout."""
    assert dropout == 0.0
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    mixed: Tensor = _Products.apply(q, k, v, mask)
    return mixed


def _products_prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    prepare = _padded_prepare if packing.whole_rows is None else _sdpa_prepare
    return prepare(packing, num_tokens, half_window, "products")


def _products_restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    restrict = restrict_rows if layout.gather_P is None else _padded_restrict
    restricted = restrict(layout, queries_M, num_tokens)
    return None if restricted is None else restricted._replace(kernel="products")


def _products_suits(
    packing: Packing, half_window: int | None, dtype: torch.dtype, dropout: float
) -> bool:
    on_cpu = packing.bounds_S.device.type == "cpu"
    short = (packing.whole_rows or packing.max_length) <= PRODUCTS_LENGTH
    return on_cpu and dtype == torch.bfloat16 and dropout == 0.0 and short


# varlen: FlashAttention on bounds -------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # a property of the device: read while compiling, not traced
def has_flash(device: torch.device) -> bool:
    """Return whether FlashAttention runs on this GPU and the installed torch has it for bounds.

    An exported model may run under an older torch than the suite requires.
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return version >= FLASH_TORCH and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _varlen_reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return "runs on CUDA only"
    if not has_flash(device):
        here = f"this is torch {torch.__version__} on {torch.cuda.get_device_name(device)}"
        return f"FlashAttention needs torch 2.11 and an Ampere or newer GPU (compute capability 8.0), {here}"
    if dtype not in FLASH_TYPES:
        name = str(dtype).removeprefix("torch.")
        return f"FlashAttention computes in 16 bits, not in {name} (precision=bf16 would do)"
    return None


def _varlen_suits(
    packing: Packing, half_window: int | None, dtype: torch.dtype, dropout: float
) -> bool:
    """Return whether it saves work over SDPA: ragged sequences, or windows."""
    device = packing.bounds_S.device
    able = packing.bounds_S.is_cuda and dtype in FLASH_TYPES and dropout == 0.0
    return (
        able
        and (packing.row_length is None or packing.is_cut_by(half_window))
        and has_flash(device)
    )


def _varlen_restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    if layout.packing.causal or layout.packing.is_cut_by(layout.half_window):
        return None  # FlashAttention counts a window from the index among the queries, not among the keys
    return layout._replace(
        query_bounds_S=torch.searchsorted(queries_M, layout.packing.bounds_S.long()).int()
    )


def _varlen_attend(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imported late: registers CUDA operators

    assert dropout == 0.0
    packing, window = layout.packing, layout.half_window
    side = window if window is not None and packing.is_cut_by(window) else -1
    after = 0 if packing.causal else side
    bounds, longest = packing.bounds_S, packing.max_length
    query_bounds = bounds if layout.query_bounds_S is None else layout.query_bounds_S
    size = q_THK.shape[-1]
    missing = -size % FLASH_MULTIPLE
    if missing:
        q_THK, k_THK, v_THK = (F.pad(x, (0, missing)) for x in (q_THK, k_THK, v_THK))
    out = varlen_attn(
        q_THK,
        k_THK,
        v_THK,
        query_bounds,
        bounds,
        longest,
        longest,
        scale=size**-0.5,
        window_size=(side, after),
    )
    assert isinstance(out, Tensor)  # a pair only when asked for the log-sum-exp
    return out[..., :size]


# The table ------------------------------------------------------------------------------------------------------------


def _flex() -> ModuleType:
    from . import flex  # imported late: most runs do without it

    return flex


def _flex_reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    return "trains on CUDA only" if device.type != "cuda" and torch.is_grad_enabled() else None


def _products_reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else "is for CPUs only"


KERNELS: dict[str, Kernel] = {
    # FlashAttention on bounds: Ampere or newer, 16 bits, no dropout; windows save work
    "varlen": Kernel(
        lambda packing, num_tokens, half_window: Layout("varlen", packing, half_window),
        _varlen_attend,
        _varlen_restrict,
        _varlen_suits,
        _varlen_reason_against,
    ),
    # what `sdpa` and `padded` compute, as matrix products: for CPUs in bf16, no dropout
    "products": Kernel(
        _products_prepare,
        partial(_grouped_attend, function=products),
        _products_restrict,
        _products_suits,
        _products_reason_against,
        takes_bias=True,
    ),
    # rows as [B, L]; a mask only for windows shorter than the row and for rows that hold several documents
    "sdpa": Kernel(
        _sdpa_prepare,
        _grouped_attend,
        restrict_rows,
        lambda packing, *_: packing.whole_rows is not None,
        has_dropout=True,
        adds_mask=True,
        takes_bias=True,
    ),
    # ragged sequences padded to [S, L] in a few groups of similar length; reads bounds that come without `lengths`
    "padded": Kernel(
        _padded_prepare,
        _grouped_attend,
        _padded_restrict,
        lambda *_: True,
        has_dropout=True,
        adds_mask=True,
        takes_bias=True,
    ),
    # FlexAttention: CUDA, any type, no dropout; must be compiled for training, so `auto` never takes it
    "flex": Kernel(
        lambda *arguments: _flex().prepare(*arguments),
        lambda *arguments: _flex().attend(*arguments),
        lambda *arguments: _flex().restrict(*arguments),
        reason_against=_flex_reason_against,
    ),
}
