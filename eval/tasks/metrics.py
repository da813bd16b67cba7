"""The metrics of GLUE: those of scikit-learn and SciPy, with a rule for what they leave undefined.

Where a metric is not defined (correlation with a constant, F1 without a positive label or prediction, predictions that
are not finite) the value is NaN and `Scores.problems` says why. One case is a number by convention, with a note:
constant class predictions have Matthews correlation 0 (as in scikit-learn), which an untrained model scores on CoLA in
every published table. `metric_modules/glue` offers the same as a Hugging Face `evaluate` module without a network:

    evaluate.load(str(eval.tasks.metrics.MODULE_FOLDER), "mrpc").compute(predictions=..., references=...)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TOLERANCE = 1e-6  # of stored values: another version of a library may differ in the last bits
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
    from sklearn.metrics import matthews_corrcoef  # takes a second, which reports have no use for

    if labels.size == 0 or (labels == labels[0]).all():
        return math.nan
    return float(matthews_corrcoef(labels, predictions))


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of equal class numbers; NaN for no examples."""
    return float((predictions == labels).mean()) if labels.size else math.nan


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1, as GLUE scores MRPC and QQP; NaN where neither labels nor predictions have that class."""
    from sklearn.metrics import f1_score

    return (
        float(f1_score(labels == 1, predictions == 1, zero_division=np.nan))
        if labels.size
        else math.nan
    )


def f1_macro(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the F1 of every class that labels or predictions have, as SuperGLUE scores CB; NaN for no examples."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro")) if labels.size else math.nan


def accuracy_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean of accuracy and macro F1, SuperGLUE's score of CB."""
    return (accuracy(predictions, labels) + f1_macro(predictions, labels)) / 2


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson correlation, from -1 to 1; NaN where either side is constant or there are fewer than 2 examples."""
    from scipy.stats import pearsonr

    if labels.size < 2 or any((side == side[0]).all() for side in (predictions, labels)):
        return math.nan
    return float(pearsonr(predictions.astype(np.float64), labels.astype(np.float64)).statistic)


def spearmanr(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Spearman correlation: Pearson's on ranks, ties sharing their mean rank; NaN as for `pearson`."""
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
    """Whether a metric can have this value, which is 1 at most."""
    return (-1.0 if name in CORRELATIONS else 0.0) - TOLERANCE <= value <= 1 + TOLERANCE


def agree(one: float | None, other: float | None) -> bool:
    """Whether two stored values are the same; a missing one is None."""
    return one is other if one is None or other is None else abs(one - other) <= TOLERANCE


def score(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> Scores:
    """The named metrics of `predictions` [N] against `labels` [N]: class numbers, or real numbers for regression."""
    assert predictions.shape == labels.shape and predictions.ndim == 1, (
        predictions.shape,
        labels.shape,
    )
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
        [f"{', '.join(undefined)} undefined: {' and '.join(constant) or 'too few examples'}"]
        if undefined
        else []
    )
    return Scores(values, problems, [] if undefined else constant)
