"""Power law over the ends of runs, and its test: predictions of each budget from shorter ones."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from eval.extras.power_law import Estimate, PowerLaw
from eval.extras.projection_runs import MIN_BUDGETS, Point, budgets_of


class HeldOut(NamedTuple):
    """Budget that is predicted from shorter ones; `measured` is the mean over its runs, which the law does not use.

    `beyond` is its amount divided by the largest amount of the law. `error` is in percent of the measured value.
    """

    budget: tuple[str, float]
    beyond: float
    predicted: Estimate
    measured: float
    error: float


class Projection(NamedTuple):
    """Law over compute, its prediction at `amount` exaFLOPs, and its errors on held-out budgets."""

    law: PowerLaw
    amount: float
    predicted: Estimate
    held_out: list[HeldOut]


def project(
    points: Sequence[Point], amount: float, measure: Callable[[Point], float]
) -> Projection | None:
    """Return the law of a measure over compute with its prediction at an amount, in exaFLOPs.

    The result is None with fewer than MIN_BUDGETS budgets, or if the measure does not fall.
    """
    budgets = budgets_of(points)
    law = fit(budgets, measure)
    if law is None:
        return None
    return Projection(law, amount, law.predict(amount), list(held_out(budgets, measure)))


def held_out(
    budgets: Sequence[Sequence[Point]], measure: Callable[[Point], float]
) -> Iterator[HeldOut]:
    """Yield each budget with enough shorter ones, as a law through those predicts it."""
    for index in range(MIN_BUDGETS, len(budgets)):
        law = fit(budgets[:index], measure)
        if law is None:
            continue
        runs = budgets[index]
        amount = statistics.fmean(point.exaflops for point in runs)
        predicted, measured = law.predict(amount), statistics.fmean(map(measure, runs))
        error = 100 * (predicted.value / measured - 1)
        yield HeldOut(runs[0].budget, amount / law.largest, predicted, measured, error)


def fit(budgets: Sequence[Sequence[Point]], measure: Callable[[Point], float]) -> PowerLaw | None:
    """Return the law through the means of the budgets, or None if there is none.

    The law misses a budget by an amount that all its seeds share. Seeds as separate points would shrink the interval
    by their number, as if a fourth seed of a budget were worth as much as a fourth budget.
    """
    if len(budgets) < MIN_BUDGETS:
        return None
    amounts: list[float] = []
    losses: list[float] = []
    for budget in budgets:
        amounts.append(statistics.fmean(point.exaflops for point in budget))
        losses.append(statistics.fmean(map(measure, budget)))
    law = PowerLaw(amounts, losses)
    return law if law.falls else None
