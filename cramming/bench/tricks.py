"""Table of tricks: the settings that turn each on, and the rounding that each may bring.

The reference is fp32 and eager, and recomputes nothing. A trick is the reference with the trick's settings, so that
each is measured alone; `best` stacks those that are worth it. `in_force` returns the tricks that a run's settings
use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cramming.config import require, shown

Settings = Mapping[str, Any]  # dotted setting -> value

REFERENCE: Settings = {
    "attention.kernel": "sdpa",
    "attention.last_layer": "all",
    "runtime.keep_heap": False,
    "precision.mode": "fp32",
    "precision.tf32": False,
    "precision.fp8_scaling": "tensorwise",
    "precision.residual": "fp32",
    "runtime.compile": "off",
    "runtime.tune": "off",
    "runtime.cuda_graphs": False,
    "memory.checkpoint_every": 0,
    "memory.checkpoint": "full",
    "memory.activation_budget": None,
    "memory.offload_activations": False,
    "memory.offload_weights": False,
    "memory.offload_optimizer": False,
    "memory.loss_chunk": None,
}

SAME = 2.0**-23  # one unit in the last place of fp32: another order of sums
COARSE = 2.0**-8  # one unit in the last place of bf16: fewer bits
BEST = "best stack"


@dataclass(frozen=True)
class Trick:
    """Row of the table.

    `rounding` is the relative error that the trick may add to a number: the gate (gate.py) measures how far the loss
    moves with it. None means another algorithm, whose curve need not equal the reference's. `micro_batches` is their
    number per step. `device` is the kind of device on which the trick trains.
    """

    name: str
    settings: Settings
    rounding: float | None
    about: str
    device: Literal["any", "cpu", "cuda"] = "any"
    micro_batches: int = 1
    decisive: tuple[str, ...] = ()  # settings that decide whether a run uses the trick; (): all
    any_value: bool = False  # whether any value other than the reference's decides so

    def is_in_force(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a resolved configuration (nested) uses the trick."""
        keys = self.decisive or tuple(self.settings)
        if self.any_value:
            return all(get(settings, key) != REFERENCE[key] for key in keys)
        return bool(keys) and all(get(settings, key) == self.settings[key] for key in keys)


COMPILED = {"runtime.compile": "model"}
BF16 = {"precision.mode": "bf16"}
FP8 = {"precision.mode": "fp8"}
LAYERWISE: tuple[tuple[str, str, Settings], ...] = (
    (
        "LAMB",
        "Adam",
        {
            "name": "lamb",
            "lr": 2.5e-3,
            "weight_decay": 0.01,
            "clip": 1.0,
            "betas": [0.9, 0.98],
            "eps": 1e-6,
        },
    ),
    (
        "LARS",
        "SGD",
        {"name": "lars", "lr": 0.5, "weight_decay": 0.01, "clip": None, "momentum": 0.9},
    ),
)


def _layerwise_tricks() -> list[Trick]:
    rows = []
    for name, kind, settings in LAYERWISE:
        for rule, word in (("linear", "linear"), ("sqrt", "square-root")):
            scaled = {**settings, "lr_scale": {"rule": rule, "base_batch": 4}, "lr_width": None}
            about = f"layer-wise {kind} for large batches; learning rate for 4 sequences scaled by the {word} rule"
            rows.append(Trick(f"{name}, {word} rule", {"optim": scaled}, None, about))
    return rows


