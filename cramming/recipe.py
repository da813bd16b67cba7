"""The recipe of a training run as one typed object, and the checks that cross its sections.

Each section is declared beside the code that reads it and is valid by itself; `Config` holds them all, and `check`
refuses what does not go together on some hardware. It needs no corpus and no device: `cramming plan` checks a recipe
for a card that is not there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import model_validator

from cramming import device as devices
from cramming.budget import BudgetConfig
from cramming.config import (
    Choice,
    Count,
    Fraction,
    LocalPath,
    Natural,
    OneOf,
    Positive,
    RootConfig,
    Section,
    UserError,
    build,
    require,
    settings_hash,
    shown,
)
from cramming.data.corpus import ORDERS
from cramming.data.manifest import MANIFEST
from cramming.device import FLASH_MODULES, RuntimeConfig, reason_against_flash
from cramming.model import attention
from cramming.model.attention_kernels import FLASH_CAPABILITY, KERNELS
from cramming.model.config import (
    LastLayer,
    ModelConfig,
    ParameterCount,
)
from cramming.objectives import OBJECTIVES, Objective
from cramming.optim.build import LOW_BIT, NEED_WHOLE_MATRICES, OPTIMIZERS, OptimConfig
from cramming.parallel.apply import MemoryConfig
from cramming.parallel.mesh import (
    STRATEGIES,
    ParallelConfig,
    PipelineConfig,
    ReplicaConfig,
    ShardConfig,
    load_experiment,
)
from cramming.precision import (
    DTYPES,
    FP8_CAPABILITY,
    Mode,
    PrecisionConfig,
    resolve,
    resolve_residual,
)
from cramming.schedule import (
    SCHEDULES,
    AverageConfig,
    BatchRamp,
    Schedule,
    learning_rate_factor,
    ramp_step,
)

# The default step and the learning rate of optim=adamw-tiny are for models of about a million parameters. The size from
# which on they are said to be unfit is a judgement, not a measurement.
TINY_STEP_TOKENS, TINY_LEARNING_RATE, LARGE_MODEL_PARAMETERS = 2048, 3e-3, 20_000_000

SPLITTING_TORCH = "2.13"
Problem = tuple[str, str]  # the setting to blame, and what is wrong with its value and what to do

# Sections ---------------------------------------------------------------------------------------------------------


class CheckpointConfig(Section):
    """Section `checkpoint`: when to save.

    `keep_at`: shares of the budget at which a checkpoint is kept, 0 before the first step.
    """

    every_minutes: Positive
    every_steps: Count | None
    keep_at: tuple[Fraction, ...]

    def is_due(self, steps: int, seconds_since_last: float) -> bool:
        """Return whether to save after step number `steps`."""
        by_steps = self.every_steps is not None and steps % self.every_steps == 0
        return by_steps or seconds_since_last >= 60 * self.every_minutes

    def is_to_keep(self, before: float, now: float) -> bool:
        """Return whether a share lies between the ends of two steps, at progress `before` and `now`."""
        return any(before < share <= now for share in self.keep_at)


class TrainConfig(Section):
    """Section `train`: sizes of the training loop.

    `batch_size` and `micro_batch` count sequences: per step, and per forward pass. `micro_batch: auto` becomes a number
    before training: the largest that fits and that divides a process's share of a step, or of what steps grow by.
    `order`: shuffled, source, or the name of an order file of the corpus; all but the first also with `_reversed`.
    """

    sequence_length: Count
    packing: Literal["rows", "documents"]
    batch_size: Count
    batch_ramp: BatchRamp | None
    average: AverageConfig | None
    micro_batch: Count | Literal["auto"]
    log_every: Count
    validations: Natural
    validation_tokens: Count
    validation_corpus: LocalPath | None
    order: Annotated[str, OneOf(ORDERS)]

    @model_validator(mode="after")
    def _can_ramp(self) -> Self:
        ramp_step(self.batch_ramp, self.batch_size)
        return self

    @property
    def rows(self) -> int:
        """Micro-batch, once it is a number."""
        assert self.micro_batch != "auto", "not decided yet"
        return self.micro_batch


class AttentionConfig(Section):
    """Section `attention`: how attention is computed, always exactly.

    `flash`: the version of FlashAttention behind `varlen` and SDPA on a GPU; `auto` leaves torch's choice alone.
    `last_layer`: the tokens that the late layers are computed for.
    """

    kernel: Annotated[str, OneOf(("auto", *KERNELS))]
    last_layer: LastLayer
    flash: Literal["auto", 2, 3, 4] = "auto"


class RandomStart(Section):
    """Weights drawn at random."""

    name: str


class CooccurrenceStart(Section):
    """Word vectors counted from the text (cramming/starts/cooccurrence.py).

    Tokens within `window` of each other count as neighbours, nearer ones more. At most `max_tokens` tokens, evenly from
    the whole training split, are read. `embedding_std` and `decoder_std`: root mean squares of the vectors' entries.
    """

    name: str
    window: Count
    max_tokens: Count
    embedding_std: Positive
    decoder_std: Positive


class CheckpointStart(Section):
    """Weights of a published checkpoint, which also decides about section `model` (cramming/starts/checkpoint.py)."""

    name: str
    path: LocalPath | None


class TeacherStart(Section):
    """Weights of the teacher of objective=distill (cramming/starts/teacher.py)."""

    name: str


StartConfig = RandomStart | CooccurrenceStart | CheckpointStart | TeacherStart
STARTS: dict[str, type[StartConfig]] = {
    "random": RandomStart,
    "cooccurrence": CooccurrenceStart,
    "checkpoint": CheckpointStart,
    "teacher": TeacherStart,
}


class Config(RootConfig):
    """All settings of a training run: those of the root, and the sections that training reads."""

    model: ModelConfig
    objective: Annotated[Objective, Choice(OBJECTIVES)]
    optim: Annotated[OptimConfig, Choice(OPTIMIZERS)]
    schedule: Annotated[Schedule, Choice(SCHEDULES)]
    start: Annotated[StartConfig, Choice(STARTS)]
    train: TrainConfig
    budget: BudgetConfig
    checkpoint: CheckpointConfig
    attention: AttentionConfig
    precision: PrecisionConfig
    memory: MemoryConfig
    runtime: RuntimeConfig
    parallel: Annotated[ParallelConfig, Choice(STRATEGIES)]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the training part of the composed settings; UserError for what is wrong in one section."""
        sections = {name: settings[name] for name in cls.model_fields if name in settings}
        return build(cls, sections, "")

    @property
    def training_seed(self) -> int:
        """Seed of weights, dropout, data order and masks: `seed`, with the nonce where there is one."""
        if self.nonce is None:
            return self.seed
        return int(settings_hash(self.seed, self.nonce), 16) % 2**63

    @property
    def targets_per_row(self) -> int:
        """Number of predicted tokens of a sequence, in the first phase of the objective."""
        return self.objective.at(0.0).per_row(self.train.sequence_length)

    def flops_per_token(self, progress: float = 0.0) -> float:
        """Return the model compute of one training token at this share of the budget."""
        length, last_layer = self.train.sequence_length, self.attention.last_layer
        return self.objective.flops_per_token(self.model, length, progress, last_layer)

    @property
    def parameters(self) -> ParameterCount:
        """Number of trained parameters, a generator's included."""
        return self.objective.count_parameters(self.model)

    @property
    def peak_learning_rate(self) -> float:
        """Learning rate at the full batch."""
        return self.optim.peak_learning_rate(self.train.batch_size, self.model.hidden_size)

    def learning_rate(self, progress: float) -> float:
        """Return the learning rate of a step that begins at this share of the budget."""
        return self.peak_learning_rate * learning_rate_factor(self.schedule, progress)


