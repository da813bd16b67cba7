"""The run log: an append-only file of typed events, each line carrying the SHA-256 of the line before it.

`runs/<name>/run.jsonl` is the run: everything else that is said about it is computed from these events
(cramming/record.py). Nothing is ever rewritten. A resume supersedes earlier events by naming its checkpoint, and a last
line that a crash cut short is dropped. The chain proves order and completeness, not truth (docs/reference/run_log.md).
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

from cramming.config import UserError
from cramming.files import sync

RUN_LOG = "run.jsonl"
FORMAT_VERSION = 3
MAX_HEARTBEAT_SECONDS = 5.0  # longest time that a killed process can have spent without an event
EndReason = Literal["finished", "stopped", "failed", "diverged"]
Unit = Literal["hours", "exaflops", "tokens", "steps"]
RESTORE = "Restore the file, or start again under another name"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Json = dict[str, Any]


class Event(BaseModel):
    """One line of a log. Fields that are None are not written."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")

    event: str


class Timed(Event):
    """Event of a training process.

    `elapsed` is in seconds on the budget's clock since the process began, `wall` in seconds since 1970.
    """

    elapsed: Seconds
    wall: FiniteFloat


class Counted(Timed):
    """A timed event with the counters of `cramming.budget.Work` and of the clock. One that is None has not changed."""

    steps: NonNegativeInt | None = None
    sequences: NonNegativeInt | None = None
    tokens: NonNegativeInt | None = None
    flops: NonNegativeFloat | None = None
    skipped_steps: NonNegativeInt | None = None
    last_step_seconds: Seconds | None = None
    data_wait_seconds: Seconds | None = None
    recompilations: NonNegativeInt | None = None
    lost_flops: NonNegativeFloat | None = None
    slowest_update_seconds: Seconds | None = None
    joules: NonNegativeFloat | None = None


COUNTERS = tuple(name for name in Counted.model_fields if name not in Timed.model_fields)


class Start(Timed):
    """Begin of a training process, written before it imports torch.

    `recipe` holds the composed settings, in the first start alone. `changed` holds the settings of a resume that
    differ from the recipe, by dotted name.
    """

    event: Literal["start"] = "start"
    format: Literal[3] = 3
    name: str
    suite_version: str
    rules_version: str
    unit: Unit
    limit: Annotated[float, Field(gt=0)]
    clock: Literal["wall", "cpu"]
    division: Literal["closed", "open"]
    recipe: Json | None = None
    changed: Json = {}


class Setup(Event):
    """Facts that a training process has once its model is built.

    `corpus` is `Corpus.describe()`, in the first setup alone. `windows` is the number of sequences per epoch.
    `tokens_per_byte` is that of the validation text. `training` holds objective, parameters, number format and gates.
    """

    event: Literal["setup"] = "setup"
    environment: Json
    manifest_sha256: Sha256
    corpus: Json | None = None
    devices: Annotated[int, Field(ge=1)]
    windows: NonNegativeInt
    tokens_per_byte: NonNegativeFloat | None = None
    training: Json


class MicroBatch(Event):
    """Number of sequences that `train.micro_batch=auto` stands for from now on, and how it was chosen."""

    event: Literal["micro_batch"] = "micro_batch"
    sequences: Annotated[int, Field(ge=1)]
    how: str


class Heartbeat(Counted):
    """Sign of life: the time spent until now is charged whatever happens next."""

    event: Literal["heartbeat"] = "heartbeat"


class Steps(Event):
    """Optimizer steps up to number `step`: means over them, and the numbers of each.

    `seconds`: charged when the last of them had ended, all processes included. `progress`: share of the budget then.
    `each_progress`: share of the budget at which each step began. A loss that is not finite is None.
    """

    event: Literal["steps"] = "steps"
    step: Annotated[int, Field(ge=1)]
    progress: Seconds
    seconds: Seconds
    tokens: NonNegativeInt
    loss: FiniteFloat | None = None
    accuracy: FiniteFloat | None = None
    grad_norm: FiniteFloat | None = None
    lr: FiniteFloat
    each_progress: list[FiniteFloat]
    each_loss: list[FiniteFloat | None]
    each_accuracy: list[FiniteFloat | None]


