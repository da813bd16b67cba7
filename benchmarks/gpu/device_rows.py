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
from cramming.bench.main import repeat_seconds
from cramming.bench.tables import versions
from cramming.model import attention
from cramming.model.attention import Packing

HEADS, HEAD_SIZE, HALF_WINDOW = 12, 64, 64  # of bert-base and of ModernBERT's local layers
PINNED_BYTES = 2**28
Work = Callable[[], object]


def facts(lab: Lab) -> Result:
    """Return versions, the choices of attention, and the speed of copies from the host."""
    device = lab.device
    choices = {}
    for length, dtype, share in product(lab.scale.lengths, (torch.bfloat16, torch.float32), (1, 4)):
        query, key = (
            torch.zeros((8, HEADS, size, HEAD_SIZE), device=device, dtype=dtype, requires_grad=True)
            for size in (length // share, length)
        )
        name = f"{length // share} queries, {length} keys, {dtype}"
        choices[name] = SDPBackend(torch._fused_sdp_choice(query, key, key)).name
    result: Result = {
        "name": devices.describe(device).name,
        "seconds_to_here": time.monotonic() - lab.began,
        "versions": versions(),
        "cudnn": torch.backends.cudnn.version(),
        "sdpa": choices,
        "varlen": attention.reason_against("varlen", device, torch.bfloat16, 0.0) or "yes",
        "torchao": find_spec("torchao") is not None,
        "memory_gb": lab.memory_gb,
    }
    if device.type == "cuda":
        host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=device)
        seconds = repeat_seconds(lambda: target.copy_(host), device, 0.2)
        result["host_gb_per_second"] = PINNED_BYTES / statistics.median(seconds) / 1e9
    return result


def tell_facts(result: Result) -> str:
    """Return the facts as a line."""
    kernels = list(result["sdpa"].values())
    chosen = ", ".join(f"{name} x{kernels.count(name)}" for name in sorted(set(kernels)))
    host = result.get("host_gb_per_second", 0.0)
    return (
        f"{result['name']}, torch {result['versions']['torch']}, cuDNN {result['cudnn']}, host"
        f" {host:.0f} GB/s, {result['seconds_to_here']:.0f} s to start, sdpa {chosen}, varlen"
        f" {result['varlen']}"
    )


