"""The loss curves of the correctness gate: the reference's, its twins', and each trick's in a process of its own.

They are measured on `bench.gate`'s settings, which need not be as large as what is timed. The twins, which say how far
rounding alone carries the loss (gate.py), are run when the first trick asks for their kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cramming.bench import gate, tricks
from cramming.bench.tricks import Trick
from cramming.bench.worker import Worker
from cramming.config import UserError
from cramming.progress import say

REFERENCE = Trick("reference", {}, None, "fp32, eager, everything computed and kept")


def job_of(settings: Mapping[str, Any], trick: Trick, vocab_size: int, device: torch.device) -> dict[str, Any]:
    """What a worker must know to run the reference with one trick."""
    changed = tricks.changed(tricks.changed(settings, tricks.REFERENCE), trick.settings)
    job = {"side": "ours", "settings": changed, "micro_batches": trick.micro_batches, "device": device.type}
    return {**job, "vocab_size": vocab_size, "name": trick.name}


def gate_job_of(settings: Mapping[str, Any], trick: Trick, vocab_size: int, device: torch.device) -> dict[str, Any]:
    """The same for a loss curve. A step that fp16 skips until its scale fits is no fault, so it is done anew: else the
    curve would be one batch behind the reference's for good."""
    return job_of(settings, trick, vocab_size, device) | {"repeat_skipped": True}


def gate_settings(settings: dict[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings with `bench.gate` in force; UserError where it changes what is no setting."""
    for section, keys in changes.items():
        for key in keys:
            known = settings.get(section)
            if not isinstance(known, Mapping) or key not in known:
                raise UserError(f"bench.gate.{section}.{key}: unknown setting; `--cfg job` prints all that there are")
    smaller = {f"{section}.{key}": value for section, keys in changes.items() for key, value in keys.items()}
    return tricks.changed(settings, smaller)


@dataclass
class Curves:
    """What a run of `bench tricks` knows of its gate. `settings` are those of `gate_settings`; `make` starts a process,
    or what behaves like one."""

    settings: dict[str, Any]
    steps: int
    vocab_size: int
    device: torch.device
    make: Callable[[Mapping[str, Any]], Worker] = Worker

    def __post_init__(self) -> None:
        self._floors: dict[float, gate.Floor] = {}

    @cached_property
    def reference(self) -> list[float]:
        """The loss curve that tricks are compared with; UserError if it falls too little to prove anything."""
        (curve,) = self.losses([self.job(REFERENCE)])
        if not (fall := gate.fall(curve)) >= gate.MIN_FALL:
            raise UserError(
                f"bench.gate_steps={self.steps}: the reference's loss fell by {fall:.2f} nats, less than"
                f" {gate.MIN_FALL}, so the gate would prove nothing; raise bench.gate_steps or bench.gate.optim.lr"
            )
        return curve

    def floor(self, rounding: float) -> gate.Floor:
        """Of the reference against itself with its starting weights moved by `rounding`; measured once."""
        if rounding not in self._floors:
            reference, job = self.reference, self.job(REFERENCE)
            twins = self.losses([job | {"moved": (rounding, seed)} for seed in range(1, gate.TWINS + 1)])
            self._floors[rounding] = gate.Floor(rounding, [gate.strays(reference, twin) for twin in twins])
            allowed = self._floors[rounding].allowed()
            say(
                f"gate: {gate.TWINS} twins with weights moved by {rounding:.2g} were run; allowed are {allowed[0]:.2g}"
                f" nats at first, {allowed[-1]:.2g} at the end"
            )
        return self._floors[rounding]

    @property
    def floors(self) -> list[gate.Floor]:
        """Those that were asked for so far."""
        return list(self._floors.values())

    def verdict(self, trick: Trick) -> gate.Verdict:
        """On one trick."""
        assert trick.rounding is not None
        reference, floor = self.reference, self.floor(trick.rounding)
        return gate.judge(trick, reference, self.losses_or_nan(trick), floor)

    def learned(self, trick: Trick) -> dict[str, Any]:
        """For a trick that is another algorithm: by how many nats its loss falls, and the reference's."""
        fall = gate.fall(self.reference)
        return {"learned": {"fall": gate.fall(self.losses_or_nan(trick)), "reference": fall}}

    def losses_or_nan(self, trick: Trick) -> list[float]:
        """One that cannot run here has learned nothing."""
        try:
            (losses,) = self.losses([self.job(trick)])
        except UserError as error:
            say(f"gate: {error}")
            losses = [float("nan")] * self.steps
        return losses

    def job(self, trick: Trick) -> dict[str, Any]:
        """What a worker must know."""
        return gate_job_of(self.settings, trick, self.vocab_size, self.device)

    def losses(self, jobs: Sequence[dict[str, Any]]) -> list[list[float]]:
        """The loss of every step of each job, one after the other in one process."""
        with self.make(jobs[0]) as worker:
            curves = [worker.run(0, self.steps).losses]
            for job in jobs[1:]:
                worker.rebuild(job)
                curves.append(worker.run(0, self.steps).losses)
        return curves
