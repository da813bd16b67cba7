"""Blocks' weights whose home is host memory, and which visit the device in turn (lane.py says how they travel)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cramming.parallel.lane import Event, Forward, Lane, Packed, storage_of, unpack


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
            self.index = {storage_of(tensor): i for i, tensor in enumerate(self.tensors)}
        return self.tensors

    def leave(self) -> None:
        self.tensors = None

    def pack(self, tensor: Tensor, rest: Callable[[Tensor], Packed]) -> Packed:
        found = self.index.get(storage_of(tensor))
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


def linked(blocks: Sequence[nn.Module], lane: Lane) -> Iterator[HostWeights]:
    """The blocks' weights, each knowing its neighbours."""
    weights = [HostWeights(block, lane) for block in blocks]
    for before, after in pairwise(weights):
        before.after, after.before = after, before
    return iter(weights)
