"""Baselines without an encoder on own tasks: those of GLUE for each label, and the most frequent tag of each word."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from eval.finetune.baselines import predict_constant, predict_from_words
from eval.own_tasks.readers import labels_of
from eval.tasks.datasets import Split, TaskData

Predict = Callable[[TaskData], list[np.ndarray]]


def bag_of_words(data: TaskData) -> list[np.ndarray]:
    """Return predictions of the labelled sets from words alone.

    Texts get those of a linear model on tf-idf of words and pairs of words. A word gets its most frequent tag in
    training, an unknown word the most frequent tag of all.
    """
    if data.task.kind == "tokens":
        return _tags_by_word(data)
    return _for_each_label(data, predict_from_words)


def constant_class(data: TaskData) -> list[np.ndarray]:
    """Return the training set's most frequent class, tag or value of each label, or its mean label, for every row."""
    if data.task.kind == "tokens":
        default = np.bincount(labels_of(data.train)).argmax()
        return [np.full(len(labels_of(split)), float(default)) for split in data.scored]
    return _for_each_label(data, predict_constant)


BASELINES: dict[str, Predict] = {"bag of words": bag_of_words, "constant class": constant_class}


def _for_each_label(data: TaskData, predict: Predict) -> list[np.ndarray]:
    if data.task.kind != "multilabel":
        return predict(data)
    columns = [predict(_of_label(data, label)) for label in range(data.task.outputs)]
    return [np.stack(of_split, axis=1) for of_split in zip(*columns)]


def _of_label(data: TaskData, label: int) -> TaskData:
    """Return the task of predicting whether an example has this label."""

    def binary(split: Split) -> Split:
        return replace(split, labels=labels_of(split)[:, label].astype(np.int64))

    return replace(
        data,
        task=replace(data.task, kind="classification", labels=("no", "yes")),
        train=binary(data.train),
        scored=tuple(binary(split) for split in data.scored),
    )


def _tags_by_word(data: TaskData) -> list[np.ndarray]:
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    tags = labels_of(data.train)
    for word, tag in zip(_words(data.train), tags, strict=True):
        counts[word][int(tag)] += 1
    default = int(np.bincount(tags).argmax())
    by_word = {word: of_word.most_common(1)[0][0] for word, of_word in counts.items()}
    predictions = []
    for split in data.scored:
        tags_W = [by_word.get(word, default) for word in _words(split)]
        predictions.append(np.array(tags_W, np.float64))
    return predictions


def _words(split: Split) -> list[str]:
    words: list[str] = []
    for text in split.texts[0]:
        words += text.split(" ")
    return words
