"""Metrics equal scikit-learn's and seqeval's to the last bit; intervals and p-values tell differences from noise."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from eval.own_tasks.compare import interval, mean_of_drawn_seeds, p_value
from eval.own_tasks.metrics import METRICS, count_spans, span_f1, spans

OF_CLASSES: dict[str, Callable[..., Any]] = {
    "accuracy": sklearn_metrics.accuracy_score,
    "macro_f1": lambda y, p: sklearn_metrics.f1_score(y, p, average="macro"),
    "matthews": sklearn_metrics.matthews_corrcoef,
}
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "mse": sklearn_metrics.mean_squared_error,
    "pearson": lambda y, p: stats.pearsonr(y.astype(float), p).statistic,
    "spearman": lambda y, p: stats.spearmanr(y, p).statistic,
}
OF_SEVERAL: dict[str, Callable[..., Any]] = {
    "accuracy": sklearn_metrics.accuracy_score,
    "macro_f1": lambda y, p: sklearn_metrics.f1_score(y, p, average="macro", zero_division=0),
    "f1": lambda y, p: sklearn_metrics.f1_score(y, p, average="micro", zero_division=0),
}


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, predictions = rng.integers(0, 4, (2, 60))
    for name, expected in OF_CLASSES.items():
        assert METRICS[name].score(labels, predictions) == expected(labels, predictions)
    labels, predictions = rng.integers(0, 2, (2, 60))
    assert METRICS["f1"].score(labels, predictions) == sklearn_metrics.f1_score(labels, predictions)
    labels, predictions = rng.normal(size=(2, 60))
    for name, expected in OF_NUMBERS.items():
        assert METRICS[name].score(labels, predictions) == expected(labels, predictions)
    labels, predictions = rng.integers(0, 2, (2, 60, 3))
    for name, expected in OF_SEVERAL.items():
        assert METRICS[name].score(labels, predictions) == expected(labels, predictions)


def test_a_correlation_with_a_constant_is_not_defined() -> None:
    for name in ("pearson", "spearman"):
        assert np.isnan(METRICS[name].score(np.arange(4.0), np.ones(4)))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [  # as seqeval 1.2.2 finds them
        ("O B-a I-a O B-b", {("a", 1, 2), ("b", 4, 4)}),
        ("B-a B-a I-a", {("a", 0, 0), ("a", 1, 2)}),
        ("I-a I-a O I-b", {("a", 0, 1), ("b", 3, 3)}),
        ("B-a I-b I-b", {("a", 0, 0), ("b", 1, 2)}),
        ("O O", set()),
        ("B-a-b I-a-b", {("a-b", 0, 1)}),
    ],
)
def test_spans_of_tags(tags: str, expected: set[tuple[str, int, int]]) -> None:
    assert set(spans(tags.split())) == expected


def random_tags(rng: random.Random, length: int) -> list[str]:
    """A tagging in IOB2."""
    tags: list[str] = []
    while len(tags) < length:
        kind = rng.choice(["", "", "PER", "LOC", "A-B"])
        tags += [f"B-{kind}", *[f"I-{kind}"] * rng.randint(0, 3)] if kind else ["O"]
    return tags[:length]


def test_span_f1_equals_seqeval_on_random_taggings(rng: random.Random) -> None:
    """Predictions are other taggings in IOB2, or the labels with any tags in places, which need not be in IOB2."""
    seqeval = pytest.importorskip("seqeval.metrics")
    names = ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in ("PER", "LOC", "A-B"))]
    scores = []
    for case in range(1000):
        labels = [random_tags(rng, rng.randint(1, 15)) for _ in range(rng.randint(1, 6))]
        predictions = [random_tags(rng, len(tags)) for tags in labels]
        if case % 2:
            predictions = [
                [rng.choice(names) if rng.random() < 0.2 else tag for tag in tags]
                for tags in labels
            ]
        bounds = np.cumsum([0, *map(len, labels)])
        flat = [
            np.array([names.index(tag) for tags in side for tag in tags])
            for side in (labels, predictions)
        ]
        scores.append(span_f1(*count_spans(names, *flat, bounds)))
        assert scores[-1] == seqeval.f1_score(labels, predictions)
    assert len(set(scores)) > 100


def test_an_interval_holds_most_resamples_and_p_says_how_far_they_are_from_zero() -> None:
    draws = np.random.default_rng(0).normal(size=1000)
    low, high = interval(draws) or (0.0, 0.0)
    assert low == pytest.approx(-1.96, abs=0.15) and high == pytest.approx(1.96, abs=0.15)
    assert p_value(draws + 1.96) == pytest.approx(0.05, abs=0.02)
    assert p_value(draws + 10) == pytest.approx(2 / 1001) and p_value(np.zeros(1000)) == 1
    assert p_value(np.full(1000, np.nan)) is None and interval(np.full(1000, np.nan)) is None


def test_drawn_seeds_spread_as_the_mean_of_so_many_seeds() -> None:
    rng = np.random.default_rng(0)
    scores = np.array([0.0, 1.0, 2.0])
    means = [mean_of_drawn_seeds(scores, rng) for _ in range(4000)]
    assert np.std(means) == pytest.approx(scores.std(ddof=1) / 3**0.5, rel=0.05)
