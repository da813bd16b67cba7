"""Plots for files, drawn with Matplotlib: runs of a study, duels, and the law of a projection.

A run without metrics, or with a part of them, has fewer lines; a figure without any line is not made. Plots of the
leaderboard's page are drawn by uPlot in the browser.
"""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, NamedTuple

from cramming.record_schema import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito's palette, which colour-blind readers can tell apart too, ordered so that neighbours differ most.
COLOURS = ("#2f86c9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b61c4")
GREY = "#9aa3ad"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
POINTS = 300  # largest number of points of a line; more are averaged
VERDICT_COLOURS = {
    "win": COLOURS[2],
    "loss": COLOURS[1],
    "equivalent": COLOURS[0],
    "undecided": GREY,
}
PANELS = (
    ("progress", "loss", "share of the budget"),
    ("tokens", "loss", "tokens"),
    ("progress", "lr", "share of the budget"),
)

Points = Sequence[tuple[float, float]]


class Curve(NamedTuple):
    """Metrics rows of a run with its label; runs with the same label are drawn alike."""

    label: str
    rows: Sequence[Mapping[str, Any]]


class Interval(NamedTuple):
    """Mean difference with its interval; `verdict` is one of win, loss, equivalent, undecided."""

    label: str
    mean: float
    low: float
    high: float
    verdict: str


class Pair(NamedTuple):
    """Runs of a pair: validations as (seconds of the budget, loss)."""

    base: Points
    candidate: Points


def training(curves: Sequence[Curve], loss: str = "MLM loss") -> "Figure | None":
    """Return loss over budget, loss over tokens, and learning rate over budget; None if no run has any of them."""
    if not any(_has_points(curve) for curve in curves):
        return None
    dashes_and_colours = cycle(product(("-", "--", ":", "-."), COLOURS))
    labels = dict.fromkeys(curve.label for curve in curves)
    styles: dict[str, dict[str, Any]] = {}
    for label, (dash, colour) in zip(labels, dashes_and_colours):
        styles[label] = {"linestyle": dash, "color": colour}
    with _figure(12.0, 4.0) as figure:
        for place, (x, y, title) in enumerate(PANELS, 1):
            axes = figure.add_subplot(1, len(PANELS), place, xlabel=title)
            axes.set_ylabel(loss if y == "loss" else "learning rate")
            for curve in curves:
                _draw(axes, curve, x, y, styles[curve.label])
        handles = [figure.axes[0].plot([], [], **style)[0] for style in styles.values()]
        names = [_label(label) for label in styles]
        figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


def intervals(rows: Sequence[Interval], title: str) -> "Figure | None":
    """Return differences with their intervals, one line each, the first on top; None without any."""
    if not rows:
        return None
    with _figure(11.0, 0.8 + 0.26 * len(rows)) as figure:
        axes = figure.add_subplot(xlabel=title)
        axes.axvline(0.0, color="black", linewidth=0.8)
        for place, row in enumerate(rows):
            colour = VERDICT_COLOURS[row.verdict]
            axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2.5)
            axes.plot(row.mean, place, "o", color=colour, markersize=5)
        axes.set_yticks(range(len(rows)), [_label(row.label, 96) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def against_seconds(pairs: Sequence[Pair], title: str) -> "Figure | None":
    """Return validation losses over the seconds of the budget, with a dashed line at the base's mean final loss."""
    if not any(pair.base and pair.candidate for pair in pairs):
        return None
    ends = [pair.base[-1][1] for pair in pairs if pair.base]
    with _figure(9.0, 4.2) as figure:
        axes = figure.add_subplot(xlabel="seconds of the budget", ylabel="validation loss (nats)")
        axes.set_title(_label(title, 96), fontsize=10)
        for pair in pairs:
            for points, colour in zip(pair, COLOURS):
                axes.plot(*_columns(points), "o-", color=colour, linewidth=1.2, markersize=3)
        axes.axhline(sum(ends) / len(ends), color="black", linewidth=0.8, linestyle="--")
        for name, colour in zip(Pair._fields, COLOURS):
            axes.plot([], [], color=colour, label=name)
        axes.legend()
    return figure


def projection(
    curves: Sequence[Curve],
    ends: Points,
    law: Sequence[Sequence[float | None]],
    level: str,
) -> "Figure":
    """Return validation loss over compute: runs as thin lines, their ends as points, and the law with its band.

    `law`: rows of exaFLOPs, loss, lower and upper end of the band or None.
    """
    with _figure(9.0, 4.2) as figure:
        axes = figure.add_subplot(xscale="log", xlabel="exaFLOPs of model compute")
        axes.set_ylabel("validation loss (nats)")
        for place, curve in enumerate(curves):
            label = "" if place else "within a run: no part of the fit"
            points = _points(curve.rows, "exaflops", "validation_loss")
            axes.plot(*_columns(points), color=COLOURS[0], alpha=0.45, linewidth=1.0, label=label)
        axes.plot(*_columns(ends), "o", color=COLOURS[0], markersize=5, label="end of a run")
        amounts, losses, low, high = zip(*law)
        axes.plot(amounts, losses, color=COLOURS[1], linewidth=1.5, label="power law")
        if None not in (*low, *high):
            band: dict[str, Any] = {"color": COLOURS[1], "alpha": 0.18, "linewidth": 0}
            axes.fill_between(amounts, low, high, **band, label=f"a new run, {level}")
        axes.legend()
    return figure


def png(figure: "Figure") -> bytes:
    """Return the figure as a PNG."""
    buffer = io.BytesIO()
    with _styled():
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """Return the figure as SVG, the same bytes for the same figure and name."""
    buffer = io.StringIO()
    with _styled({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


@contextmanager
def _styled(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Set the style, without a warning for each letter that Matplotlib's own font lacks."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, **(more or {})}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@contextmanager
def _figure(width: float, height: float) -> Iterator["Figure"]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def _has_points(curve: Curve) -> bool:
    return any(_points(curve.rows, x, y) for x, y, _ in PANELS)


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """Return the rows that have both numbers as points."""
    pairs = [(number(row.get(x)), number(row.get(y))) for row in rows]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw(axes: "Axes", curve: Curve, x: str, y: str, style: Mapping[str, Any]) -> None:
    """Draw a line of means over consecutive points, and validations as circles."""
    points = _points(curve.rows, x, y)
    size = -(-len(points) // POINTS) or 1
    groups = [_columns(points[start : start + size]) for start in range(0, len(points), size)]
    means = [(sum(xs) / len(xs), sum(ys) / len(ys)) for xs, ys in groups]
    axes.plot(*_columns(means), **style, linewidth=1.5)
    if y == "loss":
        held_out = _columns(_points(curve.rows, x, "validation_loss"))
        axes.plot(*held_out, "o", color=style["color"], markersize=4.5, markerfacecolor="none")


def _label(text: str, longest: int = 48) -> str:
    """Return a name, cut to `longest` characters, with `$` escaped, which would begin a formula in Matplotlib."""
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text.replace("$", r"\$")
