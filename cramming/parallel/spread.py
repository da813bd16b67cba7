"""How a step runs on several processes: what `apply` gives the engine. A run of one process has none of it.

The contract: after `accumulate`, every parameter's gradient is the SUM over all micro-batches of all processes along
`dp` (a pass's loss is divided by the targets of all of them already), whatever part of it lies here; `norm` is that of
all parts together; `state` and `load_state` speak of the whole model, in the names and the order of one process, so
that a checkpoint does not know how many wrote it. Parameters that are not whole here are DTensors.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cramming.data.batches import Batch
from cramming.parallel.mesh import Mesh

Found = tuple[Tensor, Tensor]  # of one micro-batch: summed loss and hits
OnePass = Callable[[Batch], Found]
State = tuple[dict[str, Any], dict[str, Any]]  # of a model and its optimizer


class Spread:
    """Every process computes with `model`, whole or not, on its own samples. `forward`: a training pass; `is_on_host`:
    parameters, gradients and the optimizer's state lie in main memory between the passes."""

    is_on_host = False
    is_whole = False  # `model`, on every process

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.forward: Callable[..., Any] = model

    def begin_step(self, seed: int, step: int) -> None:
        """Seed what a step draws by the run's seed, the replica or stage, and the step: so a resume draws what the
        unbroken run would have. The first's random numbers are one process's, which go on from step to step and are in
        checkpoints."""
        if place := self.mesh.rank // self.mesh.dims.size(
            2
        ):  # of one place's parts all draw the same
            torch.manual_seed(seed_of(seed, place, step))

    def passing(self, is_last: bool) -> AbstractContextManager[object]:
        """Around the passes of one micro-batch, which is the step's last or not."""
        return nullcontext()

    def accumulate(self, one_pass: OnePass, batches: Sequence[Batch], share: float) -> list[Found]:
        """The forward and backward passes of a step; a gradient is that of `share` times the summed loss."""
        found = []
        for number, batch in enumerate(batches, 1):
            with self.passing(number == len(batches)):
                found.append(one_pass(batch))
        return found

    def forget(self) -> None:
        """The step is skipped: nothing that was kept of its gradients may enter the next."""

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients together, the same on every process."""
        return norm_of_parts(gradients)

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Of model and optimizer, as one process has them, in main memory of rank 0; empty on the others."""
        weights = self._gather(dcp.get_model_state_dict(self.model))
        if not optimizer.state:  # torch would make a step, to have some
            return weights, optimizer.state_dict() if self.mesh.is_main else {}
        by_name: dict[str, Any] = dcp.get_optimizer_state_dict(self.model, optimizer)
        for name, tensors in by_name["state"].items():
            by_name["state"][name] = self._gather(tensors)
        return weights, numbered(by_name) if self.mesh.is_main else {}

    def load_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """From what rank 0 has; the others' is not looked at."""
        self.load_weights(state[0])
        saved = {number: dict(found) for number, found in state[1].get("state", {}).items()}
        if not self.mesh.from_main(
            bool(saved)
        ):  # before the first update; torch would make one, to have some
            return
        by_name = named(state[1], self.names_of(optimizer))
        options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dcp.set_optimizer_state_dict(self.model, optimizer, by_name, options=options)
        for number, parameter in enumerate(
            p for group in optimizer.param_groups for p in group["params"]
        ):
            for name, tensor in optimizer.state[parameter].items():
                # torch's loader (2.13) takes a part of each of several matrices side by side for one stretch of rows
                if isinstance(tensor, DTensor) and any(
                    isinstance(cut, _StridedShard) for cut in tensor.placements
                ):
                    _fill(tensor, saved.get(number, {}).get(name))

    def load_weights(self, weights: dict[str, Any]) -> None:
        """From those that rank 0 has. Not by torch's loader, which (2.13) knows a shared parameter by one name only."""
        found = self.model.state_dict()
        assert weights.keys() == found.keys() or not self.mesh.is_main
        for name, tensor in found.items():
            _fill(tensor, weights.get(name))

    def _gather(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the whole tensors in main memory of rank 0, an empty dictionary on the others."""
        gathered = {}
        for name, tensor in tensors.items():
            whole = _whole(tensor) if isinstance(tensor, DTensor) else tensor
            if self.mesh.is_main:
                gathered[name] = whole.cpu()
        return gathered

    def names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters that lie here, in each group of the optimizer."""
        names = {p: name for name, p in self.model.named_parameters()}
        return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def seed_of(seed: int, stream: int, step: int) -> int:
    """Of one of a run's random streams in one of its steps."""
    return seed + 1_000_003 * stream + step


@torch.no_grad()
def _whole(tensor: DTensor) -> Tensor:
    """Return the whole tensor, which all ranks gather.

    Matrices side by side are gathered as one stretch of rows and then put into their order: torch before 2.13 cannot
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
    """With this rank's part of the `whole`, which rank 0 has."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
    if whole is not None:
        full.copy_(whole)
    dist.broadcast(full, src=0)
    part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(part.to_local())


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """torch.distributed.checkpoint names an optimizer's parameters, the optimizer itself numbers them."""
    if not state:
        return {}
    numbers = dict(
        zip(chain.from_iterable(group["params"] for group in state["param_groups"]), count())
    )
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {numbers[name]: found for name, found in state["state"].items()},
        "param_groups": groups,
    }


def named(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The reverse; `names` of the parameters in each group."""
    if not state:
        return {}
    flat = list(chain.from_iterable(names))
    groups = [
        {**group, "params": own} for group, own in zip(state["param_groups"], names, strict=True)
    ]
    return {
        "state": {flat[number]: found for number, found in state["state"].items()},
        "param_groups": groups,
    }


def norm_of_parts(gradients: Iterable[Tensor]) -> Tensor:
    """Of whole gradients and of DTensors, which may be cut along different dimensions of the mesh."""
    norms = []
    for _, group in groupby(sorted(gradients, key=_cut), key=_cut):
        norm = torch.nn.utils.get_total_norm(list(group), foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _cut(tensor: Tensor) -> str:
    return f"{tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else ""
