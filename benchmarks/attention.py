"""Attention kernels beside each other on one core of a CPU: forward and backward pass, by number format and shape.

Rows of equal length as in pretraining, and ragged ones as in fine-tuning (lengths drawn evenly from an eighth of the
longest up). Kernels take turns; medians of the rounds, and their ratio to SDPA (`sdpa`, or `padded` for ragged rows).

    python benchmarks/attention.py --out benchmarks/results/<name>.md
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cramming.environment import cpu_name
from cramming.model import attention
from cramming.model.attention import Layout, Packing

# rows, longest, heads, head size, whether all rows are as long
SHAPES = (
    (64, 128, 4, 64, True), (16, 128, 12, 64, True), (4, 512, 12, 64, True), (2, 1024, 12, 64, True),
    (16, 32, 12, 32, False), (16, 128, 12, 32, False),
)  # fmt: skip
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def packing_of(rows: int, longest: int, equal: bool) -> Packing:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 8, longest + 1, (rows,), generator=generator)
    lengths = torch.full((rows,), longest) if equal else lengths
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int()
    return Packing(bounds, longest if equal else None, longest)


def pass_seconds(qkv: Tensor, layout: Layout) -> float:
    qkv = qkv.clone().requires_grad_()
    begun = time.perf_counter()
    out = attention.attend(*qkv.unbind(1), layout)
    out.backward(torch.ones_like(out))
    return time.perf_counter() - begun


def measure(shape: tuple[int, int, int, int, bool], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Median milliseconds of each kernel."""
    rows, longest, heads, size, equal = shape
    packing = packing_of(rows, longest, equal)
    tokens = int(packing.bounds_S[-1])
    qkv = torch.randn(tokens, 3, heads, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    layouts = {
        kernel: attention.prepare(kernel, packing, tokens, None, dtype, 0.0)
        for kernel in ("sdpa" if equal else "padded", "products")
    }
    times: dict[str, list[float]] = {kernel: [] for kernel in layouts}
    for turn in range(rounds + 1):
        for kernel, layout in layouts.items():
            seconds = pass_seconds(qkv, layout)
            if turn:  # the first warms up
                times[kernel].append(1000 * seconds)
    return {kernel: statistics.median(found) for kernel, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        for name, dtype in FORMATS.items():
            found.append({"shape": shape, "format": name, "ms": measure(shape, dtype, arguments.rounds)})
            print(found[-1], file=sys.stderr, flush=True)
    lines = [
        "# Attention kernels on a CPU",
        "",
        f"Command: `python benchmarks/attention.py --rounds {arguments.rounds}`. Python {platform.python_version()},"
        f" torch {torch.__version__}, {cpu_name()} ({torch.backends.cpu.get_cpu_capability()}), 1 thread, load average"
        f" at the end {os.getloadavg()[0]:.1f}. Forward and backward pass, medians, ms.",
        "",
        "| rows x longest, heads x head size | format | SDPA | products | SDPA : products |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        rows, longest, heads, size, equal = row["shape"]
        (_, base), (_, ours) = row["ms"].items()
        text = f"{rows} x {longest}{'' if equal else ' ragged'}, {heads} x {size}"
        lines.append(f"| {text} | {row['format']} | {base:.2f} | {ours:.2f} | {base / ours:.2f}x |")
    lines += ["", "Raw:", "```json", json.dumps(found), "```", ""]
    arguments.out.write_text("\n".join(lines), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
