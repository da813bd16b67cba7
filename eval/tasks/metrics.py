"""Metrics of GLUE: those of scikit-learn and SciPy, with a rule for undefined values.

If a metric is not defined (correlation with a constant, F1 without a positive label or prediction, predictions that
are not finite) its value is NaN and `Scores.problems` gives the reason. One case is a number by convention, with a
note: constant class predictions have Matthews correlation 0 (as in scikit-learn), which an untrained model scores on
CoLA in every published table. `metric_modules/glue` offers the same as a Hugging Face `evaluate` module without a
network:

    evaluate.load(str(eval.tasks.metrics.MODULE_FOLDER), "mrpc").compute(predictions=..., references=...)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TOLERANCE = 1e-6  # for stored values, whose last bits depend on the versions of libraries
MODULE_FOLDER = Path(__file__).resolve().parent / "metric_modules" / "glue"


@dataclass(frozen=True)
class Scores:
    """Metric values by name (NaN where undefined), the reasons for undefined ones, and remarks on values."""

    values: dict[str, float]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the Matthews correlation of class numbers, for any number of classes (Gorodkin 2004), from -1 to 1.

    It is 0 if all predictions are one class, and NaN if all labels are.
    """
    from sklearn.metrics import matthews_corrcoef  # imported late: takes a second

    if labels.size == 0 or (labels == labels[0]).all():
        return math.nan
    return float(matthews_corrcoef(labels, predictions))


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of equal class numbers, or NaN without examples."""
    return float((predictions == labels).mean()) if labels.size else math.nan


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the F1 of class 1, as GLUE scores MRPC and QQP.

    It is NaN if neither labels nor predictions have that class.
    """
    from sklearn.metrics import f1_score

    if not labels.size:
        return math.nan
    return float(f1_score(labels == 1, predictions == 1, zero_division=np.nan))


def f1_macro(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean F1 over the classes of labels and predictions, as SuperGLUE scores CB.

    It is NaN without examples.
    """
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro")) if labels.size else math.nan


def accuracy_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean of accuracy and macro F1, SuperGLUE's score of CB."""
    return (accuracy(predictions, labels) + f1_macro(predictions, labels)) / 2


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the Pearson correlation, from -1 to 1, or NaN if a side is constant or has fewer than 2 examples."""
    from scipy.stats import pearsonr

    if labels.size < 2 or any((side == side[0]).all() for side in (predictions, labels)):
        return math.nan
    return float(pearsonr(predictions.astype(np.float64), labels.astype(np.float64)).statistic)


def spearmanr(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the Spearman correlation: Pearson's on ranks, where ties share their mean rank; NaN as for `pearson`."""
    from scipy.stats import rankdata

    return pearson(rankdata(predictions), rankdata(labels))


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


def is_value(name: str, value: float) -> bool:
    """Return whether a metric can have this value, which is at most 1."""
    least = -1.0 if name in CORRELATIONS else 0.0
    return least - TOLERANCE <= value <= 1 + TOLERANCE


def agree(value: float | None, other: float | None) -> bool:
    """Return whether two stored values are equal; a missing one is None."""
    if value is None or other is None:
        return value is other
    return abs(value - other) <= TOLERANCE


def score(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> Scores:
    """Return the named metrics of `predictions` [N] against `labels` [N].

    Both are class numbers, or real numbers for regression.
    """
    assert predictions.shape == labels.shape and predictions.ndim == 1, (
        predictions.shape,
        labels.shape,
    )
    bad = int((~np.isfinite(predictions)).sum())
    if bad:
        reason = f"{bad} of {predictions.size} predictions are not finite"
        return Scores(dict.fromkeys(names, math.nan), [reason])
    values = {name: METRICS[name](predictions, labels) for name in names}
    constant = []
    for side, array in (("predictions", predictions), ("labels", labels)):
        if array.size and (array == array[0]).all():
            constant.append(f"all {side} are {array[0]:g}")
    undefined = [name for name, value in values.items() if math.isnan(value)]
    if not undefined:
        return Scores(values, notes=constant)
    reason = " and ".join(constant) or "too few examples"
    return Scores(values, problems=[f"{', '.join(undefined)} undefined: {reason}"])
