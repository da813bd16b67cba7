"""Published results, each with its source (references.yaml), for the rows beneath one's own.

Every number stands in a paper, a model card or a public repository's thread; one that was quoted by others is marked as
second-hand. Rows of `same_protocol` follow this suite's (at most 5 epochs, one hyperparameter set for all tasks,
development set). Rows of `other_protocols` do not (tuning per task, intermediate MNLI training, test set, or another
average), so they are printed apart, for orientation only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from cramming.data.suites import AVERAGES
from cramming.scores import mean_of
from eval.report.format import Score

# The entries of avg-9 in the order in which the cramming paper prints them.
NINE = ("mnli_matched", "mnli_mismatched", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
EIGHT = AVERAGES["glue"]["avg8"].entries

PROTOCOL = "GLUE dev, at most 5 epochs, one hyperparameter set for all tasks"


@dataclass(frozen=True)
class Reference:
    """Published row of the same protocol, in percent; `scores` is empty if only the average is published.

    The average is the published number. If all task scores are published, it is what this suite's definition gives.
    """

    title: str
    source: str
    avg9: float
    scores: Mapping[str, float]
    spread: float | None = None
    note: str = ""

    @property
    def avg8(self) -> float | None:
        """Average with one MNLI entry, computed from the task scores; None if they are not published."""
        return mean_of([self.scores.get(entry) for entry in EIGHT])

    def cell(self, column: str) -> Score:
        """Return the score of an average or an entry."""
        if column == "avg9":
            return Score(self.avg9, self.spread)
        return Score(self.avg8 if column == "avg8" else self.scores.get(column))


@dataclass(frozen=True)
class OtherProtocol:
    """Published row of another protocol: an average over 8 tasks that compares with no average of this suite."""

    title: str
    parameters: str
    cost: str
    avg8: float
    source: str
    scores: Mapping[str, float]
    note: str = ""


_PUBLISHED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
REFERENCES = tuple(
    Reference(**{**row, "scores": dict(zip(NINE, row.get("scores", ())))})
    for row in _PUBLISHED["same_protocol"]
)
OTHER_PROTOCOLS = tuple(
    OtherProtocol(**{**row, "scores": dict(zip(EIGHT, row.get("scores", ())))})
    for row in _PUBLISHED["other_protocols"]
)
