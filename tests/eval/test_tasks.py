"""The task table agrees with what GLUE defines, stated here independently."""

import pytest

from cramming.config import UserError
from eval.tasks import AVERAGES, AX, ENTRIES, TASKS, find_tasks

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
        t.name: (t.train.examples, [s.examples for s in t.scored], [s.examples for s in t.blind])
        for t in TASKS.values()
    }
    assert found == SIZES
    assert [t.train.folder for t in TASKS.values()] == FOLDERS
    assert AX.examples == 1104 and AX in TASKS["mnli"].blind


def test_labels_are_in_the_official_order() -> None:
    assert TASKS["mnli"].labels == ("entailment", "neutral", "contradiction")
    for name in ("rte", "qnli"):
        assert TASKS[name].labels == ("entailment", "not_entailment")
    for name in ("cola", "sst2", "mrpc", "qqp", "wnli"):
        assert TASKS[name].labels == ("0", "1")
    assert TASKS["stsb"].regression and TASKS["stsb"].outputs == 1 and TASKS["stsb"].score_range == (0, 5)


def test_main_metrics_are_the_papers() -> None:
    for task in TASKS.values():
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
