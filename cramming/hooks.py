"""Hooks: work around the steps of training that not every run has, such as a mean of the weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from cramming.objectives.masking import Targets


@dataclass(frozen=True)
class StepPlan:
    """The next step: counts over all ranks, but `micro_batches` of this rank.

    `index`: number of steps before it; `first_sample`: index of its first sequence; `progress`: share of the budget at
    which it begins.
    """

    index: int
    first_sample: int
    progress: float
    sequences: int
    tokens: int
    micro_batches: int
    flops: float
    targets: "Targets"


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step: mean loss in nats per target, share of targets predicted right, global gradient norm.

    With objective=rtd the loss is the weighted sum of both models', and the accuracy that of telling replaced tokens.
    `skipped`: the gradient was not finite and no weight moved. `recompilations`: graphs compiled after the first update
    of this process; shapes change with a phase of the objective only, so there should be no others.
    """

    loss: float
    accuracy: float
    grad_norm: float
    skipped: bool
    recompilations: int = 0


class Hook:
    """Base class of hooks. All processes call each method at the same points.

    `name`: of its state in checkpoints; None where it has none. `token_weights_V`: how often each id is a target beside
    others, read after `before_step`; None: all alike.
    """

    name: ClassVar[str | None] = None
    token_weights_V: "np.ndarray | None" = None

    def before_step(self, plan: StepPlan) -> None:
        """Prepare a step, before its batches are taken. The step before it may have been discarded."""

    def after_pass(self, target_ids_M: "Tensor", outputs: "tuple[Tensor, ...]") -> None:
        """Note what a micro-batch's forward pass returned beside loss and hits, after its backward pass."""

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Follow an update, inside the time that the step is charged for. `result.skipped`: no weight moved."""

    def finish(self) -> str | None:
        """Change the weights of a finished run before they are validated; return a line about it."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the hook."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state of a checkpoint."""
