"""Correctness gate: compare the loss curve of a trick with the reference's, and store the verdicts.

A trick for speed that silently stops converging is worse than none (pytorch/pytorch#96693). So the loss of each step,
on the same batches from the same weights, is compared with the fp32 eager reference: the mean distance of every ten
steps. Another order of sums changes a number by one unit in its last place, and training amplifies that: the distance
grows tenfold in about ten steps until the two runs differ as any two runs do. So the noise floor is measured step by
step in the same run, by repetitions of the reference with perturbed starting weights. The tolerance is MULTIPLE times
the farthest repetition so far, AHEAD windows later (rounding that is thirty times larger is some twenty steps ahead),
and never less than LEAST. Sound runs came to at most 0.5 of that, planted faults to 4 times or more (docs/log.md,
2026-11-21).

`Trick.rounding` is the relative size of the perturbation. Training reads the verdicts only (verdicts.py).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from cramming.bench.tricks import (
    REFERENCE,
    Trick,
    as_overrides,
    changed,
)
from cramming.bench.verdicts import FORMAT, Verdict, Verdicts, load
from cramming.config import UserError, require
from cramming.files import write_atomically
from cramming.progress import say

WINDOW = 10  # steps
MIN_FALL = 0.3  # nats; with less learning of the reference the gate would prove nothing
REPETITIONS = 3
MULTIPLE = 3.0  # tolerance as a multiple of the farthest repetition's distance
LEAST = 1e-3  # smallest tolerance, in nats
AHEAD = 2  # windows
Make = Callable[[Mapping[str, Any]], Any]
BASELINE = Trick("reference", {}, None, "fp32, eager, nothing recomputed")


@dataclass(frozen=True)
class NoiseFloor:
    """Distances of reference repetitions with weights perturbed by `rounding`, in nats: [repetition][window]."""

    rounding: float
    distances: list[list[float]]

    def tolerance(self) -> list[float]:
        """Return the allowed distance of each window, in nats.

        Raises UserError if a repetition diverged, because that would allow any distance.
        """
        all_distances = list(chain.from_iterable(self.distances))
        require(
            all(map(math.isfinite, all_distances)),
            f"noise floor: the loss of a repetition with starting weights perturbed by {self.rounding:.1e} is not"
            " finite. With bench, lower optim.lr in --gate.",
        )
        farthest_by_window = map(max, zip(*self.distances, strict=True))
        farthest = list(accumulate(farthest_by_window, max))
        ahead = farthest[AHEAD:] + [farthest[-1]] * min(AHEAD, len(farthest))
        return [max(LEAST, MULTIPLE * distance) for distance in ahead]


def compare_curves(
    trick: Trick, reference: Sequence[float], losses: Sequence[float], floor: NoiseFloor
) -> Verdict:
    """Return the verdict on a trick from two loss curves of equal length."""
    assert trick.rounding == floor.rounding
    curve_distances, allowed = distances(reference, losses), floor.tolerance()
    windows = range(len(curve_distances))
    not_finite = [i for i in windows if not math.isfinite(curve_distances[i])]
    distance: float | None = None
    if not_finite:
        worst = not_finite[0]
    else:
        worst = max(windows, key=lambda i: curve_distances[i] / allowed[i])
        distance = curve_distances[worst]
    return Verdict(
        trick=trick.name,
        passed=distance is not None and distance <= allowed[worst],
        distance=distance,
        tolerance=allowed[worst],
        at_step=min((worst + 1) * WINDOW, len(losses)),
        steps=len(losses),
        fall=fall(reference),
        settings=as_overrides(trick.settings),
    )


def distances(reference: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Return the mean distance of two loss curves in nats over every ten steps, and over the remaining steps."""
    return _means([abs(a - b) for a, b in zip(reference, losses, strict=True)])


def fall(losses: Sequence[float]) -> float:
    """Return the fall of the mean over ten steps, from the first to the last ten, in nats."""
    return _means(losses)[0] - _means(losses[-WINDOW:])[0]


def _means(losses: Sequence[float]) -> list[float]:
    """Return the mean of every ten steps, and of the remaining steps."""
    windows = (losses[i : i + WINDOW] for i in range(0, len(losses), WINDOW))
    return [sum(window) / len(window) for window in windows]


