"""What a run says before and during training: the derived numbers, rows of metrics.jsonl, validations. Rank 0 alone."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cramming.budget import Pace, seconds_before_import
from cramming.checks import tiny_defaults
from cramming.engine import StepStats
from cramming.model.config import count_parameters
from cramming.progress import say
from cramming.record import load_record
from cramming.runtime import compiled_graphs
from cramming.train_state import TrainState

Judge = Callable[[Mapping[str, Any]], list[str]]


def announce(state: TrainState) -> None:
    """Print the derived arithmetic before the long part begins."""
    assert state.clock
    config, train, budget, engine = state.config, state.config.train, state.clock.config, state.engine
    count = count_parameters(config.model)
    tokens, processes = train.batch_size * train.sequence_length, state.mesh.world_size
    say(
        f"model: {count.total / 1e6:.1f}M parameters, {count.without_embeddings / 1e6:.1f}M without embeddings,"
        f" vocabulary {config.model.vocab_size}; {state.flops_per_token / 1e6:.1f} MFLOP per token"
    )
    say(
        f"step: {train.batch_size} sequences of {train.sequence_length} = {tokens} tokens ="
        f" {train.batch_size // (train.rows * processes)} x {train.rows} sequences x {processes} process(es);"
        f" {config.targets_per_row} targets per sequence; {engine.precision.mode} on {engine.device}, attention kernel"
        f" {' and '.join(state.attention_kernels)}; peak learning rate {config.peak_learning_rate:.3g}"
    )
    other = f", validated on the text of {train.validation_corpus}" if train.validation_corpus else ""
    say(
        f"corpus: {state.data.corpus.folder}, {state.data.source.stream.num_tokens / 1e6:.1f}M tokens{other}; budget:"
        f" {budget.limit:g} {budget.unit}; started at step {state.work.steps}"
        f" with {state.clock.elapsed_seconds():.1f} s on the clock"
    )
    if (before := seconds_before_import()) > 10 and not state.work.steps:
        say(
            f"warning: this process was {before:.0f} s old when `cramming` began, and they are on the clock; a script"
            " that starts it with `exec` hands on its own age: leave `exec` out"
        )
    if warning := tiny_defaults(config):
        say(warning)


def warn(state: TrainState, judge: Judge) -> None:
    """Say which rules of the closed division the run has broken before its first step: not after a day."""
    assert state.clock
    budget, record = state.clock.config, load_record(state.folder)
    seconds = 3600 * budget.hours if budget.hours else state.clock.elapsed_seconds()
    known = {**record["pretrain"], **state.setup(), "budget": {"spent_seconds": seconds}}
    for broken in judge({**record, "pretrain": known}):
        say(f"warning: not for the closed division, which this run claims (division=open does not): {broken}")


def log_step(
    state: TrainState, recent: deque[StepStats], progress: float, learning_rate: float, tokens_per_second: float
) -> None:
    """One row of metrics.jsonl: means over the last `log_every` steps of this process, and its tokens per second."""
    assert state.metrics
    row = {
        "step": state.work.steps,
        "progress": progress,
        "seconds": state.work.last_step_seconds,
        "tokens": state.work.tokens,
        "loss": sum(s.loss for s in recent) / len(recent),
        "accuracy": sum(s.accuracy for s in recent) / len(recent),
        "grad_norm": recent[-1].grad_norm,
        "lr": learning_rate,
        "tokens_per_second": tokens_per_second,
    }
    state.metrics.write(row)


def validate(state: TrainState, progress: float) -> dict[str, Any]:
    """Loss on the held-out text, in the form that is one for all runs; logged, and on the clock during training."""
    assert state.clock and state.metrics
    loss, accuracy, targets = state.engine.evaluate(state.validation)
    row = {"step": state.work.steps, "progress": progress, "tokens": state.work.tokens}
    row |= {"seconds": state.clock.elapsed_seconds(), "validation_loss": loss, "validation_accuracy": accuracy}
    state.metrics.write(row)
    say(f"step {state.work.steps} ({progress:.0%} of the budget): validation loss {loss:.3f}, accuracy {accuracy:.3f}")
    return {"loss": loss, "accuracy": accuracy, "targets": targets}


def validate_if_it_fits(state: TrainState, progress: float, pace: Pace, step_micro_batches: int) -> None:
    """Validate on the clock, unless it would leave no time for another step; and note how long it took."""
    assert state.clock
    batches = len(state.validation)
    predicted, left = pace.validation_seconds(batches), state.clock.seconds_left()
    where = f"step {state.work.steps} ({progress:.0%} of the budget)"
    if predicted + pace.step_seconds(step_micro_batches) > left:
        say(
            f"{where}: no validation, which would take about {predicted:.0f} s of the {left:.0f} s left"
            " (train.validations, train.validation_tokens)"
        )
        return
    began, graphs = time.monotonic(), compiled_graphs()
    validate(state, progress)
    seconds = time.monotonic() - began
    pace.note_validation(batches, seconds, compiled_graphs() != graphs)
    say(f"{where}: validated in {seconds:.1f} s, predicted {predicted:.1f} s")
