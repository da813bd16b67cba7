"""The processes of a run, and who owns what. This module alone reads the launcher's variables (RANK, WORLD_SIZE ...).

Processes stand on a mesh of three dimensions, pp x dp x tp (torch's DeviceMesh; tp varies fastest, so that its ranks
are on one machine). Along `dp` processes differ in the samples that they compute: `data_rank` of `data_size` says which
are this one's, and the sample stream is a pure function of these two. Along `tp` and `pp` they have the same samples
and different parts of the model. So what is counted per sample (targets, losses) is summed over `dp`; numbers that
steer the run come from rank 0, which alone reads the clock and writes files, so that replicas cannot drift apart (but
any rank can ask to stop); parameters are reduced as `parallel/apply.py` has placed them. Without torchrun a Mesh is one
process and each of its methods is free.
"""

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor

from cramming.config import Choice, Count, Section, UserError, require

T = TypeVar("T")


class ParallelConfig(Section):
    """Sizes of the mesh: replicas or shards of the data (`dp`; null: what the number of processes leaves), parts of
    each matrix (`tp`), stages of layers (`pp`). `sequence`: what is between the matrices is cut by tokens over `tp`.
    `backend: auto` is nccl on GPUs and gloo on CPUs."""

    name: str
    dp: Count | None
    tp: Count
    pp: Count
    sequence: bool = False
    backend: Literal["auto", "nccl", "gloo"]

    @model_validator(mode="after")
    def _cuts_one_way(self) -> Self:
        if self.pp > 1 and self.name != "pp":
            raise ValueError(
                f"pp={self.pp}: stages are for parallel=pp. Choose it, or set pp to 1."
            )
        if self.tp > 1 and self.name == "pp":
            raise ValueError(f"tp={self.tp}: not with parallel=pp. Set it to 1.")
        if self.sequence and self.tp == 1:
            raise ValueError("sequence=true: needs parallel.tp=2 or more. Set it to false.")
        return self


class CompressionConfig(Section):
    """What is sent of the gradients in place of themselves (cramming/parallel/compression.py)."""

    name: str


class PowerSgdConfig(CompressionConfig):
    """Of each matrix two thin ones, of this `rank`."""

    rank: Count


class TopKConfig(CompressionConfig):
    """The largest entries, `density` of all."""

    density: Annotated[float, Field(gt=0, le=1)]


COMPRESSIONS: dict[str, type[CompressionConfig]] = {
    "none": CompressionConfig,
    "bf16": CompressionConfig,
    "fp16": CompressionConfig,
    "qsgd": CompressionConfig,
    "powersgd": PowerSgdConfig,
    "topk": TopKConfig,
}


class ReplicaConfig(ParallelConfig):
    """Every process has the whole model; gradients are summed while the backward pass goes on (DDP)."""

    compression: Annotated[CompressionConfig, Choice(COMPRESSIONS)]


class ShardConfig(ParallelConfig):
    """Processes share the optimizer's state (zero1), also gradients (zero2), also parameters (zero3). `shards`: so
    many, next to each other, share one copy of them (hybrid sharding, HSDP); null: all along `dp`."""

    shards: Count | None


class PipelineConfig(ParallelConfig):
    """Processes share the layers, `pp` stages of them, or two in each with the schedules that interleave; whole
    pipelines are copied along `dp`. `schedule`: the order of the micro-batches' passes (parallel/pipeline.py)."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


# The choices of `parallel`, each with settings of its own.
STRATEGIES: dict[str, type[ParallelConfig]] = {
    "ddp": ReplicaConfig,
    "zero1": ShardConfig,
    "zero2": ShardConfig,
    "zero3": ShardConfig,
    "pp": PipelineConfig,
}


class Mesh:
    """This process's place among the run's processes. `dims`: torch's DeviceMesh of pp, dp and tp; None where this
    process is the only one."""

    def __init__(self, config: ParallelConfig, device: torch.device):
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = launched_processes()
        self.data_size, self.data_rank = data_size(config, self.world_size), 0
        self.dims: Any = None
        if self.world_size > 1:
            from torch.distributed.device_mesh import (
                init_device_mesh,
            )  # only here: it takes time to import

            from cramming.parallel.rendezvous import join

            if device.type == "cuda":
                local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
                require(
                    local < there,
                    f"torchrun: more processes than {there} visible GPUs; lower --nproc-per-node",
                )
                device = torch.device("cuda", local)
                torch.cuda.set_device(device)
            automatic = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            join(automatic if config.backend == "auto" else config.backend)
            sizes = (config.pp, self.data_size, config.tp)
            self.dims = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
            self.data_rank = self.dims.get_local_rank("dp")
        self.device = device

    @classmethod
    def solo(cls, device: torch.device) -> "Mesh":
        """This process on its own, whatever the launcher says: for a probe, which must not wait for others."""
        mesh = cls.__new__(cls)
        mesh.rank, mesh.world_size, mesh.device = 0, 1, device
        mesh.data_rank, mesh.data_size, mesh.dims = 0, 1, None
        return mesh

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that reads the clock and writes files."""
        return self.rank == 0

    def _exchanged(
        self, values: tuple[float, ...], collective: Callable[[Tensor], object]
    ) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        collective(tensor)
        return tensor.tolist()

    def sums(self, *values: float) -> list[float]:
        """The sum of each of the `values`, at once, over the processes with other samples."""
        return self._exchanged(values, self.sum_tensor)

    def sum_tensor(self, tensor: Tensor) -> None:
        """Sum a tensor over the processes with other samples, in place."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.dims.get_group("dp"))

    def max(self, *values: float) -> list[float]:
        """The largest of each of the `values`, of all ranks."""
        return self._exchanged(values, lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX))

    def from_main(self, value: float) -> float:
        """Rank 0's `value`, on every rank."""
        return self._exchanged((value,), lambda tensor: dist.broadcast(tensor, src=0))[0]

    def object_from_main(self, value: T) -> T:
        """Rank 0's `value`, which can be pickled, on every rank."""
        found = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1:
            dist.destroy_process_group()


def launched_processes() -> int:
    """How many the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def data_size(config: ParallelConfig, world_size: int) -> int:
    """Along how many processes the samples of a step are spread; UserError where the mesh is not all processes."""
    parts = config.tp * config.pp
    found = config.dp or max(1, world_size // parts)
    if found * parts != world_size:
        raise UserError(
            f"parallel.dp={config.dp or 'null'} parallel.tp={config.tp} parallel.pp={config.pp}: a mesh of {found} x"
            f" {config.tp} x {config.pp} = {found * parts} processes, and there are {world_size}; start as many with"
            f" torchrun --nproc-per-node {found * parts} -m cramming ..., or change a size"
        )
    if isinstance(config, ShardConfig) and config.shards and found % config.shards:
        reason = f"samples are spread over {found} process(es), which that does not divide"
        raise UserError(
            f"parallel.shards={config.shards}: {reason}; take another number, or null: all share one copy"
        )
    return found