@dataclass(frozen=True)
class Hardware:
    """Target hardware: the local device, or a card listed in cramming/plan/cards.csv.

    `mode`: the number format that `precision.mode` means there. `capability`: of a GPU. `trains`: the run is not only
    planned, so that installed packages and files count too.
    """

    kind: str  # cpu | cuda
    name: str
    mode: Mode
    capability: tuple[int, int] = (0, 0)
    processes: int = 1
    trains: bool = False

    @classmethod
    def here(cls, config: Config, device: torch.device, processes: int = 1) -> "Hardware":
        """Return this machine's `device` for training."""
        is_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if is_gpu else (0, 0)
        name, mode = devices.describe(device).name, resolve(config.precision.mode, device)
        return cls(device.type, name, mode, capability, processes, trains=True)

    @property
    def has_flash(self) -> bool:
        """True if FlashAttention runs on this hardware."""
        return self.capability >= FLASH_CAPABILITY


# Checks across sections -----------------------------------------------------------------------------------------------

_WHOLE_MATRICES = tuple(name for name in OPTIMIZERS if name not in NEED_WHOLE_MATRICES)
_BIASED = tuple(name for name, kernel in KERNELS.items() if kernel.takes_bias)
_UNCOMPILED = tuple(name for name in OPTIMIZERS if name not in LOW_BIT)  # torchao's compile
# Condition -> settings with the values that are allowed then. `precision.mode` stands for the number format in force.
ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "on a CPU": {
        "attention.flash": ("auto",),
        "runtime.tune": ("off",),
        "runtime.cuda_graphs": (False,),
    },
    "on a GPU": {"budget.clock": ("wall",)},
    "with several processes": {"budget.clock": ("wall",), "memory.offload_weights": (False,)},
    "with budget.clock=cpu": {"runtime.compile": ("off",), "optim.name": _UNCOMPILED},
    "with runtime.compile=off": {"memory.activation_budget": (None,)},
    "with compiled code": {
        "memory.offload_activations": (False,),
        "memory.offload_weights": (False,),
    },
    "with memory.checkpoint=selective": {"memory.offload_weights": (False,)},
    # Its scaler reads the gradients on the device, before they are on the host.
    "with fp16": {"memory.offload_weights": (False,), "memory.offload_optimizer": (False,)},
    # Products in fp32 need its bits; the range of fp16 would be widened in some places only.
    "with products in fp32 or fp16": {"precision.residual": ("auto", "fp32")},
    "with model.relative_positions": {"attention.kernel": ("auto", *_BIASED)},
    "with model.attention_dropout": {"attention.flash": ("auto", 2)},
    # Its generator predicts with the token embeddings; its encoder computes all tokens in every layer.
    "with objective=rtd": {"model.tie_embeddings": (True,), "model.late_layers": (1,)},
    "with start=checkpoint": {"objective.name": ("mlm", "causal", "mlm-by-loss")},
    "with start=teacher": {"objective.name": ("distill",)},
    # The teacher lies whole on each device, as copies of the student do.
    "with objective=distill": {"parallel.name": ("ddp",), "memory.offload_weights": (False,)},
    "with parallel=pp": {
        "model.unet_skips": (False,),
        "model.value_embeddings": (0,),
        "model.value_residual": (False,),
        "model.relative_positions": (0,),
        "objective.name": ("mlm", "causal"),
        "start.name": ("random",),
        "train.average": (None,),
        "optim.name": _WHOLE_MATRICES,
        "precision.mode": ("fp32", "bf16", "fp8"),
        "runtime.compile": ("off", "blocks"),
        "runtime.cuda_graphs": (False,),
        "memory.offload_activations": (False,),
        "memory.offload_weights": (False,),
        "memory.offload_optimizer": (False,),
    },
    "with parallel.tp above 1": {
        "model.relative_positions": (0,),
        "objective.name": ("mlm", "causal", "mlm-by-loss"),
        "memory.offload_optimizer": (False,),
        "runtime.compile": ("off",),
    },
    "with parallel.compression": {"parallel.tp": (1,)},
    "with model.unet_skips": {"parallel.sequence": (False,)},
    "where a process has a part of each weight": {
        "optim.name": _WHOLE_MATRICES,
        "precision.mode": ("fp32", "bf16"),
        "train.average": (None,),
        "runtime.compile": ("off", "blocks"),
        "runtime.cuda_graphs": (False,),
        "memory.offload_activations": (False,),
    },
}


