"""Attention over packed tokens: with its kernels the one place that knows whether rows are equal or ragged.

Everything above works on `[T, D]`: the tokens of all sequences, end to end. Which token may see which is told by a
`Packing`, and computed once per forward into one `Layout` per kind of layer (global, local), which all layers of that
kind share (cramming/model/packing.py). A kernel (cramming/model/attention_kernels.py) is a pair of functions: `prepare`
makes the layout, `attend` runs one layer.

Fewer tokens may ask than are seen: the last layer of a masked language model is needed at the targets only. Then
queries are [M, H, K] beside keys and values of all T tokens, and the layout says which tokens they belong to.

    dense    the definition, with a [T, T] mask: for tests, never chosen by `auto`
    sdpa     rows of equal length viewed as [B, L]; a mask only for windows shorter than the row and for rows that hold
             several documents
    padded   ragged sequences padded to [S, L] in a few groups of similar length; reads the bounds on the host
    products what `sdpa` and `padded` compute, written out as matrix products (cramming/model/products.py): for CPUs in
             bf16, no dropout; memory grows with the square of the row
    varlen   FlashAttention on bounds (`torch.nn.attention.varlen`): Ampere or newer, 16-bit, no dropout; windows save
             work
    flex     FlexAttention with a block mask of sequences and window: CUDA, any type, no dropout; for training it must
             be compiled, so `auto` leaves it to whoever measures it to be faster

Shapes: T tokens, S sequences, H heads, K head size, B rows, L row length, M tokens that ask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cramming.config import UserError
from cramming.model.attention_kernels import FLASH_TYPES, KERNELS, PRODUCTS_LENGTH, has_flash, rows_restrict
from cramming.model.config import LastLayer
from cramming.model.packing import Layout, Packing, sequence_ids

__all__ = [
    "KERNELS", "AttentionConfig", "Layout", "Packing", "asked_by", "attend", "choose", "prepare", "refuse_unfit",
    "sequence_ids",
]  # fmt: skip


@dataclass(frozen=True)
class AttentionConfig:
    """`kernel` is one of `KERNELS` or auto; `last_layer` names the tokens that the last layer is computed for."""

    kernel: str
    last_layer: LastLayer

    def __post_init__(self) -> None:
        if self.kernel != "auto" and self.kernel not in KERNELS:
            raise ValueError(_unknown(self.kernel))


def _unknown(kernel: str) -> str:
    return f"kernel={kernel}: choose one of auto, {', '.join(KERNELS)}"


def prepare(
    kernel: str, packing: Packing, num_tokens: int, half_window: int | None, dtype: torch.dtype, dropout: float
) -> Layout:
    """The layout for all layers of one window. `dtype` is what queries will have, `dropout` the rate in force now."""
    if kernel == "auto":
        kernel = choose(packing, half_window, dtype, dropout)
    refuse_unfit(kernel, packing.bounds_S.device, dtype, dropout)
    return KERNELS[kernel].prepare(packing, num_tokens, half_window)


def refuse_unfit(kernel: str, device: torch.device, dtype: torch.dtype, dropout: float) -> None:
    """UserError where the kernel of this name does not exist or cannot run so."""
    if kernel not in KERNELS:
        raise UserError(f"attention.{_unknown(kernel)}")
    if refuse := KERNELS[kernel].refuse:
        refuse(device, dtype, dropout)


def asked_by(layout: Layout, asking_M: Tensor, num_tokens: int) -> Layout | None:
    """The layout when only the tokens `asking_M` ask; None if no kernel can do that.

    They ascend, and each row of `packing.row_length` or `aligned_length` has as many of them: what `Masker` makes. So
    where the layout's own kernel cannot (FlashAttention with a window), SDPA can, and a masked language model's last
    layer computes what `model.config.flops_per_token` counts.
    """
    restricted = KERNELS[layout.kernel].restrict(layout, asking_M, num_tokens)
    restricted = restricted or rows_restrict(layout, asking_M, num_tokens)
    return None if restricted is None else restricted._replace(asking_M=asking_M)


def choose(packing: Packing, half_window: int | None, dtype: torch.dtype, dropout: float) -> str:
    """The kernel that `auto` stands for."""
    equal = packing.row_length is not None
    windowed = half_window is not None and half_window < packing.max_length - 1
    flash = packing.bounds_S.is_cuda and dtype in FLASH_TYPES and dropout == 0.0
    if flash and (windowed or not equal) and has_flash(packing.bounds_S.device):
        return "varlen"
    longest = packing.row_length or packing.aligned_length or packing.max_length
    on_cpu = packing.bounds_S.device.type == "cpu"
    if on_cpu and dtype == torch.bfloat16 and dropout == 0.0 and longest <= PRODUCTS_LENGTH:
        return "products"
    return "sdpa" if equal or packing.aligned_length is not None else "padded"


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """Attention of every asking token to the tokens it may see, scaled by K^-0.5: [T or M, H, K]."""
    return KERNELS[layout.kernel].attend(q_THK, k_THK, v_THK, layout, dropout)
