"""Number formats of the training step: which one the matrix products run in, and the loss scaling fp16 needs.

Weights, gradients, optimizer state, softmax and loss stay fp32 in every mode; the mode is what autocast lowers the
matrix products to. fp16 has five exponent bits, so its gradients are scaled up by a factor that adapts (Micikevicius et
al. 2018, section 3.2); bf16 has the range of fp32 and needs none.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class PrecisionConfig:
    """`auto` takes bf16 where the device has it in hardware, else fp16 on a GPU and fp32 on a CPU."""

    mode: Literal["auto", "fp32", "bf16", "fp16"]
    tf32: bool


def resolve(mode: str, device: torch.device) -> Mode:
    """The mode in force on `device`."""
    if mode != "auto":
        return mode  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if has_bf16 else "fp32"


class Precision:
    """The context and the loss scaler of one mode on one device."""

    def __init__(self, config: PrecisionConfig, device: torch.device):
        self.mode: Mode = resolve(config.mode, device)
        self.device = device
        # fp32 matrix products on tensor cores with TF32 rounding; a no-op on a CPU and before Ampere.
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.mode == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """The context for a forward pass."""
        if self.mode == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.mode == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)
