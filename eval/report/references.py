"""Published results, each with its source (references.yaml), to hang beneath one's own rows.

Only numbers that stand in a paper, a model card or a public repository's thread are there; a number that somebody else
quotes is marked as second-hand. `same_protocol` follows this suite's (at most 5 epochs, one hyperparameter set for all
tasks, development set), so its rows may stand under a run's own row. `other_protocols` do not (tuning per task,
intermediate MNLI training, test set, or another average), and are printed apart, for orientation only.

A row's avg-9 is the published number. Where all task scores are published it must be what this suite's definition gives
(a test recomputes it); avg-8 is not published for these rows and is computed here, by this suite's definition.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from cramming.data.suites import AVERAGES
from cramming.scores import mean_of

# The entries of avg-9 in the order in which the cramming paper prints them.
NINE = ("mnli_matched", "mnli_mismatched", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
EIGHT = AVERAGES["glue"]["avg8"].entries

PROTOCOL = "GLUE dev, at most 5 epochs, one hyperparameter set for all tasks"


@dataclass(frozen=True)
class Reference:
    """A published row of the same protocol, in percent; `scores` is empty where only the average is published."""

    title: str
    source: str
    avg9: float
    scores: Mapping[str, float]
    spread: float | None = None
    note: str = ""

    @property
    def avg8(self) -> float | None:
        """The average with one MNLI entry, computed from the task scores; None where they are not published."""
        return mean_of([self.scores.get(entry) for entry in EIGHT])


@dataclass(frozen=True)
class OtherProtocol:
    """A published row of another protocol: an average over 8 tasks that cannot be compared with the table above."""

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
