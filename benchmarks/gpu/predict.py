"""Predictions of the speed rows, made before the card is there: memory and tokens/s by `cramming plan`, kernels' bytes.

    python benchmarks/gpu/predict.py --out build/bundle/predictions.json

`plan` knows no compiler: its numbers are those of eager steps. Bytes of compiled kernels are the dry run's.
"""

import argparse
import json
import sys
import time
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
    """Return the bundle's predictions; empty if it has none."""
    file = bundle / FILE if bundle else None
    return json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}


def planned(lab: "Lab") -> dict[str, Any]:
    """Return `plan`'s numbers of the row under way on this device; empty if there are none."""
    from cramming import device as devices
    from cramming.plan import cards

    card = cards.find(devices.describe(lab.device).name)
    rows = read(lab.bundle).get("cards", {}).get(card.name if card else "", {})
    return rows.get(lab.row, {})


def expected_bytes(lab: "Lab") -> dict[str, float]:
    """Return the bytes that a launch of each compiled kernel must move in the row under way."""
    return read(lab.bundle).get("kernels", {}).get(lab.row, {})


def plans(names_to_settings: dict[str, dict[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """Return memory in bytes and tokens/s of each row on a card of the data sheets."""
    from cramming.plan.memory import Simulation
    from cramming.plan.search import PlanConfig, find_target, planned_config, price_of

    predictions = {}
    for row, settings in names_to_settings.items():
        config = planned_config(settings)
        target = find_target(PlanConfig(None, name, None), "auto", config)
        simulation = Simulation(config, target.place, target.memory_bytes)
        option = price_of(config, target, simulation, config.train.micro_batch)
        predictions[row] = {
            "peak_bytes": option.peak_bytes,
            "tokens_per_second": option.tokens_per_second,
        }
    return predictions


def kernel_bytes(raw: Path) -> dict[str, dict[str, float]]:
    """Return the bytes of a launch by row and kernel from the dry run's raw file."""
    rows: dict[str, dict[str, float]] = {}
    for line in raw.read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        packing = step.get("packing", "")
        is_plain = step.get("name") in ("", "documents")
        if step.get("architecture") != ARCHITECTURE or not is_plain or "kernels" not in step:
            continue
        launches, sizes = Counter[str](), Counter[str]()
        for kernel in step["kernels"]:
            launches[kernel["name"]] += kernel["launches"]
            sizes[kernel["name"]] += kernel["launches"] * kernel["bytes"]
        name = f"ours {step['model']} {step['length']}"
        name += " documents" if packing == "documents" else ""
        rows[name] = {kernel: sizes[kernel] / launches[kernel] for kernel in sizes}
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Write the predictions of all speed rows."""
    import torch
    from lab import SCALES, Lab
    from record import Record
    from step_rows import speed_cases, speed_spec

    newest = sorted((ROOT / "benchmarks" / "results").glob("dry_run*.jsonl"))[-1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", type=Path, default=newest, help="raw file of the dry run")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args(arguments)
    record, now = Record(args.out.parent, args.out.parent), time.time()
    lab = Lab(SCALES["full"], torch.device("cuda"), record, None, now, now)
    names = [name for name in speed_cases(lab) if args.only in name]
    settings = {name: speed_spec(lab, name)["settings"] for name in names}
    predictions = {
        "cards": {name: plans(settings, name) for name in CARDS},
        "kernels": kernel_bytes(args.kernels),
        "source": args.kernels.name,
    }
    args.out.write_text(json.dumps(predictions, indent=1) + "\n", encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
