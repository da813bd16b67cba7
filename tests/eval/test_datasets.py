"""Every official layout is read; every deviation is one line naming file and line."""

import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.task_files import GLUE
from eval.tasks.datasets import Split, examples_sha256, in_one_order, seen_in_training
from eval.tasks.locate import read_task, tasks_in_folder
from eval.tasks.readers import read_hub_task

MNLI_TEXT = [
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse",
    "sentence1 sentence2",
]
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2"
# Headers of the official files: folder/file -> columns; CoLA's train and dev have none.
LAYOUTS: dict[str, str | None] = {
    "CoLA/train.tsv": None,
    "CoLA/dev.tsv": None,
    "CoLA/test.tsv": "index sentence",
    "SST-2/train.tsv": "sentence label",
    "SST-2/dev.tsv": "sentence label",
    "SST-2/test.tsv": "index sentence",
    "MRPC/train.tsv": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "MRPC/dev.tsv": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "MRPC/test.tsv": "index|#1 ID|#2 ID|#1 String|#2 String",
    "STS-B/train.tsv": f"{STSB} score",
    "STS-B/dev.tsv": f"{STSB} score",
    "STS-B/test.tsv": STSB,
    "QQP/train.tsv": "id qid1 qid2 question1 question2 is_duplicate",
    "QQP/dev.tsv": "id qid1 qid2 question1 question2 is_duplicate",
    "QQP/test.tsv": "id question1 question2",
    "MNLI/train.tsv": " ".join([*MNLI_TEXT, "label1 gold_label"]),
    "MNLI/dev_matched.tsv": " ".join([*MNLI_TEXT, "label1 label2 label3 label4 label5 gold_label"]),
    "MNLI/dev_mismatched.tsv": " ".join([*MNLI_TEXT, "label1 label2 label3 label4 label5 gold_label"]),
    "MNLI/test_matched.tsv": " ".join(MNLI_TEXT),
    "MNLI/test_mismatched.tsv": " ".join(MNLI_TEXT),
    "QNLI/train.tsv": "index question sentence label",
    "QNLI/dev.tsv": "index question sentence label",
    "QNLI/test.tsv": "index question sentence",
    "RTE/train.tsv": "index sentence1 sentence2 label",
    "RTE/dev.tsv": "index sentence1 sentence2 label",
    "RTE/test.tsv": "index sentence1 sentence2",
    "WNLI/train.tsv": "index sentence1 sentence2 label",
    "WNLI/dev.tsv": "index sentence1 sentence2 label",
    "WNLI/test.tsv": "index sentence1 sentence2",
    "diagnostic/diagnostic.tsv": "index sentence1 sentence2",
}
LABELS = {"label", "Quality", "score", "is_duplicate", "gold_label"}
ROWS = 5


def make_row(folder: str, columns: list[str], row: int) -> list[str]:
    """Field values of one row: a label that cycles, ids that count, texts with what readers stumble over."""
    task = next((t for t in GLUE.values() if t.train.folder == folder), GLUE["mnli"])
    label = f"{row % 6}.000" if task.regression else task.labels[row % len(task.labels)]
    fixed = dict.fromkeys(LABELS, label) | {"index": str(row), "id": str(row)}
    return [fixed.get(column, f'{column} {row} says "hello, naïve') for column in columns]


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """A folder with all official files, five rows each."""
    for name, header in LAYOUTS.items():
        columns = (
            ["source", "label", "mark", "sentence"] if header is None else header.split("|" if "|" in header else " ")
        )
        rows = [make_row(name.split("/")[0], columns, row) for row in range(ROWS)]
        lines = ([] if header is None else [columns]) + rows
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", GLUE)
def test_official_layout_is_read(glue: Path, name: str) -> None:
    task = GLUE[name]
    data = read_task(glue, task)
    assert [s.source for s in data.scored] == list(task.scored)
    assert [s.source for s in data.blind] == list(task.blind)
    for split in (data.train, *data.scored):
        expected = [float(r % 6) if task.regression else r % len(task.labels) for r in range(ROWS)]
        assert split.labels is not None and split.labels.tolist() == expected
    for split in (data.train, *data.scored, *data.blind):
        for column, texts in zip(task.text, split.texts, strict=True):
            assert texts == [f'{column} {r} says "hello, naïve' for r in range(ROWS)]
    assert all(s.labels is None and s.ids == list(range(ROWS)) for s in data.blind)
    assert data.subset and not data.absent


