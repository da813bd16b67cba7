"""Baselines without an encoder, on the same tasks: a linear model on bags of words, and a constant.

What they reach needs no encoder at all. Words and pairs of neighbouring words are weighted by tf-idf; for two texts the
model sees both, the product and the difference of their vectors, and how much of each is in the other. Logistic
regression, ridge regression for STS-B; no setting differs between tasks. The constant is the training set's most
frequent class, or its mean label. Both depend on the data alone, so there is one "seed".
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cramming.config import settings_hash
from cramming.data.task_files import Task
from cramming.progress import say
from cramming.record_schema import WITHOUT_ENCODER
from eval.finetune.loop import Predictions
from eval.finetune.store import RunStore, summarise, with_seconds, write_json
from eval.tasks.datasets import Split, TaskData
from cramming.data.suites import SuiteName

SETTINGS: dict[str, Any] = {
    "words": "tf-idf of 1- and 2-grams",
    "most_frequent": 100_000,
    "inverse_regularization": 1.0,
    "iterations": 200,
}


def score_baseline(
    section: str,
    store: RunStore,
    suite: SuiteName,
    data: Sequence[TaskData],
    absent: dict[str, str],
) -> dict[str, Any]:
    """The record's `section` (see `WITHOUT_ENCODER`); tasks that are stored with the same data are not done again.

    Nothing is stored before all tasks are done: what the record says of other data agrees with its files until then.
    """
    import sklearn

    name, (settings, predict) = WITHOUT_ENCODER[section], METHODS[section]
    results, made = (
        dict[tuple[str, int], dict[str, Any]](),
        list[tuple[TaskData, str, Predictions]](),
    )
    for task_data in data:
        task, started = task_data.task, time.perf_counter()
        key, other = (
            settings_hash(each.sha256, settings, sklearn.__version__)
            for each in (task_data, task_data.whole)
        )
        if stored := store.load(task_data, 0, key) or store.load(task_data, 0, other):
            results[task.name, 0] = stored
            continue
        scored = {s.source.entry: found for s, found in zip(task_data.scored, predict(task_data))}
        spent = time.perf_counter() - started
        made.append((task_data, key, Predictions(scored, {}, float("nan"), spent, 0)))
        say(f"{task.title:<8} {name}: {spent:.0f} s")
    for task_data, key, predictions in made:
        results[task_data.task.name, 0] = store.save(task_data, 0, key, predictions)
    seconds = {f"{task}-seed{seed}": result["seconds"] for (task, seed), result in results.items()}
    model = {"init": name, "model": name}
    summary = summarise(model, suite, data, results, [0], settings, absent)
    write_json(store.folder / "glue.json", summary)
    return with_seconds(summary, seconds)


def predict_from_words(data: TaskData) -> list[np.ndarray]:
    """Fit on the training set, predict the labelled sets."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(
        ngram_range=(1, 2),
        sublinear_tf=True,
        token_pattern=r"(?u)\b\w+\b|[^\w\s]",
        max_features=SETTINGS["most_frequent"],
    )
    words.fit(text for column in data.train.texts for text in column)
    assert data.train.labels is not None, data.task.name
    model = _linear_model(data.task, classes=len(np.unique(data.train.labels)))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # the number of iterations is part of the definition
        model.fit(_features(words, data.train), data.train.labels)
    return [model.predict(_features(words, split)).astype(np.float64) for split in data.scored]


def predict_constant(data: TaskData) -> list[np.ndarray]:
    """The most frequent class of the training set (of several the first), or the mean of its labels, for every text."""
    labels = data.train.labels
    assert labels is not None, data.task.name
    value = float(labels.mean()) if data.task.regression else float(np.bincount(labels).argmax())
    return [np.full(len(split), value) for split in data.scored]


# Section of the record -> what the numbers depend on beside the data, and how they are made.
METHODS: dict[str, tuple[dict[str, Any], Callable[[TaskData], list[np.ndarray]]]] = {
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
        return DummyClassifier()  # a training set of one class teaches that class
    return LogisticRegression(C=strength, max_iter=SETTINGS["iterations"])


def _features(words: Any, split: Split) -> Any:
    """A sparse matrix, one row per example."""
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
