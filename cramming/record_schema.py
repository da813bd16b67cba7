"""The typed record: what `cramming.record.derive` makes of a run log, checked once and read by attribute after that.

Parts of a log are free JSON (environment, corpus, entries of a scoring). A value of another type there is refused in
one line, so rules, report and model card read plain attributes. What a run does not have yet is None or empty.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cramming.config import UserError
from cramming.record import Status
from cramming.runlog import Json, Unit
from cramming.scores import WITHOUT_ENCODER


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def finite(value: Any) -> Any:
    """Return the same structure with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class Section(BaseModel):
    """Part of a record: types are strict, numbers finite, and keys without an attribute are left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class Device(Section):
    """Device of a process; `peak_tflops` is None where the table of cards does not have it."""

    kind: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    peak_tflops: float | None = None


class Git(Section):
    """State of the code: a commit, and whether files differed from it."""

    commit: str | None = None
    dirty: bool | None = None
    changed: list[str] | None = None
    diff_sha256: str | None = None


class Environment(Section):
    """Machine and code of a process; `compile_cache` is "own" or "given"."""

    python: str | None = None
    torch: str | None = None
    transformers: str | None = None
    platform: str | None = None
    cpu_count: int | None = None
    device: Device = Device()
    git: Git = Git()
    compile_cache: str | None = None


class Source(Section):
    """Source of the corpus's text, or a ready-made tokenizer (`kind`)."""

    name: str | None = None
    kind: str | None = None
    license: str | None = None
    sha256: str | None = None
    dataset: str | None = None
    folder: str | None = None


class Tokenizer(Section):
    """Kind of a tokenizer and the SHA-256 of its file."""

    kind: str | None = None
    sha256: str | None = None


class Searched(Section):
    """File of development examples: how many texts the corpus was searched for, and their SHA-256."""

    texts: int
    sha256: str


class Decontamination(Section):
    """Search of a corpus for the text of tasks; `removed`: documents by task."""

    ngram: int | None = None
    removed: dict[str, int] = {}
    development: dict[str, Searched] | None = None


class ValidationCorpus(Section):
    """Corpus whose held-out text a run was validated on, where that is not its own."""

    folder: str | None = None
    manifest_sha256: str | None = None


class Corpus(Section):
    """Corpus that was read. `changed`: files written to while training read them, and whether they are as before."""

    folder: str | None = None
    manifest_sha256: str | None = None
    tokens: int | None = None
    validation_tokens: int | None = None
    documents: int | None = None
    vocab_size: int | None = None
    tokenizer: Tokenizer = Tokenizer()
    sources: list[Source] = []
    settings: Json = {}
    changed: dict[str, bool | None] = {}
    removed: Json = {}
    decontamination: Decontamination = Decontamination()
    validation: ValidationCorpus = ValidationCorpus()


class ProcessTime(Section):
    """One training process: when it started, what it spent and how it ended."""

    started: float
    spent_seconds: float
    ended: str


class Budget(Section):
    """Limit and what was spent of it; `spent` is in `unit`."""

    unit: Unit | None = None
    limit: float | None = None
    clock: str | None = None
    spent: float | None = None
    spent_seconds: float | None = None
    overrun_seconds: float | None = None
    processes: list[ProcessTime] = []


class Validation(Section):
    """Final validation in nats per target; `all_mask_loss` with every target behind [MASK].

    A run that detects replaced tokens has `replaced_token_loss`, in nats per token, instead of the other losses.
    """

    loss: float | None = None
    accuracy: float | None = None
    targets: int | None = None
    tokens: int | None = None
    all_mask_loss: float | None = None
    all_mask_accuracy: float | None = None
    bits_per_byte: float | None = None
    replaced_token_loss: float | None = None
    replaced_token_accuracy: float | None = None


