"""The parts of a training run, built from the configuration and checked before anything is written."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cramming import checkpoint, energy, runtime
from cramming import device as devices
from cramming.budget import BudgetClock, Work
from cramming.checks import Config, Place, RandomStart, StartConfig, TrainConfig, check, check_run
from cramming.config import UserError
from cramming.data.batches import Batch, BatchSource
from cramming.data.corpus import Corpus, corpus_folder
from cramming.data.held_out import PINNED, HeldOut
from cramming.data.masking import Masker, ObjectiveConfig
from cramming.engine import Engine, build_engine
from cramming.environment import environment
from cramming.journal import JOURNAL, checkpoints_of, first_line_sha256, has_trained, read_journal
from cramming.model.config import ModelConfig, count_parameters, flops_per_token
from cramming.model.heads import MaskedLM
from cramming.optim import HostOptimizer
from cramming.parallel.mesh import Mesh
from cramming.progress import say
from cramming.record import (
    MetricsLog,
    create_run_folder,
    load_record,
    write_record_section,
)
from cramming.resume import checkpoint_to_resume
from cramming.runtime import RuntimeConfig
from cramming.schedule import Schedule, ramp_step


@dataclass
class Parts:
    """What the loop works with. `clock` and `metrics` are rank 0's alone."""

    folder: Path
    config: Config
    train: TrainConfig
    schedule: Schedule
    start: StartConfig
    saving: checkpoint.CheckpointConfig
    peak_learning_rate: float
    corpus: Corpus
    model_config: ModelConfig
    flops_per_token: float
    micro_batches: int
    engine: Engine
    mesh: Mesh
    runtime: RuntimeConfig
    source: BatchSource
    held_out: HeldOut
    validation: list[Batch]
    validation_corpus: Corpus
    work: Work
    saved_steps: int  # after which the newest checkpoint was made, 0 if there is none
    attention_kernels: list[str]
    gates: dict[str, str]
    clock: BudgetClock | None
    metrics: MetricsLog | None

    def save_checkpoint(self) -> None:
        """Write the present state, once its row of the log is on the disk and what it was trained on is looked at."""
        assert self.clock and self.metrics
        self.metrics.sync()
        note_changed_files(self.folder, self.corpus, self.validation_corpus)
        engine, folder = self.engine, self.folder / "checkpoints"
        state = (engine.model, engine.optimizer, engine.precision.scaler)
        checkpoint.save(folder, *state, self.work, self.clock.enter_checkpoint)
        self.saved_steps = self.work.steps

    def take_back(self) -> None:
        """Go back to the newest checkpoint, to no work at all if there is none: the step just done ended too late."""
        engine, folder = self.engine, self.folder / "checkpoints"
        late = -self.clock.seconds_left() if self.clock else 0.0
        known = checkpoints_of(read_journal(self.folder / JOURNAL)) if self.mesh.is_main else []
        saved = checkpoint.newest_of(folder, known) if self.mesh.is_main else None
        steps = int(self.mesh.from_main(saved.steps if saved else 0))
        if self.mesh.is_main:
            number = self.work.steps + 1
            say(f"step {number} ended {late:.1f} s after the deadline, so it is not kept: back to step {steps}")
        state = (engine.model, engine.optimizer, engine.precision.scaler)
        self.work = checkpoint.load(checkpoint.path_of(folder, steps), *state) if steps else Work()
        if self.clock:
            self.clock.attach(self.work, saved.sha256 if saved else None)


@dataclass(frozen=True)
class Checked:
    """What a run reads and how it computes, once nothing of it can be refused any more."""

    corpus: Corpus
    validation_corpus: Corpus  # the same one, unless `train.validation_corpus` names another
    model: ModelConfig
    source: BatchSource
    held_out: HeldOut
    attention_kernels: list[str]
    gates: dict[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, Any], config: Config, mesh: Mesh, device: torch.device) -> "Checked":
        """UserError for what is wrong with settings or corpus; nothing is written."""
        kernels, gates = check_run(settings, config, device, mesh.world_size)
        # Hashing is on the clock (seconds per gigabyte, docs/log.md); training on a damaged corpus would cost the day.
        corpus = Corpus.open(corpus_folder(settings), verify=mesh.is_main)
        model = fit_to_corpus(config.model, corpus)
        train, objective = config.train, config.objective
        source = batch_source(corpus, "train", train, objective, config.seed)
        other = open_validation_corpus(train, corpus, verify=mesh.is_main)
        windows = batch_source(other, "validation", train, objective, config.seed)
        held_out = HeldOut(windows, train.validation_tokens)
        return cls(corpus, other, model, source, held_out, kernels, gates)

    def describe_corpus(self) -> dict[str, Any]:
        """The record's section `corpus`; it names the text of the validation losses where that is another's."""
        if (other := self.validation_corpus) is self.corpus:
            return self.corpus.describe()
        named = {"folder": str(other.folder), "manifest_sha256": other.manifest_sha256}
        return {**self.corpus.describe(), "validation": named}