TRICKS: tuple[Trick, ...] = (
    Trick(
        "last layer at targets",
        {"attention.last_layer": "targets"},
        SAME,
        "last block only where the loss needs it",
    ),
    Trick(
        "attention varlen",
        {"attention.kernel": "varlen", **BF16},
        COARSE,
        "FlashAttention on bounds, in bf16",
        "cuda",
        decisive=("attention.kernel",),
    ),
    Trick(
        "attention flex",
        {"attention.kernel": "flex"},
        SAME,
        "FlexAttention, compiled; on a CPU it has a forward pass only",
        "cuda",
    ),
    Trick(
        "attention products",
        {"attention.kernel": "products", **BF16},
        COARSE,
        "attention as products and softmax, in bf16",
        "cpu",
        decisive=("attention.kernel",),
    ),
    Trick("keep heap", {"runtime.keep_heap": True}, SAME, "malloc keeps freed memory", "cpu"),
    Trick(
        "compile blocks", {"runtime.compile": "blocks"}, SAME, "one block compiled, used for all"
    ),
    Trick("compile model", COMPILED, SAME, "forward and backward pass compiled"),
    Trick(
        "coordinate descent",
        {**COMPILED, "runtime.tune": "coordinate-descent"},
        SAME,
        "compiled, tiles of fused kernels searched for",
        "cuda",
        decisive=("runtime.tune",),
    ),
    Trick(
        "max-autotune",
        {**COMPILED, "runtime.tune": "max-autotune"},
        SAME,
        "compiled, matrix products too by the kernels that win here",
        "cuda",
        decisive=("runtime.tune",),
    ),
    Trick(
        "CUDA graphs",
        {**COMPILED, "runtime.cuda_graphs": True},
        SAME,
        "compiled, all launches of a pass replayed as one",
        "cuda",
        decisive=("runtime.cuda_graphs",),
    ),
    Trick(
        "tf32", {"precision.tf32": True}, COARSE, "fp32 products with 10 bits of mantissa", "cuda"
    ),
    Trick("bf16", BF16, COARSE, "products in bf16, weights and sums in fp32"),
    Trick(
        "bf16 residual stream",
        {**BF16, "precision.residual": "bf16"},
        COARSE,
        "bf16, and so are what flows between blocks and norms' outputs",
        decisive=("precision.residual",),
    ),
    Trick(
        "fp16",
        {"precision.mode": "fp16"},
        COARSE,
        "products in fp16, loss scaled, fp32 master weights",
    ),
    Trick(
        "large loss chunks",
        {"memory.loss_chunk": 2**28},
        SAME,
        "2^28 logits at a time, mostly all of a micro-batch's",
        any_value=True,
    ),
    Trick("accumulation x4", {}, SAME, "four micro-batches per step", micro_batches=4),
    Trick(
        "checkpoint all",
        {"memory.checkpoint_every": 1},
        SAME,
        "every block computed again",
        any_value=True,
    ),
    Trick(
        "checkpoint every 2nd",
        {"memory.checkpoint_every": 2},
        SAME,
        "every second block computed again",
    ),
    Trick(
        "selective checkpoint",
        {"memory.checkpoint_every": 1, "memory.checkpoint": "selective"},
        SAME,
        "all but products and attention computed again",
        any_value=True,
    ),
    Trick(
        "activation budget 0.5",
        {"memory.activation_budget": 0.5, **COMPILED},
        SAME,
        "the compiler keeps half of the activations",
        decisive=("memory.activation_budget",),
        any_value=True,
    ),
    Trick(
        "activation offload",
        {"memory.offload_activations": True},
        SAME,
        "activations kept in main memory",
    ),
    Trick(
        "weight offload",
        {"memory.offload_weights": True},
        SAME,
        "blocks' weights and gradients in main memory",
    ),
    Trick(
        "optimizer offload",
        {"memory.offload_optimizer": True},
        SAME,
        "optimizer state in main memory, CPU updates",
    ),
    Trick(
        "fp8",
        {**FP8, "precision.fp8_scaling": "tensorwise"},
        COARSE,
        "blocks' linear layers in fp8, a scale for each tensor, the rest bf16",
        "cuda",
    ),
    Trick(
        "fp8 rowwise",
        {**FP8, "precision.fp8_scaling": "rowwise"},
        COARSE,
        "the same with a scale for each row and column",
        "cuda",
    ),
    Trick(
        "8-bit AdamW",
        {"optim.name": "adamw8bit", "optim.eps": 1e-8},
        COARSE,
        "moments in 8 bits (torchao)",
        decisive=("optim.name",),
    ),
    Trick(
        "4-bit AdamW",
        {"optim.name": "adamw4bit", "optim.eps": 1e-8},
        COARSE,
        "moments in 4 bits (torchao)",
        decisive=("optim.name",),
    ),
    *_layerwise_tricks(),
)


def best(device_type: str, mode: str) -> Trick:
    """Return the stack of tricks that are worth it on a device.

    `mode` is the number format that `precision.mode=auto` means there. On a CPU compiled steps are no faster than
    eager ones, and the first takes most of a minute (docs/log.md).
    """
    settings: dict[str, Any] = {"attention.kernel": "auto", "attention.last_layer": "targets"}
    if device_type == "cpu":
        settings["runtime.keep_heap"] = True
    else:
        settings |= {"runtime.compile": "model", "precision.tf32": True}
    if mode != "fp32":
        settings["precision.mode"] = mode
    if device_type == "cuda" and mode == "bf16":
        settings["precision.residual"] = "bf16"
    return Trick(BEST, settings, SAME if mode == "fp32" else COARSE, as_overrides(settings))


def in_force(settings: Mapping[str, Any], device_type: str, mode: str) -> list[Trick]:
    """Return the tricks, and the best stack, that a resolved nested configuration uses on a device.

    `mode` is as in `best`.
    """
    here = [trick for trick in TRICKS if trick.device in ("any", device_type)]
    return [trick for trick in [*here, best(device_type, mode)] if trick.is_in_force(settings)]


def as_overrides(settings: Settings) -> str:
    """Return settings as on the command line: `a.b=1, c.d=null`."""
    return ", ".join(f"{name}={shown(value)}" for name, value in settings.items())


def get(settings: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at `a.b`."""
    section, _, key = dotted.partition(".")
    return settings[section][key] if key else settings[section]


def changed(settings: Mapping[str, Any], changes: Settings, what: str = "bench") -> dict[str, Any]:
    """Return a copy of nested settings with dotted ones replaced, which shares no section with the original.

    Raises UserError, which begins with `what`, for an unknown setting.
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        result[name] = dict(value) if isinstance(value, Mapping) else value
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        if not key:
            result[section] = value  # the whole section, because another choice has other settings
            continue
        is_known = isinstance(result.get(section), dict) and key in result[section]
        require(
            is_known,
            f"{what}: unknown setting {dotted}. See the configuration with `--show-config`.",
        )
        result[section][key] = value
    return result
