"""Ways to compute attention; cramming/model/attention.py says what each is for, and chooses.

Shapes: T tokens, S sequences, H heads, K head size, B rows, L row length, P padded tokens, M tokens that ask.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cramming.config import UserError
from cramming.model import flex, products
from cramming.model.packing import Layout, Packing, group_by_length, refuse_dropout, sequence_ids

FLASH_CAPABILITY = (8, 0)  # Ampere; a 2080 Ti and a T4 are 7.5, a V100 is 7.0
FLASH_TYPES = (torch.bfloat16, torch.float16)
FLASH_MULTIPLE = 8  # of which it takes head sizes; SDPA pads by itself, its operator on bounds refuses others
PRODUCTS_LENGTH = 512  # the longest row that `auto` gives to `products`; at 1024 SDPA is faster (docs/log.md)
# What a group of sequences of similar length costs by itself, in pairs of tokens that could be computed in its time
# (docs/log.md); on a GPU by reckoning: 20 launches.
GROUP_PAIRS = {("padded", "cpu"): 2**12, ("padded", "cuda"): 2**18, ("products", "cpu"): 2**14}


def _band(length: int, half_window: int | None, device: torch.device) -> Tensor | None:
    """Boolean [L, L], true where |i - j| <= half_window; None where that is everywhere."""
    if half_window is None or half_window >= length - 1:
        return None
    place = torch.arange(length, device=device)
    return (place[:, None] - place[None, :]).abs() <= half_window


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


def _dense_prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    ids_T = sequence_ids(packing.bounds_S, num_tokens)
    mask = _both(ids_T[:, None] == ids_T[None, :], _band(num_tokens, half_window, ids_T.device))
    return Layout("dense", packing, half_window, masks=(mask,))


def _dense_restrict(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout:
    (mask_TT,) = layout.masks
    assert mask_TT is not None
    return layout._replace(masks=(mask_TT.index_select(0, asking_M),))


def _dense_attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float) -> Tensor:
    (mask_MT,) = layout.masks
    assert mask_MT is not None
    scores_HMT = torch.einsum("mhk,thk->hmt", q_THK, k_THK) * q_THK.shape[-1] ** -0.5
    weights_HMT = scores_HMT.float().masked_fill(~mask_MT, -torch.inf).softmax(-1)
    return torch.einsum("hmt,thk->mhk", F.dropout(weights_HMT, dropout).to(v_THK.dtype), v_THK)


def _sdpa_prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    length = packing.row_length or packing.aligned_length
    if length is None:
        raise UserError(
            "attention.kernel=sdpa: needs rows of equal length; set it to auto, padded or varlen for ragged ones"
        )
    assert num_tokens % length == 0, f"{num_tokens} tokens are not rows of {length}"
    mask = _band(length, half_window, packing.bounds_S.device)
    if packing.row_length is None:
        ids_BL = sequence_ids(packing.bounds_S, num_tokens).view(-1, length)
        mask = _both((ids_BL[:, :, None] == ids_BL[:, None, :])[:, None], mask)
    groups = ((num_tokens // length, length),)
    return Layout("sdpa", packing, half_window, groups, (mask,))


def rows_restrict(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout | None:
    """For SDPA on equal rows, whatever kernel `layout` is of; None for ragged ones."""
    packing, reach = layout.packing, layout.half_window
    length = packing.row_length or packing.aligned_length
    if length is None:
        return None
    rows = num_tokens // length
    assert asking_M.shape[0] % rows == 0, f"{asking_M.shape[0]} asking tokens are not as many in each of {rows} rows"
    place_M, mask = asking_M % length, _band(length, reach, asking_M.device)
    if mask is not None:
        mask = mask.index_select(0, place_M).view(rows, -1, length)
    if packing.row_length is None:
        ids_BL = sequence_ids(packing.bounds_S, num_tokens).view(rows, length)
        mask = _both(ids_BL.gather(1, place_M.view(rows, -1))[:, :, None] == ids_BL[:, None, :], mask)
    return Layout("sdpa", packing, reach, ((rows, length),), (None if mask is None else mask[:, None],))


def _padded_prepare(packing: Packing, num_tokens: int, half_window: int | None, kernel: str = "padded") -> Layout:
    device = packing.bounds_S.device
    starts, lengths = packing.bounds_S[:-1].long(), packing.bounds_S.diff().long()
    groups, masks, gather = [], [], []
    scatter_T = torch.empty(num_tokens, dtype=torch.long, device=device)
    first = 0
    for members in group_by_length(
        lengths.tolist(), GROUP_PAIRS.get((kernel, device.type), GROUP_PAIRS["padded", "cpu"])
    ):
        chosen = torch.tensor(members, device=device)
        longest = int(lengths[chosen].max())
        place = torch.arange(longest, device=device)
        tokens = starts[chosen, None] + place
        valid = place < lengths[chosen, None]
        scatter_T[tokens[valid]] = first + valid.flatten().nonzero().squeeze(1)
        gather.append(torch.where(valid, tokens, starts[chosen, None]).flatten())
        keys = None if bool(valid.all()) else valid[:, None, None, :]
        masks.append(_both(keys, _band(longest, half_window, device)))
        groups.append((len(members), longest))
        first += len(members) * longest
    gather_P = torch.cat(gather)
    return Layout(kernel, packing, half_window, tuple(groups), tuple(masks), gather_P, scatter_T)


def _padded_restrict(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout | None:
    """Where every sequence asks by one token, as a classifier does, and no window hides keys from it."""
    if any(mask is not None and mask.shape[-2] != 1 for mask in layout.masks):
        return None
    assert layout.gather_P is not None
    rows = torch.tensor([rows for rows, _ in layout.groups], device=asking_M.device)
    lengths = torch.tensor([length for _, length in layout.groups], device=asking_M.device)
    steps_R = lengths.repeat_interleave(rows, output_size=sum(rows for rows, _ in layout.groups))  # else the host waits
    begins_R = layout.gather_P[steps_R.cumsum(0) - steps_R]
    bounds_S = layout.packing.bounds_S.long()
    sequence_R, sequence_M = (torch.searchsorted(bounds_S, x, right=True) for x in (begins_R, asking_M))
    asking_R = torch.searchsorted(sequence_M, sequence_R)
    if len(sequence_M) != len(sequence_R) or not torch.equal(sequence_R.sort().values, sequence_M):
        return None
    return layout._replace(asking_gather_M=asking_R, scatter_T=asking_R.argsort())


def _products_refuse(device: torch.device, dtype: torch.dtype, dropout: float) -> None:
    if device.type != "cpu":
        raise UserError("attention.kernel=products: is for CPUs only; set it to auto, varlen or sdpa")
    refuse_dropout("products", dropout)


def _products_prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    if packing.row_length is None and packing.aligned_length is None:
        return _padded_prepare(packing, num_tokens, half_window, "products")
    return _sdpa_prepare(packing, num_tokens, half_window)._replace(kernel="products")


def _products_restrict(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout | None:
    restrict = rows_restrict if layout.gather_P is None else _padded_restrict
    restricted = restrict(layout, asking_M, num_tokens)
    return None if restricted is None else restricted._replace(kernel="products")


def _grouped_attend(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    layout: Layout,
    dropout: float,
    function: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    heads, size = q_THK.shape[1:]
    once = layout.asking_gather_M is not None
    if layout.gather_P is not None:
        q_THK = q_THK.index_select(0, layout.gather_P if layout.asking_gather_M is None else layout.asking_gather_M)
        k_THK, v_THK = (x.index_select(0, layout.gather_P) for x in (k_THK, v_THK))
    outputs, first, first_row = [], 0, 0
    for (rows, length), mask in zip(layout.groups, layout.masks):
        last = first + rows * length
        # Queries may be fewer than keys: one a row, or where there is one group, which is then everything.
        asking = q_THK[first_row : first_row + rows] if once else q_THK[first:last]
        q, k, v = (
            x.view(rows, -1, heads, size).transpose(1, 2) for x in (asking, k_THK[first:last], v_THK[first:last])
        )
        out = function(q, k, v, attn_mask=mask, dropout_p=dropout)
        outputs.append(out.transpose(1, 2).reshape(-1, heads, size))
        first, first_row = last, first_row + rows
    out_PHK = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_PHK if layout.scatter_T is None else out_PHK.index_select(0, layout.scatter_T)


@torch.compiler.assume_constant_result  # a property of the device: asked while compiling, not traced
def has_flash(device: torch.device) -> bool:
    """Whether FlashAttention runs on this GPU."""
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _varlen_refuse(device: torch.device, dtype: torch.dtype, dropout: float) -> None:
    if device.type != "cuda":
        raise UserError("attention.kernel=varlen: runs on CUDA only; set it to auto, sdpa or padded")
    if not has_flash(device):
        raise UserError(
            "attention.kernel=varlen: FlashAttention needs an Ampere or newer GPU (compute capability 8.0), this is"
            f" {torch.cuda.get_device_name(device)}; set it to auto, sdpa or padded"
        )
    if dtype not in FLASH_TYPES:
        raise UserError(
            f"attention.kernel=varlen: FlashAttention computes in 16 bits, not in {str(dtype).removeprefix('torch.')};"
            " set it to auto, sdpa or padded, or take precision=bf16"
        )
    refuse_dropout("varlen", dropout)


def _varlen_prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    return Layout("varlen", packing, half_window)


def _varlen_restrict(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout | None:
    if layout.is_windowed():
        return None  # FlashAttention counts a window from the place among the queries, not among the keys
    return layout._replace(asking_bounds_S=torch.searchsorted(asking_M, layout.packing.bounds_S.long()).int())


def _varlen_attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imported late: registers CUDA operators

    assert dropout == 0.0, "refused before, and `auto` does not choose it when there is any"
    side = -1 if layout.half_window is None or not layout.is_windowed() else layout.half_window
    bounds, longest = layout.packing.bounds_S, layout.packing.max_length
    asking = bounds if layout.asking_bounds_S is None else layout.asking_bounds_S
    size = q_THK.shape[-1]
    if missing := -size % FLASH_MULTIPLE:
        q_THK, k_THK, v_THK = (F.pad(x, (0, missing)) for x in (q_THK, k_THK, v_THK))
    out = varlen_attn(q_THK, k_THK, v_THK, asking, bounds, longest, longest, scale=size**-0.5, window_size=(side, side))
    assert isinstance(out, Tensor)  # a pair only when asked for the log-sum-exp
    return out[..., :size]


class Kernel(NamedTuple):
    """One way to compute attention: the layout of a batch, one layer on it, and the layout when fewer tokens ask.

    `refuse(device, dtype, dropout)`: UserError where it cannot run, if there are such cases.
    """

    prepare: Callable[[Packing, int, int | None], Layout]
    attend: Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
    restrict: Callable[[Layout, Tensor, int], Layout | None]
    refuse: Callable[[torch.device, torch.dtype, float], None] | None = None


KERNELS: dict[str, Kernel] = {
    "dense": Kernel(_dense_prepare, _dense_attend, _dense_restrict),
    "sdpa": Kernel(_sdpa_prepare, _grouped_attend, rows_restrict),
    "padded": Kernel(_padded_prepare, _grouped_attend, _padded_restrict),
    "products": Kernel(
        _products_prepare, partial(_grouped_attend, function=products.attend), _products_restrict, _products_refuse
    ),
    "varlen": Kernel(_varlen_prepare, _varlen_attend, _varlen_restrict, _varlen_refuse),
    "flex": Kernel(flex.prepare, flex.attend, flex.restrict, flex.refuse),
}
