"""SuperGLUE's official layouts are read; every deviation is one line naming file and line; scores stand beside GLUE."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.task_files import SUPERGLUE
from eval.tasks.locate import read_task, tasks_in_folder

ROWS: dict[str, list[dict[str, Any]]] = {
    "BoolQ": [
        {"question": "is w1 w2", "passage": "w1 -- w2 w3", "idx": 0, "label": True},
        {"question": "is w4 w5", "passage": "w6", "idx": 1, "label": False},
    ],
    "CB": [
        {"premise": "w1 w2", "hypothesis": "w3", "label": label, "idx": i}
        for i, label in enumerate(("contradiction", "neutral", "entailment"))
    ],
    "RTE": [{"premise": "w1", "hypothesis": "w2", "label": "not_entailment", "idx": 0}],
    "WiC": [{"word": "w1", "sentence1": "w1 w2", "sentence2": "w3 w1", "idx": 0, "label": True, "start1": 0}],
    "WSC": [
        {
            "text": "Mark told Pete lies about himself , which he should not",
            "idx": 0,
            "label": False,
            "target": {"span1_index": 2, "span1_text": "Pete", "span2_index": 8, "span2_text": "he"},
        }
    ],
}
WSC_LINE = json.dumps(ROWS["WSC"][0])
LABELS = {"BoolQ": [1, 0], "CB": [1, 2, 0], "RTE": [1], "WiC": [1], "WSC": [0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        (tmp_path / name).mkdir()
        for file in ("train.jsonl", "val.jsonl"):
            (tmp_path / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_official_layouts_are_read(folder: Path) -> None:
    tasks, absent = tasks_in_folder(folder, None, "superglue")
    assert [task.name for task in tasks] == list(SUPERGLUE) and not absent
    for task in tasks:
        data = read_task(folder, task)
        labels = data.scored[0].labels
        assert labels is not None and labels.tolist() == LABELS[task.title]
        assert data.subset and len(data.train.texts) == 2
    boolq, wic, wsc = (read_task(folder, SUPERGLUE[name]).train.texts for name in ("boolq", "wic", "wsc"))
    assert (boolq[0][0], boolq[1][0]) == ("is w1 w2", "w1 -- w2 w3")
    assert (wic[0][0], wic[1][0]) == ("w1: w1 w2", "w3 w1")
    assert wsc[1][0] == "Mark told Pete lies about himself , which Pete should not"


def test_sizes_are_the_official_ones() -> None:
    sizes = {t.title: (t.train.examples, t.scored[0].examples) for t in SUPERGLUE.values()}
    official = {"BoolQ": (9427, 3270), "CB": (250, 56), "RTE": (2490, 277), "WiC": (5428, 638), "WSC": (554, 104)}
    assert sizes == official


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("CB", '{"premise": "w1", "label": "neutral"}', "hypothesis not found"),
        ("CB", '{"premise": "w1", "hypothesis": "w2", "label": "maybe"}', "label 'maybe' is not one of entailment"),
        ("CB", '{"premise": "w1", "hypo', "not a line of JSON .*cut short"),
        ("BoolQ", '{"question": "w1", "passage": "w2", "label": 3}', "label '3' is not one of false, true"),
        ("WSC", '{"text": "w1", "label": true, "target": {}}', "a field is not as WSC has it"),
        (
            "WSC",
            WSC_LINE.replace('"span2_index": 8', '"span2_index": 11'),
            "span2_index 11 .* outside the text's 11 words",
        ),
        ("WSC", WSC_LINE.replace('"span2_index": 8', '"span2_index": -1'), "span2_index -1 .* outside"),
        ("RTE", "[]", "premise, hypothesis, label not found"),
    ],
)
def test_a_broken_line_is_named(folder: Path, name: str, line: str, message: str) -> None:
    path = folder / name / "val.jsonl"
    path.write_text(path.read_text() + line + "\n")
    place = len(path.read_text().splitlines())
    task = next(task for task in SUPERGLUE.values() if task.title == name)
    with pytest.raises(UserError, match=rf"{name}/val.jsonl:{place}: .*{message}") as caught:
        read_task(folder, task)
    assert "\n" not in str(caught.value)


def test_wrong_encoding_missing_and_empty_files_are_named(folder: Path) -> None:
    (folder / "WiC/val.jsonl").write_bytes(json.dumps(ROWS["WiC"][0]).encode() + b"\n\xe9\n")
    with pytest.raises(UserError, match=r"WiC/val\.jsonl:2: not UTF-8"):
        read_task(folder, SUPERGLUE["wic"])
    (folder / "CB/train.jsonl").unlink()
    with pytest.raises(UserError, match=r"CB/train\.jsonl: no such file"):
        read_task(folder, SUPERGLUE["cb"])
    (folder / "RTE/train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"RTE/train\.jsonl: no examples"):
        read_task(folder, SUPERGLUE["superglue_rte"])
    with pytest.raises(UserError, match="unknown task 'copa'"):
        tasks_in_folder(folder, ("copa",), "superglue")
    with pytest.raises(UserError, match="no SuperGLUE task found"):
        tasks_in_folder(folder / "CB", None, "superglue")
    with pytest.raises(UserError, match=r"nowhere: no such folder; it should hold BoolQ/, CB/"):
        tasks_in_folder(folder / "nowhere", None, "superglue")
    assert [t.name for t in tasks_in_folder(folder, ("WiC", "cb"), "superglue")[0]] == ["cb", "wic"]
    assert np.array_equal(read_task(folder, SUPERGLUE["wsc"]).train.labels, [0])


def test_links_that_lead_nowhere_are_named(folder: Path) -> None:
    (folder / "CB/val.jsonl").unlink()
    (folder / "CB/val.jsonl").symlink_to("gone")
    with pytest.raises(UserError, match=r"CB/val\.jsonl: is a link to gone, which is not there"):
        read_task(folder, SUPERGLUE["cb"])
    shutil.rmtree(folder / "WSC")
    (folder / "WSC").symlink_to("gone")
    with pytest.raises(UserError, match=r"WSC: is a link to gone, which is not there"):
        tasks_in_folder(folder, None, "superglue")
