"""`record.json` as a tree of frozen dataclasses: what rules, report and model card read (cramming/record.py writes it).

A record may come from another machine, an older version, an interrupted run or an editor, so reading is tolerant: a
missing value is None (a list, table or section: empty), and so is one of another type, which `Record.problems` names
with its path. Whether values are right is what the rules are for (eval/rules). A field `raw` holds its section's JSON.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cramming.record import Status

T = TypeVar("T")
Number = float | None  # finite; whole numbers stay whole
Text = str | None  # never empty
# Baselines without an encoder, which no rule judges: the record's section -> the initialisation that its row has.
WITHOUT_ENCODER = {"floor": "bag of words", "constant": "constant class"}
_WORDS = {float: "a finite number", str: "text", bool: "true or false", list: "a list"}


def number(value: Any) -> Number:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # JSON allows whole numbers of any length
        return None


def read(kind: type[T], raw: Any = None, place: str = "", problems: list[str] | None = None) -> T:
    """The section `kind` of JSON at `place` in the record; values of another type are added to `problems`."""
    found: T = _value(kind, {} if raw is None else raw, place, [] if problems is None else problems)
    return found


def _value(hint: Any, raw: Any, place: str, problems: list[str]) -> Any:
    outer, inner, optional = _shape(hint)
    if outer is Any or (raw is None and optional):
        return raw
    found = raw if _fits(outer, inner, raw) else None
    if found is None and raw is not None:
        shown = (
            f"{type(raw).__name__} of {len(raw)}"
            if isinstance(raw, Mapping | list)
            else repr(raw)[:40]
        )
        wanted = (
            f"one of {', '.join(inner)}" if outer is Literal else _WORDS.get(outer, "a section")
        )
        problems.append(f"{place} is {shown}, not {wanted}")
    if outer is list:
        return [
            _value(inner[0], item, f"{place}[{index}]", problems)
            for index, item in enumerate(found or [])
        ]
    if outer is dict:
        return {
            str(key): _value(inner[1], item, f"{place}.{key}", problems)
            for key, item in (found or {}).items()
        }
    if _is_section(outer):
        below, inside = f"{place}." if place else "", found or {}
        values = {
            name: _value(hint, inside.get(name), below + name, problems)
            for name, hint in _hints(outer)
        }
        return outer(**values | ({"raw": raw} if "raw" in values else {}))
    return found


@cache
def _is_section(kind: Any) -> bool:
    return is_dataclass(kind)


@cache
def _hints(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(one.name, hints[one.name]) for one in fields(kind) if one.default_factory is MISSING]


@cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """`list[X] | None` -> (list, (X,), True)."""
    optional = get_origin(hint) in (Union, UnionType)
    (kind,) = (arg for arg in get_args(hint) if arg is not NoneType) if optional else (hint,)
    return get_origin(kind) or kind, get_args(kind), optional


def _fits(kind: Any, choices: tuple[Any, ...], raw: Any) -> bool:
    if kind is Literal:
        return raw in choices
    if kind is float:
        return number(raw) is not None
    if kind is dict or _is_section(kind):
        return isinstance(raw, Mapping)
    return isinstance(raw, kind) and raw != ""


@dataclass(frozen=True)
class Device:
    kind: Text
    name: Text


@dataclass(frozen=True)
class Git:
    commit: Text
    dirty: bool | None
    changed: list[Any]


@dataclass(frozen=True)
class Environment:
    """A machine and its code."""

    python: Text
    torch: Text
    transformers: Text
    platform: Text
    cpu_count: Number
    device: Device
    git: Git
    compile_cache: Text  # own | given; of a process that trained, since 2026-11-26
    raw: Any


@dataclass(frozen=True)
class Source:
    """A source of the corpus's text, or a ready-made tokenizer (`kind`)."""

    name: Text
    kind: Text
    license: Text
    sha256: Text
    dataset: Text
    folder: Text
    raw: Any


