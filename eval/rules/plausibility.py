"""Plausibility rules: a training process could have written the log.

Each function's docstring is the rule's sentence in docs/reference/rules.md. The numbers of a log follow from each other
and from the recipe, and its clocks and rates are bounded by the hardware; a careless forgery breaks one of these rules.
A forgery that breaks none is detected by a replay, by the weights or by the labels, or not at all
(docs/explanation/verification.md).
"""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from cramming.config import UserError, settings_hash
from cramming.model.config import count_parameters
from cramming.objectives.masking import BLOCK, PER_BLOCK
from cramming.plan import cards
from cramming.record_schema import Environment
from cramming.runlog import (
    MAX_HEARTBEAT_SECONDS,
    Finetuned,
    Heartbeat,
    Resume,
    Scoring,
    Start,
    Steps,
    Timed,
    Validation,
)
from cramming.runlog import Counted as CountedEvent
from cramming.schedule import learning_rate_factor
from eval.rules.evidence import COUNTED, Counted, Evidence, Outcome, all_or, counters_of
from eval.rules.recipe_facts import RecipeFacts, TrainSettings

CLOCK_SECONDS = 3600.0  # largest change of a wall clock, and difference between machines
SLOW_CLOCK = 0.05  # largest deviation of a budget second from a wall-clock second, in the median
FEWEST_BEATS = 0.1  # least share of the due heartbeats, written to a disk that is slow to sync
CORE_FLOPS = 1e13  # upper bound of a CPU core per second: 4 GHz times 2,048 of AMX
UNKNOWN_CARD = 4 * max(card.tflops for card in cards.CARDS) * 1e12
RELATIVE = 1e-9  # rounding of float64
# A target that is not the likeliest entry has a probability of at most 1/2.
WRONG_TARGET_NATS = math.log(2)


NOTHING_LOGGED = "no step logged"


def schedule_followed(evidence: Evidence) -> Outcome:
    """The learning rate of every logged step is the schedule's at the progress at which the step began."""
    facts = evidence.facts
    if facts is None:
        return True, NOTHING_LOGGED
    problems: list[str] = []
    peak = facts.peak_learning_rate
    for row in evidence.training.steps:
        if not row.each_progress:
            problems.append(f"step {row.step}: no step in it")
            continue
        rate = peak * learning_rate_factor(facts.schedule, row.each_progress[-1])
        if abs(row.lr - rate) > RELATIVE * peak:
            problems.append(
                f"step {row.step}: learning rate {row.lr:.6g}, by the schedule {rate:.6g}"
            )
    return all_or(problems, f"peak {peak:.3g}")


def tokens_add_up(evidence: Evidence) -> Outcome:
    """Sequences and tokens are those of the steps, by batch size, its ramp and sequence length."""
    facts = evidence.facts
    if facts is None:
        return True, NOTHING_LOGGED
    length = facts.settings.train.sequence_length
    expected = _expected_sequences(evidence, facts)
    problems: list[str] = []
    rows: list[Steps | Validation] = [*evidence.training.steps, *evidence.training.validations]
    for row in rows:
        if row.step not in expected:
            problems.append(f"step {row.step}: not every step before it is logged")
        elif row.tokens != expected[row.step] * length:
            problems.append(
                f"step {row.step}: {row.tokens} tokens, by the recipe {expected[row.step] * length}"
            )
    for counted in evidence.counters:
        sequences = expected.get(counted.steps)
        if counted.tokens != counted.sequences * length:
            problems.append(
                f"line {counted.line}: {counted.tokens} tokens, not sequences x {length}"
            )
        elif sequences is not None and counted.sequences != sequences:
            problems.append(f"line {counted.line}: {counted.sequences} sequences, not {sequences}")
    return all_or(problems, f"sequences of {length} tokens")


def _expected_sequences(evidence: Evidence, facts: RecipeFacts) -> dict[int, int]:
    """Return the sequences after each step that no resume superseded, as far as all steps before it are logged."""
    begun: dict[int, float] = {}
    for row in evidence.training.steps:
        first = row.step - len(row.each_progress) + 1
        begun |= {first + index: progress for index, progress in enumerate(row.each_progress)}
    expected = {0: 0}
    for step in range(1, len(begun) + 1):
        if step not in begun:
            break
        expected[step] = expected[step - 1] + facts.sequences_at(begun[step])
    return expected


