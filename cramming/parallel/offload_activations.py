"""Activations that wait in host memory for their block's backward pass (offload.py says how they travel)."""

import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from cramming.parallel.offload import CopyStream, Event, Forward, Packed, storage_of, unpack

SMALLEST = 1024  # elements: below, a copy costs more than the place it frees
BLOCKS_IN_FLIGHT = 2  # whose activations are still on the device while they are copied out


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

    def __init__(
        self, copy_stream: CopyStream, previous: "_BlockPass | None", keep: set[int], stays: bool
    ) -> None:
        self.copy_stream, self.previous, self.keep, self.stays = copy_stream, previous, keep, stays
        self.saved: dict[tuple[Any, ...], _Saved] = {}
        self.restored = False

    def pack(self, tensor: Tensor) -> Packed:
        storage = storage_of(tensor)
        if tensor.numel() < SMALLEST or storage in self.keep:
            return tensor
        if self.stays:
            return partial(self._present, tensor)
        # The whole storage moves, once: queries, keys and values are views of one, and a view that came back as a
        # tensor of its own would have other strides, in whose order kernels may sum otherwise. The storage lives on at
        # least until `release`, so no other has its key.
        key = (storage, tensor.dtype, tensor._version)
        if key not in self.saved:
            whole = tensor.as_strided(
                (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0
            )
            host = self.copy_stream.host_empty(whole)
            self.saved[key] = _Saved(whole, host, self.copy_stream.copy([host], [whole]))
        self.saved[key].uses += 1
        view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return partial(self._back, self.saved[key], *view)

    def release(self) -> None:
        """Give up the device's copies; the memory is free for what is queued from now on."""
        for saved in self.saved.values():
            self.copy_stream.wait(saved.event)
            saved.device = None

    def restore(self) -> None:
        """Begin to fetch what was released."""
        if self.restored:
            return
        self.restored = True
        for saved in self.saved.values():
            if saved.device is None and saved.host is not None:
                saved.device = torch.empty_like(saved.host, device=self.copy_stream.device)
                saved.event = self.copy_stream.copy([saved.device], [saved.host])

    def __del__(self) -> None:
        """A copy nobody asked for (a backward pass cut short) must not arrive in memory that is others' by then."""
        for saved in self.saved.values():
            if saved.device is not None:
                self.copy_stream.wait(saved.event)

    def _present(self, tensor: Tensor) -> Tensor:
        if self.previous is not None:
            self.previous.restore()
        return tensor

    def _back(
        self, saved: _Saved, shape: torch.Size, stride: tuple[int, ...], offset: int
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
    """Moves what the blocks save to the host and back. The last two blocks' stays: backward asks for it first."""

    def __init__(self, copy_stream: CopyStream, blocks: int) -> None:
        self.copy_stream, self.blocks = copy_stream, blocks
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
            self._begin(index, {storage_of(tensor) for tensor in kept})
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
        self._current = _BlockPass(
            self.copy_stream, self._current, keep, index >= self.blocks - BLOCKS_IN_FLIGHT
        )
        self._in_flight.append(weakref.ref(self._current))