def build_parts(settings: dict[str, Any], folder: Path, mesh: Mesh, device: torch.device) -> Parts:
    """Read every section of the configuration, then build; nothing is written before all of it has been checked."""
    config = Config.of(settings)
    found = Checked.of(settings, config, mesh, device)
    config, corpus = replace(config, model=found.model), found.describe_corpus()
    saved = checkpoint_to_resume(folder, settings, corpus, config.budget) if mesh.is_main else None
    clock = open_record(settings, config, found, folder, mesh, device) if mesh.is_main else None
    steps = int(mesh.from_main(saved.steps if saved else 0))
    engine, work = start_engine(config, found, folder, mesh, device, steps)
    if clock:
        clock.attach(work, saved.sha256 if saved else None)
    config = with_micro_batch(config, found, engine, folder)
    train, targets_per_token = config.train, config.targets_per_row / config.train.sequence_length
    return Parts(
        folder=folder,
        config=config,
        train=train,
        schedule=config.schedule,
        start=config.start,
        saving=config.checkpoint,
        peak_learning_rate=config.peak_learning_rate,
        corpus=found.corpus,
        model_config=config.model,
        flops_per_token=flops_per_token(
            config.model, train.sequence_length, targets_per_token, config.attention.last_layer
        ),
        micro_batches=train.batch_size // (train.rows * mesh.world_size),
        engine=engine,
        mesh=mesh,
        runtime=config.runtime,
        source=found.source,
        held_out=found.held_out,
        validation=found.held_out.batches(PINNED, train.rows) if mesh.is_main else [],
        validation_corpus=found.validation_corpus,
        work=work,
        saved_steps=steps,
        attention_kernels=found.attention_kernels,
        gates=found.gates,
        clock=clock,
        metrics=MetricsLog(folder) if mesh.is_main else None,
    )


def open_record(
    settings: dict[str, Any], config: Config, found: Checked, folder: Path, mesh: Mesh, device: torch.device
) -> BudgetClock:
    """The run folder with what is known at the start, and the clock that has its journal there.

    The journal begins before the record's section says so: killed at any moment, a run never has one without the other.
    """
    described = devices.describe(device)
    create_run_folder(folder, settings, environment(asdict(described)), resume=config.resume)
    gpu = energy.Gpu.open(devices.nvml_uuid(device)) if mesh.world_size == 1 else None  # one card is all it would know
    meter = energy.Meter(gpu) if gpu else None
    clock = BudgetClock(config.budget, folder / JOURNAL, meter, found.corpus.manifest_sha256)
    begun = {
        "status": "running",
        "journal_start": first_line_sha256(folder / JOURNAL),
        "forced": forced_tricks(folder, found.gates),
        "compile_cache": compile_cache(folder),
    }
    write_record_section(folder, corpus={"changed": changed_before(folder), **found.describe_corpus()}, pretrain=begun)
    note_changed_files(folder, found.corpus, found.validation_corpus)
    return clock


def note_changed_files(folder: Path, *corpora: Corpus, again: bool = False) -> None:
    """Put on record, and say, which files of the corpora were written to since this process checked them.

    `corpus.changed`: by path, whether the file was as prepared when it was read `again`, after the end; null before,
    and where it could not be read. It is looked at before each checkpoint, so that a kill hides nothing of what is in
    the weights.
    """
    changed = {
        str(corpus.folder / name): corpus.is_as_prepared(name) if again else None
        for corpus in dict.fromkeys(corpora)  # most runs have one
        for name in corpus.changed(last=again)
    }
    known = changed_before(folder) if changed else {}
    for path, as_prepared in changed.items():
        if again:
            now = {True: "it is", False: "it is not", None: "it cannot be read, or is not"}[as_prepared]
            say(f"{path}: changed while training read it; now {now} as `prepare` wrote it")
        elif path not in known:
            say(
                f"warning: {path}: changed while training reads it, so the run breaks R15; let nothing write there, nor"
                " change rights, owner or links: the system's time of a change is the same for all of these"
            )
    if changed:
        write_record_section(folder, corpus={"changed": {**known, **changed}})


def changed_before(folder: Path) -> dict[str, bool | None]:
    """What is on record of `note_changed_files`: no resume takes it back."""
    found: dict[str, bool | None] = load_record(folder).get("corpus", {}).get("changed", {})
    return found


