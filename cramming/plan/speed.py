"""Speed of training on a device.

Tokens per second are floating-point operations per second divided by those per token. A device reaches a share of its
peak that depends on kernels, shapes and compiler, so the prediction is a range.
"""

from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from cramming.config import UserError
from cramming.plan import cards
from cramming.plan.cards import Card
from cramming.precision import DTYPES, Mode, float32_products

# Least and largest share of the peak that a training step reaches. The peak of a GPU is that of its data sheet:
# published rates of crammed BERT, compiled, are 65 % on a 2080 Ti and 40 % on an A6000
# (docs/tutorials/first_gpu_day.md); 25 % for eager steps is assumed.
GPU_SHARES = (0.25, 0.65)
# The peak of a CPU is the rate of a product that is measured now: `cramming bench` measured steps at 52 to 78 % of it
# in fp32 (docs/results/tricks.md), and a step with AMX in bf16 reached 17 % (docs/log.md).
CPU_FP32_SHARES = (0.5, 0.8)
CPU_16_BIT_SHARES = (0.15, 0.5)
TF32_SHARE = 0.5  # of the 16-bit products, on every card that has TF32


@dataclass(frozen=True)
class Speed:
    """Floating-point operations per second of training: at least, at most, and the basis of both."""

    least_flops: float
    most_flops: float
    basis: str


def speed_by_data_sheet(card: Card, mode: Mode, tf32: bool) -> Speed:
    """Return the speed of a card of the table."""
    peak = products_per_second(card, mode, tf32)
    least_share, most_share = GPU_SHARES
    basis = (
        f"{least_share:.0%} to {most_share:.0%} (assumed, not measured) of {peak / 1e12:.3g} TFLOP/s for"
        f" {_counted_as(mode)} products ({card.name}, {card.source})"
    )
    if mode == "bf16" and not card.has_bf16:
        basis += "; the card has no bf16 units and emulates them: take precision=fp16"
    if card.is_amd:
        basis += "; training refuses AMD GPUs"
    elif card.needs_cuda_12:
        basis += "; training on it needs torch's build for CUDA 12.6 (cu126)"
    return Speed(least_share * peak, most_share * peak, basis)


def measured_speed(device: torch.device, mode: Mode, tf32: bool, width: int, inner: int) -> Speed:
    """Return the speed of the present device from a [rows, width] x [width, inner] product, in half a second."""
    if device.type == "cuda":
        rows, shares = 8192, GPU_SHARES
    elif mode == "fp32":
        rows, shares = 256, CPU_FP32_SHARES
    else:  # few rows, because a CPU without instructions for 16 bits is slow
        rows, shares = 64, CPU_16_BIT_SHARES
    factors = {
        "left": torch.randn(rows, width, dtype=DTYPES[mode], device=device),
        "right": torch.randn(width, inner, dtype=DTYPES[mode], device=device),
    }
    timer = Timer("left @ right", globals=factors, num_threads=torch.get_num_threads())
    with float32_products(tf32):
        product_seconds = timer.blocked_autorange(min_run_time=0.5).median
    peak = 2 * rows * width * inner / product_seconds
    least_share, most_share = shares
    basis = (
        f"{least_share:.0%} to {most_share:.0%} (assumed) of {peak / 1e12:.3g} TFLOP/s, measured now for"
        f" {_counted_as(mode)} products [{rows}, {width}] x [{width}, {inner}]"
    )
    return Speed(least_share * peak, most_share * peak, basis)


def products_per_second(card: Card, mode: Mode, tf32: bool) -> float:
    """Return the FLOP/s of the card's products at its peak.

    fp8 counts as 16 bits, and bf16 as fp32 where the card emulates it.
    """
    if mode == "fp32" and tf32 and card.has_bf16:
        return card.tflops * TF32_SHARE * 1e12
    if mode == "fp32" or (mode == "bf16" and not card.has_bf16):
        return card.fp32_tflops * 1e12
    return card.tflops * 1e12


def find_card(name: str) -> Card:
    """Return the card of this name; UserError with the known names."""
    card = cards.find(name)
    if card is None:
        known = ", ".join(card.name for card in cards.CARDS)
        raise UserError(
            f"--device={name}: no such card in the table. Name the card nearest in speed and your memory, as in"
            f' --device "RTX 2080 Ti" --memory-gb 12. Known are auto, cpu, cuda, {known}.'
        )
    return card


def _counted_as(mode: Mode) -> str:
    """Return the mode whose rate counts; in fp8 only some products have 8 bits, and scaling costs part of the gain."""
    return "bf16 (fp8 is counted at its rate)" if mode == "fp8" else mode
