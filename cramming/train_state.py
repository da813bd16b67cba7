"""What a training run consists of: built from the configuration, announced, logged, saved, taken back.

Nothing is written before all that can be refused has been checked. What a resume goes on with is in cramming/resume.py,
how a run ends in cramming/finish.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from cramming import checkpoint
from cramming import device as devices
from cramming.budget import BudgetClock, Work
from cramming.checks import Config, CooccurrenceStart, Place, check, check_run, tiny_defaults
from cramming.config import UserError
from cramming.data.batches import PINNED, Batch, BatchSource, HeldOut
from cramming.data.corpus import Corpus
from cramming.data.manifest import corpus_folder
from cramming.data.masking import Masker
from cramming.engine import Engine, StepStats, build_engine
from cramming.environment import environment
from cramming.files import write_atomically
from cramming.journal import JOURNAL, checkpoints_of, first_line_sha256, has_trained, read_journal
from cramming.model.config import ModelConfig
from cramming.model.heads import PretrainedModel
from cramming.parallel.mesh import Mesh
from cramming.progress import say
from cramming.record import (
    MetricsLog,
    create_run_folder,
    is_untouched,
    load_record,
    setup_hash,
    write_record_section,
)
from cramming.schedule import learning_rate_factor, ramp_step


class ResumeWithLessError(UserError):
    """The record now has a smaller micro-batch, with which a resume goes on: the run is to be kept."""


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

    def note_changed_files(self, folder: Path, again: bool = False) -> None:
        """Record, and say, which files of the corpora were written to since this process checked them.

        `corpus.changed`: by path, whether the file was as prepared when it was read `again`, after the end; null
        before, and where it could not be read. It is looked at before each checkpoint: a kill hides nothing of what is
        in the weights.
        """
        changed = {
            str(corpus.folder / name): corpus.is_as_prepared(name) if again else None
            for corpus in dict.fromkeys((self.corpus, self.validation_corpus))  # most runs have one
            for name in corpus.changed(last=again)
        }
        if not changed:
            return
        known = changed_before(folder)
        for path, as_prepared in changed.items():
            if again:
                now = {True: "it is", False: "it is not", None: "it cannot be read, or is not"}[
                    as_prepared
                ]
                say(f"{path}: changed while training read it; now {now} as `prepare` wrote it")
            elif path not in known:
                say(
                    f"warning: {path}: changed while training reads it, so the run breaks R15; let nothing write there,"
                    " nor change rights, owner or links: the system's time of a change is the same for all of these"
                )
        write_record_section(folder, corpus={"changed": {**known, **changed}})


def _batch_source(
    corpus: Corpus, split: Literal["train", "validation"], config: Config
) -> BatchSource:
    special, train, seed = corpus.special_ids, config.train, config.seed
    masker = Masker(config.objective, corpus.vocab_size, special.mask, tuple(special), seed)
    order = train.order if split == "train" else "shuffled"
    stream = corpus.stream(split, order)
    return BatchSource(
        stream, masker, train.sequence_length, train.packing, seed, shuffle=order == "shuffled"
    )


def changed_before(folder: Path) -> dict[str, bool | None]:
    """What `note_changed_files` has recorded: no resume takes it back."""
    found: dict[str, bool | None] = load_record(folder).get("corpus", {}).get("changed", {})
    return found


@dataclass
class TrainState:
    """All that the training loop works with. `config` has the corpus's vocabulary size and a number for
    `train.micro_batch`. `clock` and `metrics` are rank 0's alone."""

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
    metrics: MetricsLog | None
    validation: list[Batch]
    saver: checkpoint.Saver = field(default_factory=checkpoint.Saver)

    def save_checkpoint(self, kept: bool = False) -> None:
        """Save the present state, once its row of the log is on the disk and what it was trained on is looked at; of
        all processes, which all call this, rank 0 writes. The file may be complete only later (`checkpoint.Saver`)."""
        if self.metrics:
            self.metrics.sync()
            self.data.note_changed_files(self.folder)
        enter: Callable[[str], None] = lambda sha256: None  # noqa: E731
        if self.clock:
            enter = partial(self.clock.enter_checkpoint, work=replace(self.work), kept=kept)
        self.saver.save(self.folder / "checkpoints", self.engine, self.work, enter, kept)
        self.saved_steps = self.work.steps

    def take_back(self) -> None:
        """Go back to the newest checkpoint, to no work at all if there is none: the step just done ended too late."""
        folder, saved = self.folder / "checkpoints", None
        self.saver.wait()
        if self.clock:
            saved = checkpoint.newest_of(
                folder, checkpoints_of(read_journal(self.folder / JOURNAL))
            )
            say(
                f"step {self.work.steps + 1} ended {-self.clock.seconds_left():.1f} s after the deadline, so it is not"
                f" kept: back to step {saved.steps if saved else 0}"
            )
        saved = self.mesh.object_from_main(saved)
        self.work = (
            checkpoint.load(checkpoint.path_of(folder, saved), self.engine)
            if saved and saved.steps
            else Work()
        )
        if self.clock:
            self.clock.attach(self.work, saved.sha256 if saved else None)

    def setup(self) -> dict[str, Any]:
        """Of the record's section `pretrain`, how the model is trained."""
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
            f" vocabulary {config.model.vocab_size}{engine.model.also()};"
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
        """One row of metrics.jsonl: means over the `recent` steps, and this process's tokens per second.

        Of each of these steps it has what a replay (cramming/replay.py) and a resume (`logged_steps`) need to know.
        """
        assert self.metrics
        each_progress, each = zip(*recent, strict=True)
        row = {
            "step": self.work.steps,
            "progress": progress,
            "seconds": self.work.last_step_seconds,
            "tokens": self.work.tokens,
            "loss": sum(s.loss for s in each) / len(each),
            "accuracy": sum(s.accuracy for s in each) / len(each),
            "grad_norm": each[-1].grad_norm,
            "lr": self.config.peak_learning_rate
            * learning_rate_factor(self.config.schedule, each_progress[-1]),
            "tokens_per_second": rate,
            "each_progress": each_progress,
            "each_loss": [s.loss for s in each],
            "each_accuracy": [s.accuracy for s in each],
        }
        self.metrics.write(row)

    def validate(self, progress: float, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Loss on the held-out text, in the form that is one for all runs; logged, and on the clock in training, in one
        row with what was measured `further`.

        Of a run that tells replaced tokens it is the encoder's loss at that, under a name of its own: its generator's
        would say nothing about the encoder. All processes share the work; rank 0 has the result.
        """
        step = self.work.steps
        loss, accuracy, targets = self.engine.evaluate(self.validation)
        if not (self.clock and self.metrics):
            return {}
        objective = self.config.objective
        found: dict[str, float | None] = {"loss": loss, "accuracy": accuracy}
        if objective.replaces_tokens:
            found = {
                "loss": None,
                "accuracy": None,
                "replaced_token_loss": loss,
                "replaced_token_accuracy": accuracy,
            }
        row = {
            "step": step,
            "progress": progress,
            "tokens": self.work.tokens,
            "seconds": self.clock.elapsed_seconds(),
        }
        name = objective.validation_name
        say(
            f"step {step} ({progress:.0%} of the budget): {name} {loss:.3f}, accuracy {accuracy:.3f}"
        )
        found |= further or {}
        self.metrics.write({**row, **{f"validation_{key}": value for key, value in found.items()}})
        return {**found, "targets": targets}


def build_train_state(
    settings: dict[str, Any], folder: Path, mesh: Mesh, device: torch.device
) -> TrainState:
    """A new run, or one that goes on from its newest checkpoint."""
    config = Config.of(settings)
    kernels, gates = check_run(settings, config, device, mesh.world_size)
    data = RunData.open(settings, config, verify=mesh.is_main)
    config = replace(config, model=fit_to_corpus(config.model, data.corpus))
    saved = clock = None
    if mesh.is_main and not is_untouched(folder):
        from cramming.resume import checkpoint_to_resume

        saved = checkpoint_to_resume(folder, settings, data.describe(), config.budget)
    if mesh.is_main:
        clock = begin_record(settings, config, data, gates, folder, mesh, device)
    saved = mesh.object_from_main(saved)
    newest = checkpoint.path_of(folder / "checkpoints", saved) if saved and saved.steps else None
    engine, work = start_engine(config, data, folder, mesh, device, newest)
    if clock:
        clock.attach(work, saved.sha256 if saved else None)
    config = with_micro_batch(config, data, engine, folder)
    validation = data.held_out.batches(PINNED, config.train.rows)
    metrics = MetricsLog(folder) if mesh.is_main else None
    if metrics and config.trackers:
        from cramming.trackers import TrackedLog  # only for those who ask

        metrics = TrackedLog(folder, config.trackers, work.steps, settings)
    return TrainState(
        folder,
        config,
        mesh,
        data,
        engine,
        work,
        work.steps,
        kernels,
        gates,
        clock,
        metrics,
        validation,
    )


def fit_to_corpus(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """Fill in the vocabulary size (padded to a multiple of 64: whole tiles for matrix kernels), or check it."""
    size = model.vocab_size or (corpus.vocab_size + 63) // 64 * 64
    if size < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size={size}: the tokenizer of {corpus.folder} has {corpus.vocab_size} entries;"
            " leave model.vocab_size=null"
        )
    return replace(model, vocab_size=size)


def begin_record(
    settings: dict[str, Any],
    config: Config,
    data: RunData,
    gates: Mapping[str, str],
    folder: Path,
    mesh: Mesh,
    device: torch.device,
) -> BudgetClock:
    """The run folder with what is known at the start, and the clock that has its journal there.

    The journal begins before the record's section says so: killed at any moment, a run never has one without the other.
    What any process of the run forced, or compiled elsewhere, and the most devices that one had, no resume takes back.
    """
    cache = devices.compile_cache(folder, has_trained(read_journal(folder / JOURNAL)))
    here = {**environment_here(device), "compile_cache": cache}
    create_run_folder(folder, settings, here, resume=config.resume)
    write_atomically(folder / "corpus.json", data.corpus.manifest.to_json())
    before = load_record(folder).get("pretrain", {})
    alone = mesh.world_size == 1  # the meter would know of one card only
    joules = devices.nvml_reader(device, "TotalEnergyConsumption") if alone else lambda: None
    witnesses = {"corpus": data.corpus.manifest_sha256, "setup": setup_hash(here)}
    clock = BudgetClock(config.budget, folder / JOURNAL, joules, **witnesses)
    begun = {
        "status": "running",
        "journal_start": first_line_sha256(folder / JOURNAL),
        "forced": sorted(
            {
                *before.get("forced", []),
                *(trick for trick, state in gates.items() if state == "forced"),
            }
        ),
        "devices": max(mesh.world_size, before.get("devices", 1)),
    }
    write_record_section(
        folder, corpus={"changed": changed_before(folder), **data.describe()}, pretrain=begun
    )
    data.note_changed_files(folder)
    return clock


def environment_here(device: torch.device) -> dict[str, Any]:
    """The record's section `environment`."""
    return {**environment(asdict(devices.describe(device))), "threads": torch.get_num_threads()}


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
        config.seed
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


def with_micro_batch(config: Config, data: RunData, engine: Engine, folder: Path) -> Config:
    """With a number for `train.micro_batch: auto`."""
    train = config.train
    if train.micro_batch != "auto":
        return config
    from cramming.plan.micro_batch import micro_batch_of_run  # what it needs takes time to import

    largest = ramp_step(train.batch_ramp, train.batch_size) // engine.mesh.data_size
    source = data.source.of(config.objective.with_most_targets())
    rows = micro_batch_of_run(folder, engine, source.batch, config, largest)
    config = replace(config, train=replace(train, micro_batch=rows))
    check(config, Place.here(config, engine.device, engine.mesh.world_size))
    return config
