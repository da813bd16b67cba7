"""What a training run consists of: built from the configuration, announced, logged, saved, taken back.

What a resume continues is in cramming/resume.py, how a run ends in cramming/finish.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cramming import checkpoint
from cramming import device as devices
from cramming.budget import BudgetClock, Work
from cramming.checks import Config, CooccurrenceStart, Place, check, check_run, tiny_defaults
from cramming.config import UserError
from cramming.data.batches import PINNED, Batch, BatchSource, HeldOut, tokens_per_byte
from cramming.data.corpus import Corpus
from cramming.data.manifest import corpus_folder
from cramming.data.masking import Masker
from cramming.engine import Engine, StepStats, build_engine
from cramming.environment import environment
from cramming.model.config import ModelConfig
from cramming.model.heads import PretrainedModel
from cramming.parallel.mesh import Mesh
from cramming.progress import say
from cramming.runlog import (
    RUN_LOG,
    CorpusChanged,
    Event,
    Log,
    Saved,
    Setup,
    Steps,
    Training,
    Validation,
    read_log,
    training_of,
)
from cramming.schedule import learning_rate_factor, ramp_step

if TYPE_CHECKING:
    from cramming.trackers import Trackers


class ResumeWithLessError(UserError):
    """The log now has a smaller micro-batch, with which a resume continues."""

    keeps_run = True


@dataclass(frozen=True)
class RunData:
    """What a run reads. `validation_corpus` is `corpus` itself, unless `train.validation_corpus` names another."""

    corpus: Corpus
    validation_corpus: Corpus
    source: BatchSource
    held_out: HeldOut

    @classmethod
    def open(cls, settings: Mapping[str, Any], config: Config, verify: bool) -> "RunData":
        """UserError for what is wrong with a corpus; nothing is written.

        With `verify` the shards are hashed, on the clock (seconds per gigabyte, docs/log.md): training on a damaged
        corpus would cost the day.
        """
        corpus = other = Corpus.open(corpus_folder(settings), verify=verify)
        if config.train.validation_corpus is not None:
            other = Corpus.open(
                config.train.validation_corpus, verify="validation" if verify else False
            )
        if other.manifest.tokenizer.sha256 != corpus.manifest.tokenizer.sha256:
            raise UserError(
                f"train.validation_corpus={other.folder}: it has another tokenizer than {corpus.folder}, so its tokens"
                f" mean something else; prepare it with tokenizer.path={corpus.tokenizer_file}"
            )
        held_out = HeldOut(
            _batch_source(other, "validation", config), config.train.validation_tokens
        )
        return cls(corpus, other, _batch_source(corpus, "train", config), held_out)

    def describe(self) -> dict[str, Any]:
        """The record's section `corpus`; it names the text of the validation losses where that is another's."""
        if (other := self.validation_corpus) is self.corpus:
            return self.corpus.describe()
        named = {"folder": str(other.folder), "manifest_sha256": other.manifest_sha256}
        return {**self.corpus.describe(), "validation": named}

    def changed_files(
        self, known: Mapping[str, bool | None], *, last: bool
    ) -> dict[str, bool | None]:
        """Return, and say, which files of the corpora were written to since this process checked them.

        By path, whether the file is as prepared, read again, if this is the `last` look; else None. Files are looked
        at before each checkpoint, so that a kill hides nothing of what is in the weights. Files that are `known` to
        have changed are left out before the end.
        """
        changed: dict[str, bool | None] = {}
        for corpus in dict.fromkeys((self.corpus, self.validation_corpus)):  # most runs have one
            for name in corpus.changed(last=last):
                path = str(corpus.folder / name)
                if last:
                    changed[path] = corpus.is_as_prepared(name)
                    _say_changed(path, changed[path])
                elif path not in known:
                    changed[path] = None
                    say(
                        f"warning: {path}: changed while training reads it, so the run breaks the rule on the corpus."
                        " Let nothing write there, nor change rights, owner or links."
                    )
        return changed


def _say_changed(path: str, as_prepared: bool | None) -> None:
    state = {True: "it is", False: "it is not", None: "it cannot be read, or is not"}[as_prepared]
    say(f"{path}: changed while training read it; now {state} as `prepare` wrote it")


def _batch_source(
    corpus: Corpus, split: Literal["train", "validation"], config: Config
) -> BatchSource:
    special, train, seed = corpus.special_ids, config.train, config.training_seed
    masker = Masker(config.objective, corpus.vocab_size, special.mask, tuple(special), seed)
    order = train.order if split == "train" else "shuffled"
    stream = corpus.stream(split, order)
    return BatchSource(
        stream, masker, train.sequence_length, train.packing, seed, shuffle=order == "shuffled"
    )


@dataclass
class TrainState:
    """All that the training loop works with.

    `config` has the corpus's vocabulary size and a number for `train.micro_batch`. `clock`, `log` and `trackers` are
    rank 0's alone.
    """

    folder: Path
    config: Config
    mesh: Mesh
    data: RunData
    engine: Engine
    work: Work
    saved_steps: int  # after which the newest checkpoint was made, 0 if there is none
    attention_kernels: list[str]
    gates: dict[str, str]
    clock: BudgetClock | None
    log: Log | None
    trackers: "Trackers | None"
    validation: list[Batch]
    changed_files: dict[str, bool | None]
    steps_before_resume: list[tuple[float, StepStats]]
    chose_micro_batch: bool  # `train.micro_batch: auto` found it
    saver: checkpoint.Saver = field(default_factory=checkpoint.Saver)

    def append(self, event: Event) -> None:
        """Append an event to the log; it is on the disk with the next heartbeat or checkpoint."""
        assert self.log
        self.log.append(event, sync_now=False)

    def note_changed_files(self, *, last: bool = False) -> None:
        """Log which files of the corpora have changed; see `RunData.changed_files`."""
        changed = self.data.changed_files(self.changed_files, last=last)
        if changed:
            self.changed_files |= changed
            self.append(CorpusChanged(files=changed))

    def save_checkpoint(self, kept: bool = False) -> None:
        """Save the present state; of all processes, which all call this, rank 0 writes.

        The file may be complete only later (`checkpoint.Saver`).
        """
        enter: Callable[[str], None] = _enter_nothing
        if self.clock:
            self.note_changed_files()
            enter = partial(self.clock.enter_checkpoint, step=self.work.steps, kept=kept)
        self.saver.save(self.folder / "checkpoints", self.engine, self.work, enter, kept)
        self.saved_steps = self.work.steps

    def roll_back(self) -> None:
        """Return to the newest checkpoint, or to no work at all: the step just done ended too late."""
        folder, saved = self.folder / "checkpoints", None
        self.saver.wait()
        if self.clock:
            training = training_of(read_log(self.folder / RUN_LOG))
            saved = checkpoint.newest_of(folder, training.saved)
            say(
                f"step {self.work.steps + 1} ended {-self.clock.seconds_left():.1f} s after the deadline and is not"
                f" kept: rolled back to step {saved.steps if saved else 0}"
            )
        saved = self.mesh.object_from_main(saved)
        self.work = Work()
        if saved and saved.steps:
            self.work = checkpoint.load(checkpoint.path_of(folder, saved), self.engine)
        if self.clock:
            self.clock.attach(self.work, saved.sha256 if saved else None)

    def describe_training(self) -> dict[str, Any]:
        """Return how the model is trained, for the log's `setup`."""
        count = self.config.parameters
        return {
            "start": self.config.start.name,
            "objective": self.config.objective.kinds,
            "parameters": count.total,
            "parameters_without_embeddings": count.without_embeddings,
            "precision": self.engine.precision.mode,
            "residual": self.engine.precision.residual,
            "attention_kernels": self.attention_kernels,
            "peak_learning_rate": self.config.peak_learning_rate,
            "seed": self.config.seed,
            "gate": self.gates,
            # FlexAttention and torchao's optimizers compile in any case.
            "compiled": self.config.runtime.compile != "off" or devices.compiled_graphs() > 0,
        }

    def announce(self) -> None:
        """Print the derived arithmetic before the long part begins."""
        assert self.clock
        config, train, budget, engine = (
            self.config,
            self.config.train,
            self.clock.config,
            self.engine,
        )
        assert isinstance(engine.model, PretrainedModel)
        count, processes = config.parameters, self.mesh.data_size
        say(
            f"model: {count.total / 1e6:.1f}M parameters, {count.without_embeddings / 1e6:.1f}M without embeddings,"
            f" vocabulary {config.model.vocab_size}{engine.model.describe_generator()};"
            f" {config.flops_per_token() / 1e6:.1f} MFLOP per token"
        )
        targets = ", ".join(
            f"{phase.targets_per_row(train.sequence_length)} {'causal ' * phase.causal}targets per sequence"
            + f" from {at:.0%} of the budget on" * (at > 0)
            for at, phase in config.objective.each_phase.items()
        )
        if by_loss := config.objective.by_loss:
            targets += (
                f", chosen by loss from {by_loss.start:.0%} to {by_loss.until:.0%} of the budget"
            )
        kernels = " and ".join(self.attention_kernels)
        if config.attention.flash != "auto":
            kernels += f" (FlashAttention {config.attention.flash})"
        say(
            f"step: {train.batch_size} sequences of {train.sequence_length} ="
            f" {train.batch_size * train.sequence_length} tokens ="
            f" {train.batch_size // (train.rows * processes)} x {train.rows} sequences x {processes} process(es);"
            f" {targets}; {engine.precision.mode}, residual stream in {engine.precision.residual}, on {engine.device},"
            f" attention kernel {kernels}; peak learning rate"
            f" {config.peak_learning_rate:.3g}"
        )
        other = (
            f", validated on the text of {train.validation_corpus}"
            if train.validation_corpus
            else ""
        )
        say(
            f"corpus: {self.data.corpus.folder}, {self.data.source.stream.num_tokens / 1e6:.1f}M tokens{other}; budget:"
            f" {budget.limit:g} {budget.unit}; started at step {self.work.steps}"
            f" with {self.clock.elapsed_seconds():.1f} s on the clock"
        )
        if warning := tiny_defaults(config):
            say(warning)

    def log_step(
        self, recent: Sequence[tuple[float, StepStats]], progress: float, rate: float
    ) -> None:
        """Log the `recent` steps: their means, the numbers of each, and this process's tokens per second."""
        each_progress, each = zip(*recent, strict=True)
        factor = learning_rate_factor(self.config.schedule, each_progress[-1])
        event = Steps(
            step=self.work.steps,
            progress=progress,
            seconds=self.work.last_step_seconds,
            tokens=self.work.tokens,
            loss=finite_or_none(sum(s.loss for s in each) / len(each)),
            accuracy=finite_or_none(sum(s.accuracy for s in each) / len(each)),
            grad_norm=finite_or_none(each[-1].grad_norm),
            lr=self.config.peak_learning_rate * factor,
            tokens_per_second=rate,
            each_progress=list(each_progress),
            each_loss=[finite_or_none(s.loss) for s in each],
            each_accuracy=[finite_or_none(s.accuracy) for s in each],
        )
        self.append(event)
        if self.trackers:
            self.trackers.write(_scalars(event, ""))

    def validate(self, progress: float, more: Mapping[str, Any] | None = None) -> Validation | None:
        """Log the loss on the held-out text, in the form that is one for all runs, with what was measured `more`.

        It is on the clock in training. Of a run that detects replaced tokens it is the encoder's loss at that: its
        generator's would say nothing about the encoder. All processes share the work; rank 0 has the result.
        """
        step = self.work.steps
        loss, accuracy, targets = self.engine.evaluate(self.validation)
        if not (self.clock and self.log):
            return None
        objective = self.config.objective
        prefix = "replaced_token_" if objective.replaces_tokens else ""
        say(
            f"step {step} ({progress:.0%} of the budget): {objective.validation_name} {loss:.3f},"
            f" accuracy {accuracy:.3f}"
        )
        measured: dict[str, Any] = {
            f"{prefix}loss": finite_or_none(loss),
            f"{prefix}accuracy": finite_or_none(accuracy),
        }
        event = Validation(
            step=step,
            progress=progress,
            seconds=self.clock.elapsed_seconds(),
            tokens=self.work.tokens,
            targets=int(targets),
            **measured,
            **(more or {}),
        )
        self.append(event)
        if self.trackers:
            self.trackers.write(_scalars(event, "validation_"))
        return event


