"""Settings that fit a device, and what each would bring: the search behind `plan`.

Activation checkpointing, on top of the configured section `memory`, is tried with micro-batches of the sizes that
divide the batch. Offloading and low-bit optimizer states are planned where they are configured, but not proposed. What
a step needs and how long it takes is predicted (memory.py, roofline.py), not measured.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import torch

from cramming import device as devices
from cramming.config import UserError, require
from cramming.model import attention
from cramming.parallel.apply import MemoryConfig
from cramming.plan import cards, roofline
from cramming.plan.memory import Simulation, heap_factor, largest_fitting, micro_batch_sizes
from cramming.plan.roofline import Rates
from cramming.recipe import Config, Hardware, attention_kernels, check
from cramming.schedule import ramp_step, sequences_per_step

GIB = 2**30
# Outside torch's tensors. A CUDA context with its loaded kernels, and what the caching allocator cannot reuse: by
# experience, not measured here. On a CPU: Python with torch and its libraries, measured as resident set.
CONTEXT_BYTES = {"cuda": 600 * 2**20, "cpu": 400 * 2**20}
ALLOCATOR_WASTE = {"cuda": 0.04, "cpu": 0.04}

# What is tried: changes to the section `memory`, fastest first.
CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"checkpoint_every": 0, "checkpoint": "full"},
    {"checkpoint_every": 1, "checkpoint": "selective"},
    {"checkpoint_every": 2, "checkpoint": "full"},
    {"checkpoint_every": 1, "checkpoint": "full"},
)


@dataclass(frozen=True)
class PlanConfig:
    """Options of `plan`. `memory_gb` is in GiB (None: what the device has for programs).

    `price_per_hour` of the device, in whatever currency. `devices`: for so many, joined by `network`, the table of
    cramming/plan/scaling.py follows.
    """

    device: str
    memory_gb: float | None = None
    price_per_hour: float | None = None
    devices: tuple[int, ...] = ()
    network: Literal["nvlink", "pcie"] = "nvlink"


@dataclass(frozen=True)
class Target:
    """The device that is planned for."""

    place: Hardware
    memory_bytes: float
    rates: Rates
    heap_factor: float = 1.0  # by how much more than its tensors the process may hold
    watts: float | None = None  # what it may take; not known of a CPU
    watts_basis: str = ""

    @property
    def usable_bytes(self) -> float:
        """What the tensors of a step may take."""
        kind = self.place.kind
        return (
            (self.memory_bytes - CONTEXT_BYTES[kind])
            * (1 - ALLOCATOR_WASTE[kind])
            / self.heap_factor
        )


@dataclass(frozen=True)
class Option:
    """One setting, by the overrides on top of the configuration that ask for it: what it costs, and what it brings."""

    micro_batch: int
    memory: MemoryConfig
    overrides: list[str]
    peak_bytes: int
    peak_by_component: dict[str, int]
    fits: bool
    tokens_per_second: float
    tokens_in_budget: float


def planned_config(settings: dict[str, Any]) -> Config:
    """As `pretrain` reads it; the vocabulary is the tokenizer's upper limit where the model leaves it open."""
    config = Config.of(settings)
    vocabulary = config.model.vocab_size or (settings["tokenizer"]["vocab_size"] + 63) // 64 * 64
    return config.replace(model=replace(config.model, vocab_size=vocabulary))


def find_target(plan: PlanConfig, config: Config) -> Target:
    """Return the device that is planned for: this machine's (auto, cpu, cuda), or a card of the table by name."""
    precision, model = config.precision, config.model
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    if plan.device in ("auto", "cpu", "cuda"):
        here = devices.select(plan.device)
        attention_kernels(config, here)  # refuses what `pretrain` would
        place = replace(Hardware.here(config, here), trains=False)
        memory: float = (
            devices.describe(here).memory_bytes
            if here.type == "cuda"
            else devices.available_bytes()
        )
        rates = roofline.measured(here, place.mode, model.hidden_size, model.intermediate_size)
    else:
        card = roofline.named(plan.device)
        mode = precision.mode if precision.mode != "auto" else "bf16" if card.has_bf16 else "fp16"
        place = Hardware("cuda", card.name, mode, card.capability)
        check_kernel(config, place)
        memory, rates, here = (
            card.memory_bytes,
            roofline.by_data_sheet(card, mode, precision.tf32),
            None,
        )
    place = replace(
        place, processes=config.parallel.tp * config.parallel.pp
    )  # the fewest that a run has
    power = power_of(here, place.name)
    memory = plan.memory_gb * GIB if plan.memory_gb else memory
    return Target(place, memory, rates, heap_factor(config, place.kind), *power)