class Validation(Event):
    """Loss on the held-out text after `step` steps, in nats per target; `seconds` and `progress` as of `Steps`.

    A run that detects replaced tokens has `replaced_token_loss` in place of `loss`. The last validation, of the final
    weights, also has `all_mask_loss` (every target shown as [MASK]) and the number of `held_out_tokens`.
    """

    event: Literal["validation"] = "validation"
    step: NonNegativeInt
    progress: Seconds
    seconds: Seconds
    tokens: NonNegativeInt
    targets: NonNegativeInt
    loss: FiniteFloat | None = None
    accuracy: FiniteFloat | None = None
    replaced_token_loss: FiniteFloat | None = None
    replaced_token_accuracy: FiniteFloat | None = None
    all_mask_loss: FiniteFloat | None = None
    all_mask_accuracy: FiniteFloat | None = None
    held_out_tokens: NonNegativeInt | None = None


class Checkpoint(Timed):
    """Checkpoint of the state after `step` steps, with the SHA-256 of its file; `retained` files are never removed."""

    event: Literal["checkpoint"] = "checkpoint"
    step: NonNegativeInt
    sha256: Sha256
    retained: bool = False


class Resume(Counted):
    """Resume from the checkpoint with this SHA-256, or from the seed (None).

    All later steps, validations and checkpoints are superseded; the time that they took stays charged.
    """

    event: Literal["resume"] = "resume"
    sha256: Sha256 | None = None


class CorpusChanged(Event):
    """Files of the corpus that were written to while a process read them.

    Each path maps to whether the file was as prepared when it was read a second time at the end; None before that.
    """

    event: Literal["corpus_changed"] = "corpus_changed"
    files: dict[str, bool | None]


class End(Counted):
    """End of the work of a training process on the clock."""

    event: Literal["end"] = "end"
    reason: EndReason


class Exported(Event):
    """Export of the validated final model to `final/`; `files` are its SHA-256 by name."""

    event: Literal["exported"] = "exported"
    files: dict[str, Sha256]
    compiled: bool
    compile_seconds: Seconds
    peak_memory_bytes: NonNegativeInt


class ExternalModel(Event):
    """First event of a run whose model was not pretrained here: `model` is a folder, or a name of the hub."""

    event: Literal["external_model"] = "external_model"
    format: Literal[3] = 3
    name: str
    time: str
    suite_version: str
    rules_version: str
    division: Literal["closed", "open"]
    model: str
    recipe: Json
    environment: Json


class LabelledSet(BaseModel):
    """Labelled set of a task: how it is scored, its numbers of examples and hashes of them.

    `subset` marks a training or scored set with another number of examples than the official one. `seen_in_training`
    is the number of examples that are training examples too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    task: str
    metrics: Annotated[list[str], Field(min_length=1)]
    main_metric: str
    train_examples: NonNegativeInt
    official_train_examples: NonNegativeInt | None = None
    eval_examples: NonNegativeInt
    official_eval_examples: NonNegativeInt | None = None
    subset: bool
    skipped_rows: NonNegativeInt
    data_sha256: Sha256
    texts_sha256: Sha256
    seen_in_training: NonNegativeInt


class SetScores(BaseModel):
    """Metrics of one fine-tuning on a labelled set, None where undefined, with the reasons and remarks on values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metrics: dict[str, FiniteFloat | None]
    problems: list[str] = []
    notes: list[str] = []


class Scoring(Event):
    """Begin of a scoring: one initialisation, or a baseline without an encoder, on the tasks of a suite.

    `section` is the part of the record. `entries` are the labelled sets by name. `keys` maps `<task>-seed<k>` to the
    hash of everything that the result depends on, `conditions` a task to the part of it without hyperparameters and
    seed. `sweep` lists the initialisations that share the choice of the sweep that this is a point of. `checkpoint` is
    the SHA-256 of the kept checkpoint whose weights are scored, None for the final model. A scoring is complete once
    each key has a `finetuned` event, stored ones included.
    """

    event: Literal["scoring"] = "scoring"
    time: str
    section: Literal["glue", "superglue"]
    suite: Literal["glue", "embedded", "superglue"]
    init: Literal["pretrained", "random", "floor", "constant"]
    version: int
    model: str
    model_sha256: Sha256 | None = None
    model_files: dict[str, Sha256] | None = None
    checkpoint: Sha256 | None = None
    precision: str | None = None
    threads_per_run: int | None = None
    selection: str
    seeds: Annotated[list[int], Field(min_length=1)]
    hyperparameters: Json
    sweep: list[str] | None = None
    entries: Annotated[dict[str, LabelledSet], Field(min_length=1)]
    absent: dict[str, str]
    conditions: dict[str, str] = {}
    keys: dict[str, str]
    tasks_corpus_sha256: Sha256 | None = None
    environment: Json | None = None


