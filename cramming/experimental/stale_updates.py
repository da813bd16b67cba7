"""Training as asynchronous pipelines do it, simulated exactly in one process: the weights that each stage would have.

A pipeline that never drains updates a stage while micro-batches are under way, so a micro-batch meets weights of
different age in each stage, and without a copy of them other weights in the backward pass than in the forward pass.
What comes out depends on nothing but these ages. Here the engine trains as ever; before each forward pass every
parameter gets the version that its stage would have, before the backward pass that of then, and the newest is updated.

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

DECAY = math.exp(-2)  # of a velocity over one age (Yang et al. 2021, section 3.2: D = 0.135)


@dataclass(frozen=True)
class Rule:
    """`age(s, n)`: how many steps old the weights are that stage s has in the forward pass of micro-batch n. With
    `stashes` the backward pass has the same."""

    age: Callable[["Stages", int, int], int] = lambda stages, stage, micro_batch: 0
    stashes: bool = True
    slows: bool = False  # T1
    corrects: bool = False  # T2


@dataclass(frozen=True)
class Stages:
    """p stages, N micro-batches a step."""

    number: int
    micro_batches: int

    def slots(self, stage: int) -> int:
        """Micro-batches from a forward pass to its backward pass, where both ways are computed at the same time."""
        return 2 * (self.number - 1 - stage) + 1

    def mean_age(self, stage: int) -> float:
        """Of the weights in PipeMare's forward pass (Yang et al. 2021, table 1), in steps."""
        return self.slots(stage) / self.micro_batches


def _slot_age(stages: Stages, stage: int, micro_batch: int) -> int:
    """Updates between both passes: one after each N-th micro-batch."""
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
    """Steps of an engine under a rule. `annealing`: the steps after which T1 no longer divides the learning rate."""

    def __init__(self, engine: Engine, rule: Rule, stages: Stages, annealing: int) -> None:
        assert isinstance(engine.model, MaskedLM)
        config = engine.model.config
        if config.tie_embeddings or config.convolution or engine.precision.mode != "fp32":
            raise UserError(
                "study pipelines: a tied matrix would be of two stages, and a copy of weights in other numbers hides"
                " their age; add model.tie_embeddings=false model.convolution=0 precision=fp32"
            )
        self.engine, self.rule, self.stages, self.annealing = engine, rule, stages, annealing
        named = list(engine.model.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        self.stage_of = [holders(name, config, stages.number)[0] for name, _ in named]
        most = max(rule.age(stages, stage, 0) for stage in range(stages.number))
        self.versions: deque[list[Tensor]] = deque(
            [self._copy()], maxlen=most + 1
        )  # the newest last
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = self._micro_batch = 0
        self.is_stale = most > 0
        if self.is_stale:
            engine.model.register_forward_pre_hook(self._before_forward)
            engine.model.register_forward_hook(self._before_backward)
            engine.optimizer.register_step_pre_hook(lambda *_: self._set(self.versions[-1]))

    def step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One update, from all the micro-batches of a step."""
        assert len(batches) == self.stages.micro_batches, "the ages are those of as many"
        self._micro_batch = 0
        result = self.engine.step(batches, learning_rate)
        if self.is_stale and result.skipped:
            self._set(self.versions[-1])  # as the optimizer, which begins with the newest, did not
        if self.rule.slows:
            self._slow_down()
        if self.is_stale:
            self._note_version()
        self.steps += 1
        return result

    def _slow_down(self) -> None:
        """T1. An update is in proportion to the learning rate, so it is divided in its place."""
        power = 1 - min(self.steps / self.annealing, 1.0)
        for parameter, before, stage in zip(self.parameters, self.versions[-1], self.stage_of):
            age = max(
                self.stages.mean_age(stage), 1.0
            )  # a younger one is no reason to take a larger step
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
        self._set(self._version(place, self._micro_batch) for place in range(len(self.parameters)))
        self._micro_batch += 1

    def _before_backward(self, model: Any, inputs: Any, found: Any) -> None:
        """What autograd has saved are the parameters themselves, so the backward pass sees what is put there."""
        if not model.training or self.rule.stashes:
            return
        self._set(
            now - self.velocity[place] * self.stages.mean_age(stage) if self.rule.corrects else now
            for place, (now, stage) in enumerate(zip(self.versions[-1], self.stage_of))
        )

    def _version(self, place: int, micro_batch: int) -> Tensor:
        """Of a parameter, for a forward pass; the first there is, while there are no older ones."""
        age = self.rule.age(self.stages, self.stage_of[place], micro_batch)
        return self.versions[max(-1 - age, -len(self.versions))][place]

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _set(self, values: Any) -> None:
        """Without autograd's knowledge, which would refuse to use what it has saved."""
        for parameter, value in zip(self.parameters, values):
            parameter.data.copy_(value)