def check_kernel(config: Config, card: Hardware) -> None:
    """UserError where the attention kernel that is set cannot run on a card that is not here."""
    kernel, dropout = config.attention.kernel, config.model.attention_dropout
    if kernel == "auto":
        return
    if kernel != "varlen":
        reason = attention.reason_against(kernel, torch.device("cuda"), torch.bfloat16, dropout)
    elif not card.has_flash:
        needs = "FlashAttention needs an Ampere or newer GPU (compute capability 8.0)"
        reason = attention.refusal(kernel, f"{needs}, {card.name} is older")
    elif card.mode == "fp32":
        reason = "attention.kernel=varlen: FlashAttention computes in 16 bits; set precision=bf16 or another kernel"
    else:
        reason = attention.reason_against_dropout(kernel, dropout)
    require(not reason, str(reason))


def power_of(here: torch.device | None, name: str) -> tuple[float | None, str]:
    """What a GPU may take in watts, and how that is known: NVML's limit, else that of the card of this name."""
    card, limit = (
        cards.find(name),
        devices.nvml_reader(here, "EnforcedPowerLimit")() if here else None,
    )
    if limit is not None:
        return limit, "its power limit by NVML"
    return (float(card.watts), "board power by the data sheet") if card else (None, "")


def explore(config: Config, target: Target) -> Iterator[Option]:
    """The configured setting, then for each of `variants` the largest micro-batch that fits (the smallest, if none).

    UserError where `pretrain` would refuse the configured section `memory`.
    """
    train = config.train
    sizes = [
        rows
        for rows in micro_batch_sizes(ramp_step(train.batch_ramp, train.batch_size))
        if accepts(config.replace(train=train.replace(micro_batch=rows)), target.place)
    ]
    for memory in variants(config, target.place):
        simulation = Simulation(config.replace(memory=memory), target.place, target.memory_bytes)
        price = functools.cache(functools.partial(price_of, config, target, simulation))
        wanted = [largest_fitting(sizes, lambda rows: price(rows).fits) or sizes[0]]  # noqa: B023
        if memory == config.memory and isinstance(train.micro_batch, int):
            wanted.insert(0, train.micro_batch)
        yield from (price(rows) for rows in dict.fromkeys(wanted))


def variants(config: Config, place: Hardware) -> list[MemoryConfig]:
    """The configured section `memory` and, on top of it, each checkpointing that goes with the rest."""
    check(config, place)
    tried = [config.memory.replace(**changes) for changes in CHECKPOINTING]
    accepted = [memory for memory in tried if accepts(config.replace(memory=memory), place)]
    return list(dict.fromkeys([config.memory, *accepted]))


def accepts(config: Config, place: Hardware) -> bool:
    """Whether `pretrain` would run it there."""
    try:
        check(config, place)
    except UserError:
        return False
    return True


def price_of(config: Config, target: Target, simulation: Simulation, rows: int) -> Option:
    """What one micro-batch size costs with the simulated section `memory`."""
    count = max(1, config.train.batch_size // rows)
    cost, memory = simulation.step(rows, count), simulation.config.memory
    seconds = count * target.rates.seconds(cost.micro_batch) + target.rates.seconds(cost.update)
    rate = count * rows * config.train.sequence_length / seconds
    before = dict(config.memory)
    changed = [
        f"memory.{key}={value}" for key, value in dict(memory).items() if value != before[key]
    ]
    return Option(
        micro_batch=rows,
        memory=memory,
        overrides=[f"train.micro_batch={rows}", *changed],
        peak_bytes=cost.peak_bytes,
        peak_by_component=cost.peak,
        fits=cost.peak_bytes <= target.usable_bytes,
        tokens_per_second=rate,
        tokens_in_budget=tokens_in_budget(config, rate),
    )


def tokens_in_budget(config: Config, tokens_per_second: float) -> float:
    """Tokens that the budget allows at this rate; the ramp of the batch size counts where steps are the budget."""
    limit, train, length = config.budget.limit, config.train, config.train.sequence_length
    if config.budget.unit == "hours":
        return tokens_per_second * 3600 * limit
    if config.budget.unit == "exaflops":
        return (
            limit
            * 1e18
            * fmean(1 / config.flops_per_token(percent / 100) for percent in range(100))
        )
    if config.budget.unit == "tokens":
        return limit
    steps = min(int(limit), 10_000)  # all of them, or evenly chosen ones
    sequences = sum(
        sequences_per_step(train.batch_ramp, step / steps, train.batch_size)
        for step in range(steps)
    )
    return limit * sequences / steps * length
