"""The verb `replay`: whole intervals of a run's training are repeated and compared with its log.

A log with an invented loss curve, or a checkpoint with other weights, does not follow from its recipe, seed and
corpus. An interval begins at the seed or at a checkpoint of the log and ends at the next one; the loop of `pretrain`
repeats its steps, with a clock that repeats the recorded progress. On a CPU of the same name, with the same torch and
threads, all numbers must be bitwise equal. Elsewhere a tolerance is measured as in the correctness gate
(cramming/bench/gate.py): from repetitions with perturbed weights.
"""

import math
import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cramming import checkpoint
from cramming import device as devices
from cramming.bench.gate import (
    LEAST,
    MULTIPLE,
    REPETITIONS,
    WINDOW,
    NoiseFloor,
    compare_curves,
    distances,
)
from cramming.bench.tricks import COARSE, SAME, Trick
from cramming.bench.worker import perturb
from cramming.budget import BudgetClock, BudgetConfig, Work
from cramming.clock import Clock
from cramming.config import UserError, file_sha256, require
from cramming.data.manifest import corpus_folder
from cramming.data.run_data import RunData, fit_to_corpus
from cramming.finish import export, finish_hooks, validate_fully
from cramming.invocation import Invocation
from cramming.parallel.mesh import Mesh
from cramming.pretrain import train
from cramming.progress import say, show_table, use_stderr
from cramming.recipe import Config
from cramming.record import derive, read_run
from cramming.record_schema import finite
from cramming.run import Run, cpu_differences, environment_here, start_engine
from cramming.runlog import Event, Saved, Steps, Training, Validation, training_of
from cramming.train_parts import Logger

