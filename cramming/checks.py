"""The configuration of a training run as sections, each valid by itself, and what of them cannot go together.

All of it is known before there is a corpus; `parts` builds the run from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cramming import device as devices
from cramming.budget import BudgetConfig
from cramming.checkpoint import CheckpointConfig
from cramming.config import UserError, build, expand_home
from cramming.data.corpus import MANIFEST, ORDERS
from cramming.data.masking import ObjectiveConfig
from cramming.execution import EngineConfig
from cramming.model import attention
from cramming.model.config import ModelConfig, count_parameters
from cramming.optim import refuse_missing_package
from cramming.parallel.apply import refuse_contradictions, refuse_unfit
from cramming.parallel.mesh import Mesh
from cramming.precision import refuse_missing_hardware, resolve
from cramming.runtime import refuse_missing_gpu
from cramming.schedule import ScheduleConfig, ramp_step
from cramming.start import StartConfig

# A step of train=tiny and the learning rate of optim=adamw-tiny are for models of about a million parameters. The size
# from which on they are said to be unfit is a judgement, not a measurement.
TINY_STEP_TOKENS, TINY_LEARNING_RATE, LARGE_MODEL_PARAMETERS = 2048, 3e-3, 20_000_000


@dataclass(frozen=True)
class TrainConfig:
    """Sizes of the training loop. `batch_size` and `micro_batch` count sequences: per step, and per forward pass.

    `micro_batch: auto` becomes a number in `parts.build_parts`: the largest that fits and that divides a process's
    share of a step, or of what the schedule lets steps grow by.
    """

    sequence_length: int
    packing: Literal["rows", "documents"]
    batch_size: int
    micro_batch: int | Literal["auto"]
    log_every: int
    validations: int
    validation_tokens: int
    validation_corpus: Path | None = None  # another corpus's validation split, for losses that compare
    order: str = "shuffled"  # or "source", or the name of an order file of the corpus; each also with "_reversed"

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_size", "micro_batch", "log_every", "validation_tokens"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1")
        if self.validations < 0:
            raise ValueError(f"validations={self.validations} is below 0")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: choose one of {', '.join(ORDERS)}")

    @property
    def rows(self) -> int:
        """`micro_batch`, once it is a number."""
        assert self.micro_batch != "auto", "build_parts decides it"
        return self.micro_batch


@dataclass(frozen=True)
class Sections:
    """What the configuration says about a run, each section by itself valid."""

    train: TrainConfig
    schedule: ScheduleConfig
    objective: ObjectiveConfig
    execution: EngineConfig
    budget: BudgetConfig
    saving: CheckpointConfig
    start: StartConfig
    model: ModelConfig

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Sections":
        """From the root configuration; UserError also where two of them do not go together."""
        found = cls(
            train=build(TrainConfig, settings["train"], "train"),
            schedule=build(ScheduleConfig, settings["schedule"], "schedule"),
            objective=build(ObjectiveConfig, settings["objective"], "objective"),
            execution=EngineConfig.of(settings),
            budget=build(BudgetConfig, settings["budget"], "budget"),
            saving=build(CheckpointConfig, settings["checkpoint"], "checkpoint"),
            start=build(StartConfig, settings["start"], "start"),
            model=build(ModelConfig, settings["model"], "model"),
        )
        length, model = found.train.sequence_length, found.model
        if length > model.max_length:
            raise UserError(f"train.sequence_length={length} is above model.max_length={model.max_length}")
        if found.objective.segments and model.token_types < 2:
            raise UserError(f"objective.segments=true needs model.token_types=2, not {model.token_types}")
        return found


def tiny_defaults(model: ModelConfig, step_tokens: int, peak_learning_rate: float) -> str | None:
    """What to say where a large model is trained with the defaults for a laptop's; else None."""
    parameters = count_parameters(model).without_embeddings
    found = [f"{step_tokens} tokens a step"] if step_tokens <= TINY_STEP_TOKENS else []
    found += [f"a peak learning rate of {peak_learning_rate:g}"] if peak_learning_rate == TINY_LEARNING_RATE else []
    if parameters < LARGE_MODEL_PARAMETERS or not found:
        return None
    return (
        f"warning: {' and '.join(found)}: the defaults for a model of a million parameters, and this one has"
        f" {parameters / 1e6:.0f} million beside its embeddings; take an experiment (experiment=crammed-bert-day), or"
        " train=day optim=adamw"
    )


