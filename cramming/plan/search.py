"""Settings that fit a device: the search behind `plan`.

On top of the configured section `memory`, activation checkpointing is tried from the cheapest on until a micro-batch of
a useful size fits. Offloading and low-bit optimizer states are planned where they are configured, but not proposed.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import torch

from cramming import device as devices
from cramming.config import UserError, require
from cramming.data.manifest import LARGEST_VOCABULARY
from cramming.parallel.apply import MemoryConfig
from cramming.plan import cards
from cramming.plan.memory import (
    CPU_SHARE,
    ENOUGH_TOKENS,
    FIRST_TOKENS,
    Simulation,
    largest_fitting,
    micro_batch_sizes,
)
from cramming.plan.speed import Speed, find_card, measured_speed, speed_by_data_sheet
from cramming.recipe import Config, Hardware, attention_kernels, check
from cramming.schedule import ramp_step, sequences_per_step

GIB = 2**30
# Outside torch's tensors: on a GPU a CUDA context with its loaded kernels and cuBLAS's workspace, by experience; on a
# CPU Python with torch and its libraries, measured as resident set.
CONTEXT_BYTES = {"cuda": 664 * 2**20, "cpu": 400 * 2**20}
# Of the rest, what tensors may take. A GPU's allocator cannot use all memory again, and kernels have scratch memory of
# their own, such as fp32 sums of FlashAttention's backward pass: by experience.
SHARE = {"cuda": 0.94, "cpu": CPU_SHARE}
# Values of `memory.checkpoint_every` and `memory.checkpoint` that are tried.
CHECKPOINTING: tuple[tuple[int, Literal["full", "selective"]], ...] = (
    (0, "full"),
    (1, "selective"),
    (2, "full"),
    (1, "full"),
)
Range = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """Device that is planned for."""

    hardware: Hardware
    memory_bytes: float
    speed: Speed

    @property
    def usable_bytes(self) -> float:
        """Bytes that the tensors of a step may take."""
        kind = self.hardware.kind
        return (self.memory_bytes - CONTEXT_BYTES[kind]) * SHARE[kind]


@dataclass(frozen=True)
class Option:
    """Micro-batch and section `memory`, with peak memory and speed (least, most)."""

    micro_batch: int
    memory: MemoryConfig
    peak_bytes: int
    peak_by_category: dict[str, int]
    fits: bool
    tokens_per_second: Range
    tokens_in_budget: Range


def planned_config(settings: dict[str, Any]) -> Config:
    """Return the configuration of `pretrain`; an open vocabulary has the tokenizer's largest size."""
    config = Config.of(settings)
    vocabulary = config.model.vocab_size or planned_vocabulary(settings)
    return config.replace(model=replace(config.model, vocab_size=vocabulary))


def planned_vocabulary(recipe: Mapping[str, Any]) -> int:
    """Return the largest size of a vocabulary that is not trained yet, in whole tiles of 64."""
    size = recipe["tokenizer"]["vocab_size"]
    limit: int = LARGEST_VOCABULARY if size == "auto" else size
    return (limit + 63) // 64 * 64


def find_target(config: Config, device: str, memory_gb: float | None = None) -> Target:
    """Return this machine's device (`device` is auto, cpu or cuda) or a card of the table by name.

    `memory_gb` is in GiB; None stands for the memory that the device has for programs.
    """
    if device in ("auto", "cpu", "cuda"):
        target = _local_target(devices.select(device), config)
    else:
        target = _card_target(find_card(device), config)
    fewest_processes = config.parallel.tp * config.parallel.pp
    hardware = replace(target.hardware, processes=fewest_processes)
    memory_bytes = memory_gb * GIB if memory_gb else target.memory_bytes
    return replace(target, hardware=hardware, memory_bytes=memory_bytes)


