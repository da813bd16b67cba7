"""What several rules look at: the history of fine-tunings, sizes of tasks, the wording of evidence."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from cramming.data.task_files import ENTRIES
from eval.finetune.history import PROTOCOL
from eval.rules.record import Record
from eval.rules.record_sections import FineTuning, Pretraining, Scores, Source, TaskScore

Outcome = tuple[bool, str]  # of a check: whether the rule holds, and the evidence
Check = Callable[[Record], Outcome]

# Versions of the rules under which a number means the same. Version 2 only allows one more way to start (R13). Version
# 3 keeps sweeps (R20) out of the closed division: older records show theirs, so they are judged by that as well.
# Versions 4 and 5 ask for evidence of what was always demanded. A version that scores otherwise, or forbids what older
# records do not show, begins a new tuple.
COMPARABLE = ("1", "2", "3", "4", "5")


def before(record: Record, version: str) -> bool:
    """Whether the record is of rules older than `version`, which did not ask for the evidence that it brought."""
    return record.rules_version in COMPARABLE[: COMPARABLE.index(version)]


def of_pretraining(*, holds_without: bool) -> Callable[[Callable[[Record, Pretraining], Outcome]], Check]:
    """A check of the pretraining: of a record that has none, it is known what it says."""

    def wrap(check: Callable[[Record, Pretraining], Outcome]) -> Check:
        @wraps(check)
        def checked(record: Record) -> Outcome:
            if record.pretrain is None:
                return holds_without, "no pretraining in this record"
            return check(record, record.pretrain)

        return checked

    return wrap


def all_or(problems: list[str], fine: str) -> Outcome:
    """A failure with the first problems as evidence, or success with `fine`."""
    shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
    return (False, shown) if problems else (True, fine)


def few(names: Sequence[str], most: int = 6) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def names_of(sources: Sequence[Source]) -> str:
    """The first names of a list of sources, which may be as long as a folder of files."""
    return few([str(source.name) for source in sources])


def fine_tuned(record: Record, init: str, named: bool = False) -> list[FineTuning]:
    """What the history has of an initialisation, on the suite that the record holds; in full, with what a scoring that
    was interrupted has added, or the lines that the record has `named` and the section came after."""
    section = record.glue.get(init)
    if section is None or record.history_file is None:
        return []
    lines = record.history_file.entries
    if named:
        counts = (record.history.entries if record.history else None, section.history_entries)
        lines = lines[: int(min(count or 0 for count in counts))]
    return [line for line in lines if line.init == init and line.suite == section.suite]


def made_with(scored: Scores | FineTuning) -> dict[str, Any]:
    """The settings that the scores of a section, or a line of the history, were made with."""
    return {key: getattr(scored, key) for key in PROTOCOL}


def kept(record: Record, init: str) -> dict[str, FineTuning]:
    """The line of the history that each result of a section was kept with, by the name of its predictions' file."""
    if (section := record.glue.get(init)) is None:
        return {}
    seeds = set(map(str, section.seeds))
    lines = [line for line in fine_tuned(record, init, named=True) if made_with(line) == made_with(section)]
    return {f"{line.task}-seed{line.seed}.npz": line for line in lines if str(line.seed) in seeds}


def official_sizes(record: Record, init: str, entry: str) -> dict[str, int]:
    """By the task table, whatever the record says; only GLUE itself has official sizes."""
    section = record.glue.get(init)
    if section is None or section.suite != "glue" or entry not in ENTRIES:
        return {}
    task, source = ENTRIES[entry]
    return {"train_examples": task.train.examples, "eval_examples": source.examples}


def other_sizes(record: Record, init: str, entry: str, task: TaskScore) -> list[str]:
    """Such as `train 100 of 8551`, where a task's examples are not as many as the official."""
    return [
        f"{key.removesuffix('_examples')} {count_of(task, key)} of {size}"
        for key, size in official_sizes(record, init, entry).items()
        if getattr(task, key) != size
    ]


def count_of(task: TaskScore, key: str) -> str:
    """A number of examples in words."""
    value = getattr(task, key)
    return "not on record" if value is None else f"{value:.0f}"


def swept(section: Scores) -> str:
    """Such as `best of 6 sets of hyperparameters`; empty where nothing was chosen in a sweep."""
    return "" if section.sweep is None else f"best of {len(section.sweep.points)} sets of hyperparameters"


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the values; None where there is none, or one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
