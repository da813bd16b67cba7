"""The report's plots: loss and learning rate over the budget, and scores as bars.

Drawn with Matplotlib's file backend. In an SVG, text and lines take the colour of the page's text (`currentColor`), so
that it reads on light and dark ground. A run without metrics, or with parts of them, simply has fewer lines; a figure
without any line is not made.
"""

import io
import re
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
# Of lines: another dash where the colours are used up.
LINES = [
    {"color": colour, "linestyle": dash}
    for dash, colour in product(("-", "--", ":", "-."), COLOURS)
]
INK = "#010203"  # near black, and a colour that nothing else has: in the SVG it is replaced by currentColor
STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "font.size": 9,
    "axes.labelsize": 10,
    "legend.frameon": False,
}
POINTS = 300  # per line; more cannot be seen at this size
BAR_COLOURS = {"pretrained": COLOURS[0], "untrained": COLOURS[4], "published": "#9aa3ad"}
VERDICT_COLOURS = {
    "win": COLOURS[2],
    "loss": COLOURS[1],
    "equivalent": COLOURS[0],
    "undecided": "#9aa3ad",
}
LEGEND_COLUMNS = 4
_COUNTS = ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)"), (1.0, ""))


class Curve(NamedTuple):
    """One run's metrics rows under its name, or that of several runs that are drawn alike."""

    label: str
    rows: Sequence[Mapping[str, Any]]


class Bar(NamedTuple):
    """One bar of the score plot: in percent, `kind` one of pretrained, untrained, published."""

    label: str
    value: float
    spread: float | None
    kind: str


class Interval(NamedTuple):
    """One line of the plot of differences; `verdict` one of win, loss, equivalent, undecided."""

    label: str
    mean: float
    low: float
    high: float
    verdict: str


class Pair(NamedTuple):
    """Both runs of a pair: validations as (seconds of the budget, loss)."""

    base: Sequence[tuple[float, float]]
    candidate: Sequence[tuple[float, float]]


def training(curves: Sequence[Curve], loss: str = "MLM loss") -> "Figure | None":
    """Loss over the budget, loss over tokens, learning rate over the budget; None where no run has any of them. `loss`:
    what the loss is called."""
    most = max((x for c in curves for x, _ in _points(c.rows, "tokens", "loss")), default=0.0)
    unit, words = next((u for u in _COUNTS if most >= u[0]), _COUNTS[-1])
    panels = (
        ("progress", "loss", 0.01, "budget spent (%)", loss),
        ("tokens", "loss", unit, f"tokens{words}", loss),
        ("progress", "lr", 0.01, "budget spent (%)", "learning rate"),
    )
    if not any(_points(c.rows, x, y) for c in curves for x, y, *_ in panels):
        return None
    styles = dict(zip(dict.fromkeys(curve.label for curve in curves), cycle(LINES)))
    legend_inches = 0.24 * -(-(len(styles) + 1) // LEGEND_COLUMNS) + 0.12
    with _styled():
        figure = _figure(
            12.0, 3.2 + legend_inches, left=0.62, right=0.15, top=0.28, bottom=0.52 + legend_inches
        )
        for index, (x, y, scale, x_title, y_title) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), index + 1, xlabel=x_title, ylabel=y_title)
            for curve in curves:
                _draw(axes, curve, x, y, scale, styles[curve.label])
            if y == "lr":
                axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        labels, handles = _legend(curves, styles)
        figure.legend(handles, labels, loc="lower center", ncols=LEGEND_COLUMNS)
    return figure


def scores(bars: Sequence[Bar], title: str) -> "Figure | None":
    """Horizontal bars, best on top, published rows in grey; None where there is nothing to compare."""
    if not bars:
        return None
    ordered = sorted(bars, key=lambda bar: bar.value)
    labels = [_label(bar.label) for bar in ordered]
    margin = 0.3 + 0.075 * max(map(len, labels))
    with _styled():
        figure = _figure(9.0, 0.7 + 0.3 * len(bars), left=margin, right=0.15, top=0.1, bottom=0.52)
        axes = figure.add_subplot(1, 1, 1, xlabel=title)
        for place, bar in enumerate(ordered):
            colour = BAR_COLOURS[bar.kind]
            axes.barh(
                place, bar.value, xerr=bar.spread, color=colour, height=0.7, ecolor=INK, capsize=2
            )
            axes.text(bar.value + (bar.spread or 0.0) + 0.8, place, f"{bar.value:.1f}", va="center")
        axes.set_yticks(range(len(ordered)), labels)
        axes.set_xlim(min(0.0, ordered[0].value), 105)
        axes.set_ylim(-0.6, len(ordered) - 0.4)
        axes.grid(axis="y", visible=False)
    return figure


def intervals(rows: Sequence[Interval], title: str) -> "Figure | None":
    """Differences with their intervals, one line each, the first on top, beside a line at zero; None without any."""
    if not rows:
        return None
    labels = [_label(row.label, 96) for row in rows]
    margin = 0.3 + 0.072 * max(map(len, labels))
    with _styled():
        figure = _figure(
            margin + 5.0, 0.7 + 0.26 * len(rows), left=margin, right=0.2, top=0.1, bottom=0.52
        )
        axes = figure.add_subplot(1, 1, 1, xlabel=title)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        for place, row in enumerate(reversed(rows)):
            colour = VERDICT_COLOURS[row.verdict]
            axes.plot(
                [row.low, row.high],
                [place, place],
                color=colour,
                linewidth=2.5,
                solid_capstyle="butt",
            )
            axes.plot(row.mean, place, "o", color=colour, markersize=5)
        axes.set_yticks(range(len(rows)), labels[::-1])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.grid(axis="y", visible=False)
    return figure