def test_all_tasks_of_the_folder_are_found(glue: Path) -> None:
    assert [t.name for t in tasks_in_folder(glue, None)[0]] == list(GLUE)
    tasks, absent = tasks_in_folder(glue, ["rte"])
    assert [t.name for t in tasks] == ["rte"] and set(absent) == set(GLUE) - {"rte"}


def test_absent_parts_are_named(glue: Path) -> None:
    (glue / "MNLI/dev_mismatched.tsv").unlink()
    (glue / "MNLI/test_matched.tsv").unlink()
    data = read_task(glue, GLUE["mnli"])
    assert [s.source.entry for s in data.scored] == ["mnli_matched"] and set(data.absent) == {"mnli_mismatched"}


def test_content_decides_the_hash(glue: Path) -> None:
    before = read_task(glue, GLUE["rte"]).sha256
    assert read_task(glue, GLUE["rte"]).sha256 == before
    edit(glue / "RTE/dev.tsv", 2, lambda line: line.replace("says", "said"))
    assert read_task(glue, GLUE["rte"]).sha256 != before


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


def test_rows_in_another_order_are_the_same_training_set(glue: Path) -> None:
    """File order is no seed: stored results stand, and a copy trains the same model."""
    path = glue / "RTE/train.tsv"
    before = in_one_order(read_task(glue, GLUE["rte"]))
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([header, *rows[::-1]]) + "\n", encoding="utf-8")
    data = read_task(glue, GLUE["rte"])
    assert data.sha256 != before.sha256 and in_one_order(data).sha256 == before.sha256
    assert examples_sha256(in_one_order(data).train) == examples_sha256(data.train)


def test_copies_of_a_data_set_have_one_hash(glue: Path) -> None:
    """Publishers order examples and spell white space as they like."""

    def found() -> str:
        data = read_task(glue, GLUE["rte"])
        return examples_sha256(data.train, *data.scored)

    before, path = found(), glue / "RTE/train.tsv"
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([header, *(row.replace(" ", "  ") for row in rows[::-1])]) + "\n", encoding="utf-8")
    assert found() == before
    edit(path, 2, lambda line: line.replace("says", "said"))
    assert found() != before


def test_byte_order_mark_and_carriage_returns_are_no_content(glue: Path) -> None:
    path = glue / "MRPC/train.tsv"
    before = read_task(glue, GLUE["mrpc"]).sha256
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_task(glue, GLUE["mrpc"]).sha256 == before


def test_unicode_line_separators_do_not_split_rows(glue: Path) -> None:
    edit(glue / "RTE/train.tsv", 3, lambda line: line.replace("says", "sa\u2028ys\x85"))
    assert len(read_task(glue, GLUE["rte"]).train) == ROWS


def edit(path: Path, line: int, change: object) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[line - 1] = change(lines[line - 1])  # type: ignore[operator]
    path.write_text("\n".join(lines), encoding="utf-8")


def drop_field(line: str) -> str:
    return line.rsplit("\t", 1)[0]


