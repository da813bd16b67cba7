"""Pipeline parallelism: each rank holds a stretch of the layers, and micro-batches flow through the stages.

torch.distributed.pipelining runs the schedules; here a model is cut into stages, and what stages share is summed. The
first stage has the embeddings, the last one norm, head and loss. A tied decoder is the embedding: the ranks of both
hold it, start from the same weights, and sum its gradients, so that it stays the same (as in Megatron-LM). The
micro-batches of a step are the pipeline's. Every rank of a pipeline makes the same batches, which are a function of the
sample's index, so that only hidden states [T, D] and their gradients travel.

Shapes: T tokens of a micro-batch, M targets, D hidden size; p ranks, v stages on each, m micro-batches.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from cramming.data.batches import Batch
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM

TOKENS = "encoder.embeddings.tokens.weight"


@dataclass(frozen=True)
class Order:
    """One row of `ORDERS`. With `is_v` the stages go down the ranks and come back up, so that the first and the last
    are on one rank; otherwise stage s is on rank s mod p."""

    make: type[Any]
    stages_per_rank: int = 1
    is_v: bool = False

    def rank_of(self, stage: int, ranks: int) -> int:
        """Where a stage is."""
        lap, place = divmod(stage, ranks)
        return ranks - 1 - place if self.is_v and lap % 2 else place


# `parallel.schedule` -> what torch runs. GPipe: Huang et al. 2019; 1F1B: DAPPLE, Fan et al. 2021; interleaved:
# Narayanan et al. 2021 (Megatron-LM), section 2.2; zero_bubble: ZB-H1, zbv: ZB-V, both Qi et al. 2023; dualpipev:
# DeepSeek-AI 2024, section 3.2.1, a descendant of the bidirectional pipelines of Chimera (Li and Hoefler 2021).
ORDERS: dict[str, Order] = {
    "gpipe": Order(pipelining.ScheduleGPipe),
    "1f1b": Order(pipelining.Schedule1F1B),
    "interleaved": Order(pipelining.ScheduleInterleaved1F1B, 2),
    "zero_bubble": Order(pipelining.ScheduleInterleavedZeroBubble),
    "zbv": Order(pipelining.ScheduleZBVZeroBubble, 2, is_v=True),
    "dualpipev": Order(pipelining.ScheduleDualPipeV, 2, is_v=True),
}


def stretch(stage: int, stages: int, num_layers: int) -> range:
    """The layers of a stage: as many in each, one more in the first where that does not divide."""
    size, extra = divmod(num_layers, stages)
    first = stage * size + min(stage, extra)
    return range(first, first + size + (stage < extra))


def holders(name: str, config: ModelConfig, stages: int) -> tuple[int, ...]:
    """The stages that need the parameter of this name in a `MaskedLM`."""
    if name == TOKENS and config.tie_embeddings:
        return 0, stages - 1
    if name.startswith("encoder.embeddings."):
        return (0,)
    if name.startswith(("encoder.blocks.", "encoder.convolutions.")):
        layer = int(name.split(".")[2])
        return tuple(s for s in range(stages) if layer in stretch(s, stages, config.num_layers))
    return (stages - 1,)


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
    `found` collects summed loss and hits of each micro-batch, in the order of their forward passes.
    """

    def __init__(
        self, model: MaskedLM, index: int, stages: int, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self.layers = stretch(index, stages, model.config.num_layers)
        self.is_first, self.is_last = index == 0, index == stages - 1
        encoder = model.encoder
        own = [encoder.blocks[layer] for layer in self.layers]
        own += [encoder.convolutions[layer] for layer in self.layers if layer < len(encoder.convolutions)]
        own += [encoder.embeddings] * self.is_first + [encoder.final_norm, model.transform] * self.is_last
        self.own = nn.ModuleList(own)
        self.autocast = autocast
        self._model = (model,)  # a tuple hides it from nn.Module
        self.batches: Sequence[Batch] = ()
        self.scale = 1.0
        self.found: list[tuple[Tensor, Tensor]] = []

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Hidden states [T, D] for the next stage; of the last stage a number whose gradient is that of the loss."""
        (model,) = self._model
        batch = self.batches[int(index)]
        ids, positions, packing, target_positions = batch.inputs[:4]
        with self.autocast():
            hidden = model.encoder.embeddings(ids, positions, None) if self.is_first else received[0]
            if not self.is_last:
                return model.encoder.through(self.layers, hidden, ids, positions, packing)
            late = target_positions if model.last_layer == "targets" else None
            hidden = model.encoder.through(self.layers, hidden, ids, positions, packing, late)
            hidden = model.encoder.final_norm(hidden)
            if late is None:
                hidden = hidden.index_select(0, target_positions)
            return self._loss(model, model.transform(hidden), batch.target_ids_M)

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
        (loss * self.scale).backward()
        assert given_MD.grad is not None
        self.found.append((loss.detach(), hits))
        return (hidden_MD * given_MD.grad).sum()


class Pipeline:
    """The stages of this rank, and the schedules that run them. `group`: the p ranks of one pipeline, in their order.

    `stream`: type of the hidden states between stages.
    """

    def __init__(
        self, model: MaskedLM, schedule: str, group: Any, device: torch.device,
        autocast: Callable[[], AbstractContextManager[object]], stream: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.model, self.group, self.device, self.stream = model, group, device, stream
        self.schedule, self.order = schedule, ORDERS[schedule]
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_stages = self.ranks * self.order.stages_per_rank
        mine = [s for s in range(self.num_stages) if self.order.rank_of(s, self.ranks) == self.rank]
        self.stages = {s: Stage(model, s, self.num_stages, autocast) for s in mine}
        ends = {self.order.rank_of(0, self.ranks), self.order.rank_of(self.num_stages - 1, self.ranks)}
        self.shares_tokens = model.config.tie_embeddings and len(ends) == 2 and self.rank in ends
        self._schedules: dict[tuple[int, int], Any] = {}

    def forward_backward(self, batches: Sequence[Batch], scale: float) -> tuple[Tensor, Tensor]:
        """Gradients of `scale` times the summed loss of all micro-batches; that loss and the hits, on every rank."""
        self._take(batches, scale)
        index = torch.arange(len(batches))
        self._schedule(len(batches), len(batches[0].ids_T)).step(index=index, target=index, return_outputs=False)
        if self.shares_tokens:
            self._sum_tokens()
        return self._totals()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of batches of any sizes, on every rank.

        Not by torch's schedules, of which those whose stages come back up have no forward pass alone (torch 2.13).
        """
        self._take(batches, 0.0)
        sent: list[Any] = []
        for number, batch in enumerate(batches):
            hidden_TD = torch.empty(len(batch.ids_T), self.model.config.hidden_size, dtype=self.stream)
            for index, stage in self.stages.items():
                before, after = (self.order.rank_of(index + step, self.ranks) for step in (-1, 1))
                if before != self.rank and not stage.is_first:
                    hidden_TD = torch.empty_like(hidden_TD, device=self.device)
                    dist.recv(hidden_TD, group=self.group, group_src=before)
                hidden_TD = stage(hidden_TD, index=torch.tensor([number]))
                if after != self.rank and not stage.is_last:
                    sent += [dist.isend(hidden_TD, group=self.group, group_dst=after)]
        for work in sent:
            work.wait()
        return self._totals()

    def norm(self, grads: Callable[[Sequence[nn.Parameter]], Tensor]) -> Tensor:
        """The global norm, of `grads(parameters)` for those that this rank counts."""
        tokens = self.model.encoder.embeddings.tokens.weight
        counts_tokens = not self.shares_tokens or 0 in self.stages
        squared = grads([p for p in self.model.parameters() if counts_tokens or p is not tokens]).square()
        dist.all_reduce(squared, group=self.group)
        return squared.sqrt()

    def _take(self, batches: Sequence[Batch], scale: float) -> None:
        batches = [batch.to(self.device) for batch in batches]
        for stage in self.stages.values():
            stage.batches, stage.scale, stage.found = batches, scale, []

    def _totals(self) -> tuple[Tensor, Tensor]:
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
            hidden = torch.empty(tokens, self.model.config.hidden_size, dtype=self.stream, device="meta")
            made = [
                pipelining.PipelineStage(
                    stage, index, self.num_stages, self.device, group=self.group,
                    input_args=() if stage.is_first else (hidden.requires_grad_(),),
                    output_args=(torch.empty((), device="meta") if stage.is_last else hidden.requires_grad_(),),
                )
                for index, stage in self.stages.items()
            ]  # fmt: skip
            self._schedules[key] = make_schedule(self.schedule, made, micro_batches)
        return self._schedules[key]

    def _sum_tokens(self) -> None:
        """Both holders of the tied matrix get the sum of their gradients."""
        grad = self.model.encoder.embeddings.tokens.weight.grad
        assert grad is not None
        peer = self.order.rank_of(self.num_stages - 1 if 0 in self.stages else 0, self.ranks)
        other = torch.empty_like(grad)
        sent = [dist.P2POp(dist.isend, grad, group=self.group, group_peer=peer)]
        sent += [dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        grad += other


def make_schedule(schedule: str, stages: Sequence[Any], micro_batches: int) -> Any:
    """Torch's schedule for these stages of one rank."""
    make = ORDERS[schedule].make
    takes_one = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    return make(stages[0] if takes_one else list(stages), micro_batches, loss_fn=_as_it_is, scale_grads=False)


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return output
