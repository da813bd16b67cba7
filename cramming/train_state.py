"""What a training run consists of: built from the configuration, saved, resumed, taken back.

Nothing is written before all that can be refused has been checked. How a run ends is in cramming/finish.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from cramming import checkpoint, runtime
from cramming import device as devices
from cramming.budget import BudgetClock, Work
from cramming.checks import Config, CooccurrenceStart, Place, check, check_run
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.data.held_out import PINNED
from cramming.engine import Engine, build_engine
from cramming.environment import environment
from cramming.journal import JOURNAL, checkpoints_of, first_line_sha256, has_trained, read_journal
from cramming.model.config import count_parameters, flops_per_token
from cramming.parallel.mesh import Mesh
from cramming.progress import say
from cramming.record import MetricsLog, create_run_folder, is_untouched, load_record, write_record_section
from cramming.run_data import RunData, changed_before, fit_to_corpus
from cramming.runtime import compiled_graphs
from cramming.schedule import ramp_step


@dataclass
class TrainState:
    """All that the training loop works with. `config` has the corpus's vocabulary size and a number for
    `train.micro_batch`. `clock`, `metrics` and the `validation` batches are rank 0's alone."""

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

    @cached_property
    def flops_per_token(self) -> float:
        """Model compute of one training token."""
        length, last_layer = self.config.train.sequence_length, self.config.attention.last_layer
        return flops_per_token(self.config.model, length, self.config.targets_per_row / length, last_layer)

    def save_checkpoint(self) -> None:
        """Write the present state, once its row of the log is on the disk and what it was trained on is looked at."""
        assert self.clock and self.metrics
        self.metrics.sync()
        self.data.note_changed_files(self.folder)
        checkpoint.save(self.folder / "checkpoints", *_tensors(self.engine), self.work, self.clock.enter_checkpoint)
        self.saved_steps = self.work.steps

    def take_back(self) -> None:
        """Go back to the newest checkpoint, to no work at all if there is none: the step just done ended too late."""
        folder, saved = self.folder / "checkpoints", None
        if self.clock:
            saved = checkpoint.newest_of(folder, checkpoints_of(read_journal(self.folder / JOURNAL)))
            say(
                f"step {self.work.steps + 1} ended {-self.clock.seconds_left():.1f} s after the deadline, so it is not"
                f" kept: back to step {saved.steps if saved else 0}"
            )
        steps = int(self.mesh.from_main(saved.steps if saved else 0))
        self.work = checkpoint.load(checkpoint.path_of(folder, steps), *_tensors(self.engine)) if steps else Work()
        if self.clock:
            self.clock.attach(self.work, saved.sha256 if saved else None)

    def setup(self) -> dict[str, Any]:
        """Of the record's section `pretrain`, how the model is trained."""
        count = count_parameters(self.config.model)
        return {
            "start": self.config.start.name,
            "objective": self.config.objective.name,
            "devices": self.mesh.world_size,
            "parameters": count.total,
            "parameters_without_embeddings": count.without_embeddings,
            "precision": self.engine.precision.mode,
            "attention_kernels": self.attention_kernels,
            "peak_learning_rate": self.config.peak_learning_rate,
            "seed": self.config.seed,
            "gate": self.gates,
            # FlexAttention and torchao's optimizers compile in any case.
            "compiled": self.config.runtime.compile != "off" or compiled_graphs() > 0,
        }


def build_train_state(settings: dict[str, Any], folder: Path, mesh: Mesh, device: torch.device) -> TrainState:
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
    steps = int(mesh.from_main(saved.steps if saved else 0))
    engine, work = start_engine(config, data, folder, mesh, device, steps)
    if clock:
        clock.attach(work, saved.sha256 if saved else None)
    config = with_micro_batch(config, data, engine, folder)
    validation = data.held_out.batches(PINNED, config.train.rows) if mesh.is_main else []
    metrics = MetricsLog(folder) if mesh.is_main else None
    return TrainState(folder, config, mesh, data, engine, work, steps, kernels, gates, clock, metrics, validation)