class Pretraining(Section):
    """Pretraining; of a run that has not begun to train only status and budget are known."""

    status: Status | None = None
    start: str | None = None
    objective: str | None = None
    devices: int | None = None
    parameters: int | None = None
    parameters_without_embeddings: int | None = None
    budget: Budget = Budget()
    steps: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    exaflops: float | None = None
    corpus_epochs: float | None = None
    skipped_steps: int | None = None
    seed: int | None = None
    forced: list[str] | None = None
    gate: dict[str, str] = {}
    train_loss: float | None = None
    validation: Validation = Validation()
    tokens_per_second: float | None = None
    model_flops_utilization: float | None = None
    data_wait_share: float | None = None
    recompilations: int | None = None
    peak_memory_bytes: int | None = None
    energy_kwh: float | None = None
    energy_source: str | None = None
    precision: str | None = None
    residual: str | None = None
    attention_kernels: list[str] = []
    peak_learning_rate: float | None = None
    micro_batch: int | None = None
    compiled: bool | None = None
    compile_seconds: float | None = None
    final_sha256: str | None = None
    final_files: dict[str, str] | None = None

    @field_validator("validation", mode="before")
    @classmethod
    def _empty_until_validated(cls, value: Any) -> Any:
        """Read the null of a run without a final validation as an empty one."""
        return {} if value is None else value


class Metric(Section):
    """Values of a metric, one per seed, and their summary."""

    per_seed: list[float | None] = []
    median: float | None = None
    mean: float | None = None
    std: float | None = None
    mean_ci95: list[float] | None = None


class TaskScore(Section):
    """Scores of one labelled set over seeds; `score` is the median of the main metric times 100."""

    title: str
    task: str
    metrics: dict[str, Metric]
    main_metric: str
    score: float | None = None
    problem: str | None = None
    notes: list[str] = []
    scored_epochs: list[int] = []
    train_examples: int | None = None
    eval_examples: int | None = None
    official_train_examples: int | None = None
    official_eval_examples: int | None = None
    seen_in_training: int | None = None
    subset: bool | None = None
    texts_sha256: str | None = None
    data_sha256: str | None = None
    hyperparameters: Json = {}

    @property
    def main(self) -> Metric:
        """Main metric, empty if it was not measured."""
        return self.metrics.get(self.main_metric) or Metric()

    @property
    def spread(self) -> float | None:
        """Standard deviation of the score over seeds, in percent like the score."""
        return None if self.main.std is None else 100 * self.main.std

    @property
    def remark(self) -> str:
        """Problem of the score as text, empty for a score without one."""
        return self.problem or ("" if self.score is not None else "no score on record")


class Average(Section):
    """Mean over the entries of a suite, or the list of those that are missing."""

    value: float | None = None
    missing: list[str] = []
    definition: str


class Sweep(Section):
    """Sets of hyperparameters that a score was chosen from."""

    points: list[Json]


class Scores(Section):
    """Scores of one initialisation, or of a baseline without an encoder.

    `predictions`: SHA-256 of the file of each fine-tuning, by `<task>-seed<k>`. `checkpoint`: SHA-256 of the
    checkpoint whose weights were scored, where that is not the final model.
    """

    init: str
    model: str
    model_sha256: str | None = None
    model_files: dict[str, str] | None = None
    checkpoint: str | None = None
    environment: Environment | None = None
    suite: str
    split: str
    selection: str
    seeds: list[int]
    hyperparameters: Json
    precision: str | None = None
    threads_per_run: int | None = None
    tasks: dict[str, TaskScore]
    averages: dict[str, Average]
    absent: dict[str, str] = {}
    sweep: Sweep | None = None
    tasks_corpus_sha256: str | None = None
    predictions: dict[str, str] = {}
    history_entries: int = 0

    @property
    def epochs(self) -> float | None:
        """Epochs of fine-tuning."""
        return number(self.hyperparameters.get("epochs"))


