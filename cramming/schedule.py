"""Schedules as pure functions of progress: the share of the budget already spent, from 0 to 1.

A schedule that counts steps ends too early or too late when the budget is time; one that reads the clock itself lets
replicas drift. Here progress comes in and a number comes out, so every schedule reaches its end exactly when the budget
does, in whatever unit the budget is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

# What a shape does not look at, and the value that this must then have: a setting that does nothing is a mistake.
UNUSED: dict[str, dict[str, float | str]] = {
    "constant": {"decay": 0.0, "decay_shape": "linear", "final": 0.0},
    "linear": {"decay": 0.0, "decay_shape": "linear"},
    "cosine": {"decay": 0.0, "decay_shape": "linear"},
    "triangle": {"warmup": 0.0, "decay_shape": "linear"},
    "wsd": {},
}


@dataclass(frozen=True)
class ScheduleConfig:
    """Shape of the learning rate, and the ramp of the batch size, over the budget.

    `warmup` and `decay` are shares of the budget; `final` is the learning rate at the end as a share of the peak;
    `start` is the share of the peak at progress 0. The batch grows from `batch_start` of train.batch_size (1: no
    ramp) to all of it at progress `batch_ramp`: linearly, in equal steps (`ramp_step`) that these two sizes decide.
    """

    name: Literal["constant", "linear", "cosine", "triangle", "wsd"]
    warmup: float
    decay: float
    decay_shape: Literal["linear", "sqrt"]
    start: float
    final: float
    batch_start: float
    batch_ramp: float

    def __post_init__(self) -> None:
        for field in ("warmup", "decay", "start", "final", "batch_ramp"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)} is not between 0 and 1")
        for field, neutral in UNUSED[self.name].items():
            if getattr(self, field) != neutral:
                raise ValueError(
                    f"{field}={getattr(self, field)} does nothing with name={self.name}; choose the shape by"
                    f" schedule={self.name}, which has {field}={neutral}, or set schedule.{field}={neutral}"
                )
        if not 0 < self.batch_start <= 1:
            raise ValueError(f"batch_start={self.batch_start} is not a share above 0 and at most 1")
        if (self.batch_start == 1) != (self.batch_ramp == 0):
            raise ValueError(
                f"batch_start={self.batch_start} and batch_ramp={self.batch_ramp}: neither does anything without the"
                " other; without a ramp they are 1.0 and 0.0"
            )
        if self.name == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"warmup={self.warmup} and decay={self.decay} are more than the whole budget")


def learning_rate_factor(config: ScheduleConfig, progress: float) -> float:
    """The learning rate at `progress` as a share of its peak."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < config.warmup and config.name != "triangle":
        return config.start + (1 - config.start) * progress / config.warmup
    return max(0.0, SHAPES[config.name](config, progress))  # rounding may give -1e-16 at the end


def _constant(config: ScheduleConfig, progress: float) -> float:
    return 1.0


def _after_warmup(config: ScheduleConfig, progress: float) -> float:
    return (progress - config.warmup) / max(1 - config.warmup, 1e-12)


def _linear(config: ScheduleConfig, progress: float) -> float:
    return 1 + (config.final - 1) * _after_warmup(config, progress)


def _cosine(config: ScheduleConfig, progress: float) -> float:
    return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * _after_warmup(config, progress)))


def _triangle(config: ScheduleConfig, progress: float) -> float:
    """Rises from `start` until the last `decay` share, then falls (the paper's `budget-triangle2`: 0.25 and 0.25)."""
    peak = 1 - config.decay
    if progress < peak:
        return config.start + (1 - config.start) * progress / peak
    return 1 + (config.final - 1) * (progress - peak) / max(config.decay, 1e-12)


def _warmup_stable_decay(config: ScheduleConfig, progress: float) -> float:
    """Flat, then falling over the last `decay` share, linearly or as 1 - sqrt (Hägele et al. 2024)."""
    done = (progress - (1 - config.decay)) / max(config.decay, 1e-12)
    if done <= 0:
        return 1.0
    return 1 + (config.final - 1) * (done if config.decay_shape == "linear" else math.sqrt(done))


SHAPES: dict[str, Callable[[ScheduleConfig, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "triangle": _triangle,
    "wsd": _warmup_stable_decay,
}


@cache
def ramp_step(config: ScheduleConfig, batch_size: int) -> int:
    """Sequences by which the batch grows, of which every batch is a multiple; all of `batch_size` without a ramp.

    The largest divisor of `batch_size` that is at most the first batch and leaves that below the full one. A
    micro-batch divides it (`sections.refuse_unfit_ramp`), so the same batches follow whatever a device's memory holds
    at once. ValueError where the first batch is below one sequence or can only be the full one.
    """
    if config.batch_start == 1:
        return batch_size
    first = config.batch_start * batch_size
    for step in range(math.floor(first + 1e-9), 0, -1):
        if batch_size % step == 0 and round(first / step) * step < batch_size:
            return step
    raise ValueError(
        f"batch_start={config.batch_start:g} of {batch_size} sequences is {first:.3g}: no whole number from 1 to"
        f" {batch_size - 1}"
    )


def sequences_per_step(config: ScheduleConfig, progress: float, batch_size: int) -> int:
    """Sequences of one optimizer step at `progress`: the multiple of `ramp_step` nearest to the straight line."""
    if progress >= config.batch_ramp:
        return batch_size
    step = ramp_step(config, batch_size)
    share = config.batch_start + (1 - config.batch_start) * progress / config.batch_ramp
    return step * round(share * batch_size / step)
