"""Plots are drawn from whatever metrics there are."""

import math
import xml.etree.ElementTree as ElementTree

from eval.plots import Curve, intervals, png, svg, training

ROWS = [
    {"progress": i / 50, "tokens": 1000 * i, "loss": 9 - i / 10, "lr": 1e-3 * i} for i in range(51)
]
VALIDATION = [{"progress": 0.5, "tokens": 25_000, "validation_loss": 6.6}]


def test_nothing_to_draw_is_no_figure() -> None:
    nothing = [{"step": 1}, {"loss": None, "progress": 0.1}]
    assert training([]) is None
    assert training([Curve("a", []), Curve("b", nothing)]) is None
    assert intervals([], "difference") is None


def test_missing_and_odd_values_are_left_out() -> None:
    odd = [{"progress": 0.3, "loss": math.nan}, {"progress": "x", "loss": 3.0}, {"loss": 2.0}, {}]
    figure = training([Curve("a", [*ROWS, *odd]), Curve("no metrics", [])])
    assert figure is not None
    values = [v for axes in figure.axes for line in axes.lines for v in line.get_ydata()]
    assert len(values) == 3 * len(ROWS) and all(map(math.isfinite, values))


def test_runs_of_one_label_are_drawn_alike_and_labels_differ_beyond_the_colours() -> None:
    labels = [f"variant {place}" for place in range(20)]
    figure = training([Curve(label, ROWS) for label in labels for _ in range(3)], "training loss")
    assert figure is not None
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    styles = [(line.get_color(), line.get_linestyle()) for line in lines if len(line.get_xdata())]
    assert styles[::3] == styles[1::3] == styles[2::3]
    assert len(styles) == 60 and len(set(styles)) == 20
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels


def test_long_runs_are_thinned_without_moving_them() -> None:
    rows = [{"progress": i / 20_000, "loss": 5.0} for i in range(20_000)]
    figure = training([Curve("long", rows)])
    assert figure is not None
    line = figure.axes[0].lines[0]
    assert len(line.get_xdata()) <= 300 and set(line.get_ydata()) == {5.0}


def test_files_are_whole_and_the_same_each_time() -> None:
    def drawn() -> tuple[str, bytes]:
        figure = training([Curve("<b>$x$ & über", [*ROWS, *VALIDATION]), Curve("名前" * 40, ROWS)])
        assert figure is not None
        return svg(figure, "a"), png(figure)

    text, image = drawn()
    ElementTree.fromstring(text)
    assert image.startswith(b"\x89PNG") and drawn() == (text, image)