def check_sections(
    settings: Mapping[str, Any], sections: Sections, mesh: Mesh, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """UserError for what can be known to be wrong before there is a corpus; else kernels, and `check_gate`'s states."""
    refuse_unfit_step(sections.train, sections.schedule, sections.execution, mesh, device)
    kernels = attention_kernels(sections.train, sections.execution, sections.model, device)
    name = devices.describe(device).name
    refuse_missing_corpus(sections.train.validation_corpus)
    return kernels, check_gate(settings, sections, kernels, device, name)


def refuse_missing_corpus(validation_corpus: Path | None) -> None:
    """UserError where the corpus to validate on is not there: it is none that `run` would prepare on the way."""
    if validation_corpus is not None and not (validation_corpus / MANIFEST).is_file():
        raise UserError(
            f"train.validation_corpus={validation_corpus}: no corpus there (no {MANIFEST}); prepare it first, or leave"
            " it null for the run's own held-out text"
        )


def refuse_unfit_step(
    config: TrainConfig, schedule: ScheduleConfig, execution: EngineConfig, mesh: Mesh, device: torch.device
) -> None:
    """UserError for ways to compute a step that exclude each other or that this device or this batch cannot have."""
    refuse_missing_hardware(execution.precision, device)
    refuse_missing_gpu(execution.runtime, device)
    refuse_missing_package(execution.optim)
    refuse_contradictions(execution.memory, execution.runtime)
    micro_batches_of(config, mesh.world_size)
    refuse_unfit(execution.memory, mode=resolve(execution.precision.mode, device), processes=mesh.world_size)
    refuse_unfit_ramp(config, schedule, mesh.world_size)


def refuse_unfit_ramp(config: TrainConfig, schedule: ScheduleConfig, world_size: int) -> None:
    """UserError where the batch cannot grow as the schedule says, in whole micro-batches of all processes."""
    if schedule.batch_ramp == 0:
        return
    without = "schedule.batch_start=1.0 schedule.batch_ramp=0.0"
    try:
        step = ramp_step(schedule, config.batch_size)
    except ValueError as error:
        raise UserError(f"schedule.{error}; raise train.batch_size or set {without}") from None
    rows = 1 if config.micro_batch == "auto" else config.micro_batch
    if step % (rows * world_size):
        share, rest = divmod(step, world_size)
        fits = [size for size in range(1, min(rows, share) + 1) if not rest and share % size == 0]
        raise UserError(
            f"schedule.batch_start={schedule.batch_start:g}: train.batch_size={config.batch_size} grows by {step}"
            f" sequence(s), not a multiple of train.micro_batch={config.micro_batch} x {world_size} process(es);"
            f" set {f'train.micro_batch={fits[-1]} or ' if fits else ''}{without}"
        )


def check_gate(
    settings: Mapping[str, Any], sections: Sections, kernels: list[str], device: torch.device, device_name: str
) -> dict[str, str]:
    """`gate.check` of what the settings come to on this device: `auto` hides no trick."""
    if not settings["forced"] and not expand_home(settings["gates"], "gates").exists():
        return {}  # no trick has a verdict
    from cramming.bench import gate  # only here: the table of tricks is not needed to train
    from cramming.bench.tricks import changed

    execution = sections.execution
    mode, states = resolve(execution.precision.mode, device), dict[str, str]()
    where, usual = gate.place(device_name, torch.__version__), resolve("auto", device)
    for kernel in sorted({execution.attention.kernel, *kernels}):
        resolved = changed(settings, {"precision.mode": mode, "attention.kernel": kernel})
        states |= gate.check(resolved, where, device.type, usual)
    return states


def attention_kernels(
    config: TrainConfig, execution: EngineConfig, model: ModelConfig, device: torch.device
) -> list[str]:
    """The kernels that the layers of a run use: the one that is set, or those that `attention.kernel=auto` takes.

    UserError where the one that is set cannot run on this device, in this number format or with this dropout.
    """
    kernel, mode = execution.attention.kernel, resolve(execution.precision.mode, device)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(mode, torch.bfloat16)
    if kernel != "auto":
        attention.refuse_unfit(kernel, device, dtype, model.attention_dropout)
        return [kernel]
    length, rows = config.sequence_length, config.packing == "rows"
    bounds = torch.empty(0, dtype=torch.int32, device=device)
    packing = attention.Packing(bounds, length if rows else None, length, length)
    windows = {model.half_window(layer) for layer in range(model.num_layers)}
    return sorted({attention.choose(packing, window, dtype, model.attention_dropout) for window in windows})


def micro_batches_of(config: TrainConfig, world_size: int) -> int:
    """Micro-batches per process and full step (1 while that is open); UserError if the batch cannot be cut so."""
    if config.micro_batch == "auto":
        config = replace(config, micro_batch=max(1, config.batch_size // world_size))
    per_pass = config.rows * world_size
    if config.batch_size % per_pass:
        share, rest = divmod(config.batch_size, world_size)
        fits = [rows for rows in range(1, min(config.rows, share) + 1) if not rest and share % rows == 0]
        larger = -(-config.batch_size // per_pass) * per_pass
        raise UserError(
            f"train.batch_size={config.batch_size} is not a multiple of train.micro_batch={config.micro_batch}"
            f" x {world_size} process(es) = {per_pass}; set "
            + (f"train.micro_batch={fits[-1]} or " if fits else "")
            + f"train.batch_size={larger}"
        )
    return config.batch_size // per_pass