def compute_adds_up(evidence: Evidence) -> Outcome:
    """Model FLOPs are those of the tokens, by the size of the model and the share of targets."""
    facts = evidence.facts
    if facts is None or not facts.is_plain:
        return True, "the objective changes" if facts else NOTHING_LOGGED
    per_token = facts.flops_per_token
    problems = []
    for counted in evidence.counters:
        flops = counted.tokens * per_token
        if not math.isclose(counted.flops, flops, rel_tol=1e-6):
            problems.append(
                f"line {counted.line}: {counted.flops:.6g} FLOPs, by the model {flops:.6g}"
            )
    return all_or(problems, f"{per_token / 1e6:.4g} MFLOP per token")


def hardware_can_do_it(evidence: Evidence) -> Outcome:
    """No part of the training was faster than the device is at its peak, and no more memory was used than it has."""
    facts = evidence.facts
    training = evidence.record.training
    if facts is None or not training.tokens or not training.exaflops:
        return True, NOTHING_LOGGED
    per_token = training.exaflops * 1e18 / training.tokens
    machines = [evidence.record.environment, *evidence.record.resumed]
    fastest = max(machines, key=_peak_flops)
    peak = (training.devices or 1) * _peak_flops(fastest)
    problems = list(_device_problems(machines, training.peak_memory_bytes))
    points = [(0, 0.0), *((row.tokens, row.seconds) for row in evidence.training.steps)]
    for (tokens_before, seconds_before), (tokens, seconds) in pairwise(points):
        work = (tokens - tokens_before) * per_token
        if work > 1.05 * peak * max(seconds - seconds_before, 1e-6):
            problems.append(
                f"{tokens - tokens_before} tokens in {seconds - seconds_before:.3g} s:"
                f" {fastest.device.name} has {peak / 1e12:.3g} TFLOP/s at most"
            )
            break
    return all_or(problems, f"at most {peak / 1e12:.3g} TFLOP/s")


def _peak_flops(machine: Environment) -> float:
    """Return the peak rate of one device of this machine, in operations per second."""
    device = machine.device
    if device.kind == "cpu":
        return CORE_FLOPS * (machine.cpu_count or 1)
    card = cards.find(device.name or "", device.memory_bytes)
    if card is None:
        return UNKNOWN_CARD
    return max(card.tflops, card.fp8_tflops or 0) * 1e12


def _device_problems(machines: Sequence[Environment], peak_memory: int | None) -> Iterator[str]:
    for machine in machines:
        device = machine.device
        card = cards.find(device.name or "", device.memory_bytes) if device.kind == "cuda" else None
        stated = device.peak_tflops
        if card and stated and not 0.5 <= stated / card.tflops <= 2:
            yield f"{device.name} has {card.tflops:g} TFLOP/s, the log says {stated:g}"
    memory = machines[-1].device.memory_bytes
    if peak_memory and memory and peak_memory > memory:
        yield f"{peak_memory / 2**30:.1f} GiB were used of {memory / 2**30:.1f} GiB"


def clocks_agree(evidence: Evidence) -> Outcome:
    """Seconds of the budget are seconds of the wall clock, whose time does not run backwards."""
    if not evidence.training.processes:
        return True, NOTHING_LOGGED
    timed = [entry.event for entry in evidence.entries if isinstance(entry.event, Timed)]
    problems = []
    for before, after in pairwise(timed):
        setback = before.wall - after.wall
        if setback > CLOCK_SECONDS:
            problems.append(f"the wall clock goes back by {setback:.0f} s")
    ratios = list(_wall_seconds_per_second(timed))
    rate = median(ratios) if ratios else 1.0
    by_wall = evidence.record.training.budget.clock != "cpu"
    if by_wall and len(ratios) > 2 and abs(rate - 1) > SLOW_CLOCK:
        problems.append(
            f"a second of the budget is {rate:.2f} s of the wall clock, most of the time"
        )
    return all_or(problems, f"{rate:.3f} s of the wall clock in a second of the budget")


def _wall_seconds_per_second(timed: Sequence[Timed]) -> Iterator[float]:
    """Yield the ratio of both clocks over parts of a process of at least a tenth of a second."""
    begin: Timed | None = None
    for event in timed:
        if begin is None or isinstance(event, Start):
            begin = event
            continue
        passed = event.elapsed - begin.elapsed
        if passed >= 0.1:
            yield (event.wall - begin.wall) / passed
            begin = event


