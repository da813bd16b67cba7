"""The way to host memory and back, for tensors that wait there while the device does not need them.

Two kinds do, of the encoder's blocks only. Activations (activations.py) are made on the device and come back in the
backward pass; weights (host_weights.py) are at home on the host and visit the device for one block's forward or
backward pass. On a GPU the host memory is pinned, the copies run on a stream of their own beside the computation, and
while one block is computed the next one's tensors are already on their way. On a CPU the same code makes plain copies:
nothing is won there.

Both hang on autograd's saved tensors: what a block keeps for its backward pass is packed as a function that fetches it
again. Whole storages move and the views on them are made again, so losses and gradients are those of the plain run.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Forward = Callable[..., Tensor]
Packed = Tensor | Callable[[], Tensor]
Event = torch.cuda.Event | None


class Lane:
    """The way between `device` and host memory: copies on a stream of their own, or plain ones on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_empty(self, like: Tensor) -> Tensor:
        """An empty tensor like `like` in host memory, pinned where there is a GPU to copy from it."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self.stream is not None)

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
    """The other half of every `pack`."""
    return packed if isinstance(packed, Tensor) else packed()


def storage_of(tensor: Tensor) -> int:
    """What tells two memories apart: the storage itself. In a simulation all addresses are 0."""
    return int(tensor.untyped_storage()._cdata)
