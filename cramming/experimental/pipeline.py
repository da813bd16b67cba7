"""Pipeline parallelism: each rank holds some consecutive layers, and micro-batches flow through the stages.

torch.distributed.pipelining runs the schedules. This module cuts a model into stages and sums shared gradients. The
first stage has the embeddings, the last one norm, head and loss. A tied decoder is the embedding: the ranks of both
hold it, start from the same weights, and sum its gradients, so that it stays the same (as in Megatron-LM). The
micro-batches of a step are the pipeline's. Every rank of a pipeline makes the same batches, which are a function of the
sample's index, so that only hidden states [T, D] and their gradients travel.

Shapes: T tokens of a micro-batch, M targets, D hidden size; p ranks, v stages on each, m micro-batches.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils._pytree import tree_map_only

from cramming.data.batches import Batch
from cramming.experimental.stages import ORDERS, holders, layers_of_stage
from cramming.experimental.tensor import sum_over_replicas
from cramming.model.heads import MaskedLM, PretrainedModel
from cramming.parallel.data_parallel import (
    LossAndHits,
    OnePass,
    ParallelStrategy,
    State,
    norm_of_parts,
)
from cramming.parallel.mesh import Mesh, PipelineConfig
from cramming.precision import Precision


def cut(model: MaskedLM, schedule: str, rank: int, ranks: int) -> None:
    """Drop the parameters that no stage of this rank needs; the others keep their names."""
    order = ORDERS[schedule]
    for name, _ in list(model.named_parameters()):
        needed = holders(name, model.config, ranks * order.stages_per_rank)
        if rank not in {order.rank_of(stage, ranks) for stage in needed}:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, None)


class Stage(nn.Module):
    """Consecutive layers, with the embeddings in the first stage, with norm, head and loss in the last one.

    Its submodules are those that it computes with, and not the whole model. `totals` collects summed loss and hits of
    each micro-batch, in the order of their forward passes; gradients are of `share` times the loss.
    """

    def __init__(
        self,
        model: MaskedLM,
        index: int,
        stages: int,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__()
        self.layers = layers_of_stage(index, stages, model.config.num_layers)
        self.is_first, self.is_last = index == 0, index == stages - 1
        encoder = model.encoder
        modules = [encoder.blocks[layer] for layer in self.layers]
        num_convolutions = len(encoder.convolutions)
        modules += [encoder.convolutions[n] for n in self.layers if n < num_convolutions]
        if self.is_first:
            modules.append(encoder.embeddings)
        if self.is_last:
            modules += [encoder.final_norm, model.transform]
        self.parts = nn.ModuleList(modules)
        self.autocast = autocast
        self._model = (model,)  # a tuple hides it from nn.Module
        self.inputs: Sequence[Any] = ()  # arguments of the model for each micro-batch
        self.share = 1.0
        self.totals: list[tuple[Tensor, Tensor]] = []

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Return hidden states [T, D], or in the last stage a number whose gradient is that of the loss."""
        (model,) = self._model
        ids, positions, packing, target_positions, target_ids = self.inputs[int(index)]
        with self.autocast():
            if self.is_first:
                hidden = model.encoder.embeddings(ids, positions, None)
            else:
                hidden = received[0]
            if not self.is_last:
                return model.encoder.run_layers(self.layers, hidden, ids, positions, packing)
            late = target_positions if model.last_layer == "targets" else None
            hidden = model.encoder.run_layers(self.layers, hidden, ids, positions, packing, late)
            hidden = model.encoder.final_norm(hidden)
            if late is None:
                hidden = hidden.index_select(0, target_positions)
            return self._loss(model, model.transform(hidden), target_ids)

    def _loss(self, model: MaskedLM, hidden_MD: Tensor, target_ids_M: Tensor) -> Tensor:
        """Record loss and hits; in training run the backward pass of the loss at once.

        The gradient of the decoder, [V, D], would otherwise wait for the backward pass, once for each micro-batch in
        flight, and a backward pass in two parts (zero bubble) would compute that of the loss twice.
        """
        if not torch.is_grad_enabled():
            loss, hits, _ = model.loss(hidden_MD, target_ids_M)
            self.totals.append((loss, hits))
            return loss
        leaf_MD = hidden_MD.detach().requires_grad_()
        loss, hits, _ = model.loss(leaf_MD, target_ids_M)
        (loss * self.share).backward()
        assert leaf_MD.grad is not None
        self.totals.append((loss.detach(), hits))
        return (hidden_MD * leaf_MD.grad).sum()


