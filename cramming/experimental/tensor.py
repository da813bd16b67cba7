"""Tensor parallel: each rank holds a part of every large matrix (Shoeybi et al. 2019, "Megatron-LM", section 3).

Attention is cut by heads, the MLP by inner neurons, embedding and decoder by vocabulary entries: a rank forms no logit
of others' entries. Parameters become DTensors on the mesh's `tp`; attention and MLP compute with the local parts as
plain tensors, so that every kernel, number format and autograd function does what it does in one process. Between them
the residual stream is whole on each rank, or, with `sequence`, cut by tokens (Korthikanti et al. 2022, section
4.2.2): norms, sums and dropout are then done once, not on each rank. Late layers work on the whole stream.
docs/explanation/experimental.md has the communication volume and the memory. Shapes: T tokens, M targets, D hidden
size.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

# Of several matrices side by side each rank has a part of each: torch has no public name for that.
from torch.distributed.tensor.placement_types import _StridedShard

from cramming.data.batches import Batch
from cramming.model.config import ModelConfig
from cramming.model.encoder import Block, Encoder
from cramming.model.heads import MaskedLM, PretrainedModel, Vocabulary
from cramming.parallel.data_parallel import LossAndHits, OnePass, ParallelStrategy
from cramming.parallel.mesh import Mesh

EVERYWHERE, BY_TOKENS, SUMMANDS = Replicate(), Shard(0), Partial()


def cut(model: PretrainedModel, mesh: DeviceMesh, sequence: bool) -> None:
    """Let each rank of the one-dimensional `mesh` hold and compute its part of `model`, which is the same on all."""
    assert isinstance(model, MaskedLM)
    encoder, config = model.encoder, model.config
    # number of layers whose stream is cut
    by_tokens = config.num_layers - config.late_layers if sequence else 0
    plan: dict[str, ParallelStyle] = {
        "encoder.embeddings.tokens": RowwiseParallel(input_layouts=EVERYWHERE)
    }
    for layer in range(config.num_layers):
        stream = BY_TOKENS if layer < by_tokens else EVERYWHERE
        plan |= {
            f"encoder.blocks.{layer}.{part}": _InParts(stream, config) for part in ("attn", "mlp")
        }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    rules = {"value_tokens.weight": _side_by_side(1, config.value_embeddings)}
    _distribute(model, mesh, rules | {"decoder_weight": Shard(0), "decoder_bias": Shard(0)})
    for layer, block in enumerate(cast(list[Block], encoder.blocks)):
        norms = {block.attn_norm, block.mlp_norm} if layer < by_tokens else set()
        _compute_locally(block, [*block.attn.modules(), *block.mlp.modules(), *norms])
    rest = set(model.modules()) - set(encoder.blocks.modules()) - {encoder.embeddings.tokens}
    if sequence:
        _cut_tokens(encoder, mesh, by_tokens)
    _compute_locally(model, list(encoder.convolutions) if sequence else [], rest)
    _cut_vocabulary(model, mesh)


class ReplicasOfParts(ParallelStrategy):
    """Strategy for replicas of a model whose matrices are cut.

    DDP takes no DTensors, so the step's gradients are summed at its end, each parameter's local part, as one bucket.
    """

    def accumulate(
        self, one_pass: OnePass, batches: Sequence[Batch], share: float
    ) -> list[LossAndHits]:
        """Run all micro-batches, then sum the gradients over the replicas."""
        results = super().accumulate(one_pass, batches, share)
        parts = []
        for parameter in cast(Iterable[DTensor], self.model.parameters()):
            if isinstance(parameter.grad, DTensor):  # each rank of tp may have a part of it
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                parts.append(parameter.grad.to_local())
        sum_over_replicas(parts, self.mesh)
        return results


def sum_over_replicas(gradients: Sequence[Tensor], mesh: Mesh) -> None:
    """Sum the gradients over the processes with other samples, in place, as one bucket."""
    if mesh.data_size == 1:
        return
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    mesh.sum_tensor(bucket)
    totals = bucket.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


# Parameters ----------------------------------------------------------------------------------------------------------


def _side_by_side(dim: int, count: int) -> Placement:
    """Return the placement with a part of each of `count` matrices side by side along `dim`."""
    return _StridedShard(dim, split_factor=count) if count > 1 else Shard(dim)


def _distribute(module: nn.Module, mesh: DeviceMesh, rules: dict[str, Placement]) -> None:
    """Make DTensors of the parameters, cut by the rule for their name, else replicated. Nothing is communicated."""
    for name, parameter in list(module.named_parameters()):
        if not isinstance(parameter, DTensor):
            path, _, leaf = name.rpartition(".")
            placement = rules.get(name.removeprefix("encoder."), EVERYWHERE)
            distributed = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            module.get_submodule(path).register_parameter(leaf, nn.Parameter(distributed))


class _Slot(NamedTuple):
    """Parameter `name` of module `owner`.

    With `in_parts` the parameter is whole, but each rank computes a part of its gradient. With `in_sum` each rank adds
    it to a term that is then summed over ranks. `beside` is the number of matrices that it is the bias of, if this rank
    has a part of each, else 0.
    """

    owner: nn.Module
    name: str
    in_parts: bool
    in_sum: bool
    beside: int

    def local(self) -> Tensor:
        """Return the tensor that this rank computes with."""
        parameter = self.owner._parameters[self.name]
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        local: Tensor = parameter.to_local(grad_placements=[SUMMANDS] if self.in_parts else None)
        if self.beside:
            return local.view(self.beside, mesh.size(), -1)[:, mesh.get_local_rank()].flatten()
        return local / mesh.size() if self.in_sum else local


def _slots(owner: nn.Module, shares: bool) -> list[_Slot]:
    """Return the slots of a module's parameters; with `shares` it computes with parts of tokens, heads or neurons."""
    parameters = cast(Iterable[tuple[str, DTensor]], owner.named_parameters(recurse=False))
    cuts = {name: parameter.placements[0] for name, parameter in parameters}
    weight, slots = cuts.get("weight"), []
    for name, placement in cuts.items():
        beside = (
            int(weight.split_factor) if name == "bias" and isinstance(weight, _StridedShard) else 0
        )
        in_sum = name == "bias" and weight == Shard(1)
        slots.append(_Slot(owner, name, shares and placement == EVERYWHERE, in_sum, beside))
    return slots


