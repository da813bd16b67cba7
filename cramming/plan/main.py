"""The verb `plan`: what a configuration would need and do on a device, before anything is downloaded or trained.

Memory comes from `Simulation`, which runs real steps on tensors without data; time from a roofline over the operations
of the same steps. Neither needs a corpus or the device itself.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from cramming.checkpoint import KEEP
from cramming.config import UserError
from cramming.files import write_atomically
from cramming.invocation import Invocation, whole_numbers
from cramming.plan.memory import CATEGORIES
from cramming.plan.roofline import POWER_SHARE, Costs
from cramming.plan.scaling import (
    NETWORKS,
    SCALING_HEADERS,
    Prediction,
    Split,
    predictions,
    scaling_rows,
    splits,
)
from cramming.plan.search import (
    ALLOCATOR_WASTE,
    CONTEXT_BYTES,
    GIB,
    Option,
    PlanConfig,
    Target,
    explore,
    find_target,
    planned_config,
)
from cramming.progress import format_count, say, show_table
from cramming.recipe import Config, check, tiny_defaults


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    *,
    device: str,
    memory_gb: float | None,
    price_per_hour: float | None,
    devices: str | None,
    network: Literal["nvlink", "pcie"],
    out: Path | None,
) -> None:
    """Run the verb `plan`; the whole result is written to `out`, if that is given."""
    counts = tuple(whole_numbers("--devices", devices)) if devices else ()
    plan = PlanConfig(device, memory_gb, price_per_hour, counts, network)
    config = planned_config(recipe)
    target = find_target(plan, config)
    for line in description(config, target):
        say(line)
    options = list(explore(config, target))
    best = max((o for o in options if o.fits), key=lambda o: o.tokens_per_second, default=None)
    show_options(config, options, best)
    costs = None
    if best:
        rate, near_duplicates = (
            best.tokens_per_second,
            recipe["data"]["near_duplicates"]["enabled"],
        )
        vocab_size, watts = config.model.vocab_size or 0, target.watts
        costs = Costs.of(
            best.tokens_in_budget, rate, vocab_size, near_duplicates, watts, plan.price_per_hour
        )
        say(f"proposed: {' '.join(best.overrides)}: about {format_count(rate, 'tokens')}/s")
        say(checkpoint_line(config, best))
        for line in cost_lines(costs, target):
            say(line)
    many = many_devices(plan, config, target, best)
    if out:
        found = {
            "parameters": config.parameters.total,
            "vocab_size": config.model.vocab_size,
            "target": asdict(target),
            "usable_bytes": target.usable_bytes,
            "budget": {"unit": config.budget.unit, "limit": config.budget.limit},
            "options": [_option_row(option) for option in options],
            "proposed": _option_row(best) if best else None,
            "costs": asdict(costs) if costs else None,
            "devices": [asdict(prediction) for prediction in many],
        }
        write_atomically(out, json.dumps(found, indent=1) + "\n")
    if best is None:
        least = min(options, key=lambda o: o.peak_bytes)
        needs, usable = least.peak_bytes / GIB, max(0.0, target.usable_bytes) / GIB
        raise UserError(
            f"--memory-gb={target.memory_bytes / GIB:.3g}: nothing fits; the least that was tried"
            f" ({' '.join(least.overrides)}) needs {needs:.3g} GiB of tensors where {usable:.3g} are usable; take a"
            " smaller model or vocabulary, a shorter train.sequence_length, or an optimizer with less state"
        )


def many_devices(
    plan: PlanConfig, config: Config, target: Target, best: Option | None
) -> list[Prediction]:
    """The table of `--devices`, printed, for the proposed section `memory`, of what `pretrain` accepts."""
    if not plan.devices or best is None:
        return []
    network = NETWORKS[plan.network]
    config = config.replace(memory=best.memory)
    for devices in plan.devices:
        if not splits(config, target.place, devices, network):
            check(
                *Split("ddp", devices).as_run(config, target.place, rows=1)
            )  # refuses it, with the reason
    found = predictions(config, target, network, plan.devices)
    say(
        f"network: {network.basis}, at 80 % of these rates (assumed); {config.train.batch_size} sequences a step"
    )
    show_table(
        "many devices, predicted", SCALING_HEADERS, scaling_rows(found, best.tokens_per_second)
    )
    return found


def description(config: Config, target: Target) -> Iterator[str]:
    """The configuration and the device, and what the numbers rest on."""
    count, train, place, memory = config.parameters, config.train, target.place, config.memory
    on_gpu = place.kind == "cuda"
    yield (
        f"model: {count.total / 1e6:.1f}M parameters, vocabulary {config.model.vocab_size}; step: {train.batch_size}"
        f" sequences of {train.sequence_length}, {config.targets_per_row} targets each; {config.optim.name},"
        f" {place.mode}"
    )
    yield (
        f"device: {place.name}, {target.memory_bytes / GIB:.3g} GiB, of which {max(0, target.usable_bytes) / GIB:.3g}"
        f" for tensors ({CONTEXT_BYTES[place.kind] / GIB:.2g} GiB for"
        f" {'the CUDA context' if on_gpu else 'Python and torch'} and {ALLOCATOR_WASTE[place.kind]:.0%} lost in the"
        " allocator are assumed)"
    )
    yield f"rates: {target.rates.basis}"
    offloads = memory.offload_activations or memory.offload_weights or memory.offload_optimizer
    notes = (
        (warning := tiny_defaults(config), str(warning)),
        (
            target.heap_factor > 1,
            f"heap: runtime.keep_heap=true lets the process grow to {target.heap_factor:g} times its tensors",
        ),
        (
            place.mode == "fp16" and config.precision.mode == "auto",
            "precision: fp16, with the loss scaled, as this device has no bf16 units",
        ),
        (
            on_gpu and not place.has_flash and config.attention.kernel != "padded",
            "attention: FlashAttention needs compute capability 8.0 (Ampere): here it is SDPA, which for windows and"
            " packed documents computes all pairs of a row, with masks in memory",
        ),
        (
            on_gpu and offloads,
            "offloading: copies, and what the CPU computes, are timed as if on the device",
        ),
        (place.mode == "fp8", "fp8: both memory and time are those of bf16"),
        (
            config.runtime.compile != "off",
            "compile: memory and time are those of eager execution, which needs more",
        ),
        (
            config.parallel.name != "ddp" or config.parallel.tp > 1,
            "parallel: memory and time are those of one device that has all of the model; --devices predicts many",
        ),
    )
    yield from (note for holds, note in notes if holds)


def _option_row(option: Option) -> dict[str, Any]:
    return {**asdict(option), "memory": option.memory.model_dump()}


def show_options(config: Config, options: list[Option], best: Option | None) -> None:
    """One row per option."""
    every = [option.memory.model_dump() for option in options]
    differing = [name for name in every[0] if any(other[name] != every[0][name] for other in every)]
    headers = ["micro-batch", *differing, *CATEGORIES, "peak GiB", "fits", "tokens/s", "tokens", ""]
    rows = []
    for option in options:
        is_configured = (
            option.memory == config.memory and option.micro_batch == config.train.micro_batch
        )
        notes = ["configured"] * is_configured + ["fastest that fits"] * (option is best)
        rows.append(
            [
                str(option.micro_batch),
                *(str(getattr(option.memory, name)) for name in differing),
                *(f"{option.peak_by_component[name] / GIB:.2f}" for name in CATEGORIES),
                f"{option.peak_bytes / GIB:.2f}",
                "yes" if option.fits else "NO",
                format_count(option.tokens_per_second, ""),
                format_count(option.tokens_in_budget, ""),
                ", ".join(notes),
            ]
        )
    show_table("peak memory of a step, by what it holds at that moment", headers, rows)
    say("tried: checkpointing and the micro-batch, not offloading and low-bit optimizers")


def checkpoint_line(config: Config, option: Option) -> str:
    """Return the disk that the run's checkpoints take: weights and optimizer state, kept ones and the newest two."""
    state_bytes = option.peak_by_component["weights"] + option.peak_by_component["optimizer"]
    kept = len(config.checkpoint.keep_at)
    total = format_count((kept + KEEP) * state_bytes, "B")
    return f"checkpoints: {total} of disk, {kept} kept for `cramming replay` and the newest {KEEP}"


def cost_lines(costs: Costs, target: Target) -> Iterator[str]:
    """What the whole budget takes."""
    yield (
        f"training: {format_count(costs.tokens, 'tokens')} in {costs.hours:.3g} h;"
        f" {format_count(costs.tokens_per_day, 'tokens')} in a day"
    )
    yield (
        f"preparing as many: {format_count(costs.corpus_bytes, 'B')} of disk in addition to the text,"
        f" {format_count(costs.preparation_memory_bytes, 'B')} of memory, {costs.preparation_core_hours:.2g} core"
        " hours; by measurements on Wikipedia with all filters (benchmarks/results/preparation_*)"
    )
    if costs.kwh is None:
        yield f"electricity: the power of {target.place.name} is not known"
    else:
        power = f"{POWER_SHARE:.0%} (assumed) of {target.watts:.0f} W ({target.watts_basis})"
        yield f"electricity: {costs.kwh:.3g} kWh, {power}; the card alone"
    if costs.price is not None:
        yield f"price: {costs.price:.2f}, {costs.hours:.3g} h at --price-per-hour"
