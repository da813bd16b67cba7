"""The suites of tasks, and the averages that a leaderboard prints: here is what "the GLUE average" means.

The nine entries of avg-9 and their metrics are the cramming paper's (Geiping and Goldstein 2022, section 5). The single
tasks, with their files and metrics, are rows of cramming/data/task_files.py. cramming/scores.py takes the mean; the
report reads it from the record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cramming.data.task_files import GLUE, SUPERGLUE, Task

SuiteName = Literal["glue", "embedded", "superglue"]
SourceName = Literal["local", "hub", "embedded", "superglue"]
SUITE_OF: dict[SourceName, SuiteName] = {
    "local": "glue",
    "hub": "glue",
    "embedded": "embedded",
    "superglue": "superglue",
}


@dataclass(frozen=True)
class Average:
    """A mean over entries, each the median over seeds of the entry's main metric times 100, and what it is in words."""

    entries: tuple[str, ...]
    definition: str


@dataclass(frozen=True)
class Suite:
    """Tasks that are scored together.

    A `ranked` suite is checked by rules and listed in a leaderboard. `official` data sets have official sizes.
    """

    title: str
    tasks: Mapping[str, Task]
    averages: dict[str, Average]
    ranked: bool = True
    official: bool = True


_EIGHT = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli_matched", "qnli", "rte")
_NINE = (*_EIGHT[:6], "mnli_mismatched", *_EIGHT[6:])
_METRICS = (
    "CoLA (Matthews correlation), SST-2 (accuracy), MRPC (F1), STS-B (Pearson correlation), QQP (F1), "
    "{mnli} (accuracy), QNLI (accuracy), RTE (accuracy); "
    "each is the median over seeds on the dev set, times 100; WNLI and AX are not counted"
)

SUITES: dict[SuiteName, Suite] = {
    "glue": Suite(
        "GLUE",
        GLUE,
        {
            "avg9": Average(
                _NINE,
                "mean of nine entries: "
                + _METRICS.format(mnli="MNLI-m and MNLI-mm as two entries"),
            ),
            "avg8": Average(_EIGHT, "mean of eight entries: " + _METRICS.format(mnli="MNLI-m")),
        },
    ),
    "embedded": Suite(
        "GLUE",  # the same layouts, columns and metrics
        GLUE,
        {
            "embedded": Average(
                _EIGHT,
                f"mean of the eight embedded tasks, which have the types of {_METRICS.format(mnli='MNLI-m')};"
                " generated data, not comparable with GLUE",
            )
        },
        official=False,
    ),
    "superglue": Suite(
        "SuperGLUE",
        SUPERGLUE,
        {
            "superglue5": Average(
                tuple(SUPERGLUE),
                "mean of five of SuperGLUE's eight tasks: BoolQ (accuracy), CB (mean of accuracy and macro F1), RTE,"
                " WiC and WSC (accuracy); each is the median over seeds on the val set, times 100; not the official"
                " SuperGLUE score",
            )
        },
        ranked=False,
    ),
}

AVERAGES: dict[str, dict[str, Average]] = {
    name: s.averages for name, s in SUITES.items() if s.ranked
}
