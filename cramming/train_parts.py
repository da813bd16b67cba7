"""Parts of a training run that work between its steps: each knows when it is due.

After each step that counts, every rank calls `after_step` of the logger, the validator and the checkpointer, in this
order. What a part decides follows from the plan and the clock alone, which are the same on all ranks.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cramming import checkpoint
from cramming.budget import Work
from cramming.clock import Clock
from cramming.data.batches import Batch, prefetch_batches
from cramming.data.run_data import RunData
from cramming.device import compiled_graphs
from cramming.engine import Engine
from cramming.hooks import StepPlan, StepResult
from cramming.objectives.masking import Targets
from cramming.progress import Progress, format_count, say
from cramming.recipe import Config
from cramming.runlog import (
    RUN_LOG,
    CorpusChanged,
    Event,
    Log,
    Saved,
    Steps,
    Training,
    Validation,
    read_log,
    tokens_per_second,
    training_of,
)

if TYPE_CHECKING:
    from cramming.trackers import Trackers


class BatchStream:
    """This rank's micro-batches, prefetched. Data rank r of w takes every w-th one of a step.

    `waited_seconds`: for which the last `take` had to wait.
    """

    def __init__(self, data: RunData, config: Config, engine: Engine) -> None:
        self.source, self.config, self.engine = data.source, config, engine
        self.waited_seconds = 0.0
        self._stream: Generator[Batch] | None = None
        self._targets: Targets | None = None
        self._weights_V: np.ndarray | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop prefetching."""
        if self._stream:
            self._stream.close()
        self._stream = None

    def take(self, plan: StepPlan) -> list[Batch]:
        """Return the micro-batches of a step. Prefetching starts anew where targets or their weights have changed."""
        timer = self.config.budget.timer
        began = timer()
        weights_V = self.engine.token_weights
        if plan.targets != self._targets or weights_V is not self._weights_V:
            self.__exit__()
        if self._stream is None:
            self._targets, self._weights_V = plan.targets, weights_V
            self._stream = self._stream_from(plan.first_sample)
        batches = [next(self._stream) for _ in range(plan.micro_batches)]
        self.waited_seconds = timer() - began
        return batches

    def _stream_from(self, first_sample: int) -> Generator[Batch]:
        assert self._targets
        source = self.source.with_targets(self._targets, self._weights_V)
        mesh, rows = self.engine.mesh, self.config.train.rows
        per_step = self.config.train.batch_size // (rows * mesh.data_size)

        def make(index: int) -> Batch:
            return source.batch(
                first_sample + (index * mesh.data_size + mesh.data_rank) * rows, rows
            )

        # A GPU has no work before a whole step is there.
        return prefetch_batches(
            make, self.engine.device, max(self.config.runtime.prefetch, per_step)
        )


