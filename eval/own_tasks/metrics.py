"""Metrics of own tasks: scikit-learn's and SciPy's, and the F1 of labelled spans as seqeval computes it.

Shapes: N examples or texts, W words, C labels. Predictions and labels are class numbers [N] or [W], numbers [N], or 0
and 1 for each label [N, C].
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[str, int, int]


@dataclass(frozen=True)
class Metric:
    """Score of (labels, predictions); NaN where it is not defined."""

    score: Callable[[np.ndarray, np.ndarray], float]
    higher_is_better: bool = True


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the share of right predictions; of several labels all must be right."""
    right = labels == predictions
    return float(right.all(axis=1).mean() if right.ndim == 2 else right.mean())


def macro_f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the mean of the F1 of every class that labels or predictions have, or of every label."""
    return _f1(labels, predictions, average="macro")


def f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the F1 of the second of two classes; over all decisions where an example may have several labels."""
    return _f1(labels, predictions, average="micro" if labels.ndim == 2 else "binary")


def _f1(labels: np.ndarray, predictions: np.ndarray, average: str) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average=average, zero_division=0.0))


def matthews(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the Matthews correlation of class numbers."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the Pearson correlation; NaN where a side is constant."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels, predictions)


def spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the Spearman correlation; NaN where a side is constant."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels, predictions)


def _correlation(
    correlate: Callable[..., object], labels: np.ndarray, predictions: np.ndarray
) -> float:
    if len(labels) < 2 or np.ptp(labels) == 0 or np.ptp(predictions) == 0:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sides that are constant but for rounding
        result = correlate(labels.astype(np.float64), predictions)
    return float(result.statistic)  # type: ignore[attr-defined]


def mse(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the mean squared error."""
    from sklearn.metrics import mean_squared_error

    return float(mean_squared_error(labels, predictions))


def span_f1(expected_N: np.ndarray, predicted_N2: np.ndarray) -> float:
    """Return the F1 of spans over all texts, 0 where there is no span at all.

    Of each text: how many spans its labels have; how many the predictions have, and how many of these are right.
    """
    predicted, right = predicted_N2.sum(axis=0)
    total = float(expected_N.sum() + predicted)
    return 2 * float(right) / total if total else 0.0


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy),
    "macro_f1": Metric(macro_f1),
    "f1": Metric(f1),
    "matthews": Metric(matthews),
    "pearson": Metric(pearson),
    "spearman": Metric(spearman),
    "mse": Metric(mse, higher_is_better=False),
    "span_f1": Metric(span_f1),
}


def spans(tags: Sequence[str]) -> Iterator[Span]:
    """Yield the labelled spans (type, first, last) of one text's tags in IOB2, as seqeval finds them.

    An `I-` that continues no span of its type begins one, as predictions may have it.
    """
    kind = ""
    first = -1
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, of_tag = tag.partition("-")
        if first >= 0 and (prefix != "I" or of_tag != kind):
            yield kind, first, place - 1
            first = -1
        if first < 0 and prefix != "O":
            kind, first = of_tag, place


def count_spans(
    names: Sequence[str], labels_W: np.ndarray, predictions_W: np.ndarray, bounds_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of each text that `span_f1` reads.

    `labels_W`, `predictions_W`: numbers of tags, of all texts one after the other; `bounds_N`: where each text begins
    and the last ends.
    """
    texts = len(bounds_N) - 1
    expected_N = np.zeros(texts, np.int64)
    predicted_N2 = np.zeros((texts, 2), np.int64)
    for text in range(texts):
        words = slice(bounds_N[text], bounds_N[text + 1])
        expected = set(spans([names[int(tag)] for tag in labels_W[words]]))
        predicted = set(spans([names[int(tag)] for tag in predictions_W[words]]))
        expected_N[text] = len(expected)
        predicted_N2[text] = len(predicted), len(expected & predicted)
    return expected_N, predicted_N2
