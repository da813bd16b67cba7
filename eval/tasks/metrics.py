"""The metrics of GLUE, in plain NumPy; tests compare them with scikit-learn and scipy.

Where a metric is not defined (correlation with a constant, F1 without a positive label or prediction, predictions that
are not finite) the value is NaN and `Scores.problems` says why. One case is a number by convention, with a note:
constant class predictions have Matthews correlation 0 (as in scikit-learn), which an untrained model scores on CoLA in
every published table. `metric_modules/glue` offers the same as a Hugging Face `evaluate` module without a network:

    evaluate.load(str(eval.tasks.metrics.MODULE_FOLDER), "mrpc").compute(predictions=..., references=...)
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

MODULE_FOLDER = Path(__file__).resolve().parent / "metric_modules" / "glue"


@dataclass(frozen=True)
class Scores:
    """Metric values by name (NaN where undefined), why any is undefined, and remarks on values that need one."""

    values: dict[str, float]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of class numbers, for any number of classes (Gorodkin 2004), from -1 to 1.

    0 where all predictions are one class; NaN where all labels are (there is nothing to correlate with).
    """
    if labels.size == 0 or (labels == labels[0]).all():
        return math.nan
    if (predictions == predictions[0]).all():
        return 0.0
    classes = np.union1d(predictions, labels)
    predicted = (predictions[:, None] == classes).astype(np.float64)
    actual = (labels[:, None] == classes).astype(np.float64)
    predicted -= predicted.mean(0)
    actual -= actual.mean(0)
    covariance = (predicted * actual).sum()
    return float(covariance / math.sqrt((predicted**2).sum() * (actual**2).sum()))


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of equal class numbers; NaN for no examples."""
    return float((predictions == labels).mean()) if labels.size else math.nan


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1, as GLUE scores MRPC and QQP; NaN where neither labels nor predictions have that class."""
    hits = int(((predictions == 1) & (labels == 1)).sum())
    total = int((predictions == 1).sum() + (labels == 1).sum())
    return 2 * hits / total if total else math.nan


def f1_macro(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the F1 of every class that labels or predictions have, as SuperGLUE scores CB; NaN for no examples."""
    if not labels.size:
        return math.nan
    return float(np.mean([f1(predictions == c, labels == c) for c in np.union1d(predictions, labels)]))


def accuracy_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean of accuracy and macro F1, SuperGLUE's score of CB."""
    return (accuracy(predictions, labels) + f1_macro(predictions, labels)) / 2


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson correlation, from -1 to 1; NaN where either side is constant or there are fewer than 2 examples."""
    x, y = predictions.astype(np.float64), labels.astype(np.float64)
    if x.size < 2 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    # Normalised one by one: the product of the two sums of squares may overflow or underflow.
    correlation = (x / np.linalg.norm(x)) @ (y / np.linalg.norm(y))
    return float(min(1.0, max(-1.0, correlation)))


def spearmanr(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Spearman correlation: Pearson's on ranks, ties sharing their mean rank; NaN as for `pearson`."""
    return pearson(_ranks(predictions), _ranks(labels))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "matthews_correlation": matthews_correlation,
    "accuracy": accuracy,
    "f1": f1,
    "f1_macro": f1_macro,
    "accuracy_f1": accuracy_f1,
    "pearson": pearson,
    "spearmanr": spearmanr,
}

CORRELATIONS = ("matthews_correlation", "pearson", "spearmanr")


def lowest(name: str) -> float:
    """The least value that a metric can have; the most is 1."""
    return -1.0 if name in CORRELATIONS else 0.0


def score(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> Scores:
    """The named metrics of `predictions` [N] against `labels` [N]: class numbers, or real numbers for regression."""
    assert predictions.shape == labels.shape and predictions.ndim == 1, (predictions.shape, labels.shape)
    bad = int((~np.isfinite(predictions)).sum())
    if bad:
        reason = f"{bad} of {predictions.size} predictions are not finite"
        return Scores(dict.fromkeys(names, math.nan), [reason])
    values = {name: METRICS[name](predictions, labels) for name in names}
    constant = [
        f"all {side} are {array[0]:g}"
        for side, array in (("predictions", predictions), ("labels", labels))
        if array.size and (array == array[0]).all()
    ]
    undefined = [name for name, value in values.items() if math.isnan(value)]
    problems = (
        [f"{', '.join(undefined)} undefined: {' and '.join(constant) or 'too few examples'}"] if undefined else []
    )
    return Scores(values, problems, [] if undefined else constant)


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Values with median, mean, sample standard deviation and `mean_ci95`, Student's interval of the mean.

    All are null if a value is; the last two also for one seed.
    """
    known = [value for value in values if value is not None]
    complete = len(known) == len(values)
    mean = statistics.fmean(known) if complete else None
    std = statistics.stdev(known) if complete and len(known) > 1 else None
    half = float(stdtrit(len(known) - 1, 0.975)) * std / len(known) ** 0.5 if std is not None else None
    return {
        "per_seed": list(values),
        "median": statistics.median(known) if complete else None,
        "mean": mean,
        "std": std,
        "mean_ci95": None if mean is None or half is None else [mean - half, mean + half],
    }
