"""A training run in one process: its parts, built from the configuration, or from the newest checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cramming import checkpoint
from cramming import device as devices
from cramming.budget import BudgetClock, Work
from cramming.clock import Clock
from cramming.config import UserError
from cramming.data.batches import BERT_MASKING, tokens_per_byte
from cramming.data.run_data import RunData, fit_to_corpus
from cramming.engine import Engine, build_engine
from cramming.environment import environment
from cramming.invocation import Invocation
from cramming.model.heads import PretrainedModel
from cramming.parallel.mesh import Mesh
from cramming.precision import slow_products
from cramming.progress import budget_text, say
from cramming.recipe import (
    Config,
    Hardware,
    check,
    check_run,
    tiny_defaults,
)
from cramming.runlog import RUN_LOG, Log, Setup, Training, read_log, training_of
from cramming.schedule import ramp_step
from cramming.train_parts import BatchStream, Checkpointer, Logger, Validator

# Parts of the environment: where these are the same, a CPU gives the same bits.
SAME_BITS = ("cpu", "torch", "threads")


@dataclass
class Run:
    """Parts of a training run.

    `config` has the corpus's vocabulary size and a number for `train.micro_batch`, which was determined by trial if
    `has_auto_micro_batch`. `parts` are called after each step, in this order.
    """

    folder: Path
    config: Config
    data: RunData
    engine: Engine
    clock: Clock
    logger: Logger
    has_auto_micro_batch: bool = False

    def __post_init__(self) -> None:
        """Build the other parts; reads the held-out text."""
        config, engine, logger = self.config, self.engine, self.logger
        self.mesh = engine.mesh
        self.batches = BatchStream(self.data, config, engine)
        self.validator = Validator(config, self.clock, logger, engine)
        self.validator.batches = self.data.held_out.batches(BERT_MASKING, config.train.rows)
        self.checkpointer = Checkpointer(self.folder, self.data, self.clock, logger, engine)
        self.parts: tuple[Logger | Validator | Checkpointer, ...] = (
            logger,
            self.validator,
            self.checkpointer,
        )


def build_run(
    config: Config,
    corpus: Path,
    invocation: Invocation,
    mesh: Mesh,
    budget: BudgetClock | None,
    stop_requested: Callable[[], bool],
) -> Run:
    """Build a new run, or resume one from its newest checkpoint. `budget` is the clock on rank 0, None elsewhere."""
    device = mesh.device
    kernels, gates = check_run(config, device, mesh.world_size)
    folder = invocation.run_folder
    has_auto_micro_batch = config.train.micro_batch == "auto"
    data = RunData.open(corpus, config, verify=mesh.is_main)
    config.objective.require_corpus(data.corpus, config.train.sequence_length)
    config = config.replace(model=fit_to_corpus(config.model, data.corpus))
    training, saved = Training(), None
    if budget:
        training = training_of(read_log(folder / RUN_LOG))
        saved = checkpoint.checkpoint_to_resume(folder, training)
        if mesh.world_size == 1:  # the reader measures one card only
            budget.measure_energy(devices.energy_reader(device))
    saved = mesh.object_from_main(saved)
    newest = checkpoint.path_of(folder / "checkpoints", saved) if saved and saved.steps else None
    here = environment_here(device, folder, training.has_trained)
    engine, work = start_engine(config, data, folder, mesh, newest)
    if budget:
        budget.attach(work, saved.sha256 if saved else None, resumed=training.has_trained)
    log = budget.log if budget else None
    config = with_micro_batch(config, data, engine, training, log)
    clock = Clock(budget, config, mesh, work, stop_requested)
    trackers = None
    if log and invocation.trackers:
        from cramming.trackers import Tracked, Trackers  # slow to import

        trackers = Trackers(Tracked(folder, work.steps, training.recipe), invocation.trackers)
    run = Run(
        folder,
        config,
        data,
        engine,
        clock,
        Logger(config, clock, log, trackers),
        has_auto_micro_batch,
    )
    run.logger.continue_row(training)
    run.checkpointer.changed_files |= training.changed_files
    if budget and not clock.has_ended:
        is_first = training.setup is None
        described = describe_training(run, kernels, gates)
        run.logger.append(setup_of(run, here, described, is_first=is_first))
        run.checkpointer.note_changed_files()
        warn_of_other_bits(training, here)
        announce(run, kernels)
    return run


def setup_of(run: Run, here: dict[str, Any], described: dict[str, Any], *, is_first: bool) -> Setup:
    """Return the `setup` event of this process; only the first of a run describes the corpus."""
    data = run.data
    return Setup(
        environment=here,
        manifest_sha256=data.corpus.manifest_sha256,
        corpus=data.describe() if is_first else None,
        devices=run.mesh.world_size,
        windows=data.source.num_windows,
        tokens_per_byte=tokens_per_byte(data.validation_corpus.manifest),
        training=described,
    )


def describe_training(run: Run, kernels: list[str], gates: dict[str, str]) -> dict[str, Any]:
    """Return how the model is trained, for the log's `setup`."""
    config, precision = run.config, run.engine.precision
    count = config.parameters
    return {
        "start": config.start.name,
        "objective": config.objective.kind,
        "parameters": count.total,
        "parameters_without_embeddings": count.without_embeddings,
        "precision": precision.mode,
        "residual": precision.residual,
        "attention_kernels": kernels,
        "peak_learning_rate": config.peak_learning_rate,
        "seed": config.seed,
        "gate": gates,
        # FlexAttention and torchao's optimizers compile in any case.
        "compiled": config.runtime.compile != "off" or devices.compiled_graphs() > 0,
    }


