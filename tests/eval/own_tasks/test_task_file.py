"""The file of tasks and its data: mistakes end in one line that names the file, and each format gives the same task."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from cramming.config import UserError
from eval.own_tasks.readers import OwnTaskData, labels_of, read_own_task
from eval.own_tasks.task_file import OwnTask, read_task_file

ROWS = [{"body": f"text {i}", "kind": "ab"[i % 2]} for i in range(6)]
SPAM: dict[str, Any] = {
    "kind": "classification",
    "files": {"train": "train.jsonl", "dev": "dev.jsonl"},
    "text": "body",
    "label": "kind",
    "metric": "accuracy",
}


def write_rows(folder: Path, *names: str, rows: list[dict[str, Any]] = ROWS) -> None:
    for name in names:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder: Path, settings: Any) -> OwnTaskData:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"spam": settings}, sort_keys=False))
    task = read_task_file(path)["spam"]
    assert isinstance(task, OwnTask)
    return read_own_task("spam", task)


def problem_of(folder: Path, settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, settings)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


MISTAKES = {
    "a metric of another kind": (
        {"metric": "pearson"},
        "tasks.yaml: spam.metric=pearson: not a metric of kind=classification.",
    ),
    "a misspelt metric": (
        {"metric": "acuracy"},
        "tasks.yaml: spam.metric=acuracy: expected accuracy, macro_f1,",
    ),
    "a misspelt setting": (
        {"lable": "kind"},
        "tasks.yaml: spam.lable: unknown setting. Did you mean label?",
    ),
    "no such file": (
        {"files": {"train": "none.csv", "dev": "dev.jsonl"}},
        "tasks.yaml: spam.files.train=none.csv: no such file.",
    ),
    "nothing to score": (
        {"files": {"train": "train.jsonl"}},
        "tasks.yaml: spam.files: no labelled set to score.",
    ),
    "folds beside a labelled set": ({"folds": 3}, "tasks.yaml: spam.folds=3: files.train is"),
    "one fold": ({"folds": 1}, "tasks.yaml: spam.folds=1: expected a whole number at least 2"),
    "no kind": ({"kind": None}, "tasks.yaml: spam.kind=null: expected classification,"),
    "three texts": ({"text": ["a", "b", "c"]}, "tasks.yaml: spam.text=[a, b, c]: more than two"),
    "no text column": ({"text": None}, "tasks.yaml: spam.text: missing. Name the column"),
    "a format that there is not": (
        {"files": {"train": "train.doc", "dev": "dev.jsonl"}},
        "tasks.yaml: spam.files.train=train.doc: unknown format. Choose one of .csv,",
    ),
    "another column": ({"label": "kid"}, "train.jsonl: row 1: no column 'kid'. Did you mean kind?"),
    "a label that is not listed": (
        {"labels": ["a", "c"]},
        "train.jsonl: row 2: label 'b' is not in `labels`. Choose one of a, c.",
    ),
    "numbers that are none": (
        {"kind": "regression", "metric": "mse"},
        "train.jsonl: row 1: label a is not a number.",
    ),
    "words without lists": (
        {"kind": "tokens", "metric": "accuracy"},
        "train.jsonl: row 1: not a list of words with a list of equally many tags.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(tmp_path: Path, mistake: str) -> None:
    write_rows(tmp_path, "train.jsonl", "dev.jsonl")
    changes, expected = MISTAKES[mistake]
    assert problem_of(tmp_path, {**SPAM, **changes}).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spam: [", "not readable as YAML"),
        ("", "no tasks"),
        ("- spam", "no tasks"),
        ("glue: rte\nspam: {}\nglue: cola", "key glue stands there twice"),
        ("spam: {kind: tokens, kind: regression}", "key kind stands there twice"),
        ("a b: {}", "a b: not a name of a task"),
        ("glue: rta", "tasks.yaml: glue=rta: unknown choice. Did you mean rte"),
        ("glue: {kind: tokens}", "tasks.yaml: glue={kind: tokens}: expected"),
        ("glue: []", "tasks.yaml: glue="),
        ("{glue: rte, rte: {}}", "tasks.yaml: rte: a task of `glue`, too"),
    ],
)
def test_a_file_that_is_no_table_of_tasks_is_one_line(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=expected):
        read_task_file(path)


def test_a_metric_that_the_labels_do_not_fit_is_one_line(tmp_path: Path) -> None:
    rows = [{"body": f"text {i}", "kind": i % 3} for i in range(6)]
    write_rows(tmp_path, "train.jsonl", "dev.jsonl", rows=rows)
    problem = problem_of(tmp_path, {**SPAM, "metric": "f1"})
    assert problem.startswith("spam.metric=f1: needs two classes, and the task has 3.")
    conll = {"kind": "tokens", "metric": "span_f1", "files": {"train": "a.txt", "dev": "a.txt"}}
    (tmp_path / "a.txt").write_text("Anna PER\nsleeps O\n")
    assert "tag 'PER' is not O, B-<type>" in problem_of(tmp_path, conll)


def test_a_text_may_hold_any_line_separator_but_the_files(tmp_path: Path) -> None:
    write_rows(tmp_path, "train.jsonl", "dev.jsonl")
    rows = [json.dumps({**row, "body": "a\u2028b\x85c"}, ensure_ascii=False) for row in ROWS]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    data = read(tmp_path, SPAM)
    assert len(data.parts[0].train) == len(ROWS)


def test_every_format_gives_the_same_task(tmp_path: Path) -> None:
    write_rows(tmp_path, "train.jsonl", "dev.jsonl")
    lines = [f"{row['body']},{row['kind']}" for row in ROWS]
    (tmp_path / "train.csv").write_text("\n".join(["body,kind", *lines]))
    tabs = [line.replace(",", "\t") for line in ["body,kind", *lines]]
    (tmp_path / "train.tsv").write_text("\n".join(tabs) + "\n")
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    hashes = set()
    for name in ("train.jsonl", "train.csv", "train.tsv", "train.parquet"):
        data = read(tmp_path, {**SPAM, "files": {"train": name, "dev": "dev.jsonl"}})
        hashes.add(data.parts[0].sha256)
        assert data.task.labels == ("a", "b") and data.sets == ("dev",)
    assert len(hashes) == 1


def test_csv_is_quoted_and_tsv_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('body,kind\n"one, ""two""",a\nthree,b\n')
    (tmp_path / "a.tsv").write_text('body\tkind\n"one\ta\nthree\tb\n')
    texts = [
        read(tmp_path, {**SPAM, "files": {"train": name, "dev": name}}).parts[0].train.texts[0]
        for name in ("a.csv", "a.tsv")
    ]
    assert texts == [['one, "two"', "three"], ['"one', "three"]]


