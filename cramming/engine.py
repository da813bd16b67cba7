"""One optimizer step: accumulate micro-batches, clip, update; skip what is not finite.

The loss of a step is the mean over all targets of all its micro-batches on all ranks, so that the result does not
depend on how the batch was cut into micro-batches or spread over devices. A step has two halves, between which the
training loop asks the clock: `forward_backward`, then `update` or `discard`. In one process the host waits for the
device once in each; several also wait for each other: for the number of targets, the sums, and the end of the update.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cramming import device as devices
from cramming.checks import Config, Place, check
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.data.masking import ReplacedTokensConfig
from cramming.device import compiled_graphs
from cramming.model.heads import MaskedLM, PretrainedModel
from cramming.optim.build import set_learning_rate
from cramming.parallel.apply import apply, place
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision

if TYPE_CHECKING:
    from cramming.data.token_losses import TokenLosses
    from cramming.optim.average import WeightAverage
    from cramming.parallel.data_parallel import ParallelStrategy

MAX_SKIPPED_IN_A_ROW = 50


class DivergedError(UserError):
    """No gradient was finite any more: the run ends without a model."""


@dataclass(frozen=True)
class StepStats:
    """What one step did: mean loss in nats per target, share of targets predicted right, global gradient norm. With
    objective=rtd the loss is the weighted sum of both models', and the share that of tokens told right.

    `skipped`: the gradient was not finite and no weight moved. `recompilations`: graphs compiled after the first update
    of this process; shapes change with a phase of the objective only, so there should be no others.
    """

    loss: float
    accuracy: float
    grad_norm: float
    skipped: bool
    recompilations: int = 0


class Engine:
    """Owns the model and the optimizer during training.

    With `cuda_graphs` the model's compiled passes write all that they return into the same memory at each replay. So
    gradients have memory of their own, made once and set to zero, into which a pass adds; loss and hits are copied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        clip: float | None,
        mesh: Mesh,
        device: torch.device,
        cuda_graphs: bool = False,
        average: "WeightAverage | None" = None,
        token_losses: "TokenLosses | None" = None,
        spread: "ParallelStrategy | None" = None,
    ):
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.clip, self.mesh, self.device = clip, mesh, device
        self.parameters = list(model.parameters())
        self.cuda_graphs = cuda_graphs
        self.average, self.token_losses, self.spread = average, token_losses, spread
        self._norm: Tensor | None = None  # of the gradients that wait for `update`
        self._is_warm = False  # one update is done, so all that compiles has been compiled
        self._skipped_in_a_row = 0

    @property
    def parts(self) -> dict[str, "WeightAverage | TokenLosses"]:
        """What a checkpoint holds beside model, optimizer and loss scale."""
        parts = {"average": self.average, "token_losses": self.token_losses}
        return {name: part for name, part in parts.items() if part}

    def forward_backward(
        self, batches: Sequence[Batch], stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Gradients of the mean loss over all `batches` of all ranks; `update` or `discard` must follow.

        False if `stop` was true between two micro-batches (in one process only: others would wait for this one's
        gradients); the step can then only be discarded.
        """
        totals = self.accumulate(batches, stop)
        if totals is None:
            return False
        self.measure(*totals)
        return True

    def update(self, learning_rate: float) -> StepStats:
        """Clip, apply the gradients, and wait for the device. Gradients that are not finite change nothing."""
        set_learning_rate(self.optimizer, learning_rate)
        finite = math.isfinite(self._grad_norm)
        self._clip_and_apply(finite)
        if self.token_losses and finite:
            self.token_losses.end_step()
        self._forget_gradients()
        devices.synchronize(self.device)
        if self.spread:
            if not finite:
                self.spread.forget()
            self.mesh.barrier()  # the step is done when all have done it
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row (loss {self._loss:.3g}, learning"
                f" rate {learning_rate:.3g}, precision {self.precision.mode}); lower optim.lr, or do without fp16"
                " (precision=bf16 or fp32, parallel.compression=bf16 or none)"
            )
        recompilations = (
            compiled_graphs() - self._graphs if self._is_warm else 0
        )  # the optimizer may compile, too
        self._is_warm = self._is_warm or finite
        return StepStats(self._loss, self._accuracy, self._grad_norm, not finite, recompilations)

    def discard(self) -> None:
        """Forget the gradients and put the random states back, so that the same step can be done anew."""
        self._forget_gradients()
        devices.set_random_states(self._random_states)

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepStats:
        """A whole step where no clock runs: benchmarks and tests."""
        self.forward_backward(batches)
        return self.update(learning_rate)

    def accumulate(
        self, batches: Sequence[Batch], stop: Callable[[], bool] = lambda: False
    ) -> tuple[Tensor, Tensor] | None:
        """Forward and backward passes of all micro-batches: summed loss and hits; None if `stop` was true."""
        self._random_states, self._graphs = devices.random_states(), compiled_graphs()
        (self._targets,) = self.mesh.sums(sum(b.num_targets for b in batches))
        if self.token_losses:
            self.token_losses.begin_step()
        found = []
        if self.spread:
            found = self.spread.accumulate(self._pass, batches, 1 / self._targets)
        else:
            for batch in batches:
                if stop():
                    return None
                found.append(self._pass(batch))
        if self.token_losses:
            self.mesh.sum_tensor(self.token_losses.step_2V)
        losses, corrects = zip(*found, strict=True)
        return torch.stack(losses).sum(), torch.stack(corrects).sum()

    def measure(self, loss_sum: Tensor, correct: Tensor) -> None:
        """Loss, accuracy and gradient norm of what was accumulated."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = (
            self.spread.norm(grads)
            if self.spread
            else torch.nn.utils.get_total_norm(grads, foreach=True)
        )
        if (
            self.precision.mode == "fp16"
        ):  # a power of two; unscaling the gradients themselves is `update`'s
            norm = norm / self.precision.scaler.scale(torch.ones_like(norm))
        self._norm = norm
        *totals, self._grad_norm = _read(loss_sum, correct, norm)
        self._loss, self._accuracy = (total / self._targets for total in self.mesh.sums(*totals))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, float, int]:
        """Mean loss, accuracy and number of targets over `batches`, shared by all processes with samples of their own;
        training state is untouched."""
        self.model.eval()
        loss_sum, correct, targets = 0.0, 0.0, sum(batch.num_targets for batch in batches)
        for first in range(
            0, len(batches), self.mesh.data_size
        ):  # as many passes in each: weights may be gathered
            index = first + self.mesh.data_rank
            loss, right = _read(*self._forward(batches[min(index, len(batches) - 1)])[:2])
            if index < len(batches):
                loss_sum, correct = loss_sum + loss, correct + right
        self.model.train()
        loss_sum, correct = self.mesh.sums(loss_sum, correct)
        return loss_sum / targets, correct / targets, targets

    def whole_model(self, config: Config) -> nn.Module | None:
        """All of the model on one device: this process's own, or what rank 0 gathers from all (None on the others)."""
        if self.spread is None or self.spread.is_whole:
            return self.model if self.mesh.is_main else None
        weights, _ = self.spread.state(self.optimizer)
        if not self.mesh.is_main:
            return None
        with torch.random.fork_rng(devices=[]):
            model = build_model(config)
        for encoder in model.encoders:
            self.precision.convert(encoder)
        model.load_state_dict(weights)
        return model

    def leave(self, config: Config) -> None:
        """Rank 0 takes the whole model and goes on alone; for the others the run is over. All processes call this."""
        self._forget_gradients()
        model = self.whole_model(config)
        if model and self.spread:
            if model is not self.model:  # the parts make room for the whole
                self.optimizer.state.clear()
                self.optimizer.param_groups.clear()
                self.parameters, self.model, self.spread = [], nn.Module(), None
            self.model, self.spread, self.mesh = model.to(self.device), None, Mesh.solo(self.device)

    def _forward(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Tensor, ...]:
        batch = batch.to(self.device)
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.precision.autocast():
            found: tuple[Tensor, ...] = (model or self.model)(*batch.inputs)
        return found

    def _pass(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Forward and backward pass of one micro-batch: summed loss and hits; its gradients are added to the others."""
        if self.cuda_graphs:
            for parameter in self.parameters:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
        loss_sum, correct, *each = self._forward(
            batch, self.spread.forward if self.spread else None
        )
        self.precision.scaler.scale(loss_sum / self._targets).backward()
        if self.token_losses:
            self.token_losses.add(batch.target_ids_M, *each)
        if self.cuda_graphs:
            return loss_sum.detach().clone(), correct.clone()
        return loss_sum.detach(), correct

    def _clip_and_apply(self, finite: bool) -> None:
        scaler = self.precision.scaler
        assert self._norm is not None, "update follows forward_backward"
        scaler.unscale_(self.optimizer)
        one_device = (
            len({p.device for p in self.parameters}) == 1
        )  # else some would read the factor before it arrives
        by_update = (
            one_device
            and self.precision.mode != "fp16"
            and bool(self.optimizer.defaults.get("fused"))
        )
        if (
            self.clip is not None and by_update
        ):  # which divides by it on the way: a pass over all gradients less
            self.optimizer.grad_scale = ((self._norm + 1e-6) / self.clip).clamp(min=1)  # type: ignore[attr-defined]
        elif self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters, self.clip, self._norm, foreach=True
            )
        if self.precision.mode == "fp16":
            scaler.step(self.optimizer)  # skips by itself, and halves the scale
            scaler.update()
        elif finite:
            self.optimizer.step()
        if by_update:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]  # a step leaves nothing behind

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.cuda_graphs)
        self._norm = None


def _read(*values: Tensor) -> list[float]:
    """The numbers, for which the host waits once."""
    return torch.stack([value.to(values[0].device, torch.float64) for value in values]).tolist()


def build_engine(config: Config, mesh: Mesh, device: torch.device) -> Engine:
    """What a run and a benchmark train with: a model with random weights and all that `config` applies to it."""
    check(config, Place.here(config, device, mesh.world_size))
    devices.activate_flash(config.attention.flash)
    return equip(place(build_model(config), config.memory, device), config, mesh, device)


def build_model(config: Config) -> PretrainedModel:
    """The plain model, with random weights."""
    objective, how = (
        config.objective,
        (config.attention.kernel, config.attention.last_layer, config.memory.loss_chunk),
    )
    if isinstance(objective, ReplacedTokensConfig):
        from cramming.model.replaced_tokens import ReplacedTokens

        return ReplacedTokens(config.model, objective.generator_width, objective.weight, *how)
    return MaskedLM(config.model, *how, gives_losses=objective.by_loss is not None)


def equip(model: PretrainedModel, config: Config, mesh: Mesh, device: torch.device) -> Engine:
    """The engine around a model that is where it belongs: number format, optimizer, memory tricks, compiler."""
    memory, precision = config.memory, Precision(config.precision, device)
    for encoder in model.encoders:
        precision.convert(encoder)
    spread = apply(model, memory, config.runtime, config.parallel, mesh, precision)
    build, groups = config.optim.build, config.optim.groups(model)
    optimizer: torch.optim.Optimizer
    if memory.offload_optimizer and not (spread and spread.is_on_host):
        from cramming.parallel.offload import CopyStream, build_on_host

        at_home = (
            {p for e in model.encoders for p in e.blocks.parameters()}
            if memory.offload_weights
            else set()
        )
        optimizer = build_on_host(groups, build, CopyStream(device), at_home)
    else:
        optimizer = build(groups)
    cuda_graphs, average, token_losses = config.runtime.cuda_graphs, None, None
    if config.train.average:
        from cramming.optim.average import WeightAverage

        average = WeightAverage(config.train.average, model.parameters())
    if config.objective.by_loss:
        from cramming.data.token_losses import TokenLosses

        vocab_size = model.encoder.embeddings.tokens.num_embeddings
        token_losses = TokenLosses(config.objective.by_loss, vocab_size, device)
    clip = config.optim.clip
    return Engine(
        model, optimizer, precision, clip, mesh, device, cuda_graphs, average, token_losses, spread
    )
