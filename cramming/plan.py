"""The verb `plan`: what a configuration would need and do on a device, before anything is downloaded or trained.

Memory comes from `Simulation`, which runs real steps on tensors without data; time from a roofline over the operations
of the same steps. Neither needs a corpus or the device itself. Every memory trick of the table below is tried with
micro-batches of every size that divides the batch, and the fastest combination that fits is proposed.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from cramming import device as devices
from cramming import roofline
from cramming.budget import BudgetConfig
from cramming.config import UserError, build, write_atomically
from cramming.data.masking import ObjectiveConfig
from cramming.execution import EngineConfig
from cramming.model.config import ModelConfig, count_parameters, flops_per_token
from cramming.parallel.apply import MemoryConfig
from cramming.parts import TrainConfig
from cramming.precision import Mode, resolve
from cramming.progress import format_count, say, show_table
from cramming.roofline import Rates
from cramming.schedule import ScheduleConfig, micro_batches_per_step
from cramming.simulate import CATEGORIES, KEPT_HEAP, Recipe, Simulation, StepCost, largest_below, micro_batch_sizes

GIB = 2**30
# Outside torch's tensors. A CUDA context with its loaded kernels, and what the caching allocator cannot reuse: by
# experience, not measured here. On a CPU: Python with torch and its libraries, measured as resident set.
CONTEXT_BYTES = {"cuda": 600 * 2**20, "cpu": 400 * 2**20}
ALLOCATOR_WASTE = {"cuda": 0.04, "cpu": 0.04}

# What is tried: changes to the memory section, fastest first.
TRICKS: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 0},
    {"checkpoint_every": 1, "checkpoint": "selective"},
    {"checkpoint_every": 2, "checkpoint": "full"},
    {"checkpoint_every": 1, "checkpoint": "full"},
)


@dataclass(frozen=True)
class PlanConfig:
    """`memory_gb` is in GiB, as cards are sold (null: the device's own); `json` a file for the whole result."""

    memory_gb: float | None
    device: str
    json: Path | None

    def __post_init__(self) -> None:
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise ValueError(f"memory_gb={self.memory_gb} is not above 0")


@dataclass(frozen=True)
class Target:
    """The device that is planned for."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: float
    mode: Mode
    rates: Rates
    keeps_heap: bool  # freed memory stays in the process (runtime.keep_heap, on a CPU)

    @property
    def usable_bytes(self) -> float:
        """What the tensors of a step may take."""
        free = (self.memory_bytes - CONTEXT_BYTES[self.kind]) * (1 - ALLOCATOR_WASTE[self.kind])
        return free / KEPT_HEAP if self.keeps_heap else free


@dataclass(frozen=True)
class Option:
    """One setting: what it costs, and what it brings."""

    memory: MemoryConfig
    micro_batch: int
    cost: StepCost
    tokens_per_second: float
    fits: bool

    def overrides(self, configured: MemoryConfig) -> list[str]:
        """The settings that ask for it, on top of the present ones."""
        before = asdict(configured)
        changed = [f"memory.{key}={value}" for key, value in asdict(self.memory).items() if value != before[key]]
        return [f"train.micro_batch={self.micro_batch}", *changed]


@dataclass(frozen=True)
class Job:
    """The sections of the configuration that a plan reads, checked."""

    model: ModelConfig
    train: TrainConfig
    execution: EngineConfig
    objective: ObjectiveConfig
    budget: BudgetConfig
    schedule: ScheduleConfig

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Job":
        """Build every section; the vocabulary is the tokenizer's upper limit where the model leaves it open."""
        model = build(ModelConfig, settings["model"], "model")
        vocabulary = model.vocab_size or (settings["tokenizer"]["vocab_size"] + 63) // 64 * 64
        job = cls(
            model=replace(model, vocab_size=vocabulary),
            train=build(TrainConfig, settings["train"], "train"),
            execution=EngineConfig.of(settings),
            objective=build(ObjectiveConfig, settings["objective"], "objective"),
            budget=build(BudgetConfig, settings["budget"], "budget"),
            schedule=build(ScheduleConfig, settings["schedule"], "schedule"),
        )
        if job.train.sequence_length > model.max_length:
            raise UserError(
                f"train.sequence_length={job.train.sequence_length} is above model.max_length={model.max_length}"
            )
        return job

    @property
    def targets_per_row(self) -> int:
        """Places per sequence that are predicted."""
        return self.objective.targets_per_row(self.train.sequence_length)

    def recipe(self, target: Target, memory: MemoryConfig) -> Recipe:
        """What a simulation of this job on `target` needs."""
        execution = replace(self.execution, memory=memory)
        form = (self.train.sequence_length, self.targets_per_row, self.train.packing)
        return Recipe(self.model, execution, target.mode, target.kind, *form)


def main(settings: dict[str, Any]) -> None:
    """The verb `plan`."""
    config = build(PlanConfig, settings["plan"], "plan")
    job = Job.of(settings)
    target = find_target(config, settings["device"], job)
    describe(job, target)
    options = list(explore(job, target))
    best = max((o for o in options if o.fits), key=lambda o: o.tokens_per_second, default=None)
    report(job, target, options, best)
    if config.json:
        text = json.dumps(as_json(job, target, options, best), indent=1) + "\n"
        write_atomically(config.json, text)
    if best is None:
        least = min(options, key=lambda o: o.cost.peak_bytes)
        setting = " ".join(least.overrides(job.execution.memory))
        needs, usable = least.cost.peak_bytes / GIB, max(0.0, target.usable_bytes) / GIB
        raise UserError(
            f"plan.memory_gb={target.memory_bytes / GIB:.3g}: nothing fits; the least that was tried ({setting}) needs"
            f" {needs:.3g} GiB of tensors where {usable:.3g} are usable; take a smaller model or vocabulary, a shorter"
            " train.sequence_length, or an optimizer with less state"
        )


def find_target(config: PlanConfig, device: str, job: Job) -> Target:
    """The device of `plan.device`: this machine's (auto, cpu, cuda), or one of the table by name."""
    mode, tf32 = job.execution.precision.mode, job.execution.precision.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.device in ("auto", "cpu", "cuda"):
        here = devices.select(device if config.device == "auto" else config.device)
        described, resolved = devices.describe(here), resolve(mode, here)
        memory = described.memory_bytes if here.type == "cuda" else devices.available_bytes()
        rates = roofline.measured(here, resolved, job.model.hidden_size, job.model.intermediate_size)
        kind, name = cast(Literal["cpu", "cuda"], here.type), described.name
    else:
        sheet = roofline.named(config.device)
        resolved = mode if mode != "auto" else "bf16" if sheet.bf16 else "fp16"
        rates = roofline.by_data_sheet(config.device, resolved, tf32)
        kind, name, memory = "cuda", config.device, int(sheet.memory * GIB)
    keeps_heap = kind == "cpu" and job.execution.runtime.keep_heap
    return Target(kind, name, config.memory_gb * GIB if config.memory_gb else memory, resolved, rates, keeps_heap)


def explore(job: Job, target: Target) -> Iterator[Option]:
    """The configured setting, then for each trick the largest micro-batch that fits (the smallest, if none does)."""
    seen: set[tuple[MemoryConfig, int]] = set()
    batch, configured = job.train.batch_size, job.execution.memory
    sizes = [batch] if configured.update_in_backward else micro_batch_sizes(batch)  # one micro-batch is all it can take
    for memory in dict.fromkeys([configured, *(replace(configured, **changes) for changes in TRICKS)]):
        simulation = Simulation(job.recipe(target, memory))
        price = functools.cache(functools.partial(price_of, job, target, memory, simulation))
        fitting = largest_below(sizes, lambda n: price(n).cost.peak_bytes, target.usable_bytes, simulation.floor)  # noqa: B023
        for rows in (job.train.micro_batch if memory == configured else None, fitting or sizes[0]):
            if isinstance(rows, int) and (memory, rows) not in seen:
                seen.add((memory, rows))
                yield price(rows)


def price_of(job: Job, target: Target, memory: MemoryConfig, simulation: Simulation, rows: int) -> Option:
    """What one micro-batch size costs under one memory setting."""
    count = max(1, job.train.batch_size // rows)
    cost, rates = simulation.step(rows, count), target.rates
    seconds = count * rates.seconds(cost.micro_batch) + rates.seconds(cost.update)
    tokens = count * rows * job.train.sequence_length
    return Option(memory, rows, cost, tokens / seconds, cost.peak_bytes <= target.usable_bytes)


def tokens_in_budget(job: Job, tokens_per_second: float) -> float:
    """Tokens that the budget allows at this rate; the ramp of the batch size counts where steps are the budget."""
    budget, length = job.budget, job.train.sequence_length
    if budget.unit == "hours":
        return tokens_per_second * 3600 * budget.limit
    if budget.unit == "exaflops":
        last_layer = job.execution.attention.last_layer
        return budget.limit * 1e18 / flops_per_token(job.model, length, job.targets_per_row / length, last_layer)
    if budget.unit == "tokens":
        return budget.limit
    points = [micro_batches_per_step(job.schedule, p / 1000, 1000) / 1000 for p in range(1000)]
    return budget.limit * job.train.batch_size * length * sum(points) / len(points)


# What is printed ------------------------------------------------------------------------------------------------------


def describe(job: Job, target: Target) -> None:
    """The job and the device, and what the numbers rest on."""
    count, train, optimizer = count_parameters(job.model), job.train, job.execution.optim.name
    say(
        f"model: {count.total / 1e6:.1f}M parameters, vocabulary {job.model.vocab_size}; step: {train.batch_size}"
        f" sequences of {train.sequence_length}, {job.targets_per_row} targets each; {optimizer}, {target.mode}"
    )
    taken = "the CUDA context" if target.kind == "cuda" else "Python and torch"
    say(
        f"device: {target.name}, {target.memory_bytes / GIB:.3g} GiB, of which {max(0, target.usable_bytes) / GIB:.3g}"
        f" for tensors ({CONTEXT_BYTES[target.kind] / GIB:.2g} GiB for {taken} and {ALLOCATOR_WASTE[target.kind]:.0%}"
        " lost in the allocator are assumed)"
    )
    if target.keeps_heap:
        say(
            f"heap: runtime.keep_heap=true lets the process grow to {KEPT_HEAP:g} times its tensors; with false it"
            " holds what is predicted"
        )
    say(f"rates: {target.rates.basis}")
    memory = job.execution.memory
    if target.kind == "cuda" and not torch.cuda.is_available():
        for name in ("offload_activations", "offload_weights", "offload_optimizer"):
            if getattr(memory, name):
                say(f"memory.{name}: not seen, for want of a GPU here: counted as if it stayed on the device")
    if job.execution.runtime.compile != "off":
        say("compile: both memory and time are those of eager execution; compiled code needs less of each")


def report(job: Job, target: Target, options: list[Option], best: Option | None) -> None:
    """One row per option, then the proposal."""
    headers = ["micro-batch", *_differing(options), *CATEGORIES, "peak GiB", "fits", "tokens/s", "tokens", ""]
    rows = []
    for option in options:
        peak = [f"{option.cost.peak[name] / GIB:.2f}" for name in CATEGORIES]
        notes = (
            ["configured"]
            if option.memory == job.execution.memory and option.micro_batch == job.train.micro_batch
            else []
        )
        notes += ["fastest that fits"] if option is best else []
        settings = [str(getattr(option.memory, name)) for name in _differing(options)]
        tokens = tokens_in_budget(job, option.tokens_per_second)
        rows.append(
            [
                str(option.micro_batch), *settings, *peak, f"{option.cost.peak_bytes / GIB:.2f}",
                "yes" if option.fits else "NO", format_count(option.tokens_per_second, ""), format_count(tokens, ""),
                ", ".join(notes),
            ]
        )  # fmt: skip
    show_table("peak memory of a step, by what it holds at that moment", headers, rows)
    if best:
        tokens = tokens_in_budget(job, best.tokens_per_second)
        rate = format_count(best.tokens_per_second, "tokens")
        settings = best.overrides(job.execution.memory)
        say(
            f"proposed: {' '.join(settings)}: about {rate}/s, {format_count(tokens, 'tokens')} in"
            f" {job.budget.limit:g} {job.budget.unit} ({tokens / best.tokens_per_second / 3600:.2g} h)"
        )


def _differing(options: list[Option]) -> list[str]:
    """The memory settings in which the options are not all alike."""
    every = [asdict(option.memory) for option in options]
    return [name for name in every[0] if any(other[name] != every[0][name] for other in every)]


def as_json(job: Job, target: Target, options: list[Option], best: Option | None) -> dict[str, Any]:
    """The whole result, in bytes and seconds."""

    def one(option: Option) -> dict[str, Any]:
        return {
            "micro_batch": option.micro_batch,
            "memory": asdict(option.memory),
            "overrides": option.overrides(job.execution.memory),
            "peak_bytes": option.cost.peak_bytes,
            "peak_by_component": option.cost.peak,
            "fits": option.fits,
            "tokens_per_second": option.tokens_per_second,
            "tokens_in_budget": tokens_in_budget(job, option.tokens_per_second),
        }

    return {
        "parameters": count_parameters(job.model).total,
        "vocab_size": job.model.vocab_size,
        "precision": target.mode,
        "device": {"kind": target.kind, "name": target.name, "memory_bytes": target.memory_bytes},
        "usable_bytes": target.usable_bytes,
        "rates": asdict(target.rates),
        "budget": {"unit": job.budget.unit, "limit": job.budget.limit},
        "options": [one(option) for option in options],
        "proposed": one(best) if best else None,
    }
