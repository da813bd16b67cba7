"""The verb `plan`: memory, speed and costs of a configuration on a device, before anything is downloaded or trained.

It needs neither a corpus nor the device.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cramming.checkpoint import MAX_NEWEST
from cramming.config import UserError
from cramming.files import write_atomically
from cramming.invocation import Invocation
from cramming.plan import cards
from cramming.plan.memory import CATEGORIES
from cramming.plan.search import (
    GIB,
    Option,
    Range,
    Target,
    choose,
    explore,
    find_target,
    overrides,
    planned_config,
)
from cramming.precision import slow_products
from cramming.progress import format_count, say, show_table
from cramming.recipe import Config, tiny_defaults

POWER_SHARE = 0.9  # of its board power that a card takes in training; assumed
# Preparation as measured (benchmarks/results/preparation_*): files of 1 and 4 GB, two workers, all filters and the
# search for the tasks' text.
INDEX_BYTES_PER_TOKEN = 0.01  # where documents start
TOKENS_PER_CORE_HOUR = 0.46e6 * 3600  # 2.06 MB of text a second, 4.5 bytes of it a token


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    *,
    device: str,
    memory_gb: float | None,
    price_per_hour: float | None,
    out: Path | None,
) -> None:
    """Run the verb `plan`; the whole result is written to `out`, if that is given."""
    config = planned_config(recipe)
    target = find_target(config, device, memory_gb)
    for line in description(config, target):
        say(line)
    options = list(explore(config, target))
    best = choose(options, config.train.sequence_length)
    show_options(config, options, best)
    if best:
        say(f"proposed: {overrides(best, config)}: {_span(best.tokens_per_second)} tokens/s")
        for line in cost_lines(config, target, best, price_per_hour):
            say(line)
    if out:
        result = {
            "vocab_size": config.model.vocab_size,
            "target": asdict(target),
            "usable_bytes": target.usable_bytes,
            "options": [_option_row(option) for option in options],
            "proposed": _option_row(best) if best else None,
        }
        write_atomically(out, json.dumps(result, indent=1) + "\n")
    if best is None:
        smallest = min(options, key=lambda option: option.peak_bytes)
        raise UserError(
            f"--memory-gb={target.memory_bytes / GIB:.3g}: nothing fits. The least that was tried"
            f" ({overrides(smallest, config)}) needs {smallest.peak_bytes / GIB:.3g} GiB of tensors. Take a smaller"
            " model or vocabulary, a shorter train.sequence_length, or an optimizer with less state."
        )


def description(config: Config, target: Target) -> Iterator[str]:
    """Yield lines about the configuration, the device, and what the numbers rest on."""
    train, hardware = config.train, target.hardware
    yield (
        f"model: {config.parameters.total / 1e6:.1f}M parameters, vocabulary {config.model.vocab_size};"
        f" step: {train.batch_size} sequences of {train.sequence_length}, {config.targets_per_row} targets each;"
        f" {config.optim.name}, {hardware.mode}"
    )
    usable_gib = target.usable_bytes / GIB
    yield f"device: {hardware.name}, {target.memory_bytes / GIB:.3g} GiB, about {usable_gib:.3g} for tensors"
    yield f"speed: {target.speed.basis}"
    for warning in (tiny_defaults(config), slow_products(hardware.mode, hardware.kind)):
        if warning:
            yield warning
    yield from (note for applies, note in _notes(config, target) if applies)


def _option_row(option: Option) -> dict[str, Any]:
    return {**asdict(option), "memory": option.memory.model_dump()}


def show_options(config: Config, options: list[Option], best: Option | None) -> None:
    """Print a table with one row per option."""
    settings = ["micro-batch", "checkpoint_every", "checkpoint"]
    headers = [*settings, *CATEGORIES, "peak", "fits", "tokens/s", "tokens", ""]
    rows = []
    for option in options:
        memory = option.memory
        note = "proposed" if option is best else ""
        if (option.micro_batch, memory) == (config.train.micro_batch, config.memory):
            note = f"configured {note}"
        rows.append(
            [
                str(option.micro_batch),
                str(memory.checkpoint_every),
                memory.checkpoint if memory.checkpoint_every else "off",
                *(f"{size / GIB:.2f}" for size in option.peak_by_category.values()),
                f"{option.peak_bytes / GIB:.2f}",
                "yes" if option.fits else "NO",
                _span(option.tokens_per_second),
                _span(option.tokens_in_budget),
                note,
            ]
        )
    show_table("peak memory of a step in GiB, by what it holds at that moment", headers, rows)


def cost_lines(
    config: Config, target: Target, option: Option, price_per_hour: float | None
) -> Iterator[str]:
    """Yield the costs of the whole budget: disk, time, a corpus without repeated tokens, electricity, money."""
    state_bytes = option.peak_by_category["weights"] + option.peak_by_category["optimizer"]
    num_kept = len(config.checkpoint.keep_at)
    total = format_count((num_kept + MAX_NEWEST) * state_bytes, "B")
    yield f"checkpoints: {total} of disk, {num_kept} kept for `cramming replay` and the newest {MAX_NEWEST}"

    slow, fast = option.tokens_per_second
    min_tokens, max_tokens = option.tokens_in_budget
    hours = max_tokens / fast / 3600, min_tokens / slow / 3600
    yield f"training: {_span((min_tokens, max_tokens))} tokens in {_span(hours)} hours"

    token_bytes = 2 if (config.model.vocab_size or 0) <= 2**16 else 4
    disk = format_count((token_bytes + INDEX_BYTES_PER_TOKEN) * max_tokens, "B")
    yield (
        f"preparing {_shown(max_tokens)} tokens: {disk} of disk in addition to the text and"
        f" {max_tokens / TOKENS_PER_CORE_HOUR:.2g} core hours, by measurements on Wikipedia with all filters"
        " (benchmarks/results/preparation_*)"
    )
    card = cards.find(target.hardware.name)
    if card:
        kwh = _span(hours, POWER_SHARE * card.watts / 1000)
        yield f"electricity: {kwh} kWh, {POWER_SHARE:.0%} (assumed) of {card.watts} W; the card alone"
    if price_per_hour:
        yield f"price: {_span(hours, price_per_hour)} at --price-per-hour"


def _span(ends: Range, factor: float = 1.0) -> str:
    """Return both ends times `factor` as text, once if they read the same."""
    low, high = (_shown(factor * end) for end in ends)
    return low if low == high else f"{low} to {high}"


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else format_count(value, "")


def _notes(config: Config, target: Target) -> Iterator[tuple[bool, str]]:
    """Yield what may apply to a plan, with whether it does."""
    hardware, memory = target.hardware, config.memory
    yield (
        hardware.kind == "cuda" and not hardware.has_flash and config.attention.kernel != "padded",
        "attention: FlashAttention needs compute capability 8.0 (Ampere): here it is SDPA, which for windows and"
        " packed documents computes all pairs of a row, with masks in memory",
    )
    yield (
        memory.offload_activations or memory.offload_weights or memory.offload_optimizer,
        "offloading: speed does not include the copies, and activations are counted as if they stayed on the device",
    )
    yield hardware.mode == "fp8", "fp8: both memory and speed are those of bf16"
    yield (
        config.runtime.compile != "off",
        "compile: memory is that of eager execution, which needs more",
    )
    yield (
        config.parallel.name != "ddp" or config.parallel.tp > 1,
        "parallel: memory and speed are those of one device that has all of the model",
    )
