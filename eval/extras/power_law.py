"""The saturating power law L(C) = E + A (C / C_max)^-alpha through the ends of runs, and how far they leave it open.

The form is that of Henighan et al. 2020 ("Scaling laws for autoregressive generative modeling", equation 1.1): E is
what no compute removes, A what is left above it at the largest amount, C_max. For one alpha the law is linear in E and
A, so that least squares are exact; alpha is searched on a grid. Losses are not negative and do not rise: E >= 0, A > 0.

Intervals are profiles of the sum of squares S (Bates and Watts 1988, "Nonlinear regression analysis", chapter 6): the
loss y of a new run is inside where the best law through the runs and y has S <= S_min (1 + t^2 / (n - 3)), with
Student's t for n - 3 degrees of freedom. Unlike a standard error, this knows that few runs leave alpha and E wide open,
and more so to one side. All points count alike and have normal noise of one size, which only they themselves can tell:
three points fix the three numbers and tell nothing of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.9
ALPHAS = np.geomspace(0.01, 5.0, 2000)
PARAMETERS = 3


class Estimate(NamedTuple):
    """A number with the ends of its interval at LEVEL; None where the runs set no end."""

    value: float
    low: float | None
    high: float | None


class PowerLaw:
    """The law by least squares through `amounts` (of compute, or whatever was spent, above 0) and `losses`, [n] each.

    `falls` is False where losses do not fall with the amount: then there is no law, and nothing else may be asked.
    """

    def __init__(self, amounts: Sequence[float], losses: Sequence[float]) -> None:
        loss_N = np.asarray(losses)
        self.largest = max(amounts)
        power_GN = self._powers(np.asarray(amounts))  # G: the grid of alpha
        mean_G, count = power_GN.mean(axis=1), len(losses)
        around_G = ((power_GN - mean_G[:, None]) ** 2).sum(axis=1)
        gain_G = (power_GN - mean_G[:, None]) @ (loss_N - loss_N.mean()) / around_G
        floor_G = loss_N.mean() - gain_G * mean_G
        self._at_zero_G = (
            floor_G < 0
        )  # where E = 0 is the best that is allowed: a line through the origin
        square_G = (power_GN**2).sum(axis=1)
        self._gain_G = np.where(self._at_zero_G, power_GN @ loss_N / square_G, gain_G)
        self._floor_G = np.where(self._at_zero_G, 0.0, floor_G)
        residual_GN = loss_N - self._floor_G[:, None] - self._gain_G[:, None] * power_GN
        self._squares_G = np.where(gain_G > 0, (residual_GN**2).sum(axis=1), np.inf)
        self._mean_G, self._around_G, self._square_G, self._count = (
            mean_G,
            around_G,
            square_G,
            count,
        )
        self._best = int(self._squares_G.argmin())
        self.falls = bool(np.isfinite(self._squares_G[self._best]))
        self.freedom = count - PARAMETERS
        self.noise = (
            float(np.sqrt(self._squares_G[self._best] / self.freedom)) if self.freedom > 0 else None
        )

    @property
    def alpha(self) -> Estimate:
        """The exponent; None for an end that the grid has cut off."""
        value = float(ALPHAS[self._best])
        if (limit := self._limit()) is None:
            return Estimate(value, None, None)
        inside = np.flatnonzero(self._squares_G <= limit)
        low, high = inside[0], inside[-1]
        last = len(ALPHAS) - 1
        return Estimate(
            value,
            float(ALPHAS[low]) if low > 0 else None,
            float(ALPHAS[high]) if high < last else None,
        )

    @property
    def floor(self) -> Estimate:
        """E, in the losses' unit: the loss at no end of compute."""
        return self._profile(np.zeros_like(ALPHAS), noise=0.0)

    @property
    def gain(self) -> float:
        """A, in the losses' unit: what of the loss at the largest amount more of it can still remove."""
        return float(self._gain_G[self._best])

    def predict(self, amount: float) -> Estimate:
        """The loss of one new run that spends `amount`: its interval has the noise of that run, too."""
        return self._profile(self._powers(np.asarray([amount]))[:, 0], noise=1.0)

    def _powers(self, amounts_N: np.ndarray) -> np.ndarray:
        """[G, N]."""
        return np.exp(-ALPHAS[:, None] * np.log(amounts_N / self.largest))

    def _limit(self) -> float | None:
        """The largest sum of squares that is not refused; None where there is no noise to judge by."""
        if self.noise is None:
            return None
        from scipy.special import stdtrit  # takes a moment

        student = float(stdtrit(self.freedom, (1 + LEVEL) / 2))
        return float(self._squares_G[self._best]) + (student * self.noise) ** 2

    def _profile(self, power_G: np.ndarray, noise: float) -> Estimate:
        """E + A power, with as many variances of a single run's noise added as `noise` says."""
        value_G = self._floor_G + self._gain_G * power_G
        value = float(value_G[self._best])
        if (limit := self._limit()) is None:
            return Estimate(value, None, None)
        free_G = 1 / self._count + (power_G - self._mean_G) ** 2 / self._around_G
        leverage_G = np.where(self._at_zero_G, power_G**2 / self._square_G, free_G)
        inside = self._squares_G <= limit
        reach_G = np.sqrt((noise + leverage_G[inside]) * (limit - self._squares_G[inside]))
        low, high = (value_G[inside] - reach_G).min(), (value_G[inside] + reach_G).max()
        return Estimate(value, max(0.0, float(low)), float(high))
