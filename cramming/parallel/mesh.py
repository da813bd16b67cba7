"""The processes of a run and their shares of the work. Reads the launcher's variables (RANK, WORLD_SIZE ...).

Processes form a mesh of three dimensions, pp x dp x tp (torch's DeviceMesh; tp varies fastest, so that its ranks
are on one machine). Along `dp` processes differ in the samples that they compute: `data_rank` of `data_size` says which
are this one's, and the sample stream is a pure function of these two. Along `tp` and `pp` they have the same samples
and different parts of the model. So what is counted per sample (targets, losses) is summed over `dp`; numbers that
steer the run come from rank 0, which alone reads the clock and writes files, so that replicas cannot drift apart (but
any rank can ask to stop). Without torchrun a Mesh is one process and each of its methods is free.
"""

import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor

from cramming.config import Choice, Count, Section, UserError, require

T = TypeVar("T")
JOIN_SECONDS = 1800  # wait for the other processes to join
# The other ranks wait while rank 0 hashes the corpus and writes files.
REPLY_TIMEOUT = timedelta(hours=2)


class ParallelConfig(Section):
    """Sizes of the mesh: data parallel (`dp`), parts of each matrix (`tp`), stages of layers (`pp`).

    `dp: null` stands for all processes, divided by `tp` and `pp`. `sequence` divides the activations between the
    matrices by tokens among the `tp` ranks (sequence parallelism). `backend: auto` is nccl on GPUs and gloo on CPUs.
    """

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
    """Compression of the gradients that processes exchange (cramming/experimental/compression.py)."""

    name: str


class PowerSgdConfig(CompressionConfig):
    """PowerSGD: two factors of this `rank` in place of each matrix."""

    rank: Count


class TopKConfig(CompressionConfig):
    """Top-k: the entries of largest magnitude, a share `density` of all."""

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
    """Replicas of the whole model; gradients are summed during the backward pass (DDP)."""

    compression: Annotated[CompressionConfig, Choice(COMPRESSIONS)]


class ShardConfig(ParallelConfig):
    """Sharding of the optimizer's state (zero1), of gradients too (zero2), and of parameters too (zero3).

    `shards` neighbouring processes share one copy (hybrid sharding, HSDP); null stands for all along `dp`.
    """

    shards: Count | None


class PipelineConfig(ParallelConfig):
    """Pipeline of `pp` processes with one stage of layers each, or two with interleaved schedules.

    Pipelines are replicated along `dp`. `schedule` is the order of the micro-batches (cramming/experimental/stages.py).
    """

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


# Choices of `parallel` with their settings.
STRATEGIES: dict[str, type[ParallelConfig]] = {
    "ddp": ReplicaConfig,
    "zero1": ShardConfig,
    "zero2": ShardConfig,
    "zero3": ShardConfig,
    "pp": PipelineConfig,
}

# The one place that knows cramming/experimental: its modules by name, imported when a setting selects one.
EXPERIMENTS = {
    "compression": "cramming.experimental.compression",  # parallel.compression other than none
    "pipeline": "cramming.experimental.pipeline",  # parallel=pp
    "pipeline_study": "cramming.experimental.pipeline_study",  # the study of pipelines
    "stages": "cramming.experimental.stages",  # what parallel=pp can cut
    "tensor": "cramming.experimental.tensor",  # parallel.tp above 1
}


def load_experiment(name: str) -> ModuleType:
    """Return the module of an experiment of the table."""
    return import_module(EXPERIMENTS[name])


