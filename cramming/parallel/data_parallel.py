"""Data parallel: each process computes its samples; whole replicas of the model (DDP), or shards of it (ZeRO).

ZeRO (Rajbhandari et al. 2020) by torch's FSDP2. Bytes per process, with N processes, P parameters in fp32 and Adam:

    ddp    weights 4 P, gradients 4 P, moments 8 P
    zero1  12 P / N for the optimizer (weights of its own, moments) beside weights 4 P and gradients 4 P
    zero2  of the gradients, too, only 4 P / N: each micro-batch's are summed and cut at once
    zero3  of the weights, too: a block's are gathered for its passes and forgotten; 16 P / N in all

Numbers sent per process and step with k micro-batches, in units of P (N - 1) / N: ddp and zero1 2 (an all-reduce; an
all-gather and a reduce-scatter), zero2 1 + k, zero3 3 k, as both passes of each micro-batch gather the weights.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from cramming.model.heads import PretrainedModel
from cramming.parallel.mesh import Mesh, ParallelConfig, ShardConfig
from cramming.parallel.spread import Spread


def spread_data(model: PretrainedModel, config: ParallelConfig, mesh: Mesh) -> Spread:
    """Cut or copy the model, as it is then executed, along the mesh's `dp`."""
    return Shards(model, config.name, mesh) if isinstance(config, ShardConfig) else Replicas(model, mesh)


class Replicas(Spread):
    """DDP: gradients are summed in buckets while the backward pass of the last micro-batch goes on."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh)
        group = mesh.dims.get_group("dp")
        self.forward = self.ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        self.ddp.register_comm_hook(group, sum_bucket)

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self.ddp.no_sync()


def sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own reduction takes the mean; a step's gradient is the sum."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Shards(Spread):
    """FSDP2: parameters are DTensors, cut along their first dimension, one group of them per block."""

    def __init__(self, model: PretrainedModel, name: str, mesh: Mesh) -> None:
        super().__init__(model, mesh)
        self.sums_each_pass, self.keeps_weights = name != "zero1", name != "zero3"
        blocks = [block for encoder in model.encoders for block in encoder.blocks]
        for module in (*blocks, model):
            shard = fully_shard(module, mesh=mesh.dims["dp"], reshard_after_forward=not self.keeps_weights)
            shard.set_gradient_divide_factor(1.0)  # the sum, not the mean
            shard.set_force_sum_reduction_for_comms(True)
        self.root: FSDPModule = shard

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        self.root.set_is_last_backward(is_last)
        self.root.set_requires_gradient_sync(is_last or self.sums_each_pass)
        self.root.set_reshard_after_backward(is_last or not self.keeps_weights)
        return nullcontext()
