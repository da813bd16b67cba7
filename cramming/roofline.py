"""How long operations take on a device: the larger of arithmetic time and memory time, operation by operation.

The roofline model of Williams et al. (2009) with a third line, the time that one kernel takes however small. Rates are
either a maker's data sheet times a stated utilisation, or measured here in about a second. It orders settings and
gives the scale; it knows nothing of caches, of fusion by a compiler, or of what a kernel's shape costs.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from cramming import device as devices
from cramming.config import UserError
from cramming.precision import Mode
from cramming.tracker import Operation

MATMUL_UTILISATION = 0.7  # of the data sheet's matrix peak: an H200 reached 790 of 989 TFLOP/s on large products
BANDWIDTH_UTILISATION = 0.8
KERNEL_SECONDS = {"cuda": 6e-6, "cpu": 4e-6}  # launched from Python without a compiler
FP32_SHARE = {True: 0.5, False: 0.125}  # of the 16-bit peak, with TF32 (Ampere and later) and without; rough


class Sheet(NamedTuple):
    """Memory bandwidth in GB/s and memory in GiB by the maker's data sheet, and which products exist beside fp16."""

    bandwidth: float
    memory: float
    bf16: bool = True
    fp8: bool = False


SHEETS = {  # the names of device.PEAK_TFLOPS; where a card comes in several sizes, the smaller
    "RTX 2080 Ti": Sheet(616, 11, bf16=False),
    "TITAN RTX": Sheet(672, 24, bf16=False),
    "T4": Sheet(320, 16, bf16=False),
    "V100 PCIe": Sheet(900, 16, bf16=False),
    "V100": Sheet(900, 16, bf16=False),
    "RTX 3090": Sheet(936, 24),
    "RTX 3090 Ti": Sheet(1008, 24),
    "RTX 4090": Sheet(1008, 24, fp8=True),
    "RTX A4000": Sheet(448, 16),
    "RTX A5500": Sheet(768, 24),
    "RTX A6000": Sheet(768, 48),
    "A10G": Sheet(600, 24),
    "A100 PCIe": Sheet(1555, 40),
    "A100": Sheet(1555, 40),
    "L4": Sheet(300, 24, fp8=True),
    "L40S": Sheet(864, 48, fp8=True),
    "H100 PCIe": Sheet(2000, 80, fp8=True),
    "H100 NVL": Sheet(3900, 94, fp8=True),
    "H100": Sheet(3350, 80, fp8=True),
    "H200 NVL": Sheet(4800, 141, fp8=True),
    "H200": Sheet(4800, 141, fp8=True),
}


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


def by_data_sheet(name: str, mode: Mode, tf32: bool) -> Rates:
    """Rates of a device of the table."""
    sheet = SHEETS[name]
    share = FP32_SHARE[tf32 and sheet.bf16] if mode == "fp32" else 1.0
    flops = devices.PEAK_TFLOPS[name] * 1e12 * share * MATMUL_UTILISATION
    bandwidth = sheet.bandwidth * 1e9 * BANDWIDTH_UTILISATION
    basis = (
        f"{name} data sheet x assumed utilisation: {flops / 1e12:.0f} TFLOP/s for {_counted_as(mode)} matrix products"
        f" ({MATMUL_UTILISATION:.0%} of the peak), {bandwidth / 1e9:.0f} GB/s ({BANDWIDTH_UTILISATION:.0%}),"
        f" {KERNEL_SECONDS['cuda'] * 1e6:.0f} us per kernel; not measured"
    )
    return Rates(flops, bandwidth, KERNEL_SECONDS["cuda"], basis)


def _counted_as(mode: Mode) -> str:
    """Only some products are in 8 bits, and scaling each tensor costs part of what they win."""
    return "bf16 (fp8 is counted at its rate)" if mode == "fp8" else mode


def measured(device: torch.device, mode: Mode, width: int, inner: int) -> Rates:
    """Rates of the present device, in about a second: a [rows, width] x [width, inner] product and a GELU."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(mode, torch.bfloat16)
    rows = 8192 if device.type == "cuda" else 256 if mode == "fp32" else 16
    a, b = torch.randn(rows, width, dtype=dtype, device=device), torch.randn(width, inner, dtype=dtype, device=device)
    flops = 2 * rows * width * inner / _best_seconds(lambda: a @ b, device, 0.5)
    wide = torch.randn(2**24 if device.type == "cuda" else 2**22, device=device)
    bandwidth = 8 * wide.numel() / _best_seconds(lambda: F.gelu(wide), device, 0.25)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    basis = (
        f"measured now{threads}: {flops / 1e12:.3g} TFLOP/s for {_counted_as(mode)} products [{rows}, {width}]"
        f" x [{width}, {inner}], {bandwidth / 1e9:.3g} GB/s for a GELU;"
        f" {KERNEL_SECONDS[device.type] * 1e6:.0f} us per kernel assumed"
    )
    return Rates(flops, bandwidth, KERNEL_SECONDS[device.type], basis)


def _best_seconds(work: "object", device: torch.device, duration: float) -> float:
    assert callable(work)
    work()
    devices.synchronize(device)
    best, until = float("inf"), time.perf_counter() + duration
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        devices.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def named(name: str, mode: str) -> Sheet:
    """The sheet of a device, by its name in the table; UserError with the names, or where it cannot run the mode."""
    if name not in SHEETS:
        raise UserError(
            f"plan.device={name}: there is no data sheet of it here; give the card nearest in speed with the memory of"
            f' yours, for example plan.device="RTX 2080 Ti" plan.memory_gb=12; choose one of auto, cpu, cuda,'
            f" {', '.join(SHEETS)}"
        )
    if mode == "fp8" and not SHEETS[name].fp8:
        able = ", ".join(other for other, sheet in SHEETS.items() if sheet.fp8)
        raise UserError(f"precision.mode=fp8: {name} has no fp8 products ({able} have); take precision=bf16 or fp16")
    return SHEETS[name]
