"""The verb `bench`: speed and memory of every trick relative to the reference, and the correctness gate.

Each row is a pair of processes, reference and candidate, measured interleaved in rounds of a few steps. The ratio is
that of the medians, so that a machine that slows down slows both. The table goes to `--out`, under this device's
name; that file's tables of other devices stay, and so do rows that an earlier call measured under the same
conditions.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from cramming import device as devices
from cramming.bench import gate as loss_gate
from cramming.bench import tables, tricks, verdicts
from cramming.bench.gate import BASELINE, Curves, spec_of
from cramming.bench.tricks import Trick, changed
from cramming.bench.worker import Spec, Worker, warm_up
from cramming.config import UserError, expand_home, require
from cramming.environment import git
from cramming.invocation import Invocation
from cramming.precision import DTYPES, float32_products, resolve
from cramming.progress import Progress, say

# device of a trick -> why it does not run on the other kind of device
ELSEWHERE = {"cuda": "needs CUDA", "cpu": "is for CPUs only"}
Make = Callable[[Spec], Worker]


@dataclass(frozen=True)
class BenchConfig:
    """Options that measured numbers depend on.

    Reference and candidate take `rounds` turns of `steps` steps each. `gate` holds changes of the recipe by dotted
    name: the gate's loss curves need no model as large as the timed one.
    """

    rounds: int
    steps: int
    vocab_size: int
    gate_steps: int
    gate_vocab_size: int
    gate: Mapping[str, Any]


def main(
    settings: dict[str, Any],
    invocation: Invocation,
    *,
    only: str | None,
    rounds: int,
    steps: int,
    vocab_size: int,
    gate_steps: int,
    gate_vocab_size: int,
    gate: str,
    out: Path,
    raw: Path,
) -> None:
    """Measure the selected rows; write table and verdicts after each.

    `only` lists names of rows, separated by semicolons. `out` is the page of the tables, `raw` the folder of the raw
    numbers.
    """
    config = BenchConfig(
        rounds, steps, vocab_size, gate_steps, gate_vocab_size, changes_of_gate(gate)
    )
    least = 2 * loss_gate.WINDOW
    require(gate_steps >= least, f"--gate-steps={gate_steps}: too few. Give at least {least}.")
    device = devices.select(invocation.device)
    gates = expand_home(settings["gates"], "gates")
    names = None if only is None else [name.strip() for name in only.split(";")]
    rows = chosen(names, device)
    described = devices.describe(device)
    verdicts.load(gates)  # a damaged file fails now, not after the first row
    for trick in rows:  # a setting that does not exist fails now
        changed(settings, trick.settings, f"bench: the row '{trick.name}'")
    order = [trick.name for trick in chosen(None, device)]
    earlier, floors = tables.read_earlier(raw, described, settings, asdict(config))
    known = {row["name"]: row for row in earlier}
    with Progress("bench", total=len(rows), unit="tricks") as bar, ExitStack() as running:
        bench = Bench(settings, config, device, running)
        for trick in rows:
            bar.note(trick.name)
            known[trick.name], verdict = bench.checked_row(trick)
            floors |= bench.curves.floors
            if verdict:
                key = verdicts.device_key(described.name, torch.__version__)
                loss_gate.save(gates, key, [verdict], list(bench.curves.floors.values()))
            table = [known[name] for name in order if name in known]
            file = tables.write(
                out, raw, table, described, settings, asdict(config), list(floors.values())
            )
            bar.advance(1)
            say(tables.line(known[trick.name]))
    say(f"{out}: {len(rows)} rows measured, {len(table)} in the table; raw numbers in {file}")


def changes_of_gate(text: str) -> dict[str, Any]:
    """Return the changes that `--gate` makes: `model.num_layers=3 optim.lr=3.0e-3` by dotted name."""
    changes = {}
    for word in text.split():
        name, sign, value = word.partition("=")
        require(sign, f"--gate={text}: {word} has no value. Write {word}=...")
        changes[name] = yaml.safe_load(value)
    return changes


def chosen(only: Sequence[str] | None, device: torch.device) -> list[Trick]:
    """Return the rows of the table: all, including those for other devices, or those named."""
    best = tricks.best(device.type, resolve("auto", device))
    every = {trick.name: trick for trick in (*tricks.TRICKS, best)}
    unknown = sorted(set(only or ()) - every.keys())
    require(
        not unknown,
        f"--only={';'.join(only or ())}: no trick {unknown}. Choose from {', '.join(every)}.",
    )
    return [trick for name, trick in every.items() if only is None or name in only]


class Bench:
    """Measurement of rows.

    Processes of the reference, one per shape, end when `running` closes; a trick's process ends with its row. `make`
    starts a process and returns its `Worker`.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        config: BenchConfig,
        device: torch.device,
        running: ExitStack,
        make: Make = Worker,
    ) -> None:
        small = changed(settings, config.gate, "--gate")
        self.shapes = {"full": settings, "small": small}
        self.config, self.device, self.running, self.make = config, device, running, make
        self.curves = Curves(small, config.gate_steps, config.gate_vocab_size, device.type, make)
        self.bases: dict[str, Worker] = {}

    def checked_row(self, trick: Trick) -> tuple[dict[str, Any], verdicts.Verdict | None]:
        """Return a row of the table, and the gate's verdict.

        The verdict is None for a trick that does not run here or is another algorithm.
        """
        date, commit = f"{datetime.now(UTC):%Y-%m-%d}", git("rev-parse", "--short", "HEAD")
        row = {
            "name": trick.name,
            "about": trick.about,
            "date": date,
            "commit": commit,
            **self.row(trick),
        }
        if "error" in row:
            return row, None
        if trick.rounding is None:
            return row | {"learned": self.curves.learned(trick)}, None
        verdict = self.curves.verdict(trick)
        return row | {"gate": asdict(verdict)}, verdict

    def row(self, trick: Trick) -> dict[str, Any]:
        """Return speed and memory of a trick, or the reason why it was not run."""
        if trick.device not in ("any", self.device.type):
            return {"error": ELSEWHERE[trick.device]}
        shape = "small" if is_too_slow_here(trick, self.device) else "full"
        settings, vocab_size = self.shapes[shape], self.config.vocab_size
        if shape not in self.bases:
            spec = spec_of(settings, BASELINE, vocab_size, self.device.type)
            self.bases[shape] = self.running.enter_context(self.make(spec))
            warm_up(self.bases[shape])
        spec = spec_of(settings, trick, vocab_size, self.device.type)
        row = measure(self.bases[shape], spec, self.config.rounds, self.config.steps, self.make)
        if "error" in row:
            return row
        tf32 = spec["settings"]["precision"]["tf32"]
        ceiling = matmul_flops(self.device, DTYPES[row["precision"]], tf32)
        return {**row, "shape": shape, "ceiling_flops": ceiling}