def ceilings(lab: Lab) -> Result:
    """Return TFLOP/s of products and attention, and GB/s of a copy."""
    device, burst, size = lab.device, lab.scale.burst, lab.scale.square
    operations = 2 * size**3
    square = partial(torch.mm, *_random(lab, (size, size), (size, size)))
    bursts = []
    for _ in range(3):
        time.sleep(burst)  # boost clocks need a pause
        bursts.append(min(repeat_seconds(square, device, 0.0)))
    lab.note(burst=operations / min(bursts) / 1e12)
    loaded = repeat_seconds(square, device, 20 * burst)
    lab.note(sustained=operations / statistics.median(loaded[len(loaded) // 2 :]) / 1e12)
    block = torch.ones(2**30 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(block)
    copied = repeat_seconds(lambda: target.copy_(block), device, 2 * burst)
    lab.note(copy_gb_per_second=8 * block.numel() / statistics.median(copied) / 1e9)
    fp8 = {name: (operations, partial(_fp8_product, lab, name)) for name in ("tensor", "row")}
    lab.note(fp8=_rates(lab, fp8))
    lab.note(shapes=_rates(lab, _model_products(lab)))
    return {"attention": _rates(lab, _attention_cases(lab))}


def tell_ceilings(result: Result) -> str:
    """Return the ceilings as a line, and attention as another."""
    fp8, shapes, kernels = (_numbers(result[name]) for name in ("fp8", "shapes", "attention"))
    rates = [f"{name} {rate:.0f}" for name, rate in kernels.items()]
    return (
        f"{result['burst']:.0f} TFLOP/s in a burst, {result['sustained']:.0f} sustained, copy"
        f" {result['copy_gb_per_second']:.0f} GB/s, fp8 {max(fp8.values(), default=0):.0f}, model's"
        f" shapes {min(shapes.values()):.0f}-{max(shapes.values()):.0f}\n{', '.join(rates)}"
    )


def _numbers(rates: dict[str, Any]) -> dict[str, float]:
    """Return what was measured, without reasons why something was not."""
    return {name: rate for name, rate in rates.items() if isinstance(rate, float)}


def _rates(lab: Lab, cases: dict[str, tuple[float, Callable[[], Work]]]) -> dict[str, Any]:
    """Return the TFLOP/s of each case, or why it does not run; a case has operations, and makes its work."""
    rates: dict[str, Any] = {}
    for name, (operations, make) in cases.items():
        try:
            seconds = statistics.median(repeat_seconds(make(), lab.device, lab.scale.burst))
            rates[name] = operations / seconds / 1e12
        except (RuntimeError, ValueError) as error:
            rates[name] = str(error).splitlines()[0]
    return rates


def _random(lab: Lab, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if lab.scale.mode == "bf16" else torch.float32
    return [torch.randn(shape, device=lab.device, dtype=dtype) for shape in shapes]


def _fp8_product(lab: Lab, scaling: str) -> Work:
    size = lab.scale.square
    a, b = (x.to(torch.float8_e4m3fn) for x in _random(lab, (size, size), (size, size)))
    scale = torch.ones((size, 1) if scaling == "row" else (), device=lab.device)
    other = scale.t() if scaling == "row" else scale
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch._scaled_mm, a, b.t(), scale, other, **options)


def _model_products(lab: Lab) -> dict[str, tuple[float, Callable[[], Work]]]:
    """Return the products of bert-base's layers: forward, and both of the backward pass."""
    rows, width = lab.scale.micro, 768 if lab.device.type == "cuda" else 32
    cases: dict[str, tuple[float, Callable[[], Work]]] = {}
    for inputs, outputs in ((1, 1), (1, 3), (1, 4), (4, 1)):
        n, m = inputs * width, outputs * width
        shapes = {
            "": ((rows, n), (n, m)),
            " dx": ((rows, m), (m, n)),
            " dw": ((m, rows), (rows, n)),
        }
        for name, pair in shapes.items():
            make = partial(lambda pair: partial(torch.mm, *_random(lab, *pair)), pair)
            cases[f"{n}x{m}{name}"] = 2 * rows * n * m, make
    return cases


def _attention_cases(lab: Lab) -> dict[str, tuple[float, Callable[[], Work]]]:
    """Return forward and backward pass together, by kernel and length."""
    flash = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    kernels: tuple[tuple[str, str, int | None, Any], ...] = (
        ("sdpa", "sdpa", None, nullcontext),
        ("sdpa flash", "sdpa", None, flash),
        ("varlen", "varlen", None, nullcontext),
        ("varlen window", "varlen", HALF_WINDOW, nullcontext),
    )
    cases = {}
    for (name, kernel, half_window, context), length in product(kernels, lab.scale.lengths):
        reach = length if half_window is None else min(length, 2 * half_window + 1)
        operations = 14.0 * lab.scale.micro * reach * HEADS * HEAD_SIZE  # products: two, and five
        make = partial(_attention, lab, kernel, half_window, length, context)
        cases[f"{name} {length}"] = operations, make
    return cases


def _attention(lab: Lab, kernel: str, half_window: int | None, length: int, context: Any) -> Work:
    tokens = lab.scale.micro
    qkv, d_out = _random(lab, (tokens, 3, HEADS, HEAD_SIZE), (tokens, HEADS, HEAD_SIZE))
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=lab.device)
    packing = Packing(bounds, length, length, length)
    layout = attention.prepare(kernel, packing, tokens, half_window, qkv.dtype, 0.0)
    # Leaves of their own: the backward pass of `unbind` would stack their gradients, which is no work of attention's.
    inputs = [part.detach().requires_grad_() for part in qkv.unbind(1)]

    def both_passes() -> None:
        with context():
            out = attention.attend(*inputs, layout)
            torch.autograd.grad(out, inputs, d_out)

    return both_passes
