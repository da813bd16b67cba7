"""Number formats of the training step: which one the matrix products run in, and the loss scaling fp16 needs.

Weights, gradients, optimizer state, softmax and loss stay fp32 in every mode; the mode is what autocast lowers the
matrix products to. fp16 has five exponent bits, so its gradients are scaled up by a factor that adapts (Micikevicius et
al. 2018, section 3.2); bf16 has the range of fp32 and needs none. fp8 is bf16 with the linear layers of the blocks in
8 bits (Micikevicius et al. 2022, FP8 formats for deep learning), each tensor scaled to its largest entry when it is
used; embeddings and the masked-language-model head stay in bf16. So does the last block's projection to queries, keys
and values with `attention.last_layer=targets`: it is then two products with parts of the layer's matrix, not a call of
the layer that was converted.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from cramming.config import UserError

Mode = Literal["fp32", "bf16", "fp16", "fp8"]
FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True)
class PrecisionConfig:
    """`auto` takes bf16 where the device has it in hardware, else fp16 on a GPU and fp32 on a CPU.

    `emulate_fp8` computes mode fp8 by rounding and fp32 products, on any device and slowly: for tests.
    """

    mode: Literal["auto", "fp32", "bf16", "fp16", "fp8"]
    tf32: bool
    emulate_fp8: bool = False

    def __post_init__(self) -> None:
        if self.emulate_fp8 and self.mode != "fp8":
            raise ValueError(
                f"emulate_fp8=true does nothing with mode={self.mode}; set precision.mode=fp8, or it to false"
            )


def resolve(mode: str, device: torch.device) -> Mode:
    """The mode in force on `device`."""
    if mode != "auto":
        return mode  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_bf16 else "fp32"


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """fp32 matrix products with TF32's rounding, or without; a setting of the whole process, which is then put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Precision:
    """The context and the loss scaler of one mode on one device."""

    def __init__(self, config: PrecisionConfig, device: torch.device):
        self.mode: Mode = resolve(config.mode, device)
        self.device = device
        self._emulates = config.emulate_fp8
        refuse_missing_hardware(config, device)
        # fp32 matrix products on tensor cores with TF32 rounding; a no-op on a CPU and before Ampere.
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.mode == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """The context for a forward pass."""
        if self.mode == "fp32":
            return nullcontext()
        dtype = torch.float16 if self.mode == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype)

    def convert(self, blocks: nn.Module) -> None:
        """In mode fp8 let the linear layers in `blocks` multiply so. Their parameters and names stay what they are."""
        if self.mode != "fp8":
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Kernels take multiples of 16: of features here, other layers stay bf16; tokens are padded with zeros.
        convert_to_float8_training(
            blocks,
            module_filter_fn=lambda layer, name: layer.in_features % 16 == 0 and layer.out_features % 16 == 0,
            config=Float8LinearConfig(emulate=self._emulates, pad_inner_dim=True),
        )


def refuse_missing_hardware(config: PrecisionConfig, device: torch.device) -> None:
    """UserError where mode fp8 cannot run on `device`."""
    if config.mode != "fp8":
        return
    if find_spec("torchao") is None:
        raise UserError("precision.mode=fp8: needs the package torchao; pip install 'cramming[lowbit]', or take bf16")
    if config.emulate_fp8:
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise UserError(
            f"precision.mode=fp8: needs an Ada or Hopper GPU (compute capability 8.9 or newer), this is {name}; take"
            " precision=bf16 (precision.emulate_fp8=true computes it slowly, for tests)"
        )