def announce(run: Run, kernels: list[str]) -> None:
    """Print the sizes of model, step, corpus and budget before training."""
    config, engine, budget, data = run.config, run.engine, run.clock.budget, run.data
    assert budget and isinstance(engine.model, PretrainedModel)
    train, count, processes = config.train, config.parameters, run.mesh.data_size
    say(
        f"model: {count.total / 1e6:.1f}M parameters, {count.without_embeddings / 1e6:.1f}M without embeddings,"
        f" vocabulary {config.model.vocab_size}{engine.model.describe_generator()};"
        f" {config.flops_per_token() / 1e6:.1f} MFLOP per token"
    )
    attention = " and ".join(kernels)
    if config.attention.flash != "auto":
        attention += f" (FlashAttention {config.attention.flash})"
    say(
        f"step: {train.batch_size} sequences of {train.sequence_length} ="
        f" {train.batch_size * train.sequence_length} tokens ="
        f" {train.batch_size // (train.rows * processes)} x {train.rows} sequences x {processes} process(es);"
        f" {config.objective.describe(train.sequence_length)}; {engine.precision.mode}, residual stream in"
        f" {engine.precision.residual}, on {engine.device}, attention kernel {attention}; peak learning rate"
        f" {config.peak_learning_rate:.3g}"
    )
    other = ""
    if train.validation_corpus:
        other = f", validated on the text of {train.validation_corpus}"
    say(
        f"corpus: {data.corpus.folder}, {data.source.stream.num_tokens / 1e6:.1f}M tokens{other}; budget:"
        f" {budget_text(budget.config.unit, budget.config.limit)}, of which {budget.elapsed_seconds():.1f} s went into"
        f" the start; begins at step {run.clock.work.steps}"
    )
    for warning in (
        tiny_defaults(config),
        slow_products(engine.precision.mode, engine.device.type),
    ):
        if warning:
            say(warning)


def warn_of_other_bits(training: Training, here: Mapping[str, Any]) -> None:
    """Print a warning if the previous process of this run had other hardware: the bits of numbers may then differ."""
    setups = [process.setup for process in training.processes if process.setup]
    if not setups or not training.has_trained:
        return
    changes = list(differences(setups[-1].environment, here))
    if changes:
        say(
            f"warning: resumed on other hardware ({', '.join(changes)}). The last bits of all numbers may differ from"
            " those of an uninterrupted run."
        )


def differences(earlier: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between two environments that can change the bits of a result."""
    if earlier["device"]["name"] != here["device"]["name"]:
        yield f"device {earlier['device']['name']}, here {here['device']['name']}"
    yield from cpu_differences(earlier, here)


def cpu_differences(earlier: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between two environments that can change the bits of a result on a CPU."""
    for name in SAME_BITS:
        if earlier.get(name) != here[name]:
            yield f"{name} {earlier.get(name)}, here {here[name]}"


def environment_here(
    device: torch.device, folder: Path | None = None, has_trained: bool = False
) -> dict[str, Any]:
    """Return hardware and software of this process and, with a run `folder`, where compiled code is cached."""
    here = {**environment(asdict(devices.describe(device))), "threads": torch.get_num_threads()}
    if folder is not None:
        here["compile_cache"] = devices.compile_cache(folder, has_trained)
    return here


def start_engine(
    config: Config, data: RunData, folder: Path, mesh: Mesh, saved: Path | None
) -> tuple[Engine, Work]:
    """Return the engine, with the state of the checkpoint `saved` if there is one, and the work done so far."""
    device = mesh.device
    devices.prepare(config.runtime, device, folder)
    # Weights and dropout; data order and masks are functions of the seed.
    torch.manual_seed(config.training_seed)
    try:
        engine = build_engine(config, mesh, device)
        if saved:
            return engine, checkpoint.load(saved, engine)
        if config.start.name != "random":
            start = import_module(f"cramming.starts.{config.start.name}")
            start.set_weights(engine, data.corpus, config)
        return engine, Work()
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        count = config.parameters.total / 1e6
        offload = ", or memory=offload-all" if device.type == "cuda" else ""
        raise UserError(
            f"model: {device} ran out of memory before the first step: the model has {count:.0f}M parameters. Take a"
            f" smaller one{offload} (`cramming plan` shows what it needs)."
        ) from None


def with_micro_batch(
    config: Config, data: RunData, engine: Engine, training: Training, log: Log | None
) -> Config:
    """Return the configuration with a number for `train.micro_batch: auto`."""
    train = config.train
    if train.micro_batch != "auto":
        return config
    from cramming.plan.micro_batch import micro_batch_of_run  # slow to import

    largest = ramp_step(train.batch_ramp, train.batch_size) // engine.mesh.data_size
    source = data.source.with_targets(config.objective.largest_phase)
    rows = micro_batch_of_run(training, log, engine, source.batch, config, largest)
    config = config.replace(train=train.replace(micro_batch=rows))
    check(config, Hardware.here(config, engine.device, engine.mesh.world_size))
    return config
