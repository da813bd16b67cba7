"""Data parallel: each process computes its samples; whole replicas of the model (DDP), or shards of it (ZeRO).

ZeRO (Rajbhandari et al. 2020) by torch's FSDP2. Bytes per process, with N processes, P parameters in fp32 and Adam:

    ddp    weights 4 P, gradients 4 P, moments 8 P
    zero1  12 P / N for the optimizer (weights of its own, moments) beside weights 4 P and gradients 4 P
    zero2  of the gradients, too, only 4 P / N: each micro-batch's are summed and cut at once
    zero3  of the weights, too: a block's are gathered for its passes and forgotten; 16 P / N in all

Numbers sent per process and step with k micro-batches, in units of P (N - 1) / N: ddp and zero1 2 (an all-reduce; an
all-gather and a reduce-scatter), zero2 1 + k, zero3 3 k, as both passes of each micro-batch gather the weights. Where S
processes share one of N / S copies (HSDP), N is S in all of these, and once per step the copies sum P / S gradients.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from cramming.data.batches import Batch
from cramming.model.heads import PretrainedModel
from cramming.parallel.compression import hook_of
from cramming.parallel.mesh import Mesh, ParallelConfig, ReplicaConfig, ShardConfig
from cramming.parallel.spread import Found, OnePass, Spread, State, seed_of


def spread_data(
    model: PretrainedModel, config: ParallelConfig, mesh: Mesh, on_host: bool
) -> Spread:
    """Cut or copy the model, as it is then executed, along the mesh's `dp`; `on_host`: what is cut lies there."""
    if isinstance(config, ReplicaConfig):
        return Replicas(model, config, mesh) if config.tp == 1 else ReplicasOfParts(model, mesh)
    assert isinstance(config, ShardConfig)
    return Shards(model, config, mesh, on_host)


class Replicas(Spread):
    """DDP: gradients are summed in buckets while the backward pass of the last micro-batch goes on."""

    is_whole = True

    def __init__(self, model: nn.Module, config: ReplicaConfig, mesh: Mesh) -> None:
        super().__init__(model, mesh)
        group = mesh.dims.get_group("dp")
        self.forward = self.ddp = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )
        # A hook in any case: DDP's own reduction takes the mean, a step's gradient is the sum.
        self.hook = hook_of(config.compression, group)
        self.ddp.register_comm_hook(self.hook, lambda hook, bucket: hook(bucket))

    def begin_step(self, seed: int, step: int) -> None:
        super().begin_step(seed, step)
        self.hook.begin_step(
            seed_of(seed, self.mesh.world_size + self.mesh.rank, step)
        )  # behind those of dropout

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self.ddp.no_sync()

    def forget(self) -> None:
        self.hook.forget()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        return self.model.state_dict(), optimizer.state_dict()

    def load_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        weights, own = self.mesh.object_from_main(state)
        self.model.load_state_dict(weights)
        optimizer.load_state_dict(own)

    def load_weights(self, weights: dict[str, Any]) -> None:
        self.model.load_state_dict(self.mesh.object_from_main(weights))


class ReplicasOfParts(Spread):
    """Replicas of a model whose matrices are cut: DDP takes no DTensors, so the step's gradients are summed at its end,
    each parameter's local part, as one flat bucket."""

    def accumulate(self, one_pass: OnePass, batches: Sequence[Batch], share: float) -> list[Found]:
        found = super().accumulate(one_pass, batches, share)
        parts = []
        for p in cast(Iterable[DTensor], self.model.parameters()):
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(
                    placements=p.placements
                )  # each rank of tp may have made a part of it
                parts.append(p.grad.to_local())
        if self.mesh.data_size > 1:
            flat = torch.cat([part.flatten() for part in parts])
            self.mesh.sum_tensor(flat)
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total.view_as(part))
        return found


def along(parameter: nn.Parameter) -> Shard | None:
    """The dimension that FSDP cuts, None for the first: of several matrices side by side, cut by rows over `tp`, the
    other one, as torch (2.13) puts a tensor cut twice so along one dimension together in another order."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    is_side_by_side = any(isinstance(cut, _StridedShard) and cut.dim == 0 for cut in placements)
    return Shard(1) if is_side_by_side else None


class Shards(Spread):
    """FSDP2: parameters are DTensors, cut along their first dimension, one group of them per block.

    With `shards` (HSDP) there are several copies, each cut over so many processes: what is sent for a micro-batch stays
    within a copy, and the copies' gradients are summed once a step. On the host (ZeRO-Offload, Ren et al. 2021) a
    process's shard is updated by its CPU."""

    def __init__(
        self, model: PretrainedModel, config: ShardConfig, mesh: Mesh, on_host: bool
    ) -> None:
        super().__init__(model, mesh)
        self.is_on_host = on_host
        offload = (
            CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if on_host else OffloadPolicy()
        )
        self.sums_each_pass, self.keeps_weights = config.name != "zero1", config.name != "zero3"
        grid = mesh.dims["dp"]
        if config.shards:
            sizes = mesh.data_size // config.shards, config.shards
            grid = mesh.dims._unflatten(1, sizes, ("copies", "shards"))["copies", "shards"]
        blocks = [block for encoder in model.encoders for block in encoder.blocks]
        for module in (*blocks, model):
            shard = fully_shard(
                module,
                mesh=grid,
                reshard_after_forward=not self.keeps_weights,
                shard_placement_fn=along,
                offload_policy=offload,
            )
            shard.set_gradient_divide_factor(1.0)  # the sum, not the mean
            shard.set_force_sum_reduction_for_comms(True)
        self.root: FSDPModule = shard

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        self.root.set_requires_gradient_sync(is_last or self.sums_each_pass)
        self.root.set_requires_all_reduce(is_last)
        self.root.set_reshard_after_backward(is_last or not self.keeps_weights)
        return nullcontext()