class Pipeline(ParallelStrategy):
    """Stages of this rank and the schedules that run them; the constructor cuts the model.

    With replicas of a pipeline (`dp`) gradients are summed after the last micro-batch, as one bucket.
    """

    def __init__(
        self,
        model: PretrainedModel,
        config: PipelineConfig,
        mesh: Mesh,
        precision: Precision,
        is_on_host: bool,
    ) -> None:
        """Remove the stages of other ranks from the model."""
        assert isinstance(model, MaskedLM)
        super().__init__(model, config, mesh, precision, is_on_host)
        self.schedule, self.order = config.schedule, ORDERS[config.schedule]
        self.group, self.device = mesh.dims.get_group("pp"), mesh.device
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.num_stages = self.ranks * self.order.stages_per_rank
        self.names = [name for name, _ in model.named_parameters()]  # of the whole model, in order
        cut(model, self.schedule, self.rank, self.ranks)
        mine = [s for s in range(self.num_stages) if self.order.rank_of(s, self.ranks) == self.rank]
        self.stages = {s: Stage(model, s, self.num_stages, precision.autocast) for s in mine}
        ends = {
            self.order.rank_of(0, self.ranks),
            self.order.rank_of(self.num_stages - 1, self.ranks),
        }
        shares = model.config.tie_embeddings and len(ends) == 2 and self.rank in ends
        self.shared: nn.Parameter | None = None
        if shares:
            self.shared = model.encoder.embeddings.tokens.weight  # type: ignore[assignment]
        self.width, self.stream = model.config.hidden_size, precision.stream
        self._schedules: dict[tuple[int, int], Any] = {}
        model.forward = self._evaluate  # type: ignore[method-assign,assignment]

    def accumulate(
        self, one_pass: OnePass, batches: Sequence[Batch], share: float
    ) -> list[LossAndHits]:
        """Run a step by torch's schedule; return summed loss and hits of all micro-batches, on every rank."""
        self._set_inputs(batches, share)
        index = torch.arange(len(batches))
        self._schedule(len(batches), len(batches[0].ids_T)).step(
            index=index, target=index, return_outputs=False
        )
        if self.shared is not None:
            self._sum_shared(self.shared)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        sum_over_replicas(gradients, self.mesh)
        return [self._totals()]

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Return the norm of the whole gradient; a matrix that two ranks hold counts once."""
        twice = None if self.shared is None or 0 in self.stages else self.shared.grad
        squared = norm_of_parts([grad for grad in gradients if grad is not twice]).square()
        dist.all_reduce(squared, group=self.group)
        return squared.sqrt()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return the parameters of all ranks and their state by name on rank 0; empty mappings on the others."""
        groups = self._groups(optimizer)
        local = name_parameters(optimizer.state_dict(), self._names_of(optimizer))
        part = tree_map_only(Tensor, Tensor.cpu, (self.model.state_dict(), local["state"]))
        parts: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(part, parts, group=self.group, group_dst=0)
        if parts is None or not self.mesh.is_main:
            return {}, {}
        weights: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for part_weights, part_states in parts:
            weights |= part_weights
            states |= part_states
        known = {group["name"]: group for group in local["param_groups"]}
        ordered = chain.from_iterable(groups.values())
        whole = {
            "state": {name: states[name] for name in ordered if name in states},
            "param_groups": [{**known[group], "params": names} for group, names in groups.items()],
        }
        return {name: weights[name] for name in self.names}, number_parameters(whole)

    def load_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load this rank's part of the state, which rank 0 sends to all."""
        self.load_weights(state[0])
        names_of_groups = list(self._groups(optimizer).values())
        whole = name_parameters(self.mesh.object_from_main(state[1]), names_of_groups)
        settings = {group["name"]: group for group in whole["param_groups"]}
        groups, states = [], dict[str, Any]()
        for group, names in zip(optimizer.param_groups, self._names_of(optimizer)):
            groups.append({**settings[group["name"]], "params": names})
            if whole["state"]:
                states |= {name: whole["state"][name] for name in names}
        optimizer.load_state_dict(number_parameters({"state": states, "param_groups": groups}))

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load this rank's part of the weights, which rank 0 sends to all."""
        whole = self.mesh.object_from_main(weights)
        self.model.load_state_dict({name: whole[name] for name in self.model.state_dict()})

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
        """Return the names of the whole model's parameters in each group of the optimizer, in the model's order."""
        names_of_groups = self._names_of(optimizer)
        mine = {g["name"]: names for g, names in zip(optimizer.param_groups, names_of_groups)}
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        members: dict[str, set[str]] = {}
        for part in every:
            for group, names in part.items():
                members.setdefault(group, set()).update(names)
        ordered: dict[str, list[str]] = {}
        for group, name_set in members.items():
            ordered[group] = [name for name in self.names if name in name_set]
        return ordered

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of this rank's parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        names_of_groups = []
        for group in optimizer.param_groups:
            names_of_groups.append([names[p] for p in group["params"]])
        return names_of_groups

    def _evaluate(self, *inputs: Any) -> LossAndHits:
        """Run the forward pass on all ranks of the pipeline; return summed loss and hits.

        Torch's schedules are not used, because V-shaped ones cannot run a forward pass alone (torch 2.13).
        """
        hidden_TD = torch.empty(len(inputs[0]), self.width, dtype=self.stream, device=self.device)
        self._set_inputs([inputs], 0.0)
        sent: list[Any] = []
        for index, stage in self.stages.items():
            before, after = (self.order.rank_of(index + step, self.ranks) for step in (-1, 1))
            if before != self.rank and not stage.is_first:
                hidden_TD = torch.empty_like(hidden_TD)
                dist.recv(hidden_TD, group=self.group, group_src=before)
            hidden_TD = stage(hidden_TD, index=torch.zeros(1, dtype=torch.int64))
            if after != self.rank and not stage.is_last:
                sent.append(dist.isend(hidden_TD, group=self.group, group_dst=after))
        for work in sent:
            work.wait()
        return self._totals()

    def _set_inputs(self, batches: Sequence[Any], share: float) -> None:
        inputs = []
        for batch in batches:
            inputs.append(batch.to(self.device).inputs if isinstance(batch, Batch) else batch)
        for stage in self.stages.values():
            stage.inputs, stage.share, stage.totals = inputs, share, []

    def _totals(self) -> LossAndHits:
        """Return summed loss and hits of the last stage, on every rank."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        last = self.stages.get(self.num_stages - 1)
        if last:
            losses, hits = zip(*last.totals)
            both = [torch.stack(losses).double(), torch.stack(hits).double()]
            totals = torch.stack(both).sum(1)
        dist.all_reduce(totals, group=self.group)
        return totals[0], totals[1]

    def _schedule(self, micro_batches: int, tokens: int) -> Any:
        """Return torch's schedule for this number and size of micro-batches, which its buffers depend on."""
        key = micro_batches, tokens
        if key not in self._schedules:
            hidden = torch.empty(
                tokens, self.width, dtype=self.stream, device="meta", requires_grad=True
            )
            loss = torch.empty((), device="meta")
            stages = []
            for index, stage in self.stages.items():
                inputs = () if stage.is_first else (hidden,)
                output = loss if stage.is_last else hidden
                stages.append(
                    pipelining.PipelineStage(
                        stage,
                        index,
                        self.num_stages,
                        self.device,
                        group=self.group,
                        input_args=inputs,
                        output_args=(output,),
                    )
                )
            self._schedules[key] = make_schedule(self.schedule, stages, micro_batches)
        return self._schedules[key]

    def _sum_shared(self, parameter: nn.Parameter) -> None:
        """Replace the gradient of the tied matrix on both its ranks by their sum."""
        assert parameter.grad is not None
        peer = self.order.rank_of(self.num_stages - 1 if 0 in self.stages else 0, self.ranks)
        other = torch.empty_like(parameter.grad)
        both = [dist.P2POp(dist.isend, parameter.grad, group=self.group, group_peer=peer)]
        both += [dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        parameter.grad += other


def number_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with numbers in place of parameter names, in torch's format."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state.get("param_groups", []):
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    tensors = {numbers[name]: entry for name, entry in state.get("state", {}).items()}
    return {"state": tensors, "param_groups": groups} if state else {}


def name_parameters(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Return the state of an optimizer with names in place of parameter numbers; `names` are those of each group."""
    if not state:
        return {}
    flat_names = list(chain.from_iterable(names))
    groups = []
    for group, group_names in zip(state["param_groups"], names, strict=True):
        groups.append({**group, "params": group_names})
    tensors = {flat_names[number]: entry for number, entry in state["state"].items()}
    return {"state": tensors, "param_groups": groups}


def make_schedule(schedule: str, stages: Sequence[Any], micro_batches: int) -> Any:
    """Return torch's schedule for these stages of one rank."""
    make = getattr(pipelining, ORDERS[schedule].name)
    takes_one = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    return make(
        stages[0] if takes_one else list(stages),
        micro_batches,
        loss_fn=_identity_loss,
        scale_grads=False,
    )


def _identity_loss(output: Tensor, target: Tensor) -> Tensor:
    return output
