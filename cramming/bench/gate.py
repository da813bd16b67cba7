"""The correctness gate: does a trick still learn what the reference learns, and what was found so far.

A trick for speed that silently stops converging is worse than none (pytorch/pytorch#96693). So the loss of each step,
on the same batches from the same weights, is compared with the fp32 eager reference: the mean distance of every ten
steps. Another order of sums changes a number by one unit in its last place, and training carries that on: the distance
grows tenfold in about ten steps until the two runs differ as two runs do. So the noise floor is measured step by step
in the same run, by repetitions of the reference with perturbed starting weights, and the tolerance is MULTIPLE of the
farthest repetition so far, looking AHEAD (rounding that is thirty times larger is some twenty steps ahead), and never
less than LEAST. Sound runs came to at most 0.5 of that, planted faults to 4 times or more (docs/log.md, 2026-11-21).

`Trick.rounding` says by which unit the weights are perturbed. Verdicts are kept per device and torch version in one
JSON file (the setting `gates`); `pretrain` refuses a trick that failed there, unless it is named in `forced`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from cramming.bench.tricks import BEST, REFERENCE, TRICKS, Trick, changed, get, in_force, spelled
from cramming.config import UserError, build, expand_home, require, unknown_choice
from cramming.files import write_atomically
from cramming.progress import say

FORMAT = 2  # of the file; the first had one tolerance for all steps, set by hand
WINDOW = 10  # steps
MIN_FALL = 0.3  # nats that the reference must learn, or the gate proves nothing
REPETITIONS = 3
MULTIPLE, LEAST = 3.0, 1e-3  # of the farthest repetition; in nats
AHEAD = 2  # windows
Make = Callable[[Mapping[str, Any]], Any]
BASELINE = Trick("reference", {}, None, "fp32, eager, everything computed and kept")


@dataclass(frozen=True)
class NoiseFloor:
    """How far repetitions of the reference strayed whose weights were perturbed by `rounding`, in nats:
    [repetition][window]."""

    rounding: float
    distances: list[list[float]]

    def tolerance(self) -> list[float]:
        """What is allowed in each window, in nats. UserError where a repetition diverged: that would allow anything."""
        require(
            all(
                math.isfinite(distance) for repetition in self.distances for distance in repetition
            ),
            f"the loss of a repetition whose starting weights were perturbed by {self.rounding:.1e} is not finite, so"
            " nothing can be judged by it; with bench, lower optim.lr in --gate",
        )
        farthest = list(accumulate(map(max, zip(*self.distances, strict=True)), max))
        ahead = farthest[AHEAD:] + farthest[-1:] * min(AHEAD, len(farthest))
        return [max(LEAST, MULTIPLE * distance) for distance in ahead]


@dataclass(frozen=True)
class Verdict:
    """`distance` and `tolerance`, in nats, of the ten steps (fewer at the end) up to `at_step`, where the curve strayed
    most relative to what was allowed (distance null: not finite); `fall`: what the reference learned; `settings`: the
    trick's."""

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
    """What the file has for one device and version of torch."""

    verdicts: dict[str, Verdict]  # by trick
    floors: dict[str, Any]  # by rounding


def judge(
    trick: Trick, reference: Sequence[float], losses: Sequence[float], floor: NoiseFloor
) -> Verdict:
    """Compare two loss curves of equal length."""
    assert trick.rounding == floor.rounding
    found, allowed = distances(reference, losses), floor.tolerance()
    broken = next((i for i, distance in enumerate(found) if not math.isfinite(distance)), None)
    worst = (
        max(range(len(found)), key=lambda i: found[i] / allowed[i]) if broken is None else broken
    )
    distance = found[worst] if broken is None else None
    return Verdict(
        trick=trick.name,
        passed=distance is not None and distance <= allowed[worst],
        distance=distance,
        tolerance=allowed[worst],
        at_step=min((worst + 1) * WINDOW, len(losses)),
        steps=len(losses),
        fall=fall(reference),
        settings=spelled(trick.settings),
    )


def distances(reference: Sequence[float], losses: Sequence[float]) -> list[float]:
    """The mean distance between two loss curves over every ten steps and those that are left over, in nats."""
    return _means([abs(a - b) for a, b in zip(reference, losses, strict=True)])


def fall(losses: Sequence[float]) -> float:
    """By how much the mean of ten steps has fallen, in nats."""
    return _means(losses)[0] - _means(losses[-WINDOW:])[0]


def _means(losses: Sequence[float]) -> list[float]:
    """Of every ten steps, and of those that are left over."""
    windows = (losses[i : i + WINDOW] for i in range(0, len(losses), WINDOW))
    return [sum(window) / len(window) for window in windows]


def spec_of(
    settings: Mapping[str, Any], trick: Trick, vocab_size: int, device: str
) -> dict[str, Any]:
    """What a worker must know to train the reference with one trick (worker.py)."""
    return {
        "name": trick.name,
        "settings": changed(changed(settings, REFERENCE), trick.settings),
        "vocab_size": vocab_size,
        "device": device,
        "micro_batches": trick.micro_batches,
    }


