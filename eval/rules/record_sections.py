"""The sections of a record: frozen dataclasses, whose annotations say what kind of value each field has and in which
records it must be (`eval.rules.typed_json` reads them)."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from cramming.record import Status
from eval.rules.typed_json import Number, Reader, Text, number

T = TypeVar("T")
# Values that every record has; those of a training that has ended, however; and of one that ended as finished.
Always = Annotated[T, "always"]
Trained = Annotated[T, "trained"]
Finished = Annotated[T, "finished"]


@dataclass(frozen=True)
class Device:
    kind: Text
    name: Always[Text]


@dataclass(frozen=True)
class Git:
    commit: Text
    dirty: bool | None
    changed: list[Any]


@dataclass(frozen=True)
class Environment:
    python: Always[Text]
    torch: Text
    transformers: Text
    platform: Text
    cpu_count: Number
    device: Always[Device]
    git: Git


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
    """Of a file of development examples: how many texts the corpus was searched for, and their SHA-256."""

    texts: Number
    sha256: Text


@dataclass(frozen=True)
class Decontamination:
    """By task: examples, those with enough words to be searched for, those found, and documents removed."""

    ngram: Number
    removed: dict[str, Any]
    examples: dict[str, Any]
    searchable: dict[str, Any]
    found: dict[str, Any]
    development: dict[str, Searched] | None


@dataclass(frozen=True)
class ValidationCorpus:
    """Another corpus than the run's own, whose held-out text it was validated on."""

    folder: Text
    manifest_sha256: Text


@dataclass(frozen=True)
class Corpus:
    folder: Trained[Text]
    manifest_sha256: Trained[Text]
    tokens: Trained[Number]
    documents: Trained[Number]
    vocab_size: Trained[Number]
    tokenizer: Trained[Tokenizer]
    sources: Trained[list[Source]]
    changed: dict[str, Any] | None
    removed: dict[str, Any]
    decontamination: Decontamination
    validation: ValidationCorpus


@dataclass(frozen=True)
class Budget:
    unit: Trained[Text]
    limit: Trained[Number]
    spent: Trained[Number]
    spent_seconds: Trained[Number]
    overrun_seconds: Trained[Number]
    processes: Trained[list[Any]]
    journal_sha256: Trained[Text]


@dataclass(frozen=True)
class Validation:
    """Nats per target; `all_mask_loss` with every target behind [MASK], of which `bits_per_byte` is made."""

    loss: Finished[Number]
    accuracy: Finished[Number]
    targets: Number
    all_mask_loss: Number
    bits_per_byte: Number


@dataclass(frozen=True)
class Pretraining:
    status: Always[Status | None]
    start: Text
    init: Any  # up to version 2 of the rules
    objective: Trained[Text]
    devices: Trained[Number]
    parameters: Trained[Number]
    parameters_without_embeddings: Trained[Number]
    budget: Trained[Budget]
    steps: Trained[Number]
    tokens: Trained[Number]
    sequences: Trained[Number]
    exaflops: Trained[Number]
    corpus_epochs: Trained[Number]
    skipped_steps: Trained[Number]
    seed: Trained[Number]
    forced: Trained[list[Any] | None]
    train_loss: Finished[Number]
    validation: Finished[Validation]
    tokens_per_second: Finished[Number]
    model_flops_utilization: Number
    data_wait_share: Number
    peak_memory_bytes: Number
    energy_kwh: Number
    energy_source: Text
    precision: Text
    attention_kernels: list[Any]
    peak_learning_rate: Number
    compiled: bool | None
    compile_cache: Text
    journal_start: Text
    final_sha256: Finished[Text]
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
    metrics: Always[dict[str, Metric]]
    main_metric: Always[Text]
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
    """A section of scores: of one initialisation, or of a baseline without an encoder."""

    model: Text
    model_sha256: Text
    model_files: dict[str, Any] | None
    environment: Environment | None
    suite: Always[Text]
    split: Always[Text]
    selection: Always[Text]
    seeds: Always[list[Any]]
    hyperparameters: Always[dict[str, Any] | None]
    precision: Any
    threads_per_run: Any
    tasks: Always[dict[str, TaskScore]]
    averages: Always[dict[str, Average]]
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
    """What the record says of the history of fine-tunings: how many lines, and the SHA-256 of the last."""

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
    git: Git


@dataclass(frozen=True)
class History:
    """The file glue/history.jsonl; `sha256` is that of the last line that the record names."""

    problem: Text
    entries: list[FineTuning]
    sha256: Text


@dataclass(frozen=True)
class Journal:
    """What budget.jsonl and its neighbours say (`eval.rules.journal`)."""

    problem: Text
    sha256: Text
    start: Text
    chained: bool | None
    processes: list[Any]
    steps: Number
    spent: dict[str, Number]
    last_step_seconds: Number
    total_seconds: Number
    uncharged_seconds: Number
    logged_seconds: Number
    problems: list[Any]
    budgets: list[Any]
    corpora: list[Any]
    config_budget: Any
    config_there: bool | None


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


def read(kind: type[T], raw: Any = None) -> T:
    """One section of a record."""
    return Reader().section(kind, {} if raw is None else raw, "")
