"""Scores of several competitors on one labelled set, with intervals and p-values by a bootstrap.

A resample draws examples with replacement, the same for all competitors, and the seeds of each competitor; the score is
the mean over seeds. Deviations of seeds from their mean are multiplied by sqrt(S / (S - 1)), because S values deviate
from their sample mean less than from the true mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cramming.progress import Progress
from eval.own_tasks.metrics import METRICS, count_spans
from eval.own_tasks.readers import OwnTaskData

RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)  # of a 95 % interval
MIN_DEFINED_RESAMPLES = RESAMPLES // 2  # for an interval or a p-value

Interval = tuple[float, float]
Predictions = Mapping[str, Sequence[np.ndarray]]  # of each seed, by competitor


@dataclass(frozen=True)
class Comparison:
    """Result of a competitor on a labelled set; undefined numbers are None.

    `score` is the mean over seeds. `difference` is the score minus that of the reference, None for the reference.
    `p` is the two-sided p-value of no difference.
    """

    competitor: str
    per_seed: list[float | None]
    score: float | None
    interval: Interval | None
    difference: float | None
    difference_interval: Interval | None
    p: float | None


@dataclass(frozen=True)
class Scorable:
    """Labels and predictions as a metric reads them; rows `bounds_N[n]` to `bounds_N[n + 1]` belong to example n."""

    metric: str
    labels: np.ndarray
    predictions: np.ndarray
    bounds_N: np.ndarray

    def score(self, rows: np.ndarray | slice = slice(None)) -> float:
        """Return the metric of these rows, or NaN if a prediction is not finite or the metric is undefined."""
        predictions = self.predictions[rows]
        if not np.isfinite(predictions).all():
            return math.nan
        return METRICS[self.metric].score(self.labels[rows], predictions)

    def rows_of(self, examples: np.ndarray) -> np.ndarray:
        """Return the rows of these examples."""
        if len(self.bounds_N) == len(self.labels) + 1:
            return examples
        rows = [np.arange(self.bounds_N[n], self.bounds_N[n + 1]) for n in examples]
        return np.concatenate(rows)


def scorable(data: OwnTaskData, name: str, predictions: np.ndarray) -> Scorable:
    """Return a competitor's predictions of a labelled set together with its labels."""
    labels = data.labels(name)
    if data.task.kind != "tokens":
        return Scorable(data.metric, labels, predictions, np.arange(len(labels) + 1))
    bounds_N = np.concatenate([[0], np.cumsum(data.words_per_text(name))])
    if data.metric != "span_f1" or not np.isfinite(predictions).all():
        return Scorable(data.metric, labels, predictions, bounds_N)
    counts = count_spans(data.task.labels, labels, predictions, bounds_N)
    return Scorable(data.metric, *counts, np.arange(len(bounds_N)))


def compare(
    data: OwnTaskData, name: str, predictions: Predictions, reference: str
) -> list[Comparison]:
    """Return the result of each competitor on the labelled set `name` of a task."""
    sets: dict[str, list[Scorable]] = {}
    per_seed: dict[str, list[float]] = {}
    for competitor, of_seeds in predictions.items():
        sets[competitor] = [scorable(data, name, values) for values in of_seeds]
        per_seed[competitor] = [each.score() for each in sets[competitor]]
    samples = _bootstrap(f"bootstrap {data.name}", sets, per_seed)
    comparisons = []
    for competitor, scores in per_seed.items():
        score = _finite(np.mean(scores))
        difference = difference_interval = p = None
        if competitor != reference:
            difference = _finite(np.mean(scores) - np.mean(per_seed[reference]))
            differences = samples[competitor] - samples[reference]
            difference_interval = interval(differences)
            p = p_value(differences)
        comparisons.append(
            Comparison(
                competitor,
                [_finite(value) for value in scores],
                score,
                interval(samples[competitor]),
                difference,
                difference_interval,
                p,
            )
        )
    return comparisons


def _bootstrap(
    title: str, sets: Mapping[str, Sequence[Scorable]], per_seed: Mapping[str, Sequence[float]]
) -> dict[str, np.ndarray]:
    """Return the score of every competitor in each resample, float64 [RESAMPLES]; NaN if it is undefined."""
    examples = len(next(iter(sets.values()))[0].bounds_N) - 1
    example_generator = np.random.default_rng(0)
    seed_generators = {name: np.random.default_rng([1, index]) for index, name in enumerate(sets)}
    samples = {name: np.full(RESAMPLES, math.nan) for name in sets}
    defined = {name: np.isfinite(scores).all() for name, scores in per_seed.items()}
    with Progress(title, RESAMPLES, "resamples") as bar:
        for resample in range(RESAMPLES):
            drawn = example_generator.integers(0, examples, examples)
            for name, seed_sets in sets.items():
                if defined[name]:
                    rows = seed_sets[0].rows_of(drawn)
                    scores = np.array([each.score(rows) for each in seed_sets])
                    samples[name][resample] = mean_of_drawn_seeds(scores, seed_generators[name])
            bar.advance()
    return samples


def mean_of_drawn_seeds(scores_S: np.ndarray, generator: np.random.Generator) -> float:
    """Return the mean of scores drawn with replacement, with the deviation of the mean of a sample of this size."""
    count = len(scores_S)
    mean = float(scores_S.mean())
    if count == 1:
        return mean
    drawn = float(scores_S[generator.integers(0, count, count)].mean())
    return mean + math.sqrt(count / (count - 1)) * (drawn - mean)


def interval(samples: np.ndarray) -> Interval | None:
    """Return the 95 % interval of a bootstrap's samples, or None if more than half of them are undefined."""
    known = samples[np.isfinite(samples)]
    if len(known) < MIN_DEFINED_RESAMPLES:
        return None
    low, high = np.percentile(known, PERCENTILES)
    return float(low), float(high)


def p_value(differences: np.ndarray) -> float | None:
    """Return the two-sided p-value of no difference, from the share of resamples on the other side of zero."""
    known = differences[np.isfinite(differences)]
    if len(known) < MIN_DEFINED_RESAMPLES:
        return None
    tails = [
        (1 + (known <= 0).sum()) / (1 + len(known)),
        (1 + (known >= 0).sum()) / (1 + len(known)),
    ]
    return min(1.0, 2 * float(min(tails)))


def _finite(value: float | np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None
