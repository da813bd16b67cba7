"""Offloading to host memory: blocks' weights and the optimizer's state (activations: offload_activations.py).

On a GPU the host memory is pinned, copies run on a stream of their own, and while one block is computed the next one's
tensors are on their way. On a CPU the same code makes plain copies. Whole storages move and the views on them are made
again, so losses and gradients are those of the plain run.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Forward = Callable[..., Tensor]
Packed = Tensor | Callable[[], Tensor]
Event = torch.cuda.Event | None


class CopyStream:
    """The way between `device` and host memory: copies on a stream of their own, or plain ones on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_empty(self, like: Tensor) -> Tensor:
        """An empty tensor like `like` in host memory, pinned where there is a GPU to copy from it."""
        return torch.empty(
            like.shape, dtype=like.dtype, device="cpu", pin_memory=self.stream is not None
        )

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
        present = [None if t is None else t.detach().float() for t in tensors]
        copies = [None if t is None else self.host_empty(t) for t in present]
        event = self.copy(
            [t for t in copies if t is not None], [t for t in present if t is not None]
        )
        if event is not None:
            event.synchronize()
        return copies


def unpack(packed: Packed) -> Tensor:
    """The other half of every `pack`."""
    return packed if isinstance(packed, Tensor) else packed()


def storage_of(tensor: Tensor) -> int:
    """What tells two memories apart: the storage itself. In a simulation all addresses are 0."""
    return int(tensor.untyped_storage()._cdata)


class HostWeights:
    """The parameters of one block, at home in host memory, and their copies on the way to the device."""

    def __init__(self, block: nn.Module, copy_stream: CopyStream) -> None:
        self.copy_stream = copy_stream
        found = [
            (m, name, p)
            for m in block.modules()
            for name, p in m._parameters.items()
            if p is not None
        ]
        self.places = [(module, name) for module, name, _ in found]
        self.parameters: list[Tensor] = [p for _, _, p in found]
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
                self.copy_stream.wait(
                    self._coming[2]
                )  # or it arrives in memory that is others' by then
            copies = [
                torch.empty_like(p, device=self.copy_stream.device, requires_grad=False)
                for p in self.parameters
            ]
            self._coming = (
                versions,
                copies,
                self.copy_stream.copy(copies, [p.detach() for p in self.parameters]),
            )

    @torch.no_grad()
    def fetch(self, dtype: torch.dtype | None) -> list[Tensor]:
        """The weights on the device, linear layers' in `dtype`; the next block's begin to follow."""
        self.prefetch()
        assert self._coming is not None
        _, copies, event = self._coming
        self._coming = None
        self.copy_stream.wait(event)
        in_backward = (
            torch._C._current_graph_task_id() != -1
        )  # a recomputed forward pass runs backwards too
        neighbour = self.before if in_backward else self.after
        if neighbour is not None:
            neighbour.prefetch()
        return [c.to(dtype) if dtype and low else c for c, low in zip(copies, self.lowered)]

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Let the block's modules compute with `tensors`."""
        for (module, name), tensor in zip(self.places, tensors, strict=True):
            module._parameters[name] = tensor  # type: ignore[assignment]

    def wrap(self, forward: Forward, rest: Callable[[Tensor], Packed] | None) -> Forward:
        """`forward` with weights fetched for it. `rest` packs what else is saved; None inside a checkpoint, which saves
        nothing and runs all of this a second time."""

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
        device = weights.copy_stream.device.type
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
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return lambda: self.arrive()[found].as_strided(shape, stride, offset)


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
        return None, *ctx.visit.weights.copy_stream.to_host(gradients)


def linked(blocks: Sequence[nn.Module], copy_stream: CopyStream) -> list[HostWeights]:
    """The blocks' weights, each knowing its neighbours."""
    weights = [HostWeights(block, copy_stream) for block in blocks]
    for before, after in pairwise(weights):
        before.after, after.before = after, before
    return weights


Groups = list[dict[str, Any]]


class HostOptimizer(torch.optim.Optimizer):
    """The optimizer's state in main memory, updated by the CPU (Ren et al. 2021, ZeRO-Offload).

    Runs `build(groups)` on fp32 host copies; outside it looks like that optimizer over the device's parameters. Those
    `at_home` are on the host already. Weights are the model's to save, and are loaded before this optimizer's state.
    """

    def __init__(
        self,
        groups: Groups,
        build: Callable[[Groups], torch.optim.Optimizer],
        copy_stream: CopyStream,
        at_home: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        self._copy_stream = copy_stream
        self._parameters: list[list[nn.Parameter]] = [group["params"] for group in groups]
        self._masters = {p: p for parameters in self._parameters for p in parameters}
        for p in self._masters.keys() - set(at_home):
            self._masters[p] = nn.Parameter(copy_stream.host_empty(p).copy_(p.detach()))
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._inner = build(
            [{**group, "params": [self._masters[p] for p in group["params"]]} for group in groups]
        )
        super().__init__(self._outer_groups(), {"fused": self._inner.defaults.get("fused")})
        self.state = self._inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Gradients to the host, one step there, weights back. The host waits for the gradients only."""
        assert closure is None, "the engine computes the gradients"
        away = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        away = [p for p in away if self._masters[p] is not p]
        for p in away:
            if p not in self._gradients:
                self._gradients[p] = self._copy_stream.host_empty(p)
        buffers = [self._gradients[p] for p in away]
        arrived = self._copy_stream.copy(buffers, [p.grad for p in away])
        if arrived is not None:
            arrived.synchronize()
        for p, buffer in zip(away, buffers):
            self._masters[p].grad = buffer
        self._pass_settings()
        factor = getattr(
            self, "grad_scale", None
        )  # of clipping, if fused; `cpu` waits until it is there
        self._inner.grad_scale = None if factor is None else factor.cpu()  # type: ignore[attr-defined]
        self._inner.step()
        for p in away:
            p.copy_(self._masters[p], non_blocking=True)
            self._masters[p].grad = None

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer inside would have it."""
        self._pass_settings()
        return self._inner.state_dict()

    @torch.no_grad()
    def take_weights(self) -> None:
        """The model's weights were set from outside: go on from those that it has now."""
        for p, master in self._masters.items():
            if master is not p:
                master.copy_(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state, and the weights that the model has now."""
        self.take_weights()
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._outer_groups()
        self.state = self._inner.state

    def _pass_settings(self) -> None:
        """Let the optimizer inside have what was set on this one: rates change."""
        for inner, outer in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})

    def _outer_groups(self) -> Groups:
        return [
            {**inner, "params": own}
            for inner, own in zip(self._inner.param_groups, self._parameters, strict=True)
        ]
