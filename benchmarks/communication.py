"""The constants of cramming/plan/scaling.py, measured: latency and bandwidth between the ranks of this run.

    torchrun --nproc-per-node 4 benchmarks/communication.py --out benchmarks/results/communication_<device>_<date>.json

Each collective is timed at several sizes; the fastest of the repeats counts, since anything else on the machine only
adds. Latency and bandwidth are the line by least squares of relative errors through every second size; how far the
other sizes are from it is the error of the model. On GPUs the backend is nccl, on CPUs gloo.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from cramming.plan.scaling import Link, rounds_of
from torch import Tensor

from cramming.files import write_atomically

SIZES = [4 * 4**k for k in range(2, 12)]  # bytes in all, 64 B to 16 MiB
SECONDS_EACH = 0.6


def collectives(
    rank: int, world: int, device: torch.device
) -> dict[str, Callable[[int], Callable[[], object]]]:
    """By name: what makes, for a number of bytes, the call that is timed."""

    def whole(num_bytes: int) -> Tensor:
        return torch.ones(max(world, num_bytes // 4 // world * world), device=device)

    def all_reduce(num_bytes: int) -> Callable[[], object]:
        tensor = torch.zeros_like(whole(num_bytes))
        return lambda: dist.all_reduce(tensor)

    def all_gather(num_bytes: int) -> Callable[[], object]:
        into = whole(num_bytes)
        part = into[: len(into) // world].clone()
        return lambda: dist.all_gather_into_tensor(into, part)

    def reduce_scatter(num_bytes: int) -> Callable[[], object]:
        tensor = whole(num_bytes)
        into = tensor[: len(tensor) // world].clone()
        return lambda: dist.reduce_scatter_tensor(into, tensor)

    def message(num_bytes: int) -> Callable[[], object]:
        tensor = whole(num_bytes)

        def there_and_back() -> None:
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        return there_and_back

    return {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "message": message,
    }


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the slowest rank's, in the fastest of the repeats; every rank makes as many."""
    times: list[float] = []
    until = time.perf_counter() + SECONDS_EACH
    for repeat in range(100_000):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        report = torch.tensor(
            [time.perf_counter() - began, float(time.perf_counter() > until)], device=device
        )
        dist.all_reduce(report, dist.ReduceOp.MAX)
        if repeat > 2:
            times.append(float(report[0]))
        if repeat > 5 and report[1]:
            break
    return min(times)


def fit(
    sizes: list[int], seconds: list[float], rounds: float, moved: float
) -> tuple[Link, list[float]]:
    """The link, and the errors at all sizes. A call takes `rounds` latencies, moves `moved` of its bytes."""
    size_N, second_N = np.array(sizes), np.array(seconds)
    design_N2 = np.stack([np.full(len(sizes), rounds), moved * size_N], axis=1) / second_N[:, None]
    latency, inverse = np.linalg.lstsq(design_N2[::2], np.ones(len(sizes))[::2], rcond=None)[0]
    errors = design_N2 @ [latency, inverse] - 1
    return Link(1 / inverse, latency), errors.tolist()


def main() -> None:
    """One process of torchrun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    half = rounds_of(world), (world - 1) / world
    costs = {
        "all_reduce": (2 * half[0], 2 * half[1]),
        "all_gather": half,
        "reduce_scatter": half,
        "message": (2, 2),
    }
    found = {}
    for name, make in collectives(rank, world, device).items():
        seconds = [fastest(make(size), device) for size in SIZES]
        link, errors = fit(SIZES, seconds, *costs[name])
        found[name] = {
            "bytes": SIZES,
            "seconds": seconds,
            "bandwidth": link.bandwidth,
            "latency": link.latency,
            "errors": errors,
            "worst_held_out_error": max(map(abs, errors[1::2])),
        }
        if rank == 0:
            print(
                f"{name}: {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us; held-out sizes within"
                f" {found[name]['worst_held_out_error']:.0%}"
            )
    if rank == 0:
        about = {"world_size": world, "backend": dist.get_backend(), "torch": torch.__version__}
        about["device"] = (
            torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
        )
        write_atomically(out, json.dumps({**about, "collectives": found}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
