"""Verdicts of the correctness gate (gate.py), stored per device and torch version in one JSON file (`gates`).

`pretrain` refuses a trick that failed there, unless it is named in `forced`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming.bench.tricks import (
    BEST,
    TRICKS,
    Trick,
    as_overrides,
    get,
    in_force,
)
from cramming.config import UserError, build, expand_home, require, unknown_choice

FORMAT = 2  # format 1 had one tolerance for all steps, set by hand


@dataclass(frozen=True)
class Verdict:
    """Result of the gate for one trick.

    `distance` and `tolerance`, in nats, are those of the ten steps (fewer at the end) up to `at_step`, where the
    distance was largest relative to the tolerance; a distance of None was not finite. `fall` is the reference's fall
    of loss, in nats, and `settings` are the trick's.
    """

    trick: str
    passed: bool
    distance: float | None
    tolerance: float
    at_step: int
    steps: int
    fall: float
    settings: str = ""


@dataclass(frozen=True)
class Verdicts:
    """Content of the verdicts file for one device and version of torch."""

    verdicts: dict[str, Verdict]  # key: name of the trick
    floors: dict[str, Any]  # key: rounding


def device_key(device_name: str, torch_version: str) -> str:
    """Return the key of the verdicts for a device and a version of torch, which both decide what a kernel computes."""
    return f"{device_name} | torch {torch_version}"


def load(file: Path) -> dict[str, Verdicts]:
    """Return the verdicts by device key, empty if there is no file; raise UserError for a file of another kind."""
    if not file.exists():
        return {}
    message = f"gates={file}: no table of verdicts in format {FORMAT}. Remove it, and `cramming bench` writes it anew."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        require(content["format"] == FORMAT, message)
        return {key: build(Verdicts, entry, "place") for key, entry in content["places"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        raise UserError(message) from None


def check(settings: Mapping[str, Any], where: str, device_type: str, mode: str) -> dict[str, str]:
    """Return the state of each trick in force: passed, forced, or untested.

    A forced trick failed the gate but is named in `forced`; an untested one has no verdict for this device. Raises
    UserError if a trick failed and is not forced. `mode` is the meaning of `precision.mode=auto` on the device.
    """
    verdicts = load(expand_home(settings["gates"], "gates")).get(where, Verdicts({}, {})).verdicts
    forced, states = settings["forced"], dict[str, str]()
    names = [*(trick.name for trick in TRICKS), BEST]
    for name in forced:
        if name not in names:
            raise UserError(unknown_choice("forced", name, names))
    for trick in in_force(settings, device_type, mode):
        verdict = verdicts.get(trick.name)
        if verdict is None:
            states[trick.name] = "untested"
            continue
        if trick.name == BEST and verdict.settings != as_overrides(trick.settings):
            # The verdict is on the best stack of another version of the suite.
            states[trick.name] = "untested"
            continue
        if verdict.passed:
            states[trick.name] = "passed"
            continue
        require(trick.name in forced, _failure_message(settings, trick, verdict))
        states[trick.name] = "forced"
    return states


def _failure_message(settings: Mapping[str, Any], trick: Trick, verdict: Verdict) -> str:
    values = {key: get(settings, key) for key in trick.decisive or trick.settings}
    distance = "was not finite"
    if verdict.distance is not None:
        distance = f"strayed by {verdict.distance:.2g} nats"
    return (
        f"{as_overrides(values)}: the trick '{trick.name}' failed the correctness gate on this device: its loss"
        f" {distance} (allowed {verdict.tolerance:.2g} at step {verdict.at_step}; {settings['gates']}). Leave it off,"
        f" or force it with forced=['{trick.name}'], which the record will state."
    )
