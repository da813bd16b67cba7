"""The configuration of a training run, and every check that crosses its sections.

Each section is a frozen dataclass beside the code that reads it, and is valid by itself; `Config` holds them all.
`CHECKS` is the table of what does not go together. It needs no corpus and no device: `cramming plan` asks it about a
card that is not there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from cramming import device as devices
from cramming.budget import BudgetConfig
from cramming.config import (
    Count,
    Fraction,
    Natural,
    Positive,
    RootConfig,
    UserError,
    build,
    expand_home,
    require,
    settings_hash,
    shown,
)
from cramming.data.corpus import ORDERS
from cramming.data.manifest import MANIFEST
from cramming.data.masking import OBJECTIVES, ObjectiveConfig, ReplacedTokensConfig
from cramming.device import FLASH_MODULES, RuntimeConfig, reason_against_flash
from cramming.model import attention
from cramming.model.attention import AttentionConfig
from cramming.model.attention_kernels import FLASH_CAPABILITY
from cramming.model.config import ModelConfig, ParameterCount, count_parameters, flops_per_token
from cramming.optim.build import LOW_BIT, NEED_WHOLE_MATRICES, OPTIMIZERS, OptimConfig
from cramming.parallel.apply import MemoryConfig
from cramming.parallel.mesh import (
    STRATEGIES,
    ParallelConfig,
    PipelineConfig,
    ReplicaConfig,
    ShardConfig,
)
from cramming.precision import (
    DTYPES,
    FP8_CAPABILITY,
    Mode,
    PrecisionConfig,
    resolve,
    resolve_residual,
)
from cramming.schedule import SCHEDULES, AverageConfig, BatchRamp, Schedule, ramp_step

# The default step and the learning rate of optim=adamw-tiny are for models of about a million parameters. The size from
# which on they are said to be unfit is a judgement, not a measurement.
TINY_STEP_TOKENS, TINY_LEARNING_RATE, LARGE_MODEL_PARAMETERS = 2048, 3e-3, 20_000_000


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save: every so many minutes, every so many steps if given, and to be kept at these shares of the budget,
    of which 0 is before the first step."""

    every_minutes: Positive
    every_steps: Count | None
    keep_at: tuple[Fraction, ...]

    def is_due(self, steps: int, seconds_since_last: float) -> bool:
        """Whether to save after step number `steps`."""
        by_steps = self.every_steps is not None and steps % self.every_steps == 0
        return by_steps or seconds_since_last >= 60 * self.every_minutes

    def is_to_keep(self, before: float, now: float) -> bool:
        """Whether one of the shares was reached between the ends of two steps, at progress `before` and `now`."""
        return any(before < share <= now for share in self.keep_at)


