"""Output of a projection: tables and sentences, or JSON.

A law of scores is fitted to the lost score, 100 minus the score, which falls with compute as a loss does.
"""

import math
from collections.abc import Iterator
from typing import Any

from cramming.progress import duration, say, show_table
from eval.extras.power_law import LEVEL, PARAMETERS, Estimate
from eval.extras.projection import HeldOut, Projection
from eval.extras.projection_runs import Point, Runs
from eval.report.format import compact, counted, or_dash

RUNS = ("run", "budget", "exaflops", "tokens", "time", "loss", "above law", "score")
HELD_OUT = ("budget", "beyond", "predicted", "measured", "error")
LAW = ("E", "A", "alpha", "full budget", "loss there")


def show(runs: Runs, projection: Projection, scores: Projection | None) -> None:
    """Print the runs, the errors of the law on held-out budgets, and its prediction for the full budget."""
    rows = [_run(point, projection) for point in runs.points]
    show_table(f"{counted(len(rows), 'run')} of one recipe", RUNS, rows)
    for line in runs.left_out:
        say(f"left out: {line}")
    held_out = [_held_out(held) for held in projection.held_out]
    if held_out:
        show_table("held-out budgets, each predicted from the shorter ones", HELD_OUT, held_out)
    title = (
        f"loss = E + A (exaflops / exaflops of the longest budget)^-alpha; intervals of {LEVEL:.0%}"
    )
    show_table(title, LAW, [_law(projection)])
    for line in sentences(runs.points, projection, scores):
        say(line)


def sentences(
    points: list[Point], projection: Projection, scores: Projection | None
) -> Iterator[str]:
    """Yield the result and its limitations in sentences."""
    times = projection.amount / projection.law.largest
    longest, corpus = points[-1], points[-1].run.record.corpus.tokens
    seconds = longest.seconds + (projection.amount - longest.exaflops) / longest.speed
    cost = f"{projection.amount:.3g} exaflops ({duration(seconds)}, x{times:.3g} of the longest budget)"
    yield f"full budget of {cost}: pinned validation loss {_interval(projection.predicted)}"
    if scores:
        yield f"score there {_interval(_score_of(scores.predicted), 1)}"
    if projection.law.noise is None:
        yield f"no interval: {PARAMETERS} budgets determine the law's {PARAMETERS} parameters and leave no residual"
    beyond = max((held.beyond for held in projection.held_out), default=math.inf)
    if times > beyond:
        yield f"held-out budgets were at most x{beyond:.3g} beyond their runs; further out the law is untested"
    epochs = longest.tokens / corpus if corpus else 0.0
    if epochs <= 1 < times * epochs:
        yield f"the full budget reads the corpus {times * epochs:.1f} times, which the law does not account for"


def _score_of(lost: Estimate) -> Estimate:
    """Return the score for an estimate of the lost score; its lower end is 100 minus the upper end of the loss."""
    low = None if lost.high is None else 100 - lost.high
    high = None if lost.low is None else 100 - lost.low
    return Estimate(100 - lost.value, low, high)


def for_programs(runs: Runs, losses: Projection, scores: Projection | None) -> dict[str, Any]:
    """Return runs and laws as JSON values; `lost_score` is 100 minus the score, errors are in percent of `measured`."""
    return {
        "level": LEVEL,
        "runs": [_run_for_programs(point) for point in runs.points],
        "left_out": runs.left_out,
        "loss": _law_for_programs(losses),
        "lost_score": scores and _law_for_programs(scores),
    }


def _run_for_programs(point: Point) -> dict[str, Any]:
    return {
        "name": point.run.label,
        "budget": _budget(point.budget),
        "seed": point.run.record.training.seed,
        "exaflops": point.exaflops,
        "tokens": point.tokens,
        "seconds": point.seconds,
        "loss": point.loss,
        "score": point.score,
    }


def _law_for_programs(projection: Projection) -> dict[str, Any]:
    law = projection.law
    return {
        "E": law.floor._asdict(),
        "A": law.gain,
        "alpha": law.alpha._asdict(),
        "longest": law.largest,
        "noise": law.noise,
        "full_budget": projection.amount,
        "predicted": projection.predicted._asdict(),
        "held_out": [
            {
                **held._asdict(),
                "budget": _budget(held.budget),
                "predicted": held.predicted._asdict(),
            }
            for held in projection.held_out
        ],
    }


def _run(point: Point, projection: Projection) -> list[str]:
    above = point.loss - projection.law.predict(point.exaflops).value
    spent = [f"{point.exaflops:.3g}", compact(point.tokens), duration(point.seconds)]
    score = or_dash(point.score, lambda score: f"{score:.1f}")
    return [
        point.run.label,
        _budget(point.budget),
        *spent,
        f"{point.loss:.4f}",
        f"{above:+.4f}",
        score,
    ]


def _held_out(held: HeldOut) -> list[str]:
    return [
        _budget(held.budget),
        f"x{held.beyond:.3g}",
        _interval(held.predicted),
        f"{held.measured:.4f}",
        f"{held.error:+.2f}%",
    ]


def _law(projection: Projection) -> list[str]:
    law = projection.law
    return [
        _interval(law.floor),
        f"{law.gain:.4f}",
        _interval(law.alpha),
        compact(projection.amount),
        _interval(projection.predicted),
    ]


def _interval(estimate: Estimate, digits: int = 3) -> str:
    low, high = (
        or_dash(end, lambda value: f"{value:.{digits}f}") for end in (estimate.low, estimate.high)
    )
    return f"{estimate.value:.{digits}f} [{low}, {high}]"


def _budget(budget: tuple[str, float]) -> str:
    unit, limit = budget
    if unit.startswith("hours"):
        return f"{duration(3600 * limit)}{unit.removeprefix('hours')}"
    return f"{compact(limit)} {unit}"
