"""How long operations take on a device, and what a whole budget then costs.

The roofline model of Williams et al. (2009), operation by operation the larger of arithmetic time and memory time, with
a third line, the time that one kernel takes however small. Rates are either a maker's data sheet times a stated
utilisation, or measured here in about a second. Caches, fusion by a compiler and the shapes of kernels are left out.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from cramming import device as devices
from cramming.config import UserError
from cramming.plan import cards
from cramming.plan.cards import Card
from cramming.plan.tracker import Operation
from cramming.precision import DTYPES, Mode

MATMUL_UTILISATION = (
    0.7  # of the data sheet's matrix peak: an H200 reached 790 of 989 TFLOP/s on large products
)
BANDWIDTH_UTILISATION = 0.8
KERNEL_SECONDS = {"cuda": 6e-6, "cpu": 4e-6}  # launched from Python without a compiler
TF32_SHARE = 0.5  # of the 16-bit products, on every card that has TF32
POWER_SHARE = 0.9  # of its limit that a card takes in training; assumed
# What preparing costs was measured (benchmarks/results/preparation_*): files of 1 and 4 GB, two workers, all filters
# and the search for the tasks' text.
DISK_BYTES_PER_TOKEN = (
    0.01  # where documents start; a token's id is 2 bytes more, 4 above 65,536 entries
)
PREPARATION_BYTES = 0.7e9  # peak memory, all processes together, of which two are workers
INDEX_BYTES_PER_TOKEN = 0.085  # of it the index of near-duplicates, 76 MB for 4 GB of text
TOKENS_PER_CORE_SECOND = 0.46e6  # 2.06 MB of text, 4.5 bytes of it a token


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matrix products, bytes/s of memory, seconds of the smallest kernel, and where they come from."""

    flops: float
    bandwidth: float
    kernel_seconds: float
    basis: str

    def seconds(self, operations: Counter[Operation]) -> float:
        """Time of the operations one after the other."""
        return sum(
            count * max(op.flops / self.flops, op.bytes / self.bandwidth, self.kernel_seconds)
            for op, count in operations.items()
        )


def by_data_sheet(card: Card, mode: Mode, tf32: bool) -> Rates:
    """Rates of a card of the table."""
    flops = products_per_second(card, mode, tf32) * MATMUL_UTILISATION
    bandwidth = card.bandwidth * 1e9 * BANDWIDTH_UTILISATION
    emulated = (
        ""
        if card.has_bf16 or mode != "bf16"
        else "; it has no bf16 units and emulates it: take precision=fp16"
    )
    refused = "; training refuses AMD GPUs" if card.is_amd else ""
    if card.needs_cuda_12:
        refused = "; training on it needs torch's build for CUDA 12.6 (cu126)"
    basis = (
        f"{card.name} ({card.source}) times an assumed utilisation: {flops / 1e12:.3g} TFLOP/s for {_counted_as(mode)}"
        f" matrix products ({MATMUL_UTILISATION:.0%} of the peak), {bandwidth / 1e9:.0f} GB/s"
        f" ({BANDWIDTH_UTILISATION:.0%}), {KERNEL_SECONDS['cuda'] * 1e6:.0f} us per kernel; not measured"
    )
    return Rates(flops, bandwidth, KERNEL_SECONDS["cuda"], basis + emulated + refused)


def products_per_second(card: Card, mode: Mode, tf32: bool) -> float:
    """FLOP/s at the peak of the card's products in this mode; fp8 counts as 16 bits, bf16 without its units as fp32."""
    if mode == "fp32" and tf32 and card.has_bf16:
        return card.tflops * TF32_SHARE * 1e12
    if mode == "fp32" or (mode == "bf16" and not card.has_bf16):
        return card.fp32_tflops * 1e12
    return card.tflops * 1e12


def _counted_as(mode: Mode) -> str:
    """Only some products are in 8 bits, and scaling each tensor costs part of what they win."""
    return "bf16 (fp8 is counted at its rate)" if mode == "fp8" else mode


def measured(device: torch.device, mode: Mode, width: int, inner: int) -> Rates:
    """Rates of the present device, in about a second: a [rows, width] x [width, inner] product and a GELU."""
    dtype = DTYPES[mode]
    rows = 8192 if device.type == "cuda" else 256 if mode == "fp32" else 16
    a, b = (
        torch.randn(rows, width, dtype=dtype, device=device),
        torch.randn(width, inner, dtype=dtype, device=device),
    )
    flops = 2 * rows * width * inner / min(repeat_seconds(lambda: a @ b, device, 0.5))
    wide = torch.randn(2**24 if device.type == "cuda" else 2**22, device=device)
    bandwidth = 8 * wide.numel() / min(repeat_seconds(lambda: F.gelu(wide), device, 0.25))
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    basis = (
        f"measured now{threads}: {flops / 1e12:.3g} TFLOP/s for {_counted_as(mode)} products [{rows}, {width}]"
        f" x [{width}, {inner}], {bandwidth / 1e9:.3g} GB/s for a GELU;"
        f" {KERNEL_SECONDS[device.type] * 1e6:.0f} us per kernel assumed"
    )
    return Rates(flops, bandwidth, KERNEL_SECONDS[device.type], basis)


def repeat_seconds(
    work: Callable[[], object], device: torch.device, duration: float
) -> list[float]:
    """Of each repeat within `duration` seconds, at least one, after a first one that is not counted.

    On a GPU a repeat is many calls, and its seconds are a call's: to wait for the device takes a good part of what a
    single small product does.
    """
    calls = 20 if device.type == "cuda" else 1
    work()
    devices.synchronize(device)
    seconds: list[float] = []
    until = time.perf_counter() + duration
    while not seconds or time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        devices.synchronize(device)
        seconds.append((time.perf_counter() - began) / calls)
    return seconds


def named(name: str) -> Card:
    """The card of this name; UserError with the known names."""
    card = cards.find(name)
    if card is None:
        raise UserError(
            f"--device={name}: there is no data sheet of it here; give the card nearest in speed with the memory of"
            f' yours, for example --device "RTX 2080 Ti" --memory-gb 12; choose one of auto, cpu, cuda,'
            f" {', '.join(card.name for card in cards.CARDS)}"
        )
    return card


@dataclass(frozen=True)
class Costs:
    """Of one setting in the whole budget: hours, the corpus that has to be there first, electricity, money.

    The corpus is to have as many tokens as training sees, so that it sees none twice. Null: not known (a CPU's
    electricity), or not asked (the price).
    """

    tokens: float
    hours: float
    tokens_per_day: float
    corpus_bytes: float
    preparation_memory_bytes: float
    preparation_core_hours: float
    kwh: float | None
    price: float | None

    @classmethod
    def of(
        cls,
        tokens: float,
        tokens_per_second: float,
        vocab_size: int,
        near_duplicates: bool,
        watts: float | None,
        price_per_hour: float | None,
    ) -> "Costs":
        """At this rate."""
        hours = tokens / tokens_per_second / 3600
        return cls(
            tokens=tokens,
            hours=hours,
            tokens_per_day=86400 * tokens_per_second,
            corpus_bytes=((2 if vocab_size <= 2**16 else 4) + DISK_BYTES_PER_TOKEN) * tokens,
            preparation_memory_bytes=PREPARATION_BYTES
            + INDEX_BYTES_PER_TOKEN * tokens * near_duplicates,
            preparation_core_hours=tokens / TOKENS_PER_CORE_SECOND / 3600,
            kwh=None if watts is None else watts * POWER_SHARE * hours / 1000,
            price=None if price_per_hour is None else price_per_hour * hours,
        )
