"""The verb `bench`: `tricks` measures every trick beside the reference, `peers` other trainers beside ours.

Each row is a pair of processes, reference and candidate, that take turns: rounds of a few steps each, and the ratio is
that of the medians, so that a machine that slows down slows both. The table goes to `bench.out`, under this device's
name; other devices' tables in that file stay, and so do rows of `tricks` that an earlier call measured under the same
conditions.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cramming import device as devices
from cramming.bench import gate, tables, tricks
from cramming.bench.curves import REFERENCE, Curves, gate_settings, job_of
from cramming.bench.data import SPECIAL
from cramming.bench.earlier import Earlier
from cramming.bench.sides import matmul_flops
from cramming.bench.tricks import Trick
from cramming.bench.worker import Worker, warm_up
from cramming.config import UserError, build, expand_home
from cramming.environment import git
from cramming.precision import resolve
from cramming.progress import Progress, say


@dataclass(frozen=True)
class BenchConfig:
    """The `bench` section.

    `what`: tricks or peers. `only`: names of rows, null for all. A pair takes `rounds` turns of `steps` steps. `shapes`
    (peers): hidden size, layers, heads, sequences per step. `gate`: changes of model and train for the loss curves,
    which need not be as large as what is timed.
    """

    what: str
    only: list[str] | None
    rounds: int
    steps: int
    vocab_size: int
    shapes: list[list[int]]
    gate_steps: int
    gate_vocab_size: int
    gate: dict[str, dict[str, Any]]
    out: Path
    raw: Path

    def __post_init__(self) -> None:
        if self.what not in BENCHES:
            raise ValueError(f"what={self.what}: choose one of {', '.join(BENCHES)}")
        smallest = {"rounds": 1, "steps": 1, "gate_steps": 2 * gate.WINDOW}
        smallest |= dict.fromkeys(("vocab_size", "gate_vocab_size"), 2 * len(SPECIAL))
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}")
        for shape in self.shapes:
            if len(shape) != 4 or min(shape) < 1 or shape[0] % shape[2]:
                raise ValueError(
                    f"shapes: {shape} is not hidden size, layers, heads and sequences per step, all above 0, the hidden"
                    " size a multiple of the heads; for example [256,4,4,32]"
                )


def main(settings: dict[str, Any]) -> None:
    """The verb `bench`."""
    config = build(BenchConfig, settings["bench"], "bench")
    BENCHES[config.what](settings, config, devices.select(settings["device"]))


def bench_tricks(settings: dict[str, Any], config: BenchConfig, device: torch.device) -> None:
    """Every trick alone and the best stack: speed and memory beside the reference, and the correctness gate."""
    rows, gates = chosen(config.only, device), expand_home(settings["gates"], "gates")
    order = [trick.name for trick in chosen(None, device)]
    gate.load(gates)  # a file that cannot be added to is found now, not after the first row
    small = gate_settings(settings, config.gate)
    curves = Curves(small, config.gate_steps, config.gate_vocab_size, device)
    described, results = devices.describe(device), list[dict[str, Any]]()
    earlier = Earlier.read(config.raw, described, settings)
    with Progress("bench tricks", total=len(rows), unit="tricks") as bar, ExitStack() as running:
        pairs = Pairs({"full": settings, "small": small}, config, device, running)
        for trick in rows:
            bar.note(trick.name)
            row, verdict = judged_row(trick, pairs, curves)
            if verdict:
                gate.save(gates, gate.place(described.name, torch.__version__), [verdict], curves.floors)
            results.append(row)
            table, floors = earlier.and_rows(results, order), earlier.and_floors(curves.floors)
            raw = tables.write(config.out, config.raw, "tricks", table, described, settings, floors)
            bar.advance(1)  # what is written is not lost by a crash later
            say(tables.line(row))
    say(f"{config.out}: {len(results)} rows measured, {len(table)} in the table; raw numbers in {raw}")


def judged_row(trick: Trick, pairs: "Pairs", curves: Curves) -> tuple[dict[str, Any], gate.Verdict | None]:
    """A row of the table, and what the gate says of it; no verdict on what is not run here or another algorithm."""
    made = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": git("rev-parse", "--short", "HEAD")}
    row = {"name": trick.name, "about": trick.about, **made, **pairs.row(trick)}
    if "error" in row:
        return row, None
    if trick.rounding is None:
        return row | curves.learned(trick), None
    verdict = curves.verdict(trick)
    return row | {"gate": asdict(verdict)}, verdict


class Pairs:
    """Timed pairs: the reference's processes, one per shape, live as long as `running`, each trick's for its row.

    `make` starts one: a `Worker`, or what behaves like one.
    """

    def __init__(
        self, shapes: dict[str, dict[str, Any]], config: BenchConfig, device: torch.device, running: ExitStack,
        make: "Make | None" = None,
    ) -> None:  # fmt: skip
        self.shapes, self.config, self.device, self.running = shapes, config, device, running
        self.make = make or Worker
        self.bases: dict[str, Worker] = {}
        self.ceilings: dict[tuple[str, bool], float] = {}  # by mode, and whether fp32 products are TF32's

    def row(self, trick: Trick) -> dict[str, Any]:
        """What a trick costs, or the reason why it was not run."""
        if trick.device not in ("any", self.device.type):
            return {"error": tricks.ELSEWHERE[trick.device]}
        shape = "small" if is_too_slow_here(trick, self.device) else "full"
        settings, vocab_size = self.shapes[shape], self.config.vocab_size
        if shape not in self.bases:
            job = job_of(settings, REFERENCE, vocab_size, self.device)
            self.bases[shape] = self.running.enter_context(self.make(job))
            warm_up(self.bases[shape])
        job = job_of(settings, trick, vocab_size, self.device)
        row = measure(self.bases[shape], job, self.config, self.make)
        if "error" in row:
            return row
        mode, tf32 = row["precision"], job["settings"]["precision"]["tf32"]
        if (mode, tf32) not in self.ceilings:
            self.ceilings[mode, tf32] = matmul_flops(self.device, DTYPES[mode], tf32)
        return {**row, "shape": shape, "ceiling_flops": self.ceilings[mode, tf32]}


def bench_peers(settings: dict[str, Any], config: BenchConfig, device: torch.device) -> None:
    """Others on the same shapes: the peer is the base of each pair, ours is run eager and compiled beside it."""
    results: list[dict[str, Any]] = []
    names, described = [peer["side"] for peer in PEERS], devices.describe(device)
    if not config.shapes:
        raise UserError("bench.shapes=[]: nothing to measure; give at least one, for example [[256,4,4,32]]")
    if unknown := set(config.only or ()) - set(names):
        raise UserError(f"bench.only: no peer {sorted(unknown)}; there are: {', '.join(names)}")
    with Progress("bench peers", total=len(config.shapes) * len(PEERS), unit="pairs") as bar:
        for hidden, layers, heads, rows in config.shapes:
            shape = {"model.hidden_size": hidden, "model.num_layers": layers, "model.num_heads": heads}
            shape |= {"train.batch_size": rows, "train.micro_batch": rows}
            for peer in PEERS:
                if config.only is not None and peer["side"] not in config.only:
                    continue
                bar.note(f"{peer['side']} {hidden}x{layers}")
                results += pair(settings, config, device, shape, peer, f"{hidden}x{layers}")
                raw = tables.write(config.out, config.raw, "peers", results, described, settings)
                bar.advance(1)  # what is written is not lost by a crash later
    say(f"{config.out}: {len(results)} rows; raw numbers in {raw}")


def pair(
    settings: dict[str, Any], config: BenchConfig, device: torch.device, shape: dict[str, Any], peer: dict[str, Any],
    label: str, modes: Sequence[str] = ("off", "model"),
) -> list[dict[str, Any]]:  # fmt: skip
    """One peer beside ours, eager and compiled, on one shape: two rows; one that says why if the peer cannot run."""
    family = {**peer["model"], **shape, "model.intermediate_size": int(peer["inner"] * shape["model.hidden_size"])}
    stack = tricks.best(device.type, resolve("auto", device)).settings
    ours = {key: value for key, value in stack.items() if not key.startswith("precision.")}  # the peer's is ours
    common = {"vocab_size": config.vocab_size, "device": device.type}
    about = {"peer": peer["side"], "shape": label}
    results: list[dict[str, Any]] = []
    peer_settings = tricks.changed(settings, family)
    with ExitStack() as running:
        try:
            refuse_missing_package(peer["side"], peer["needs"])
            job = {**common, "side": peer["side"], "settings": peer_settings, "compile": True}
            base = running.enter_context(Worker(job))
            warm_up(base)
        except UserError as error:  # the other peers can still be measured
            results.append({**about, "name": "ours", "error": str(error)})
            say(tables.line(results[-1]))
            return results
        for compiled in modes:
            name = "ours, eager" if compiled == "off" else "ours, compiled"
            changed = tricks.changed(tricks.changed(settings, ours), {**family, "runtime.compile": compiled})
            row = measure(base, {**common, "side": "ours", "settings": changed, "name": name}, config)
            row |= {**about, "name": name}
            row["tokens_per_step"] = shape["train.batch_size"] * settings["train"]["sequence_length"]
            results.append(row)
            say(tables.line(row))
    return results


def refuse_missing_package(side: str, package: str | None) -> None:
    """UserError where a peer's own requirement is not installed."""
    if package is not None and find_spec(package) is None:
        raise UserError(f"bench: {side}: needs the package {package}; pip install 'cramming[bench]'")