@dataclass(frozen=True)
class Tokenizer:
    kind: Text
    sha256: Text


@dataclass(frozen=True)
class Searched:
    """A file of development examples: how many texts the corpus was searched for, and their SHA-256."""

    texts: Number
    sha256: Text


@dataclass(frozen=True)
class Decontamination:
    """`removed`: documents by task; `development`: None in records of before it was written."""

    ngram: Number
    removed: dict[str, Any]
    development: dict[str, Searched] | None


@dataclass(frozen=True)
class ValidationCorpus:
    """Another corpus than the run's own, whose held-out text it was validated on."""

    folder: Text
    manifest_sha256: Text


@dataclass(frozen=True)
class Corpus:
    folder: Text
    manifest_sha256: Text
    tokens: Number
    documents: Number
    vocab_size: Number
    tokenizer: Tokenizer
    sources: list[Source]
    changed: dict[str, Any] | None
    removed: dict[str, Any]
    decontamination: Decontamination
    validation: ValidationCorpus


@dataclass(frozen=True)
class Budget:
    unit: Text
    limit: Number
    clock: Text  # wall | cpu; before there was a choice, nothing
    spent: Number
    spent_seconds: Number
    overrun_seconds: Number
    processes: list[Any]
    journal_sha256: Text


@dataclass(frozen=True)
class Validation:
    """Nats per target; `all_mask_loss` with every target behind [MASK], of which `bits_per_byte` is made.

    Of a run that tells replaced tokens `replaced_token_loss`, in nats per token, is there instead of all others.
    """

    loss: Number
    accuracy: Number
    targets: Number
    all_mask_loss: Number
    bits_per_byte: Number
    replaced_token_loss: Number
    replaced_token_accuracy: Number


@dataclass(frozen=True)
class Pretraining:
    status: Status | None
    start: Text
    objective: Text
    devices: Number
    parameters: Number
    parameters_without_embeddings: Number
    budget: Budget
    steps: Number
    tokens: Number
    sequences: Number
    exaflops: Number
    corpus_epochs: Number
    skipped_steps: Number
    seed: Number
    forced: list[Any] | None
    gate: dict[str, Any]
    train_loss: Number
    validation: Validation
    tokens_per_second: Number
    model_flops_utilization: Number
    data_wait_share: Number
    peak_memory_bytes: Number
    energy_kwh: Number
    energy_source: Text
    precision: Text
    residual: Text
    attention_kernels: list[Any]
    peak_learning_rate: Number
    compiled: bool | None
    compile_cache: Text  # of runs from before 2026-11-26
    journal_start: Text
    final_sha256: Text
    final_files: dict[str, Any] | None


@dataclass(frozen=True)
class Metric:
    """Over seeds."""

    per_seed: list[Number]
    median: Number
    mean: Number
    std: Number
    mean_ci95: list[Number]


@dataclass(frozen=True)
class TaskScore:
    title: Text
    metrics: dict[str, Metric]
    main_metric: Text
    score: Number
    problem: Text
    scored_epochs: list[Number] | None
    train_examples: Number
    eval_examples: Number
    official_train_examples: Number
    official_eval_examples: Number
    seen_in_training: Number
    subset: bool | None
    texts_sha256: Text
    data_sha256: Text
    hyperparameters: dict[str, Any] | None

    @property
    def main(self) -> Metric:
        """The main metric, empty where it was not measured."""
        return self.metrics.get(self.main_metric or "") or read(Metric)

    @property
    def spread(self) -> Number:
        """Standard deviation of the score over seeds, in percent like the score."""
        return None if self.main.std is None else 100 * self.main.std

    @property
    def remark(self) -> str:
        """What is wrong with the score; empty where there is one and nothing is."""
        return self.problem or ("" if self.score is not None else "no score on record")


@dataclass(frozen=True)
class Average:
    value: Number
    missing: list[Any]
    definition: Text


@dataclass(frozen=True)
class Sweep:
    points: list[Any]


