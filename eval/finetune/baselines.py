"""Baselines without an encoder, on the same tasks: a linear model on bags of words, and a constant.

Their scores need no encoder. Words and pairs of neighbouring words are weighted by tf-idf; for two texts the model's
features are both vectors, their product and difference, and the share of each text in the other. The model is
logistic regression, ridge regression for STS-B; no setting differs between tasks. The constant is the training set's
most frequent class, or its mean label. Both depend on the data alone, so there is one "seed".
"""

import math
import time
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import numpy as np

from cramming.config import settings_hash
from cramming.data.task_files import Task
from cramming.progress import say
from cramming.runlog import Finetuned, Scoring
from cramming.scores import WITHOUT_ENCODER, run_name
from eval.finetune.loop import Predictions
from eval.finetune.scoring import ScoringJob
from eval.finetune.store import now
from eval.tasks.datasets import Split, TaskData

Baseline = Literal["floor", "constant"]
SETTINGS: dict[str, Any] = {
    "words": "tf-idf of 1- and 2-grams",
    "most_frequent": 100_000,
    "inverse_regularization": 1.0,
    "iterations": 200,
}


VERSION = 1  # raised by every change of this code that changes a number
SEED = 0


def score_baseline(job: ScoringJob, baseline: Baseline) -> dict[str, Any]:
    """Score a baseline on all tasks that have no stored result for the same data, and return its section.

    A scoring that is already in the record writes nothing.
    """
    settings, predict = METHODS[baseline]
    name, log = WITHOUT_ENCODER[baseline], job.log
    stored = {data.task.name: _load(job, data, settings) for data in job.data}
    keys = {}
    for data in job.data:
        result = stored[data.task.name]
        key = _key(data, settings) if result is None else result.key
        keys[run_name(data.task.name, SEED)] = key
    scoring = Scoring(
        time=now(),
        section=job.suite.section,
        suite=job.suite.name,
        init=baseline,
        version=VERSION,
        model=name,
        selection="none",
        seeds=[SEED],
        hyperparameters=settings,
        entries=job.sets,
        absent=job.absent,
        keys=keys,
        tasks_corpus_sha256=job.suite.corpus_sha256,
    )
    todo = [data for data in job.data if stored[data.task.name] is None]
    if todo or not log.scores.is_current(scoring):
        log.begin(scoring)
    for data in todo:
        started = time.perf_counter()
        predictions = predict(data)
        seconds = time.perf_counter() - started
        entries = [split.source.entry for split in data.scored]
        scored = dict(zip(entries, predictions, strict=True))
        made = Predictions(scored, {}, math.nan, seconds, 0)
        log.save(data, SEED, keys[run_name(data.task.name, SEED)], made)
        say(f"{data.task.title:<8} {name}: {seconds:.0f} s")
    return log.scores.section_of(scoring)


def _load(job: ScoringJob, data: TaskData, settings: dict[str, Any]) -> Finetuned | None:
    """Return the stored result of a task, read with or without its test sets."""
    for variant in (data, data.whole):
        result = job.log.load(variant, SEED, _key(variant, settings))
        if result is not None:
            return result
    return None


def _key(data: TaskData, settings: dict[str, Any]) -> str:
    import sklearn

    return settings_hash(data.sha256, settings, VERSION, sklearn.__version__)


def predict_from_words(data: TaskData) -> list[np.ndarray]:
    """Return predictions of the labelled sets by a linear model on bags of words of the training set."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(
        ngram_range=(1, 2),
        sublinear_tf=True,
        token_pattern=r"(?u)\b\w+\b|[^\w\s]",
        max_features=SETTINGS["most_frequent"],
    )
    words.fit(chain.from_iterable(data.train.texts))
    assert data.train.labels is not None, data.task.name
    model = _linear_model(data.task, classes=len(np.unique(data.train.labels)))
    with warnings.catch_warnings():
        # The number of iterations is part of the definition.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(_features(words, data.train), data.train.labels)
    return [model.predict(_features(words, split)).astype(np.float64) for split in data.scored]


def predict_constant(data: TaskData) -> list[np.ndarray]:
    """Return the most frequent class of the training set (the lowest of several) or its mean label for every text."""
    labels = data.train.labels
    assert labels is not None, data.task.name
    value = float(labels.mean()) if data.task.regression else float(np.bincount(labels).argmax())
    return [np.full(len(split), value) for split in data.scored]


# section of the record -> settings that the numbers depend on, and function that predicts
METHODS: dict[Baseline, tuple[dict[str, Any], Callable[[TaskData], list[np.ndarray]]]] = {
    "floor": (SETTINGS, predict_from_words),
    "constant": ({"predicts": "the most frequent class, or the mean label"}, predict_constant),
}


def _linear_model(task: Task, classes: int) -> Any:
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression, Ridge

    strength = SETTINGS["inverse_regularization"]
    if task.regression:
        return Ridge(alpha=1 / strength, solver="lsqr", max_iter=SETTINGS["iterations"])
    if classes == 1:
        return DummyClassifier()  # predicts the only class of the training set
    weights = "balanced" if task.balanced else None
    return LogisticRegression(C=strength, max_iter=SETTINGS["iterations"], class_weight=weights)


def _features(words: Any, split: Split) -> Any:
    """Return the features as a sparse matrix, one row per example."""
    from scipy.sparse import csr_matrix, hstack

    first = words.transform(split.texts[0])
    if len(split.texts) == 1:
        return first
    second = words.transform(split.texts[1])
    shared = first.multiply(second)
    common = (first > 0).multiply(second > 0).sum(1)
    of_each = [np.asarray(common / np.maximum((side > 0).sum(1), 1)) for side in (first, second)]
    overlap = csr_matrix(np.hstack([np.asarray(shared.sum(1)), *of_each]))
    return hstack([first, second, shared, abs(first - second), overlap], format="csr")