class Finetuned(Event):
    """Result of one task and seed of the scoring before it; `predictions` is the hash of a file in `predictions/`."""

    event: Literal["finetuned"] = "finetuned"
    time: str
    task: str
    seed: int
    key: str
    predictions: Sha256
    entries: dict[str, SetScores]
    train_loss: FiniteFloat | None = None
    epoch: NonNegativeInt
    seconds: Seconds


class MinimalPairs(Event):
    """Accuracy in percent on pairs of sentences of which one is grammatical, by paradigm.

    `word_accuracy` is that with the later tokens of a token's word masked too.
    """

    event: Literal["minimal_pairs"] = "minimal_pairs"
    model: str
    model_sha256: Sha256 | None = None
    key: str
    definition: str
    accuracy: NonNegativeFloat
    word_accuracy: NonNegativeFloat | None = None
    paradigms: dict[str, Json]


class Measured(Event):
    """Numbers of the final model that need no fine-tuning: pseudo-perplexity of held-out text, speed and memory.

    `tokens_per_second` is that of the encoder alone on a batch of `batch_tokens`. `memory_bytes` is the peak: allocated
    on a GPU, or the resident set of the process on a CPU. A model without a masked-LM head has no pseudo-perplexity.
    """

    event: Literal["measured"] = "measured"
    time: str
    model_sha256: Sha256
    pseudo_perplexity: NonNegativeFloat | None = None
    tokens_per_second: NonNegativeFloat
    batch_tokens: NonNegativeInt
    memory_bytes: NonNegativeInt
    precision: str
    environment: Json


RunEvent = Annotated[
    Start
    | Setup
    | MicroBatch
    | Heartbeat
    | Steps
    | Validation
    | Checkpoint
    | Resume
    | CorpusChanged
    | End
    | Exported
    | ExternalModel
    | Scoring
    | Finetuned
    | MinimalPairs
    | Measured,
    Field(discriminator="event"),
]
RUN_EVENTS: TypeAdapter[Any] = TypeAdapter(RunEvent)


# kinds of events that a training process writes
TRAINING_EVENTS = (
    "start",
    "setup",
    "micro_batch",
    "heartbeat",
    "steps",
    "validation",
    "checkpoint",
    "resume",
    "corpus_changed",
    "end",
    "exported",
)


@dataclass(frozen=True)
class Entry:
    """Event of a file, the SHA-256 of its line, and the line's number from 1."""

    event: Any
    sha256: str
    line: int


def read_log(path: Path, events: TypeAdapter[Any] = RUN_EVENTS) -> list[Entry]:
    """Return the entries of a log, [] if there is no file. A torn last line is left out.

    Raises UserError, with the line number and a remedy, for a line that is damaged or does not follow the line before
    it.
    """
    return list(_entries(path, events))


def _entries(path: Path, events: TypeAdapter[Any]) -> Iterator[Entry]:
    """Yield the entries of a log."""
    previous = ""
    for number, line in enumerate(_whole_lines(path), 1):
        body, separator, link = line.rpartition(b',"previous":"')
        where = f"{path}:{number}"
        if not separator or not link.endswith(b'"}'):
            raise UserError(f"{where}: not a line of a run log. {RESTORE}.")
        if link[:-2].decode(errors="replace") != previous:
            raise UserError(
                f"{where}: a line before this one was changed, added or removed. {RESTORE}."
            )
        try:
            event = events.validate_json(body + b"}")
        except ValidationError as error:
            raise UserError(f"{where}: {_first_problem(error)}. {RESTORE}.") from None
        previous = _sha256(line)
        yield Entry(event, previous, number)