@dataclass(frozen=True)
class TrainConfig:
    """Sizes of the training loop. `batch_size` and `micro_batch` count sequences: per step, and per forward pass.

    `micro_batch: auto` becomes a number before training: the largest that fits and that divides a process's share of a
    step, or of what steps grow by with `batch_ramp`.
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
    validation_corpus: Path | None
    order: str  # "shuffled", "source", or the name of an order file of the corpus; each also with "_reversed"

    def __post_init__(self) -> None:
        ramp_step(self.batch_ramp, self.batch_size)
        require(self.order in ORDERS, f"order={self.order!r}: choose one of {', '.join(ORDERS)}")

    @property
    def rows(self) -> int:
        """`micro_batch`, once it is a number."""
        assert self.micro_batch != "auto", "not decided yet"
        return self.micro_batch


@dataclass(frozen=True)
class RandomStart:
    """Weights drawn at random."""

    name: str


@dataclass(frozen=True)
class CooccurrenceStart:
    """Word vectors counted from the text (cramming/start.py).

    Tokens within `window` of each other count as neighbours, nearer ones more. At most `max_tokens` tokens, evenly from
    the whole training split, are read. `embedding_std` and `decoder_std`: root mean squares of the vectors' entries.
    """

    name: str
    window: Count
    max_tokens: Count
    embedding_std: Positive
    decoder_std: Positive


StartConfig = RandomStart | CooccurrenceStart
STARTS: dict[str, type[StartConfig]] = {"random": RandomStart, "cooccurrence": CooccurrenceStart}


@dataclass(frozen=True)
class Config(RootConfig):
    """All settings of a training run: those of the root, and the sections that training reads."""

    model: ModelConfig
    objective: Annotated[ObjectiveConfig, OBJECTIVES]
    optim: Annotated[OptimConfig, OPTIMIZERS]
    schedule: Annotated[Schedule, SCHEDULES]
    start: Annotated[StartConfig, STARTS]
    train: TrainConfig
    budget: BudgetConfig
    checkpoint: CheckpointConfig
    attention: AttentionConfig
    precision: PrecisionConfig
    memory: MemoryConfig
    runtime: RuntimeConfig
    parallel: Annotated[ParallelConfig, STRATEGIES]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Config":
        """From the composed root configuration; UserError for what is wrong in one section."""
        return build(cls, {f.name: settings[f.name] for f in fields(cls) if f.name in settings}, "")

    @property
    def training_seed(self) -> int:
        """The seed of weights, dropout, data order and masks: `seed`, with the nonce where there is one."""
        if self.nonce is None:
            return self.seed
        return int(settings_hash(self.seed, self.nonce), 16) % 2**63

    @property
    def targets_per_row(self) -> int:
        """Tokens of a sequence that are predicted, in the first phase of the objective."""
        return self.objective.at(0.0).targets_per_row(self.train.sequence_length)

    def flops_per_token(self, progress: float = 0.0) -> float:
        """Model compute of one training token at this share of the budget."""
        length, last_layer = self.train.sequence_length, self.attention.last_layer
        share = self.objective.at(progress).targets_per_row(length) / length
        if isinstance(self.objective, ReplacedTokensConfig):
            from cramming.model import replaced_tokens

            width = self.objective.generator_width
            return replaced_tokens.flops_per_token(self.model, width, length, share, last_layer)
        return flops_per_token(self.model, length, share, last_layer)

    @property
    def parameters(self) -> ParameterCount:
        """Of all that is trained, a generator too."""
        if isinstance(self.objective, ReplacedTokensConfig):
            from cramming.model import replaced_tokens

            return replaced_tokens.count_parameters(self.model, self.objective.generator_width)
        return count_parameters(self.model)

    @property
    def cut_unevenly(self) -> str:
        """The sizes of which the ranks of `parallel.tp` cannot have as much each. A null vocabulary is padded to 64."""
        names = ["model.num_heads", "model.intermediate_size", "model.vocab_size"]
        names += ["train.sequence_length"] * self.parallel.sequence
        sizes = {name: attrgetter(name)(self) or 64 for name in names}
        return " and ".join(
            f"{name}={size}" for name, size in sizes.items() if size % self.parallel.tp
        )

    @property
    def peak_learning_rate(self) -> float:
        """At the full batch."""
        return self.optim.peak_learning_rate(self.train.batch_size, self.model.hidden_size)


@dataclass(frozen=True)
class Place:
    """Where a configuration is to run: this machine's device, or a card of the table that `plan` knows."""

    kind: str  # cpu | cuda
    name: str
    mode: Mode  # the number format that `precision.mode` means there
    capability: tuple[int, int] = (0, 0)  # of a GPU
    processes: int = 1
    trains: bool = False  # not only planned: what is installed and which files are there counts too

    @classmethod
    def here(cls, config: Config, device: torch.device, processes: int = 1) -> "Place":
        """Training on this machine's `device`."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        name, mode = devices.describe(device).name, resolve(config.precision.mode, device)
        return cls(device.type, name, mode, capability, processes, trains=True)

    @property
    def has_flash(self) -> bool:
        """Whether FlashAttention runs there."""
        return self.capability >= FLASH_CAPABILITY


def _unit(config: Config, place: Place) -> int:
    """Sequences of which every batch is a multiple: one micro-batch in each process that has samples of its own."""
    replicas = max(1, place.processes // (config.parallel.tp * config.parallel.pp))
    return replicas * (1 if config.train.micro_batch == "auto" else config.train.micro_batch)


def _is_cut(config: Config, place: Place) -> bool:
    """Whether a process has a part of each weight."""
    return config.parallel.tp > 1 or (
        place.processes > 1 and isinstance(config.parallel, ShardConfig)
    )


def _is_staged(config: Config) -> bool:
    return isinstance(config.parallel, PipelineConfig)


# What does not go together: a setting, when it is refused (`c` is the configuration, `p` the place), and what is said
# behind the setting and its value. `{fits}`: the batch sizes nearest to the one that is set that can be cut.
TORCHAO = ": needs the package torchao; pip install 'cramming[lowbit]', or take optim=adamw and precision=bf16"
EXTRAS = ": not all are installed; pip install those packages, or 'cramming[tensorboard,wandb]'"
SPLITTING_TORCH = "2.13"
SPLIT = f": this parallel.schedule needs torch {SPLITTING_TORCH}. Update torch, or set parallel.schedule=interleaved."
STAGES = ": not with parallel=pp, where each process has some of the layers only"
NOT_IN_STAGES = (  # settings that are off or null there
    "model.unet_skips",
    "model.value_embeddings",
    "model.value_residual",
    "objective.by_loss",
    "train.average",
    "memory.offload_activations",
    "memory.offload_weights",
    "memory.offload_optimizer",
    "runtime.cuda_graphs",
)
CUT = ": not where a process has a part of each weight (parallel={c.parallel.name}, parallel.tp={c.parallel.tp}); "
NOT_WHERE_CUT: tuple[
    tuple[str, Callable[[Config, Place], bool], str], ...
] = (  # `CUT` comes before what is said
    ("optim.name", lambda c, p: c.optim.name in NEED_WHOLE_MATRICES, "take adamw, lamb or another"),
    ("precision.mode", lambda c, p: p.mode in ("fp16", "fp8"), "take bf16 or fp32"),
    ("train.average", lambda c, p: c.train.average is not None, "set it to null"),
    ("train.micro_batch", lambda c, p: c.train.micro_batch == "auto", "set a number"),
    ("runtime.compile", lambda c, p: c.runtime.compile == "model", "set it to blocks"),
    ("runtime.cuda_graphs", lambda c, p: c.runtime.cuda_graphs, "set it to false"),
    ("memory.offload_activations", lambda c, p: c.memory.offload_activations, "set it to false"),
)
FOR_FP8 = " does nothing with products in {p.mode}; set precision.mode=fp8 too"
FOR_A_GPU = ": is for a GPU, and this is a CPU; set it to off or false"
EAGER = ": works uncompiled only; set runtime.compile=off"
SCALED = ": fp16 scales gradients on the device; set precision=bf16 or fp32"  # and the host would read too early
CHECKS: tuple[tuple[str, Callable[[Config, Place], bool], str], ...] = (
    (
        "train.sequence_length",
        lambda c, p: c.train.sequence_length > c.model.max_length,
        " is above model.max_length={c.model.max_length}",
    ),
    (
        "train.batch_size",
        lambda c, p: c.train.batch_size % _unit(c, p) != 0,
        " is not a multiple of train.micro_batch={c.train.micro_batch} x {p.processes} process(es); take"
        " train.batch_size={fits}, or another train.micro_batch (the processes of one replica, parallel.tp and"
        " parallel.pp, count once)",
    ),
    (
        "train.micro_batch",
        lambda c, p: ramp_step(c.train.batch_ramp, c.train.batch_size) % _unit(c, p) != 0,
        " x {p.processes} process(es): train.batch_ramp lets the batch grow by a number of sequences that is not a"
        " multiple of this; take a smaller micro-batch or train.micro_batch=auto",
    ),
    (
        "train.validation_corpus",
        lambda c, p: bool(
            p.trains and (corpus := c.train.validation_corpus) and not (corpus / MANIFEST).is_file()
        ),
        ": no corpus there; prepare it first, or leave it null for the run's own held-out text",
    ),
    (
        "model.tie_embeddings",
        lambda c, p: c.objective.replaces_tokens and not c.model.tie_embeddings,
        ": the generator of objective=rtd predicts with the token embeddings; set it to true",
    ),
    (
        "model.late_layers",
        lambda c, p: c.objective.replaces_tokens and c.model.late_layers > 1,
        ": saves nothing in the encoder of objective=rtd, which is asked about all tokens; set it to 1",
    ),
    (
        "optim.name",
        lambda c, p: c.optim.name in LOW_BIT and p.trains and not find_spec("torchao"),
        TORCHAO,
    ),
    (
        "precision.mode",
        lambda c, p: c.precision.mode == "fp8" and p.trains and not find_spec("torchao"),
        TORCHAO,
    ),
    (
        "precision.mode",
        lambda c, p: (
            p.mode == "fp8" and not c.precision.emulate_fp8 and p.capability < FP8_CAPABILITY
        ),
        ": needs an Ada or Hopper GPU (compute capability 8.9 or newer), this is {p.name}; take precision=bf16"
        " (precision.emulate_fp8=true computes it slowly, for tests)",
    ),
    ("precision.emulate_fp8", lambda c, p: c.precision.emulate_fp8 and p.mode != "fp8", FOR_FP8),
    (
        "precision.fp8_scaling",
        lambda c, p: c.precision.fp8_scaling != "tensorwise" and p.mode != "fp8",
        FOR_FP8,
    ),
    (  # products in fp32 want its bits; fp16's range would be widened in some places only
        "precision.residual",
        lambda c, p: c.precision.residual == "bf16" and p.mode not in ("bf16", "fp8"),
        ": goes with products in bf16 or fp8, and they are in {p.mode}; set precision=bf16, or precision.residual=fp32",
    ),
    (
        "attention.flash",
        lambda c, p: c.attention.flash != "auto" and p.kind == "cpu",
        ": is for a GPU, and this is a CPU; set it to auto",
    ),
    (
        "attention.flash",
        lambda c, p: c.attention.flash in FLASH_MODULES and c.model.attention_dropout > 0,
        ": has no dropout, and model.attention_dropout={c.model.attention_dropout:g}; set it to auto",
    ),
    (
        "budget.clock",
        lambda c, p: c.budget.clock == "cpu" and p.kind != "cpu",
        ": does not see what a GPU does; set budget.clock=wall",
    ),
    (
        "budget.clock",
        lambda c, p: (
            c.budget.clock == "cpu" and (c.runtime.compile != "off" or c.optim.name in LOW_BIT)
        ),
        ": does not see the compiler's processes; set runtime.compile=off, and no optimizer that compiles (adamw8bit,"
        " adamw4bit)",
    ),
    ("trackers", lambda c, p: p.trains and not all(map(find_spec, c.trackers)), EXTRAS),
    ("runtime.tune", lambda c, p: c.runtime.tune != "off" and p.kind == "cpu", FOR_A_GPU),
    ("runtime.cuda_graphs", lambda c, p: c.runtime.cuda_graphs and p.kind == "cpu", FOR_A_GPU),
    (
        "memory.activation_budget",
        lambda c, p: c.memory.activation_budget is not None and c.runtime.compile == "off",
        ": only a compiler can keep it; set runtime.compile=model",
    ),
    (
        "memory.offload_activations",
        lambda c, p: c.memory.offload_activations and c.runtime.compile != "off",
        EAGER,
    ),
    (
        "memory.offload_weights",
        lambda c, p: c.memory.offload_weights and c.runtime.compile != "off",
        EAGER,
    ),
    (
        "memory.offload_weights",
        lambda c, p: (
            c.memory.offload_weights
            and c.memory.checkpoint_every > 0
            and c.memory.checkpoint == "selective"
        ),
        ": does not go with memory.checkpoint=selective; set it to full",
    ),
    (
        "memory.offload_weights",
        lambda c, p: c.memory.offload_weights and p.processes > 1,
        ": works in one process only, this run has {p.processes}; set it to false",
    ),
    (
        "parallel.tp",
        lambda c, p: c.cut_unevenly != "",
        ": does not divide {c.cut_unevenly}; take another number, or change what it does not divide",
    ),
    (
        "parallel.tp",
        lambda c, p: (
            c.parallel.tp > 1 and (c.objective.replaces_tokens or c.memory.offload_optimizer)
        ),
        ": not with objective=rtd or memory.offload_optimizer=true; set it to 1",
    ),
    (
        "runtime.compile",
        lambda c, p: c.parallel.tp > 1 and c.runtime.compile != "off",
        ": matrices that are cut by parallel.tp={c.parallel.tp} work uncompiled only; set it to off",
    ),
    (
        "parallel.tp",
        lambda c, p: (
            c.parallel.tp > 1
            and isinstance(c.parallel, ReplicaConfig)
            and c.parallel.compression.name != "none"
        ),
        ": the gradients of cut matrices are sent as they are; set parallel.compression=none",
    ),
    (
        "parallel.sequence",
        lambda c, p: c.parallel.sequence and (c.parallel.tp == 1 or c.model.unet_skips),
        ": goes with parallel.tp=2 or more, and without model.unet_skips; set it to false",
    ),
    ("memory.offload_weights", lambda c, p: c.memory.offload_weights and p.mode == "fp16", SCALED),
    (
        "budget.clock",
        lambda c, p: c.budget.clock == "cpu" and p.processes > 1,
        ": counts one process's time only, and this run has {p.processes}; set budget.clock=wall",
    ),
    (
        "parallel.pp",
        lambda c, p: c.parallel.pp > 1 and c.parallel.name != "pp",
        ": stages are cut by parallel=pp",
    ),
    *(
        (
            setting,
            lambda c, p, is_set=attrgetter(setting): _is_staged(c) and bool(is_set(c)),
            STAGES,
        )
        for setting in NOT_IN_STAGES
    ),
    ("objective.name", lambda c, p: _is_staged(c) and c.objective.replaces_tokens, STAGES),
    ("start.name", lambda c, p: _is_staged(c) and isinstance(c.start, CooccurrenceStart), STAGES),
    ("train.micro_batch", lambda c, p: _is_staged(c) and c.train.micro_batch == "auto", STAGES),
    ("precision.mode", lambda c, p: _is_staged(c) and p.mode == "fp16", STAGES),
    ("runtime.compile", lambda c, p: _is_staged(c) and c.runtime.compile == "model", STAGES),
    ("parallel.tp", lambda c, p: _is_staged(c) and c.parallel.tp > 1, STAGES),
    ("optim.name", lambda c, p: _is_staged(c) and c.optim.name in NEED_WHOLE_MATRICES, STAGES),
    (
        "parallel.pp",
        lambda c, p: _is_staged(c) and not _has_layers(c),
        ": model.num_layers={c.model.num_layers} are too few for the stages of parallel.schedule, of which the last one"
        " has at least model.late_layers={c.model.late_layers} of them",
    ),
    (
        "train.micro_batch",
        lambda c, p: _is_staged(c) and not _fills_pipeline(c, p),
        ": a step then has a number of micro-batches that is no multiple of parallel.pp={c.parallel.pp}, or with"
        " parallel.schedule=dualpipev of twice as many; take a smaller one",
    ),
    ("parallel.pp", lambda c, p: _is_staged(c) and not _torch_runs_schedule(c), SPLIT),
    (
        "memory.offload_optimizer",
        lambda c, p: c.memory.offload_optimizer and p.mode == "fp16",
        SCALED,
    ),
    *(
        (
            setting,
            lambda c, p, is_refused=is_refused: _is_cut(c, p) and is_refused(c, p),
            CUT + cure,
        )
        for setting, is_refused, cure in NOT_WHERE_CUT
    ),
)


def _has_layers(c: Config) -> bool:
    from cramming.parallel.stages import fits

    assert isinstance(c.parallel, PipelineConfig)
    return fits(c.parallel.schedule, c.parallel.pp, c.model)


def _torch_runs_schedule(c: Config) -> bool:
    """Return whether this torch can split the backward pass of this project's autograd functions, if it has to."""
    from cramming.parallel.stages import ORDERS

    assert isinstance(c.parallel, PipelineConfig)
    return torch.__version__ >= SPLITTING_TORCH or not ORDERS[c.parallel.schedule].splits_backward


