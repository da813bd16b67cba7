"""The task table agrees with what GLUE and SuperGLUE define, stated here independently; and with the data itself.

CRAMMING_GLUE_DATA may name a folder with official files; the test of real data is skipped without it.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.suites import AVERAGES
from cramming.data.task_files import AX, ENTRIES, GLUE, OFFICIAL_SHA256, SUPERGLUE
from eval.tasks.datasets import Split, examples_sha256
from eval.tasks.locate import find_tasks, read_task, tasks_in_folder

# Folder and splits of nyu-mll/glue: (train, each dev set, each test set); and of SuperGLUE: (train, val).
SIZES = {
    "cola": ("CoLA", 8551, [1043], [1063]),
    "sst2": ("SST-2", 67349, [872], [1821]),
    "mrpc": ("MRPC", 3668, [408], [1725]),
    "stsb": ("STS-B", 5749, [1500], [1379]),
    "qqp": ("QQP", 363846, [40430], [390965]),
    "mnli": ("MNLI", 392702, [9815, 9832], [9796, 9847, 1104]),
    "qnli": ("QNLI", 104743, [5463], [5463]),
    "rte": ("RTE", 2490, [277], [3000]),
    "wnli": ("WNLI", 635, [71], [146]),
    "boolq": ("BoolQ", 9427, [3270], []),
    "cb": ("CB", 250, [56], []),
    "superglue_rte": ("RTE", 2490, [277], []),
    "wic": ("WiC", 5428, [638], []),
    "wsc": ("WSC", 554, [104], []),
}
# The cramming paper's metrics.
MAIN = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "pearson"}


def test_sizes_labels_and_metrics_are_the_official_ones() -> None:
    official = {
        t.name: (
            t.train.folder,
            t.train.examples,
            [s.examples for s in t.scored],
            [s.examples for s in t.blind],
        )
        for t in (*GLUE.values(), *SUPERGLUE.values())
    }
    assert official == SIZES and AX in GLUE["mnli"].blind
    labels = dict.fromkeys(("cola", "sst2", "mrpc", "qqp", "wnli"), ("0", "1")) | {"stsb": ()}
    labels |= dict.fromkeys(("rte", "qnli"), ("entailment", "not_entailment"))
    assert {t.name: t.labels for t in GLUE.values()} == {
        **labels,
        "mnli": ("entailment", "neutral", "contradiction"),
    }
    assert (
        GLUE["stsb"].regression and GLUE["stsb"].outputs == 1 and GLUE["stsb"].score_range == (0, 5)
    )
    assert {t.name: t.main_metric for t in GLUE.values()} == dict.fromkeys(GLUE, "accuracy") | MAIN


def test_averages_count_what_they_say() -> None:
    nine, eight = (set(AVERAGES["glue"][name].entries) for name in ("avg9", "avg8"))
    assert (
        len(nine) == 9 and nine - eight == {"mnli_mismatched"} and nine == set(ENTRIES) - {"wnli"}
    )
    assert set(AVERAGES["embedded"]["embedded"].entries) == eight
    assert all(
        "WNLI" in average.definition for suite in AVERAGES.values() for average in suite.values()
    )


def test_tasks_are_found_by_name_or_title_in_table_order() -> None:
    assert [t.name for t in find_tasks(["rte", "SST-2", "cola"])] == ["cola", "sst2", "rte"]
    with pytest.raises(UserError, match=r"unknown task snli.*cola, sst2"):
        find_tasks(["snli"])


REAL = Path(os.environ.get("CRAMMING_GLUE_DATA", "no such folder"))
# Share of each label in the official development sets, in the order of the table: a swapped label would show.
DEV_LABELS = {
    "cola": [322, 721],
    "sst2": [428, 444],
    "mrpc": [129, 279],
    "rte": [146, 131],
    "qnli": [2702, 2761],
}
DEV_LABELS |= {"mnli": [3479, 3123, 3213], "qqp": [25545, 14885], "wnli": [40, 31]}


@pytest.mark.skipif(
    not REAL.is_dir(), reason="CRAMMING_GLUE_DATA names no folder with GLUE's official files"
)
def test_the_real_files_have_the_tables_columns_labels_and_sizes() -> None:
    tasks, _ = tasks_in_folder(REAL, None)
    for task in tasks:
        data = read_task(REAL, task)
        dev = data.scored[0]
        assert len(dev) == task.scored[0].examples, task.name
        assert len(data.train) == task.train.examples or data.subset, task.name
        if (official := OFFICIAL_SHA256.get(task.name)) and not data.subset:
            assert examples_sha256(data.train, dev) == official, task.name
        for blind in data.blind:
            assert len(blind) == blind.source.examples and blind.ids == list(range(len(blind))), (
                blind.source
            )
        assert all(
            text.strip() for split in (data.train, dev) for column in split.texts for text in column
        )
        assert dev.labels is not None
        if task.regression:
            assert dev.labels.min() == 0 and dev.labels.max() == 5
        else:
            counts = np.bincount(dev.labels, minlength=task.outputs).tolist()
            assert counts == DEV_LABELS[task.name], (task.name, counts)
            assert _first_with_label(data.train, 0) != _first_with_label(data.train, 1)


def _first_with_label(split: Split, label: int) -> tuple[str, ...]:
    assert split.labels is not None
    place = int(np.flatnonzero(split.labels == label)[0])
    return tuple(column[place] for column in split.texts)