def measure(base: Worker, job: dict[str, Any], config: BenchConfig, make: "Make | None" = None) -> dict[str, Any]:
    """Turns of a candidate and the base: seconds per step of both, speed-up, peak memory."""
    try:
        with (make or Worker)(job) as other:
            first_seconds = warm_up(other)
            seconds: dict[str, list[float]] = {"base": [], "other": []}
            peaks = {"base": 0, "other": 0}
            for turn in range(config.rounds):
                for name, side in (("base", base), ("other", other)):
                    steps = side.run(2 + turn * config.steps, config.steps)
                    seconds[name] += steps.seconds
                    peaks[name] = steps.peak_bytes
            facts = {**other.facts, "compile_seconds": steps.compile_seconds}  # the last turn is the other's
    except UserError as error:  # a trick that cannot run here is a row that says why
        return {"error": str(error)}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    train = job["settings"]["train"]
    tokens = train["batch_size"] * train["sequence_length"]
    return {
        **facts,
        "speedup": medians["base"] / medians["other"],
        "tokens_per_second": tokens / medians["other"],
        "base_tokens_per_second": tokens / medians["base"],
        "peak_bytes": peaks["other"],
        "base_peak_bytes": peaks["base"],
        "first_steps_seconds": first_seconds,
        "raw_seconds": seconds,
    }