def against_seconds(pairs: Sequence[Pair], title: str) -> "Figure | None":
    """Validation loss over the seconds of the budget, a line for each run, and dashed where the base ends on average;
    None without any."""
    if not any(pair.base and pair.candidate for pair in pairs):
        return None
    ends = [pair.base[-1][1] for pair in pairs if pair.base]
    with _styled():
        figure = _figure(9.0, 4.2, left=0.62, right=0.2, top=0.35, bottom=0.52)
        axes = figure.add_subplot(
            1, 1, 1, xlabel="seconds of the budget", ylabel="validation loss (nats)"
        )
        axes.set_title(_label(title, 96), fontsize=10)
        for pair in pairs:
            for points, colour in zip(pair, COLOURS):
                if points:
                    axes.plot(*zip(*points), "o-", color=colour, linewidth=1.2, markersize=3)
        axes.axhline(sum(ends) / len(ends), color=INK, linewidth=0.8, linestyle="--")
        for name, colour in zip(Pair._fields, COLOURS):
            axes.plot([], [], color=colour, label=name)
        axes.legend()
    return figure


def projection(
    curves: Sequence[Curve],
    ends: Sequence[tuple[float, float]],
    law: Sequence[Sequence[float | None]],
    level: str,
) -> "Figure":
    """Validation loss over compute: within each run as a thin line, at the runs' ends as points, and the law as rows of
    (exaflops, loss, lower and upper end of its band or None)."""
    with _styled():
        figure = _figure(9.0, 4.2, left=0.62, right=0.2, top=0.15, bottom=0.52)
        axes = figure.add_subplot(1, 1, 1, xscale="log", xlabel="exaFLOPs of model compute")
        axes.set_ylabel("validation loss (nats)")
        for place, curve in enumerate(curves):
            label = "within a run: no part of the fit" if place == 0 else None
            points = _points(curve.rows, "exaflops", "validation_loss")
            axes.plot(*zip(*points), color=COLOURS[0], linewidth=1.0, alpha=0.45, label=label)
        axes.plot(*zip(*ends), "o", color=COLOURS[0], markersize=5, label="end of a run")
        amounts, losses, low, high = zip(*law)
        axes.plot(amounts, losses, color=COLOURS[1], linewidth=1.5, label="power law")
        if None not in (*low, *high):
            axes.fill_between(
                amounts,
                low,
                high,
                color=COLOURS[1],
                alpha=0.18,
                linewidth=0,
                label=f"a new run, {level}",
            )
        axes.legend()
    return figure


def png(figure: "Figure") -> bytes:
    """The figure as a PNG on white."""
    buffer = io.BytesIO()
    with _styled():
        figure.savefig(
            buffer, format="png", dpi=120, facecolor="white", metadata={"Software": None}
        )
    return buffer.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """The figure as inline SVG; `name` keeps the ids of several figures in one page apart."""
    buffer = io.StringIO()
    with _styled({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue()
    text = re.sub(r'id="(?!clip|[pm][0-9a-f]{10})[^"]*"', "", text[text.index("<svg") :])
    return text.replace(INK, "currentColor")


@contextmanager
def _styled(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """The style; without a warning for each letter that Matplotlib's own font lacks (boxes in the PNG)."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, **(more or {})}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    pairs = [(number(row.get(x)), number(row.get(y))) for row in rows]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def thinned(points: Sequence[Sequence[float]], most: int) -> list[list[float]]:
    """At most so many points: means over consecutive ones, which also calms a noisy line without shifting it."""
    size = -(-len(points) // most) or 1
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [[sum(values) / len(values) for values in zip(*group)] for group in groups]


def _draw(
    axes: "Axes", curve: Curve, x: str, y: str, scale: float, style: Mapping[str, Any]
) -> None:
    """The line, of at most POINTS points, and the validations as circles."""
    if points := thinned(_points(curve.rows, x, y), POINTS):
        axes.plot([a / scale for a, _ in points], [b for _, b in points], **style, linewidth=1.5)
    if held_out := _points(curve.rows, x, "validation_loss") if y == "loss" else []:
        xs, ys = [a / scale for a, _ in held_out], [b for _, b in held_out]
        axes.plot(xs, ys, "o", color=style["color"], markersize=4.5, markerfacecolor="none")


def _figure(
    width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> "Figure":
    """A figure with margins, all in inches: computed margins cost far less time than Matplotlib's layout engines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, wspace=0.2
    )
    FigureCanvasAgg(figure)
    return figure


def _legend(
    curves: Sequence[Curve], styles: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[Any]]:
    """The labels with their lines, and the validation points' sign where there are any."""
    from matplotlib.lines import Line2D

    labels = [_label(label) for label in styles] if len(styles) > 1 else ["training loss"]
    lines = [Line2D([], [], **style) for style in styles.values()]
    if any(_points(curve.rows, "progress", "validation_loss") for curve in curves):
        labels.append("validation loss")
        lines.append(
            Line2D(
                [], [], marker="o", linestyle="", color=INK, markerfacecolor="none", markersize=4.5
            )
        )
    return labels, lines


def _label(text: str, longest: int = 48) -> str:
    """A name as Matplotlib may print it: `$` would begin a formula."""
    return (text if len(text) <= longest else text[: longest - 1] + "…").replace("$", r"\$")
