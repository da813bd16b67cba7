"""The generated world: repeatable, balanced, in GLUE's layouts, and without overlap between corpus and tasks."""

import re
from collections import Counter
from pathlib import Path

import pytest

from cramming.data.task_files import GLUE as GLUE_TASKS
from data_prep.synthetic import tasks
from data_prep.synthetic.documents import documents
from data_prep.synthetic.speaker import normalise
from data_prep.synthetic.tasks import TASKS, Example, examples, write_tasks
from eval.tasks.locate import read_task

WORDS = 60_000


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*documents(0, WORDS)]


@pytest.fixture(scope="module")
def splits() -> dict[str, dict[str, list[Example]]]:
    return {task: examples(task, 0) for task in TASKS}


def test_the_seed_decides_every_text(texts: list[str]) -> None:
    assert [*documents(0, WORDS)] == texts
    assert next(documents(1, 2_000)) != texts[0]
    assert WORDS <= sum(len(text.split()) for text in texts) < WORDS + 200


def test_the_vocabulary_is_one_a_tiny_model_can_learn(texts: list[str]) -> None:
    words = Counter(word for text in texts for word in re.findall(r"\w+", text.lower()))
    assert 800 < len(words) < 4_000


def test_no_sentence_of_a_task_stands_in_the_corpus(
    texts: list[str], splits: dict[str, dict[str, list[Example]]]
) -> None:
    corpus = {normalise(s) for text in texts for s in re.split(r"(?<=[.?!]) ", text)}
    for task, found in splits.items():
        for split, rows in found.items():
            asked = {normalise(text) for row in rows for text in (row.first, row.second) if text}
            assert not asked & corpus, (task, split, sorted(asked & corpus)[:3])


def test_no_example_stands_in_two_splits(splits: dict[str, dict[str, list[Example]]]) -> None:
    for task, found in splits.items():
        seen: set[tuple[str, str]] = set()
        for split, rows in found.items():
            keys = {(normalise(row.first), normalise(row.second or "")) for row in rows}
            assert len(keys) == len(rows), (task, split)
            assert not keys & seen, (task, split)
            seen |= keys


def test_labels_are_balanced_and_no_matter_of_length(
    splits: dict[str, dict[str, list[Example]]],
) -> None:
    for task, found in splits.items():
        for split, rows in found.items():
            lengths: dict[str, list[int]] = {}
            for row in rows:
                lengths.setdefault(row.label, []).append(len(f"{row.first} {row.second}".split()))
            counts = [len(of_label) for of_label in lengths.values()]
            means = [sum(of_label) / len(of_label) for of_label in lengths.values()]
            assert max(counts) - min(counts) <= 1 and max(means) / min(means) < 1.15, (task, split)


def test_dev_and_test_use_words_that_training_does_not(
    splits: dict[str, dict[str, list[Example]]],
) -> None:
    """Of each meaning: two thirds of the words are of the other half, the rest is grammar."""
    for task, found in splits.items():
        words = {
            s: {w for r in rows for w in normalise(f"{r.first} {r.second}").split()}
            for s, rows in found.items()
        }
        for split in words.keys() - {"train"}:
            assert len(words[split] - words["train"]) > len(words[split]) / 2, (task, split)


def test_the_files_are_read_as_glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SIZES", {"train": 40, "dev": 20, "test": 20})
    write_tasks(tmp_path, 0)
    for name in TASKS:
        data = read_task(tmp_path, GLUE_TASKS[name])
        assert data.train.texts[0] == [row.first for row in examples(name, 0)["train"]]
