"""Every official layout is read; every deviation is one line naming file and line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.task_files import GLUE, SUPERGLUE, Task
from eval.tasks.datasets import Split, examples_sha256, in_one_order, seen_in_training
from eval.tasks.locate import read_task, tasks_in_folder
from eval.tasks.readers import read_hub_task
from tests.eval.glue_layouts import ROWS, task_in, write_glue

Change = Callable[[str], str]


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """A folder with all official files, five rows each."""
    return write_glue(tmp_path)


@pytest.mark.parametrize("name", GLUE)
def test_official_layout_is_read(glue: Path, name: str) -> None:
    task = GLUE[name]
    data = read_task(glue, task)
    assert [s.source for s in data.scored] == list(task.scored)
    assert [s.source for s in data.blind] == list(task.blind)
    for split in (data.train, *data.scored):
        expected = [float(r % 6) if task.regression else r % len(task.labels) for r in range(ROWS)]
        assert split.labels is not None and split.labels.tolist() == expected
    for split in data.splits:
        for column, texts in zip(task.text, split.texts, strict=True):
            assert texts == [f'{column} {r} says "hello, naïve' for r in range(ROWS)]
    assert all(s.labels is None and s.ids == list(range(ROWS)) for s in data.blind)
    assert data.subset and not data.absent


def test_the_tasks_of_the_folder_are_found_and_what_is_absent_is_named(glue: Path) -> None:
    assert [t.name for t in tasks_in_folder(glue, None)[0]] == list(GLUE)
    tasks, absent = tasks_in_folder(glue, ["rte"])
    assert [t.name for t in tasks] == ["rte"] and set(absent) == set(GLUE) - {"rte"}
    (glue / "MNLI/dev_mismatched.tsv").unlink()
    (glue / "MNLI/test_matched.tsv").unlink()
    data = read_task(glue, GLUE["mnli"])
    assert [s.source.entry for s in data.scored] == ["mnli_matched"] and set(data.absent) == {
        "mnli_mismatched"
    }


def edit(path: Path, line: int, change: Change) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[line - 1] = change(lines[line - 1])
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")


def drop_field(line: str) -> str:
    return line.rsplit("\t", 1)[0]


def test_what_an_entry_is_scored_on_decides_its_hash(glue: Path) -> None:
    """Other labels or texts of as many examples do; test sets and the other dev set do not."""

    def hashes() -> list[str]:
        data = read_task(glue, GLUE["mnli"])
        return [examples_sha256(data.train, split) for split in data.scored]

    matched, mismatched = hashes()
    (glue / "MNLI/test_matched.tsv").unlink()
    edit(glue / "MNLI/dev_mismatched.tsv", 3, lambda line: drop_field(line) + "\tcontradiction")
    edit(glue / "MNLI/dev_mismatched.tsv", 4, lambda line: drop_field(line) + "\tneutral")
    assert hashes()[0] == matched and hashes()[1] not in (matched, mismatched)
    edit(glue / "MNLI/train.tsv", 2, lambda line: line.replace("says", "said"))
    assert hashes()[0] != matched


@pytest.mark.parametrize(
    ("texts", "other"),
    [
        ((["ab"], ["c"]), (["a"], ["bc"])),
        ((["a", "b"], ["c", "d"]), (["a", "b", "c"], ["d"])),
        ((["a\x1eb"],), (["a", "b"],)),
        ((['a", "b'],), (["a", "b"],)),
    ],
)
def test_other_texts_have_another_hash(
    texts: tuple[list[str], ...], other: tuple[list[str], ...]
) -> None:
    source = GLUE["rte"].train
    assert Split(source, texts, None).sha256 != Split(source, other, None).sha256


def test_copies_of_a_data_set_train_the_same_model_and_have_one_hash(glue: Path) -> None:
    """Publishers order examples and spell white space as they like; file order is no seed."""
    path, task = glue / "RTE/train.tsv", GLUE["rte"]

    def hashes() -> tuple[str, str, str]:
        data = read_task(glue, task)
        return data.sha256, in_one_order(data).sha256, examples_sha256(data.train, *data.scored)

    def rewrite(change: Change) -> None:
        header, *rows = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join([header, *map(change, rows[::-1])]) + "\n", encoding="utf-8")

    content, ordered, examples = hashes()
    rewrite(lambda row: row)
    assert hashes() == (hashes()[0], ordered, examples) and hashes()[0] != content
    rewrite(lambda row: row.replace(" ", "  "))
    assert hashes()[2] == examples and hashes()[0] != content
    edit(path, 2, lambda line: line.replace("says", "said"))
    assert hashes()[2] != examples


BROKEN = [
    (
        "RTE/train.tsv",
        1,
        lambda s: s.replace("sentence2", "hypothesis"),
        r"train.tsv:1: .*columns .*label",
    ),
    (
        "RTE/dev.tsv",
        4,
        drop_field,
        r"dev.tsv:4: expected 4 .*\(index, sentence1, sentence2, label\), found 3$",
    ),
    ("QQP/dev.tsv", 3, drop_field, r"dev.tsv:3: expected 6"),
    ("RTE/dev.tsv", 3, lambda s: s + "\textra", r"dev.tsv:3: .*found 5"),
    (
        "RTE/dev.tsv",
        3,
        lambda s: drop_field(s) + "\tperhaps",
        r"dev.tsv:3: label 'perhaps' is not one of entailment",
    ),
    (
        "CoLA/train.tsv",
        1,
        drop_field,
        r"train.tsv:1: expected 4 .*\(source, label, mark, sentence\), found 3",
    ),
    (
        "STS-B/train.tsv",
        3,
        lambda s: drop_field(s) + "\t5.5",
        r"train.tsv:3: score '5.5' is not a number from 0 to 5",
    ),
    (
        "STS-B/train.tsv",
        3,
        lambda s: drop_field(s) + "\tnan",
        r"train.tsv:3: score 'nan' is not a number",
    ),
    ("RTE/test.tsv", 4, lambda s: "0" + s[1:], r"test.tsv:4: example number '0' .*official order"),
    ("RTE/test.tsv", 4, lambda s: "x" + s[1:], r"test.tsv:4: example number 'x' .*official order"),
    ("SST-2/dev.tsv", 6, lambda s: s[:-1] + "\udcff", r"SST-2/dev.tsv:6: not UTF-8 \(byte 0xff\)"),
]


def is_refused(folder: Path, task: Task, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_task(folder, task)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(("file", "line", "change", "message"), BROKEN)
def test_broken_file_gives_one_line_with_its_place(
    glue: Path, file: str, line: int, change: Change, message: str
) -> None:
    edit(glue / file, line, change)
    is_refused(glue, task_in(file.split("/")[0]), message)


def test_what_official_files_are_like_is_no_mistake(glue: Path) -> None:
    """Byte order marks, carriage returns, Unicode's line separators, and broken rows of QQP's training set."""
    before = read_task(glue, GLUE["mrpc"]).sha256
    path = glue / "MRPC/train.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_task(glue, GLUE["mrpc"]).sha256 == before
    edit(glue / "RTE/train.tsv", 3, lambda line: line.replace("says", "sa\u2028ys\x85"))
    assert len(read_task(glue, GLUE["rte"]).train) == ROWS
    edit(glue / "QQP/train.tsv", 3, drop_field)
    data = read_task(glue, GLUE["qqp"])
    assert len(data.train) == ROWS - 1 and data.train.skipped == 1


def test_missing_and_cut_files_and_wrong_folders_are_named(glue: Path) -> None:
    """The fields of a cut file may all be there, only the end of the last one is not."""
    path = glue / "STS-B/dev.tsv"
    path.write_bytes(path.read_bytes()[:-2])
    is_refused(glue, GLUE["stsb"], r"dev.tsv:6: the last line has no newline")
    (glue / "SST-2/train.tsv").write_text("sentence\tlabel\n")
    is_refused(glue, GLUE["sst2"], r"train.tsv: no examples")
    (glue / "SST-2/dev.tsv").unlink()
    is_refused(glue, GLUE["sst2"], r"SST-2/dev.tsv: no such file")
    for folder in (glue / "CoLA", glue / "nowhere"):
        with pytest.raises(UserError, match=r"no GLUE task found.*CoLA/, SST-2/"):
            tasks_in_folder(folder, None)


@pytest.mark.parametrize("name", ["cola", "stsb", "mnli", "qqp"])
def test_hub_rows_become_the_same_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = GLUE[name]

    def load(path: str, config: str, split: str) -> datasets.Dataset:
        assert path == "nyu-mll/glue"
        test = split.startswith("test")
        rows = {
            column: [f"{column} {config} {split} {i}" for i in range(3)]
            for column in task.hub_text or task.text
        }
        return datasets.Dataset.from_dict(
            {**rows, "label": [-1] * 3 if test else [0, 1, 1], "idx": [0, 1, 2]}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("eval.tasks.readers.prepare_hub", lambda: True)
    data = read_hub_task(task)
    assert [s.source for s in data.splits] == [task.train, *task.scored, *task.blind]
    assert (
        data.train.texts[0][2]
        == f"{(task.hub_text or task.text)[0]} {task.train.hub_config} train 2"
    )
    assert data.train.labels is not None and data.train.labels.tolist() == [0, 1, 1]
    assert data.blind[-1].labels is None and data.blind[-1].ids == [0, 1, 2]


def test_hub_labels_that_the_task_does_not_have_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"sentence": ["a", "b"], "label": [0, -1], "idx": [0, 1]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(rows))
    monkeypatch.setattr("eval.tasks.readers.prepare_hub", lambda: True)
    with pytest.raises(UserError, match=r"labels outside 0\.\.1"):
        read_hub_task(GLUE["sst2"])


def test_scored_examples_that_are_trained_on_are_counted_whatever_their_labels() -> None:
    source = GLUE["mrpc"].train
    train = Split(source, (["a  b", "c", "e"], ["d", "d", "f"]), np.array([0, 1, 0]))
    assert (
        seen_in_training(
            train, Split(source, (["a b", "c", "x"], ["d", "e", "f"]), np.array([1, 1, 0]))
        )
        == 1
    )


WSC: dict[str, Any] = {
    "text": "Mark told Pete lies about himself , which he should not",
    "idx": 0,
    "label": False,
    "target": {"span1_index": 2, "span1_text": "Pete", "span2_index": 8, "span2_text": "he"},
}
SUPERGLUE_ROWS: dict[str, list[dict[str, Any]]] = {
    "BoolQ": [
        {"question": "is w1 w2", "passage": "w1 -- w2 w3", "idx": 0, "label": True},
        {"question": "is w4 w5", "passage": "w6", "idx": 1, "label": False},
    ],
    "CB": [
        {"premise": "w1 w2", "hypothesis": "w3", "label": label}
        for label in ("contradiction", "neutral", "entailment")
    ],
    "RTE": [{"premise": "w1", "hypothesis": "w2", "label": "not_entailment", "idx": 0}],
    "WiC": [
        {
            "word": "w1",
            "sentence1": "w1 w2",
            "sentence2": "w3 w1",
            "idx": 0,
            "label": True,
            "start1": 0,
        }
    ],
    "WSC": [WSC],
}


@pytest.fixture
def superglue(tmp_path: Path) -> Path:
    for name, rows in SUPERGLUE_ROWS.items():
        (tmp_path / name).mkdir()
        for file in ("train.jsonl", "val.jsonl"):
            (tmp_path / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_superglues_official_layouts_are_read(superglue: Path) -> None:
    tasks, absent = tasks_in_folder(superglue, None, "superglue")
    assert [task.name for task in tasks] == list(SUPERGLUE) and not absent
    data = {task.name: read_task(superglue, task) for task in tasks}
    labels = {
        name: task_data.scored[0].labels.tolist()
        for name, task_data in data.items()
        if task_data.scored[0].labels is not None
    }
    assert labels == {
        "boolq": [1, 0],
        "cb": [1, 2, 0],
        "superglue_rte": [1],
        "wic": [1],
        "wsc": [0],
    }
    first = {
        name: tuple(column[0] for column in task_data.train.texts)
        for name, task_data in data.items()
    }
    assert first["boolq"] == ("is w1 w2", "w1 -- w2 w3") and first["wic"] == ("w1: w1 w2", "w3 w1")
    assert first["wsc"] == (
        WSC["text"],
        "Mark told Pete lies about himself , which Pete should not",
    )
    assert [t.name for t in tasks_in_folder(superglue, ("WiC", "cb"), "superglue")[0]] == [
        "cb",
        "wic",
    ]
    with pytest.raises(UserError, match=r"no SuperGLUE task found.*BoolQ/, CB/"):
        tasks_in_folder(superglue / "CB", None, "superglue")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("cb", '{"premise": "w1", "label": "neutral"}', "KeyError: 'hypothesis'"),
        (
            "wic",
            '{"word": null, "sentence1": "w1", "sentence2": "w2", "label": true}',
            "TypeError",
        ),
        (
            "cb",
            '{"premise": "w1", "hypothesis": "w2", "label": "maybe"}',
            "label 'maybe' is not one of entailment",
        ),
        ("cb", '{"premise": "w1", "hypo', "JSONDecodeError"),
        (
            "wsc",
            json.dumps({**WSC, "target": {**WSC["target"], "span2_index": 11}}),
            "span2_index 11 .* 11 words",
        ),
        ("superglue_rte", "[]", "TypeError"),
        (
            "superglue_rte",
            '{"premise": "\\ud800", "hypothesis": "w", "label": "entailment"}',
            "can't encode",
        ),
    ],
)
def test_a_broken_line_of_json_is_named(
    superglue: Path, name: str, line: str, message: str
) -> None:
    task = SUPERGLUE[name]
    path = superglue / task.title / "val.jsonl"
    path.write_text(path.read_text() + line + "\n")
    place = len(path.read_text().splitlines())
    is_refused(superglue, task, rf"{task.title}/val.jsonl:{place}: .*{message}")
