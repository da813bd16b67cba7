"""The metrics are the library's, and say so where there is nothing to measure."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from cramming.data.task_files import TASKS
from eval.tasks.metrics import METRICS, MODULE_FOLDER, score

REFERENCE = {
    "matthews_correlation": lambda p, y: sklearn.metrics.matthews_corrcoef(y, p),
    "accuracy": lambda p, y: sklearn.metrics.accuracy_score(y, p),
    "f1": lambda p, y: sklearn.metrics.f1_score(y, p, zero_division=np.nan),
    "f1_macro": lambda p, y: sklearn.metrics.f1_score(y, p, average="macro"),
    "accuracy_f1": lambda p, y: (REFERENCE["accuracy"](p, y) + REFERENCE["f1_macro"](p, y)) / 2,
    "pearson": lambda p, y: scipy.stats.pearsonr(p, y).statistic,
    "spearmanr": lambda p, y: scipy.stats.spearmanr(p, y).statistic,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_every_small_input_equals_the_reference_or_says_why_not(name: str) -> None:
    """All pairs of up to three labels and predictions of two classes."""
    for size in (1, 2, 3):
        cells = list(itertools.product((0, 1), repeat=size))
        for predictions, labels in itertools.product(map(np.array, cells), repeat=2):
            metrics = score([name], predictions, labels)
            value = metrics.values[name]
            undefined = (
                name in ("pearson", "spearmanr", "matthews_correlation")
                and len(set(labels.tolist())) == 1
            )
            undefined |= name in ("pearson", "spearmanr") and len(set(predictions.tolist())) == 1
            undefined |= name == "f1" and not (predictions.any() or labels.any())
            assert math.isnan(value) == undefined == bool(metrics.problems)
            if not undefined:
                assert value == pytest.approx(REFERENCE[name](predictions, labels), abs=1e-12)


def test_values_counted_by_hand() -> None:
    """Three classes, ties, and numbers whose squares are none."""
    predictions, labels = np.array([0, 1, 1, 1, 2, 0]), np.array([0, 0, 1, 1, 2, 2])
    metrics = score(
        ["accuracy", "f1_macro", "accuracy_f1", "matthews_correlation"], predictions, labels
    ).values
    macro = (1 / 2 + 4 / 5 + 2 / 3) / 3
    expected = [4 / 6, macro, (4 / 6 + macro) / 2, 12 / math.sqrt(22 * 24)]
    assert list(metrics.values()) == pytest.approx(expected, abs=1e-12)
    tied, labels = np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0, 4.0])
    for scale in (1.0, 1e150, 1e-150):
        values = score(["pearson", "spearmanr"], scale * tied, labels).values
        assert list(values.values()) == pytest.approx(
            [3 / math.sqrt(10), 4.5 / math.sqrt(4.5 * 5)], abs=1e-12
        )


def test_undefined_values_come_with_a_reason_and_no_number() -> None:
    constant = score(("pearson", "spearmanr"), np.full(5, 2.5), np.arange(5.0))
    assert all(math.isnan(v) for v in constant.values.values())
    assert constant.problems == ["pearson, spearmanr undefined: all predictions are 2.5"]
    one_class = score(("matthews_correlation", "accuracy"), np.ones(5, int), np.ones(5, int))
    assert (
        math.isnan(one_class.values["matthews_correlation"]) and one_class.values["accuracy"] == 1
    )
    assert "all labels are 1" in one_class.problems[0]
    diverged = score(("f1", "accuracy"), np.array([1.0, np.nan]), np.array([1, 0]))
    assert all(math.isnan(v) for v in diverged.values.values())
    assert diverged.problems == ["1 of 2 predictions are not finite"]
    assert math.isnan(score(("accuracy",), np.array([]), np.array([])).values["accuracy"])
    noted = score(("matthews_correlation", "accuracy"), np.ones(4), np.array([0, 1, 1, 1]))
    assert noted.values == {"matthews_correlation": 0.0, "accuracy": 0.75}
    assert noted.notes == ["all predictions are 1"] and not noted.problems


def test_evaluate_module_works_offline_and_agrees(tmp_path: Path) -> None:
    script = f"""
import evaluate
import numpy as np
from eval.tasks.metrics import score
from cramming.data.task_files import TASKS
random = np.random.default_rng(0)
for name in ("cola", "mrpc", "stsb"):
    task = TASKS[name]
    labels, predictions = random.integers(0, max(2, task.outputs), (2, 50)) * (0.5 if task.regression else 1)
    metric = evaluate.load({str(MODULE_FOLDER)!r}, name)
    metric.add_batch(predictions=predictions[:20], references=labels[:20])
    metric.add_batch(predictions=predictions[20:], references=labels[20:])
    assert metric.compute() == score(task.metrics, predictions, labels).values, name
"""
    environment = os.environ | {
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("HF_MODULES_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert set(METRICS) == {m for t in TASKS.values() for m in t.metrics}