# sections of the recipe that do not change what is computed, only how
HOW = ("attention", "memory", "runtime", "parallel")
# counters of a checkpoint that do not depend on time
WORK = ("steps", "sequences", "tokens", "flops", "skipped_steps")
LOSSES = ("loss", "replaced_token_loss", "all_mask_loss")
Tensors = dict[str, Tensor]


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    *,
    path: Path,
    intervals: str,
    seed: int | None,
    json: bool,
) -> None:
    """Run the verb `replay`; exit with code 1 if a number is not the run's.

    `recipe` is that of this call, for the corpus folder and the way in which steps are computed. `intervals` is the
    number of intervals to draw with `seed`, or `all`.
    """
    if json:
        use_stderr()
    began = time.monotonic()
    require(
        intervals == "all" or (intervals.isdecimal() and int(intervals) > 0),
        f"--intervals={intervals}: not a number above 0. Give one, or all.",
    )
    run = RecordedRun.read(path)
    seed = secrets.randbits(32) if seed is None else seed
    replay = Replay.of(run, recipe, invocation)
    chosen = draw(run.intervals, "all" if intervals == "all" else int(intervals), seed)
    say(
        f"{run.folder}: {len(chosen)} of {len(run.intervals)} intervals (--seed {seed}),"
        f" {replay.how}"
    )
    outcomes = [replay.outcome(interval) for interval in [*run.seed_check, *chosen]]
    outcomes += replay.end()
    show(outcomes)
    summary = coverage(run.intervals, chosen, run.last)
    seconds = time.monotonic() - began
    charged = run.training.spent_seconds
    say(f"{summary} {seconds:.1f} s, {seconds / charged:.1%} of what the run was charged.")
    if json:
        facts = {
            "run": str(run.folder),
            "seed": seed,
            "how": replay.how,
            "coverage": summary,
            "steps_share": steps_share(chosen, run.last),
            "probability": len(chosen) / len(run.intervals),
            "seconds": seconds,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        print(dumps(finite(facts)))
    if any(outcome.problems for outcome in outcomes):
        raise SystemExit(1)


# Reading the log ------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """Steps `first` to `last` after `start` (None: the seed); `end` was saved after them, or is None."""

    start: Saved | None
    first: int
    last: int
    end: Saved | None


class RecordedStep(NamedTuple):
    """Share of the budget at which a step began, and the loss of its batch, or None if that was not finite."""

    progress: float
    loss: float | None


@dataclass(frozen=True)
class RecordedRun:
    """Run folder with its log. `rows` and `validations` are events by step."""

    folder: Path
    record: dict[str, Any]
    training: Training
    rows: dict[int, Steps]
    validations: dict[int, Validation]

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """Read a run folder; raise UserError if it has no training, or its log does not have each step once."""
        entries = read_run(folder)
        training = training_of(entries)
        rows = {event.step: event for event in training.steps}
        validations = {event.step: event for event in training.validations}
        run = cls(folder, derive(entries), training, rows, validations)
        require(
            rows, f"{folder}: no training step in its log. Give the folder of a run that trained."
        )
        expected = list(range(1, run.last + 1))
        require(
            list(run.steps) == expected,
            f"{folder}: its log does not have each step from 1 to {run.last} once, in order.",
        )
        return run

    @property
    def last(self) -> int:
        """Number of the last step."""
        return max(self.rows)

    @cached_property
    def steps(self) -> dict[int, RecordedStep]:
        """Steps of the log, by number from 1."""
        steps = {}
        for row in self.rows.values():
            first = row.step - len(row.each_loss) + 1
            pairs = zip(row.each_progress, row.each_loss, strict=True)
            for number, (progress, loss) in enumerate(pairs, first):
                steps[number] = RecordedStep(progress, loss)
        return dict(sorted(steps.items()))

    def path_of(self, saved: Saved) -> Path:
        """Return the path of a checkpoint, whether or not it exists."""
        return checkpoint.path_of(self.folder / "checkpoints", saved)

    @cached_property
    def checkpoints(self) -> list[Saved]:
        """Checkpoints of the log that should exist, oldest first.

        These are the retained ones, and of the others those that were not removed for newer ones.
        """
        newest = {saved.steps: saved for saved in self.training.saved}
        saved_here = []
        for saved in newest.values():
            if saved in self.training.retained or self.path_of(saved).exists():
                saved_here.append(saved)
        return sorted(saved_here)

    @cached_property
    def intervals(self) -> list[Interval]:
        """Intervals from the seed, and from each checkpoint, to the next checkpoint or the last step."""
        points = [saved for saved in self.checkpoints if 0 < saved.steps <= self.last]
        intervals = []
        start: Saved | None = None
        for saved in points:
            first = start.steps + 1 if start else 1
            intervals.append(Interval(start, first, saved.steps, saved))
            start = saved
        done = start.steps if start else 0
        if done < self.last:
            intervals.append(Interval(start, done + 1, self.last, None))
        return intervals

    @property
    def seed_check(self) -> list[Interval]:
        """Interval without a step, if there is a checkpoint before the first step, which must be the seed's state."""
        return [Interval(None, 1, 0, saved) for saved in self.checkpoints if saved.steps == 0]


def draw(intervals: Sequence[Interval], count: int | Literal["all"], seed: int) -> list[Interval]:
    """Return this many of the intervals, drawn without replacement, in order."""
    if count == "all" or count >= len(intervals):
        return list(intervals)
    indices = random.Random(seed).sample(range(len(intervals)), count)
    return [intervals[index] for index in sorted(indices)]


def steps_share(chosen: Sequence[Interval], last: int) -> float:
    """Return the share of all steps that the intervals contain."""
    return sum(interval.last - interval.first + 1 for interval in chosen) / last


def coverage(intervals: Sequence[Interval], chosen: Sequence[Interval], last: int) -> str:
    """Return a sentence on the power of a replay of the `chosen` intervals.

    A forger does not know the draw, so planted weights are detected with the share of intervals drawn.
    """
    probability = len(chosen) / len(intervals)
    return (
        f"repeated {steps_share(chosen, last):.0%} of the steps, {len(chosen)} of {len(intervals)} intervals:"
        f" finds one planted jump with probability {probability:.0%}."
    )


class RecordedClock(BudgetClock):
    """Clock of a replay: steps begin at their recorded progress, and there is time until step `last`.

    It charges nothing and has no log. If the budget is in steps or tokens the progress follows from the work.
    """

    def __init__(self, config: BudgetConfig, work: Work, steps: Mapping[int, RecordedStep]) -> None:
        self.config, self.work, self.steps = config, work, steps
        self.last = work.steps
        self.lost_flops = 0.0
        self.slowest_update_seconds = 0.0
        self.has_ended = False

    def progress(self) -> float:
        """Return the progress at which the next step begins."""
        if self.config.unit in ("steps", "tokens"):
            return super().progress()
        following = self.steps.get(self.work.steps + 1)
        return following.progress if following else 1.0

    def elapsed_seconds(self) -> float:
        """Return 0: a replay charges nothing."""
        return 0.0

    def has_room_for(self, *, seconds: float, tokens: int = 0, flops: float = 0.0) -> bool:
        """Return whether the next step is to be repeated."""
        return self.work.steps < self.last

    def has_room_for_update(self, seconds: float) -> bool:
        """Return True: each step of the log was updated."""
        return True

    def step_synchronised(self, update_seconds: float) -> bool:
        """Return True: each step of the log was completed."""
        return True


class MemoryLog:
    """Log of a replay, in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, event: Event, *, sync_now: bool = True) -> str:
        """Store the event."""
        self.events.append(event)
        return ""


# Repetition and comparison --------------------------------------------------------------------------


@dataclass
class Outcome:
    """Result of one comparison: mean losses in nats, recorded and replayed, and the largest difference of a step.

    `allowed` is the limit of the difference, `state` compares weights and optimizer at the end, and `problems` are
    signs of another training.
    """

    what: str
    steps: int = 0
    recorded: float | None = None
    replayed: float | None = None
    difference: float | None = None
    allowed: float = 0.0
    state: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Repetition:
    """Replayed steps: the log's row of each, validations by step, and the final state if it is compared."""

    rows: dict[int, Steps]
    validations: dict[int, Validation]
    state: Tensors

    @property
    def losses(self) -> list[float]:
        """Loss of each step; infinite where it is not finite."""
        return [_number(row.loss) for row in self.rows.values()]


@dataclass(frozen=True)
class Replay:
    """Inputs that every comparison of a replay needs.

    `rounding` is the relative size of the perturbation in repetitions, from which tolerances are measured; None if
    all numbers must be bitwise equal.
    """

    run: RecordedRun
    config: Config
    data: RunData
    device: torch.device
    rounding: float | None
    how: str

    @classmethod
    def of(cls, run: RecordedRun, settings: Mapping[str, Any], invocation: Invocation) -> "Replay":
        """Prepare a replay of the run's recipe.

        Raises UserError if its corpus is not here, or is another, or if one process here cannot reproduce the run's
        numbers.
        """
        device = devices.select(invocation.device)
        differing = ", ".join(differences_of_hardware(run, device))
        refuse_other_numbers(run, device)
        replaced = HOW if differing and not has_dropout(run) else ()
        recipe = recipe_of(run, settings, replaced)
        config = Config.of(recipe)
        corpus = corpus_folder(recipe, invocation.corpora)
        data = RunData.open(corpus, config, verify=True)
        _refuse_other_corpus(run, data)
        config = config.replace(model=fit_to_corpus(config.model, data.corpus))
        if not differing:
            return cls(run, config, data, device, None, "compared bit for bit")
        is_fp32 = config.precision.mode == "fp32" and not config.precision.tf32
        how = f"compared within a measured tolerance, as this hardware differs: {differing}"
        return cls(run, config, data, device, SAME if is_fp32 else COARSE, how)

    @property
    def repetitions(self) -> int:
        """Number of times that each step is repeated."""
        return 1 if self.rounding is None else 1 + REPETITIONS

    def outcome(self, interval: Interval) -> Outcome:
        """Repeat an interval and compare it with the log."""
        begins = f"after step {interval.start.steps}" if interval.start else "from the seed"
        outcome = Outcome(begins, interval.last - interval.first + 1)
        altered = self._altered(interval.start) if interval.start else None
        if altered:
            outcome.problems.append(altered)
            return outcome
        once, *twins = (self.repeat(interval, twin) for twin in range(self.repetitions))
        if outcome.steps:
            allowed = self._compare_losses(outcome, interval, once, twins)
            outcome.problems += self._row_problems(interval, once)
            outcome.problems += self._validation_problems(interval, once, allowed)
        if interval.end:
            self._compare_state(outcome, interval.end, once, twins)
        return outcome

    def end(self) -> list[Outcome]:
        """Compare the final validation and the weights of `final/` with those that the last checkpoint gives."""
        run = self.run
        exported = run.training.exported
        recorded = run.training.final_validation
        if recorded is None:
            return []
        outcome = Outcome("final/ and its validation")
        saved = next((saved for saved in run.checkpoints if saved.steps == run.last), None)
        if saved is None or not run.path_of(saved).exists():
            outcome.state = "not compared: no last checkpoint"
            return [outcome]
        altered = self._altered(saved)
        if altered:
            return [replace(outcome, problems=[altered])]
        (once, weights), *twins = (self._finish(saved, twin) for twin in range(self.repetitions))
        self._compare_validation(outcome, recorded, once, [twin for twin, _ in twins])
        outcome.state = "equal"
        named = exported.files.get("model.safetensors") if exported else weights
        if named != weights:
            outcome.state = "differs"
            outcome.problems.append("the exported weights are not what the last checkpoint gives")
        return [outcome]

    def repeat(self, interval: Interval, twin: int = 0) -> Repetition:
        """Repeat the steps, and the validations that the log has among them; a `twin` begins with perturbed weights."""
        validated = set()
        for step in self.run.validations:
            if interval.first <= step <= interval.last and step != self.run.last:
                validated.add(step)
        title = f"replay {interval.first}-{interval.last}"
        with TemporaryDirectory(prefix="cramming-replay-") as scratch:
            run, clock, log = self._run_at(interval.start, Path(scratch), twin)
            for clock.last in sorted({*validated, interval.last}):
                train(run, title)  # a signal ends it at once, because nothing is saved
                if clock.work.steps in validated:
                    run.validator.validate(self.run.validations[clock.work.steps].progress)
            contents = checkpoint.contents(run.engine, clock.work)
        rows = {event.step: event for event in log.events if isinstance(event, Steps)}
        validations = {event.step: event for event in log.events if isinstance(event, Validation)}
        return Repetition(rows, validations, _tensors_in(contents) if interval.end else {})

    def _finish(self, saved: Saved, twin: int) -> tuple[Validation, str]:
        with TemporaryDirectory(prefix="cramming-replay-") as scratch:
            run, _, _ = self._run_at(saved, Path(scratch), twin)
            finish_hooks(run)
            return validate_fully(run), export(run)["model.safetensors"]

    def _run_at(
        self, start: Saved | None, folder: Path, twin: int
    ) -> tuple[Run, RecordedClock, MemoryLog]:
        """Return the run as a process would begin it, its clock and its log."""
        mesh, config = Mesh.solo(self.device), self.config
        saved = self.run.path_of(start) if start else None
        engine, work = start_engine(config, self.data, folder, mesh, saved)
        if twin:
            assert self.rounding is not None
            perturb(engine.parameters, self.rounding, twin)
        recorded = RecordedClock(config.budget, work, self.run.steps)
        clock, log = Clock(recorded, config, mesh, work, _never), MemoryLog()
        run = Run(folder, config, self.data, engine, clock, Logger(config, clock, log, None))
        run.parts = (run.logger,)  # nothing is saved, and validations are the recorded ones
        return run, recorded, log

    def _altered(self, saved: Saved) -> str | None:
        """Return a message for a checkpoint that is missing or not the log's, or None."""
        path = self.run.path_of(saved)
        if not path.exists():
            return f"{path.parent} has no checkpoint of step {saved.steps}, which the log has. Restore it."
        if file_sha256(path) != saved.sha256:
            return f"{path} is not the file that the log has (SHA-256)"
        return None

    def _compare_losses(
        self, outcome: Outcome, interval: Interval, once: Repetition, twins: Sequence[Repetition]
    ) -> list[float]:
        """Compare the loss of each step, and return the allowed difference of each window of steps, in nats."""
        numbers = range(interval.first, interval.last + 1)
        recorded = [_number(self.run.steps[step].loss) for step in numbers]
        replayed = once.losses
        outcome.recorded = sum(recorded) / len(recorded)
        outcome.replayed = sum(replayed) / len(replayed)
        if self.rounding is None:
            each = [_apart(a, b) for a, b in zip(recorded, replayed, strict=True)]
            outcome.difference = max(each)
            if any(each):
                at = each.index(outcome.difference) + interval.first
                outcome.problems.append(
                    f"the losses differ most at step {at}, by {outcome.difference} nats"
                )
            return [0.0 for _ in each]
        return self._compare_within_noise(outcome, interval, recorded, [once, *twins])

    def _compare_within_noise(
        self,
        outcome: Outcome,
        interval: Interval,
        recorded: list[float],
        repetitions: Sequence[Repetition],
    ) -> list[float]:
        """Compare losses within the noise floor of the repetitions. Steps that both sides skipped do not count."""
        assert self.rounding is not None
        replayed = repetitions[0].losses
        skipped = set()
        for index, (a, b) in enumerate(zip(recorded, replayed, strict=True)):
            if a == b == math.inf:
                skipped.add(index)
        curves = []
        for losses in [*(each.losses for each in repetitions), recorded]:
            curve = list(losses)
            for index in skipped:
                curve[index] = 0.0
            curves.append(curve)
        reference, *others, claimed = curves
        if not all(map(math.isfinite, reference)):
            outcome.problems.append("replayed, the loss of a step is not finite where the log's is")
            return [math.inf for _ in reference]
        floor = NoiseFloor(self.rounding, [distances(reference, other) for other in others])
        verdict = compare_curves(Trick("replay", {}, self.rounding, ""), reference, claimed, floor)
        outcome.difference, outcome.allowed = verdict.distance, verdict.tolerance
        if not verdict.passed:
            at = interval.first - 1 + verdict.at_step
            outcome.problems.append(
                f"the losses differ most at step {at}, by {outcome.difference} nats"
            )
        return floor.tolerance()

    def _row_problems(self, interval: Interval, once: Repetition) -> Iterator[str]:
        """Yield a message for each number of the log's rows that the replay does not reproduce."""
        is_exact = self.rounding is None
        names = ("tokens", "lr", "grad_norm") if is_exact else ("tokens", "lr")
        tolerance = 0.0 if is_exact else 1e-9
        for step, row in self.run.rows.items():
            if not interval.first <= step <= interval.last:
                continue
            for name in names:
                logged = _number(getattr(row, name))
                replayed = _number(getattr(once.rows[step], name))
                if not math.isclose(logged, replayed, rel_tol=tolerance):
                    yield f"the log has {name} {logged} at step {step}, replayed {replayed}"
        for step, replayed_row in once.rows.items():
            (progress,) = replayed_row.each_progress
            if self.run.steps[step].progress != progress:
                logged_progress = self.run.steps[step].progress
                yield f"the log lets step {step} begin at {logged_progress}, replayed {progress}"

    def _validation_problems(
        self, interval: Interval, once: Repetition, allowed: Sequence[float]
    ) -> Iterator[str]:
        """Yield a message for each loss of the log's validations that the replay does not reproduce."""
        for step, replayed in once.validations.items():
            recorded = self.run.validations[step]
            for name in LOSSES:
                logged = _number(getattr(recorded, name))
                repeated = _number(getattr(replayed, name))
                if not _apart(logged, repeated) <= allowed[(step - interval.first) // WINDOW]:
                    yield f"the log has a validation {name} of {logged} at step {step}, replayed {repeated}"

    def _compare_validation(
        self, outcome: Outcome, recorded: Validation, once: Validation, twins: Sequence[Validation]
    ) -> None:
        """Compare the final validation."""
        outcome.recorded, outcome.replayed = _loss(recorded), _loss(once)
        for name in LOSSES:
            logged, repeated = getattr(recorded, name), getattr(once, name)
            difference = _apart(_number(logged), _number(repeated))
            allowed = 0.0
            if twins:
                strayed = [
                    _apart(_number(getattr(twin, name)), _number(repeated)) for twin in twins
                ]
                allowed = _allowed(strayed)
            if outcome.difference is None or difference > outcome.difference:
                outcome.difference, outcome.allowed = difference, allowed
            if not difference <= allowed:
                outcome.problems.append(
                    f"the log has a final {name} of {logged}, the last checkpoint gives {repeated}"
                )

    def _compare_state(
        self, outcome: Outcome, end: Saved, once: Repetition, twins: Sequence[Repetition]
    ) -> None:
        """Compare the state with the checkpoint at the end of the interval, tensor by tensor."""
        path = self.run.path_of(end)
        altered = self._altered(end)
        if altered:
            outcome.problems.append(altered)
        if not path.exists():
            return
        saved, state = _tensors_in(checkpoint.read(path)), once.state
        if self.rounding is not None:  # random states differ between kinds of devices
            saved, state = _without_rng(saved), _without_rng(state)
        strayed = _distances(state, saved)
        allowed = dict.fromkeys(strayed, 0.0)
        if self.rounding is not None:
            of_twins = [_distances(state, _without_rng(twin.state)) for twin in twins]
            for name in strayed:
                least = 0.0 if _is_count(saved.get(name)) else LEAST
                allowed[name] = _allowed([each.get(name, math.inf) for each in of_twins], least)
        far = [name for name, distance in strayed.items() if not distance <= allowed[name]]
        largest = max(strayed.values(), default=0.0)
        outcome.state = f"{largest:.1e} apart" if largest else "equal"
        if far:
            worst = max(far, key=lambda name: strayed[name])
            outcome.problems.append(
                f"{len(far)} of {len(strayed)} tensors of {path.name} are not what training gives;"
                f" farthest: {worst}"
            )


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a row for each comparison, and the problems below."""
    rows = []
    for outcome in outcomes:
        limit = None if outcome.difference is None else outcome.allowed
        numbers = [
            _shown(outcome.recorded),
            _shown(outcome.replayed),
            _shown(outcome.difference, ".2g"),
            _shown(limit),
        ]
        verdict = "differs" if outcome.problems else "as recorded"
        rows.append([outcome.what, str(outcome.steps), *numbers, outcome.state, verdict])
    headers = ["", "steps", "recorded", "replayed", "difference", "allowed", "state at its end"]
    show_table("replay (mean loss in nats; largest difference)", [*headers, "verdict"], rows)
    for outcome in outcomes:
        for problem in outcome.problems:
            say(f"{outcome.what}: {problem}")


def _shown(value: float | None, digits: str = ".6g") -> str:
    return "" if value is None else format(value, digits)


# Conditions of a replay -----------------------------------------------------------------------------


def environments_of(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the environment of each process of the run."""
    return [process.setup.environment for process in run.training.processes if process.setup]


def differences_of_hardware(run: RecordedRun, device: torch.device) -> Iterator[str]:
    """Yield reasons why numbers may differ in their last bits here; nothing if they must be equal."""
    here = environment_here(device)
    if run.record["pretrain"]["devices"] != 1:
        yield "the run had several processes"
    for recorded in environments_of(run):
        if {device.type, recorded["device"]["kind"]} != {"cpu"}:
            names = f"{recorded['device']['name']}, here {here['device']['name']}"
            yield f"a GPU's sums have no fixed order ({names})"
            return
        yield from cpu_differences(recorded, here)


def has_dropout(run: RecordedRun) -> bool:
    """Return whether losses depend on the random numbers drawn, and so on how they are computed."""
    model = run.record["config"]["model"]
    return any(model.get(name) for name in ("dropout", "attention_dropout"))


def refuse_other_numbers(run: RecordedRun, device: torch.device) -> None:
    """Raise UserError for a run whose losses one process here cannot reproduce, however honest they are.

    Compression needs the gradients of each process, dropout the random numbers of each process and kind of device.
    """
    processes = run.record["pretrain"]["devices"]
    compression = run.record["config"]["parallel"].get("compression", {}).get("name", "none")
    drawn_on = {_generator(recorded["device"]) for recorded in environments_of(run)}
    here = _generator(asdict(devices.describe(device)))
    reasons = []
    if processes > 1 and compression != "none":
        reasons.append(f"parallel.compression={compression} on {processes} processes")
    if processes > 1 and has_dropout(run):
        reasons.append(f"dropout on {processes} processes, each with random numbers of its own")
    if has_dropout(run) and drawn_on != {here}:
        reasons.append(f"dropout by random numbers of {' and '.join(sorted(drawn_on))}")
    for reason in reasons:
        raise UserError(
            f"{run.folder}: trained with {reason}, which one process on {here} does not repeat."
            " A replay here proves nothing; `cramming verify` checks the log."
        )


def _generator(device: Mapping[str, Any]) -> str:
    """Return the name of the random generator.

    Devices of one name draw equal numbers from one seed, and so do all CPUs.
    """
    return "a CPU" if device["kind"] == "cpu" else str(device["name"])


def _refuse_other_corpus(run: RecordedRun, data: RunData) -> None:
    """Raise UserError if the corpora here are not the run's."""
    recorded, here = run.record["corpus"], data.describe()
    pairs = [(recorded, here), (recorded.get("validation") or {}, here.get("validation") or {})]
    for was, now in pairs:
        require(
            was.get("manifest_sha256") == now.get("manifest_sha256"),
            f"{now.get('folder')}: not the corpus of the run in {run.folder} (its manifest differs)."
            " Give that one with data.corpus=<folder> (or train.validation_corpus).",
        )


def recipe_of(
    run: RecordedRun, settings: Mapping[str, Any], replaced: Sequence[str]
) -> dict[str, Any]:
    """Return the run's recipe with the corpus folders of this call and with its `replaced` sections.

    Every step is logged, and no validation or checkpoint is due.
    """
    recorded, section = run.record["config"], run.record["pretrain"]
    train, validation_corpus = recorded["train"], settings["train"]["validation_corpus"]
    corpus = settings["data"]["corpus"] or run.record["corpus"]["folder"]
    return {
        **recorded,
        **{name: settings[name] for name in replaced},
        "data": {**recorded["data"], "corpus": corpus},
        "train": {
            **train,
            "log_every": 1,
            "micro_batch": section.get("micro_batch") or train["micro_batch"],
            "validation_corpus": validation_corpus or train["validation_corpus"],
        },
        "precision": {**recorded["precision"], "mode": section["precision"]},
    }


# Numbers --------------------------------------------------------------------------------------------


def _never() -> bool:
    return False


def _number(value: Any) -> float:
    """Return a number; infinity stands for a value that is missing or was not finite, so that it can be compared."""
    return value if isinstance(value, int | float) else math.inf


def _apart(a: float, b: float) -> float:
    """Return the distance of two numbers; 0 if both are infinite."""
    return 0.0 if a == b else abs(a - b)


def _loss(validation: Validation) -> float | None:
    """Return the loss by which the run is compared."""
    if validation.loss is not None:
        return validation.loss
    return validation.replaced_token_loss


def _allowed(strayed: Sequence[float], least: float = LEAST) -> float:
    """Return the allowed difference of a number, from the distances of the repetitions (bench/gate.py)."""
    return max(least, MULTIPLE * max(strayed))


def _without_rng(state: Tensors) -> Tensors:
    return {name: value for name, value in state.items() if name != "rng"}


def _is_count(value: Tensor | None) -> bool:
    return value is not None and value.ndim == 0 and not value.is_floating_point()


def _tensors_in(node: Any, path: str = "") -> Tensors:
    """Return the contents of a checkpoint as a flat dict, without times.

    Values that are not numbers are part of the name.
    """
    if isinstance(node, Tensor):
        return {path: node.detach().cpu()}
    if isinstance(node, int | float):
        dtype = torch.int64 if isinstance(node, int) else torch.float64
        return {path: torch.tensor(node, dtype=dtype)}
    children: Any = None
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list | tuple):
        children = enumerate(node)
    if children is None:
        return {f"{path}={node}": torch.zeros(())}
    tensors: Tensors = {}
    for name, child in children:
        is_time = path == "work" and name not in WORK
        is_gpu_random_state = not path and name == "cuda_rng"
        if not is_time and not is_gpu_random_state:
            tensors |= _tensors_in(child, f"{path}.{name}".lstrip("."))
    return tensors


def _distances(state: Tensors, saved: Tensors) -> dict[str, float]:
    """Return the distance of each tensor relative to its norm; infinite if it is missing or has another shape."""
    names = sorted(state.keys() | saved.keys())
    return {name: _distance(state.get(name), saved.get(name)) for name in names}


def _distance(tensor: Tensor | None, other: Tensor | None) -> float:
    if tensor is None or other is None or tensor.shape != other.shape:
        return math.inf
    if torch.equal(tensor, other):
        return 0.0
    difference = (tensor.double() - other.double()).norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / max(other.double().norm().item(), 1e-12)
