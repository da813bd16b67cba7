"""The timed part: train a masked language model from scratch inside a budget.

`train` is the experiment: one loop without callbacks. What it works with is built in cramming/train_state.py; how a run
ends is in cramming/finish.py. The clock (cramming/budget.py) runs since the operating system started this process;
what is charged ends with the last kept step (`step_synchronised` in `train`), and `train_and_save` logs the end.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from cramming import device as devices
from cramming.budget import BudgetClock, Pace, Work
from cramming.checks import Config, TrainConfig, check_run
from cramming.config import UserError, choose
from cramming.data.batches import Batch, prefetch_batches
from cramming.data.manifest import MANIFEST, corpus_folder
from cramming.data.masking import ObjectiveConfig
from cramming.device import compiled_graphs
from cramming.engine import DivergedError, StepStats
from cramming.finish import finish, out_of_memory
from cramming.parallel.mesh import STRATEGIES, Mesh, data_size, launched_processes
from cramming.progress import Progress, format_count, say
from cramming.record import load_record, run_folder
from cramming.runlog import EndReason
from cramming.schedule import learning_rate_factor, sequences_per_step
from cramming.train_state import (
    RunData,
    TrainState,
    build_train_state,
    fit_to_corpus,
)

BrokenRules = Callable[[Mapping[str, Any]], list[str]]


class StopRequest:
    """Turns the first SIGTERM or Ctrl-C into an orderly end at the next step; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def is_set(self) -> bool:
        return self.signal is not None


def main(settings: dict[str, Any], clock: BudgetClock | None, broken_rules: BrokenRules) -> None:
    """Train in one process of a run. `clock` is rank 0's, and None on the other ranks (cramming/launch.py)."""
    stop = StopRequest()
    device = devices.select(settings["device"])
    mesh = Mesh(choose(STRATEGIES, settings["parallel"], "parallel"), device)
    folder = run_folder(settings)
    state = build_train_state(settings, folder, mesh, mesh.device, clock)
    if clock and not clock.has_ended:
        state.announce()
        if settings["division"] == "closed":
            warn(state, broken_rules)
    reason = train_and_finish(state, stop)
    mesh.close()
    if reason != "stopped":
        return
    if clock:
        said = f"stopped after {state.work.steps} steps; resume with resume=true"
        if not clock.has_trained:  # somebody saw a mistake in what was announced
            said = "stopped before the first step; the name is free again"
        say(f"{folder}: {said}")
    raise SystemExit(128 + int(stop.signal or signal.SIGTERM))


def check(settings: dict[str, Any]) -> None:
    """UserError for what can be known to be wrong before training; nothing is written."""
    run_folder(settings)
    config, processes = Config.of(settings), launched_processes()
    if (
        processes > 1
    ):  # one alone may ask about a run of several, of which it does not know how many
        data_size(config.parallel, processes)
    check_run(settings, config, devices.select(settings["device"]), processes)
    if (
        corpus_folder(settings) / MANIFEST
    ).is_file():  # its shards are hashed when the run begins, not here
        fit_to_corpus(config.model, RunData.open(settings, config, verify=False).corpus)


def train_and_finish(state: TrainState, stop: StopRequest) -> EndReason:
    """Train, save, complete the record; of a run that was killed after its end, only the record is to be completed."""
    mesh = state.mesh
    reason: EndReason = "finished"
    problem: DivergedError | None = None
    if not mesh.from_main(bool(state.clock and state.clock.has_ended)):
        try:
            reason = train_and_save(state, stop)
        except DivergedError as error:
            reason, problem = "diverged", error
    if reason == "finished":
        state.engine.leave(state.config)
    try:
        if mesh.is_main:
            finish(state, reason, problem)
    finally:
        if state.trackers:
            state.trackers.close()
        mesh.barrier()
    return reason


def train_and_save(state: TrainState, stop: StopRequest) -> EndReason:
    """Train on the clock. A run has ended once its last checkpoint is saved, not before."""
    reason: EndReason = "failed"
    try:
        with state.saver:
            ended = train(state, stop.is_set)
            if state.work.steps != state.saved_steps:
                state.save_checkpoint()
        reason = ended
    except DivergedError:
        reason = "diverged"
        raise
    except Exception as error:
        if devices.is_out_of_memory(error):
            raise out_of_memory(state) from None
        if devices.is_recompile_limit(error):
            raise UserError(
                f"runtime.compile={state.config.runtime.compile}: more than {devices.MAX_VARIANTS} variants of one"
                " function were to be compiled; set runtime.compile=off, and report this as a defect"
            ) from None
        raise
    finally:
        if state.clock:
            state.clock.close(reason)
    return reason


