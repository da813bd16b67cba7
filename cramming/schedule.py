"""Schedules as pure functions of progress, the share of the budget already spent, from 0 to 1.

A schedule that counts steps ends too early or too late when the budget is time, and one that reads the clock lets
replicas drift. These return a number for a progress, so every schedule reaches its end exactly when the budget does,
in whatever unit the budget is. To add a schedule, add a section here, its entry in `SCHEDULES`, and its YAML file. The
type of a setting is its range (`Share`, `Count` ... of cramming/config.py); a bare int or float is not checked.
"""

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import Literal, Self

from pydantic import model_validator

from cramming.config import Count, Fraction, Positive, Section, Share


class Schedule(Section, ABC):
    """Learning rate as a share of its peak. Shares are of the budget, or of the peak."""

    start: Share  # of the peak, at progress 0
    name: str

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Return the learning rate at `progress` as a share of its peak."""


class Constant(Schedule):
    """Warm-up over the share `warmup` of the budget, then the peak."""

    name: str = "constant"
    warmup: Share

    def factor(self, progress: float) -> float:
        if progress < self.warmup:
            return self.start + (1 - self.start) * progress / self.warmup
        return self.after_warmup((progress - self.warmup) / max(1 - self.warmup, 1e-12))

    def after_warmup(self, progress: float) -> float:
        """Return the share of the peak at `progress` counted from the end of the warm-up."""
        return 1.0


class Linear(Constant):
    """Warm-up, then a straight line down to `final`."""

    name: str = "linear"
    final: Share

    def after_warmup(self, progress: float) -> float:
        return 1 + (self.final - 1) * progress


class Cosine(Constant):
    """Warm-up, then half a cosine down to `final`."""

    name: str = "cosine"
    final: Share

    def after_warmup(self, progress: float) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


class Triangle(Schedule):
    """Rise until the last `decay` of the budget, then fall (the paper's `budget-triangle2`: 0.25 and 0.25)."""

    name: str = "triangle"
    decay: Share
    final: Share

    def factor(self, progress: float) -> float:
        peak = 1 - self.decay
        if progress < peak:
            return self.start + (1 - self.start) * progress / peak
        return 1 + (self.final - 1) * (progress - peak) / max(self.decay, 1e-12)


class WarmupStableDecay(Constant):
    """Constant rate, then a fall over the last `decay` of the budget, linear or as 1 - sqrt (Hägele et al. 2024)."""

    name: str = "wsd"
    decay: Share
    decay_shape: Literal["linear", "sqrt"]
    final: Share

    @model_validator(mode="after")
    def _fits_into_the_budget(self) -> Self:
        if self.warmup + self.decay > 1:
            raise ValueError(
                f"decay={self.decay:g}: more than the whole budget with schedule.warmup={self.warmup:g}."
                " Lower one of them."
            )
        return self

    def factor(self, progress: float) -> float:
        done = (progress - (1 - self.decay)) / max(self.decay, 1e-12)
        if progress < self.warmup or done <= 0:
            return super().factor(progress)
        if self.decay_shape == "sqrt":
            done = math.sqrt(done)
        return 1 + (self.final - 1) * done


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "triangle": Triangle,
    "wsd": WarmupStableDecay,
}


def learning_rate_factor(schedule: Schedule, progress: float) -> float:
    """Return the learning rate at `progress` as a share of its peak."""
    factor = schedule.factor(min(max(progress, 0.0), 1.0))
    return max(0.0, factor)  # rounding may give -1e-16 at the end


class BatchScale(Section):
    """Scaling of the learning rate with the batch: `rule` scales `optim.lr`, which is for `base_batch` sequences.

    The linear rule (Goyal et al. 2017, section 2.1) keeps the sum of SGD's steps per epoch, the square root
    (Krizhevsky 2014, section 5) the variance of the noise; the latter suits Adam and LAMB (You et al. 2020, section
    4.2).
    """

    rule: Literal["linear", "sqrt"]
    base_batch: Count


class WidthScale(Section):
    """Scaling of the learning rate with the width: `optim.lr` is for width `base_width`.

    Other widths multiply it by (width / base_width) ** power. Power -1 is right for hidden matrices under Adam, 0 for
    embeddings (Yang et al. 2022, table 8); one power for both lies between.
    """

    base_width: Count
    power: float


class PeakRate(Section):
    """Settings of section `optim` that determine the peak of the learning rate."""

    lr: Positive
    lr_scale: BatchScale | None
    lr_width: WidthScale | None

    def peak_learning_rate(self, batch_size: int, width: int) -> float:
        """Return the peak for a batch of `batch_size` sequences and a model of this hidden size."""
        rate = self.lr
        if self.lr_scale:
            power = 1 if self.lr_scale.rule == "linear" else 0.5
            rate *= (batch_size / self.lr_scale.base_batch) ** power
        if self.lr_width:
            rate *= (width / self.lr_width.base_width) ** self.lr_width.power
        return rate


class BatchRamp(Section):
    """Growth of the batch from the share `start` to its full size at progress `until`, linear in equal steps."""

    start: Share
    until: Share


@cache
def ramp_step(ramp: BatchRamp | None, batch_size: int) -> int:
    """Return the number of sequences by which the batch grows; without a ramp it is `batch_size`.

    Every batch is a multiple of it. It is the largest divisor of `batch_size` that is at most the first batch and
    leaves that below the full one. A micro-batch divides it (cramming/recipe.py), so the batches are the same
    whatever a device's memory holds at once. Raises ValueError if the first batch is below one sequence or can only
    be the full one.
    """
    if ramp is None:
        return batch_size
    first = ramp.start * batch_size
    for step in range(math.floor(first + 1e-9), 0, -1):
        if batch_size % step == 0 and round(first / step) * step < batch_size:
            return step
    raise ValueError(
        f"batch_ramp.start={ramp.start:g}: the first batch would have {first:.3g} sequences, not 1 to"
        f" {batch_size - 1}. Raise train.batch_size, or set train.batch_ramp=null."
    )


def sequences_per_step(ramp: BatchRamp | None, progress: float, batch_size: int) -> int:
    """Return the sequences of one optimizer step at `progress`.

    It is the multiple of `ramp_step` nearest to the straight line.
    """
    if ramp is None or progress >= ramp.until:
        return batch_size
    step = ramp_step(ramp, batch_size)
    share = ramp.start + (1 - ramp.start) * progress / ramp.until
    return step * round(share * batch_size / step)


class AverageConfig(Section):
    """Average of the weights at progress `start`, `start + every`, ..., used as final weights (optim/average.py)."""

    start: Fraction
    every: Positive