class Logger:
    """Log, progress bar and trackers of a run. Only rank 0 has a `log`, and `trackers`."""

    def __init__(
        self, config: Config, clock: Clock, log: Log | None, trackers: "Trackers | None"
    ) -> None:
        self.config, self.clock, self.log, self.trackers = config, clock, log, trackers
        self._recent = deque[tuple[float, StepResult]](maxlen=config.train.log_every)
        self._has_new_steps = False
        self._bar: Progress | None = None

    def append(self, event: Event) -> None:
        """Append an event to the log; it is on the disk with the next heartbeat or checkpoint."""
        assert self.log
        self.log.append(event, sync_now=False)

    @contextmanager
    def progress_bar(self, title: str) -> Iterator[None]:
        """Show the share of the budget that is spent, on rank 0."""
        if not self.log:
            yield
            return
        with Progress(title, total=100.0, unit="%", before=100 * self.clock.progress) as self._bar:
            yield
        self._bar = None

    def continue_row(self, training: Training) -> None:
        """Take over the steps of the row that the log has of the last step.

        So the rows of a resumed run are means over as many steps as without the interruption.
        """
        for row in training.steps:
            if row.step == self.clock.work.steps:
                self._recent.extend(_results_of(row))

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Note a step; log the mean of the last ones at every `log_every`-th."""
        if not self.log:
            return
        self._recent.append((plan.progress, result))
        self._has_new_steps = True
        work = self.clock.work
        if self._bar:
            speed = tokens_per_second(work.tokens, work.last_step_seconds) or 0.0
            self._bar.note(
                f"step {work.steps}, loss {result.loss:.2f}, {format_count(speed, 'tokens')}/s,"
                f" lr {self.config.learning_rate(plan.progress):.2g}"
            )
            self._bar.update(100 * self.clock.progress)
        if work.steps % self.config.train.log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Log the steps that are not in the log yet: means over the last ones, and the numbers of each."""
        if not self._has_new_steps:
            return
        self._has_new_steps = False
        work = self.clock.work
        progresses, results = zip(*self._recent, strict=True)
        event = Steps(
            step=work.steps,
            progress=self.clock.progress,
            seconds=work.last_step_seconds,
            tokens=work.tokens,
            loss=finite_or_none(sum(result.loss for result in results) / len(results)),
            accuracy=finite_or_none(sum(result.accuracy for result in results) / len(results)),
            grad_norm=finite_or_none(results[-1].grad_norm),
            lr=self.config.learning_rate(progresses[-1]),
            each_progress=list(progresses),
            each_loss=[finite_or_none(result.loss) for result in results],
            each_accuracy=[finite_or_none(result.accuracy) for result in results],
        )
        speed = tokens_per_second(work.tokens, work.last_step_seconds)
        self.append(event)
        self.track(event, "", {"tokens_per_second": speed})

    def forget_steps(self) -> None:
        """Drop the steps that are not in the log yet: they were rolled back."""
        self._recent.clear()
        self._has_new_steps = False

    def track(
        self, event: Steps | Validation, prefix: str, more: Mapping[str, float | None]
    ) -> None:
        """Send the event's numbers, and `more`, to trackers; names of measurements get the `prefix`."""
        if not self.trackers:
            return
        numbers: dict[str, float] = {}
        for name, value in {**event.model_dump(), **more}.items():
            if isinstance(value, int | float):
                is_place = name in ("step", "progress", "seconds", "tokens")
                numbers[name if is_place else f"{prefix}{name}"] = value
        self.trackers.write(numbers)

    def close(self) -> None:
        """Wait for the trackers."""
        if self.trackers:
            self.trackers.close()


