"""One optimizer step: accumulate micro-batches, clip, update; skip what is not finite.

The loss of a step is the mean over all targets of all its micro-batches on all ranks, so that the result does not
depend on how the batch was cut into micro-batches or spread over devices. A step has two halves, between which the
training loop asks the clock: `forward_backward`, then `update` or `discard`. In one process the host waits for the
device once in each; several also wait for each other: for the number of targets, the sums, and the end of the update.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.device import compiled_graphs
from cramming.hooks import Hook, StepPlan, StepResult
from cramming.model.heads import PretrainedModel
from cramming.optim.build import set_learning_rate
from cramming.parallel.apply import apply, move_weights
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision
from cramming.recipe import Config, Hardware, check

if TYPE_CHECKING:
    from cramming.parallel.data_parallel import ParallelStrategy

MAX_SKIPPED_IN_A_ROW = 50


class DivergedError(UserError):
    """No gradient was finite any more: the run ends without a model."""


@dataclass
class Gradients:
    """Gradients of one step, which lie in the parameters' `grad`, and the numbers that belong to them.

    `random_states`, `compiled_graphs`: before the step. `targets`: of all ranks. `is_whole`: all micro-batches are in
    them. The rest is measured: sums over this rank's targets and the global norm on the device, and for the host mean
    loss, accuracy and norm over all ranks.
    """

    random_states: tuple[Tensor, Tensor | None]
    compiled_graphs: int
    targets: float
    is_whole: bool = False
    loss_sum: Tensor = field(init=False, repr=False)
    correct: Tensor = field(init=False, repr=False)
    device_norm: Tensor = field(init=False, repr=False)
    loss: float = field(init=False, repr=False)
    accuracy: float = field(init=False, repr=False)
    norm: float = field(init=False, repr=False)


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
        hooks: Sequence[Hook] = (),
        strategy: "ParallelStrategy | None" = None,
    ):
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.clip, self.mesh, self.device = clip, mesh, device
        self.parameters = list(model.parameters())
        self.cuda_graphs = cuda_graphs
        self.hooks, self.strategy = hooks, strategy
        self._targets = 1.0  # of the step under way, over all ranks
        self._is_warm = False  # one update is done, so all that compiles has been compiled
        self._skipped_in_a_row = 0

    @property
    def token_weights(self) -> np.ndarray | None:
        """Frequency of each id as a target [V] from the first hook that has one, or None."""
        for hook in self.hooks:
            if hook.token_weights_V is not None:
                return hook.token_weights_V
        return None

    def forward_backward(
        self, batches: Sequence[Batch], stop: Callable[[], bool] = lambda: False
    ) -> "Gradients":
        """Return the gradients of the mean loss over all `batches` of all ranks; `update` or `discard` takes them.

        They are not whole if `stop` was true between two micro-batches, and can then only be discarded. This happens in
        a single process only, because others would wait for the gradients.
        """
        gradients = self.accumulate(batches, stop)
        if gradients.is_whole:
            self.measure(gradients)
        return gradients

    def update(self, gradients: "Gradients", learning_rate: float) -> StepResult:
        """Clip, apply the gradients, and wait for the device. Gradients that are not finite change nothing."""
        set_learning_rate(self.optimizer, learning_rate)
        is_finite = math.isfinite(gradients.norm)
        self._clip_and_apply(gradients, is_finite)
        self._clear_gradients()
        devices.synchronize(self.device)
        if self.strategy:
            if not is_finite:
                self.strategy.forget()
            self.mesh.barrier()  # the step is done when all have done it
        self._count_skipped(gradients, learning_rate, is_finite)
        recompilations = 0
        if self._is_warm:  # the optimizer may compile, too
            recompilations = compiled_graphs() - gradients.compiled_graphs
        self._is_warm = self._is_warm or is_finite
        return StepResult(
            gradients.loss, gradients.accuracy, gradients.norm, not is_finite, recompilations
        )

    def _count_skipped(self, gradients: "Gradients", learning_rate: float, is_finite: bool) -> None:
        self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row (loss {gradients.loss:.3g},"
                f" learning rate {learning_rate:.3g}, precision {self.precision.mode}). Lower optim.lr, or do without"
                " fp16 (precision=bf16 or fp32, parallel.compression=bf16 or none)."
            )

    def discard(self, gradients: "Gradients") -> None:
        """Clear the gradients and restore the random states, so that the same step can be done anew."""
        self._clear_gradients()
        devices.set_random_states(gradients.random_states)

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """Do a whole step where no clock runs: benchmarks and tests."""
        return self.update(self.forward_backward(batches), learning_rate)

    def accumulate(
        self, batches: Sequence[Batch], stop: Callable[[], bool] = lambda: False
    ) -> "Gradients":
        """Return the gradients of all micro-batches, not yet measured; not whole if `stop` was true."""
        (targets,) = self.mesh.sums(sum(b.num_targets for b in batches))
        self._targets = max(1.0, targets)  # a damaged corpus may have none
        gradients = Gradients(devices.random_states(), compiled_graphs(), self._targets)
        sums: list[tuple[Tensor, Tensor]] = []
        if self.strategy:
            sums = self.strategy.accumulate(self._pass, batches, 1 / self._targets)
        else:
            for batch in batches:
                if stop():
                    return gradients
                sums.append(self._pass(batch))
        losses, corrects = zip(*sums, strict=True)
        gradients.loss_sum, gradients.correct = (
            torch.stack(losses).sum(),
            torch.stack(corrects).sum(),
        )
        gradients.is_whole = True
        return gradients

    def measure(self, gradients: "Gradients") -> None:
        """Compute loss, accuracy and norm of the gradients; the host waits for the device."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self.strategy:
            norm = self.strategy.norm(grads)
        else:
            norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        if self.precision.mode == "fp16":  # a power of two; `update` unscales the gradients
            norm = norm / self.precision.scaler.scale(torch.ones_like(norm))
        gradients.device_norm = norm
        *sums, gradients.norm = _read(gradients.loss_sum, gradients.correct, norm)
        loss_sum, correct = self.mesh.sums(*sums)
        gradients.loss = loss_sum / gradients.targets
        gradients.accuracy = correct / gradients.targets

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, float, int]:
        """Return mean loss, accuracy and number of targets over `batches`, without changing the training state.

        The processes with different samples share the batches.
        """
        self.model.eval()
        loss_sum, correct, targets = 0.0, 0.0, sum(batch.num_targets for batch in batches)
        # The number of passes is the same in each process, because weights may be gathered.
        for first in range(0, len(batches), self.mesh.data_size):
            index = first + self.mesh.data_rank
            loss, right = _read(*self._forward(batches[min(index, len(batches) - 1)])[:2])
            if index < len(batches):
                loss_sum, correct = loss_sum + loss, correct + right
        self.model.train()
        loss_sum, correct = self.mesh.sums(loss_sum, correct)
        return loss_sum / targets, correct / targets, targets

    def whole_model(self, config: Config) -> nn.Module | None:
        """All of the model on one device: this process's own, or what rank 0 gathers from all (None on the others)."""
        if self.strategy is None or self.strategy.is_whole:
            return self.model if self.mesh.is_main else None
        weights, _ = self.strategy.state(self.optimizer)
        if not self.mesh.is_main:
            return None
        with torch.random.fork_rng(devices=[]):
            model = build_model(config)
        for encoder in model.encoders:
            self.precision.convert(encoder)
        model.load_state_dict(weights)
        return model

    def leave(self, config: Config) -> None:
        """Give rank 0 the whole model, with which it continues alone. All processes call this; the others end."""
        self._clear_gradients()
        model = self.whole_model(config)
        if model and self.strategy:
            if model is not self.model:  # the parts make room for the whole
                self.optimizer.state.clear()
                self.optimizer.param_groups.clear()
                self.parameters, self.model, self.strategy = [], nn.Module(), None
            self.model, self.strategy, self.mesh = (
                model.to(self.device),
                None,
                Mesh.solo(self.device),
            )

    def _forward(self, batch: Batch, model: Callable[..., Any] | None = None) -> tuple[Tensor, ...]:
        batch = batch.to(self.device)
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.precision.autocast():
            outputs: tuple[Tensor, ...] = (model or self.model)(*batch.inputs)
        return outputs

    def _pass(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run forward and backward pass of one micro-batch, add its gradients, and return summed loss and hits."""
        if self.cuda_graphs:
            for parameter in self.parameters:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
        loss_sum, correct, *outputs = self._forward(
            batch, self.strategy.forward if self.strategy else None
        )
        self.precision.scaler.scale(loss_sum / self._targets).backward()
        for hook in self.hooks:
            hook.after_pass(batch.target_ids_M, tuple(outputs))
        if self.cuda_graphs:
            return loss_sum.detach().clone(), correct.clone()
        return loss_sum.detach(), correct

    def _clip_and_apply(self, gradients: "Gradients", is_finite: bool) -> None:
        scaler, norm, is_fp16 = (
            self.precision.scaler,
            gradients.device_norm,
            self.precision.mode == "fp16",
        )
        scaler.unscale_(self.optimizer)
        has_one_device = len({p.device for p in self.parameters}) == 1
        # The optimizer then divides by the factor on the way, which saves a pass over all gradients. Parameters on a
        # second device would be updated before the factor arrives there.
        by_update = has_one_device and not is_fp16 and bool(self.optimizer.defaults.get("fused"))
        if self.clip is not None and by_update:
            self.optimizer.grad_scale = ((norm + 1e-6) / self.clip).clamp(min=1)  # type: ignore[attr-defined]
        elif self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm, foreach=True)
        if is_fp16:
            scaler.step(self.optimizer)  # skips a step that is not finite, and halves the scale
            scaler.update()
        elif is_finite:
            self.optimizer.step()
        if by_update:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]  # a step leaves nothing behind

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.cuda_graphs)


def _read(*values: Tensor) -> list[float]:
    """Return the values of scalar tensors, with a single synchronization."""
    return torch.stack([value.to(values[0].device, torch.float64) for value in values]).tolist()


def build_engine(config: Config, mesh: Mesh, device: torch.device) -> Engine:
    """Return the engine of a run or a benchmark: a model with random weights and everything `config` applies to it."""
    check(config, Hardware.here(config, device, mesh.world_size))
    devices.activate_flash(config.attention.flash)
    return equip(move_weights(build_model(config), config.memory, device), config, mesh, device)


def build_model(config: Config) -> PretrainedModel:
    """Return the plain model of the objective, with random weights."""
    return config.objective.build_model(
        config.model,
        kernel=config.attention.kernel,
        last_layer=config.attention.last_layer,
        loss_chunk=config.memory.loss_chunk,
    )


def equip(model: PretrainedModel, config: Config, mesh: Mesh, device: torch.device) -> Engine:
    """Return the engine of a model on its device, with number format, optimizer, memory settings and compiler."""
    memory, precision = config.memory, Precision(config.precision, device)
    for encoder in model.encoders:
        precision.convert(encoder)
    strategy = apply(model, memory, config.runtime, config.parallel, mesh, precision)
    build, groups = config.optim.build, config.optim.groups(model)
    optimizer: torch.optim.Optimizer
    if memory.offload_optimizer and not (strategy and strategy.is_on_host):
        from cramming.parallel.offload import CopyStream, block_parameters, build_on_host

        host_parameters = block_parameters(model.encoders) if memory.offload_weights else set()
        optimizer = build_on_host(groups, build, CopyStream(device), host_parameters)
    else:
        optimizer = build(groups)
    return Engine(
        model,
        optimizer,
        precision,
        config.optim.clip,
        mesh,
        device,
        cuda_graphs=config.runtime.cuda_graphs,
        hooks=build_hooks(config, model, mesh, strategy),
        strategy=strategy,
    )


class StrategySeeds(Hook):
    """Seeds of what a parallel strategy draws in each step."""

    def __init__(self, strategy: "ParallelStrategy", seed: int) -> None:
        self.strategy, self.seed = strategy, seed

    def before_step(self, plan: StepPlan) -> None:
        """Seed the step by the run's seed and the step's number."""
        self.strategy.begin_step(self.seed, plan.index)


def build_hooks(
    config: Config, model: PretrainedModel, mesh: Mesh, strategy: "ParallelStrategy | None"
) -> list[Hook]:
    """Return what the configuration does around training steps."""
    vocab_size = model.encoder.embeddings.tokens.num_embeddings
    hooks = config.objective.hooks(vocab_size, mesh.device, mesh.sum_tensor)
    if strategy:
        hooks.append(StrategySeeds(strategy, config.training_seed))
    if config.train.average:
        from cramming.optim.average import WeightAverage

        hooks.append(WeightAverage(config.train.average, model.parameters()))
    return hooks
