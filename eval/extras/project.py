"""`cramming project`: what would the full budget give? A law through runs of one recipe with growing budgets.

The saturating power law of power_law.py is fitted to the ends of runs (projection_runs.py) over compute: to losses and,
where runs have scores, to the points that they lack to 100. Tokens are compute in other units, as the runs are of one
recipe; a law over seconds predicted worse (benchmarks/results/projection_cpu_2026-11-23). Runs of one budget are one
point, their mean. The law's record comes with it: each budget from the fourth on is predicted from
the shorter ones alone. The picture is the cramming paper's figure 1 (Geiping and Goldstein 2022) with the law in it. A
projection knows nothing of what only begins beyond the runs, such as reading the corpus for a second time.
"""

from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cramming.config import UserError
from cramming.files import overwrite_atomically, write_atomically
from cramming.progress import say, use_stderr
from cramming.record_schema import number
from eval import plots
from eval.extras import projection_words
from eval.extras.power_law import LEVEL
from eval.extras.projection import Projection, project
from eval.extras.projection_runs import Point, read_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 200  # points of the law's line


def main(
    *,
    path: Path,
    names: str | None,
    hours: float,
    exaflops: float | None,
    out: Path | None,
    json: bool,
) -> None:
    """Predict the loss of the full budget: `exaflops`, or what `hours` give at the longest run's speed.

    `names`, separated by commas: of the runs of one recipe in the folder `path`.
    """
    if json:
        use_stderr()
    runs = read_runs(path, names.split(",") if names else None)
    shortest, longest = runs.points[0], runs.points[-1]
    full = exaflops or longest.exaflops + longest.speed * (3600 * hours - longest.seconds)
    if full < shortest.exaflops:
        raise UserError(
            f"project: a full budget of {max(full, 0.0):.3g} exaflops is below the shortest run's"
            f" {shortest.exaflops:.3g}. Raise --hours or --exaflops."
        )
    losses = project(runs.points, full, lambda point: point.loss)
    if losses is None:
        raise UserError(
            f"project: losses in {path} do not fall with compute. Train with longer budgets."
        )
    scored = [point for point in runs.points if point.score is not None]
    scores = project(scored, full, lambda point: 100 - (point.score or 0.0))
    out = out or path / "projection"
    figure = draw(runs.points, losses)
    write_atomically(out / "projection.svg", plots.svg(figure, "projection"))
    overwrite_atomically(out / "projection.png", lambda path: path.write_bytes(plots.png(figure)))
    if json:
        print(dumps(projection_words.for_programs(runs, losses, scores)), flush=True)
    else:
        projection_words.show(runs, losses, scores)
    say(f"pictures: {out / 'projection.svg'} and .png")


def draw(points: Sequence[Point], projection: Projection) -> "Figure":
    """Draw validation loss over compute within each run, the runs' ends, and the law up to the full budget."""
    law = projection.law
    amounts = np.geomspace(points[0].exaflops, max(projection.amount, law.largest), DRAWN)
    lines = [(amount, *law.predict(amount)) for amount in amounts.tolist()]
    curves = [plots.Curve(point.run.label, [*validations(point)]) for point in points]
    return plots.projection(
        curves, [(point.exaflops, point.loss) for point in points], lines, f"{LEVEL:.0%}"
    )


def validations(point: Point) -> Iterator[dict[str, float]]:
    """Yield the validations during the run, with the `exaflops` of its tokens up to each."""
    for row in point.run.metrics:
        tokens, loss = number(row.get("tokens")), number(row.get("validation_loss"))
        if tokens and loss is not None:
            yield {"exaflops": tokens / point.tokens * point.exaflops, "validation_loss": loss}
