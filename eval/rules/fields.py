"""What a record should hold: which fields, and what kind of value in each.

The accessors of `eval.rules.reading` read a missing or misshapen field as nothing, so that one bad record stops no
report. This is the other half: such a field is named, so that a dash in a table is never a riddle. Whether the values
are right is what the rules are for (`eval.rules.table`).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from cramming.record import Status
from eval.rules.reading import WITHOUT_ENCODER, Record, at, number

KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str) and bool(value),
    "a finite number": lambda value: number(value) is not None,
    "a list": lambda value: isinstance(value, list),
    "a section": lambda value: isinstance(value, Mapping),
}
STATUSES = get_args(Status)

Fields = Mapping[str, tuple[str, ...]]  # kind -> dotted paths, a section before what is in it

EVERY: Fields = {
    "a section": ("config", "environment", "environment.device"),
    "text": ("name", "created", "suite_version", "rules_version", "environment.python", "environment.device.name"),
}
TRAINED: Fields = {
    "a section": ("corpus", "corpus.tokenizer", "pretrain.budget"),
    "text": (
        "corpus.folder", "corpus.manifest_sha256", "pretrain.objective", "pretrain.budget.unit",
        "pretrain.budget.journal_sha256",
    ),
    "a finite number": (
        "corpus.tokens", "corpus.documents", "corpus.vocab_size", "pretrain.devices", "pretrain.parameters",
        "pretrain.parameters_without_embeddings", "pretrain.steps", "pretrain.tokens", "pretrain.sequences",
        "pretrain.exaflops", "pretrain.corpus_epochs", "pretrain.seed", "pretrain.skipped_steps",
        "pretrain.budget.limit", "pretrain.budget.spent", "pretrain.budget.spent_seconds",
        "pretrain.budget.overrun_seconds",
    ),
    "a list": ("corpus.sources", "pretrain.budget.processes", "pretrain.forced"),
}  # fmt: skip
FINISHED: Fields = {
    "a section": ("pretrain.validation",),
    "text": ("pretrain.final_sha256",),
    "a finite number": (
        "pretrain.train_loss", "pretrain.tokens_per_second", "pretrain.validation.loss", "pretrain.validation.accuracy",
    ),
}  # fmt: skip
SCORED: Fields = {
    "text": ("suite", "split", "selection"),
    "a list": ("seeds",),
    "a section": ("hyperparameters", "tasks", "averages"),
}
TASK: Fields = {"text": ("main_metric",), "a section": ("metrics",)}


def wrong_fields(record: Record) -> list[str]:
    """A phrase per field that is missing or of the wrong kind, e.g. `pretrain.steps is 'many', not a finite number`."""
    return list(dict.fromkeys([*_against(record, EVERY), *_training(record), *_scores(record)]))


def _training(record: Record) -> Iterator[str]:
    if "pretrain" not in record:  # somebody else's model
        return
    if not isinstance(record["pretrain"], Mapping):
        yield _phrase("pretrain", record["pretrain"], "a section")
        return
    status = at(record, "pretrain.status")
    if status not in STATUSES:
        yield _phrase("pretrain.status", status, f"one of {', '.join(STATUSES)}")
    elif status != "running":
        yield from _against(record, TRAINED)
        yield from _against(record, FINISHED) if status == "finished" else ()


def _scores(record: Record) -> Iterator[str]:
    glue = record.get("glue", {})
    if not isinstance(glue, Mapping):
        yield _phrase("glue", glue, "a section")
        return
    found = {f"glue.{init}": section for init, section in glue.items()}
    found |= {name: record[name] for name in WITHOUT_ENCODER if record.get(name) is not None}
    for place, section in found.items():
        if not isinstance(section, Mapping):
            yield _phrase(place, section, "a section")
            continue
        yield from _against(section, SCORED, f"{place}.")
        tasks = section.get("tasks")
        for name, task in tasks.items() if isinstance(tasks, Mapping) else ():
            where = f"{place}.tasks.{name}"
            if not isinstance(task, Mapping):
                yield _phrase(where, task, "a section")
                continue
            yield from _against(task, TASK, f"{where}.")
            if number(task, "score") is None and not KINDS["text"](task.get("problem")):
                yield f"{_phrase(f'{where}.score', task.get('score'), 'a finite number')}, and no problem is named"


def _against(section: Record, fields: Fields, prefix: str = "") -> Iterator[str]:
    """Fields that are not there in their kind; what lies in a section that is itself wrong is not listed again."""
    for kind, paths in fields.items():
        for path in paths:
            parent = path.rpartition(".")[0]
            if (not parent or isinstance(at(section, parent), Mapping)) and not KINDS[kind](at(section, path)):
                yield _phrase(prefix + path, at(section, path), kind)


def _phrase(path: str, value: Any, wanted: str) -> str:
    if value is None:
        return f"{path} is missing"
    shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, Mapping | list) else repr(value)[:40]
    return f"{path} is {shown}, not {wanted}"
