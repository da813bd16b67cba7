"""Changes of a model from outside, in a fixed order, so that model code stays plain mathematics.

`move_weights` puts the weights on the device. `apply`, before an optimizer holds them, cuts matrices (tensor parallel)
and layers (pipeline), then changes how the blocks are executed: weights fetched from the host, activation checkpointing
around that, activation offload around that, then compile; last come the copies or shards of data parallel.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import model_validator
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cramming.config import Count, Natural, Section, Share
from cramming.device import RuntimeConfig, compile_arguments, forbid_fallback
from cramming.model.encoder import Block, Encoder
from cramming.model.heads import HeadTransform, MaskedLM, PretrainedModel
from cramming.parallel.mesh import (
    Mesh,
    ParallelConfig,
    PipelineConfig,
    ReplicaConfig,
    load_experiment,
)
from cramming.precision import Precision

if TYPE_CHECKING:
    from cramming.parallel.data_parallel import ParallelStrategy


class MemoryConfig(Section):
    """Settings that save memory at the cost of time. The numbers stay the same, but for the rounding of compiled code.

    `checkpoint_every: k` computes every k-th block again in the backward pass (Chen et al. 2016) instead of keeping
    its activations; 0 keeps everything. `checkpoint: full` keeps such a block's input only, `selective` also the
    results of its matrix products and attention. `activation_budget`: the share of activations that compiled code may
    keep (null: its own choice). `offload_activations` keeps what blocks save for the backward pass in main memory,
    `offload_weights` their parameters and gradients, `offload_optimizer` the optimizer's state, updated by the CPU (Ren
    et al. 2021, ZeRO-Offload). `loss_chunk`: how many logits of the loss exist at a time (null: what suits the device).
    """

    checkpoint_every: Natural
    checkpoint: Literal["full", "selective"]
    activation_budget: Share | None
    offload_activations: bool
    offload_weights: bool
    offload_optimizer: bool
    loss_chunk: Count | None = None

    @model_validator(mode="after")
    def _selective_recomputes_blocks(self) -> Self:
        if self.checkpoint == "selective" and not self.checkpoint_every:
            raise ValueError(
                "checkpoint=selective: does nothing with memory.checkpoint_every=0."
                " Choose memory=selective, which sets it to 1."
            )
        return self


def move_weights(
    model: PretrainedModel, config: MemoryConfig, device: torch.device
) -> PretrainedModel:
    """Move the weights to `device`; with `offload_weights` those of the blocks stay on the host, pinned."""
    if not config.offload_weights:
        return model.to(device)
    from cramming.parallel.offload import CopyStream, block_parameters

    copy_stream = CopyStream(device)
    host_parameters = block_parameters(model.encoders)
    for p in model.parameters():
        if p in host_parameters:
            p.data = copy_stream.host_empty(p).copy_(p.data)
        else:
            p.data = p.data.to(device)
    return model


def apply(
    model: PretrainedModel,
    memory: MemoryConfig,
    runtime: RuntimeConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    precision: Precision,
) -> "ParallelStrategy | None":
    """Apply the settings to a model in place; return its execution on several processes, None on one."""
    if parallel.tp > 1:
        load_experiment("tensor").cut(model, mesh.dims["tp"], parallel.sequence)
    if memory.offload_activations or memory.offload_weights or memory.checkpoint_every:
        for encoder in model.encoders:
            _wrap_blocks(encoder, memory)
    _compile(model, memory, runtime)
    if mesh.world_size == 1:
        return None
    build_strategy = _strategy_class(parallel)
    return build_strategy(model, parallel, mesh, precision, memory.offload_optimizer)


def _strategy_class(parallel: ParallelConfig) -> Any:
    """Return the `ParallelStrategy` that the setting names. Importing one takes time."""
    if isinstance(parallel, PipelineConfig):
        return load_experiment("pipeline").Pipeline
    if parallel.tp > 1 and isinstance(parallel, ReplicaConfig):
        return load_experiment("tensor").ReplicasOfParts
    from cramming.parallel import data_parallel

    is_copied = isinstance(parallel, ReplicaConfig)
    return data_parallel.Replicas if is_copied else data_parallel.Shards


def _compile(model: PretrainedModel, memory: MemoryConfig, runtime: RuntimeConfig) -> None:
    if memory.activation_budget is not None:
        import torch._functorch.config as partitioner  # only with compile: importing it brings the compiler along

        partitioner.activation_memory_budget = memory.activation_budget
    if runtime.compile != "off":
        forbid_fallback()
    if runtime.compile == "blocks":
        _compile_parts(model, compile_arguments(runtime))
    elif runtime.compile == "model":
        model.compile(**compile_arguments(runtime))


def _compile_parts(model: PretrainedModel, arguments: dict[str, Any]) -> None:
    """Compile each block, the layers before a decoder, and the loss, which uncompiled moves four times the bytes."""
    for module in model.modules():
        if isinstance(module, Block | HeadTransform):
            module.compile(**arguments)
        if isinstance(module, MaskedLM):
            module.loss = torch.compile(module.loss, **arguments)  # type: ignore[method-assign]


def _wrap_blocks(encoder: Encoder, config: MemoryConfig) -> None:
    # imported late: most runs keep everything on the device
    from cramming.parallel.offload import Activations, CopyStream, host_weights

    blocks = list(encoder.blocks)
    copy_stream = CopyStream(encoder.embeddings.tokens.weight.device)
    activations = Activations(copy_stream, len(blocks)) if config.offload_activations else None
    fetched = host_weights(blocks, copy_stream) if config.offload_weights else None
    saved = _PRODUCTS if encoder.config.attention_dropout else _PRODUCTS | _ATTENTION
    selective: dict[str, Any] = {"context_fn": partial(_selective_contexts, saved)}
    for index, block in enumerate(blocks):
        forward = block.forward
        is_recomputed = bool(config.checkpoint_every) and index % config.checkpoint_every == 0
        if fetched:
            pack_rest = activations.pack if activations else lambda tensor: tensor
            forward = fetched[index].wrap(forward, None if is_recomputed else pack_rest)
        if is_recomputed:
            context = selective if config.checkpoint == "selective" else {}
            forward = partial(checkpoint, forward, use_reentrant=False, **context)
        if activations:
            forward = activations.wrap(forward, index, block.parameters())
        block.forward = forward


# Operations whose results are saved. Random operations must be repeated, or the restored generator gives the next one
# other numbers, so the result of attention with dropout is not saved. They are listed by name because some exist only
# on some devices and versions. bmm is missing: it is attention's, with L^2 numbers.
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "torch_attn::_varlen_attn",
        "flex_attention",
    }
)


def _selective_contexts(saved: frozenset[str]) -> tuple[Any, Any]:
    def keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name().removesuffix(".default")
        return CheckpointPolicy.MUST_SAVE if name in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep_expensive)