def _enter_nothing(sha256: str) -> None:
    """Do nothing: only rank 0 has a log."""


def finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _scalars(event: Steps | Validation, prefix: str) -> dict[str, float]:
    """Return the event's numbers by name, for trackers."""
    place = ("step", "progress", "seconds", "tokens")
    numbers: dict[str, float] = {}
    for name, value in event.model_dump().items():
        if isinstance(value, int | float):
            numbers[name if name in place else f"{prefix}{name}"] = value
    return numbers


def build_train_state(
    settings: dict[str, Any],
    folder: Path,
    mesh: Mesh,
    device: torch.device,
    clock: BudgetClock | None,
) -> TrainState:
    """Build a new run, or one that resumes from its newest checkpoint."""
    config = Config.of(settings)
    kernels, gates = check_run(settings, config, device, mesh.world_size)
    data = RunData.open(settings, config, verify=mesh.is_main)
    config = replace(config, model=fit_to_corpus(config.model, data.corpus))
    training, saved = Training(), None
    if clock:
        training = training_of(read_log(folder / RUN_LOG))
        saved = checkpoint_to_resume(folder, training)
        if mesh.world_size == 1:  # the meter would know of one card only
            clock.measure_energy(devices.nvml_reader(device, "TotalEnergyConsumption"))
    saved = mesh.object_from_main(saved)
    newest = checkpoint.path_of(folder / "checkpoints", saved) if saved and saved.steps else None
    here = environment_here(device, folder, training.has_trained)
    engine, work = start_engine(config, data, folder, mesh, device, newest)
    if clock:
        clock.attach(work, saved.sha256 if saved else None, resumed=training.has_trained)
    config = with_micro_batch(config, data, engine, training, clock)
    trackers = None
    if clock and config.trackers:
        from cramming.trackers import Trackers  # only for those who ask

        trackers = Trackers(folder, config.trackers, work.steps, settings)
    state = TrainState(
        folder=folder,
        config=config,
        mesh=mesh,
        data=data,
        engine=engine,
        work=work,
        saved_steps=work.steps,
        attention_kernels=kernels,
        gates=gates,
        clock=clock,
        log=clock.log if clock else None,
        trackers=trackers,
        validation=data.held_out.batches(PINNED, config.train.rows),
        changed_files=dict(training.changed_files),
        steps_before_resume=logged_steps(training, work.steps),
        chose_micro_batch=settings["train"]["micro_batch"] == "auto",
    )
    if clock and not clock.has_ended:
        log_setup(state, here, is_first=training.setup is None)
    return state


