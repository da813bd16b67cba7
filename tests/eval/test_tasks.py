"""The task table agrees with what GLUE defines, stated here independently; and, where it is, with the data itself.

CRAMMING_GLUE_DATA may name a folder with official files; the tests of real data are skipped without it.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from cramming.config import UserError
from cramming.data.task_files import AX, ENTRIES, GLUE, OFFICIAL_SHA256
from eval.tasks.datasets import Split, examples_sha256
from eval.tasks.locate import find_tasks, read_task, tasks_in_folder
from eval.tasks.suites import AVERAGES

# Splits of nyu-mll/glue: (train, each dev set, each test set).
SIZES = {
    "cola": (8551, [1043], [1063]),
    "sst2": (67349, [872], [1821]),
    "mrpc": (3668, [408], [1725]),
    "stsb": (5749, [1500], [1379]),
    "qqp": (363846, [40430], [390965]),
    "mnli": (392702, [9815, 9832], [9796, 9847, 1104]),
    "qnli": (104743, [5463], [5463]),
    "rte": (2490, [277], [3000]),
    "wnli": (635, [71], [146]),
}
FOLDERS = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"]
# The cramming paper's metrics.
MAIN = {"cola": "matthews_correlation", "mrpc": "f1", "qqp": "f1", "stsb": "pearson"}


def test_sizes_and_folders_are_the_official_ones() -> None:
    found = {
        t.name: (t.train.examples, [s.examples for s in t.scored], [s.examples for s in t.blind]) for t in GLUE.values()
    }
    assert found == SIZES
    assert [t.train.folder for t in GLUE.values()] == FOLDERS
    assert AX.examples == 1104 and AX in GLUE["mnli"].blind


def test_labels_are_in_the_official_order() -> None:
    assert GLUE["mnli"].labels == ("entailment", "neutral", "contradiction")
    for name in ("rte", "qnli"):
        assert GLUE[name].labels == ("entailment", "not_entailment")
    for name in ("cola", "sst2", "mrpc", "qqp", "wnli"):
        assert GLUE[name].labels == ("0", "1")
    assert GLUE["stsb"].regression and GLUE["stsb"].outputs == 1 and GLUE["stsb"].score_range == (0, 5)


def test_main_metrics_are_the_papers() -> None:
    for task in GLUE.values():
        assert task.main_metric == MAIN.get(task.name, "accuracy")
        assert task.main_metric in task.metrics


def test_averages_count_what_they_say() -> None:
    glue = AVERAGES["glue"]
    assert len(glue["avg9"].entries) == 9 and len(glue["avg8"].entries) == 8
    assert set(glue["avg9"].entries) - set(glue["avg8"].entries) == {"mnli_mismatched"}
    assert set(glue["avg9"].entries) == set(ENTRIES) - {"wnli"}
    assert len(AVERAGES["embedded"]["embedded"].entries) == 8
    for average in (*glue.values(), *AVERAGES["embedded"].values()):
        assert set(average.entries) <= set(ENTRIES) and "WNLI" in average.definition


def test_tasks_are_found_by_name_or_title_in_table_order() -> None:
    assert [t.name for t in find_tasks(["rte", "SST-2", "cola"])] == ["cola", "sst2", "rte"]
    with pytest.raises(UserError, match=r"'snli'.*cola, sst2"):
        find_tasks(["snli"])


REAL = Path(os.environ.get("CRAMMING_GLUE_DATA", "no such folder"))
# Share of each label in the official development sets, in the order of the table: a swapped label would show.
DEV_LABELS = {"cola": [322, 721], "sst2": [428, 444], "mrpc": [129, 279], "rte": [146, 131], "qnli": [2702, 2761]}
DEV_LABELS |= {"mnli": [3479, 3123, 3213], "qqp": [25545, 14885], "wnli": [40, 31]}


@pytest.mark.skipif(not REAL.is_dir(), reason="CRAMMING_GLUE_DATA names no folder with GLUE's official files")
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
            assert len(blind) == blind.source.examples and blind.ids == list(range(len(blind))), blind.source
        assert all(text.strip() for split in (data.train, dev) for column in split.texts for text in column)
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