def _first_problem(error: ValidationError) -> str:
    """Return the first problem of a line."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def has_events(path: Path) -> bool:
    """Return whether a log has a whole line."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def head_of(path: Path) -> str | None:
    """Return the SHA-256 of a log's first line, which identifies the run, or None if it has no line."""
    lines = _whole_lines(path)
    return _sha256(lines[0]) if lines else None


class Log(Protocol):
    """Log that events are appended to."""

    def append(self, event: Event, *, sync_now: bool = True) -> str: ...


class EventLog:
    """Log in a file, to which any thread may append events.

    After a synced event, it and all events before it are on the disk.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """Continue `path` behind its last whole line.

        Raises UserError if events must be `durable` and the file system cannot sync a file.
        """
        lines = _whole_lines(path)
        self.path = path
        self.head = _sha256(lines[-1]) if lines else ""
        self._size = sum(len(line) + 1 for line in lines)
        self._lock = threading.Lock()
        self._file = FileIO(path, "ab")
        if not sync(self._file.fileno()) and durable:
            raise UserError(
                f"--runs={path.parent.parent}: this file system cannot sync a file to disk, so a crash"
                " could give budget back. Give --runs <folder> on another file system."
            )
        self._file.truncate(self._size)

    def append(self, event: Event, *, sync_now: bool = True) -> str:
        """Append an event, and return the SHA-256 of its line. On an error nothing of it is left behind."""
        body = event.model_dump_json(exclude_none=True, exclude_defaults=False)
        with self._lock:
            line = f'{body[:-1]},"previous":"{self.head}"}}'.encode()
            remaining = line + b"\n"
            try:
                while remaining:  # a write may be partial at a limit; the next one raises the error
                    written = self._file.write(remaining)
                    remaining = remaining[written:]
                if sync_now:
                    sync(self._file.fileno())
            except OSError as error:
                error.filename = str(self.path)
                self._file.truncate(self._size)
                raise
            self.head = _sha256(line)
            self._size += len(line) + 1
            return self.head

    def close(self) -> None:
        """Close the file; all events are on the disk then."""
        if not self._file.closed:
            sync(self._file.fileno())
            self._file.close()


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines without their newlines; a torn last line has none and is left out."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Return the speed of a training: tokens over all seconds charged, start-up and validations included."""
    return tokens / seconds if seconds else None


# Reading -------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A checkpoint: the number of steps before it, and the SHA-256 of its file."""

    steps: int
    sha256: str


@dataclass
class Process:
    """Training process in a log. `ended` is `killed` if it wrote no `end`."""

    start: Start
    setup: Setup | None = None
    spent_seconds: float = 0.0
    joules: float | None = None
    ended: EndReason | Literal["killed"] = "killed"


