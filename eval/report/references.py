"""Published results, each with its source (references.yaml), for the rows beneath one's own.

Every number stands in a paper, a model card or a public repository's thread; one that was quoted by others is marked as
second-hand. Rows of `same_protocol` follow this suite's (at most 5 epochs, one hyperparameter set for all tasks,
development set). Rows of `other_protocols` do not (tuning per task, intermediate MNLI training, test set, or another
average), so they are printed apart, for orientation only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from cramming.data.suites import AVERAGES
from cramming.scores import mean_of
from eval.report.format import Score, join_words

# The entries of avg-9 in the order in which the cramming paper prints them.
NINE = ("mnli_matched", "mnli_mismatched", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
EIGHT = AVERAGES["glue"]["avg8"].entries

PROTOCOL = "GLUE dev, at most 5 epochs, one hyperparameter set for all tasks"


@dataclass(frozen=True)
class Reference:
    """Published row, in percent; `scores` is empty if only an average is published.

    An average is the published number, or what this suite's definition gives if all task scores are published. That of
    another protocol compares with no average of this suite. `spread`: standard deviation of avg-9.
    """

    title: str
    source: str
    scores: Mapping[str, float]
    avg9: float | None = None
    avg8: float | None = None
    spread: float | None = None
    parameters: str = ""
    cost: str = ""
    note: str = ""

    @property
    def detail(self) -> str:
        """Source and note."""
        return join_words(self.source, self.note, separator="; ")

    def cell(self, column: str) -> Score:
        """Return the score of an average or an entry."""
        if column == "avg9":
            return Score(self.avg9, self.spread)
        return Score(self.avg8 if column == "avg8" else self.scores.get(column))


def _read(section: str, entries: Sequence[str]) -> tuple[Reference, ...]:
    """Return the rows of a section of the file, whose scores have the order of `entries`."""
    rows = []
    for row in _PUBLISHED[section]:
        scores = dict(zip(entries, row.get("scores", ())))
        computed = mean_of([scores.get(entry) for entry in EIGHT])
        rows.append(Reference(**{"avg8": computed, **row, "scores": scores}))
    return tuple(rows)


_PUBLISHED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
REFERENCES = _read("same_protocol", NINE)
OTHER_PROTOCOLS = _read("other_protocols", EIGHT)
