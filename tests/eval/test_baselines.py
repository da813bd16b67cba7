"""The bag of words learns what words say, sees what two texts share, and is the same every time."""

from dataclasses import replace

import numpy as np

from cramming.data.task_files import GLUE
from eval.finetune.baselines import predict_constant, predict_from_words
from eval.tasks.datasets import Split, TaskData
from eval.tasks.metrics import score

WORDS = [f"w{i}" for i in range(60)]


def make_data(name: str, examples: int = 600) -> TaskData:
    """One text: the label says whether it has w0. Two: how many of the second one's words are the first one's."""
    task, random = GLUE[name], np.random.default_rng(0)

    def split(source: object, size: int) -> Split:
        texts: tuple[list[str], ...] = tuple([] for _ in task.text)
        labels: list[float] = []
        for _ in range(size):
            first = random.choice(WORDS[1:], 6, replace=False).tolist()
            label = float(random.integers(0, 6 if task.regression else 2))
            if len(texts) == 1:
                texts[0].append(" ".join([*first[1:], WORDS[0] if label else first[0]]))
            else:
                index = int(label) if task.regression else 6 * int(label == 0)
                rest = [w for w in WORDS if w not in first]
                texts[0].append(" ".join(first))
                texts[1].append(
                    " ".join([*first[:index], *random.choice(rest, 6 - index, replace=False)])
                )
            labels.append(label)
        return Split(source, texts, np.array(labels, np.float32 if task.regression else np.int64))  # type: ignore[arg-type]

    return TaskData(task, split(task.train, examples), (split(task.scored[0], 200),))


def test_it_learns_words_and_what_two_texts_share() -> None:
    for name, enough in (("sst2", 0.95), ("rte", 0.95), ("stsb", 0.9)):
        data = make_data(name)
        predictions, labels = predict_from_words(data)[0], data.scored[0].labels
        assert labels is not None
        assert (
            score(data.task.metrics, predictions, labels).values[data.task.main_metric] > enough
        ), name


def test_it_is_the_same_every_time() -> None:
    data = make_data("stsb", 100)
    first, second = (predict_from_words(data)[0] for _ in range(2))
    assert np.array_equal(first, second)


def test_a_training_set_of_one_class_teaches_that_class() -> None:
    data = make_data("sst2", 20)
    data = replace(data, train=replace(data.train, labels=np.ones(20, np.int64)))
    assert set(predict_from_words(data)[0]) == {1.0}


def test_the_constant_is_the_most_frequent_class_or_the_mean_label() -> None:
    for name, labels, expected in (
        ("sst2", [0, 1, 1], 1.0),
        ("rte", [1, 0], 0.0),
        ("stsb", [1.0, 4.0], 2.5),
    ):
        data = make_data(name, 3)
        kind = np.float32 if data.task.regression else np.int64
        data = replace(data, train=replace(data.train, labels=np.array(labels, kind)))
        predictions = predict_constant(data)[0]
        assert set(predictions) == {expected} and len(predictions) == len(data.scored[0]), name
