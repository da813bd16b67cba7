"""Runs of a projection: one recipe with several budgets, and the compute, loss and score of each run.

Each run is one point: its end. The learning rate schedule follows the budget, so that a long run after a tenth of its
steps has not learned what a run with a tenth of the budget learns (Hoffmann et al. 2022, "Training compute-optimal
large language models", section 2). So losses within a run are too high to be points of the law.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from cramming.budget import unit_on
from cramming.config import UserError, require
from cramming.record_schema import Record, number
from eval.recipe import BESIDE, SECTIONS, recipe_of
from eval.report.facts import flat
from eval.report.format import counted
from eval.report.table import trained_row
from eval.rules.load import Run, load_run, load_runs, readers

MIN_BUDGETS = 3  # number of parameters of the law
SHOWN = 3  # number of differing settings in a message


class Point(NamedTuple):
    """End of a run: its cost, pinned validation loss in nats per target, and score in percent."""

    run: Run
    budget: tuple[str, float]  # unit (with clock and device for hours) and limit
    exaflops: float
    tokens: float
    seconds: float
    loss: float
    score: float | None

    @property
    def speed(self) -> float:
        """ExaFLOPs per second from the first logged step to the last.

        The time before, for start and compiler, does not depend on the budget. Rows of validations do not count: the
        time of the last one is after the budget.
        """
        rows = []
        for row in self.run.metrics:
            tokens, seconds = number(row.get("tokens")), number(row.get("seconds"))
            if "loss" in row and tokens and seconds:
                rows.append((tokens, seconds))
        if len(rows) < 2:
            return self.exaflops / self.seconds
        (first_tokens, first_seconds), (last_tokens, last_seconds) = rows[0], rows[-1]
        if last_tokens <= first_tokens or last_seconds <= first_seconds:
            return self.exaflops / self.seconds
        exaflops_per_token = self.exaflops / self.tokens
        return exaflops_per_token * (last_tokens - first_tokens) / (last_seconds - first_seconds)


class Runs(NamedTuple):
    """Points of one recipe by ascending compute, and a line about each run that is left out."""

    points: list[Point]
    left_out: list[str]


def read_runs(folder: Path, names: Sequence[str] | None) -> Runs:
    """Return the runs of one recipe in `folder`; raise UserError if they have fewer than MIN_BUDGETS budgets.

    `names` selects runs; without it, the only recipe with enough budgets is used.
    """
    if names is None:
        with readers(folder) as run_map:
            runs = load_runs(folder, run_map)
    else:
        runs = [load_run(folder / name) for name in names]
    usable, left_out = dict[str, list[Point]](), []
    for run in runs:
        point = run.problem or point_of(run)
        if isinstance(point, str):
            left_out.append(f"{run.label}: {point}")
        else:
            comparable = recipe_of(run.record), run.record.corpus.validation.manifest_sha256
            usable.setdefault(str(comparable), []).append(point)
    recipes = sorted(usable.values(), key=lambda points: -len(budgets_of(points)))
    enough = [points for points in recipes if len(budgets_of(points)) >= MIN_BUDGETS]
    if len(enough) > 1 or (names is not None and len(recipes) > 1):
        first, second = (points[0].run for points in recipes[:2])
        raise UserError(
            f"project: {first.label} and {second.label} do not compare, {difference(first.record, second.record)}."
            " Name runs of one recipe with --names a,b,..."
        )
    num_budgets = max((len(budgets_of(points)) for points in recipes), default=0)
    because = f" ({'; '.join(left_out[:SHOWN])})" if left_out else ""
    require(
        enough,
        f"project: {folder} has {counted(num_budgets, 'finished budget')} of one recipe, a law needs"
        f" {MIN_BUDGETS}{because}. Train with others, for example budget.minutes=2, 4 and 8.",
    )
    for points in recipes[1:]:
        reason = difference(enough[0][0].run.record, points[0].run.record)
        left_out += [f"{point.run.label}: {reason}" for point in points]
    return Runs(_of_one_suite(sorted(enough[0], key=lambda point: point.exaflops)), left_out)


def _of_one_suite(points: Sequence[Point]) -> list[Point]:
    """Return all points; those scored on another suite than the longest scored run lose their score."""
    scored = [point for point in points if point.score is not None]
    if not scored:
        return list(points)
    suite = _suite_of(scored[-1])
    of_suite = []
    for point in points:
        of_suite.append(point if _suite_of(point) == suite else point._replace(score=None))
    return of_suite


def _suite_of(point: Point) -> str | None:
    trained = point.run.record.trained
    return trained.suite if trained else None


def point_of(run: Run) -> Point | str:
    """Return the end of the run as a point, or the reason why it has none."""
    training, budget = run.record.training, run.record.training.budget
    if training.status != "finished":
        return f"is {training.status or 'no pretraining'}"
    values = (
        training.exaflops,
        training.tokens,
        budget.spent_seconds,
        training.validation.loss,
        budget.limit,
    )
    if None in values or recipe_of(run.record) is None:
        return "its record lacks the pinned loss, the cost or the configuration"
    exaflops, tokens, seconds, loss, limit = (float(value) for value in values if value is not None)
    row = trained_row(run)
    return Point(
        run, (_unit(run.record), limit), exaflops, tokens, seconds, loss, row.main if row else None
    )


def _unit(record: Record) -> str:
    """Return the unit of the run's budget; for hours with clock and device, because hours on two devices differ."""
    budget, count = record.training.budget, record.training.devices
    device = record.environment.device
    if budget.unit != "hours":
        return str(budget.unit)
    times = f"{count} x " if count and count > 1 else ""
    return f"{unit_on(budget.clock, budget.unit)} on {times}{device.name or device.kind}"


def budgets_of(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points of each budget, all seeds together, by ascending compute.

    Budgets in different units are merged if their runs took about the same compute: 20 steps, and a budget of as many
    tokens, are one budget.
    """
    compute = attrgetter("exaflops")
    by_budget = dict[tuple[str, float], list[Point]]()
    for point in sorted(points, key=compute):
        by_budget.setdefault(point.budget, []).append(point)
    groups = list[list[Point]]()
    for (unit, _), of_budget in by_budget.items():
        overlaps = groups and of_budget[0].exaflops <= groups[-1][-1].exaflops
        if overlaps and unit not in {point.budget[0] for point in groups[-1]}:
            groups[-1] = sorted([*groups[-1], *of_budget], key=compute)
        else:
            groups.append(of_budget)
    return groups


def difference(first: Record, second: Record) -> str:
    """Return the differing settings of two recipes as text, such as `optim.lr 0.001 and 0.002`."""
    a, b = dict(_settings(first)), dict(_settings(second))
    names = [name for name in a | b if a.get(name) != b.get(name)]
    shown = [f"{name} {a.get(name)} and {b.get(name)}" for name in names[:SHOWN]]
    more = [f"{len(names) - SHOWN} more settings"] if len(names) > SHOWN else []
    return ", ".join([*shown, *more])


def _settings(record: Record) -> Iterator[tuple[str, Any]]:
    """Yield name and value of everything that makes a recipe."""
    yield "corpus", str(record.corpus.manifest_sha256)[:8]
    yield "validation corpus", str(record.corpus.validation.manifest_sha256)[:8]
    sections = {name: record.config[name] for name in SECTIONS if name not in BESIDE}
    yield from flat(sections)
