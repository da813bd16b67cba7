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
from cramming.checks import Config, Place, check
from cramming.config import UserError
from cramming.model.attention_kernels import FLASH_CAPABILITY
from cramming.model.config import flops_per_token
from cramming.parallel.apply import MemoryConfig
from cramming.plan import roofline
from cramming.plan.memory import KEPT_HEAP, Recipe, Simulation, StepCost, largest_below, micro_batch_sizes
from cramming.plan.roofline import Rates
from cramming.precision import Mode, resolve
from cramming.schedule import ramp_step, sequences_per_step

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
    capability: tuple[int, int]  # of a GPU
    watts: float | None = None  # what it may take; not known of a CPU
    watts_basis: str = ""

    @property
    def flash(self) -> bool:
        """Whether FlashAttention runs there."""
        return self.capability >= FLASH_CAPABILITY

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


def planned_config(settings: dict[str, Any]) -> Config:
    """As `pretrain` reads it; the vocabulary is the tokenizer's upper limit where the model leaves it open."""
    config = Config.of(settings)
    vocabulary = config.model.vocab_size or (settings["tokenizer"]["vocab_size"] + 63) // 64 * 64
    return replace(config, model=replace(config.model, vocab_size=vocabulary))


def recipe_on(target: Target, config: Config) -> Recipe:
    """What a simulation of this configuration on `target` needs."""
    return Recipe(config, target.mode, target.kind, memory_bytes=target.memory_bytes, flash=target.flash)


def find_target(plan: PlanConfig, device: str, config: Config) -> Target:
    """The device of `plan.device`: this machine's (auto, cpu, cuda), or a card of the table by name."""
    mode, tf32 = config.precision.mode, config.precision.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if plan.device in ("auto", "cpu", "cuda"):
        here = devices.select(device if plan.device == "auto" else plan.device)
        described, resolved = devices.describe(here), resolve(mode, here)
        memory = described.memory_bytes if here.type == "cuda" else devices.available_bytes()
        rates = roofline.measured(here, resolved, config.model.hidden_size, config.model.intermediate_size)
        kind, name = cast(Literal["cpu", "cuda"], here.type), described.name
        uuid = devices.nvml_uuid(here)
        capability = torch.cuda.get_device_capability(here) if here.type == "cuda" else (0, 0)
    else:
        card = roofline.named(plan.device, mode)
        resolved = mode if mode != "auto" else "bf16" if card.has_bf16 else "fp16"
        rates = roofline.by_data_sheet(card, resolved, tf32)
        kind, name, memory = "cuda", card.name, card.memory_bytes
        uuid, capability = None, card.capability
    if kind == "cuda" and capability < FLASH_CAPABILITY and config.attention.kernel == "varlen":
        raise UserError(
            f"attention.kernel=varlen: FlashAttention needs an Ampere or newer GPU (compute capability 8.0), {name} is"
            " older; set it to auto, sdpa or padded"
        )
    size = plan.memory_gb * GIB if plan.memory_gb else memory
    keeps_heap = kind == "cpu" and config.runtime.keep_heap
    return Target(kind, name, size, resolved, rates, keeps_heap, capability, *energy.power_of(uuid, name))


def explore(config: Config, target: Target) -> Iterator[Option]:
    """The configured setting, then for each of `variants` the largest micro-batch that fits (the smallest, if none).

    UserError where `pretrain` would refuse the configured memory section.
    """
    seen: set[tuple[MemoryConfig, int]] = set()
    configured, tried = config.memory, variants(config, target)
    sizes = micro_batch_sizes(ramp_step(config.schedule, config.train.batch_size))
    for memory in tried:
        simulation = Simulation(recipe_on(target, replace(config, memory=memory)))
        price = functools.cache(functools.partial(price_of, config, target, memory, simulation))
        fitting = largest_below(sizes, lambda n: price(n).cost.peak_bytes, target.usable_bytes, simulation.floor)  # noqa: B023
        as_set = config.train.micro_batch if memory == configured else None
        for rows in (as_set, fitting or sizes[0]):
            if isinstance(rows, int) and (memory, rows) not in seen:
                seen.add((memory, rows))
                yield price(rows)


def variants(config: Config, target: Target) -> list[MemoryConfig]:
    """The configured memory section and, on top of it, each checkpointing that goes with it and the rest of the job."""
    configured = config.memory
    refuse_unplanned(config, target, configured)
    found = [configured]
    for changes in CHECKPOINTING:
        try:
            memory = replace(configured, **changes)
            refuse_unplanned(config, target, memory)
        except UserError:
            continue
        found.append(memory)
    return list(dict.fromkeys(found))


def refuse_unplanned(config: Config, target: Target, memory: MemoryConfig) -> None:
    """UserError where `pretrain` would refuse `memory` in one process on `target`."""
    place = Place(target.kind, target.name, target.mode, target.capability)
    check(replace(config, memory=memory), place)


def price_of(config: Config, target: Target, memory: MemoryConfig, simulation: Simulation, rows: int) -> Option:
    """What one micro-batch size costs under one memory setting."""
    count = max(1, config.train.batch_size // rows)
    cost, rates = simulation.step(rows, count), target.rates
    seconds = count * rates.seconds(cost.micro_batch) + rates.seconds(cost.update)
    tokens = count * rows * config.train.sequence_length
    return Option(memory, rows, cost, tokens / seconds, cost.peak_bytes <= target.usable_bytes)


def tokens_in_budget(config: Config, tokens_per_second: float) -> float:
    """Tokens that the budget allows at this rate; the ramp of the batch size counts where steps are the budget."""
    budget, length = config.budget, config.train.sequence_length
    if budget.unit == "hours":
        return tokens_per_second * 3600 * budget.limit
    if budget.unit == "exaflops":
        last_layer = config.attention.last_layer
        return budget.limit * 1e18 / flops_per_token(config.model, length, config.targets_per_row / length, last_layer)
    if budget.unit == "tokens":
        return budget.limit
    steps = min(int(budget.limit), 10_000)  # all of them, or evenly chosen ones
    sequences = sum(sequences_per_step(config.schedule, step / steps, config.train.batch_size) for step in range(steps))
    return budget.limit * sequences / steps * length