@dataclass(frozen=True)
class Scores:
    """The scores of one initialisation, or of a baseline without an encoder."""

    model: Text
    model_sha256: Text
    model_files: dict[str, Any] | None
    environment: Environment | None
    suite: Text
    split: Text
    selection: Text
    seeds: list[Any]
    hyperparameters: dict[str, Any] | None
    precision: Any
    threads_per_run: Any
    tasks: dict[str, TaskScore]
    averages: dict[str, Average]
    absent: dict[str, Any]
    sweep: Sweep | None
    tasks_corpus_sha256: Text
    history_entries: Number

    @property
    def epochs(self) -> Number:
        """Of fine-tuning."""
        return number((self.hyperparameters or {}).get("epochs"))


@dataclass(frozen=True)
class MinimalPairs:
    accuracy: Number
    paradigms: dict[str, Any]
    definition: Text


@dataclass(frozen=True)
class HistoryStamp:
    """How many lines the history of fine-tunings has, and the SHA-256 of the last."""

    entries: Number
    sha256: Text


@dataclass(frozen=True)
class FineTuning:
    """A line of the history: one task and seed."""

    time: Text
    suite: Text
    init: Text
    task: Text
    seed: Any
    version: Any
    subset: bool | None
    hyperparameters: Any
    selection: Any
    precision: Any
    threads_per_run: Any
    scores: dict[str, Number]
    model_sha256: Text
    predictions_sha256: Text
    key: Text
    git: Git


@dataclass(frozen=True)
class History:
    """The file glue/history.jsonl; `sha256` is that of the last line that the record names."""

    problem: Text
    entries: list[FineTuning]
    sha256: Text


@dataclass(frozen=True)
class Journal:
    """What of R5 does not hold, and what else budget.jsonl says (eval/rules/journal.py)."""

    problems: list[str]
    summary: Text


@dataclass(frozen=True)
class Files:
    """SHA-256 by name: of the trained model's predictions, and of final/."""

    predictions: dict[str, Any]
    final: dict[str, Any]


@dataclass(frozen=True)
class OtherRun:
    """Another run of the report with the same scored weights, and its fine-tunings of them."""

    run: Text
    lines: list[FineTuning]


@dataclass(frozen=True)
class Record:
    """A run's record.json. `journal`, `history_file`, `beside`, `elsewhere`, `contradictions` and `known` are made from
    the files (eval/rules/load.py): where the folder contradicts itself, and whether this project shipped the record
    under older rules."""

    format: Any
    name: Text
    created: Text
    suite_version: Text
    rules_version: Text
    division_requested: Text
    config: dict[str, Any]
    environment: Environment
    resumed: list[Environment]
    corpus: Corpus
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
    contradictions: list[str] | None
    known: bool | None
    raw: Any
    problems: list[str] = field(default_factory=list)

    @property
    def training(self) -> Pretraining:
        """The pretraining, empty where there was none."""
        return self.pretrain or read(Pretraining)

    @property
    def claims_open(self) -> bool:
        """Whether the run claimed the open division for itself, at its start or in a resume."""
        return "open" in (self.config.get("division"), self.division_requested)

    @property
    def trained(self) -> Scores | None:
        """Scores of the trained model."""
        return self.glue.get("pretrained")

    @property
    def baselines(self) -> dict[str, Scores]:
        """The baselines without an encoder that were scored, by section."""
        return {name: section for name in WITHOUT_ENCODER if (section := getattr(self, name))}

    def tasks(self) -> Iterator[tuple[str, str, TaskScore]]:
        """All scored tasks as (initialisation, name, entry); the names are the record's, so anything may be in them."""
        for init, section in self.glue.items():
            for name, task in section.tasks.items():
                yield init, name, task


def read_record(raw: Mapping[str, Any]) -> Record:
    """The tree of a record's JSON."""
    problems: list[str] = []
    return replace(read(Record, raw, "", problems), problems=problems)
