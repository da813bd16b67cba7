"""Saturating power law L(C) = E + A (C / C_max)^-alpha through the ends of runs, with intervals.

The form is that of Henighan et al. 2020 ("Scaling laws for autoregressive generative modeling", equation 1.1): E is
the irreducible loss, A the loss above it at the largest amount, C_max. For one alpha the law is linear in E and
A, so that least squares are exact; alpha is searched on a grid. Losses are not negative and do not rise: E >= 0, A > 0.

Intervals are profiles of the sum of squares S (Bates and Watts 1988, "Nonlinear regression analysis", chapter 6): the
loss y of a new run is inside where the best law through the runs and y has S <= S_min (1 + t^2 / (n - 3)), with
Student's t for n - 3 degrees of freedom. Unlike a standard error, this is wide for few
runs, and wider on one side. All points have equal weight and normal noise of one size, estimated from their residuals:
three points fix the three parameters and leave no residual.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.9
ALPHAS = np.geomspace(0.01, 5.0, 2000)
PARAMETERS = 3


class Estimate(NamedTuple):
    """Estimate with the ends of its interval at LEVEL; None for an end that the runs do not bound."""

    value: float
    low: float | None
    high: float | None


class PowerLaw:
    """Power law by least squares through `amounts` (of compute or another cost, above 0) and `losses`, [n] each.

    `falls` is False if losses do not fall with the amount: then there is no law, and the other members are invalid.
    Arrays have a suffix for their shape: G values of alpha in the grid, N runs.
    """

    def __init__(self, amounts: Sequence[float], losses: Sequence[float]) -> None:
        losses_N = np.asarray(losses)
        self.largest = max(amounts)
        power_GN = self._powers(np.asarray(amounts))
        mean_G, count = power_GN.mean(axis=1), len(losses)
        centred_squares_G = ((power_GN - mean_G[:, None]) ** 2).sum(axis=1)
        gain_G = (power_GN - mean_G[:, None]) @ (losses_N - losses_N.mean()) / centred_squares_G
        floor_G = losses_N.mean() - gain_G * mean_G
        self._at_zero_G = floor_G < 0  # E is then 0, and A the slope of a line through the origin
        power_squares_G = (power_GN**2).sum(axis=1)
        self._gain_G = np.where(self._at_zero_G, power_GN @ losses_N / power_squares_G, gain_G)
        self._floor_G = np.where(self._at_zero_G, 0.0, floor_G)
        residual_GN = losses_N - self._floor_G[:, None] - self._gain_G[:, None] * power_GN
        self._residual_squares_G = np.where(gain_G > 0, (residual_GN**2).sum(axis=1), np.inf)
        self._mean_G, self._centred_squares_G = mean_G, centred_squares_G
        self._power_squares_G, self._count = power_squares_G, count
        self._best = int(self._residual_squares_G.argmin())
        self.falls = bool(np.isfinite(self._residual_squares_G[self._best]))
        self.freedom = count - PARAMETERS
        self.noise: float | None = None
        if self.freedom > 0:
            self.noise = float(np.sqrt(self._residual_squares_G[self._best] / self.freedom))

    @property
    def alpha(self) -> Estimate:
        """Exponent; None for an end of the interval that the grid cuts off."""
        value = float(ALPHAS[self._best])
        limit = self._limit()
        if limit is None:
            return Estimate(value, None, None)
        inside = np.flatnonzero(self._residual_squares_G <= limit)
        low, high = inside[0], inside[-1]
        last = len(ALPHAS) - 1
        return Estimate(
            value,
            float(ALPHAS[low]) if low > 0 else None,
            float(ALPHAS[high]) if high < last else None,
        )

    @property
    def floor(self) -> Estimate:
        """Irreducible loss E, in the unit of the losses."""
        return self._profile(np.zeros_like(ALPHAS), noise=0.0)

    @property
    def gain(self) -> float:
        """Reducible loss A at the largest amount, in the unit of the losses."""
        return float(self._gain_G[self._best])

    def predict(self, amount: float) -> Estimate:
        """Return the loss of a new run at `amount`; its interval includes the noise of that run."""
        return self._profile(self._powers(np.asarray([amount]))[:, 0], noise=1.0)

    def _powers(self, amounts_N: np.ndarray) -> np.ndarray:
        """Return (amount / largest) ** -alpha for each alpha of the grid, [G, N]."""
        return np.exp(-ALPHAS[:, None] * np.log(amounts_N / self.largest))

    def _limit(self) -> float | None:
        """Return the largest accepted sum of squares, or None without an estimate of the noise."""
        if self.noise is None:
            return None
        from scipy.special import stdtrit  # imported late: slow

        student = float(stdtrit(self.freedom, (1 + LEVEL) / 2))
        return float(self._residual_squares_G[self._best]) + (student * self.noise) ** 2

    def _profile(self, power_G: np.ndarray, noise: float) -> Estimate:
        """Return E + A * power with its interval, which includes `noise` times the variance of a single run."""
        value_G = self._floor_G + self._gain_G * power_G
        value = float(value_G[self._best])
        limit = self._limit()
        if limit is None:
            return Estimate(value, None, None)
        free_G = 1 / self._count + (power_G - self._mean_G) ** 2 / self._centred_squares_G
        leverage_G = np.where(self._at_zero_G, power_G**2 / self._power_squares_G, free_G)
        inside = self._residual_squares_G <= limit
        reach_G = np.sqrt((noise + leverage_G[inside]) * (limit - self._residual_squares_G[inside]))
        low, high = (value_G[inside] - reach_G).min(), (value_G[inside] + reach_G).max()
        return Estimate(value, max(0.0, float(low)), float(high))