def explore(config: Config, target: Target) -> Iterator[Option]:
    """Yield for each checkpointing the largest micro-batch that fits, or the smallest if none fits.

    After an option that fits with `ENOUGH_TOKENS` only the configured one is tried. A configured micro-batch is a
    separate option. Raises UserError if `pretrain` would refuse the configuration.
    """
    train = config.train
    check(config, target.hardware)
    max_rows = ramp_step(train.batch_ramp, train.batch_size)
    sizes = micro_batch_sizes(max_rows, train.sequence_length)
    first = FIRST_TOKENS // train.sequence_length
    enough = min(ENOUGH_TOKENS // train.sequence_length, sizes[-1])
    is_done = False
    for memory in variants(config, target.hardware):
        is_configured = memory == config.memory
        if is_done and not is_configured:
            continue
        option = _simulated_options(config, target, memory)
        rows = largest_fitting(sizes, _fits(option), first) or sizes[0]
        if is_configured and train.micro_batch not in ("auto", rows):
            yield option(train.rows)
        yield option(rows)
        is_done = is_done or (option(rows).fits and rows >= enough)


def choose(options: list[Option], sequence_length: int) -> Option | None:
    """Return the fastest option that fits: with enough tokens at a time, the least arithmetic, the largest size."""

    def rank(option: Option) -> tuple[int, float, int]:
        tokens = option.micro_batch * sequence_length
        return min(tokens, ENOUGH_TOKENS), option.tokens_per_second[1], tokens

    return max((option for option in options if option.fits), key=rank, default=None)


def variants(config: Config, hardware: Hardware) -> list[MemoryConfig]:
    """Return the configured section `memory` and each other checkpointing on top of it, least arithmetic first."""
    distinct = {config.memory: None}
    for every, kind in CHECKPOINTING:
        memory = config.memory.replace(checkpoint_every=every, checkpoint=kind)
        with suppress(UserError):  # what `pretrain` would refuse
            check(config.replace(memory=memory), hardware)
            distinct[memory] = None
    return sorted(distinct, key=lambda memory: (forward_passes(memory), memory.checkpoint_every))


def overrides(option: Option, config: Config) -> str:
    """Return the settings that ask for the option on top of the configuration."""
    settings = [f"train.micro_batch={option.micro_batch}"]
    for name in ("checkpoint_every", "checkpoint"):
        value = getattr(option.memory, name)
        if value != getattr(config.memory, name):
            settings.append(f"memory.{name}={value}")
    return " ".join(settings)


def option_of(config: Config, target: Target, simulation: Simulation, rows: int) -> Option:
    """Return memory and speed of a micro-batch of `rows` with the simulated section `memory`."""
    peak = simulation.peak(rows, accumulates=config.train.batch_size > rows)
    peak_bytes = sum(peak.values())
    slow, fast = speed_range(simulation.config, target.speed)
    return Option(
        micro_batch=rows,
        memory=simulation.config.memory,
        peak_bytes=peak_bytes,
        peak_by_category=peak,
        fits=peak_bytes <= target.usable_bytes,
        tokens_per_second=(slow, fast),
        tokens_in_budget=(tokens_in_budget(config, slow), tokens_in_budget(config, fast)),
    )


def speed_range(config: Config, speed: Speed) -> Range:
    """Return the least and the most tokens per second; a backward pass counts as two forward passes."""
    tokens_per_flop = _tokens_per_flop(config) * 3 / (2 + forward_passes(config.memory))
    return speed.least_flops * tokens_per_flop, speed.most_flops * tokens_per_flop


def forward_passes(memory: MemoryConfig) -> float:
    """Return the forward passes of a step, of which full checkpointing adds one of each such block."""
    if memory.checkpoint_every and memory.checkpoint == "full":
        return 1 + 1 / memory.checkpoint_every
    return 1.0


def tokens_in_budget(config: Config, tokens_per_second: float) -> float:
    """Return the tokens that the budget allows at this rate; a batch that grows counts where steps are the budget."""
    limit, train = config.budget.limit, config.train
    if config.budget.unit == "hours":
        return tokens_per_second * 3600 * limit
    if config.budget.unit == "exaflops":
        return limit * 1e18 * _tokens_per_flop(config)
    if config.budget.unit == "tokens":
        return limit
    steps = min(int(limit), 10_000)  # all of them, or evenly chosen ones
    sequences = fmean(
        sequences_per_step(train.batch_ramp, step / steps, train.batch_size)
        for step in range(steps)
    )
    return limit * sequences * train.sequence_length


def steps_of_tokens(config: Config, tokens: float) -> float:
    """Return the steps that train so many tokens in a budget of hours; a batch that grows needs more of them."""
    train = config.train
    steps_per_sequence = fmean(
        1 / sequences_per_step(train.batch_ramp, percent / 100, train.batch_size)
        for percent in range(100)
    )
    return tokens / train.sequence_length * steps_per_sequence


def _simulated_options(
    config: Config, target: Target, memory: MemoryConfig
) -> Callable[[int], Option]:
    """Return the function from a micro-batch to its option, which simulates each size once."""
    planned = config.replace(memory=memory)
    simulation = Simulation(planned, target.hardware, target.memory_bytes)
    return functools.cache(functools.partial(option_of, config, target, simulation))


def _fits(option: Callable[[int], Option]) -> Callable[[int], bool]:
    return lambda rows: option(rows).fits


def _local_target(here: torch.device, config: Config) -> Target:
    attention_kernels(config, here)  # refuses what `pretrain` would
    hardware = replace(Hardware.here(config, here), trains=False)
    device = devices.describe(here)
    memory_bytes = device.memory_bytes if here.type == "cuda" else devices.available_bytes()
    model, tf32 = config.model, config.precision.tf32
    speed = measured_speed(here, hardware.mode, tf32, model.hidden_size, model.intermediate_size)
    return Target(hardware, memory_bytes, speed)


def _card_target(card: cards.Card, config: Config) -> Target:
    mode = config.precision.mode
    if mode == "auto":
        mode = "bf16" if card.has_bf16 else "fp16"
    hardware = Hardware("cuda", card.name, mode, card.capability)
    runs_flash = hardware.has_flash and mode != "fp32"
    require(
        config.attention.kernel != "varlen" or runs_flash,
        f"attention.kernel=varlen: {card.name} in {mode} has no FlashAttention, which needs compute capability 8.0"
        " (Ampere) and 16 bits. Set it to auto.",
    )
    return Target(
        hardware, card.memory_bytes, speed_by_data_sheet(card, mode, config.precision.tf32)
    )


def _tokens_per_flop(config: Config) -> float:
    """Return the mean over the budget, as phases of the objective differ."""
    return fmean(1 / config.flops_per_token(percent / 100) for percent in range(100))