def heartbeats_came(evidence: Evidence) -> Outcome:
    """A process that trains writes a sign of life every few seconds, as often as its recipe says."""
    facts = evidence.facts
    if facts is None or not evidence.training.steps:
        return True, NOTHING_LOGGED
    every = facts.settings.budget.heartbeat_seconds
    if not 0 < every <= MAX_HEARTBEAT_SECONDS:
        return False, f"budget.heartbeat_seconds={every:g} in the recipe"
    rows = evidence.training.steps
    step_seconds = []
    for before, after in pairwise(rows):
        steps = after.step - before.step
        if steps > 0:
            step_seconds.append((after.seconds - before.seconds) / steps)
    typical = median(step_seconds or [0.0])
    shortest = min(step_seconds, default=0.0) / 2
    problems: list[str] = []
    for number, process in enumerate(_processes(evidence), 1):
        problems += _silences(process, shortest)
        problems += _too_few_beats(number, process, typical, every)
    return all_or(problems, f"one every {every:g} s")


class _Sign(NamedTuple):
    """Sign of life: a timed event and the number of steps by then, including superseded ones."""

    line: int
    event: Timed
    steps: int


def _processes(evidence: Evidence) -> list[list[_Sign]]:
    """Return the signs of life by process."""
    processes: list[list[_Sign]] = []
    steps = 0
    for entry in evidence.entries:
        event = entry.event
        if not isinstance(event, Timed):
            continue
        if isinstance(event, Start):
            processes.append([])
        steps = counters_of(event).get("steps", steps)
        processes[-1].append(_Sign(entry.line, event, steps))
    return processes


def _passed(before: _Sign, after: _Sign) -> float:
    """Return the seconds between two signs, by the slower clock: with many cores the CPU's may be the faster one."""
    by_wall = after.event.wall - before.event.wall
    return min(after.event.elapsed - before.event.elapsed, by_wall)


def _silences(process: Sequence[_Sign], shortest_step: float) -> Iterator[str]:
    """Yield the gaps without a heartbeat in which several steps were made; a stopped process makes none."""
    for before, after in pairwise(process):
        steps = after.steps - before.steps
        if steps <= 1 or steps * shortest_step <= MAX_HEARTBEAT_SECONDS + 1:
            continue
        gap = _passed(before, after)
        if gap > 2 * MAX_HEARTBEAT_SECONDS:
            yield f"line {after.line}: {steps} steps in {gap:.0f} s without a heartbeat"


def _too_few_beats(
    number: int, process: Sequence[_Sign], step_seconds: float, every: float
) -> Iterator[str]:
    """Yield a message for a process with hardly any heartbeats, even for a slow disk.

    A process that is stopped for a while writes none. So the time between two events counts only as far as its steps
    take it, plus the time in which one heartbeat must be written.
    """
    lasted = 0.0
    for before, after in pairwise(process):
        longest = max(0, after.steps - before.steps) * step_seconds + every / FEWEST_BEATS
        lasted += min(_passed(before, after), longest)
    due = lasted / every
    beats = sum(isinstance(sign.event, Heartbeat) for sign in process)
    if beats < int(FEWEST_BEATS * due):
        yield f"process {number} has {beats} of {due:.0f} heartbeats, one every {every:g} s"


def steps_in_time(evidence: Evidence) -> Outcome:
    """Counters and clocks of the log only grow, each logged step lies between the signs of life around it, and a resume
    has the steps of its checkpoint.
    """
    problems: list[str] = []
    counters = evidence.counters
    for before, after in pairwise(counters):
        if isinstance(after.event, Resume):
            continue
        for name in COUNTED:
            if getattr(after, name) < getattr(before, name):
                problems.append(f"line {after.line}: {name} falls")
    problems += _resumed_elsewhere(evidence)
    for previous, row in pairwise(evidence.training.steps):
        if row.step <= previous.step or row.seconds < previous.seconds:
            problems.append(
                f"step {row.step} at {row.seconds:.2f} s comes after step {previous.step}"
            )
    # A CPU's seconds may pass by hundreds while the log is written.
    slack = math.inf if evidence.record.training.budget.clock == "cpu" else 1.0
    # A checkpoint has no counters, and the last ones before it may be of an earlier step.
    counted = [each for each in counters if isinstance(each.event, CountedEvent)]
    problems += _rows_out_of_time(evidence.training.steps, counted, slack)
    return all_or(problems, f"{len(counters)} signs of life")