def start_engine(
    config: Config, found: Checked, folder: Path, mesh: Mesh, device: torch.device, steps: int
) -> tuple[Engine, Work]:
    """The engine with the state after `steps`, from its checkpoint, and the work that is done."""
    runtime.prepare(config.runtime, device, folder)
    devices.seed_everything(config.seed)
    try:
        engine = build_engine(config, mesh, device)
        state = (engine.model, engine.optimizer, engine.precision.scaler)
        if steps:
            return engine, checkpoint.load(checkpoint.path_of(folder / "checkpoints", steps), *state)
        start_model(engine, config.start, found.corpus, config.seed, mesh)
        return engine, Work()
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        count = count_parameters(config.model).total / 1e6
        raise UserError(
            f"model: {device} ran out of memory before the first step: the model has {count:.0f}M parameters; take a"
            f" smaller one{', or memory=offload-all' * (device.type == 'cuda')} (`cramming plan` shows what it needs)"
        ) from None


def with_micro_batch(config: Config, found: Checked, engine: Engine, folder: Path) -> Config:
    """With a number for `train.micro_batch: auto`."""
    train = config.train
    if train.micro_batch != "auto":
        return config
    from cramming.plan.micro_batch import micro_batch_of_run  # only here: what it needs takes time to import

    largest = ramp_step(train.batch_ramp, train.batch_size) // engine.mesh.world_size
    rows = micro_batch_of_run(folder, engine, found.source.batch, config, largest)
    config = replace(config, train=replace(train, micro_batch=rows))
    check(config, Place.here(config, engine.device, engine.mesh.world_size))
    return config


def start_model(engine: Engine, config: StartConfig, corpus: Corpus, seed: int, mesh: Mesh) -> None:
    """Weights that do not come from chance alone; all processes get those of the first."""
    if isinstance(config, RandomStart):
        return
    assert isinstance(engine.model, MaskedLM)
    if mesh.is_main:
        from cramming.start import start_from_text  # scipy and scikit-learn take a second to import

        start_from_text(engine.model, corpus.stream("train"), tuple(corpus.special_ids), config, seed)
    mesh.share(engine.model.parameters())
    if isinstance(engine.optimizer, HostOptimizer):
        engine.optimizer.take_weights()


def forced_tricks(folder: Path, gates: Mapping[str, str]) -> list[str]:
    """What any process of this run forced: a resume elsewhere or without it does not take it back."""
    before = load_record(folder).get("pretrain", {}).get("forced", [])
    return sorted({*before, *(trick for trick, state in gates.items() if state == "forced")})


def compile_cache(folder: Path) -> Literal["own", "given"]:
    """`runtime.compile_cache` of all of this run's processes: one that was given is not taken back by a resume."""
    before = load_record(folder).get("pretrain", {}).get("compile_cache")
    return "given" if before == "given" else runtime.compile_cache(folder, has_trained(read_journal(folder / JOURNAL)))


def fit_to_corpus(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    """Fill in the vocabulary size (padded to a multiple of 64: whole tiles for matrix kernels), or check it."""
    padded = (corpus.vocab_size + 63) // 64 * 64
    model = replace(model, vocab_size=model.vocab_size or padded)
    assert model.vocab_size
    if model.vocab_size < corpus.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size}: the tokenizer of {corpus.folder} has {corpus.vocab_size} entries;"
            " leave model.vocab_size=null"
        )
    return model


def open_validation_corpus(config: TrainConfig, corpus: Corpus, verify: bool) -> Corpus:
    """`train.validation_corpus`, or `corpus` itself; UserError where the same text would be other tokens there."""
    if config.validation_corpus is None:
        return corpus
    other = Corpus.open(config.validation_corpus, verify="validation" if verify else False)
    if other.manifest.tokenizer.sha256 != corpus.manifest.tokenizer.sha256:
        raise UserError(
            f"train.validation_corpus={other.folder}: it has another tokenizer than {corpus.folder}, so its tokens mean"
            f" something else; prepare it with tokenizer.path={corpus.tokenizer_file}"
        )
    return other


def batch_source(
    corpus: Corpus, split: Literal["train", "validation"], config: TrainConfig, objective: ObjectiveConfig, seed: int
) -> BatchSource:
    """The batches of one split of the corpus."""
    special = corpus.special_ids
    masker = Masker(objective, corpus.vocab_size, special.mask, tuple(special), seed)
    order = config.order if split == "train" else "shuffled"
    stream = corpus.stream(split, order)
    return BatchSource(stream, masker, config.sequence_length, config.packing, seed, shuffle=order == "shuffled")
