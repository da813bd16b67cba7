"""Stage 1: is what runs on this device right, how fast does it multiply, and how fast and large are our steps?

Steps are measured against what `cramming plan` says of them, with a table of their kernels, as the dry run has one.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import gpu_tests
import torch
from in_process import InProcess
from lab import MODELS, Lab, Row

from cramming import device as devices
from cramming.bench.main import matmul_flops
from cramming.bench.worker import warm_up
from cramming.plan.memory import Simulation
from cramming.plan.roofline import repeat_seconds
from cramming.plan.search import PlanConfig, find_target, planned_config, price_of

KERNELS = 30  # of the slowest, in a row


def rows(lab: Lab) -> list[Row]:
    """The most wanted first."""
    short, long = lab.scale.lengths
    speeds = [
        Row(f"ours {m} {n}", 60, partial(speed, lab, m, n)) for n in (short, long) for m in MODELS
    ]
    return [
        Row("ceilings", 15, partial(ceilings, lab)),
        *speeds[:1],
        Row("tests", 300, partial(gpu_tests.run, lab)),
        *speeds[1:],
    ]


def ceilings(lab: Lab) -> dict[str, Any]:
    """Products per second in bf16 and fp8, scaled by tensor and by row; bytes per second of a copy."""
    device = lab.device
    size = 8192 if device.type == "cuda" else 256
    low = torch.bfloat16 if lab.scale.mode == "bf16" else torch.float32
    found: dict[str, Any] = {
        "tflops": {str(low).removeprefix("torch."): matmul_flops(device, low) / 1e12}
    }
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    for name, shape in (("tensorwise", ()), ("rowwise", (size, 1))):
        scale = torch.ones(shape, device=device)
        other = scale.t() if shape else scale
        product = partial(
            torch._scaled_mm, a, b.t(), scale, other, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        try:
            found["tflops"][f"fp8 {name}"] = (
                2 * size**3 / statistics.median(repeat_seconds(product, device, 1.0)) / 1e12
            )
        except RuntimeError as error:
            found[f"fp8 {name}"] = str(error).splitlines()[0]
    block = torch.ones(2**30 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(block)
    seconds = statistics.median(repeat_seconds(lambda: target.copy_(block), device, 1.0))
    found["copy_gb_per_second"] = 8 * block.numel() / seconds / 1e9
    return found


def speed(lab: Lab, model: str, length: int) -> dict[str, Any]:
    """Our step as a run makes it: some micro-batches and an update."""
    spec = lab.spec(model, length, micro_batches=lab.scale.batch // lab.scale.micro)
    with InProcess(spec) as ours:
        first_seconds = [warm_up(ours, 1), warm_up(ours, 1)]
        found = ours.run(2, lab.scale.steps)
        try:
            kernels: Any = slowest_kernels(partial(ours.run, 2, 1), lab.device)
        except Exception as error:  # a profiler that does not work takes no measurement with it
            kernels = f"{type(error).__name__}: {error}"
    train = spec["settings"]["train"]
    tokens = train["batch_size"] * length
    return {
        **ours.facts,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / statistics.median(found.seconds),
        "peak_bytes": found.peak_bytes,
        "peak_tflops": devices.describe(lab.device).peak_tflops,
        "first_steps_seconds": first_seconds,
        "raw_seconds": found.seconds,
        "losses": found.losses,
        "plan": planned(spec["settings"], lab.device),
        "kernels": kernels,
    }


def planned(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What `cramming plan` says of the same settings on this device."""
    config = planned_config(settings)
    target = find_target(PlanConfig(None, "auto", None), device.type, config)
    option = price_of(config, target, Simulation(config, target.place), config.train.rows)
    found = {"peak_bytes": option.peak_bytes, "tokens_per_second": option.tokens_per_second}
    return {**found, "rates": asdict(target.rates)}


def slowest_kernels(
    work: Callable[[], object], device: torch.device
) -> list[tuple[str, int, float]]:
    """Name, launches and microseconds of what took longest on the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        work()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [
        e for e in profiler.key_averages() if e.device_type == kind and not e.is_user_annotation
    ]
    times = [
        (e.key[:120], e.count, e.self_device_time_total if on_gpu else e.self_cpu_time_total)
        for e in events
    ]
    return sorted(times, key=lambda row: -row[2])[:KERNELS]