def begin_record(
    settings: dict[str, Any], config: Config, data: RunData, gates: Mapping[str, str], folder: Path, mesh: Mesh,
    device: torch.device,
) -> BudgetClock:  # fmt: skip
    """The run folder with what is known at the start, and the clock that has its journal there.

    The journal begins before the record's section says so: killed at any moment, a run never has one without the other.
    """
    described = environment(asdict(devices.describe(device)))
    create_run_folder(folder, settings, described, resume=config.resume)
    uuid, meter = devices.nvml_uuid(device), None
    if uuid and mesh.world_size == 1:  # it would know of one card only
        from cramming import energy

        gpu = energy.Gpu.open(uuid)
        meter = energy.Meter(gpu) if gpu else None
    clock = BudgetClock(config.budget, folder / JOURNAL, meter, data.corpus.manifest_sha256)
    begun = {
        "status": "running",
        "journal_start": first_line_sha256(folder / JOURNAL),
        "forced": forced_tricks(folder, gates),
        "compile_cache": compile_cache(folder),
    }
    write_record_section(folder, corpus={"changed": changed_before(folder), **data.describe()}, pretrain=begun)
    data.note_changed_files(folder)
    return clock


def forced_tricks(folder: Path, gates: Mapping[str, str]) -> list[str]:
    """What any process of this run forced: a resume elsewhere or without it does not take it back."""
    before = load_record(folder).get("pretrain", {}).get("forced", [])
    return sorted({*before, *(trick for trick, state in gates.items() if state == "forced")})


def compile_cache(folder: Path) -> Literal["own", "given"]:
    """`runtime.compile_cache` of all of this run's processes: one that was given is not taken back by a resume."""
    before = load_record(folder).get("pretrain", {}).get("compile_cache")
    return "given" if before == "given" else runtime.compile_cache(folder, has_trained(read_journal(folder / JOURNAL)))


def start_engine(
    config: Config, data: RunData, folder: Path, mesh: Mesh, device: torch.device, steps: int
) -> tuple[Engine, Work]:
    """The engine with the state after `steps`, from its checkpoint, and the work that is done."""
    runtime.prepare(config.runtime, device, folder)
    devices.seed_everything(config.seed)
    try:
        engine = build_engine(config, mesh, device)
        if steps:
            return engine, checkpoint.load(checkpoint.path_of(folder / "checkpoints", steps), *_tensors(engine))
        if isinstance(config.start, CooccurrenceStart):
            start_model(engine, config.start, config.seed, data, mesh)
        return engine, Work()
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        count = count_parameters(config.model).total / 1e6
        raise UserError(
            f"model: {device} ran out of memory before the first step: the model has {count:.0f}M parameters; take a"
            f" smaller one{', or memory=offload-all' * (device.type == 'cuda')} (`cramming plan` shows what it needs)"
        ) from None


def start_model(engine: Engine, start: CooccurrenceStart, seed: int, data: RunData, mesh: Mesh) -> None:
    """Weights that do not come from chance alone; all processes get those of the first."""
    from cramming.model.heads import MaskedLM
    from cramming.parallel.offload import HostOptimizer
    from cramming.start import start_from_text

    assert isinstance(engine.model, MaskedLM)
    if mesh.is_main:
        corpus = data.corpus
        start_from_text(engine.model, corpus.stream("train"), tuple(corpus.special_ids), start, seed)
    mesh.share(engine.model.parameters())
    if isinstance(engine.optimizer, HostOptimizer):
        engine.optimizer.take_weights()


def with_micro_batch(config: Config, data: RunData, engine: Engine, folder: Path) -> Config:
    """With a number for `train.micro_batch: auto`."""
    train = config.train
    if train.micro_batch != "auto":
        return config
    from cramming.plan.micro_batch import micro_batch_of_run  # only here: what it needs takes time to import

    largest = ramp_step(train.batch_ramp, train.batch_size) // engine.mesh.world_size
    rows = micro_batch_of_run(folder, engine, data.source.batch, config, largest)
    config = replace(config, train=replace(train, micro_batch=rows))
    check(config, Place.here(config, engine.device, engine.mesh.world_size))
    return config


class ResumeWithLessError(UserError):
    """The record now has a smaller micro-batch, with which a resume goes on: the run is to be kept."""


def _tensors(engine: Engine) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    """What a checkpoint holds of an engine."""
    return engine.model, engine.optimizer, engine.precision.scaler
