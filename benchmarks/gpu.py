"""What one GPU does: speed beside a compiled Hugging Face loop, and large batches in the memory of a small card.

    python benchmarks/gpu.py --out gpu.md              # an H200: under ten minutes
    python benchmarks/gpu.py --out gpu.md --scale tiny --device cpu

Rows, the most wanted first, and the file written anew after each; none is begun after `--minutes`:

    ceiling          the rate of large bf16 matrix products
    bert 128, 1024   BERT-base's shapes (111M parameters), bf16, 65,536 tokens a step, ours and `BertForMaskedLM`, both
                     compiled, in turns; at 1,024 tokens documents are packed and ours masks what is another document,
                     while the plain loop attends to all of the row
    cap base, large  BERT-base and a BERT of 24 layers (335M) in 11 GiB, 8,192 sequences of 128 a step by accumulation
    fp8 128, 1024    ours with the blocks' linear layers in fp8 (extra `lowbit`)
    modern 128, 1024 ModernBERT's shapes (137M) beside `ModernBertForMaskedLM`

The share of the ceiling counts the operations of `cramming.model.config.flops_per_token`. torch 2.11 is enough; where
packages cannot be installed, hydra-core, omegaconf, antlr4-python3-runtime and torchao come as wheels.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cramming import tricks
from cramming.bench import main as bench
from cramming.bench import report, sides
from cramming.bench.worker import Worker, warm_up
from cramming.config import UserError, build, config_folder
from cramming.device import describe, select
from cramming.model.config import ModelConfig

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """Sizes of all rows. Shapes are hidden size, layers, heads; `tokens` per step, `batch` sequences where capped."""

    base: tuple[int, int, int]
    large: tuple[int, int, int]
    modern: tuple[int, int, int]
    lengths: tuple[int, int]
    tokens: int
    batch: int
    memory_gb: float
    vocab_size: int
    mode: str
    compiled: str
    rounds: int
    steps: int


SCALES = {
    "full": Scale((768, 12, 12), (1024, 24, 16), (768, 22, 12), (128, 1024), 65536, 8192, 11, 32768, "bf16", "model",
                  4, 8),
    "tiny": Scale((32, 2, 2), (48, 3, 2), (32, 3, 2), (16, 32), 256, 32, 11, 128, "fp32", "off", 2, 1),
}  # fmt: skip


class Gpu:
    """The rows, on one device at one scale."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.scale, self.device, self.ceiling = scale, device, 0.0
        short, long = scale.lengths
        self.rows: dict[str, Callable[[], Rows]] = {
            "ceiling": self.measure_ceiling,
            "bert 128": partial(self.beside, "bert loop", scale.base, short, "rows"),
            "bert 1024": partial(self.beside, "bert loop", scale.base, long, "documents"),
            "cap base": partial(self.capped, scale.base),
            "cap large": partial(self.capped, scale.large),
            "fp8 128": partial(self.eight_bits, short, "rows"),
            "fp8 1024": partial(self.eight_bits, long, "documents"),
            "modern 128": partial(self.beside, "modernbert loop", scale.modern, short, "rows"),
            "modern 1024": partial(self.beside, "modernbert loop", scale.modern, long, "documents"),
        }

    def measure_ceiling(self) -> Rows:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.scale.mode]
        self.ceiling = sides.matmul_flops(self.device, dtype)
        return [{"tflops": self.ceiling / 1e12, "dtype": self.scale.mode}]

    def settings(self, length: int, packing: str, *overrides: str) -> dict[str, Any]:
        """The root configuration with what all rows share."""
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        shared = [
            "model=bert-base", f"model.max_length={max(512, length)}", "objective=mlm-bert", "optim=adamw",
            f"precision={self.scale.mode}", f"train.sequence_length={length}", f"train.packing={packing}",
        ]  # fmt: skip
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = OmegaConf.to_container(compose("config", [*shared, *overrides]), resolve=True)
        assert isinstance(composed, dict)
        settings = {str(key): value for key, value in composed.items()}
        return {**settings, "model": asdict(build(ModelConfig, settings["model"], "model"))}  # every field, to be set

    def beside(self, side: str, shape: tuple[int, int, int], length: int, packing: str) -> Rows:
        """Ours and a plain loop, in turns."""
        scale = self.scale
        (peer,) = (peer for peer in bench.PEERS if peer["side"] == side)
        config = bench.BenchConfig("peers", None, scale.rounds, scale.steps, scale.vocab_size, [], 200, 512, {}, Path(),
                                   Path())  # fmt: skip
        rows = scale.tokens // length
        changes = shape_of(shape) | {"train.batch_size": rows, "train.micro_batch": rows}
        settings = self.settings(length, packing)
        label = f"{shape[0]}x{shape[1]}, {length}, {packing}"
        return bench.pair(settings, config, self.device, changes, peer, label, [scale.compiled])

    def capped(self, shape: tuple[int, int, int]) -> Rows:
        """Ours in the memory of a small card, the batch as large as in a day's run; the micro-batch is found here."""
        length = self.scale.lengths[0]
        changes = {"train.batch_size": self.scale.batch, "train.micro_batch": "auto"}
        row = self.alone(shape, length, "rows", changes, 1, 2, memory_gb=self.scale.memory_gb)
        return [{**row, "memory_gb": self.scale.memory_gb}]

    def eight_bits(self, length: int, packing: str) -> Rows:
        """Ours in fp8; emulated where there is no such hardware, which says nothing about speed."""
        rows = self.scale.tokens // length
        changes = {"train.batch_size": rows, "train.micro_batch": rows, "precision.mode": "fp8"}
        changes["precision.emulate_fp8"] = self.device.type == "cpu"
        return [self.alone(self.scale.base, length, packing, changes, self.scale.rounds, self.scale.steps)]

    def alone(
        self, shape: tuple[int, int, int], length: int, packing: str, changes: dict[str, Any], rounds: int, steps: int,
        **limits: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Our best stack by itself: the median step."""
        stack = {**tricks.best(self.device.type, "fp32").settings, "runtime.compile": self.scale.compiled}
        settings = tricks.changed(self.settings(length, packing), {**stack, **shape_of(shape), **changes})
        job = {"side": "ours", "settings": settings, "vocab_size": self.scale.vocab_size, "device": self.device.type}
        with Worker({**job, **limits}) as worker:
            first_seconds = warm_up(worker, 1)
            seconds, losses = list[float](), list[float]()
            for turn in range(rounds):
                found = worker.run(1 + turn * steps, steps)
                seconds, losses = seconds + found.seconds, losses + found.losses
        train = settings["train"]
        return {
            **worker.facts,
            "shape": f"{shape[0]}x{shape[1]}, {length}, {packing}",
            "tokens_per_step": train["batch_size"] * length,
            "tokens_per_second": train["batch_size"] * length / statistics.median(seconds),
            "peak_bytes": found.peak_bytes,
            "first_steps_seconds": first_seconds,
            "raw_seconds": seconds,
            "losses": losses,
        }

    def run(self, name: str) -> Rows:
        """One row, by its name; where it cannot be measured, the reason."""
        began = time.perf_counter()
        try:
            found = self.rows[name]()
        except UserError as error:
            found = [{"error": str(error)}]
        for row in found:
            row |= {"row": name, "seconds_in_all": time.perf_counter() - began}
            if self.ceiling and "tokens_per_second" in row:
                row["share_of_ceiling"] = row["flops_per_token"] * row["tokens_per_second"] / self.ceiling
        return found


def shape_of(shape: tuple[int, int, int]) -> dict[str, Any]:
    """As dotted settings; the inner size is four times the hidden one unless the peer's table says otherwise."""
    hidden, layers, heads = shape
    names = ("model.hidden_size", "model.num_layers", "model.num_heads", "model.intermediate_size")
    return dict(zip(names, (hidden, layers, heads, 4 * hidden), strict=True))


def table(rows: Rows) -> list[str]:
    """One line per row."""
    lines = ["| row | shape, length, packing | tokens/s | beside the loop | of the ceiling | peak memory, GB |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['row']} | not run: {row['error']} | | | | |")
        elif "tflops" in row:
            lines.append(f"| {row['row']} | {row['dtype']} products: {row['tflops']:.3g} TFLOP/s | | | | |")
        else:
            ratio = f"{row['speedup']:.2f}x of {row['base_tokens_per_second']:.0f}" if "speedup" in row else ""
            share = f"{row['share_of_ceiling']:.0%}" if "share_of_ceiling" in row else ""
            lines.append(
                f"| {row['row']} | {row['shape']} | {row['tokens_per_second']:.0f} | {ratio} | {share}"
                f" | {row['peak_bytes'] / 1e9:.2f} |"
            )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="full", choices=list(SCALES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=7.5, help="no row is begun after these")
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    began, device, rows = time.perf_counter(), select(args.device), Rows()
    gpu = Gpu(SCALES[args.scale], device)
    if unknown := set(args.only or ()) - set(gpu.rows):
        raise SystemExit(f"--only: no row {sorted(unknown)}; there are: {', '.join(gpu.rows)}")
    about = {**asdict(describe(device)), **report.versions(), "scale": asdict(gpu.scale)}
    for name in args.only or gpu.rows:
        late = time.perf_counter() - began > 60 * args.minutes
        rows += [{"row": name, "error": f"not begun within {args.minutes} minutes"}] if late else gpu.run(name)
        text = ["# One GPU", "", f"`python benchmarks/gpu.py --scale {args.scale}`: {about}", "", *table(rows), ""]
        args.out.write_text("\n".join([*text, "```json", *map(json.dumps, rows), "```", ""]), encoding="utf-8")
        print(table(rows)[-1], flush=True)


if __name__ == "__main__":
    main()