@contextmanager
def _local_parameters(slots: Sequence[_Slot]) -> Iterator[None]:
    originals = [slot.owner._parameters[slot.name] for slot in slots]
    try:
        for slot in slots:
            slot.owner._parameters[slot.name] = slot.local()  # type: ignore[assignment]
        yield
    finally:
        for slot, parameter in zip(slots, originals, strict=True):
            slot.owner._parameters[slot.name] = parameter


def _compute_locally(
    module: nn.Module, in_parts: Collection[nn.Module], owners: Collection[nn.Module] | None = None
) -> None:
    """Use the local tensors of parameters in the forward pass of `module`, of all submodules or only of `owners`.

    The forward method is wrapped, and not a hook added, so that FSDP has gathered the parameters before.
    """
    modules = [part for part in module.modules() if owners is None or part in owners]
    slots = list(chain.from_iterable(_slots(part, part in in_parts) for part in modules))
    forward = module.forward

    def local_forward(*inputs: Any, **named: Any) -> Any:
        with _local_parameters(slots):
            return forward(*inputs, **named)

    module.forward = local_forward


# Attention, MLP, vocabulary ------------------------------------------------------------------------------------------


def _moved(
    x: Tensor,
    mesh: DeviceMesh,
    was: Placement,
    becomes: Placement,
    gradient: Placement | None = None,
) -> Tensor:
    """Return `x` in another placement. `gradient` is the placement of its incoming gradient, if not `becomes`."""
    before = DTensor.from_local(x, mesh, [was], run_check=False)
    after = before.redistribute(placements=[becomes])
    local: Tensor = after.to_local(grad_placements=[gradient] if gradient else None)
    return local


def _gather_stream(x: Any, mesh: DeviceMesh, stream: Placement) -> Any:
    """Return the whole stream, of which each rank uses all: the backward pass sums (Megatron's f).

    What is no tensor is returned unchanged.
    """
    return _moved(x, mesh, stream, EVERYWHERE, SUMMANDS) if isinstance(x, Tensor) else x


