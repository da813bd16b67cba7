"""Offloading to host memory: blocks' weights, activations, and the optimizer's state (Ren et al. 2021, ZeRO-Offload).

On a GPU the host memory is pinned, copies run on a stream of their own, and while one block is computed the next one's
tensors are on their way. On a CPU the same code makes plain copies. Whole storages move and the views on them are made
again, so losses and gradients are those of the plain run, bit for bit; those of torch's FSDP2 with CPUOffloadPolicy and
of its save_on_cpu are not (docs/log.md, 2026-11-28).
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from cramming.model.encoder import Encoder

SMALLEST = 1024  # elements: below, a copy costs more than the memory it frees
BLOCKS_IN_FLIGHT = 2  # whose activations are still on the device while they are copied out

Forward = Callable[..., Tensor]
Packed = Tensor | Callable[[], Tensor]
Event = torch.cuda.Event | None
Groups = list[dict[str, Any]]


class CopyStream:
    """Copies between `device` and host memory: on a stream of their own, or plain ones on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_empty(self, like: Tensor) -> Tensor:
        """Return an empty tensor like `like` in host memory, pinned where there is a GPU to copy from it."""
        is_pinned = self.stream is not None
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Event:
        """Begin to copy each source into its target, after the work queued so far; return the event of completion."""
        if self.stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Event) -> None:
        """Make the work that is queued from now on wait for the copies of `event`; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return fp32 copies in host memory, complete on return."""
        sources = [tensor.detach().float() for tensor in tensors]
        copies = [self.host_empty(source) for source in sources]
        event = self.copy(copies, sources)
        if event is not None:
            event.synchronize()
        return copies


def unpack(packed: Packed) -> Tensor:
    """Return a saved tensor: the counterpart of every `pack`."""
    return packed if isinstance(packed, Tensor) else packed()


def storage_id(tensor: Tensor) -> int:
    """Return an id of the tensor's storage. Its address does not serve: all fake tensors have address 0."""
    return int(tensor.untyped_storage()._cdata)


# Weights -------------------------------------------------------------------------------------------------------------


def block_parameters(encoders: Sequence[Encoder]) -> set[nn.Parameter]:
    """Return the parameters of all blocks: those that `memory.offload_weights` moves to the host."""
    return set().union(*(encoder.blocks.parameters() for encoder in encoders))


class HostWeights:
    """Parameters of one block in host memory, and copies of them that are under way to the device."""

    def __init__(self, block: nn.Module, copy_stream: CopyStream) -> None:
        self.copy_stream = copy_stream
        self.owners: list[tuple[nn.Module, str]] = []
        self.parameters: list[Tensor] = []
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners.append((module, name))
                    self.parameters.append(parameter)
        # Weights of linear layers, which autocast would lower at each use, are lowered once on arrival: the rounding is
        # the same, and the linear layer then saves our tensor for backward, which can be freed. Float8 layers need
        # their weights in fp32.
        self.is_lowered = [type(module) is nn.Linear for module, _ in self.owners]
        self.before: HostWeights | None = None
        self.after: HostWeights | None = None
        self._arriving: tuple[list[int], list[Tensor], Event] | None = None

    def prefetch(self) -> None:
        """Begin to copy, unless the present values are already under way."""
        versions = [parameter._version for parameter in self.parameters]
        if self._arriving is not None:
            if self._arriving[0] == versions:
                return
            self.copy_stream.wait(self._arriving[2])  # before its memory is reused
        sources = [parameter.detach() for parameter in self.parameters]
        copies = [torch.empty_like(source, device=self.copy_stream.device) for source in sources]
        self._arriving = versions, copies, self.copy_stream.copy(copies, sources)

    @torch.no_grad()
    def fetch(self, dtype: torch.dtype | None) -> list[Tensor]:
        """Return the weights on the device, linear layers' in `dtype`; begin to copy those of the next block."""
        self.prefetch()
        assert self._arriving is not None
        _, copies, event = self._arriving
        self._arriving = None
        self.copy_stream.wait(event)
        # Recomputed forward passes run in the order of the backward pass.
        is_in_backward = torch._C._current_graph_task_id() != -1
        neighbour = self.before if is_in_backward else self.after
        if neighbour is not None:
            neighbour.prefetch()
        if dtype is None:
            return copies
        weights = []
        for copy, is_lowered in zip(copies, self.is_lowered, strict=True):
            weights.append(copy.to(dtype) if is_lowered else copy)
        return weights

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Replace the parameters of the block's modules by `tensors`."""
        for (module, name), tensor in zip(self.owners, tensors, strict=True):
            module._parameters[name] = tensor  # type: ignore[assignment]

    def wrap(self, forward: Forward, pack_rest: Callable[[Tensor], Packed] | None) -> Forward:
        """Return `forward` with weights fetched for it.

        `pack_rest` packs saved tensors other than weights. It is None inside an activation checkpoint, which saves none
        and runs the wrapped function a second time.
        """

        def run(*arguments: Any) -> Tensor:
            on_device = DeviceWeights(self)
            self.install(FetchWeights.apply(on_device, *self.parameters))
            try:
                if pack_rest is None or not torch.is_grad_enabled():
                    return forward(*arguments)
                pack = partial(on_device.pack, pack_rest=pack_rest)
                with saved_tensors_hooks(pack, unpack):
                    return forward(*arguments)
            finally:
                self.install(self.parameters)
                on_device.free()

        return run