def check(config: Config, hardware: Hardware) -> None:
    """Raise UserError for the first problem of a recipe on this hardware."""
    for find_problems in (
        _size_problems,
        _package_problems,
        _hardware_problems,
        _excluded_values,
        _mesh_problems,
    ):
        for setting, problem in find_problems(config, hardware):
            raise UserError(f"{setting}={shown(attrgetter(setting)(config))}: {problem}")


def batch_unit(config: Config, hardware: Hardware) -> int:
    """Return the number of sequences that divides every batch: a micro-batch in each process with its own samples."""
    replicas = max(1, hardware.processes // (config.parallel.tp * config.parallel.pp))
    rows = config.train.micro_batch
    return replicas if rows == "auto" else replicas * rows


def _size_problems(config: Config, hardware: Hardware) -> Iterator[Problem]:
    train, longest = config.train, config.model.max_length
    if train.sequence_length > longest:
        problem = f"above model.max_length={longest}. Set train.sequence_length={longest}."
        yield "train.sequence_length", problem
    unit = batch_unit(config, hardware)
    cut = f"train.micro_batch={train.micro_batch} x {hardware.processes} process(es)"
    if train.batch_size % unit:
        lower = train.batch_size // unit * unit
        sizes = " or ".join(str(size) for size in (lower, lower + unit) if size)
        yield "train.batch_size", f"not a multiple of {cut}. Set train.batch_size={sizes}."
    if ramp_step(train.batch_ramp, train.batch_size) % unit:
        yield (
            "train.micro_batch",
            f"in each of {hardware.processes} process(es) it does not divide the sequences by which"
            " train.batch_ramp grows. Lower it, or set it to auto.",
        )
    start = config.start
    if hardware.trains and isinstance(start, CheckpointStart) and start.path is None:
        yield "start.path", "no checkpoint. Give a model folder or a name on the hub."
    corpus = train.validation_corpus
    if hardware.trains and corpus is not None and not (corpus / MANIFEST).is_file():
        yield "train.validation_corpus", "no corpus there. Prepare it first, or set it to null."


def _package_problems(config: Config, hardware: Hardware) -> Iterator[Problem]:
    if not hardware.trains:
        return
    torchao = "needs the package torchao. Run pip install 'cramming[lowbit]'."
    if config.optim.name in LOW_BIT and not find_spec("torchao"):
        yield "optim.name", torchao
    if config.precision.mode == "fp8" and not find_spec("torchao"):
        yield "precision.mode", torchao


def _hardware_problems(config: Config, hardware: Hardware) -> Iterator[Problem]:
    needs_fp8 = hardware.mode == "fp8" and not config.precision.emulate_fp8
    if needs_fp8 and hardware.capability < FP8_CAPABILITY:
        yield (
            "precision.mode",
            f"needs an Ada or Hopper GPU (compute capability 8.9), this is {hardware.name}."
            " Set precision=bf16, or for tests precision.emulate_fp8=true, which is slow.",
        )
    version = config.attention.flash
    if hardware.kind == "cuda" and hardware.trains and version in FLASH_MODULES:
        problem = reason_against_flash(version, hardware.capability)
        if problem:
            yield "attention.flash", f"{problem}. Set it to auto."


def _excluded_values(config: Config, hardware: Hardware) -> Iterator[Problem]:
    parallel, mode = config.parallel, hardware.mode
    is_sharded = isinstance(parallel, ShardConfig) and hardware.processes > 1
    conditions = {
        "on a CPU": hardware.kind == "cpu",
        "on a GPU": hardware.kind == "cuda",
        "with several processes": hardware.processes > 1,
        "with budget.clock=cpu": config.budget.clock == "cpu",
        "with runtime.compile=off": config.runtime.compile == "off",
        "with compiled code": config.runtime.compile != "off",
        "with memory.checkpoint=selective": config.memory.checkpoint == "selective",
        "with fp16": mode == "fp16",
        "with products in fp32 or fp16": mode in ("fp32", "fp16"),
        "with model.relative_positions": config.model.relative_positions > 0,
        "with model.attention_dropout": config.model.attention_dropout > 0,
        "with objective=rtd": not config.objective.has_masked_lm,
        "with start=checkpoint": config.start.name == "checkpoint",
        "with start=teacher": config.start.name == "teacher",
        "with objective=distill": config.objective.name == "distill",
        "with parallel=pp": isinstance(parallel, PipelineConfig),
        "with parallel.tp above 1": parallel.tp > 1,
        "with parallel.compression": (
            isinstance(parallel, ReplicaConfig) and parallel.compression.name != "none"
        ),
        "with model.unet_skips": config.model.unet_skips,
        "where a process has a part of each weight": is_sharded or parallel.tp > 1,
    }
    for condition, settings in ALLOWED.items():
        if not conditions[condition]:
            continue
        for setting, allowed in settings.items():
            value = mode if setting == "precision.mode" else attrgetter(setting)(config)
            if value not in allowed:
                yield setting, f"not {condition}. Set it to {' or '.join(map(shown, allowed))}."


def _mesh_problems(config: Config, hardware: Hardware) -> Iterator[Problem]:
    parallel, train = config.parallel, config.train
    if train.micro_batch == "auto":
        is_sharded = isinstance(parallel, ShardConfig) and hardware.processes > 1
        if is_sharded or parallel.tp > 1 or isinstance(parallel, PipelineConfig):
            cut = f".tp={parallel.tp}" if parallel.tp > 1 else f"={parallel.name}"
            yield "train.micro_batch", f"not with parallel{cut}. Set a number."
    settings = ["model.num_heads", "model.intermediate_size", "model.vocab_size"]
    if parallel.sequence:
        settings.append("train.sequence_length")
    for setting in settings:
        size = attrgetter(setting)(config) or 64  # a null vocabulary is padded to a multiple of 64
        if size % parallel.tp:
            yield "parallel.tp", f"does not divide {setting}={size}. Change one of them."
    if isinstance(parallel, PipelineConfig):
        yield from _pipeline_problems(config, parallel, hardware)


def _pipeline_problems(
    config: Config, parallel: PipelineConfig, hardware: Hardware
) -> Iterator[Problem]:
    stages = load_experiment("stages")
    model, train = config.model, config.train
    if not stages.fits(parallel.schedule, parallel.pp, model):
        yield (
            "parallel.pp",
            f"too many for model.num_layers={model.num_layers}, parallel.schedule={parallel.schedule}"
            f" and model.late_layers={model.late_layers}. Lower it.",
        )
    step = ramp_step(train.batch_ramp, train.batch_size) // batch_unit(config, hardware)
    multiple = parallel.pp * (2 if parallel.schedule == "dualpipev" else 1)
    if step % multiple:
        yield (
            "train.micro_batch",
            f"{step} micro-batches in a step are not a multiple of {multiple}, as parallel.pp and"
            " parallel.schedule need. Lower it.",
        )
    # Older versions cannot split the backward pass of autograd functions, as this project has.
    if stages.ORDERS[parallel.schedule].splits_backward and torch.__version__ < SPLITTING_TORCH:
        cure = "Update torch, or set parallel.schedule=interleaved."
        yield "parallel.schedule", f"needs torch {SPLITTING_TORCH}. {cure}"


def check_run(
    config: Config, device: torch.device, processes: int
) -> tuple[list[str], dict[str, str]]:
    """Return the attention kernels, and the tricks' gate states.

    Raises UserError for all that can be refused before there is a corpus.
    """
    check(config, Hardware.here(config, device, processes))
    kernels = attention_kernels(config, device)
    return kernels, check_gate(config, kernels, device)


def check_gate(config: Config, kernels: list[str], device: torch.device) -> dict[str, str]:
    """Return `verdicts.check` of what the settings come to on this device: `auto` hides no trick."""
    if not config.forced and not config.gates.exists():
        return {"all tricks": "untested"}
    # imported late: training does not need the table of tricks
    from cramming.bench import verdicts
    from cramming.bench.tricks import changed

    mode, states = resolve(config.precision.mode, device), dict[str, str]()
    residual = resolve_residual(config.precision.residual, mode, device.type)
    key = verdicts.device_key(devices.describe(device).name, torch.__version__)
    settings = config.model_dump(mode="json")
    for kernel in sorted({config.attention.kernel, *kernels}):
        in_force = {
            "precision.mode": mode,
            "precision.residual": residual,
            "attention.kernel": kernel,
        }
        resolved = changed(settings, in_force)
        states |= verdicts.check(resolved, key, device.type, resolve("auto", device))
    return states


def attention_kernels(config: Config, device: torch.device) -> list[str]:
    """Return the kernels that the layers of a run use: the one that is set, or those that `auto` takes.

    Raises UserError where the one that is set cannot run on this device, in this number format or with this dropout.
    """
    kernel, dtype = config.attention.kernel, DTYPES[resolve(config.precision.mode, device)]
    dropout, model = config.model.attention_dropout, config.model
    if kernel != "auto":
        reason = attention.reason_against(kernel, device, dtype, dropout)
        require(not reason, str(reason))
        return [kernel]
    length = config.train.sequence_length
    bounds = torch.empty(0, dtype=torch.int32, device=device)
    row_length = length if config.train.packing == "rows" else None
    packing = attention.Packing(bounds, row_length, length, length)
    windows = {model.half_window(layer) for layer in range(model.num_layers)}
    needs = (dtype, dropout, model.relative_positions)
    return sorted({attention.choose(packing, window, *needs) for window in windows})


def tiny_defaults(config: Config) -> str | None:
    """Return a warning where a large model is trained with the defaults for a laptop's, else None."""
    parameters = config.parameters.without_embeddings
    if parameters < LARGE_MODEL_PARAMETERS:
        return None
    tokens, rate = config.train.batch_size * config.train.sequence_length, config.peak_learning_rate
    defaults = list[str]()
    if tokens <= TINY_STEP_TOKENS:
        defaults.append(f"{tokens} tokens a step")
    if rate == TINY_LEARNING_RATE:
        defaults.append(f"a peak learning rate of {rate:g}")
    if not defaults:
        return None
    return (
        f"warning: {' and '.join(defaults)}: the defaults for a model of a million parameters. This one has"
        f" {parameters / 1e6:.0f} million beside its embeddings. Take an experiment"
        " (experiment=crammed-bert-day), or train=day optim=adamw."
    )
