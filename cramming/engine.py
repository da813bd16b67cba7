"""One optimizer step: accumulate micro-batches, scale, clip, update; skip what is not finite.

The loss of a step is the mean over all targets of all its micro-batches on all ranks, so that the result does not
depend on how the batch was cut into micro-batches or spread over devices.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.optim import set_learning_rate
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision
from cramming.runtime import compiled_graphs

MAX_SKIPPED_IN_A_ROW = 50


@dataclass(frozen=True)
class StepStats:
    """What one step did: mean loss in nats per target, share of targets predicted right, global gradient norm.

    `skipped`: the gradient was not finite and no weight moved. `recompilations`: graphs compiled after the first update
    of this process; shapes are static, so there should be none.
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
    ):
        self.model, self.optimizer, self.precision = model, optimizer, precision
        self.clip, self.mesh, self.device = clip, mesh, device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.cuda_graphs = cuda_graphs
        self.update_seconds = 0.0  # of the last step, from the moment that `may_update` is asked to the synchronisation
        self._is_warm = False  # one update is done, so all that compiles has been compiled
        self._skipped_in_a_row = 0

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        may_update: Callable[[], bool] = lambda: True,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> StepStats | None:
        """One update from `batches`.

        None, and untouched weights, if `may_update()` says no (it is asked after the backward pass) or `must_stop()`
        says yes between micro-batches (in one process only: others would wait for this one's gradients). Random states
        are then as before, so that the step can be done anew.
        """
        random_states = devices.random_states()
        graphs = compiled_graphs()
        targets = self.mesh.sum(float(sum(b.num_targets for b in batches)))
        found = self._accumulate(batches, targets, must_stop if self.mesh.world_size == 1 else lambda: False)
        if found is None or not may_update():
            self._forget_gradients()
            devices.set_random_states(random_states)
            return None
        set_learning_rate(self.optimizer, learning_rate)
        began = time.monotonic()
        norm = self._update()
        devices.synchronize(self.device)
        if math.isfinite(norm):  # what was skipped says nothing about how long an update takes
            self.update_seconds = time.monotonic() - began
        loss, accuracy = (self.mesh.sum(value) / targets for value in found)
        self._skipped_in_a_row = 0 if math.isfinite(norm) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"the gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row (loss {loss:.3g}, learning rate"
                f" {learning_rate:.3g}, precision {self.precision.mode}); lower optim.lr or set precision=bf16 or fp32"
            )
        recompilations = compiled_graphs() - graphs if self._is_warm else 0  # the optimizer may compile, too
        self._is_warm = self._is_warm or math.isfinite(norm)
        return StepStats(loss, accuracy, norm, not math.isfinite(norm), recompilations)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch.to(self.device)
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.precision.autocast():
            loss_sum, correct = self.model(
                batch.ids_T,
                batch.positions_T,
                batch.packing,
                batch.target_positions_M,
                batch.target_ids_M,
                batch.token_types_T,
            )
        return loss_sum, correct

    def _accumulate(
        self, batches: Sequence[Batch], targets: float, must_stop: Callable[[], bool]
    ) -> tuple[float, float] | None:
        """Forward and backward passes: summed loss and hits; the gradients are then ready for the update."""
        losses, corrects = [], []
        for batch in batches:
            if must_stop():
                return None
            loss_sum, correct = self._pass(batch, targets)
            losses.append(loss_sum)
            corrects.append(correct)
        self.mesh.sum_gradients(self.parameters)
        return _read(torch.stack(losses).sum(), torch.stack(corrects).sum())

    def _pass(self, batch: Batch, targets: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward pass of one micro-batch: summed loss and hits; its gradients are added to the others."""
        if self.cuda_graphs:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        loss_sum, correct = self._forward(batch)
        self.precision.scaler.scale(loss_sum / targets).backward()
        if self.cuda_graphs:
            return loss_sum.detach().clone(), correct.clone()
        return loss_sum.detach(), correct

    def _update(self) -> float:
        """Clip and apply; the norm is the one before clipping. A norm that is not finite applies nothing."""
        scaler = self.precision.scaler
        scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        length = norm.item()
        finite = math.isfinite(length)
        by_update = self.precision.mode != "fp16" and bool(self.optimizer.defaults.get("fused"))
        if self.clip is not None and by_update:  # which divides by it on the way: a pass over all gradients less
            self.optimizer.grad_scale = ((norm + 1e-6) / self.clip).clamp(min=1)  # type: ignore[attr-defined]
        elif self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm, foreach=True)
        if self.precision.mode == "fp16":
            scaler.step(self.optimizer)  # skips by itself, and halves the scale
            scaler.update()
        elif finite:
            self.optimizer.step()
        if by_update:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]  # a step leaves nothing behind
        self._forget_gradients()
        return length

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.cuda_graphs)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, float, int]:
        """Mean loss, accuracy and number of targets over `batches`; training state is untouched."""
        self.model.eval()
        loss_sum, correct, targets = 0.0, 0.0, 0
        for batch in batches:
            loss, right = _read(*self._forward(batch))
            loss_sum, correct, targets = loss_sum + loss, correct + right, targets + batch.num_targets
        self.model.train()
        return loss_sum / targets, correct / targets, targets


def _read(loss_sum: torch.Tensor, correct: torch.Tensor) -> tuple[float, float]:
    """Both numbers, for which the host waits once."""
    loss, hits = torch.stack((loss_sum.double(), correct.double())).tolist()
    return loss, hits