def _fills_pipeline(c: Config, p: Place) -> bool:
    """Whether every step has as many micro-batches as the schedule asks for, or a multiple."""
    assert isinstance(c.parallel, PipelineConfig)
    least = c.parallel.pp * (2 if c.parallel.schedule == "dualpipev" else 1)
    return ramp_step(c.train.batch_ramp, c.train.batch_size) % (_unit(c, p) * least) == 0


def check(config: Config, place: Place) -> None:
    """UserError for the first row of `CHECKS` that holds."""
    unit = _unit(config, place)
    below = config.train.batch_size // unit * unit
    fits = " or ".join(str(size) for size in (below, below + unit) if size)
    for setting, is_broken, reason in CHECKS:
        value = shown(attrgetter(setting)(config))
        require(
            not is_broken(config, place),
            f"{setting}={value}{reason.format(c=config, p=place, fits=fits)}",
        )
    flash = config.attention.flash
    if place.trains and flash in FLASH_MODULES:
        problem = reason_against_flash(int(flash), place.capability)
        require(not problem, f"attention.flash={flash}: {problem}; set it to auto")


def check_run(
    settings: Mapping[str, Any], config: Config, device: torch.device, processes: int
) -> tuple[list[str], dict[str, str]]:
    """All that can be refused before there is a corpus; else the attention kernels, and the tricks' gate states."""
    check(config, Place.here(config, device, processes))
    kernels = attention_kernels(config, device)
    return kernels, check_gate(settings, config, kernels, device)