def spec_of(
    settings: Mapping[str, Any], trick: Trick, vocab_size: int, device: str
) -> dict[str, Any]:
    """Return the specification from which a worker trains the reference with one trick (worker.py)."""
    return {
        "name": trick.name,
        "settings": changed(changed(settings, REFERENCE), trick.settings),
        "vocab_size": vocab_size,
        "device": device,
        "micro_batches": trick.micro_batches,
    }


class Curves:
    """Loss curves of the gate: the reference's, its repetitions', and each trick's, in a process each.

    `settings` need not be as large as the timed shapes. `make` starts a `Worker` or an object like it. `floors` are
    the noise floors measured so far, by rounding.
    """

    def __init__(
        self, settings: dict[str, Any], steps: int, vocab_size: int, device: str, make: Make
    ) -> None:
        self.settings = settings
        self.steps = steps
        self.vocab_size = vocab_size
        self.device = device
        self.make = make
        self.floors: dict[float, NoiseFloor] = {}

    @cached_property
    def reference(self) -> list[float]:
        """Loss curve of the reference, measured once; raises UserError if it falls too little."""
        (curve,) = self.losses([self.spec(BASELINE)])
        require(
            fall(curve) >= MIN_FALL,
            f"--gate-steps={self.steps}: the reference's loss fell by only {fall(curve):.2f} nats, less than"
            f" {MIN_FALL}. Raise the steps, or optim.lr in --gate.",
        )
        return curve

    def floor(self, rounding: float) -> NoiseFloor:
        """Return the noise floor of the reference for starting weights perturbed by `rounding`; measured once."""
        if rounding not in self.floors:
            reference, spec = self.reference, self.spec(BASELINE)
            seeds = range(1, REPETITIONS + 1)
            curves = self.losses([spec | {"perturbed": (rounding, seed)} for seed in seeds])
            strayed = [distances(reference, curve) for curve in curves]
            self.floors[rounding] = NoiseFloor(rounding, strayed)
        return self.floors[rounding]

    def verdict(self, trick: Trick) -> Verdict:
        """Return the verdict on a trick."""
        assert trick.rounding is not None
        reference, floor = self.reference, self.floor(trick.rounding)
        return compare_curves(trick, reference, self.losses_or_nan(trick), floor)

    def learned(self, trick: Trick) -> dict[str, float]:
        """Return the fall of the loss, in nats, of a trick that is another algorithm, and of the reference."""
        return {"reference": fall(self.reference), "fall": fall(self.losses_or_nan(trick))}

    def losses_or_nan(self, trick: Trick) -> list[float]:
        """Return the loss curve of a trick; NaN, which counts as having learned nothing, if it cannot run here."""
        try:
            return self.losses([self.spec(trick)])[0]
        except UserError as error:
            say(f"gate: {error}")
            return [float("nan")] * self.steps

    def spec(self, trick: Trick) -> dict[str, Any]:
        """Return the worker's specification of a trick.

        A step that fp16 skips until its loss scale fits is repeated: otherwise the curve would stay one batch behind
        the reference's.
        """
        spec = spec_of(self.settings, trick, self.vocab_size, self.device)
        return spec | {"repeat_skipped": True}

    def losses(self, specs: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return the loss of every step of each candidate, one after the other in one process."""
        with self.make(specs[0]) as worker:
            curves = [worker.run(0, self.steps).losses]
            for spec in specs[1:]:
                worker.rebuild(spec)
                curves.append(worker.run(0, self.steps).losses)
        return curves


def save(
    file: Path, where: str, verdicts: Sequence[Verdict], floors: Sequence[NoiseFloor] = ()
) -> None:
    """Add verdicts and noise floors to the file; newer ones replace older."""
    known = load(file)
    here = known.setdefault(where, Verdicts({}, {}))
    for verdict in verdicts:
        here.verdicts[verdict.trick] = verdict
    for floor in floors:
        here.floors[f"{floor.rounding:.3g}"] = asdict(floor) | {"tolerance": floor.tolerance()}
    places = {key: asdict(entry) for key, entry in known.items()}
    content = {"format": FORMAT, "places": places}
    write_atomically(file, json.dumps(content, indent=1, sort_keys=True) + "\n")
