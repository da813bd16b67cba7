"""Settings that fit a device, and what each would bring: the search behind `plan`.

Activation checkpointing, on top of the configured memory section, is tried with micro-batches of the sizes that divide
the batch. Offloading, the update in the backward pass and low-bit optimizer states are planned where they are
configured, but not proposed. What a step needs and how long it takes is predicted (cramming/plan/memory.py,
cramming/plan/roofline.py), not measured.
"""

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from cramming import device as devices
from cramming import energy
from cramming.budget import BudgetConfig
from cramming.checks import Sections, TrainConfig, refuse_unfit_ramp
from cramming.config import UserError
from cramming.data.masking import ObjectiveConfig
from cramming.execution import EngineConfig
from cramming.model.attention_kernels import FLASH_CAPABILITY, has_flash
from cramming.model.config import ModelConfig, flops_per_token
from cramming.parallel.apply import MemoryConfig, refuse_contradictions, refuse_unfit
from cramming.plan import roofline
from cramming.plan.memory import KEPT_HEAP, Recipe, Simulation, StepCost, largest_below, micro_batch_sizes
from cramming.plan.roofline import Rates
from cramming.precision import Mode, refuse_missing_hardware, refuse_unfit_residual, resolve
from cramming.schedule import ScheduleConfig, ramp_step, sequences_per_step

GIB = 2**30
# Outside torch's tensors. A CUDA context with its loaded kernels, and what the caching allocator cannot reuse: by
# experience, not measured here. On a CPU: Python with torch and its libraries, measured as resident set.
CONTEXT_BYTES = {"cuda": 600 * 2**20, "cpu": 400 * 2**20}
ALLOCATOR_WASTE = {"cuda": 0.04, "cpu": 0.04}

# What is tried: changes to the memory section, fastest first.
CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 0, "checkpoint": "full"},
    {"checkpoint_every": 1, "checkpoint": "selective"},
    {"checkpoint_every": 2, "checkpoint": "full"},
    {"checkpoint_every": 1, "checkpoint": "full"},
)


@dataclass(frozen=True)
class PlanConfig:
    """`memory_gb` is in GiB (null: what the device has for programs); `json` a file for the whole result.

    `price_per_hour` of the device, in whatever currency.
    """

    memory_gb: float | None
    device: str
    json: Path | None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_gb", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} is not above 0")


@dataclass(frozen=True)
class Target:
    """The device that is planned for."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: float
    mode: Mode
    rates: Rates
    keeps_heap: bool  # freed memory stays in the process (runtime.keep_heap, on a CPU)
    flash: bool  # FlashAttention runs there
    watts: float | None = None  # what it may take; not known of a CPU
    watts_basis: str = ""

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
        """As `pretrain` reads them; the vocabulary is the tokenizer's upper limit where the model leaves it open."""
        found = Sections.of(settings)
        vocabulary = found.model.vocab_size or (settings["tokenizer"]["vocab_size"] + 63) // 64 * 64
        return cls(
            model=replace(found.model, vocab_size=vocabulary),
            train=found.train,
            execution=found.execution,
            objective=found.objective,
            budget=found.budget,
            schedule=found.schedule,
        )

    @property
    def targets_per_row(self) -> int:
        """Places per sequence that are predicted."""
        return self.objective.targets_per_row(self.train.sequence_length)

    def recipe(self, target: Target, memory: MemoryConfig) -> Recipe:
        """What a simulation of this job on `target` needs."""
        execution = replace(self.execution, memory=memory)
        form = (self.train.sequence_length, self.targets_per_row, self.train.packing)
        size, flash = target.memory_bytes, target.flash
        return Recipe(self.model, execution, target.mode, target.kind, *form, memory_bytes=size, flash=flash)


def find_target(config: PlanConfig, device: str, job: Job) -> Target:
    """The device of `plan.device`: this machine's (auto, cpu, cuda), or a card of the table by name."""
    mode, tf32 = job.execution.precision.mode, job.execution.precision.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.device in ("auto", "cpu", "cuda"):
        here = devices.select(device if config.device == "auto" else config.device)
        refuse_missing_hardware(job.execution.precision, here)
        described, resolved = devices.describe(here), resolve(mode, here)
        memory = described.memory_bytes if here.type == "cuda" else devices.available_bytes()
        rates = roofline.measured(here, resolved, job.model.hidden_size, job.model.intermediate_size)
        kind, name = cast(Literal["cpu", "cuda"], here.type), described.name
        flash, uuid = here.type == "cuda" and has_flash(here), devices.nvml_uuid(here)
    else:
        card = roofline.named(config.device, mode)
        resolved = mode if mode != "auto" else "bf16" if card.has_bf16 else "fp16"
        refuse_unfit_residual(job.execution.precision, resolved)
        rates = roofline.by_data_sheet(card, resolved, tf32)
        kind, name, memory, flash = "cuda", card.name, card.memory_bytes, card.capability >= FLASH_CAPABILITY
        uuid = None
    if kind == "cuda" and not flash and job.execution.attention.kernel == "varlen":
        raise UserError(
            f"attention.kernel=varlen: FlashAttention needs an Ampere or newer GPU (compute capability 8.0), {name} is"
            " older; set it to auto, sdpa or padded"
        )
    size = config.memory_gb * GIB if config.memory_gb else memory
    keeps_heap = kind == "cpu" and job.execution.runtime.keep_heap
    return Target(kind, name, size, resolved, rates, keeps_heap, flash, *energy.power_of(uuid, name))


def explore(job: Job, target: Target) -> Iterator[Option]:
    """The configured setting, then for each of `variants` the largest micro-batch that fits (the smallest, if none).

    UserError where `pretrain` would refuse the configured memory section.
    """
    seen: set[tuple[MemoryConfig, int]] = set()
    configured, tried = job.execution.memory, variants(job, target)
    sizes = micro_batch_sizes(ramp_step(job.schedule, job.train.batch_size))
    for memory in tried:
        simulation = Simulation(job.recipe(target, memory))
        price = functools.cache(functools.partial(price_of, job, target, memory, simulation))
        fitting = largest_below(sizes, lambda n: price(n).cost.peak_bytes, target.usable_bytes, simulation.floor)  # noqa: B023
        as_set = job.train.micro_batch if memory == configured else None
        for rows in (as_set, fitting or sizes[0]):
            if isinstance(rows, int) and (memory, rows) not in seen:
                seen.add((memory, rows))
                yield price(rows)


def variants(job: Job, target: Target) -> list[MemoryConfig]:
    """The configured memory section and, on top of it, each checkpointing that goes with it and the rest of the job."""
    configured = job.execution.memory
    refuse_unplanned(job, target, configured)
    found = [configured]
    for changes in CHECKPOINTING:
        try:
            memory = replace(configured, **changes)
            refuse_unplanned(job, target, memory)
        except UserError:
            continue
        found.append(memory)
    return list(dict.fromkeys(found))


def refuse_unplanned(job: Job, target: Target, memory: MemoryConfig) -> None:
    """UserError where `pretrain` would refuse `memory` in one process on `target`, were each step one micro-batch."""
    refuse_contradictions(memory, job.execution.runtime)
    refuse_unfit(memory, mode=target.mode, processes=1)
    refuse_unfit_ramp(job.train, job.schedule, world_size=1)


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
    steps = min(int(budget.limit), 10_000)  # all of them, or evenly chosen ones
    sequences = sum(sequences_per_step(job.schedule, step / steps, job.train.batch_size) for step in range(steps))
    return budget.limit * sequences / steps * length
