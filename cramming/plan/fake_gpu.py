"""A GPU that is not there: within `fake_gpu` CPU tensors without data are treated as the GPU would treat them.

Attention saves what flash attention saves (queries, keys, values, output, log-sum-exp, no mask), head chunks and loops
over parameters are the GPU's. What `CopyStream` puts into host memory counts as such.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cramming.model import attention, heads
from cramming.model.attention import Layout, Packing
from cramming.parallel.offload import CopyStream
from cramming.plan.tracker import HOST, StorageTracker

FAKE_FLASH = "fake flash attention"
FLASH_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",  # the fake kernel's
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_flash_attention_backward",
    "torch_attn::_varlen_attn_backward",
)


def _prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    """Whole rows without masks: the flash kernels take bounds and windows as numbers."""
    groups = ((num_tokens // packing.max_length, packing.max_length),)
    return Layout(FAKE_FLASH, packing, half_window, groups, (None,))


def _restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    """As the flash kernel does: not with a window."""
    return None if layout.packing.is_cut_by(layout.half_window) else layout


@contextmanager
def fake_gpu(tracker: StorageTracker, chunk_elements: int) -> Iterator[None]:
    """The kernel `FAKE_FLASH` exists, the head has so many logits at a time, and `tracker` knows host memory."""
    host_empty = CopyStream.host_empty
    flash = attention.KERNELS["sdpa"]._replace(prepare=_prepare, restrict=_restrict)

    def on_host(self: CopyStream, like: Tensor) -> Tensor:
        category, tracker.category = tracker.category, HOST
        try:
            return host_empty(self, like)
        finally:
            tracker.category = category

    with (
        patch.dict(attention.KERNELS, {FAKE_FLASH: flash}),
        patch.dict(heads.CHUNK_ELEMENTS, cpu=chunk_elements),
        patch.object(CopyStream, "host_empty", on_host),
    ):
        yield


def update_all_at_once(optimizer: torch.optim.Optimizer) -> None:
    """On a GPU torch's optimizers work on all parameters at once unless told otherwise; on a fake one they are told."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def flash_scratch(sequences: Callable[[], int], func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that flash attention's backward pass takes to sum the queries' gradient in fp32 (FlashAttention-2's
    `dq_accum`): (T + 128 S) H K, the head size K rounded up to 32.

    S is `sequences()`, empty ones of the padded bounds included; 0 where rows of equal length need no bounds.
    """
    if func._schema.name not in FLASH_BACKWARD:
        return 0
    query = args[1]  # [T, H, K] on bounds, else [rows, H, L, K]
    num_heads, size = (query.shape[1], query.shape[2]) if query.dim() == 3 else (query.shape[1], query.shape[3])
    tokens = query.numel() // (num_heads * size)
    return 4 * (tokens + 128 * sequences()) * num_heads * (-(-size // 32) * 32)