def _resumed_elsewhere(evidence: Evidence) -> Iterator[str]:
    """Yield a message for each resume whose number of steps is not that of its checkpoint."""
    saved: dict[str | None, int] = {each.sha256: each.steps for each in evidence.training.all_saved}
    saved[None] = 0
    for entry in evidence.entries:
        event = entry.event
        if isinstance(event, Resume) and event.steps != saved.get(event.sha256):
            yield f"line {entry.line}: {event.steps} steps are not those of the checkpoint"


def _rows_out_of_time(
    rows: Sequence[Steps], counters: Sequence[Counted], slack: float
) -> Iterator[str]:
    """Yield a message for each row later than an event with more steps, or earlier than an event with fewer.

    Rows and events are in the order of their steps, so each row is compared with its neighbours alone.
    """
    position = 0
    for row in rows:
        while position < len(counters) and counters[position].steps < row.step:
            position += 1
        if position and row.seconds < counters[position - 1].total_seconds - slack:
            yield f"step {row.step} at {row.seconds:.2f} s, before an event of fewer steps"
        if position < len(counters) and row.seconds > counters[position].total_seconds + 0.01:
            yield f"step {row.step} at {row.seconds:.2f} s, after an event of as many steps"


def steps_logged(evidence: Evidence) -> Outcome:
    """Every step that the recipe has logged is there, as is the step of each checkpoint, and the last ones are those of
    the end.
    """
    facts = evidence.facts
    if facts is None:
        return True, NOTHING_LOGGED
    training = evidence.training
    logged = {row.step for row in training.steps}
    every = facts.settings.train.log_every
    last = training.steps[-1].step if training.steps else 0
    absent = [step for step in range(every, last + 1, every) if step not in logged]
    absent += [saved.steps for saved in training.saved if saved.steps and saved.steps not in logged]
    problems = [f"step {step} is not logged" for step in absent]
    if training.exported is not None:
        steps = training.counters.get("steps", 0)
        finals = [each for each in training.validations if each.held_out_tokens is not None]
        if last != steps or training.finished_after != steps:
            problems.append(f"{steps} steps were made, the last that is logged is {last}")
        if [each.step for each in finals] != [steps]:
            problems.append("there is not one validation of the final weights")
    return all_or(problems, f"{len(logged)} rows, up to step {last}")


def progress_is_spent(evidence: Evidence) -> Outcome:
    """Progress grows from step to step, and is the share of the budget that was spent."""
    budget = evidence.record.training.budget
    facts = evidence.facts
    if facts is None or not budget.limit:
        return True, NOTHING_LOGGED
    problems: list[str] = []
    reached = 0.0
    for row in evidence.training.steps:
        low, high = _progress_bounds(row, budget.unit or "", budget.limit, facts)
        where = f"step {row.step}: progress {row.progress:.6g}"
        if not low - RELATIVE <= row.progress <= high + RELATIVE:
            problems.append(f"{where}, {low:.6g} of the budget is spent")
        begun = row.each_progress
        if begun != sorted(begun) or row.progress < reached:
            problems.append(f"{where} falls")
        if begun and not reached - RELATIVE <= begun[-1] <= row.progress + RELATIVE:
            problems.append(f"{where}, its last step began at {begun[-1]:.6g}")
        reached = row.progress
    return all_or(problems, f"up to {reached:.4g}")


def _progress_bounds(
    row: Steps, unit: str, limit: float, facts: RecipeFacts
) -> tuple[float, float]:
    """Return the least and the largest possible progress of a row; work lost in a crash stays charged."""
    if unit == "hours":
        spent = row.seconds / (3600 * limit)
        return min(1.0, spent), spent + 0.01 + MAX_HEARTBEAT_SECONDS / (3600 * limit)
    if unit == "exaflops":
        spent = row.tokens * facts.flops_per_token / 1e18 / limit if facts.is_plain else 0.0
        return min(1.0, spent * (1 - 1e-6)), 1.0
    amount = row.step if unit == "steps" else row.tokens
    return min(1.0, amount / limit), min(1.0, amount / limit)


