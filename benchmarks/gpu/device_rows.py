"""Rows about the device alone: what is installed, and how fast it multiplies, copies and attends."""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from lab import Lab, Result
from torch.nn.attention import SDPBackend, sdpa_kernel

from cramming import device as devices
from cramming.bench.tables import versions
from cramming.model import attention
from cramming.model.attention import Packing
from cramming.plan.roofline import repeat_seconds

HEADS, HEAD_SIZE, HALF_WINDOW = 12, 64, 64  # of bert-base and of ModernBERT's local layers
PINNED_BYTES = 2**28


def facts(lab: Lab) -> Result:
    """Return versions, the choices of attention, and the speed of copies from the host."""
    device = lab.device
    choices = {}
    for length, dtype, share in product(lab.scale.lengths, (torch.bfloat16, torch.float32), (1, 4)):
        query = torch.zeros(8, HEADS, length // share, HEAD_SIZE, device=device, dtype=dtype)
        key = torch.zeros(8, HEADS, length, HEAD_SIZE, device=device, dtype=dtype)
        backend = SDPBackend(torch._fused_sdp_choice(query, key, key))
        name = f"{length // share} queries, {length} keys, {str(dtype).removeprefix('torch.')}"
        choices[name] = backend.name.removesuffix("_ATTENTION").lower()
    result: Result = {
        "name": devices.describe(device).name,
        "seconds_to_here": time.time() - lab.began,
        "versions": versions(),
        "cudnn": torch.backends.cudnn.version(),
        "sdpa": choices,
        "varlen": attention.reason_against("varlen", device, torch.bfloat16, 0.0) or "yes",
        "torchao": find_spec("torchao") is not None,
    }
    if device.type == "cuda":
        result["gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
        result["arch"] = torch.cuda.get_arch_list()
        host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=device)
        seconds = repeat_seconds(lambda: target.copy_(host), device, 0.2)
        result["host_gb_per_second"] = PINNED_BYTES / statistics.median(seconds) / 1e9
    return result


def tell_facts(result: Result) -> str:
    """Return the facts as a line."""
    kernels = list(result["sdpa"].values())
    chosen = ", ".join(f"{name} x{kernels.count(name)}" for name in sorted(set(kernels)))
    parts = [
        result["name"],
        f"torch {result['versions']['torch']}",
        f"cuDNN {result['cudnn']}",
        f"sdpa takes {chosen}",
        f"varlen {result['varlen']}",
        f"from the host {result.get('host_gb_per_second', 0):.0f} GB/s",
        f"{result['seconds_to_here']:.0f} s to start",
    ]
    return "; ".join(parts)


def ceilings(lab: Lab) -> Result:
    """Return TFLOP/s of products and attention, and GB/s of a copy."""
    device, burst, size = lab.device, lab.scale.burst, lab.scale.square
    a, b = (torch.randn(size, size, device=device).to(_dtype(lab)) for _ in range(2))
    operations = 2 * size**3
    pauses = []
    for _ in range(3):
        time.sleep(burst)
        pauses.append(_seconds_of_ten(lambda: a @ b, device))
    lab.note(burst=operations / min(pauses) / 1e12)
    loaded = repeat_seconds(lambda: a @ b, device, 20 * burst)
    lab.note(sustained=operations / statistics.median(loaded[len(loaded) // 2 :]) / 1e12)
    lab.note(copy_gb_per_second=_copy_rate(device, 2 * burst))
    for name in ("tensorwise", "rowwise"):
        scaled = partial(_fp8_product, size, name, device)
        lab.note(**{f"fp8 {name}": _attempt(scaled, operations, device, burst)})
    shapes = {}
    for name, (inputs, outputs, work) in _model_products(lab).items():
        flops = 2 * lab.scale.micro * inputs * outputs
        shapes[name] = _attempt(lambda: work, flops, device, burst)  # noqa: B023
    lab.note(shapes=shapes)
    return {"attention": _attention_rates(lab)}


def tell_ceilings(result: Result) -> str:
    """Return the ceilings as a line."""
    shapes = _numbers(result["shapes"])
    kernels = [f"{name} {rate:.0f}" for name, rate in _numbers(result["attention"]).items()]
    fp8 = [f"{rate:.0f}" for rate in _numbers(result, "fp8 ").values()]
    return (
        f"{result['burst']:.0f} TFLOP/s in a burst, {result['sustained']:.0f} sustained, fp8"
        f" {'/'.join(fp8) or 'none'}, copy {result['copy_gb_per_second']:.0f} GB/s, model shapes"
        f" {min(shapes.values()):.0f}-{max(shapes.values()):.0f}\nattention: {', '.join(kernels)}"
    )


def _dtype(lab: Lab) -> torch.dtype:
    return torch.bfloat16 if lab.scale.mode == "bf16" else torch.float32


def _numbers(result: Result, start: str = "") -> dict[str, float]:
    """Return what was measured, without reasons why something was not."""
    return {k: v for k, v in result.items() if k.startswith(start) and isinstance(v, float)}


def _seconds_of_ten(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one of ten calls, begun on an idle device."""
    work()
    devices.synchronize(device)
    began = time.perf_counter()
    for _ in range(10):
        work()
    devices.synchronize(device)
    return (time.perf_counter() - began) / 10


def _attempt(
    make: Callable[[], Callable[[], object]], flops: float, device: torch.device, seconds: float
) -> float | str:
    """Return the TFLOP/s of the work that `make` gives, or why it does not run."""
    try:
        return flops / statistics.median(repeat_seconds(make(), device, seconds)) / 1e12
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]


def _copy_rate(device: torch.device, seconds: float) -> float:
    """Return GB/s, read and written."""
    block = torch.ones(2**30 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(block)
    taken = repeat_seconds(lambda: target.copy_(block), device, seconds)
    return 8 * block.numel() / statistics.median(taken) / 1e9


def _fp8_product(size: int, scaling: str, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((size, 1) if scaling == "rowwise" else (), device=device)
    other = scale.t() if scaling == "rowwise" else scale
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch._scaled_mm, a, b.t(), scale, other, **options)


def _model_products(lab: Lab) -> dict[str, tuple[int, int, Callable[[], object]]]:
    """Return the products of bert-base's layers: forward, and both of the backward pass."""
    width = 768 if lab.device.type == "cuda" else 32
    products = {}
    for inputs, outputs in ((1, 1), (1, 3), (1, 4), (4, 1)):
        n, m = inputs * width, outputs * width
        x, dy, weight = (
            torch.randn(shape, device=lab.device).to(_dtype(lab))
            for shape in ((lab.scale.micro, n), (lab.scale.micro, m), (m, n))
        )
        products[f"{n}x{m}"] = (n, m, partial(torch.mm, x, weight.t()))
        products[f"{n}x{m} dx"] = (n, m, partial(torch.mm, dy, weight))
        products[f"{n}x{m} dw"] = (n, m, partial(torch.mm, dy.t(), x))
    return products


def _attention_rates(lab: Lab) -> dict[str, float | str]:
    """Return TFLOP/s of forward and backward pass, by kernel and length."""
    cases: tuple[tuple[str, str, int | None, Any], ...] = (
        ("sdpa", "sdpa", None, nullcontext),
        ("sdpa flash", "sdpa", None, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
        ("varlen", "varlen", None, nullcontext),
        ("varlen window", "varlen", HALF_WINDOW, nullcontext),
    )
    rates = {}
    for (name, kernel, half_window, context), length in product(cases, lab.scale.lengths):
        reach = length if half_window is None else min(length, 2 * half_window + 1)
        flops = 14 * lab.scale.micro * reach * HEADS * HEAD_SIZE  # two products forward, five back
        make = partial(_attention, lab, kernel, half_window, length)
        with context():
            rates[f"{name} {length}"] = _attempt(make, flops, lab.device, lab.scale.burst)
    return rates


def _attention(lab: Lab, kernel: str, half_window: int | None, length: int) -> Callable[[], object]:
    """Return a forward and backward pass over rows of one length."""
    tokens, dtype = lab.scale.micro, _dtype(lab)
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=lab.device)
    packing = Packing(bounds, length, length, length)
    layout = attention.prepare(kernel, packing, tokens, half_window, dtype, 0.0)
    shape = (tokens, 3, HEADS, HEAD_SIZE)
    qkv = torch.randn(shape, device=lab.device, dtype=dtype, requires_grad=True)

    def both_passes() -> None:
        attention.attend(*qkv.unbind(1), layout).sum().backward()
        qkv.grad = None

    return both_passes