class MinimalPairs(Section):
    """Accuracy in percent on pairs of sentences, by paradigm; `word_accuracy` with whole words masked."""

    accuracy: float | None = None
    word_accuracy: float | None = None
    paradigms: Json = {}
    definition: str | None = None


class Measured(Section):
    """Numbers of the final model that need no fine-tuning; speed and memory are those of the encoder at inference."""

    pseudo_perplexity: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    model_sha256: str | None = None


class FineTuning(Section):
    """One fine-tuning that the log has: a task and a seed, whatever became of its scoring."""

    time: str
    suite: str
    init: str
    task: str
    seed: int
    version: int
    subset: bool
    hyperparameters: Json
    selection: str
    precision: str | None = None
    threads_per_run: int | None = None
    scores: dict[str, float | None]
    model_sha256: str | None = None
    predictions_sha256: str
    key: str
    checkpoint: str | None = None
    git: Git | None = None

    @property
    def is_probe(self) -> bool:
        """True if the encoder was frozen."""
        return bool(self.hyperparameters.get("freeze"))


class FilesPresent(Section):
    """Files of a run's folder that its log names by hash, by name; nothing of them is read.

    `weights`: the folder that holds the final weights, or the address that the archive gives for them.
    """

    predictions: frozenset[str] = frozenset()
    weights: str | None = None


class OtherRun(Section):
    """Another run of the report that scored the same weights, and its fine-tunings of them."""

    run: str
    lines: list[FineTuning]


class LogPlace(Section):
    """First and last line of the log by SHA-256, and how many there are."""

    start: str
    head: str
    events: int


class Record(Section):
    """Everything that is said of a run.

    `files` and `elsewhere` are no part of the log: whoever reads the folder adds them (eval/rules/load.py).
    """

    format: int | None = None
    name: str = ""
    created: str | None = None
    suite_version: str | None = None
    rules_version: str | None = None
    division_requested: str | None = None
    scored_model: str | None = None
    log: LogPlace | None = None
    config: Json = {}
    environment: Environment = Environment()
    resumed: list[Environment] = []
    corpus: Corpus = Corpus()
    pretrain: Pretraining | None = None
    glue: dict[str, Scores] = {}
    floor: Scores | None = None
    constant: Scores | None = None
    superglue: dict[str, Scores] = {}
    checkpoints: dict[str, dict[str, Scores]] = {}  # by suite and SHA-256
    probe: dict[str, dict[str, Scores]] = {}  # by suite and initialisation
    minimal_pairs: MinimalPairs = MinimalPairs()
    measured: Measured = Measured()
    history: list[FineTuning] = []
    unfinished: list[str] = []
    files: FilesPresent = Field(default=FilesPresent(), exclude=True)
    elsewhere: list[OtherRun] = Field(default=[], exclude=True)

    @property
    def training(self) -> Pretraining:
        """Pretraining of the run, empty without one."""
        return self.pretrain or Pretraining()

    @property
    def claims_open(self) -> bool:
        """True if the run requested the open division, at its start or in a resume."""
        return self.division_requested == "open"

    @property
    def trained(self) -> Scores | None:
        """Scores of the trained model."""
        return self.glue.get("pretrained")

    @property
    def baselines(self) -> dict[str, Scores]:
        """The baselines without an encoder that were scored, by section."""
        sections = dict(zip(WITHOUT_ENCODER, (self.floor, self.constant), strict=True))
        return {name: section for name, section in sections.items() if section is not None}

    def tasks(self) -> Iterator[tuple[str, str, TaskScore]]:
        """Yield all scored tasks as (initialisation, name, entry)."""
        for init, section in self.glue.items():
            for name, task in section.tasks.items():
                yield init, name, task


def read_record(raw: Mapping[str, Any]) -> Record:
    """Return the typed record of what `derive` gives; UserError for a value that no run writes."""
    try:
        return Record.model_validate(dict(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"run.jsonl: {place} of the record is not as the suite writes it ({first['msg']})."
        ) from None
