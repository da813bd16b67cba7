"""What is applied to a model from outside, in one function and one order: activation checkpointing, then compile.

Model code stays plain mathematics; this is the only place that changes how it is executed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cramming.config import UserError
from cramming.model.heads import MaskedLM
from cramming.runtime import RuntimeConfig


@dataclass(frozen=True)
class MemoryConfig:
    """Time for memory.

    `checkpoint_every: k` computes every k-th block again in the backward pass (Chen et al. 2016) instead of keeping
    its activations; 0 keeps everything. `checkpoint: full` keeps such a block's input only, `selective` also the
    results of its matrix products and attention, so that only cheap operations run again. `activation_budget` lets the
    compiler choose what to compute again: the share of activations that may be kept (null: its own choice).
    `offload_activations` keeps what blocks save for the backward pass in main memory (pinned on CUDA).
    """

    checkpoint_every: int
    checkpoint: Literal["full", "selective"]
    activation_budget: float | None
    offload_activations: bool

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every={self.checkpoint_every} is below 0; 0 turns it off")
        if self.activation_budget is not None and not 0 <= self.activation_budget <= 1:
            raise ValueError(f"activation_budget={self.activation_budget} is not a share between 0 and 1")


def apply(model: MaskedLM, config: MemoryConfig, runtime: RuntimeConfig) -> MaskedLM:
    """Apply the settings to a MaskedLM in place and return it; UserError for settings that exclude each other."""
    blocks = list(model.encoder.blocks)
    _refuse_contradictions(config, runtime)
    if config.checkpoint_every:
        for block in blocks[:: config.checkpoint_every]:
            context: dict[str, Any] = {"context_fn": _selective_contexts} if config.checkpoint == "selective" else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
    if config.offload_activations:
        for block in blocks:
            _offload(block)
    if config.activation_budget is not None:
        import torch._functorch.config as partitioner  # only with compile: importing it brings the compiler along

        partitioner.activation_memory_budget = config.activation_budget
    if runtime.compile == "blocks":
        for block in blocks:
            block.compile()
    elif runtime.compile == "model":
        model.compile()
    return model


def _refuse_contradictions(config: MemoryConfig, runtime: RuntimeConfig) -> None:
    if config.activation_budget is not None and runtime.compile == "off":
        raise UserError(
            f"memory.activation_budget={config.activation_budget}: only a compiler can keep it; set runtime=compile"
        )
    if config.offload_activations and runtime.compile != "off":
        raise UserError("memory.offload_activations=true: works uncompiled only; set runtime.compile=off")


_KEPT_OPERATIONS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._flash_attention_forward.default,
    }
)


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_keep_expensive)


def _offload(block: nn.Module) -> None:
    """Let `block` save its activations in main memory; its own parameters stay where they are."""
    forward: Callable[..., Any] = block.forward
    parameters = {p.data_ptr() for p in block.parameters()}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if tensor.data_ptr() in parameters or tensor.numel() == 0:
            return tensor.device, tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=tensor.is_cuda)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    def offloading(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args)

    block.forward = offloading