def losses_are_means(evidence: Evidence) -> Outcome:
    """Loss and accuracy of a row are the means of its steps, and within their range."""
    problems: list[str] = []
    for row in evidence.training.steps:
        sizes = {len(row.each_progress), len(row.each_loss), len(row.each_accuracy)}
        if len(sizes) != 1:
            problems.append(f"step {row.step}: its steps are not as many losses as accuracies")
        for name, value, each in (
            ("loss", row.loss, row.each_loss),
            ("accuracy", row.accuracy, row.each_accuracy),
        ):
            known = [item for item in each if item is not None]
            mean = None
            if known and len(known) == len(each):
                mean = sum(known) / len(known)
            if (mean is None) != (value is None):
                problems.append(f"step {row.step}: {name} {value}, of its steps {mean}")
            elif mean is not None and value is not None:
                if not math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12):
                    problems.append(f"step {row.step}: {name} {value}, of its steps {mean}")
                if min(known) < 0 or (name == "accuracy" and max(known) > 1.0001):
                    problems.append(f"step {row.step}: {name} {value}")
        if row.grad_norm is not None and row.grad_norm < 0:
            problems.append(f"step {row.step}: gradient norm {row.grad_norm}")
    return all_or(problems, f"{len(evidence.training.steps)} rows")


def accuracies_are_counts(evidence: Evidence) -> Outcome:
    """An accuracy is a whole number of right answers among all: targets of a validation, examples of a task."""
    problems: list[str] = []
    for validation in evidence.training.validations:
        for name in ("accuracy", "all_mask_accuracy"):
            value = getattr(validation, name)
            if value is not None and not _is_share(value, validation.targets):
                problems.append(
                    f"step {validation.step}: {name} {value} of {validation.targets} targets"
                )
    sections = {**evidence.record.glue, **evidence.record.baselines}
    for init, section in sections.items():
        for entry, task in section.tasks.items():
            values = task.metrics["accuracy"].per_seed if "accuracy" in task.metrics else []
            examples = task.eval_examples or 0
            for value in values:
                if value is not None and not _is_share(value, examples):
                    problems.append(f"{init}/{entry}: accuracy {value} of {examples} examples")
    return all_or(problems, "shares of their numbers of targets and examples")


def _is_share(value: float, count: int) -> bool:
    right = value * count
    return 0 <= value <= 1 and abs(right - round(right)) <= 1e-6 * max(1, count)


def losses_fit_accuracies(evidence: Evidence) -> Outcome:
    """A target that is not the likeliest costs ln 2 at least, so no loss is below that share of its accuracy."""
    facts = evidence.facts
    if facts is None or not facts.objective.has_masked_lm:
        return True, "no loss of masked tokens"
    pairs: list[tuple[int, float | None, float | None]] = []
    for row in evidence.training.steps:
        each = zip(row.each_loss, row.each_accuracy, strict=False)
        pairs += [(row.step, loss, accuracy) for loss, accuracy in each]
    for validation in evidence.training.validations:
        pairs.append((validation.step, validation.loss, validation.accuracy))
        pairs.append((validation.step, validation.all_mask_loss, validation.all_mask_accuracy))
    problems: list[str] = []
    for step, loss, accuracy in pairs:
        if loss is None or accuracy is None:
            continue
        least = (1 - accuracy) * WRONG_TARGET_NATS
        if loss < least * (1 - 1e-3) - 1e-6:
            problems.append(f"step {step}: loss {loss:.4g} with accuracy {accuracy:.4g}")
    return all_or(problems, f"{len(pairs)} pairs")


def setup_follows_recipe(evidence: Evidence) -> Outcome:
    """Parameters, peak learning rate, seed, objective, start and number format are those of the recipe, and no later
    process read another corpus.
    """
    facts = evidence.facts
    if facts is None:
        return True, NOTHING_LOGGED
    training = evidence.record.training
    settings = facts.settings
    expected: dict[str, object] = {
        "seed": settings.seed,
        "start": settings.start.name,
        "objective": facts.objective.kind,
    }
    if facts.objective.has_masked_lm:
        count = count_parameters(facts.model)
        expected["parameters"] = count.total
        expected["parameters_without_embeddings"] = count.without_embeddings
    if settings.precision.mode != "auto":
        expected["precision"] = settings.precision.mode
    if settings.runtime.compile != "off" and training.compiled is not None:
        expected["compiled"] = True
    problems = []
    for name, value in expected.items():
        if getattr(training, name) != value:
            problems.append(f"{name} is {getattr(training, name)}, by the recipe {value}")
    rate = training.peak_learning_rate or 0.0
    if not math.isclose(rate, facts.peak_learning_rate, rel_tol=1e-9):
        problems.append(f"peak learning rate {rate}, by the recipe {facts.peak_learning_rate}")
    problems += _other_corpora(evidence)
    return all_or(problems, f"{training.parameters} parameters, {training.objective}")