def logged_steps(training: Training, steps: int) -> list[tuple[float, StepStats]]:
    """Return the steps whose means the log's row at step `steps` has, each with the progress at which it began.

    So the rows of a resumed run are means over as many steps as without the interruption.
    """
    row = next((row for row in training.steps if row.step == steps), None)
    if row is None:
        return []
    found = []
    for progress, loss, accuracy in zip(
        row.each_progress, row.each_loss, row.each_accuracy, strict=True
    ):
        stats = StepStats(
            loss=math.nan if loss is None else loss,
            accuracy=math.nan if accuracy is None else accuracy,
            grad_norm=math.nan,
            skipped=False,
        )
        found.append((progress, stats))
    return found


def log_setup(state: TrainState, environment: dict[str, Any], *, is_first: bool) -> None:
    """Log what this process knows once its model is built; the corpus in the first setup alone."""
    data = state.data
    setup = Setup(
        environment=environment,
        manifest_sha256=data.corpus.manifest_sha256,
        corpus=data.describe() if is_first else None,
        devices=state.mesh.world_size,
        windows=data.source.num_windows,
        tokens_per_byte=tokens_per_byte(data.validation_corpus.manifest),
        training=state.describe_training(),
    )
    state.append(setup)
    state.note_changed_files()


def checkpoint_to_resume(folder: Path, training: Training) -> Saved | None:
    """Return the checkpoint that a process of this run begins with; None where it begins with the first step.

    Raises UserError where the folder holds checkpoints that the log does not have.
    """
    checkpoints, ended = folder / "checkpoints", training.finished_after
    known = [saved for saved in training.saved if ended in (None, saved.steps)]
    newest = checkpoint.newest_of(checkpoints, known)
    if newest is None and ended:
        raise UserError(
            f"{folder}: the run ended after {ended} steps and its last checkpoint is gone."
            " Start again under another name."
        )
    if newest is None and known:
        say(
            f"{checkpoints}: nothing is left of {len(known)} checkpoints; training begins anew, the time stays spent"
        )
    return newest