class Curves:
    """The loss curves of the gate: the reference's, its repetitions', and each trick's in a process of its own.

    `settings` need not be as large as what is timed; `make` starts a `Worker`, or what behaves like one. `floors` has
    the noise floors that were needed so far, by rounding.
    """

    def __init__(
        self, settings: dict[str, Any], steps: int, vocab_size: int, device: str, make: Make
    ) -> None:
        self.settings, self.steps, self.vocab_size, self.device, self.make = (
            settings,
            steps,
            vocab_size,
            device,
            make,
        )
        self.floors: dict[float, NoiseFloor] = {}

    @cached_property
    def reference(self) -> list[float]:
        """The loss curve that tricks are compared with, measured once; UserError if it falls too little."""
        (curve,) = self.losses([self.spec(BASELINE)])
        require(
            fall(curve) >= MIN_FALL,
            f"--gate-steps={self.steps}: the reference's loss fell by {fall(curve):.2f} nats, less than {MIN_FALL},"
            " so the gate would prove nothing; raise it, or optim.lr in --gate",
        )
        return curve

    def floor(self, rounding: float) -> NoiseFloor:
        """The reference against itself with its starting weights perturbed by `rounding`; measured once."""
        if rounding not in self.floors:
            reference, spec = self.reference, self.spec(BASELINE)
            curves = self.losses(
                [spec | {"perturbed": (rounding, seed)} for seed in range(1, REPETITIONS + 1)]
            )
            self.floors[rounding] = NoiseFloor(
                rounding, [distances(reference, curve) for curve in curves]
            )
        return self.floors[rounding]

    def verdict(self, trick: Trick) -> Verdict:
        """On one trick."""
        assert trick.rounding is not None
        reference, floor = self.reference, self.floor(trick.rounding)
        return judge(trick, reference, self.losses_or_nan(trick), floor)

    def learned(self, trick: Trick) -> dict[str, float]:
        """For a trick that is another algorithm: by how many nats its loss falls, and the reference's."""
        return {"reference": fall(self.reference), "fall": fall(self.losses_or_nan(trick))}

    def losses_or_nan(self, trick: Trick) -> list[float]:
        """One that cannot run here has learned nothing."""
        try:
            return self.losses([self.spec(trick)])[0]
        except UserError as error:
            say(f"gate: {error}")
            return [float("nan")] * self.steps

    def spec(self, trick: Trick) -> dict[str, Any]:
        """What a worker must know. A step that fp16 skips until its scale fits is repeated: else the curve would stay
        one batch behind the reference's."""
        return spec_of(self.settings, trick, self.vocab_size, self.device) | {
            "repeat_skipped": True
        }

    def losses(self, specs: Sequence[dict[str, Any]]) -> list[list[float]]:
        """The loss of every step of each candidate, one after the other in one process."""
        with self.make(specs[0]) as worker:
            curves = [worker.run(0, self.steps).losses]
            for spec in specs[1:]:
                worker.rebuild(spec)
                curves.append(worker.run(0, self.steps).losses)
        return curves


def place(device_name: str, torch_version: str) -> str:
    """The key under which verdicts are kept: a kernel is what a device and a version make of it."""
    return f"{device_name} | torch {torch_version}"


def save(
    file: Path, where: str, verdicts: Sequence[Verdict], floors: Sequence[NoiseFloor] = ()
) -> None:
    """Add verdicts and noise floors to the file; newer ones replace older."""
    known = load(file)
    here = known.setdefault(where, Verdicts({}, {}))
    here.verdicts.update({v.trick: v for v in verdicts})
    here.floors.update(
        {f"{f.rounding:.3g}": asdict(f) | {"tolerance": f.tolerance()} for f in floors}
    )
    places = {name: asdict(found) for name, found in known.items()}
    write_atomically(
        file, json.dumps({"format": FORMAT, "places": places}, indent=1, sort_keys=True) + "\n"
    )


def load(file: Path) -> dict[str, Verdicts]:
    """What is known, by place; empty if there is no file. UserError if not ours."""
    if not file.exists():
        return {}
    found = f"gates={file}: no table of verdicts in format {FORMAT}; remove it, and `cramming bench` writes it anew"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        require(content["format"] == FORMAT, found)
        return {name: build(Verdicts, here, "place") for name, here in content["places"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        raise UserError(found) from None


def check(settings: Mapping[str, Any], where: str, device_type: str, mode: str) -> dict[str, str]:
    """For each trick in force: passed, forced (failed, but named in `forced`), or untested (it has no verdict here).

    UserError if one failed and is not forced. `mode` is what `precision.mode=auto` means on the device.
    """
    verdicts = load(expand_home(settings["gates"], "gates")).get(where, Verdicts({}, {})).verdicts
    forced, states = settings["forced"], dict[str, str]()
    names = [*(trick.name for trick in TRICKS), BEST]
    for name in forced:
        if name not in names:
            raise UserError(unknown_choice("forced", name, names))
    for trick in in_force(settings, device_type, mode):
        verdict = verdicts.get(trick.name)
        if verdict is None or (trick.name == BEST and verdict.settings != spelled(trick.settings)):
            states[trick.name] = (
                "untested"  # or another stack was: what pays changes with this suite's versions
            )
            continue
        states[trick.name] = "passed" if verdict.passed else "forced"
        own = {key: get(settings, key) for key in trick.decisive or trick.settings}
        distance = (
            "was not finite"
            if verdict.distance is None
            else f"strayed by {verdict.distance:.2g} nats"
        )
        require(
            verdict.passed or trick.name in forced,
            f"{spelled(own)}: the trick '{trick.name}' failed the correctness gate on this device: its loss {distance}"
            f" (allowed {verdict.tolerance:.2g} at step {verdict.at_step}; {settings['gates']}); leave it off, or"
            f" force it with forced=['{trick.name}'] and the record will say so",
        )
    return states