def check_gate(
    settings: Mapping[str, Any], config: Config, kernels: list[str], device: torch.device
) -> dict[str, str]:
    """`gate.check` of what the settings come to on this device: `auto` hides no trick."""
    if not config.forced and not expand_home(config.gates, "gates").exists():
        return {"all tricks": "untested"}
    from cramming.bench import gate  # only here: the table of tricks is not needed to train
    from cramming.bench.tricks import changed

    mode, states = resolve(config.precision.mode, device), dict[str, str]()
    residual = resolve_residual(config.precision.residual, mode, device.type)
    where, usual = (
        gate.device_key(devices.describe(device).name, torch.__version__),
        resolve("auto", device),
    )
    for kernel in sorted({config.attention.kernel, *kernels}):
        in_force = {
            "precision.mode": mode,
            "precision.residual": residual,
            "attention.kernel": kernel,
        }
        resolved = changed(settings, in_force)
        states |= gate.check(resolved, where, device.type, usual)
    return states


def attention_kernels(config: Config, device: torch.device) -> list[str]:
    """The kernels that the layers of a run use: the one that is set, or those that `attention.kernel=auto` takes.

    UserError where the one that is set cannot run on this device, in this number format or with this dropout.
    """
    kernel, dtype = config.attention.kernel, DTYPES[resolve(config.precision.mode, device)]
    dropout, model = config.model.attention_dropout, config.model
    if kernel != "auto":
        if reason := attention.reason_against(kernel, device, dtype, dropout):
            raise UserError(reason)
        return [kernel]
    length, rows = config.train.sequence_length, config.train.packing == "rows"
    bounds = torch.empty(0, dtype=torch.int32, device=device)
    packing = attention.Packing(bounds, length if rows else None, length, length)
    windows = {model.half_window(layer) for layer in range(model.num_layers)}
    return sorted({attention.choose(packing, window, dtype, dropout) for window in windows})


def tiny_defaults(config: Config) -> str | None:
    """A warning where a large model is trained with the defaults for a laptop's; else None."""
    parameters = config.parameters.without_embeddings
    tokens, rate = config.train.batch_size * config.train.sequence_length, config.peak_learning_rate
    found = [f"{tokens} tokens a step"] if tokens <= TINY_STEP_TOKENS else []
    found += [f"a peak learning rate of {rate:g}"] if rate == TINY_LEARNING_RATE else []
    if parameters < LARGE_MODEL_PARAMETERS or not found:
        return None
    return (
        f"warning: {' and '.join(found)}: the defaults for a model of a million parameters, and this one has"
        f" {parameters / 1e6:.0f} million beside its embeddings; take an experiment (experiment=crammed-bert-day), or"
        " train=day optim=adamw"
    )
