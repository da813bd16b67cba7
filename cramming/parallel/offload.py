"""Tensors that wait in host memory while the device does not need them.

Two kinds, of the encoder's blocks only. Activations are made on the device and come back in the backward pass; weights
are at home on the host and visit the device for one block's forward or backward pass. On a GPU the host memory is
pinned, the copies run on a stream of their own beside the computation, and while one block is computed the next one's
tensors are already on their way. On a CPU the same code makes plain copies: nothing is won there.

Both hang on autograd's saved tensors: what a block keeps for its backward pass is packed as a function that fetches it
again. Whole storages move and the views on them are made again, so losses and gradients are those of the plain run.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

Forward = Callable[..., Tensor]
Packed = Tensor | Callable[[], Tensor]
Event = torch.cuda.Event | None

SMALLEST = 1024  # elements: below, a copy costs more than the place it frees
BLOCKS_IN_FLIGHT = 2  # whose activations are still on the device while they are copied out


class Lane:
    """The way between `device` and host memory: copies on a stream of their own, or plain ones on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_empty(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An empty tensor like `like` in host memory, pinned where there is a GPU to copy from it."""
        return torch.empty(like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=self.stream is not None)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Event:
        """Begin to copy each source into its target, after all that is queued now; the event is their arrival."""
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
        """Let what is computed from now on see the copies behind `event`; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def to_host(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """fp32 copies in host memory, complete on return."""
        present = [t.detach().float() for t in tensors if t is not None]
        copies = [self.host_empty(t) for t in present]
        event = self.copy(copies, present)
        if event is not None:
            event.synchronize()
        arrived = iter(copies)
        return [None if t is None else next(arrived) for t in tensors]


def unpack(packed: Packed) -> Tensor:
    """The other half of every `pack` below."""
    return packed if isinstance(packed, Tensor) else packed()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Activations ----------------------------------------------------------------------------------------------------------


class _Saved:
    """One storage of activations: its copies on the host and, at times, on the device. `uses` are unpacks to come."""

    def __init__(self, device: Tensor, host: Tensor, event: Event) -> None:
        self.device: Tensor | None = device
        self.host: Tensor | None = host
        self.event, self.uses = event, 0


class _BlockPass:
    """What one forward pass of one block saved. `previous` is the block before, whose turn in backward is next.

    A block that `stays` copies nothing, but its backward pass calls the one before all the same.
    """

    def __init__(self, lane: Lane, previous: "_BlockPass | None", keep: set[int], stays: bool) -> None:
        self.lane, self.previous, self.keep, self.stays = lane, previous, keep, stays
        self.saved: dict[tuple[Any, ...], _Saved] = {}
        self.restored = False

    def pack(self, tensor: Tensor) -> Packed:
        storage = _storage(tensor)
        if tensor.numel() < SMALLEST or storage in self.keep:
            return tensor
        if self.stays:
            return partial(self._present, tensor)
        # The whole storage moves, once: queries, keys and values are views of one, and a view that came back as a
        # tensor of its own would have other strides, in whose order kernels may sum otherwise. The storage lives on at
        # least until `release`, so no other has its key.
        key = (storage, tensor.dtype, tensor._version)
        if key not in self.saved:
            whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            host = self.lane.host_empty(whole)
            self.saved[key] = _Saved(whole, host, self.lane.copy([host], [whole]))
        self.saved[key].uses += 1
        view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return partial(self._back, self.saved[key], *view)

    def release(self) -> None:
        """Give up the device's copies; the memory is free for what is queued from now on."""
        for saved in self.saved.values():
            self.lane.wait(saved.event)
            saved.device = None

    def restore(self) -> None:
        """Begin to fetch what was released."""
        if self.restored:
            return
        self.restored = True
        for saved in self.saved.values():
            if saved.device is None and saved.host is not None:
                saved.device = torch.empty_like(saved.host, device=self.lane.device)
                saved.event = self.lane.copy([saved.device], [saved.host])

    def __del__(self) -> None:
        """A copy nobody asked for (a backward pass cut short) must not arrive in memory that is others' by then."""
        for saved in self.saved.values():
            if saved.device is not None:
                self.lane.wait(saved.event)

    def _present(self, tensor: Tensor) -> Tensor:
        if self.previous is not None:
            self.previous.restore()
        return tensor

    def _back(self, saved: _Saved, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        self.restore()
        if self.previous is not None:
            self.previous.restore()
        whole = saved.device
        assert whole is not None, "the backward pass runs once"
        self.lane.wait(saved.event)
        saved.uses -= 1
        if saved.uses == 0:
            saved.device = saved.host = None
        return whole.as_strided(shape, stride, offset)


class Activations:
    """Moves what the blocks save to the host and back. The last two blocks' stays: backward asks for it first."""

    def __init__(self, lane: Lane, blocks: int) -> None:
        self.lane, self.blocks = lane, blocks
        self._current: _BlockPass | None = None
        # Weak: the autograd graph owns a pass, and with it its memory.
        self._in_flight: deque[weakref.ref[_BlockPass]] = deque()

    def pack(self, tensor: Tensor) -> Packed:
        """For a tensor that the block under way saves."""
        return tensor if self._current is None else self._current.pack(tensor)

    def wrap(self, forward: Forward, index: int, parameters: Iterable[nn.Parameter]) -> Forward:
        """`forward` of block number `index`; the first argument is its own, the others are shared by all blocks."""
        parameters = list(parameters)

        def run(hidden_TD: Tensor, *shared: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden_TD, *shared)
            kept = [*parameters, *(x for x in pytree.tree_leaves(shared) if isinstance(x, Tensor))]
            self._begin(index, {_storage(tensor) for tensor in kept})
            try:
                with saved_tensors_hooks(self.pack, unpack):
                    return forward(hidden_TD, *shared)
            finally:
                if index == self.blocks - 1:
                    self._current = None

        return run

    def _begin(self, index: int, keep: set[int]) -> None:
        if index == 0:
            self._current = None
            self._in_flight.clear()
        elif len(self._in_flight) == BLOCKS_IN_FLIGHT:
            oldest = self._in_flight.popleft()()
            if oldest is not None:
                oldest.release()
        self._current = _BlockPass(self.lane, self._current, keep, index >= self.blocks - BLOCKS_IN_FLIGHT)
        self._in_flight.append(weakref.ref(self._current))


# Weights --------------------------------------------------------------------------------------------------------------


class HostWeights:
    """The parameters of one block, at home in host memory, and their copies on the way to the device."""

    def __init__(self, block: nn.Module, lane: Lane) -> None:
        self.lane = lane
        self.places = [(module, name) for module in block.modules() for name in module._parameters]
        self.places = [(module, name) for module, name in self.places if module._parameters[name] is not None]
        self.parameters: list[Tensor] = [module._parameters[name] for module, name in self.places]  # type: ignore[misc]
        # What autocast would lower in each use is lowered once on arrival: the same rounding, and what the linear layer
        # saves for backward is then a tensor of ours, which need not stay. Float8 layers take their weights whole.
        self.lowered = [type(module) is nn.Linear for module, _ in self.places]
        self.before: HostWeights | None = None
        self.after: HostWeights | None = None
        self._coming: tuple[list[int], list[Tensor], Event] | None = None

    def prefetch(self) -> None:
        """Begin to copy, unless the present values are already under way."""
        versions = [p._version for p in self.parameters]
        if self._coming is None or self._coming[0] != versions:
            if self._coming is not None:
                self.lane.wait(self._coming[2])  # or it arrives in memory that is others' by then
            copies = [torch.empty_like(p, device=self.lane.device, requires_grad=False) for p in self.parameters]
            self._coming = versions, copies, self.lane.copy(copies, [p.detach() for p in self.parameters])

    @torch.no_grad()
    def fetch(self, dtype: torch.dtype | None) -> list[Tensor]:
        """The weights on the device, linear layers' in `dtype`; the next block's begin to follow."""
        self.prefetch()
        assert self._coming is not None
        _, copies, event = self._coming
        self._coming = None
        self.lane.wait(event)
        in_backward = torch._C._current_graph_task_id() != -1  # a recomputed forward pass runs backwards too
        neighbour = self.before if in_backward else self.after
        if neighbour is not None:
            neighbour.prefetch()
        return [c.to(dtype) if dtype and low else c for c, low in zip(copies, self.lowered)]

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Let the block's modules compute with `tensors`."""
        for (module, name), tensor in zip(self.places, tensors, strict=True):
            module._parameters[name] = tensor  # type: ignore[assignment]

    def wrap(self, forward: Forward, rest: Callable[[Tensor], Packed] | None) -> Forward:
        """`forward` with weights fetched for it.

        `rest` packs what else is saved; None inside a checkpoint, which saves nothing and brings the weights again by
        running all of this a second time.
        """

        def run(*arguments: Any) -> Tensor:
            visit = _Visit(self)
            self.install(_Fetch.apply(visit, *self.parameters))
            try:
                if rest is None or not torch.is_grad_enabled():
                    return forward(*arguments)
                with saved_tensors_hooks(lambda tensor: visit.pack(tensor, rest), unpack):
                    return forward(*arguments)
            finally:
                self.install(self.parameters)
                visit.leave()

        return run


class _Visit:
    """The weights of one block on the device for one forward pass, and again for its backward pass."""

    def __init__(self, weights: HostWeights) -> None:
        self.weights = weights
        device = weights.lane.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.tensors: list[Tensor] | None = None
        self.index: dict[int, int] = {}

    def arrive(self) -> list[Tensor]:
        if self.tensors is None:
            self.tensors = self.weights.fetch(self.dtype)
            self.index = {_storage(tensor): i for i, tensor in enumerate(self.tensors)}
        return self.tensors

    def leave(self) -> None:
        self.tensors = None

    def pack(self, tensor: Tensor, rest: Callable[[Tensor], Packed]) -> Packed:
        found = self.index.get(_storage(tensor))
        if found is None:
            return rest(tensor)
        return partial(self._again, found, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _again(self, found: int, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        return self.arrive()[found].as_strided(shape, stride, offset)


class _Fetch(torch.autograd.Function):
    """Host parameters to the device; their gradients back to the host, where autograd adds them up."""

    @staticmethod
    def forward(ctx: Any, visit: _Visit, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.visit = visit
        ctx.set_materialize_grads(False)
        return tuple(visit.arrive())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # The last node of the block's backward pass. The host waits here for the block's gradients, then adds them to
        # its own in another thread than the one that goes on with the block before.
        ctx.visit.leave()
        return None, *ctx.visit.weights.lane.to_host(gradients)
