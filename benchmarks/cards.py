"""The table of cards in docs/tricks.md: what `cramming plan` reckons for each, BERT-base in rows of 128 tokens.

    python benchmarks/cards.py --docs docs/tricks.md

Without checkpointing, with the largest micro-batch that fits. Nothing is measured: rates are the data sheets' at
assumed shares (cramming/plan/roofline.py). A simulated step serves all cards with the same number format, kernels and
head.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

from cramming.bench.tables import replace_section
from cramming.checks import Config
from cramming.model.heads import cuda_chunks
from cramming.overrides import compose
from cramming.plan.cards import CARDS, Card
from cramming.plan.memory import Simulation, micro_batch_sizes
from cramming.plan.roofline import POWER_SHARE
from cramming.plan.search import Option, PlanConfig, Target, find_target, planned_config, price_of

SECTION = "Cards, reckoned"
HEADERS = (
    "card", "memory, GiB", "products, TFLOP/s", "GB/s", "W", "format", "micro-batch", "tokens/s", "tokens in a day",
    "kWh in a day",
)  # fmt: skip
NOTE = (
    "What `cramming plan experiment=bert-base-day plan.device=<card>` reckons, uncompiled and without checkpointing,"
    " with the largest micro-batch that fits (`python benchmarks/cards.py`). Not measured: 70 % of the products (dense,"
    " 16 bits, sums in fp32), 80 % of the bandwidth and 90 % of the power are assumed; the column of memory is what the"
    " card is sold with, micro-batches are by what torch reports of it. Training refuses AMD GPUs: the MI300X is there"
    " to compare with. Published rates of others, compiled: 58k tokens/s on a 2080 Ti, 103k on an A6000 (crammed BERT;"
    " README)."
)


def largest(config: Config, target: Target, simulation: Simulation) -> Option | None:
    """The largest micro-batch that fits, as `plan` would price it."""
    sizes = reversed(micro_batch_sizes(config.train.batch_size))
    options = (price_of(config, target, simulation, rows) for rows in sizes if rows <= 1024)
    return next((option for option in options if option.fits), None)


def row_of(card: Card, target: Target, option: Option | None) -> list[str]:
    """One line of the table."""
    known = [str(card.memory), f"{card.tflops:g}", str(card.bandwidth), str(card.watts), target.place.mode]
    if option is None or target.watts is None:
        return [card.name, *known, "none fits", "", "", ""]
    rate = option.tokens_per_second
    found = [str(option.micro_batch), f"{rate / 1e3:.0f}k", f"{86400 * rate / 1e9:.1f}B"]
    return [card.name, *known, *found, f"{target.watts * POWER_SHARE * 24 / 1000:.1f}"]


def main() -> None:
    """Reckon, and put the section into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--docs", type=Path, required=True)
    arguments = parser.parse_args()
    config = planned_config(compose(["experiment=bert-base-day", "runtime.compile=off"]))
    simulations: dict[Any, Simulation] = {}
    rows = []
    for card in CARDS:
        target = find_target(PlanConfig(None, card.name, None), "cpu", config)
        alike = (target.place.mode, target.has_flash, cuda_chunks(target.memory_bytes))
        if alike not in simulations:
            simulations[alike] = Simulation(config, target.place, target.memory_bytes)
            simulations[alike].step = functools.cache(simulations[alike].step)  # type: ignore[method-assign]
        rows.append(row_of(card, target, largest(config, target, simulations[alike])))
        print(" | ".join(rows[-1]), flush=True)
    lines = [HEADERS, ["---"] * len(HEADERS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    replace_section(arguments.docs, SECTION, [NOTE, "", table])


if __name__ == "__main__":
    main()
