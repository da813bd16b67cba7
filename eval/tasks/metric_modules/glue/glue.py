"""GLUE's metrics as a Hugging Face `evaluate` module: the configuration name is the task (`cola`, `mrpc`, ...).

`evaluate.load("<folder of this file>", "mrpc")` works without a network. `evaluate` copies this file into its module
cache ($HF_HOME or $HF_MODULES_CACHE must be writable; the package itself need not be) and runs the copy, so the numbers
come from the installed `eval.tasks.metrics`. Its parser of imports wants one import per line.
"""

import datasets
import evaluate
import numpy as np

from cramming.data.task_files import GLUE
from eval.tasks.metrics import score

_DESCRIPTION = "Metrics of a GLUE task; NaN where a metric is not defined for the given predictions and labels."
_CITATION = "Wang et al., GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding, 2018"
_INPUTS = """
    predictions: class numbers (scores for stsb)
    references: class numbers (scores for stsb)
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class Glue(evaluate.Metric):
    """One metric object per task."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in GLUE:
            raise ValueError(
                f"unknown GLUE task {self.config_name!r}; the tasks are: {', '.join(GLUE)}"
            )
        kind = "float64" if GLUE[self.config_name].regression else "int64"
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value(kind), "references": datasets.Value(kind)}
            ),
            format="numpy",
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        return score(
            GLUE[self.config_name].metrics, np.asarray(predictions), np.asarray(references)
        ).values
