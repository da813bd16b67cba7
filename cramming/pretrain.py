"""The timed part: train a model from scratch inside a budget.

`train` is the experiment. What it works with is in cramming/run.py, what happens between steps in
cramming/train_parts.py, and how a run ends in cramming/finish.py. The clock (cramming/budget.py) runs since the
operating system started this process; what is charged ends with the last step that counts.
"""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from cramming import device as devices
from cramming.budget import BudgetClock
from cramming.config import UserError
from cramming.data.manifest import MANIFEST
from cramming.data.run_data import RunData, fit_to_corpus
from cramming.engine import DivergedError
from cramming.invocation import Invocation
from cramming.parallel.mesh import Mesh, data_size, launched_processes
from cramming.progress import say
from cramming.recipe import Config, check_run
from cramming.record import load_record
from cramming.run import Run, build_run
from cramming.runlog import EndReason

BrokenRules = Callable[[Mapping[str, Any]], list[str]]


def train(run: Run, title: str = "pretrain") -> EndReason:
    """Train until the budget ends or a rank is to stop; return which of them it was."""
    clock, engine = run.clock, run.engine
    with run.batches, run.logger.progress_bar(title):
        while plan := clock.next_step():
            for hook in engine.hooks:
                hook.before_step(plan)
            batches = run.batches.take(plan)
            gradients = engine.forward_backward(batches, clock.stop_requested)
            if not clock.allows_update(gradients.is_whole):
                engine.discard(gradients)
                break
            result = engine.update(gradients, run.config.learning_rate(plan.progress))
            for hook in engine.hooks:
                hook.after_step(plan, result)
            if not clock.commit(plan, result, run.batches.waited_seconds):
                run.checkpointer.roll_back()
                break
            for part in run.parts:
                part.after_step(plan, result)
    run.logger.flush()
    return clock.end_reason


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
        """Return whether a signal has come."""
        return self.signal is not None


def main(
    config: Config,
    corpus: Path,
    invocation: Invocation,
    budget: BudgetClock | None,
    broken_rules: BrokenRules,
) -> None:
    """Train in one process of a run on the corpus in a folder.

    `budget` is rank 0's clock, and None on the other ranks (cramming/launch.py).
    """
    stop = StopRequest()
    mesh = Mesh(config.parallel, devices.select(invocation.device))
    run = build_run(config, corpus, invocation, mesh, budget, stop.is_set)
    if budget and not budget.has_ended and config.division == "closed":
        warn_of_broken_rules(run, broken_rules)
    reason = train_and_finish(run)
    mesh.close()
    if reason != "stopped":
        return
    if budget:
        said = f"stopped after {run.clock.work.steps} steps; resume with --resume"
        if not budget.has_trained:  # somebody saw a mistake in what was announced
            said = "stopped before the first step; the name is free again"
        say(f"{run.folder}: {said}")
    raise SystemExit(128 + int(stop.signal or signal.SIGTERM))


def check(config: Config, corpus: Path, device: str) -> Config:
    """Return the configuration with the corpus's vocabulary, where there is the corpus.

    Raises UserError for what can be known to be wrong before training. Nothing is written.
    """
    processes = launched_processes()
    data_size(config.parallel, processes)
    check_run(config, devices.select(device), processes)
    if not (corpus / MANIFEST).is_file():
        return config
    data = RunData.open(corpus, config, verify=False)  # shards are hashed when the run begins
    config.objective.require_corpus(data.corpus, config.train.sequence_length)
    return config.replace(model=fit_to_corpus(config.model, data.corpus))


def train_and_finish(run: Run) -> EndReason:
    """Train, save, complete the record; of a run that was killed after its end, only the record is to be completed."""
    reason: EndReason = "finished"
    problem: DivergedError | None = None
    if not run.clock.has_ended:
        try:
            reason = train_and_save(run)
        except DivergedError as error:
            reason, problem = "diverged", error
    if reason == "finished":
        run.engine.leave(run.config)
    try:
        if run.mesh.is_main:
            from cramming.finish import finish  # of no use before the end

            finish(run, reason, problem)
    finally:
        run.logger.close()
        run.mesh.barrier()
    return reason


def train_and_save(run: Run) -> EndReason:
    """Train on the clock. A run has ended once its last checkpoint is saved, not before."""
    reason: EndReason = "failed"
    try:
        with run.checkpointer:
            ended = train(run)
            run.checkpointer.save_last()
        reason = ended
    except DivergedError:
        reason = "diverged"
        raise
    except Exception as error:
        if devices.is_out_of_memory(error):
            from cramming.finish import out_of_memory

            raise out_of_memory(run) from None
        if devices.is_recompile_limit(error):
            raise UserError(
                f"runtime.compile={run.config.runtime.compile}: more than {devices.MAX_VARIANTS} variants of one"
                " function were to be compiled. Set runtime.compile=off, and report this as a defect."
            ) from None
        raise
    finally:
        if run.clock.budget:
            run.clock.budget.close(reason)
    return reason


def warn_of_broken_rules(run: Run, broken_rules: BrokenRules) -> None:
    """Say which rules of the closed division the run has broken before its first step: not after a day."""
    budget, record = run.clock.budget, load_record(run.folder)
    assert budget
    seconds = budget.elapsed_seconds()
    if budget.config.unit == "hours":
        seconds = 3600 * budget.config.limit
    record["pretrain"]["budget"] = {**record["pretrain"]["budget"], "spent_seconds": seconds}
    for broken in broken_rules(record):
        say(
            "warning: not for the closed division, which this run claims (division=open does not):"
            f" {broken}"
        )