def is_too_slow_here(trick: Trick, device: torch.device) -> bool:
    """16-bit products take 50 times as long on a CPU without an instruction for them: timed on the small shape."""
    mode = trick.settings.get("precision.mode", "fp32")
    return device.type == "cpu" and mode != "fp32" and mode != resolve("auto", device)


def chosen(only: Sequence[str] | None, device: torch.device) -> list[Trick]:
    """The rows of the table: all, those for other devices too (they say so), or those named."""
    every = [*tricks.TRICKS, tricks.best(device.type, resolve("auto", device))]
    if only is None:
        return every
    unknown = set(only) - {t.name for t in every}
    if unknown:
        raise UserError(f"bench.only: no trick {sorted(unknown)}; there are: {', '.join(t.name for t in every)}")
    return [t for t in every if t.name in only]


Make = Callable[[Mapping[str, Any]], Worker]
# Of the products that a mode's utilisation is measured by; of fp8 the table says that they are bf16's.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
BERT = {"model.norm_order": "post", "model.mlp": "plain", "model.positions": "learned", "model.norm_bias": True,
        "model.embedding_norm": True, "model.final_norm": False, "model.first_attn_norm": True, "model.token_types": 2,
        "model.attention_bias": True, "model.mlp_bias": True, "model.head_bias": True, "model.local_window": None,
        "model.tie_embeddings": True}  # fmt: skip
MODERN = {"model.norm_order": "pre", "model.mlp": "glu", "model.positions": "rope", "model.norm_bias": False,
          "model.embedding_norm": True, "model.final_norm": True, "model.first_attn_norm": False,
          "model.token_types": 0, "model.attention_bias": False, "model.mlp_bias": False, "model.head_bias": False,
          "model.local_window": 128, "model.global_every": 3, "model.tie_embeddings": True}  # fmt: skip
PEERS: tuple[dict[str, Any], ...] = (
    {"side": "trainer", "model": BERT, "inner": 4.0, "needs": "accelerate"},
    {"side": "bert loop", "model": BERT, "inner": 4.0, "needs": None},
    {"side": "modernbert loop", "model": MODERN, "inner": 1.5, "needs": None},
)
BENCHES = {"tricks": bench_tricks, "peers": bench_peers}