def measure(
    base: Worker, spec: Spec, rounds: int, steps: int, make: Make = Worker
) -> dict[str, Any]:
    """Return measurements of a candidate and the base, interleaved: seconds per step, speed-up and peak memory."""
    seconds: dict[str, list[float]] = {"base": [], "other": []}
    peaks = dict[str, int]()
    try:
        with make(spec) as candidate:
            first_seconds = warm_up(candidate)
            for turn in range(rounds):
                for name, worker in (("base", base), ("other", candidate)):
                    result = worker.run(2 + turn * steps, steps)
                    seconds[name] += result.seconds
                    peaks[name] = result.peak_bytes
    except UserError as error:  # the trick cannot run on this device
        return {"error": str(error)}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    train = spec["settings"]["train"]
    tokens = train["batch_size"] * train["sequence_length"]
    return {
        **candidate.facts,
        "compile_seconds": result.compile_seconds,  # the last turn is the candidate's
        "speedup": medians["base"] / medians["other"],
        "tokens_per_second": tokens / medians["other"],
        "base_tokens_per_second": tokens / medians["base"],
        "peak_bytes": peaks["other"],
        "base_peak_bytes": peaks["base"],
        "first_steps_seconds": first_seconds,
        "raw_seconds": seconds,
    }


def is_too_slow_here(trick: Trick, device: torch.device) -> bool:
    """Return whether to time the trick on the small shape.

    On a CPU without instructions for 16-bit products, these take 50 times as long as fp32 ones.
    """
    mode = trick.settings.get("precision.mode", "fp32")
    return device.type == "cpu" and mode != "fp32" and mode != resolve("auto", device)


@cache  # one measurement for all rows
def matmul_flops(
    device: torch.device, dtype: torch.dtype, tf32: bool = False, seconds: float = 1.0
) -> float:
    """Return floating-point operations per second of large square products on this device: the median of repeats.

    `tf32` concerns products of fp32.
    """
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    with float32_products(tf32):
        product_seconds = statistics.median(repeat_seconds(lambda: a @ b, device, seconds))
    return 2 * size**3 / product_seconds


def repeat_seconds(
    work: Callable[[], object], device: torch.device, duration_seconds: float
) -> list[float]:
    """Return the seconds per call of each repeat of `work`, at least one, after a call that is not timed.

    On a GPU a repeat is 20 calls, because waiting for the device takes a good part of the time of one small product.
    """
    calls = 20 if device.type == "cuda" else 1
    work()
    devices.synchronize(device)
    seconds: list[float] = []
    deadline = time.perf_counter() + duration_seconds
    while not seconds or time.perf_counter() < deadline:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        devices.synchronize(device)
        seconds.append((time.perf_counter() - began) / calls)
    return seconds
