"""The correctness gate: does a trick still learn what the reference learns, and what was found so far.

A trick for speed that silently stops converging is worse than none (the fastest compile mode of the predecessor did
that: pytorch/pytorch#96693). So the loss of each step, on the same batches from the same weights, is compared with the
fp32 eager reference. Single steps may differ by rounding that grows, so the curves are compared as means of ten steps.

Verdicts are kept per device and torch version in one JSON file (`gates` in the configuration); `pretrain` refuses a
trick that failed there, unless it is named in `forced`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cramming.config import UserError, write_atomically
from cramming.tricks import BEST, TRICKS, Trick, in_force

WINDOW = 10  # steps
MIN_FALL = 0.3  # nats that the reference must learn, or the gate proves nothing


@dataclass(frozen=True)
class Verdict:
    """`distance`: the largest between both curves, in nats (null: not finite); `fall`: what the reference learned."""

    trick: str
    passed: bool
    distance: float | None
    tolerance: float
    steps: int
    fall: float


def judge(trick: Trick, reference: Sequence[float], losses: Sequence[float]) -> Verdict:
    """Compare two loss curves of equal length; ValueError if the reference itself learned nothing."""
    assert trick.tolerance is not None and len(reference) == len(losses)
    expected, found = _means(reference), _means(losses)
    learned = fall(reference)
    if not learned >= MIN_FALL:
        raise ValueError(f"the reference's loss fell by {learned:.3f} in {len(reference)} steps, less than {MIN_FALL}")
    distance = max(abs(a - b) for a, b in zip(expected, found)) if all(map(math.isfinite, losses)) else None
    passed = distance is not None and distance <= trick.tolerance
    return Verdict(trick.name, passed, distance, trick.tolerance, len(losses), learned)


def fall(losses: Sequence[float]) -> float:
    """By how much the mean of ten steps has fallen, in nats."""
    means = _means(losses)
    return means[0] - means[-1]


def _means(losses: Sequence[float]) -> list[float]:
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(0, len(losses) - WINDOW + 1, WINDOW)]


def place(device_name: str, torch_version: str) -> str:
    """The key under which verdicts are kept: a kernel is what a device and a version make of it."""
    return f"{device_name} | torch {torch_version}"


def save(file: Path, where: str, verdicts: Sequence[Verdict]) -> None:
    """Add verdicts to the file; newer ones replace older."""
    known = load(file)
    known.setdefault(where, {}).update({v.trick: asdict(v) for v in verdicts})
    write_atomically(file, json.dumps(known, indent=1, sort_keys=True) + "\n")


def load(file: Path) -> dict[str, dict[str, Any]]:
    """All verdicts: place -> trick -> verdict; empty if there is no file. UserError if it is not ours."""
    if not file.exists():
        return {}
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"gates={file}: not JSON ({error}); `cramming bench tricks` writes it anew") from None
    if not isinstance(known, dict) or not all(map(_are_verdicts, known.values())):
        raise UserError(f"gates={file}: not a table of verdicts; `cramming bench tricks` writes it anew")
    return known


def _are_verdicts(tricks: Any) -> bool:
    """Whether this is a mapping of verdicts as `save` writes them."""
    return isinstance(tricks, dict) and all(
        isinstance(verdict, dict)
        and isinstance(verdict.get("passed"), bool)
        and isinstance(verdict.get("tolerance"), int | float)
        and isinstance(verdict.get("distance"), int | float | None)
        for verdict in tricks.values()
    )


def check(settings: Mapping[str, Any], where: str, device_type: str, mode: str) -> dict[str, str]:
    """For each trick in force, the best stack included: passed, untested, or forced (failed, but named in `forced`).

    UserError if one failed and is not forced. `mode` is what `precision.mode=auto` means on the device.
    """
    known, forced, states = load(Path(settings["gates"])).get(where, {}), settings["forced"], dict[str, str]()
    names = [*(trick.name for trick in TRICKS), BEST]
    if unknown := set(forced) - set(names):
        raise UserError(f"forced: no trick {sorted(unknown)}; there are: {', '.join(names)}")
    for trick in in_force(settings, device_type, mode):
        if trick.tolerance is None:
            continue
        verdict = known.get(trick.name, {})
        states[trick.name] = {None: "untested", True: "passed", False: "forced"}[verdict.get("passed")]
        if states[trick.name] == "forced" and trick.name not in forced:
            setting = ", ".join(f"{key}={value}" for key, value in trick.settings.items())
            choice = "it" if len(trick.settings) == 1 else "one of these"
            distance = "was not finite" if verdict["distance"] is None else f"strayed by {verdict['distance']:.3f}"
            raise UserError(
                f"{setting}: the trick '{trick.name}' failed the correctness gate on this device: its loss {distance}"
                f" (allowed {verdict['tolerance']}; {settings['gates']}); leave {choice} off, or force it with"
                f" forced=['{trick.name}'] and the record will say so"
            )
    return states
