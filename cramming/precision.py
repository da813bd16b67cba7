"""Number formats of the training step: the type of matrix products, and the loss scaling that fp16 needs.

Weights, gradients, optimizer state, softmax and loss stay fp32 in every mode; the mode is the type that autocast
lowers matrix products to. fp16 has five exponent bits, so its gradients are scaled up by an adaptive factor
(Micikevicius et al. 2018, section 3.2); bf16 has the range of fp32 and needs none. fp8 is bf16 with the linear layers
of the blocks in 8 bits (Micikevicius et al. 2022, FP8 formats for deep learning), with one scale per tensor, set to
its largest entry at each use, or one per row and column; embeddings and the masked-language-model head stay in bf16.
So do the late layers' projections to queries, keys and values with `attention.last_layer=targets`, and with
`model.late_layers` above one in any case: they are then two products with parts of the layer's matrix, not a call of
the converted layer.

`residual` is the type of the hidden states between the blocks and of their gradients (model/residual.py).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import nn

from cramming.config import Section
from cramming.model.encoder import Encoder

Mode = Literal["fp32", "bf16", "fp16", "fp8"]
Residual = Literal["fp32", "bf16"]
# mode -> type of products
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


class PrecisionConfig(Section):
    """The `precision` section.

    Mode `auto` is bf16 where the device has it in hardware, else fp16 on a GPU and fp32 on a CPU.

    `emulate_fp8` computes mode fp8 by rounding and fp32 products, on any device and slowly, for tests. `fp8_scaling`
    is one scale per tensor, or one per row and column. `residual` is the type of the hidden states between the blocks
    and of the outputs of norms; `auto` is bf16 on a GPU whose products are in bf16, else fp32.
    """

    mode: Literal["auto", "fp32", "bf16", "fp16", "fp8"]
    tf32: bool
    emulate_fp8: bool = False
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    residual: Literal["auto", "fp32", "bf16"] = "auto"

    @model_validator(mode="after")
    def _has_fp8_settings_for_fp8_alone(self) -> Self:
        problem = f"does nothing with precision.mode={self.mode}. Set precision.mode=fp8 too."
        if self.emulate_fp8 and self.mode != "fp8":
            raise ValueError(f"emulate_fp8=true: {problem}")
        if self.fp8_scaling != "tensorwise" and self.mode != "fp8":
            raise ValueError(f"fp8_scaling={self.fp8_scaling}: {problem}")
        return self


def resolve(mode: str, device: torch.device) -> Mode:
    """Return the mode in force on `device`."""
    if mode != "auto":
        return mode  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_bf16 else "fp32"


def resolve_residual(residual: str, mode: Mode, device_type: str) -> Residual:
    """Return the type of the residual stream with products in `mode` on a device of this type.

    A GPU is limited by memory traffic between the products, which halves in bf16. On a CPU, which emulates bf16, it
    costs time.
    """
    if residual != "auto":
        return residual  # type: ignore[return-value]
    has_bf16_products = DTYPES[mode] == torch.bfloat16
    return "bf16" if device_type == "cuda" and has_bf16_products else "fp32"


def slow_products(mode: Mode, device_type: str) -> str | None:
    """Return a warning where a CPU emulates the products of `mode`; None elsewhere.

    fp16 trained at 0.08 and bf16 at 0.1 times the speed of fp32 on a CPU without instructions for them
    (docs/results/tricks.md).
    """
    if device_type != "cpu" or mode in ("fp32", resolve("auto", torch.device("cpu"))):
        return None
    return (
        f"warning: precision.mode={mode}: this CPU has no fast products in this format. A step may take ten times as"
        " long; set precision=auto."
    )


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Compute fp32 matrix products with or without TF32's rounding inside the block, in the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Precision:
    """Autocast context and loss scaler of one mode on one device."""

    def __init__(self, config: PrecisionConfig, device: torch.device):
        self.mode: Mode = resolve(config.mode, device)
        self.residual: Residual = resolve_residual(config.residual, self.mode, device.type)
        self.device = device
        self._config = config
        # TF32 rounding of fp32 matrix products on tensor cores; no effect on a CPU and before Ampere
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.mode == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass."""
        if self.mode == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.mode])

    @property
    def stream(self) -> torch.dtype:
        """Type of the hidden states between blocks."""
        return DTYPES[self.residual]

    def convert(self, encoder: Encoder) -> None:
        """Convert the linear layers of the blocks to fp8 in mode fp8, and lower the residual stream if it is bf16.

        Parameters and their names do not change.
        """
        if self.residual == "bf16":
            from cramming.model import residual

            residual.lower(encoder, torch.bfloat16)
        if self.mode != "fp8":
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Kernels need multiples of 16. Layers with other numbers of features stay bf16; tokens are padded with zeros.
        recipe = Float8LinearConfig.from_recipe_name(self._config.fp8_scaling)
        convert_to_float8_training(
            encoder.blocks,
            module_filter_fn=_has_fp8_shape,
            config=replace(recipe, emulate=self._config.emulate_fp8, pad_inner_dim=True),
        )


def _has_fp8_shape(layer: nn.Module, name: str) -> bool:
    assert isinstance(layer, nn.Linear)
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0
