"""Plots are drawn from whatever metrics there are, and read on any ground."""

import math
import re
import xml.etree.ElementTree as ElementTree

from eval.report.plots import Bar, Curve, png, scores, svg, training

ROWS = [
    {"progress": i / 50, "tokens": 1000 * i, "loss": 9 - i / 10, "lr": 1e-3 * i} for i in range(51)
]
VALIDATION = [{"progress": 0.5, "tokens": 25_000, "validation_loss": 6.6}]


def test_nothing_to_draw_is_no_figure() -> None:
    assert training([]) is None
    assert (
        training([Curve("a", []), Curve("b", [{"step": 1}, {"loss": None, "progress": 0.1}])])
        is None
    )
    assert scores([], "avg-9") is None


def test_missing_and_odd_values_are_left_out() -> None:
    rows = [
        *ROWS,
        {"progress": 0.3, "loss": math.nan},
        {"progress": "x", "loss": 3.0},
        {"loss": 2.0},
        {},
    ]
    figure = training([Curve("a", rows), Curve("no metrics", [])])
    assert figure is not None
    lines = [line for axes in figure.axes for line in axes.lines]
    assert len(lines) == 3
    assert all(
        math.isfinite(value) for line in lines for value in [*line.get_xdata(), *line.get_ydata()]
    )


def test_runs_of_one_label_are_drawn_alike_and_labels_differ_beyond_the_colours() -> None:
    labels = [f"variant {place}" for place in range(20)]
    figure = training([Curve(label, ROWS) for label in labels for _ in range(3)], "training loss")
    assert figure is not None
    styles = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert (
        len(styles) == 60 and len(set(styles)) == 20 and styles[::3] == styles[1::3] == styles[2::3]
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    assert figure.axes[0].get_ylabel() == "training loss"


def test_long_runs_are_thinned_without_moving_them() -> None:
    rows = [{"progress": i / 20_000, "loss": 5.0} for i in range(20_000)]
    figure = training([Curve("long", rows)])
    assert figure is not None
    line = figure.axes[0].lines[0]
    assert len(line.get_xdata()) <= 300
    assert {round(y, 9) for y in line.get_ydata()} == {5.0}


def test_svg_is_inline_and_takes_the_pages_colour() -> None:
    figure = training([Curve("<b>$x$ & über", [*ROWS, *VALIDATION]), Curve("名前" * 40, ROWS)])
    assert figure is not None
    text = svg(figure, "a")
    ElementTree.fromstring(text)
    assert text.startswith("<svg") and "currentColor" in text and "#010203" not in text
    assert not re.search(r'(?:href|src)="(?!#)', text)
    assert png(figure).startswith(b"\x89PNG")


def test_ids_of_two_figures_in_one_page_differ_and_every_reference_has_its_target() -> None:
    def drawn(name: str) -> tuple[set[str], set[str]]:
        figure = training([Curve("a", [*ROWS, *VALIDATION])])
        assert figure is not None
        text = svg(figure, name)
        return set(re.findall(r'id="([^"]+)"', text)), set(
            re.findall(r'(?:href="#|url\(#)([^")]+)', text)
        )

    (ids, used), (other, _) = drawn("one"), drawn("two")
    assert used and used <= ids and not ids & other and drawn("one") == (ids, used)


def test_bars_have_labels_and_the_best_is_on_top() -> None:
    bars = [
        Bar("low", 40.0, None, "untrained"),
        Bar("high", 80.0, 0.7, "pretrained"),
        Bar("paper", 60.0, None, "published"),
    ]
    figure = scores(bars, "avg-9")
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "low",
        "paper",
        "high",
    ]
