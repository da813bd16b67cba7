"""The clock of training as every rank sees it.

Only rank 0 reads time, by its `BudgetClock`; what it answers is exchanged here, so that all ranks decide the same.
"""

import time
from collections.abc import Callable
from typing import Literal

from cramming.budget import BudgetClock, StepTimePredictor, Work
from cramming.device import compiled_graphs
from cramming.hooks import StepPlan, StepResult
from cramming.parallel.mesh import Mesh
from cramming.progress import say
from cramming.recipe import Config
from cramming.schedule import sequences_per_step

EndOfTraining = Literal["finished", "stopped"]


class Clock:
    """Progress of training, and whether the next step, update or validation fits into the budget.

    `work`: all steps that are in the weights. `progress` and `progress_before`: shares of the budget when the last step
    and the one before it had ended; `now`: seconds of a monotonic timer then, the largest of all ranks.
    `progress_of_work`: share at which the work that this process continues had ended. `end_reason`: why training ended,
    once it has. `stop_requested`: whether this rank is to stop.
    """

    def __init__(
        self,
        budget: BudgetClock | None,
        config: Config,
        mesh: Mesh,
        work: Work,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.budget, self.config, self.mesh, self.work = budget, config, mesh, work
        self.stop_requested = stop_requested
        self.end_reason: EndOfTraining = "finished"
        self.timer = config.budget.timer
        self.predictor = StepTimePredictor(budget.slowest_update_seconds if budget else 0.0)
        answers = (budget.progress(), budget.progress_of_work()) if budget else (0.0, 0.0)
        self.progress, self.progress_of_work, self.now = mesh.max(*answers, time.monotonic())
        self.progress_before = self.progress
        self.has_ended = bool(mesh.from_main(bool(budget and budget.has_ended)))
        self._began = self._update_began = self._update_seconds = 0.0
        self._graphs = 0

    def plan(self, progress: float) -> StepPlan:
        """Return the step that the schedule asks for at this progress."""
        train = self.config.train
        sequences = sequences_per_step(train.batch_ramp, progress, train.batch_size)
        tokens = sequences * train.sequence_length
        return StepPlan(
            index=self.work.steps,
            first_sample=self.work.sequences,
            progress=progress,
            sequences=sequences,
            tokens=tokens,
            micro_batches=sequences // (train.rows * self.mesh.data_size),
            flops=tokens * self.config.flops_per_token(progress),
            targets=self.config.objective.at(progress),
        )

    def next_step(self) -> StepPlan | None:
        """Return the next step, or None where none fits into the budget or a rank is to stop."""
        progress, fits = 0.0, False
        if self.budget:
            progress = self.budget.progress()
            plan = self.plan(progress)
            fits = self.budget.has_room_for(
                seconds=self.predictor.step_seconds(plan.micro_batches),
                tokens=plan.tokens,
                flops=plan.flops,
            )
        progress, *answers = self.mesh.max(progress, fits, self.stop_requested())
        fits, is_stopped = map(bool, answers)
        if is_stopped or not fits:
            self.end_reason = "stopped" if fits else "finished"
            return None
        self._began, self._graphs = self.timer(), compiled_graphs()
        return self.plan(progress)

    def allows_update(self, is_whole: bool) -> bool:
        """Return whether an update that begins now ends before the deadline; False for gradients that are not whole."""
        self._update_began = self.timer()
        fits = False
        if self.budget and is_whole:
            fits = self.budget.has_room_for_update(self.predictor.update_seconds())
        fits, is_stopped = map(bool, self.mesh.max(fits, self.stop_requested()))
        if not fits and is_stopped:
            self.end_reason = "stopped"
        return fits

    def commit(self, plan: StepPlan, result: StepResult, data_wait_seconds: float) -> bool:
        """Count a step that has ended; return False, and count nothing, if that was after the deadline."""
        if not result.skipped:  # a skipped one says nothing about how long an update takes
            self._update_seconds = self.timer() - self._update_began
        is_late, progress = False, 0.0
        if self.budget:
            is_late = not self.budget.step_synchronised(self._update_seconds)
        if not is_late:
            self._count(plan, result, data_wait_seconds)
        if self.budget:
            progress = self.budget.progress()
        any_late, progress, now = self.mesh.max(is_late, progress, time.monotonic())
        if any_late:
            return False
        self.progress_before, self.progress, self.now = self.progress, progress, now
        return True

    def _count(self, plan: StepPlan, result: StepResult, data_wait_seconds: float) -> None:
        done = Work(
            steps=1,
            sequences=plan.sequences,
            tokens=plan.tokens,
            flops=plan.flops,
            skipped_steps=result.skipped,
            data_wait_seconds=data_wait_seconds,
            recompilations=result.recompilations,
        )
        self.work.add(done)
        seconds = self.timer() - self._began
        has_compiled = compiled_graphs() != self._graphs
        self.predictor.note(plan.micro_batches, seconds, self._update_seconds, has_compiled)

    def passed(self, share: float) -> bool:
        """Return whether this share of the budget was reached between the ends of the last two steps."""
        return self.progress_before < share <= self.progress

    def is_near_the_end(self) -> bool:
        """Return whether 99 % of a budget of hours were reached in the last step.

        Time to save: a later step that ends too late then costs no more than a hundredth.
        """
        return self.config.budget.unit == "hours" and self.passed(0.99)

    def has_room_for_validation(self, plan: StepPlan, batches: int) -> bool:
        """Return whether a validation leaves time for another step like `plan`; say so where it does not."""
        has_room = True
        if self.budget:
            predicted, left = self.predictor.validation_seconds(batches), self.budget.seconds_left()
            has_room = predicted + self.predictor.step_seconds(plan.micro_batches) <= left
            if not has_room:
                say(
                    f"{self.where}: no validation, which would take about {predicted:.0f} s of the {left:.0f} s left"
                    " (train.validations, train.validation_tokens)"
                )
        return bool(self.mesh.from_main(has_room))

    @property
    def where(self) -> str:
        """The last step and its progress in words."""
        return f"step {self.work.steps} ({self.progress:.0%} of the budget)"

    def roll_back(self, work: Work, sha256: str | None) -> None:
        """Continue with the work of the checkpoint with this SHA-256, or with none."""
        self.work = work
        if self.budget:
            self.budget.attach(work, sha256)