class Validator:
    """Validations on the held-out text, at even points of the budget, in the form that is one for all runs."""

    def __init__(self, config: Config, clock: Clock, logger: Logger, engine: Engine) -> None:
        self.config, self.clock, self.logger, self.engine = config, clock, logger, engine
        self.batches: list[Batch] = []

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Validate on the clock if that is due and leaves time for another step."""
        clock = self.clock
        if not self.is_due() or not clock.has_room_for_validation(plan, len(self.batches)):
            return
        self.logger.flush()
        predicted = clock.predictor.validation_seconds(len(self.batches))
        began, graphs = clock.timer(), compiled_graphs()
        self.validate(clock.progress)
        seconds, has_compiled = clock.timer() - began, compiled_graphs() != graphs
        clock.predictor.note_validation(len(self.batches), seconds, has_compiled)
        if self.logger.log:
            say(f"{clock.where}: validated in {seconds:.1f} s, predicted {predicted:.1f} s")

    def is_due(self) -> bool:
        """Return whether the last step has passed one of the points. The end of the run is validated later."""
        number = self.config.train.validations
        before, now = (
            int(self.clock.progress_before * number),
            int(self.clock.progress * number),
        )
        return before < now < number

    def validate(self, progress: float, more: Mapping[str, Any] | None = None) -> Validation | None:
        """Log and return the loss on the held-out text, with what was measured `more`; None but for rank 0.

        Of a run that detects replaced tokens it is the encoder's loss at that: its generator's would say nothing about
        the encoder. All processes share the work.
        """
        work, objective = self.clock.work, self.config.objective
        loss, accuracy, targets = self.engine.evaluate(self.batches)
        if not (self.clock.budget and self.logger.log):
            return None
        say(
            f"step {work.steps} ({progress:.0%} of the budget): {objective.validation_name} {loss:.3f},"
            f" accuracy {accuracy:.3f}"
        )
        measured: dict[str, Any] = {
            f"{objective.validation_prefix}loss": finite_or_none(loss),
            f"{objective.validation_prefix}accuracy": finite_or_none(accuracy),
        }
        event = Validation(
            step=work.steps,
            progress=progress,
            seconds=self.clock.budget.elapsed_seconds(),
            tokens=work.tokens,
            targets=int(targets),
            **measured,
            **(more or {}),
        )
        self.logger.append(event)
        self.logger.track(event, "validation_", {})
        return event


class Checkpointer:
    """Checkpoints of a run, and what it rolls back to. `saved_steps`: of the newest one, 0 if there is none."""

    def __init__(
        self, folder: Path, data: RunData, clock: Clock, logger: Logger, engine: Engine
    ) -> None:
        self.folder, self.data, self.clock, self.logger = folder, data, clock, logger
        self.engine, self.config = engine, clock.config.checkpoint
        self.saved_steps = clock.work.steps
        self.changed_files: dict[str, bool | None] = {}
        self._saver = checkpoint.Saver()
        self._saved_at = clock.now
        self._progress = clock.progress_of_work

    def __enter__(self) -> Self:
        """Keep the state before the first step, if `checkpoint.keep_at` has 0."""
        self._saver.__enter__()
        if not self.clock.work.steps and self.config.is_to_keep(-1.0, 0.0):
            self.save(is_kept=True)
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait for the last checkpoint; its error is raised unless another is already under way."""
        self._saver.__exit__(*error)

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Save if that is due; raise the error of a checkpoint that could not be written."""
        self._saver.check()
        clock = self.clock
        is_kept = self.config.is_to_keep(self._progress, clock.progress)
        self._progress = clock.progress
        is_due = self.config.is_due(clock.work.steps, clock.now - self._saved_at)
        if is_due or is_kept or clock.is_near_the_end():
            self.logger.flush()  # so the log knows of each step in a checkpoint
            self.save(is_kept)
            self._saved_at = clock.now

    def save(self, is_kept: bool = False) -> None:
        """Save the present state; of all processes, which all call this, rank 0 writes.

        The file may be complete only later (`checkpoint.Saver`).
        """
        budget, work = self.clock.budget, self.clock.work
        log_sha256: Callable[[str], None] = _log_nothing
        if budget:
            self.note_changed_files()
            log_sha256 = partial(budget.enter_checkpoint, step=work.steps, retained=is_kept)
        self._saver.save(self.folder / "checkpoints", self.engine, work, log_sha256, is_kept)
        self.saved_steps = work.steps

    def save_last(self) -> None:
        """Save the state at the end, if that is not done."""
        if self.clock.work.steps != self.saved_steps:
            self.save()

    def roll_back(self) -> None:
        """Return to the newest checkpoint, or to no work at all: the step just done ended too late."""
        folder, clock, saved = self.folder / "checkpoints", self.clock, None
        self._saver.wait()
        self.logger.forget_steps()
        if clock.budget:
            saved = checkpoint.newest_of(folder, training_of(read_log(self.folder / RUN_LOG)).saved)
            say(
                f"step {clock.work.steps + 1} ended {-clock.budget.seconds_left():.1f} s after the deadline and is not"
                f" kept: rolled back to step {saved.steps if saved else 0}"
            )
        saved = self.engine.mesh.object_from_main(saved)
        work = self._load(saved)
        clock.roll_back(work, saved.sha256 if saved else None)

    def _load(self, saved: Saved | None) -> Work:
        if not saved or not saved.steps:
            return Work()
        return checkpoint.load(checkpoint.path_of(self.folder / "checkpoints", saved), self.engine)

    def note_changed_files(self, *, is_last: bool = False) -> None:
        """Log which files of the corpora have changed; see `RunData.changed_files`."""
        changed = self.data.changed_files(self.changed_files, last=is_last)
        if changed:
            self.changed_files |= changed
            self.logger.append(CorpusChanged(files=changed))


def finite_or_none(value: float) -> float | None:
    """Return the number as a float, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def _log_nothing(sha256: str) -> None:
    """Do nothing: only rank 0 has a log."""


def _results_of(row: Steps) -> Iterator[tuple[float, StepResult]]:
    """Yield each step of a row of the log with the progress at which it began."""
    numbers = zip(row.each_progress, row.each_loss, row.each_accuracy, strict=True)
    for progress, loss, accuracy in numbers:
        result = StepResult(
            loss=math.nan if loss is None else loss,
            accuracy=math.nan if accuracy is None else accuracy,
            grad_norm=math.nan,
            skipped=False,
        )
        yield progress, result
