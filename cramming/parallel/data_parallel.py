"""Data parallel: each process computes its samples; whole replicas of the model (DDP), or shards of it (ZeRO).

ZeRO (Rajbhandari et al. 2020) by torch's FSDP2. Bytes per process, with N processes, P parameters in fp32 and Adam:

    ddp    weights 4 P, gradients 4 P, moments 8 P
    zero1  12 P / N for the optimizer (its part of the weights, moments) beside weights 4 P and gradients 4 P
    zero2  gradients 4 P / N as well: those of each micro-batch are summed and cut at once
    zero3  weights as well: a block's are gathered for its forward and backward; 16 P / N in all

Numbers sent per process and step with k micro-batches, in units of P (N - 1) / N: ddp and zero1 2 (an all-reduce; an
all-gather and a reduce-scatter), zero2 1 + k, zero3 3 k, as forward and backward of each micro-batch gather the
weights. Where S processes share one of N / S copies (HSDP), N is S in all of these, and once per step the copies sum
P / S gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from cramming.data.batches import Batch
from cramming.model.heads import PretrainedModel
from cramming.parallel.mesh import (
    Mesh,
    ParallelConfig,
    ReplicaConfig,
    ShardConfig,
    load_experiment,
)
from cramming.precision import Precision

LossAndHits = tuple[Tensor, Tensor]  # summed over one micro-batch
OnePass = Callable[[Batch], LossAndHits]
State = tuple[dict[str, Any], dict[str, Any]]  # of a model and its optimizer


class ParallelStrategy:
    """Execution of a step on several processes; a run of one process has none.

    The contract: after `accumulate`, every parameter's gradient is the sum over all micro-batches of all processes
    along `dp` (each loss is already divided by the targets of all of them), whatever part of it this process holds;
    `norm` is that of all parts together; `state` and `load_state` use the names and the order of the whole model on one
    process, so that a checkpoint does not depend on how many wrote it. Parameters that are cut are DTensors.
    """

    is_whole = False  # every process holds all of `model`

    def __init__(
        self,
        model: PretrainedModel,
        config: ParallelConfig,
        mesh: Mesh,
        precision: Precision,
        is_on_host: bool,
    ) -> None:
        """Take the model as it is then executed.

        `is_on_host`: parameters that are cut, their gradients and the optimizer's state stay in main memory.
        """
        self.model: PretrainedModel = model
        self.mesh = mesh
        self.forward: Callable[..., Any] = model  # a training forward
        self.is_on_host = is_on_host and isinstance(config, ShardConfig)

    def begin_step(self, seed: int, step: int) -> None:
        """Seed the random numbers of a step, so that a resume draws those of the unbroken run.

        The first stream is that of one process: it runs through from step to step and is saved in checkpoints.
        """
        if self.mesh.random_stream:
            torch.manual_seed(step_seed(seed, self.mesh.random_stream, step))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch's forward and backward; `is_last` of the step."""
        return nullcontext()

    def accumulate(
        self, one_pass: OnePass, batches: Sequence[Batch], share: float
    ) -> list[LossAndHits]:
        """Run forward and backward of all micro-batches; gradients are those of `share` times the summed loss."""
        results = []
        for number, batch in enumerate(batches, 1):
            with self.micro_batch(number == len(batches)):
                results.append(one_pass(batch))
        return results

    def forget(self) -> None:
        """Drop what is kept of the gradients of a skipped step: none of it may enter the next."""

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the norm of all gradients together, the same on every process."""
        return norm_of_parts(gradients)

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return the state of model and optimizer in main memory of rank 0, empty dictionaries on the others."""
        weights = self._gather(self.model.state_dict())
        saved = optimizer.state_dict()
        saved["state"] = {number: self._gather(of_one) for number, of_one in saved["state"].items()}
        return weights, saved if self.mesh.is_main else {}

    def load_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load the state that rank 0 has; that of the others is not read."""
        weights, saved = state
        self.load_weights(weights)
        tensors = saved.get("state", {})
        parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        groups = saved.get("param_groups")
        # Scalars are sent together. Tensors, which are sharded as their parameters, follow one by one: `small` has
        # their types.
        small: dict[int, dict[str, Any]] = {}
        for number, of_one in tensors.items():
            small[number] = {}
            for name, tensor in of_one.items():
                small[number][name] = tensor.dtype if tensor.dim() else tensor
        small, groups = self.mesh.object_from_main((small, groups))
        for number, of_one in small.items():
            for name, value in of_one.items():
                if isinstance(value, torch.dtype):
                    part: Any = torch.empty_like(parameters[number].detach(), dtype=value)
                    _fill(part, tensors[number][name] if self.mesh.is_main else None)
                    of_one[name] = part
        optimizer.load_state_dict({"state": small, "param_groups": groups})

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load the weights that rank 0 has."""
        own_tensors = self.model.state_dict()
        assert weights.keys() == own_tensors.keys() or not self.mesh.is_main
        for name, tensor in own_tensors.items():
            _fill(tensor, weights.get(name))

    def _gather(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the whole tensors in main memory of rank 0, an empty dictionary on the others."""
        gathered = {}
        for name, tensor in tensors.items():
            whole = _whole(tensor) if isinstance(tensor, DTensor) else tensor
            if self.mesh.is_main:
                gathered[name] = whole.cpu()
        return gathered


class GradientSum:
    """Communication hook of DDP: (bucket) -> a future of the bucket with its sum over the group.

    DDP's own reduction takes the mean. The hooks of cramming/experimental/compression.py override all three methods.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to sum the bucket."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def begin_step(self, seed: int) -> None:
        """Seed the random numbers that this process draws in the step."""

    def forget(self) -> None:
        """Drop what a skipped step left for the next."""


class Replicas(ParallelStrategy):
    """DDP: gradients are summed in buckets during the backward of the last micro-batch."""

    is_whole = True

    def __init__(
        self,
        model: PretrainedModel,
        config: ReplicaConfig,
        mesh: Mesh,
        precision: Precision,
        is_on_host: bool,
    ) -> None:
        """Copy the model to all processes along `dp`."""
        super().__init__(model, config, mesh, precision, is_on_host)
        group = mesh.dims.get_group("dp")
        self.ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        self.forward = self.ddp
        self.hook = GradientSum(group)
        if config.compression.name != "none":
            self.hook = load_experiment("compression").build_hook(config.compression, group)
        self.ddp.register_comm_hook(self.hook, lambda hook, bucket: hook(bucket))

    def begin_step(self, seed: int, step: int) -> None:
        """Seed dropout, and the hook with a stream behind those of dropout."""
        super().begin_step(seed, step)
        stream = self.mesh.world_size + self.mesh.rank
        self.hook.begin_step(step_seed(seed, stream, step))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context in which only the last micro-batch's backward communicates."""
        return nullcontext() if is_last else self.ddp.no_sync()

    def forget(self) -> None:
        """Drop what the hook kept of a skipped step."""
        self.hook.forget()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return this process's own state: all have the same."""
        return self.model.state_dict(), optimizer.state_dict()

    def load_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load the state that rank 0 has."""
        weights, optimizer_state = self.mesh.object_from_main(state)
        self.model.load_state_dict(weights)
        optimizer.load_state_dict(optimizer_state)

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load the weights that rank 0 has."""
        self.model.load_state_dict(self.mesh.object_from_main(weights))


class Shards(ParallelStrategy):
    """FSDP2: parameters are DTensors, cut along their first dimension, one group of them per block.

    With `shards` (HSDP) there are several copies, each cut over so many processes: what is sent for a micro-batch stays
    within a copy, and the copies' gradients are summed once a step. In main memory (ZeRO-Offload, Ren et al. 2021) a
    process's shard is updated by its CPU.
    """

    def __init__(
        self,
        model: PretrainedModel,
        config: ShardConfig,
        mesh: Mesh,
        precision: Precision,
        is_on_host: bool,
    ) -> None:
        """Cut the model over the processes along `dp`."""
        super().__init__(model, config, mesh, precision, is_on_host)
        self.sums_each_micro_batch = config.name != "zero1"
        self.keeps_weights = config.name != "zero3"
        offload = OffloadPolicy()
        if self.is_on_host:
            offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
        grid = mesh.dims["dp"]
        if config.shards:
            sizes = mesh.data_size // config.shards, config.shards
            grid = mesh.dims._unflatten(1, sizes, ("copies", "shards"))["copies", "shards"]
        blocks = chain.from_iterable(encoder.blocks for encoder in model.encoders)
        for module in (*blocks, model):
            shard = fully_shard(
                module,
                mesh=grid,
                reshard_after_forward=not self.keeps_weights,
                shard_placement_fn=_dimension_to_cut,
                offload_policy=offload,
            )
            shard.set_gradient_divide_factor(1.0)  # the sum, not the mean
            shard.set_force_sum_reduction_for_comms(True)
        self.root: FSDPModule = shard

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Set what the micro-batch's backward sends and keeps; return an empty context."""
        self.root.set_requires_gradient_sync(is_last or self.sums_each_micro_batch)
        self.root.set_requires_all_reduce(is_last)
        self.root.set_reshard_after_backward(is_last or not self.keeps_weights)
        return nullcontext()


def step_seed(seed: int, stream: int, step: int) -> int:
    """Return the seed of one of a run's random streams in one of its steps."""
    return seed + 1_000_003 * stream + step


def norm_of_parts(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of whole gradients and DTensors, which may be cut along different dimensions of the mesh."""
    by_layout: dict[str, list[Tensor]] = {}
    for gradient in gradients:
        layout = ""
        if isinstance(gradient, DTensor):
            layout = f"{gradient.device_mesh} {gradient.placements}"
        by_layout.setdefault(layout, []).append(gradient)
    norms = []
    for layout in sorted(by_layout):
        norm = torch.nn.utils.get_total_norm(by_layout[layout], foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms))


def _dimension_to_cut(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that FSDP cuts; None for the first.

    Matrices side by side that are already cut by rows are cut by the other: torch (2.13) puts a tensor that is cut
    twice along one dimension together in another order.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    for placement in placements:
        if isinstance(placement, _StridedShard) and placement.dim == 0:
            return Shard(1)
    return None


@torch.no_grad()
def _whole(tensor: DTensor) -> Tensor:
    """Return the whole tensor, which all ranks gather.

    Matrices side by side are gathered as one range of rows and then put into their order: torch before 2.13 cannot
    gather a tensor that has a part of each.
    """
    last = tensor.placements[-1]
    if not isinstance(last, _StridedShard):
        return _gathered(tensor, tensor.placements)
    rows = _gathered(tensor, (*tensor.placements[:-1], Shard(last.dim)))
    parts = rows.unflatten(last.dim, (tensor.device_mesh.size(-1), last.split_factor, -1))
    return parts.transpose(last.dim, last.dim + 1).flatten(last.dim, last.dim + 2)


def _gathered(tensor: DTensor, placements: Sequence[Placement]) -> Tensor:
    """Return the whole tensor on the mesh's device, as if its local parts had these `placements`."""
    mesh = tensor.device_mesh
    local = tensor.to_local().to(mesh.device_type)
    placed = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed.full_tensor()


@torch.no_grad()
def _fill(tensor: DTensor, whole: Tensor | None) -> None:
    """Fill this rank's part from the `whole` tensor, which rank 0 has."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
    if whole is not None:
        full.copy_(whole)
    dist.broadcast(full, src=0)
    part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(part.to_local())
