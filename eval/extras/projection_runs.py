"""The runs that a projection is made of: of one recipe, each with a budget of its own, and what each spent and reached.

One run is one point: its end. A learning rate schedule follows the budget, so that what a long run has learned after a
tenth of it is not what a run with a tenth of the budget learns (Hoffmann et al. 2022, "Training compute-optimal large
language models", section 2): losses within a run are too high for the compute that they took.
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

FEWEST = 3  # budgets: as many as the law has parameters
SHOWN = 3  # of settings that differ, in one line


class Point(NamedTuple):
    """The end of one run: what it spent, its pinned validation loss in nats per target, and its score in percent."""

    run: Run
    budget: tuple[str, float]  # unit (of hours with clock and device) and limit
    exaflops: float
    tokens: float
    seconds: float
    loss: float
    score: float | None

    @property
    def speed(self) -> float:
        """ExaFLOPs a second from the first logged step on: what was before, such as the start and the compiler, is paid
        once, whatever the budget. Rows of validations are no steps: the last one's time is beyond the budget."""
        rows = [
            (tokens, seconds)
            for row in self.run.metrics
            if "loss" in row
            and (tokens := number(row.get("tokens")))
            and (seconds := number(row.get("seconds")))
        ]
        if len(rows) < 2 or rows[-1][0] <= rows[0][0] or rows[-1][1] <= rows[0][1]:
            return self.exaflops / self.seconds
        return self.exaflops / self.tokens * (rows[-1][0] - rows[0][0]) / (rows[-1][1] - rows[0][1])


class Runs(NamedTuple):
    """Of one recipe: the points in order of their compute, and in one line each which other runs are none, and why."""

    points: list[Point]
    left_out: list[str]


def read_runs(folder: Path, names: Sequence[str] | None) -> Runs:
    """The runs of one recipe in `folder`; UserError unless they have FEWEST budgets.

    `names` says which; without it, those of the one recipe that has enough budgets.
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
    enough = [points for points in recipes if len(budgets_of(points)) >= FEWEST]
    if len(enough) > 1 or (names is not None and len(recipes) > 1):
        one, other = (points[0].run for points in recipes[:2])
        raise UserError(
            f"project: {one.label} and {other.label} do not compare, {difference(one.record, other.record)}; name runs"
            " of one recipe with --names a,b,..."
        )
    most = max((len(budgets_of(points)) for points in recipes), default=0)
    because = f" ({'; '.join(left_out[:SHOWN])})" if left_out else ""
    require(
        enough,
        f"project: {folder} has {counted(most, 'finished budget')} of one recipe, a law takes {FEWEST}{because}; train"
        " with others, for example budget.minutes=2, 4 and 8",
    )
    for points in recipes[1:]:
        other = points[0].run
        left_out += [
            f"{point.run.label}: {difference(enough[0][0].run.record, other.record)}"
            for point in points
        ]
    return Runs(_of_one_suite(sorted(enough[0], key=lambda point: point.exaflops)), left_out)


def _of_one_suite(points: Sequence[Point]) -> list[Point]:
    """Scores of another suite than the longest scored run's do not compare: without them."""
    suites = [
        point.run.record.trained.suite if point.run.record.trained else None for point in points
    ]
    wanted = next(
        (
            suite
            for point, suite in zip(reversed(points), reversed(suites))
            if point.score is not None
        ),
        None,
    )
    return [
        point if suite == wanted else point._replace(score=None)
        for point, suite in zip(points, suites)
    ]


def point_of(run: Run) -> Point | str:
    """The run's end, or why it has none."""
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
        return "its record lacks the pinned loss, what was spent or the configuration"
    exaflops, tokens, seconds, loss, limit = (float(value) for value in values if value is not None)
    row = trained_row(run)
    return Point(
        run, (_unit(run.record), limit), exaflops, tokens, seconds, loss, row.main if row else None
    )


def _unit(record: Record) -> str:
    """Of the run's budget. Equal work is that on any device; hours are of a clock and a device."""
    budget, device, count = (
        record.training.budget,
        record.environment.device,
        record.training.devices,
    )
    if budget.unit != "hours":
        return str(budget.unit)
    times = f"{count} x " if count and count > 1 else ""
    return f"{unit_on(budget.clock, budget.unit)} on {times}{device.name or device.kind}"


def budgets_of(points: Sequence[Point]) -> list[list[Point]]:
    """The points of each budget, seeds together, in order of their compute. Budgets in different units whose runs took
    the same compute, such as 20 steps and their number of tokens, are one."""
    compute, own = attrgetter("exaflops"), dict[tuple[str, float], list[Point]]()
    for point in sorted(points, key=compute):
        own.setdefault(point.budget, []).append(point)
    groups = list[list[Point]]()
    for (unit, _), found in own.items():
        overlaps = groups and found[0].exaflops <= groups[-1][-1].exaflops
        if overlaps and unit not in {point.budget[0] for point in groups[-1]}:
            groups[-1] = sorted([*groups[-1], *found], key=compute)
        else:
            groups.append(found)
    return groups


def difference(one: Record, other: Record) -> str:
    """Which settings make two recipes of two runs, such as `optim.lr 0.001 and 0.002`."""
    first, second = (dict(_settings(record)) for record in (one, other))
    names = [name for name in first | second if first.get(name) != second.get(name)]
    shown = [f"{name} {first.get(name)} and {second.get(name)}" for name in names[:SHOWN]]
    more = [f"{len(names) - SHOWN} more settings"] if len(names) > SHOWN else []
    return ", ".join([*shown, *more])


def _settings(record: Record) -> Iterator[tuple[str, Any]]:
    """All that makes a recipe, by name."""
    yield "corpus", str(record.corpus.manifest_sha256)[:8]
    yield "validation corpus", str(record.corpus.validation.manifest_sha256)[:8]
    yield from flat(
        {section: record.config[section] for section in SECTIONS if section not in BESIDE}
    )