class _InParts(ParallelStyle):
    """Attention by heads, or the MLP by inner neurons, between places where the stream is whole or cut by tokens."""

    def __init__(self, stream: Placement, config: ModelConfig) -> None:
        self.stream, self.dropout = stream, config.attention_dropout
        self.rules: dict[str, Placement] = {
            "qkv.weight": _side_by_side(0, 3),
            "out.weight": Shard(1),
            "gate.weight": Shard(0),
            "gate.bias": Shard(0),
            "up.weight": _side_by_side(0, 2 if config.mlp == "glu" else 1),
            "down.weight": Shard(1),
        }
        if config.mlp == "plain":
            self.rules["up.bias"] = Shard(0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, self.rules)
        if self.dropout:
            _draw_local_numbers(module, device_mesh)
        module.register_forward_pre_hook(partial(self._enter, device_mesh))
        module.register_forward_hook(partial(self._leave, device_mesh))
        return module

    def _enter(
        self, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the inputs with whole hidden states and context; other inputs are not tensors and stay unchanged."""
        return tuple(_gather_stream(x, mesh, self.stream) for x in inputs)

    def _leave(self, mesh: DeviceMesh, module: nn.Module, inputs: object, output: Any) -> Any:
        """Return the output summed over ranks (Megatron's g)."""
        if isinstance(output, tuple):
            return _moved(output[0], mesh, SUMMANDS, self.stream), *output[1:]
        return _moved(output, mesh, SUMMANDS, self.stream)


class VocabularyPart(Vocabulary):
    """Entries of this rank in a vocabulary cut over `mesh`."""

    def __init__(self, mesh: DeviceMesh, vocab_size: int) -> None:
        self.mesh = mesh
        self.first = mesh.get_local_rank() * (vocab_size // mesh.size())

    def combine(self, top: Tensor, lse: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine the results of all ranks; two numbers of each target are exchanged, twice."""
        top, highest = self._over_all(torch.stack((top.float(), lse)), "max")
        total, wanted = self._over_all(torch.stack(((lse - highest).exp(), wanted.float())), "sum")
        return top, highest + total.log(), wanted

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self._over_all(partial, "sum")

    def _over_all(self, tensor: Tensor, operation: str) -> Tensor:
        return DTensor.from_local(
            tensor, self.mesh, [Partial(operation)], run_check=False
        ).full_tensor()


def _cut_vocabulary(model: MaskedLM, mesh: DeviceMesh) -> None:
    decoder = model.decoder
    model.vocabulary = VocabularyPart(mesh, model.encoder.embeddings.tokens.num_embeddings)

    def local_decoder() -> Tensor:
        weight = decoder()
        return weight.to_local() if isinstance(weight, DTensor) else weight

    model.decoder = local_decoder  # type: ignore[method-assign]


# The stream cut by tokens, and dropout -------------------------------------------------------------------------------


def _cut_tokens(encoder: Encoder, mesh: DeviceMesh, by_tokens: int) -> None:
    """Give the first `by_tokens` blocks the tokens of this rank only, and the later ones all tokens."""
    encoder.embeddings.register_forward_hook(
        lambda module, inputs, x_TD: _moved(x_TD, mesh, EVERYWHERE, BY_TOKENS)
    )
    for convolution in encoder.convolutions:  # a token's neighbours may be on another rank
        convolution.register_forward_pre_hook(
            lambda module, inputs: (_gather_stream(inputs[0], mesh, BY_TOKENS), *inputs[1:])
        )
        convolution.register_forward_hook(
            lambda module, inputs, x_TD: x_TD.chunk(mesh.size())[mesh.get_local_rank()]
        )
    for layer, block in enumerate(cast(list[Block], encoder.blocks)):
        if layer < by_tokens:
            _draw_local_numbers(block.dropout, mesh)
        else:
            # the hidden states; or the context, which all late layers share
            index = 0 if layer == by_tokens else 3
            block.register_forward_pre_hook(partial(_gather, mesh, index))


def _gather(
    mesh: DeviceMesh, index: int, block: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Gather all tokens of the input with this index; in the backward pass each rank has its tokens' gradient."""
    gathered = _moved(inputs[index], mesh, BY_TOKENS, EVERYWHERE)
    return *inputs[:index], gathered, *inputs[index + 1 :]


def _draw_local_numbers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let dropout in `module`, whose tensors are cut, differ between ranks.

    Elsewhere all ranks draw the same numbers, because their generators have the same state.
    """
    forward = module.forward
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []

    def forward_with_local_numbers(*inputs: Any) -> Any:
        if not module.training:
            return forward(*inputs)
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + mesh.get_local_rank())
            return forward(*inputs)

    module.forward = forward_with_local_numbers
