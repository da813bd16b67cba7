"""The verb `plan`: what a configuration would need and do on a device, before anything is downloaded or trained.

Memory comes from `Simulation`, which runs real steps on tensors without data; time from a roofline over the operations
of the same steps. Neither needs a corpus or the device itself. `cramming.plan.search` tries settings; this is what is
asked and what is printed.
"""

import json
from dataclasses import asdict
from typing import Any

from cramming.checks import Config, tiny_defaults
from cramming.config import UserError, build
from cramming.files import write_atomically
from cramming.model.config import count_parameters
from cramming.plan.costs import Costs
from cramming.plan.memory import CATEGORIES, KEPT_HEAP
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
    tokens_in_budget,
)
from cramming.progress import format_count, say, show_table


def main(settings: dict[str, Any]) -> None:
    """The verb `plan`."""
    plan = build(PlanConfig, settings["plan"], "plan")
    config = planned_config(settings)
    target = find_target(plan, settings["device"], config)
    describe(config, target)
    options = list(explore(config, target))
    best = max((o for o in options if o.fits), key=lambda o: o.tokens_per_second, default=None)
    report(config, target, options, best)
    costs = Costs.of(settings, config, target, best.tokens_per_second, plan.price_per_hour) if best else None
    for line in costs.lines(target) if costs else ():
        say(line)
    if plan.json:
        text = json.dumps(as_json(config, target, options, best, costs), indent=1) + "\n"
        write_atomically(plan.json, text)
    if best is None:
        least = min(options, key=lambda o: o.cost.peak_bytes)
        setting = " ".join(least.overrides(config.memory))
        needs, usable = least.cost.peak_bytes / GIB, max(0.0, target.usable_bytes) / GIB
        raise UserError(
            f"plan.memory_gb={target.memory_bytes / GIB:.3g}: nothing fits; the least that was tried ({setting}) needs"
            f" {needs:.3g} GiB of tensors where {usable:.3g} are usable; take a smaller model or vocabulary, a shorter"
            " train.sequence_length, or an optimizer with less state"
        )


def describe(config: Config, target: Target) -> None:
    """The configuration and the device, and what the numbers rest on."""
    count, train, optimizer = count_parameters(config.model), config.train, config.optim.name
    say(
        f"model: {count.total / 1e6:.1f}M parameters, vocabulary {config.model.vocab_size}; step: {train.batch_size}"
        f" sequences of {train.sequence_length}, {config.targets_per_row} targets each; {optimizer}, {target.mode}"
    )
    if warning := tiny_defaults(config):
        say(warning)
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
    if target.mode == "fp16" and config.precision.mode == "auto":
        say("precision: fp16, with the loss scaled, as this device has no bf16 units")
    if target.kind == "cuda" and not target.flash:
        say(
            "attention: FlashAttention needs compute capability 8.0 (Ampere): here it is SDPA, which for windows and"
            " packed documents computes all pairs of a row, with masks in memory"
        )
    for name in ("offload_activations", "offload_weights", "offload_optimizer"):
        if target.kind == "cuda" and getattr(config.memory, name):
            say(f"memory.{name}: the time of its copies, and of what the CPU computes, is counted as if on the device")
    if target.mode == "fp8":
        say("fp8: both memory and time are those of bf16; a compiled fp8 step is faster, and keeps copies in 8 bits")
    if config.runtime.compile != "off":
        say("compile: both memory and time are those of eager execution; compiled code needs less of each")


def report(config: Config, target: Target, options: list[Option], best: Option | None) -> None:
    """One row per option, then the proposal."""
    headers = ["micro-batch", *_differing(options), *CATEGORIES, "peak GiB", "fits", "tokens/s", "tokens", ""]
    rows = []
    for option in options:
        peak = [f"{option.cost.peak[name] / GIB:.2f}" for name in CATEGORIES]
        notes = (
            ["configured"] if option.memory == config.memory and option.micro_batch == config.train.micro_batch else []
        )
        notes += ["fastest that fits"] if option is best else []
        settings = [str(getattr(option.memory, name)) for name in _differing(options)]
        tokens = tokens_in_budget(config, option.tokens_per_second)
        rows.append(
            [
                str(option.micro_batch), *settings, *peak, f"{option.cost.peak_bytes / GIB:.2f}",
                "yes" if option.fits else "NO", format_count(option.tokens_per_second, ""), format_count(tokens, ""),
                ", ".join(notes),
            ]
        )  # fmt: skip
    show_table("peak memory of a step, by what it holds at that moment", headers, rows)
    say(
        "tried: checkpointing and the micro-batch. Offloading and low-bit optimizers are counted where configured, not"
        " proposed"
    )
    if best:
        rate = format_count(best.tokens_per_second, "tokens")
        say(f"proposed: {' '.join(best.overrides(config.memory))}: about {rate}/s")


def _differing(options: list[Option]) -> list[str]:
    """The memory settings in which the options are not all alike."""
    every = [asdict(option.memory) for option in options]
    return [name for name in every[0] if any(other[name] != every[0][name] for other in every)]


def as_json(
    config: Config, target: Target, options: list[Option], best: Option | None, costs: Costs | None
) -> dict[str, Any]:
    """The whole result, in bytes and seconds."""

    def one(option: Option) -> dict[str, Any]:
        return {
            "micro_batch": option.micro_batch,
            "memory": asdict(option.memory),
            "overrides": option.overrides(config.memory),
            "peak_bytes": option.cost.peak_bytes,
            "peak_by_component": option.cost.peak,
            "fits": option.fits,
            "tokens_per_second": option.tokens_per_second,
            "tokens_in_budget": tokens_in_budget(config, option.tokens_per_second),
        }

    return {
        "parameters": count_parameters(config.model).total,
        "vocab_size": config.model.vocab_size,
        "precision": target.mode,
        "device": {
            "kind": target.kind,
            "name": target.name,
            "memory_bytes": target.memory_bytes,
            "watts": target.watts,
        },
        "usable_bytes": target.usable_bytes,
        "rates": asdict(target.rates),
        "budget": {"unit": config.budget.unit, "limit": config.budget.limit},
        "options": [one(option) for option in options],
        "proposed": one(best) if best else None,
        "costs": asdict(costs) if costs else None,
    }
