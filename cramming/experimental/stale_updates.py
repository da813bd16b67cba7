"""Exact simulation of asynchronous pipelines in one process: training with the weights that each stage would have.

A pipeline that never drains updates a stage while micro-batches are under way, so a micro-batch meets weights of
different age in each stage, and without a copy of them other weights in the backward pass than in the forward pass.
The result depends on these ages alone. Here the engine trains as usual: every parameter gets the version that its
stage would have before each forward pass and before each backward pass, and the newest version is updated.

Stage s of p, N micro-batches a step; ages count steps.

- `synchronous`: GPipe (Huang et al. 2019), 1F1B with a flush (DAPPLE, Fan et al. 2021): no ages.
- `pipedream`: Narayanan et al. 2019 (PipeDream), section 3.3: each batch passes whole; the gradient of w(t) is that of
  f(w_0(t - p + 1), ..., w_{p-1}(t)): age p - 1 - s in both passes, as old versions are stashed.
- `2bw`: Narayanan et al. 2021 (PipeDream-2BW), section 3.1: two versions, age 1 in every stage and both passes.
- `pipemare`: Yang et al. 2021, table 1: nothing is stashed. A micro-batch is forwarded 2 (p - 1 - s) + 1 slots before
  its backward pass, so at a mean age of (2 (p - 1 - s) + 1) / N; the backward pass has the newest weights.
- `pipemare-t1`, `-t1-t2`: its section 3.1 divides the learning rate by age^(1 - k / K), K steps of annealing; its
  section 3.2 takes the weights of the backward pass back to the forward pass's by their mean velocity times the age.

The loss goes back through the decoder within its forward pass, as in cramming/experimental/pipeline.py.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.engine import Engine
from cramming.experimental.stages import holders
from cramming.hooks import StepResult
from cramming.model.heads import MaskedLM

DECAY = math.exp(-2)  # decay of a velocity over one age (Yang et al. 2021, section 3.2: D = 0.135)


@dataclass(frozen=True)
class Rule:
    """Rule of an asynchronous pipeline.

    `age(s, n)` is the age in steps of the weights of stage s in the forward pass of micro-batch n. With `stashes` the
    backward pass has the same weights.
    """

    age: Callable[["Stages", int, int], int] = lambda stages, stage, micro_batch: 0
    stashes: bool = True
    slows: bool = False  # T1
    corrects: bool = False  # T2


@dataclass(frozen=True)
class Stages:
    """Shape of a pipeline: `number` stages (p), `micro_batches` in each step (N)."""

    number: int
    micro_batches: int

    def slots(self, stage: int) -> int:
        """Return the micro-batches from a forward pass to its backward pass, if both are computed at the same time."""
        return 2 * (self.number - 1 - stage) + 1

    def mean_age(self, stage: int) -> float:
        """Return the mean age in steps of the weights in PipeMare's forward pass (Yang et al. 2021, table 1)."""
        return self.slots(stage) / self.micro_batches


def _slot_age(stages: Stages, stage: int, micro_batch: int) -> int:
    """Return the number of updates between both passes: one after each N-th micro-batch."""
    return math.ceil((stages.slots(stage) - micro_batch) / stages.micro_batches)


RULES: dict[str, Rule] = {
    "synchronous": Rule(),
    "pipedream": Rule(lambda stages, stage, micro_batch: stages.number - 1 - stage),
    "2bw": Rule(lambda stages, stage, micro_batch: 1),
    "pipemare": Rule(_slot_age, stashes=False),
    "pipemare-t1": Rule(_slot_age, stashes=False, slows=True),
    "pipemare-t1-t2": Rule(_slot_age, stashes=False, slows=True, corrects=True),
}


class StaleTraining:
    """Training of an engine under a rule; after `annealing` steps T1 no longer divides the learning rate."""

    def __init__(self, engine: Engine, rule: Rule, stages: Stages, annealing: int) -> None:
        assert isinstance(engine.model, MaskedLM)
        config = engine.model.config
        if config.tie_embeddings or config.convolution or engine.precision.mode != "fp32":
            raise UserError(
                "study pipelines: a tied matrix would belong to two stages, and copies of weights in other number"
                " formats would hide their age. Add model.tie_embeddings=false model.convolution=0 precision=fp32."
            )
        self.engine, self.rule, self.stages, self.annealing = engine, rule, stages, annealing
        named = list(engine.model.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        self.stage_of = [holders(name, config, stages.number)[0] for name, _ in named]
        max_age = max(rule.age(stages, stage, 0) for stage in range(stages.number))
        # versions of all parameters, the newest last
        self.versions: deque[list[Tensor]] = deque([self._copy()], maxlen=max_age + 1)
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = self._micro_batch = 0
        self.is_stale = max_age > 0
        if self.is_stale:
            engine.model.register_forward_pre_hook(self._before_forward)
            engine.model.register_forward_hook(self._before_backward)
            engine.optimizer.register_step_pre_hook(lambda *_: self._set(self.versions[-1]))

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """Make one update from all micro-batches of a step."""
        assert len(batches) == self.stages.micro_batches
        self._micro_batch = 0
        result = self.engine.step(batches, learning_rate)
        if self.is_stale and result.skipped:
            # The pre-hook of the optimizer, which does this otherwise, did not run.
            self._set(self.versions[-1])
        if self.rule.slows:
            self._slow_down()
        if self.is_stale:
            self._note_version()
        self.steps += 1
        return result

    def _slow_down(self) -> None:
        """Apply T1. An update is proportional to the learning rate, so the update is divided instead."""
        power = 1 - min(self.steps / self.annealing, 1.0)
        for parameter, before, stage in zip(self.parameters, self.versions[-1], self.stage_of):
            age = max(self.stages.mean_age(stage), 1.0)  # younger weights do not enlarge the step
            parameter.data.copy_(torch.lerp(before, parameter.data, age**-power))

    def _note_version(self) -> None:
        newest = self._copy()
        for velocity, after, before, stage in zip(
            self.velocity, newest, self.versions[-1], self.stage_of
        ):
            velocity.lerp_(after - before, 1 - DECAY ** (1 / self.stages.mean_age(stage)))
        self.versions.append(newest)

    def _before_forward(self, model: Any, inputs: Any) -> None:
        if not model.training:
            return
        indices = range(len(self.parameters))
        self._set(self._version(index, self._micro_batch) for index in indices)
        self._micro_batch += 1

    def _before_backward(self, model: Any, inputs: Any, outputs: Any) -> None:
        """Set the weights of the backward pass: autograd has saved the parameters themselves, not copies."""
        if not model.training or self.rule.stashes:
            return
        newest = self.versions[-1]
        if not self.rule.corrects:
            self._set(newest)
            return
        corrected = []
        for now, velocity, stage in zip(newest, self.velocity, self.stage_of):
            corrected.append(now - velocity * self.stages.mean_age(stage))
        self._set(corrected)

    def _version(self, index: int, micro_batch: int) -> Tensor:
        """Return the version of a parameter for a forward pass, or the oldest one while none is old enough."""
        age = self.rule.age(self.stages, self.stage_of[index], micro_batch)
        return self.versions[max(-1 - age, -len(self.versions))][index]

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _set(self, values: Any) -> None:
        """Copy values into the parameters without autograd, which would refuse to use changed tensors."""
        for parameter, value in zip(self.parameters, values):
            parameter.data.copy_(value)
