"""Pipeline parallelism: each rank holds a stretch of the layers, and micro-batches flow through the stages.

torch.distributed.pipelining runs the schedules; here a model is cut into stages, and what stages share is summed. The
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
from cramming.experimental.stages import ORDERS, holders, stretch
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
    """A stretch of the layers, with the embeddings if it is the first, with norm, head and loss if it is the last.

    It owns the modules that it computes with and not the model, whose other stages on this rank are not its own.
    `found` collects summed loss and hits of each micro-batch, in the order of their forward passes; gradients are of
    `share` times the loss.
    """

    def __init__(
        self,
        model: MaskedLM,
        index: int,
        stages: int,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__()
        self.layers = stretch(index, stages, model.config.num_layers)
        self.is_first, self.is_last = index == 0, index == stages - 1
        encoder = model.encoder
        own = [encoder.blocks[layer] for layer in self.layers]
        own += [
            encoder.convolutions[layer]
            for layer in self.layers
            if layer < len(encoder.convolutions)
        ]
        own += [encoder.embeddings] * self.is_first + [
            encoder.final_norm,
            model.transform,
        ] * self.is_last
        self.own = nn.ModuleList(own)
        self.autocast = autocast
        self._model = (model,)  # a tuple hides it from nn.Module
        self.given: Sequence[Any] = ()  # what a model gets of each micro-batch
        self.share = 1.0
        self.found: list[tuple[Tensor, Tensor]] = []

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Hidden states [T, D] for the next stage; of the last stage a number whose gradient is that of the loss."""
        (model,) = self._model
        ids, positions, packing, target_positions, target_ids = self.given[int(index)]
        with self.autocast():
            hidden = (
                model.encoder.embeddings(ids, positions, None) if self.is_first else received[0]
            )
            if not self.is_last:
                return model.encoder.run_layers(self.layers, hidden, ids, positions, packing)
            late = target_positions if model.last_layer == "targets" else None
            hidden = model.encoder.run_layers(self.layers, hidden, ids, positions, packing, late)
            hidden = model.encoder.final_norm(hidden)
            if late is None:
                hidden = hidden.index_select(0, target_positions)
            return self._loss(model, model.transform(hidden), target_ids)

    def _loss(self, model: MaskedLM, hidden_MD: Tensor, target_ids_M: Tensor) -> Tensor:
        """Note loss and hits; in training go back through the loss at once, as its gradients are made with it.

        The gradient of the decoder, [V, D], would otherwise wait for the backward pass, once for each micro-batch in
        flight, and a backward pass that is split in two (zero bubble) would go through the loss twice.
        """
        if not torch.is_grad_enabled():
            loss, hits, _ = model.loss(hidden_MD, target_ids_M)
            self.found.append((loss, hits))
            return loss
        given_MD = hidden_MD.detach().requires_grad_()
        loss, hits, _ = model.loss(given_MD, target_ids_M)
        (loss * self.share).backward()
        assert given_MD.grad is not None
        self.found.append((loss.detach(), hits))
        return (hidden_MD * given_MD.grad).sum()