def _other_corpora(evidence: Evidence) -> Iterator[str]:
    manifest = evidence.record.corpus.manifest_sha256
    first = evidence.training.processes[0].start
    for number, process in enumerate(evidence.training.processes, 1):
        if process.setup is not None and process.setup.manifest_sha256 != manifest:
            yield f"process {number} read another corpus"
        start = process.start
        if (start.unit, start.limit, start.clock) != (first.unit, first.limit, first.clock):
            yield f"process {number} had a limit of {start.limit:g} {start.unit}"


def validations_as_planned(evidence: Evidence) -> Outcome:
    """Validations are no more than the recipe has, at its points, each of the same number of targets, 15 % of the
    held-out tokens.
    """
    facts = evidence.facts
    if facts is None or not evidence.training.validations:
        return True, "no validation"
    problems: list[str] = []
    train = facts.settings.train
    progress = {row.step: row.progress for row in evidence.training.steps}
    point = 0
    for validation in evidence.training.validations:
        if validation.held_out_tokens is not None:
            problems += _target_problems(validation, train)
            continue
        now = int(validation.progress * train.validations)
        if now <= point or validation.progress != progress.get(validation.step):
            problems.append(f"step {validation.step}: no validation was due")
        point = now
    targets = {validation.targets for validation in evidence.training.validations}
    if len(targets) > 1:
        problems.append(f"validations of {', '.join(map(str, sorted(targets)))} targets")
    return all_or(problems, f"{len(evidence.training.validations)} validations")


def _target_problems(validation: Validation, train: TrainSettings) -> Iterator[str]:
    tokens = validation.held_out_tokens or 0
    limit = max(train.validation_tokens, train.sequence_length)
    if tokens > limit:
        yield f"validated on {tokens} tokens, by the recipe on {limit} at most"
    most_targets = tokens // BLOCK * PER_BLOCK + min(tokens % BLOCK, PER_BLOCK)
    if not 0.1 * tokens <= validation.targets <= most_targets:
        yield f"{validation.targets} targets of {tokens} tokens"


def fine_tunings_in_order(evidence: Evidence) -> Outcome:
    """No fine-tuning is older than the run or than the fine-tuning before it, the keys of a scoring are those of its
    settings, a scored checkpoint is one that the run kept, and no two seeds of a task have the same training loss to
    the last bit.
    """
    problems: list[str] = []
    created = evidence.record.created
    before = _timestamp(created) if created else -math.inf
    losses: dict[tuple[str, float], int] = {}
    kept_files = {None, *(saved.sha256 for saved in evidence.training.retained)}
    for entry in evidence.entries:
        event = entry.event
        if isinstance(event, Scoring):
            if event.checkpoint not in kept_files:
                problems.append(f"line {entry.line}: scores of a checkpoint that was not kept")
            problems += [f"line {entry.line}: {problem}" for problem in _other_keys(event)]
        if not isinstance(event, Finetuned):
            continue
        time = _timestamp(event.time)
        if time < before - CLOCK_SECONDS:
            problems.append(f"line {entry.line}: a fine-tuning of before the one in front of it")
        before = max(before, time)
        if event.train_loss:
            other = losses.setdefault((event.task, event.train_loss), event.seed)
            if other != event.seed:
                problems.append(f"{event.task}: seeds {other} and {event.seed} have one loss")
    return all_or(problems, f"{len(evidence.record.history)} fine-tunings")


def _timestamp(time: str) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        raise UserError(f"{time!r} is no time") from None


def _other_keys(scoring: Scoring) -> Iterator[str]:
    """Yield a message for each key that does not follow from the scoring's conditions, hyperparameters and seed."""
    for name, key in scoring.keys.items():
        task, _, seed = name.rpartition("-seed")
        conditions = scoring.conditions.get(task)
        if conditions is None or not seed.isdigit():
            continue
        task_hash = conditions.partition("-")[0]
        expected = settings_hash(task_hash, scoring.hyperparameters, int(seed))
        if key.partition("-")[0] != expected:
            yield f"{name} has the key of other settings"