@dataclass
class Training:
    """Training in a log.

    `counters` are those of the last event. Steps, validations and `saved` checkpoints are those that no resume has
    superseded; `charged_flops` is the largest number of operations that was ever charged.
    """

    processes: list[Process] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    saved: list[Saved] = field(default_factory=list)
    retained: set[Saved] = field(default_factory=set)
    steps: list[Steps] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    superseded: list[Saved] = field(default_factory=list)
    changed_files: dict[str, bool | None] = field(default_factory=dict)
    micro_batch: MicroBatch | None = None
    exported: Exported | None = None
    charged_flops: float = 0.0
    slowest_update_seconds: float = 0.0
    has_trained: bool = False
    finished_after: int | None = None

    @property
    def spent_seconds(self) -> float:
        """Seconds on the budget's clock of all processes."""
        return sum(process.spent_seconds for process in self.processes)

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe, which the first process logged; empty before that."""
        return (self.processes[0].start.recipe or {}) if self.processes else {}

    @property
    def setup(self) -> Setup | None:
        """First setup of a process that names the corpus."""
        return next((p.setup for p in self.processes if p.setup and p.setup.corpus), None)

    @property
    def final_validation(self) -> Validation | None:
        """Last validation of the final weights, or None."""
        final = [event for event in self.validations if event.held_out_tokens is not None]
        return final[-1] if final else None

    @property
    def all_saved(self) -> list[Saved]:
        """Every checkpoint ever made, superseded ones too, oldest first."""
        return [*self.superseded, *self.saved]


def training_of(entries: Sequence[Entry]) -> Training:
    """Return the training that the events of a run log describe.

    Raises UserError for an event that cannot follow the ones before it.
    """
    training = Training()
    for entry in entries:
        problem = _cannot_follow(entry.event, training)
        if problem:
            raise UserError(f"{RUN_LOG}:{entry.line}: {problem}. {RESTORE}.")
        _add(training, entry.event)
    return training


def _cannot_follow(event: Event, training: Training) -> str | None:
    """Return why no run writes this event at this point, or None."""
    if isinstance(event, Start):
        expects_recipe = not training.processes
        if expects_recipe != (event.recipe is not None):
            return "the first start names the recipe, and only the first"
        return None
    if event.event not in TRAINING_EVENTS:
        return None  # events of a scoring may follow any event
    if not training.processes:
        return f"{event.event} before the first start"
    if isinstance(event, Timed):
        problem = _wrong_time(event, training)
        if problem:
            return problem
    if isinstance(event, Resume) and event.sha256 is not None:
        known = {saved.sha256 for saved in training.saved}
        if event.sha256 not in known:
            return "resume from a checkpoint that this log does not have"
    if training.finished_after is not None and isinstance(event, Steps | Checkpoint | Resume):
        return f"{event.event} after the run had finished"
    return None


def _wrong_time(event: Timed, training: Training) -> str | None:
    """Return why the current process does not write this event at its time, or None."""
    process = training.processes[-1]
    if process.ended != "killed":
        return f"{event.event} after the process had ended"
    if event.elapsed < process.spent_seconds:
        return f"elapsed falls from {process.spent_seconds} to {event.elapsed} s"
    last_step_seconds = getattr(event, "last_step_seconds", None) or 0.0
    rounding = 1.0
    if last_step_seconds > _earlier(training) + event.elapsed + rounding:
        return "the last step ended later than this event"
    return None


def _earlier(training: Training) -> float:
    """Return the seconds of all processes before the current one."""
    return sum(process.spent_seconds for process in training.processes[:-1])


def _add(training: Training, event: Event) -> None:
    """Update `training` by one event."""
    if isinstance(event, Start):
        training.processes.append(Process(event))
    if isinstance(event, Timed):
        _add_timed(training, event)
    if isinstance(event, Setup):
        training.processes[-1].setup = event
    elif isinstance(event, Steps):
        training.steps.append(event)
        training.has_trained = True
    elif isinstance(event, Validation):
        training.validations.append(event)
    elif isinstance(event, MicroBatch):
        training.micro_batch = event
    elif isinstance(event, CorpusChanged):
        training.changed_files = {**training.changed_files, **event.files}
    elif isinstance(event, Exported):
        training.exported = event


def _add_timed(training: Training, event: Timed) -> None:
    process = training.processes[-1]
    process.spent_seconds = event.elapsed
    if isinstance(event, Counted):
        _count(training, event)
    if isinstance(event, Checkpoint):
        training.has_trained = training.has_trained or event.step > 0
        saved = Saved(event.step, event.sha256)
        training.saved.append(saved)
        if event.retained:
            training.retained.add(saved)
    elif isinstance(event, Resume):
        _supersede(training, event)
    elif isinstance(event, End):
        process.ended = event.reason
        if event.reason == "finished":
            training.finished_after = training.counters.get("steps", 0)


def _count(training: Training, event: Counted) -> None:
    """Update the counters by an event."""
    counters = training.counters
    for name in COUNTERS:
        value = getattr(event, name)
        if value is not None:
            counters[name] = value
    if event.joules is not None:
        training.processes[-1].joules = event.joules
    charged = counters.get("flops", 0.0) + counters.get("lost_flops", 0.0)
    training.charged_flops = max(training.charged_flops, charged)
    training.slowest_update_seconds = counters.get("slowest_update_seconds", 0.0)
    training.has_trained = training.has_trained or bool(counters.get("steps"))


def _supersede(training: Training, event: Resume) -> None:
    """Drop steps, validations and checkpoints after the checkpoint of a resume."""
    steps = 0
    position = -1
    for index, saved in enumerate(training.saved):
        if saved.sha256 == event.sha256:
            steps, position = saved.steps, index
    training.superseded += training.saved[position + 1 :]
    training.saved = training.saved[: position + 1]
    training.steps = [each for each in training.steps if each.step <= steps]
    training.validations = [each for each in training.validations if each.step <= steps]
