"""The record as a tree of frozen dataclasses: what a run's record.json says, read once.

A record may come from another machine, an older version, an interrupted run or an editor. So reading is tolerant: a
value that is missing or of another kind than the annotation says becomes None (a list, table or section: empty), and
`Record.problems` names it. Whether values are right is what the rules are for (`eval.rules.table`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from cramming.record import Status
from eval.rules.record_sections import (
    Always,
    Corpus,
    Environment,
    Files,
    History,
    HistoryStamp,
    Journal,
    MinimalPairs,
    OtherRun,
    Pretraining,
    Scores,
    TaskScore,
    Trained,
    read,
)
from eval.rules.typed_json import Reader, Text

# Baselines without an encoder, which no rule judges: the record's section -> the initialisation that its row has.
WITHOUT_ENCODER = {"floor": "bag of words", "constant": "constant class"}


@dataclass(frozen=True)
class Record:
    """A run's record.json. The last four sections are made from the files beside it (`eval.rules.load`)."""

    format: Any
    name: Always[Text]
    created: Always[Text]
    suite_version: Always[Text]
    rules_version: Always[Text]
    division_requested: Text
    config: Always[dict[str, Any]]
    environment: Always[Environment]
    resumed: list[Environment]
    corpus: Trained[Corpus]
    pretrain: Pretraining | None
    glue: dict[str, Scores]
    floor: Scores | None
    constant: Scores | None
    superglue: dict[str, Scores]
    minimal_pairs: MinimalPairs
    history: HistoryStamp | None
    journal: Journal | None
    history_file: History | None
    beside: Files
    elsewhere: list[OtherRun]
    raw: Any
    problems: list[str] = field(default_factory=list)

    @property
    def training(self) -> Pretraining:
        """The pretraining, empty where there was none."""
        return self.pretrain or read(Pretraining)

    @property
    def trained(self) -> Scores | None:
        """Scores of the trained model."""
        return self.glue.get("pretrained")

    @property
    def without_encoder(self) -> dict[str, Scores]:
        """The baselines without an encoder that were scored, by initialisation."""
        found = {"floor": self.floor, "constant": self.constant}
        return {WITHOUT_ENCODER[name]: section for name, section in found.items() if section}

    def tasks(self) -> Iterator[tuple[str, str, TaskScore]]:
        """All scored tasks as (initialisation, name, entry); the names are the record's, so anything may be in them."""
        for init, section in self.glue.items():
            for name, task in section.tasks.items():
                yield init, name, task


def read_record(raw: Mapping[str, Any]) -> Record:
    """The tree of a record's JSON, with everything in it that is missing or of another kind."""
    status = pretrain.get("status") if isinstance(pretrain := raw.get("pretrain"), Mapping) else None
    ended = status in get_args(Status) and status != "running"
    needed = {"always", "trained" if ended else "", "finished" if status == "finished" else ""}
    reader = Reader(needed - {""})
    found = reader.section(Record, raw, "")
    return replace(found, problems=list(dict.fromkeys(reader.problems)))