def fit_to_corpus(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """Fill in the vocabulary size (padded to a multiple of 64: whole tiles for matrix kernels), or check it."""
    size = model.vocab_size or (corpus.vocab_size + 63) // 64 * 64
    if size < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size={size}: the tokenizer of {corpus.folder} has {corpus.vocab_size} entries;"
            " leave model.vocab_size=null"
        )
    return replace(model, vocab_size=size)


def environment_here(
    device: torch.device, folder: Path | None = None, has_trained: bool = False
) -> dict[str, Any]:
    """Return where and with which code this process runs; of a training in `folder` also where it compiles to."""
    here = {**environment(asdict(devices.describe(device))), "threads": torch.get_num_threads()}
    if folder is not None:
        here["compile_cache"] = devices.compile_cache(folder, has_trained)
    return here


def start_engine(
    config: Config,
    data: RunData,
    folder: Path,
    mesh: Mesh,
    device: torch.device,
    saved: Path | None,
) -> tuple[Engine, Work]:
    """The engine with the state that is `saved`, else that before the first step, and the work that is done."""
    devices.prepare(config.runtime, device, folder)
    torch.manual_seed(
        config.training_seed
    )  # weights and dropout; data order and masks are functions of the seed
    try:
        engine = build_engine(config, mesh, device)
        work = checkpoint.load(saved, engine) if saved else Work()
        if not saved and isinstance(config.start, CooccurrenceStart):
            from cramming.start import start_engine_from_text

            start_engine_from_text(engine, data.corpus, config, config.start)
        return engine, work
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        count = config.parameters.total / 1e6
        raise UserError(
            f"model: {device} ran out of memory before the first step: the model has {count:.0f}M parameters; take a"
            f" smaller one{', or memory=offload-all' * (device.type == 'cuda')} (`cramming plan` shows what it needs)"
        ) from None


def with_micro_batch(
    config: Config, data: RunData, engine: Engine, training: Training, clock: BudgetClock | None
) -> Config:
    """Return the configuration with a number for `train.micro_batch: auto`."""
    train = config.train
    if train.micro_batch != "auto":
        return config
    from cramming.plan.micro_batch import micro_batch_of_run  # what it needs takes time to import

    largest = ramp_step(train.batch_ramp, train.batch_size) // engine.mesh.data_size
    source = data.source.with_objective(config.objective.with_most_targets())
    log = clock.log if clock else None
    rows = micro_batch_of_run(training, log, engine, source.batch, config, largest)
    config = replace(config, train=replace(train, micro_batch=rows))
    check(config, Place.here(config, engine.device, engine.mesh.world_size))
    return config