class DeviceWeights:
    """Weights of one block on the device, fetched for one forward pass and again for its backward pass."""

    def __init__(self, weights: HostWeights) -> None:
        self.weights = weights
        device = weights.copy_stream.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.tensors: list[Tensor] | None = None
        self.index: dict[int, int] = {}

    def get(self) -> list[Tensor]:
        """Return the weights on the device; fetch them if they were freed."""
        if self.tensors is None:
            self.tensors = self.weights.fetch(self.dtype)
            self.index = {storage_id(tensor): i for i, tensor in enumerate(self.tensors)}
        return self.tensors

    def free(self) -> None:
        """Free the weights on the device."""
        self.tensors = None

    def pack(self, tensor: Tensor, pack_rest: Callable[[Tensor], Packed]) -> Packed:
        """Pack a saved tensor: a weight is fetched again when it is needed."""
        number = self.index.get(storage_id(tensor))
        if number is None:
            return pack_rest(tensor)
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return lambda: self.get()[number].as_strided(shape, stride, offset)


class FetchWeights(torch.autograd.Function):
    """Copy of host parameters to the device, and of their gradients to the host, where autograd accumulates them."""

    @staticmethod
    def forward(ctx: Any, on_device: DeviceWeights, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the weights on the device."""
        ctx.on_device = on_device
        ctx.set_materialize_grads(False)
        return tuple(on_device.get())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients in host memory.

        This is the last node of the block's backward pass. The host waits here for the block's gradients. Autograd
        accumulates them in a CPU thread, while the device's thread proceeds to the previous block.
        """
        ctx.on_device.free()
        present = [gradient for gradient in gradients if gradient is not None]
        copies = iter(ctx.on_device.weights.copy_stream.to_host(present))
        on_host: list[Tensor | None] = []
        for gradient in gradients:
            on_host.append(None if gradient is None else next(copies))
        return None, *on_host


def host_weights(blocks: Sequence[nn.Module], copy_stream: CopyStream) -> list[HostWeights]:
    """Return the blocks' weights, each linked with its neighbours."""
    weights = [HostWeights(block, copy_stream) for block in blocks]
    for before, after in pairwise(weights):
        before.after, after.before = after, before
    return weights


# Activations ---------------------------------------------------------------------------------------------------------


class SavedStorage:
    """Storage of activations: its copies on host and device, each while needed. `uses` counts the unpacks to come."""

    def __init__(self, device: Tensor, host: Tensor, event: Event) -> None:
        self.device: Tensor | None = device
        self.host: Tensor | None = host
        self.event = event
        self.uses = 0


class BlockActivations:
    """Activations that one forward pass of one block saved.

    The backward pass of the block begins to fetch the activations of the `previous` block, whose backward pass is next.
    If it `stays`, its own activations are not moved. Storages in `keep` are never moved.
    """

    def __init__(
        self,
        copy_stream: CopyStream,
        previous: "BlockActivations | None",
        keep: set[int],
        stays: bool,
    ) -> None:
        self.copy_stream, self.previous, self.keep, self.stays = copy_stream, previous, keep, stays
        self.saved: dict[tuple[Any, ...], SavedStorage] = {}
        self.is_restored = False

    def pack(self, tensor: Tensor) -> Packed:
        """Begin to copy a saved tensor to the host.

        The whole storage moves, once: queries, keys and values are views of one storage. A view copied by itself would
        return with other strides, for which kernels may sum in another order. The storage lives at least until
        `release`, so its id is unique.
        """
        storage = storage_id(tensor)
        if tensor.numel() < SMALLEST or storage in self.keep:
            return tensor
        if self.stays:
            return partial(self._unpack_resident, tensor)
        key = (storage, tensor.dtype, tensor._version)
        if key not in self.saved:
            length = tensor.untyped_storage().nbytes() // tensor.itemsize
            whole = tensor.as_strided((length,), (1,), 0)
            host = self.copy_stream.host_empty(whole)
            event = self.copy_stream.copy([host], [whole])
            self.saved[key] = SavedStorage(whole, host, event)
        self.saved[key].uses += 1
        view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return partial(self._unpack_moved, self.saved[key], *view)

    def release(self) -> None:
        """Free the device's copies, for reuse by the work that is queued from now on."""
        for saved in self.saved.values():
            self.copy_stream.wait(saved.event)
            saved.device = None

    def restore(self) -> None:
        """Begin to copy released storages back to the device."""
        if self.is_restored:
            return
        self.is_restored = True
        for saved in self.saved.values():
            if saved.device is None and saved.host is not None:
                saved.device = torch.empty_like(saved.host, device=self.copy_stream.device)
                saved.event = self.copy_stream.copy([saved.device], [saved.host])

    def __del__(self) -> None:
        """Wait for copies that no backward pass has used, before their memory is reused."""
        for saved in self.saved.values():
            if saved.device is not None:
                self.copy_stream.wait(saved.event)

    def _unpack_resident(self, tensor: Tensor) -> Tensor:
        if self.previous is not None:
            self.previous.restore()
        return tensor

    def _unpack_moved(
        self, saved: SavedStorage, shape: torch.Size, stride: tuple[int, ...], offset: int
    ) -> Tensor:
        self.restore()
        if self.previous is not None:
            self.previous.restore()
        whole = saved.device
        assert whole is not None, "the backward pass runs once"
        self.copy_stream.wait(saved.event)
        saved.uses -= 1
        if saved.uses == 0:
            saved.device = saved.host = None
        return whole.as_strided(shape, stride, offset)


class Activations:
    """Saved activations of all blocks, moved to the host and back, but for the last two blocks', used first."""

    def __init__(self, copy_stream: CopyStream, blocks: int) -> None:
        self.copy_stream, self.blocks = copy_stream, blocks
        self.current: BlockActivations | None = None
        # Weak: the autograd graph owns a block's activations, and with them their memory.
        self._in_flight: deque[weakref.ref[BlockActivations]] = deque()

    def pack(self, tensor: Tensor) -> Packed:
        """Pack a tensor that the current block saves."""
        return tensor if self.current is None else self.current.pack(tensor)

    def wrap(self, forward: Forward, index: int, parameters: Iterable[nn.Parameter]) -> Forward:
        """Return `forward` of block number `index`; all blocks share its arguments but the first."""
        parameters = list(parameters)

        def run(hidden_TD: Tensor, *shared: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden_TD, *shared)
            leaves = [leaf for leaf in pytree.tree_leaves(shared) if isinstance(leaf, Tensor)]
            self._begin(index, {storage_id(tensor) for tensor in (*parameters, *leaves)})
            try:
                with saved_tensors_hooks(self.pack, unpack):
                    return forward(hidden_TD, *shared)
            finally:
                if index == self.blocks - 1:
                    self.current = None

        return run

    def _begin(self, index: int, keep: set[int]) -> None:
        if index == 0:
            self.current = None
            self._in_flight.clear()
        elif len(self._in_flight) == BLOCKS_IN_FLIGHT:
            oldest = self._in_flight.popleft()()
            if oldest is not None:
                oldest.release()
        stays = index >= self.blocks - BLOCKS_IN_FLIGHT
        self.current = BlockActivations(self.copy_stream, self.current, keep, stays)
        self._in_flight.append(weakref.ref(self.current))


# Optimizer -----------------------------------------------------------------------------------------------------------


class HostCopies:
    """Copies of weights in host memory, which an optimizer there updates in their place.

    `by_weight` maps each weight on the device to its copy. A weight whose version shows a change since the last update
    (a loaded checkpoint) is copied again before the next. Both methods may run twice in a step, because some optimizers
    call the `step` of another class.
    """

    def __init__(self, by_weight: dict[nn.Parameter, nn.Parameter], copy_stream: CopyStream):
        self.by_weight, self.copy_stream = by_weight, copy_stream
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._versions = {weight: weight._version for weight in by_weight}

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Copy gradients to the host, which waits for them."""
        buffers, gradients = [], []
        for weight, copy in self.by_weight.items():
            if weight._version != self._versions[weight]:
                copy.copy_(weight)
                self._versions[weight] = weight._version
            copy.grad = None
            if weight.grad is not None:
                if weight not in self._buffers:
                    self._buffers[weight] = self.copy_stream.host_empty(weight)
                copy.grad = self._buffers[weight]
                buffers.append(copy.grad)
                gradients.append(weight.grad)
        event = self.copy_stream.copy(buffers, gradients)
        if event is not None:
            event.synchronize()
        factor = getattr(optimizer, "grad_scale", None)  # for clipping in a fused optimizer
        if factor is not None:
            optimizer.grad_scale = factor.cpu()  # type: ignore[attr-defined]

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        """Copy the new weights to the device; the host does not wait."""
        for weight, copy in self.by_weight.items():
            weight.copy_(copy, non_blocking=True)
            self._versions[weight] = weight._version


def build_on_host(
    groups: Groups,
    build: Callable[[Groups], torch.optim.Optimizer],
    copy_stream: CopyStream,
    host_parameters: Collection[nn.Parameter] = frozenset(),
) -> torch.optim.Optimizer:
    """Build an optimizer whose state lies in host memory, where it updates copies of the weights.

    `host_parameters` are weights that are on the host already. Checkpoints have the weights of the model, not the
    copies.
    """
    by_weight: dict[nn.Parameter, nn.Parameter] = {}
    host_groups = []
    for group in groups:
        on_host = []
        for weight in group["params"]:
            copy = weight
            if weight not in host_parameters:
                copy = nn.Parameter(copy_stream.host_empty(weight).copy_(weight.detach()))
                by_weight[weight] = copy
            on_host.append(copy)
        host_groups.append({**group, "params": on_host})
    optimizer = build(host_groups)
    copies = HostCopies(by_weight, copy_stream)
    optimizer.register_step_pre_hook(copies.before_step)
    optimizer.register_step_post_hook(copies.after_step)
    weights = list(chain.from_iterable(group["params"] for group in groups))
    # The gradients to clear are those of the model's weights.
    optimizer.zero_grad = torch.optim.SGD(weights).zero_grad  # type: ignore[method-assign]
    return optimizer
