"""The correctness gate: does a trick still learn what the reference learns, and what was found so far.

A trick for speed that silently stops converging is worse than none (the fastest compile mode of the predecessor did
that: pytorch/pytorch#96693). So the loss of each step, on the same batches from the same weights, is compared with the
fp32 eager reference: the mean distance of every ten steps.

How far may it stray? Another order of sums changes a number by one unit in its last place, and training carries that
on: the distance grows tenfold in about ten steps until the two runs differ as two runs do. One number for all steps is
then either narrower than that end or blind to what a fault does at the start. So the floor is measured in the same run,
by twins of the reference whose starting weights were moved by that much, and holds step by step: allowed is MULTIPLE of
the farthest twin so far, looking AHEAD (rounding that is thirty times a twin's is some twenty steps ahead of it), and
never less than LEAST. At the default size (docs/log.md, 2026-11-21) compiled code, accumulation and further twins came
to at most 0.5 of that, a learning rate 1 % off to 7 times, all other faults tried to 4 times or more.

There are two floors, as a number format with fewer bits starts where fp32's twins end: `Trick.rounding` says which
unit the twins' weights are moved by, fp32's (2^-23) or bf16's (2^-8; also for fp16, TF32, fp8 and 8- or 4-bit state).

Verdicts are kept per device and torch version in one JSON file (`gates` in the configuration), with the floors;
`pretrain` refuses a trick that failed there, unless it is named in `forced`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from cramming.bench.tricks import BEST, TRICKS, Trick, in_force, spelled
from cramming.config import UserError, expand_home
from cramming.files import write_atomically

FORMAT = 2  # of the file; the first had one tolerance for all steps, set by hand
WINDOW = 10  # steps
MIN_FALL = 0.3  # nats that the reference must learn, or the gate proves nothing
TWINS = 3
MULTIPLE, LEAST = 3.0, 1e-3  # of the farthest twin; in nats
AHEAD = 2  # windows


@dataclass(frozen=True)
class Floor:
    """How far twins of the reference strayed whose weights were moved by `rounding`: [twin][window], in nats."""

    rounding: float
    strays: list[list[float]]

    def allowed(self) -> list[float]:
        """The tolerance of each window, in nats."""
        farthest = list(accumulate(map(max, zip(*self.strays, strict=True)), max))
        ahead = farthest[AHEAD:] + farthest[-1:] * min(AHEAD, len(farthest))
        return [max(LEAST, MULTIPLE * stray) for stray in ahead]


@dataclass(frozen=True)
class Verdict:
    """`distance` and `tolerance`, in nats, of the ten steps up to `at_step`, where the curve strayed most beside what
    was allowed (distance null: not finite); `fall`: what the reference learned; `settings`: its own."""

    trick: str
    passed: bool
    distance: float | None
    tolerance: float
    at_step: int
    steps: int
    fall: float
    settings: str = ""


def judge(trick: Trick, reference: Sequence[float], losses: Sequence[float], floor: Floor) -> Verdict:
    """Compare two loss curves of equal length; ValueError if the reference itself learned nothing."""
    assert trick.rounding == floor.rounding
    assert len(reference) == len(losses)
    learned = fall(reference)
    if not learned >= MIN_FALL:
        raise ValueError(f"the reference's loss fell by {learned:.3f} in {len(reference)} steps, less than {MIN_FALL}")
    found, allowed = strays(reference, losses), floor.allowed()
    if not all(map(math.isfinite, found)):
        worst = next(i for i, stray in enumerate(found) if not math.isfinite(stray))
        passed, distance = False, None
    else:
        worst = max(range(len(found)), key=lambda i: found[i] / allowed[i])
        passed, distance = found[worst] <= allowed[worst], found[worst]
    steps, settings = (worst + 1) * WINDOW, spelled(trick.settings)
    return Verdict(trick.name, passed, distance, allowed[worst], steps, len(losses), learned, settings)


def strays(reference: Sequence[float], losses: Sequence[float]) -> list[float]:
    """The mean distance between two loss curves over every ten steps, in nats."""
    return _means([abs(a - b) for a, b in zip(reference, losses, strict=True)])


def fall(losses: Sequence[float]) -> float:
    """By how much the mean of ten steps has fallen, in nats."""
    means = _means(losses)
    return means[0] - means[-1]


def _means(losses: Sequence[float]) -> list[float]:
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(0, len(losses) - WINDOW + 1, WINDOW)]


def place(device_name: str, torch_version: str) -> str:
    """The key under which verdicts are kept: a kernel is what a device and a version make of it."""
    return f"{device_name} | torch {torch_version}"


def save(file: Path, where: str, verdicts: Sequence[Verdict], floors: Sequence[Floor] = ()) -> None:
    """Add verdicts and floors to the file; newer ones replace older."""
    known = load(file)
    here = known.setdefault(where, {"verdicts": {}, "floors": {}})
    here["verdicts"].update({v.trick: asdict(v) for v in verdicts})
    for floor in floors:
        here["floors"][f"{floor.rounding:.3g}"] = asdict(floor) | {"allowed": floor.allowed()}
    write_atomically(file, json.dumps({"format": FORMAT, "places": known}, indent=1, sort_keys=True) + "\n")


def load(file: Path) -> dict[str, dict[str, Any]]:
    """What is known: place -> `verdicts` (by trick) and `floors`; empty if there is no file. UserError if not ours."""
    if not file.exists():
        return {}
    anew = "remove it, and `cramming bench tricks` writes it anew"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"gates={file}: not JSON ({error}); {anew}") from None
    if not isinstance(content, dict):
        raise UserError(f"gates={file}: not a table of verdicts; {anew}")
    if content.get("format") != FORMAT:
        raise UserError(
            f"gates={file}: verdicts in format {content.get('format', 1)}, not {FORMAT}: their tolerance was not"
            f" measured as it is now; {anew}"
        )
    places = content.get("places")
    if not isinstance(places, dict) or not all(map(_is_place, places.values())):
        raise UserError(f"gates={file}: not a table of verdicts; {anew}")
    return places


def _is_place(place: Any) -> bool:
    """Whether this holds verdicts and floors as `save` writes them."""
    return (
        isinstance(place, dict)
        and isinstance(place.get("floors"), dict)
        and isinstance(place.get("verdicts"), dict)
        and all(
            isinstance(verdict, dict)
            and isinstance(verdict.get("passed"), bool)
            and isinstance(verdict.get("tolerance"), int | float)
            and isinstance(verdict.get("distance"), int | float | None)
            and isinstance(verdict.get("at_step"), int)
            for verdict in place["verdicts"].values()
        )
    )


def check(settings: Mapping[str, Any], where: str, device_type: str, mode: str) -> dict[str, str]:
    """For each trick in force, the best stack included: passed, untested, or forced (failed, but named in `forced`).

    UserError if one failed and is not forced. `mode` is what `precision.mode=auto` means on the device.
    """
    known = load(expand_home(settings["gates"], "gates")).get(where, {}).get("verdicts", {})
    forced, states = settings["forced"], dict[str, str]()
    names = [*(trick.name for trick in TRICKS), BEST]
    if unknown := set(forced) - set(names):
        raise UserError(f"forced: no trick {sorted(unknown)}; there are: {', '.join(names)}")
    for trick in in_force(settings, device_type, mode):
        if trick.rounding is None:
            continue
        verdict = known.get(trick.name, {})
        if trick.name == BEST and verdict.get("settings") != spelled(trick.settings):
            verdict = {}  # of another stack: what pays changes with the versions of this suite
        states[trick.name] = {None: "untested", True: "passed", False: "forced"}[verdict.get("passed")]
        if states[trick.name] == "forced" and trick.name not in forced:
            own = {key: trick.settings[key] for key in trick.decisive or trick.settings}
            choice = "it" if len(own) == 1 else "one of these"
            distance = "was not finite" if verdict["distance"] is None else f"strayed by {verdict['distance']:.2g} nats"
            raise UserError(
                f"{spelled(own)}: the trick '{trick.name}' failed the correctness gate on this device: its loss"
                f" {distance} (allowed {verdict['tolerance']:.2g} at step {verdict['at_step']}; {settings['gates']});"
                f" leave {choice} off, or force it with forced=['{trick.name}'] and the record will say so"
            )
    return states