def train(state: TrainState, stop: Callable[[], bool], title: str = "pretrain") -> EndReason:
    """The experiment. Returns why it ended: "stopped" once `stop` is true, on any rank."""
    work, config, mesh, clock, engine = (
        state.work,
        state.config,
        state.mesh,
        state.clock,
        state.engine,
    )
    objective = config.objective.at(0.0)
    batches = micro_batch_stream(state, objective)
    pace = Pace(clock.slowest_update_seconds if clock else 0.0)
    recent = deque[tuple[float, StepStats]](
        maxlen=config.train.log_every
    )  # each with what it began at
    timer = config.budget.timer
    began = last_save = time.monotonic()
    is_logged, tokens_at_start, reached, update_seconds = (
        True,
        work.tokens,
        clock.progress() if clock else 0.0,
        0.0,
    )
    saved_for_good = clock.progress_of_work() if clock else 0.0
    reason: EndReason = "finished"

    if not work.steps and config.checkpoint.is_to_keep(-1.0, 0.0):
        state.save_checkpoint(kept=True)
    recent.extend(state.steps_before_resume)
    with Progress(title, total=100.0, unit="%", before=100 * reached) as bar:
        while True:
            state.saver.check()
            progress, fits, stopped = before_step(state, pace, stop)
            if stopped or not fits:
                reason = "stopped" if fits else "finished"
                break

            step_began, graphs, size = timer(), compiled_graphs(), step_size(state, progress)
            has_new_weights = engine.token_losses is not None and engine.token_losses.weigh_if_due(
                progress
            )
            if (
                size.objective != objective or has_new_weights
            ):  # what was made ahead has other targets
                batches.close()
                objective, batches = size.objective, micro_batch_stream(state, size.objective)
            step_batches = [next(batches) for _ in range(size.micro_batches)]
            data_wait = timer() - step_began
            learning_rate = config.peak_learning_rate * learning_rate_factor(
                config.schedule, progress
            )
            if engine.spread:
                engine.spread.begin_step(config.training_seed, work.steps)
            is_whole = engine.forward_backward(step_batches, stop)
            update_began = timer()
            fits = (
                is_whole and clock is not None and clock.has_room_for_update(pace.update_seconds())
            )
            fits, stopped = map(bool, mesh.max(fits, stop()))
            if not fits:  # the update would end after the deadline
                engine.discard()
                reason = "stopped" if stopped else reason
                break
            stats = engine.update(learning_rate)
            if engine.average:
                engine.average.add_if_due(progress)
            if not stats.skipped:  # a skipped one says nothing about how long an update takes
                update_seconds = timer() - update_began
            is_late = clock is not None and not clock.step_synchronised(update_seconds)
            if not is_late:
                work.add(
                    Work(
                        steps=1,
                        sequences=size.sequences,
                        tokens=size.tokens,
                        flops=size.flops,
                        skipped_steps=stats.skipped,
                        data_wait_seconds=data_wait,
                        recompilations=stats.recompilations,
                    )
                )
            is_validated = is_saved = is_to_keep = False
            if clock and not is_late:
                seconds, compiled = timer() - step_began, compiled_graphs() != graphs
                pace.note(size.micro_batches, seconds, update_seconds, compiled)
                recent.append((progress, stats))
                before, reached = reached, clock.progress()
                rate = (work.tokens - tokens_at_start) / (time.monotonic() - began)
                speed = format_count(rate, "tokens")
                bar.note(
                    f"step {work.steps}, loss {stats.loss:.2f}, {speed}/s, lr {learning_rate:.2g}"
                )
                bar.update(100 * reached)
                is_due = config.checkpoint.is_due(work.steps, time.monotonic() - last_save)
                is_to_keep = config.checkpoint.is_to_keep(saved_for_good, reached)
                saved_for_good = reached
                is_saved = is_due or is_to_keep or clock.is_near_the_end(before, reached)
                is_validated = is_validation_due(config.train, before, reached)
                is_validated = is_validated and has_room_to_validate(
                    state, reached, pace, size.micro_batches
                )
                is_logged = work.steps % config.train.log_every == 0 or is_saved or is_validated
                if (
                    is_logged
                ):  # so the log knows of each checkpoint, and of a step before its validation
                    state.log_step(recent, reached, rate)
            each = mesh.max(is_late, is_validated, is_saved, is_to_keep)
            is_late, is_validated, is_saved, is_to_keep = map(bool, each)
            if is_late:  # the machine stood still in the update
                state.roll_back()
                recent.clear()
                break
            if is_validated:
                validate(state, reached, pace)
            if is_saved:
                state.save_checkpoint(is_to_keep)
                last_save = time.monotonic()
    batches.close()
    if recent and not is_logged:
        state.log_step(recent, reached, rate)
    return reason