BROKEN = [
    ("RTE/train.tsv", 1, lambda s: s.replace("sentence2", "hypothesis"), r"train.tsv:1: .*label; sentence2 not"),
    ("RTE/dev.tsv", 4, drop_field, r"dev.tsv:4: expected 4 .*\(index, sentence1, sentence2, label\), found 3$"),
    ("RTE/dev.tsv", 6, drop_field, r"dev.tsv:6: expected 4 .*found 3; is the file cut short"),
    ("RTE/dev.tsv", 6, lambda s: s + "\n", r"dev.tsv:7: the line is empty; remove it"),
    ("CoLA/train.tsv", 1, lambda s: "\n" + s, r"train.tsv:1: the line is empty; remove it"),
    ("RTE/dev.tsv", 3, lambda s: s + "\textra", r"dev.tsv:3: .*found 5"),
    ("RTE/dev.tsv", 3, lambda s: drop_field(s) + "\tperhaps", r"dev.tsv:3: label 'perhaps' is not one of entailment"),
    ("CoLA/train.tsv", 2, lambda s: s.replace("\t1\t", "\t7\t"), r"train.tsv:2: label '7' is not one of 0, 1"),
    ("CoLA/train.tsv", 1, drop_field, r"train.tsv:1: expected 4 .*\(source, label, mark, sentence\), found 3"),
    ("STS-B/train.tsv", 3, lambda s: drop_field(s) + "\t5.5", r"train.tsv:3: score '5.5' is not a number from 0 to 5"),
    ("STS-B/train.tsv", 3, lambda s: drop_field(s) + "\tnan", r"train.tsv:3: score 'nan' is not a number"),
    ("RTE/test.tsv", 4, lambda s: "0" + s[1:], r"test.tsv:4: example number 0 follows 1; .*official order"),
    ("RTE/test.tsv", 3, lambda s: "7" + s[1:], r"test.tsv:4: example number 2 follows 7; .*official order"),
    ("RTE/test.tsv", 4, lambda s: "x" + s[1:], r"test.tsv:4: example number 'x' is not a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "line", "change", "message"), BROKEN)
def test_broken_file_gives_one_line_with_its_place(
    glue: Path, file: str, line: int, change: object, message: str
) -> None:
    edit(glue / file, line, change)
    task = next(t for t in GLUE.values() if t.train.folder == file.split("/")[0])
    with pytest.raises(UserError, match=message) as caught:
        read_task(glue, task)
    assert "\n" not in str(caught.value) and str(glue / file) in str(caught.value)


@pytest.mark.parametrize("file", ["CoLA/train.tsv", "STS-B/dev.tsv", "RTE/test.tsv"])
def test_a_file_cut_inside_its_last_field_is_noticed(glue: Path, file: str) -> None:
    """The fields are all there, only the end of the last one is not: a sentence or a score that still reads well."""
    path = glue / file
    path.write_bytes(path.read_bytes()[:-2])
    task = next(t for t in GLUE.values() if t.train.folder == file.split("/")[0])
    lines = len(path.read_bytes().split(b"\n"))
    with pytest.raises(UserError, match=rf"{path.name}:{lines}: the last line has no newline, .* cut short"):
        read_task(glue, task)


def test_wrong_encoding_names_the_line(glue: Path) -> None:
    path = glue / "SST-2/dev.tsv"
    path.write_bytes(path.read_text(encoding="utf-8").encode("latin-1"))
    with pytest.raises(UserError, match=r"dev.tsv:2: not UTF-8 \(byte 0xef\)"):
        read_task(glue, GLUE["sst2"])
    path.write_bytes("sentence\tlabel\nnaïve\t1\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"dev.tsv:1: not UTF-8 \(byte 0xff\)"):
        read_task(glue, GLUE["sst2"])


@pytest.mark.parametrize("content", [b"", b"sentence\tlabel\n"])
def test_empty_file_is_refused(glue: Path, content: bytes) -> None:
    (glue / "SST-2/train.tsv").write_bytes(content)
    with pytest.raises(UserError, match=r"SST-2/train.tsv: (the file is empty|no examples)"):
        read_task(glue, GLUE["sst2"])


def test_a_link_that_leads_nowhere_is_no_absent_file(glue: Path) -> None:
    (glue / "RTE/test.tsv").unlink()
    (glue / "RTE/test.tsv").symlink_to("gone.tsv")
    with pytest.raises(UserError, match=r"RTE/test\.tsv: is a link to gone\.tsv, which is not there"):
        read_task(glue, GLUE["rte"])


def dead(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.symlink_to("gone")
    return place


@pytest.mark.parametrize("wanted", [None, ["rte"]])
def test_a_task_folder_that_is_a_dead_link_is_named(glue: Path, wanted: list[str] | None) -> None:
    dead(glue / "RTE")
    with pytest.raises(UserError, match=r"RTE: is a link to gone, which is not there"):
        for task in tasks_in_folder(glue, wanted)[0]:
            read_task(glue, task)


def test_other_folders_that_are_dead_links_are_named(glue: Path) -> None:
    """The diagnostic set has no task of its own, and none of the tasks is there if the data folder is not."""
    dead(glue / "diagnostic")
    with pytest.raises(UserError, match=r"diagnostic: is a link to gone"):
        read_task(glue, GLUE["mnli"])
    with pytest.raises(UserError, match=r"data: is a link to gone"):
        tasks_in_folder(dead(glue / "data"), None)


def test_missing_file_names_what_is_needed(glue: Path) -> None:
    (glue / "CoLA/dev.tsv").unlink()
    with pytest.raises(UserError, match=r"CoLA/dev.tsv: no such file; CoLA needs train.tsv, dev.tsv"):
        read_task(glue, GLUE["cola"])


def test_wrong_folder_names_what_is_expected(glue: Path) -> None:
    with pytest.raises(UserError, match=r"no GLUE task found; expected .*CoLA/, SST-2/"):
        tasks_in_folder(glue / "CoLA", None)
    with pytest.raises(UserError, match="no such folder"):
        tasks_in_folder(glue / "nowhere", None)


def test_known_broken_rows_of_qqp_are_left_out_and_counted(glue: Path) -> None:
    edit(glue / "QQP/train.tsv", 3, drop_field)
    data = read_task(glue, GLUE["qqp"])
    assert len(data.train) == ROWS - 1 and data.train.skipped == 1
    edit(glue / "QQP/dev.tsv", 3, drop_field)
    with pytest.raises(UserError, match=r"QQP/dev.tsv:3"):
        read_task(glue, GLUE["qqp"])


@pytest.mark.parametrize("name", ["cola", "stsb", "mnli", "qqp"])
def test_hub_rows_become_the_same_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = GLUE[name]

    def load(path: str, config: str, split: str) -> datasets.Dataset:
        assert path == "nyu-mll/glue"
        test = split.startswith("test")
        rows = {column: [f"{column} {config} {split} {i}" for i in range(3)] for column in task.hub_text}
        return datasets.Dataset.from_dict({**rows, "label": [-1] * 3 if test else [0, 1, 1], "idx": [0, 1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("eval.tasks.readers.prepare_hub", lambda: True)
    data = read_hub_task(task)
    assert [s.source for s in (data.train, *data.scored, *data.blind)] == [task.train, *task.scored, *task.blind]
    assert data.train.texts[0][2] == f"{task.hub_text[0]} {task.train.hub_config} train 2"
    assert data.train.labels is not None and data.train.labels.tolist() == [0, 1, 1]
    assert data.blind[-1].labels is None and data.blind[-1].ids == [0, 1, 2]


def test_scored_examples_that_are_trained_on_are_counted_whatever_their_labels() -> None:
    source = GLUE["mrpc"].train
    train = Split(source, (["a  b", "c", "e"], ["d", "d", "f"]), np.array([0, 1, 0]))
    assert seen_in_training(train, Split(source, (["a b", "c", "x"], ["d", "e", "f"]), np.array([1, 1, 0]))) == 1