class Mesh:
    """This process's position among the run's processes.

    `dims` is torch's DeviceMesh of pp, dp and tp, None where this process is the only one. Ranks with the same
    `random_stream` draw the same random numbers: those that hold parts of the same layers.
    """

    def __init__(self, config: ParallelConfig, device: torch.device):
        """Join the other processes of the run, if the launcher has started some."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = launched_processes()
        self.data_size = data_size(config, self.world_size)
        self.data_rank = 0
        self.random_stream = self.rank // config.tp
        self.dims: Any = None
        self.device = device
        if self.world_size > 1:
            self._join(config)

    @classmethod
    def solo(cls, device: torch.device) -> "Mesh":
        """Return a mesh of this process alone, whatever the launcher says: a probe must not wait for others."""
        mesh = cls.__new__(cls)
        mesh.rank = mesh.data_rank = mesh.random_stream = 0
        mesh.world_size = mesh.data_size = 1
        mesh.device, mesh.dims = device, None
        return mesh

    @property
    def is_main(self) -> bool:
        """True on rank 0, which reads the clock and writes files."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each of the `values` over the `dp` ranks, which have different samples."""
        return self._exchange(values, self.sum_tensor)

    def sum_tensor(self, tensor: Tensor) -> None:
        """Sum a tensor over the `dp` ranks, which have different samples, in place."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.dims.get_group("dp"))

    def max(self, *values: float) -> list[float]:
        """Return the largest of each of the `values` over all ranks."""
        return self._exchange(values, lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX))

    def from_main(self, value: float) -> float:
        """Return rank 0's `value`."""
        return self._exchange((value,), lambda tensor: dist.broadcast(tensor, src=0))[0]

    def object_from_main(self, value: T) -> T:
        """Return rank 0's `value`, which can be pickled."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1:
            dist.destroy_process_group()

    def _join(self, config: ParallelConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # slow to import

        backend = "gloo"
        if self.device.type == "cuda":
            self.device = _local_gpu()
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        _join_process_group(backend if config.backend == "auto" else config.backend)
        sizes = (config.pp, self.data_size, config.tp)
        names = ("pp", "dp", "tp")
        self.dims = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self.data_rank = self.dims.get_local_rank("dp")

    def _exchange(
        self, values: tuple[float, ...], collective: Callable[[Tensor], object]
    ) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        collective(tensor)
        return tensor.tolist()


def launched_processes() -> int:
    """Return how many processes the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def data_size(config: ParallelConfig, world_size: int) -> int:
    """Return over how many processes a step's samples are split; raise UserError unless the mesh has all processes."""
    parts = config.tp * config.pp
    replicas = config.dp or max(1, world_size // parts)
    if replicas * parts != world_size:
        raise UserError(
            f"parallel.dp={config.dp or 'null'} parallel.tp={config.tp} parallel.pp={config.pp}: a mesh of {replicas} x"
            f" {config.tp} x {config.pp} = {replicas * parts} processes, and there are {world_size}. Start as many"
            f" with torchrun --nproc-per-node {replicas * parts} -m cramming ..., or change a size."
        )
    if isinstance(config, ShardConfig) and config.shards and replicas % config.shards:
        raise UserError(
            f"parallel.shards={config.shards}: does not divide the {replicas} process(es) that share the samples."
            " Take another number, or null: all share one copy."
        )
    return replicas


def _local_gpu() -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    visible = torch.cuda.device_count()
    require(
        local < visible,
        f"torchrun: more processes than {visible} visible GPUs. Lower --nproc-per-node.",
    )
    return torch.device("cuda", local)


def _join_process_group(backend: str) -> None:
    """Join the group of all processes through the launcher's store, under a name that all of them know.

    torchrun (2.13) keeps one store over all restarts, with the addresses of processes that have ended, so the name of a
    group must be new. The number of restarts does not serve: each node counts those that its own processes caused.
    """
    store, rank, size = next(iter(dist.rendezvous("env://")))
    agree = _name_group if rank == 0 else _ask_group_name
    name = agree(store, rank, size, uuid.uuid4().hex)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=size,
        timeout=REPLY_TIMEOUT,
    )


def _ask_group_name(store: Any, rank: int, size: int, request: str) -> str:
    """Return the name that rank 0 answers with. `request` is unique: no answer to it dates from before a restart."""
    store.set(f"asks {rank}", request)
    name: str = store.get(f"answer {request}").decode()
    store.set(f"knows {name} {rank}", "")
    return name


def _name_group(store: Any, rank: int, size: int, name: str) -> str:
    """Answer every other rank with `name`, until all know it.

    torchrun ends all processes before it restarts them, so none from before a restart can still ask.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"knows {name} {other}"]):
                waiting.remove(other)
            elif store.check([f"asks {other}"]):
                request = store.get(f"asks {other}").decode()
                store.set(f"answer {request}", name)
        require(
            time.monotonic() < deadline,
            f"torchrun: of {size} processes those of rank {', '.join(map(str, sorted(waiting)))} did not answer within"
            f" {JOIN_SECONDS // 60} minutes. See why they ended, and start all of them again.",
        )
        time.sleep(0.01)
    return name
