"""Predictions of the speed rows, made before the card is there: memory and tokens/s by `cramming plan`, kernels' bytes.

    python benchmarks/gpu/predict.py --out build/bundle/predictions.json

`plan` knows no compiler: its numbers are those of eager steps. Bytes of compiled kernels are the dry run's.
"""

import argparse
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # a checkout works without an installation

if TYPE_CHECKING:
    from lab import Lab

FILE = "predictions.json"
CARDS = ("H100", "H200")
ARCHITECTURE = "sm_90"  # of the kernels


@cache
def read(bundle: Path | None) -> dict[str, Any]:
    """Return the bundle's predictions: plans by card and row, bytes by row and kernel; empty if unreadable."""
    try:
        predictions = json.loads(((bundle or Path()) / FILE).read_text(encoding="utf-8"))
        return {name: dict(predictions[name]) for name in ("cards", "kernels")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"cards": {}, "kernels": {}}


def planned(lab: "Lab") -> dict[str, Any]:
    """Return `plan`'s numbers of the row under way on this device; empty if there are none."""
    from cramming import device as devices
    from cramming.plan import cards

    card = cards.find(devices.describe(lab.device).name)
    return read(lab.bundle)["cards"].get(card.name if card else "", {}).get(lab.row, {})


def plan(settings: dict[str, Any], card: str) -> dict[str, Any]:
    """Return memory in bytes and the range of tokens/s of a training step on a card of the data sheets."""
    from cramming.plan.memory import Simulation
    from cramming.plan.search import find_target, option_of, planned_config

    config = planned_config(settings)
    target = find_target(config, card)
    simulation = Simulation(config, target.hardware, target.memory_bytes)
    option = option_of(config, target, simulation, int(config.train.micro_batch))
    return {"peak_bytes": option.peak_bytes, "tokens_per_second": option.tokens_per_second}


def kernel_bytes(raw: Path) -> dict[str, dict[str, float]]:
    """Return the bytes of a launch by row and kernel from the dry run's raw file."""
    rows: dict[str, dict[str, float]] = {}
    for line in raw.read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        is_plain = step.get("name") in ("", "documents") and "kernels" in step
        if step.get("architecture") != ARCHITECTURE or not is_plain:
            continue
        launches, sizes = Counter[str](), Counter[str]()
        for kernel in step["kernels"]:
            launches[kernel["name"]] += kernel["launches"]
            sizes[kernel["name"]] += kernel["launches"] * kernel["bytes"]
        name = f"ours {step['model']} {step['length']} {step['name']}".strip()
        rows[name] = {kernel: sizes[kernel] / launches[kernel] for kernel in sizes}
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Write the predictions of all speed rows."""
    import torch
    from lab import SCALES, Lab
    from record import Record
    from step_rows import speed_cases, speed_spec

    dry_runs = (ROOT / "benchmarks" / "results").glob("dry_run*.jsonl")
    newest = max(dry_runs, key=lambda path: path.stem.rpartition("_")[2])  # by its date
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path, default=newest, help="raw file of the dry run")
    args = parser.parse_args(arguments)
    lab = Lab(SCALES["full"], torch.device("cuda"), Record(args.out.parent), None, 0.0, 0.0)
    cards: dict[str, dict[str, Any]] = {card: {} for card in CARDS}
    for row in speed_cases(lab):
        for card, plans in cards.items():
            plans[row] = plan(speed_spec(lab, row)["settings"], card)
    predictions = {"cards": cards, "kernels": kernel_bytes(args.kernels)}
    args.out.write_text(json.dumps(predictions, indent=1) + "\n", encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
