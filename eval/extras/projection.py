"""A power law over the ends of runs, and its record: each budget from the fourth on as the shorter ones predict it."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from eval.extras.power_law import Estimate, PowerLaw
from eval.extras.projection_runs import MIN_BUDGETS, Point, budgets_of


class HeldOut(NamedTuple):
    """A budget that runs with shorter ones predict: `measured` is the mean over its own runs, which had no part in it.

    `beyond` is its amount over the largest that the law has seen; `error` is in percent of what was measured.
    """

    budget: tuple[str, float]
    beyond: float
    predicted: Estimate
    measured: float
    error: float


class Projection(NamedTuple):
    """A law over compute, what it predicts of `amount` exaFLOPs, and how it did on held-out budgets."""

    law: PowerLaw
    amount: float
    predicted: Estimate
    held_out: list[HeldOut]


def project(
    points: Sequence[Point], amount: float, measure: Callable[[Point], float]
) -> Projection | None:
    """The law of a measure over compute, and what it predicts at an amount, in exaFLOPs.

    None with fewer than MIN_BUDGETS budgets, or where the measure does not fall.
    """
    budgets = budgets_of(points)
    law = fit(budgets, measure)
    return (
        Projection(law, amount, law.predict(amount), list(held_out(budgets, measure)))
        if law
        else None
    )


def held_out(
    budgets: Sequence[Sequence[Point]], measure: Callable[[Point], float]
) -> Iterator[HeldOut]:
    """Each budget that has enough shorter ones, as a law through those alone predicts it."""
    for place in range(MIN_BUDGETS, len(budgets)):
        if law := fit(budgets[:place], measure):
            amount = statistics.fmean(point.exaflops for point in budgets[place])
            predicted, measured = (
                law.predict(amount),
                statistics.fmean(map(measure, budgets[place])),
            )
            error = 100 * (predicted.value / measured - 1)
            yield HeldOut(
                budgets[place][0].budget, amount / law.largest, predicted, measured, error
            )


def fit(budgets: Sequence[Sequence[Point]], measure: Callable[[Point], float]) -> PowerLaw | None:
    """The law through the means of the budgets, if there is one.

    A law strays from a budget by an amount that all its seeds share. As points of their own they would shrink the
    interval by their number, as if a fourth seed of a budget told as much of the law as a fourth budget.
    """
    if len(budgets) < MIN_BUDGETS:
        return None
    amounts = [statistics.fmean(point.exaflops for point in budget) for budget in budgets]
    law = PowerLaw(amounts, [statistics.fmean(map(measure, budget)) for budget in budgets])
    return law if law.falls else None