def test_labels_are_numbered_as_they_are_listed(tmp_path: Path) -> None:
    write_rows(tmp_path, "train.jsonl", "dev.jsonl")
    data = read(tmp_path, {**SPAM, "labels": ["b", "a"], "class_weights": "balanced"})
    assert labels_of(data.parts[0].train).tolist() == [1, 0, 1, 0, 1, 0] and data.task.balanced


def test_folds_score_every_example_once_by_a_model_that_has_not_seen_it(tmp_path: Path) -> None:
    rows = [{"body": f"text {i}", "kind": "ab"[i % 3 == 0]} for i in range(31)]
    write_rows(tmp_path, "train.jsonl", rows=rows)
    data = read(tmp_path, {**SPAM, "files": {"train": "train.jsonl"}, "folds": 4})
    scored = [text for split in data.splits("folds") for text in split.texts[0]]
    assert sorted(scored) == sorted(row["body"] for row in rows) and len(data.parts) == 4
    for part in data.parts:
        assert not set(part.train.texts[0]) & set(part.scored[0].texts[0])
        assert len(part.train) + len(part.scored[0]) == len(rows)
        assert 2 <= labels_of(part.scored[0]).sum() <= 3, "stratified"
    assert len({part.task.name for part in data.parts}) == 4


def test_tags_are_read_from_columns_and_from_lists_alike(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text(
        "-DOCSTART- -X- O\n\nAnna NNP B-PER\nKeller NNP I-PER\nsleeps V O\n\nIn P O\nRome NNP B-LOC\n"
    )
    rows = [
        {"words": ["Anna", "Keller", "sleeps"], "tags": ["B-PER", "I-PER", "O"]},
        {"words": ["In", "Rome"], "tags": ["O", "B-LOC"]},
    ]
    write_rows(tmp_path, "a.jsonl", rows=rows)
    settings = {"kind": "tokens", "metric": "span_f1", "text": "words", "label": "tags"}
    both = [
        read(tmp_path, {**settings, "files": {"train": name, "dev": name}})
        for name in ("a.conll", "a.jsonl")
    ]
    assert both[0].parts[0].sha256 == both[1].parts[0].sha256
    assert both[0].task.labels == ("B-LOC", "B-PER", "I-PER", "O")
    assert both[0].labels("dev").tolist() == [1, 2, 3, 3, 0]
    assert both[0].words_per_text("dev").tolist() == [3, 2]


def test_folds_of_sentences_keep_their_tags(tmp_path: Path) -> None:
    sentences = [[f"w{i}"] * (1 + i % 3) for i in range(9)]
    text = "\n\n".join("\n".join(f"{word} T{word}" for word in each) for each in sentences)
    (tmp_path / "a.txt").write_text(text)
    settings = {"kind": "tokens", "metric": "accuracy", "files": {"train": "a.txt"}, "folds": 3}
    data = read(tmp_path, settings)
    for part in data.parts:
        for split in (part.train, *part.scored):
            words = [word for text in split.texts[0] for word in text.split(" ")]
            assert [data.task.labels[tag] for tag in labels_of(split)] == [f"T{w}" for w in words]


def test_several_labels_are_a_list_or_stand_between_bars(tmp_path: Path) -> None:
    rows = [{"body": "x", "kind": value} for value in (["a", "b"], [], "b|c", "")]
    write_rows(tmp_path, "train.jsonl", "dev.jsonl", rows=rows)
    data = read(tmp_path, {**SPAM, "kind": "multilabel", "metric": "f1"})
    expected = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]])
    assert np.array_equal(data.labels("dev"), expected) and data.task.outputs == 3
