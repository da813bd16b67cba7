"""The processes of a run. This module alone reads RANK, WORLD_SIZE and LOCAL_RANK.

Data parallel only: each rank computes its share of every step's samples, gradients are summed over ranks, and numbers
that steer the run (progress, stop) come from rank 0, so that replicas cannot drift apart. Without torchrun a Mesh is
one process and each of its methods is free.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class ParallelConfig:
    """`backend: auto` is nccl on GPUs and gloo on CPUs."""

    backend: Literal["auto", "nccl", "gloo"]


class Mesh:
    """This process's place among the run's processes."""

    def __init__(self, config: ParallelConfig, device: torch.device):
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size > 1:
            if device.type == "cuda":
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
            automatic = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(automatic if config.backend == "auto" else config.backend)
        self.device = device

    @classmethod
    def solo(cls, device: torch.device) -> "Mesh":
        """This process on its own, whatever the launcher says: for a probe, which must not wait for others."""
        mesh = cls.__new__(cls)
        mesh.rank, mesh.world_size, mesh.device = 0, 1, device
        return mesh

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that reads the clock and writes files."""
        return self.rank == 0

    def _exchanged(self, values: Sequence[float], collective: Callable[[Tensor], object]) -> list[float]:
        if self.world_size == 1:
            return list(values)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        collective(tensor)
        return tensor.tolist()

    def sum(self, value: float) -> float:
        """The sum of `value` over all ranks."""
        return self.sums([value])[0]

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each of the `values`, at once."""
        return self._exchanged(values, dist.all_reduce)

    def min(self, value: float) -> float:
        """The smallest `value` of all ranks."""
        return self._exchanged([value], lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MIN))[0]

    def from_main(self, value: float) -> float:
        """Rank 0's `value`, on every rank."""
        return self.broadcast(value)[0]

    def broadcast(self, *values: float) -> list[float]:
        """Rank 0's `values`, on every rank."""
        return self._exchanged(values, lambda tensor: dist.broadcast(tensor, src=0))

    def share(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every rank the weights of rank 0."""
        for parameter in parameters if self.world_size > 1 else ():
            dist.broadcast(parameter.data, src=0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients over ranks, in place, as one flat bucket."""
        if self.world_size == 1:
            return
        grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
            grad.copy_(part.view_as(grad))

    def sum_tensor(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1:
            dist.destroy_process_group()