class Pipeline(ParallelStrategy):
    """The stages of this rank, and the schedules that run them. The model is cut when this is made.

    With replicas of a pipeline (`dp`) gradients are summed once the last micro-batch is through, in one piece.
    """

    def __init__(
        self,
        model: PretrainedModel,
        config: PipelineConfig,
        mesh: Mesh,
        precision: Precision,
        is_on_host: bool,
    ) -> None:
        """Keep this rank's stages of the model."""
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
        """A step by torch's schedule. The loss and hits of all micro-batches together, on every rank."""
        self._take(batches, share)
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
        """A matrix that two ranks hold counts once."""
        twice = None if self.shared is None or 0 in self.stages else self.shared.grad
        squared = norm_of_parts([grad for grad in gradients if grad is not twice]).square()
        dist.all_reduce(squared, group=self.group)
        return squared.sqrt()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Every rank's parameters and their state, gathered as objects; the names say where they belong."""
        groups = self._groups(optimizer)
        own = name_parameters(optimizer.state_dict(), self._names_of(optimizer))
        part = tree_map_only(Tensor, Tensor.cpu, (self.model.state_dict(), own["state"]))
        parts: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(part, parts, group=self.group, group_dst=0)
        if parts is None or not self.mesh.is_main:
            return {}, {}
        weights = {name: found for part, _ in parts for name, found in part.items()}
        states = {name: found for _, part in parts for name, found in part.items()}
        known = {group["name"]: group for group in own["param_groups"]}
        whole = {
            "state": {
                name: states[name]
                for name in chain.from_iterable(groups.values())
                if name in states
            },
            "param_groups": [{**known[group], "params": names} for group, names in groups.items()],
        }
        return {name: weights[name] for name in self.names}, number_parameters(whole)

    def load_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Each rank takes its part of what rank 0 sends to all of them."""
        self.load_weights(state[0])
        whole = name_parameters(
            self.mesh.object_from_main(state[1]), list(self._groups(optimizer).values())
        )
        names, settings = (
            self._names_of(optimizer),
            {group["name"]: group for group in whole["param_groups"]},
        )
        own = {
            "state": {
                name: whole["state"][name] for name in chain.from_iterable(names) if whole["state"]
            },
            "param_groups": [
                {**settings[group["name"]], "params": mine}
                for group, mine in zip(optimizer.param_groups, names)
            ],
        }
        optimizer.load_state_dict(number_parameters(own))

    def load_weights(self, weights: dict[str, Any]) -> None:
        whole = self.mesh.object_from_main(weights)
        self.model.load_state_dict({name: whole[name] for name in self.model.state_dict()})

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
        """Names of the whole model's parameters in each of the optimizer's groups, as one process has them."""
        mine = {
            group["name"]: names
            for group, names in zip(optimizer.param_groups, self._names_of(optimizer))
        }
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=self.group)
        found: dict[str, set[str]] = {}
        for part in every:
            for group, own in part.items():
                found.setdefault(group, set()).update(own)
        return {group: [name for name in self.names if name in own] for group, own in found.items()}

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of this rank's parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[p] for p in group["params"]] for group in optimizer.param_groups]

    def _evaluate(self, *inputs: Any) -> LossAndHits:
        """The model's forward pass, on all ranks of the pipeline: summed loss and hits.

        Not by torch's schedules, of which those whose stages come back up have no forward pass alone (torch 2.13).
        """
        hidden_TD = torch.empty(len(inputs[0]), self.width, dtype=self.stream, device=self.device)
        self._take([inputs], 0.0)
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

    def _take(self, batches: Sequence[Any], share: float) -> None:
        given = [
            batch.to(self.device).inputs if isinstance(batch, Batch) else batch for batch in batches
        ]
        for stage in self.stages.values():
            stage.given, stage.share, stage.found = given, share, []

    def _totals(self) -> LossAndHits:
        """What the last stage found, on every rank."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        if last := self.stages.get(self.num_stages - 1):
            totals = torch.stack([torch.stack(found).double() for found in zip(*last.found)]).sum(1)
        dist.all_reduce(totals, group=self.group)
        return totals[0], totals[1]

    def _schedule(self, micro_batches: int, tokens: int) -> Any:
        """Torch's schedule for so many micro-batches of this size: buffers are of one size."""
        key = micro_batches, tokens
        if key not in self._schedules:
            hidden = torch.empty(
                tokens, self.width, dtype=self.stream, device="meta", requires_grad=True
            )
            made = [
                pipelining.PipelineStage(
                    stage,
                    index,
                    self.num_stages,
                    self.device,
                    group=self.group,
                    input_args=() if stage.is_first else (hidden,),
                    output_args=(torch.empty((), device="meta") if stage.is_last else hidden,),
                )
                for index, stage in self.stages.items()
            ]
            self._schedules[key] = make_schedule(self.schedule, made, micro_batches)
        return self._schedules[key]

    def _sum_shared(self, parameter: nn.Parameter) -> None:
        """Both holders of the tied matrix get the sum of their gradients."""
        assert parameter.grad is not None
        peer = self.order.rank_of(self.num_stages - 1 if 0 in self.stages else 0, self.ranks)
        other = torch.empty_like(parameter.grad)
        both = [dist.P2POp(dist.isend, parameter.grad, group=self.group, group_peer=peer)]
        both += [dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        parameter.grad += other


def number_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of named parameters with numbers in their place, as torch has it."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state.get("param_groups", []):
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    tensors = {numbers[name]: of_one for name, of_one in state.get("state", {}).items()}
    return {"state": tensors, "param_groups": groups} if state else {}


def name_parameters(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Return an optimizer's state with its numbered parameters named; `names` of those in each group."""
    if not state:
        return {}
    flat_names = list(chain.from_iterable(names))
    groups = []
    for group, own_names in zip(state["param_groups"], names, strict=True):
        groups.append({**group, "params": own_names})
    tensors = {flat_names[number]: of_one for number, of_one in state["state"].items()}
    return {"state": tensors, "param_groups": groups}


def make_schedule(schedule: str, stages: Sequence[Any], micro_batches: int) -> Any:
    """Torch's schedule for these stages of one rank."""
    make = getattr(pipelining, ORDERS[schedule].name)
    takes_one = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    return make(
        stages[0] if takes_one else list(stages),
        micro_batches,
        loss_fn=_as_it_is,
        scale_grads=False,
    )


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return output