class StepSize(NamedTuple):
    """Of the next step: over all ranks, but for the micro-batches, which are this rank's."""

    sequences: int
    micro_batches: int
    tokens: int
    flops: float
    objective: ObjectiveConfig  # its phase


def step_size(state: TrainState, progress: float) -> StepSize:
    """What the schedule asks for at this progress."""
    config = state.config.train
    sequences = sequences_per_step(config.batch_ramp, progress, config.batch_size)
    tokens = sequences * config.sequence_length
    micro_batches = sequences // (config.rows * state.mesh.data_size)
    flops = tokens * state.config.flops_per_token(progress)
    return StepSize(sequences, micro_batches, tokens, flops, state.config.objective.at(progress))


def before_step(
    state: TrainState, pace: Pace, stop: Callable[[], bool]
) -> tuple[float, bool, bool]:
    """The same on every rank: the progress, whether a step fits into the budget, and whether any rank is to stop."""
    clock, progress, fits = state.clock, 0.0, False  # of which rank 0 alone has a clock
    if clock:
        progress = clock.progress()
        size = step_size(state, progress)
        fits = clock.has_room_for(
            seconds=pace.step_seconds(size.micro_batches), tokens=size.tokens, flops=size.flops
        )
    progress, *flags = state.mesh.max(progress, fits, stop())
    return progress, bool(flags[0]), bool(flags[1])


def warn(state: TrainState, broken_rules: BrokenRules) -> None:
    """Say which rules of the closed division the run has broken before its first step: not after a day."""
    assert state.clock
    budget, record = state.clock.config, load_record(state.folder)
    seconds = state.clock.elapsed_seconds()
    if budget.unit == "hours":
        seconds = 3600 * budget.limit
    spent = {**record["pretrain"]["budget"], "spent_seconds": seconds}
    record["pretrain"]["budget"] = spent
    for broken in broken_rules(record):
        say(
            "warning: not for the closed division, which this run claims (division=open does not):"
            f" {broken}"
        )


def is_validation_due(config: TrainConfig, before: float, now: float) -> bool:
    """Whether one of the even points was passed between the ends of two steps, at progress `before` and `now`; the end
    is `finish`'s."""
    return int(before * config.validations) < int(now * config.validations) < config.validations


def has_room_to_validate(
    state: TrainState, progress: float, pace: Pace, step_micro_batches: int
) -> bool:
    """Whether a validation on the clock would leave time for another step; said where it would not."""
    assert state.clock
    predicted, left = pace.validation_seconds(len(state.validation)), state.clock.seconds_left()
    if predicted + pace.step_seconds(step_micro_batches) <= left:
        return True
    say(
        f"step {state.work.steps} ({progress:.0%} of the budget): no validation, which would take about"
        f" {predicted:.0f} s of the {left:.0f} s left (train.validations, train.validation_tokens)"
    )
    return False


def validate(state: TrainState, progress: float, pace: Pace) -> None:
    """Validate on the clock, and note how long it took."""
    timer, batches = state.config.budget.timer, len(state.validation)
    predicted, began, graphs = pace.validation_seconds(batches), timer(), compiled_graphs()
    state.validate(progress)
    seconds = timer() - began
    pace.note_validation(batches, seconds, compiled_graphs() != graphs)
    if state.clock:
        where = f"step {state.work.steps} ({progress:.0%} of the budget)"
        say(f"{where}: validated in {seconds:.1f} s, predicted {predicted:.1f} s")


def micro_batch_stream(state: TrainState, objective: ObjectiveConfig) -> Generator[Batch]:
    """This rank's micro-batches of one objective from the position on; data rank r of w takes every w-th of them."""
    mesh, rows, first = state.mesh, state.config.train.rows, state.work.sequences
    token_losses = state.engine.token_losses
    source = state.data.source.with_objective(
        objective, token_losses.weights_V if token_losses else None
    )

    def make(k: int) -> Batch:
        return source.batch(first + (k * mesh.data_size + mesh.data_rank) * rows, rows)

    per_step = state.config.train.batch_size // (
        rows * mesh.data_size
    )  # which it takes before the device has work
    return prefetch_batches(make, state.engine.device, max(state.config.runtime.prefetch, per_step))
