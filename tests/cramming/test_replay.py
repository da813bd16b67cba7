"""A replay finds the honest run's numbers again, bit for bit, and no forger's."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cramming import launch, replay
from cramming import run as run_module
from cramming.checkpoint import read
from cramming.config import UserError, file_sha256
from cramming.engine import Engine
from cramming.invocation import Invocation
from cramming.record import load_record
from cramming.replay import Interval, RecordedRun, Replay
from cramming.runlog import Saved
from cramming.train_parts import Validator
from tests.conftest import before_step
from tests.forge import Json, events_of, forge, write_events

Start = Callable[..., Path]
Compose = Callable[..., dict[str, Any]]
KEPT = [
    "budget.steps=8",
    "checkpoint.keep_at=[0,0.25,0.5,0.75]",
    "train.log_every=3",
    "train.validation_tokens=128",
]
EVERYTHING = {"intervals": "all", "seed": None, "json": True}
HERE = Invocation(device="cpu")


@pytest.fixture
def replayed(compose: Compose, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """`replayed(run)`: the problems that a replay names, of everything unless told otherwise."""

    def call(run: Path, *overrides: str, **options: Any) -> list[str]:
        capsys.readouterr()
        code = 0
        try:
            replay.main(compose(*overrides), HERE, path=run, **{**EVERYTHING, **options})
        except SystemExit as ended:
            code = int(str(ended.code))
        result = json.loads(capsys.readouterr().out)
        problems = []
        for outcome in result["outcomes"]:
            problems += [f"{outcome['what']}: {problem}" for problem in outcome["problems"]]
        assert code == bool(problems)
        return problems

    return call


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM in the update of this step."""
    original, calls = Engine.update, [0]

    def update(self: Engine, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    monkeypatch.setattr(Engine, "update", update)


RAMP = ["schedule=triangle", "train.batch_ramp={start: 0.5, until: 0.8}"]
PHASES = "objective.phases=[{at: 0.2, rate: 0.15}, {at: 0.7, rate: 0.05}]"
CAUSAL = ["objective=causal-then-mlm", "objective.until=0.5"]
BY_LOSS = [
    "objective=mlm-by-loss",
    "objective.power=100",
    "train.average={start: 0.3, every: 0.1}",
]


@pytest.mark.parametrize(
    "settings",
    [
        [*RAMP, PHASES, "model.dropout=0.2", "train.packing=documents"],
        CAUSAL,
        [*BY_LOSS, "optim=lamb"],
        ["objective=rtd"],
        ["objective=distill", "objective.teacher=TEACHER", "start=teacher"],
    ],
)
def test_an_honest_run_that_was_stopped_and_resumed_gives_the_same_bits(
    start: Start, replayed: Callable[..., list[str]], settings: list[str], teacher: Path
) -> None:
    """Stopped within an interval, with all that a checkpoint holds."""
    settings = [word.replace("TEACHER", str(teacher)) for word in settings]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        stop_in_step(patch, 5)
        start(*KEPT, *settings, name="a")
    run = start(*KEPT, *settings, name="a", resume=True)
    assert [saved.steps for saved in RecordedRun.read(run).checkpoints] == [0, 2, 4, 5, 6, 8]
    assert replayed(run) == []


def test_a_budget_of_time_is_repeated_at_the_progress_of_its_steps(
    start: Start, replayed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    run = start(*KEPT, "budget.steps=null", "budget.minutes=0.03", "schedule=triangle", name="a")
    recorded = RecordedRun.read(run)
    assert 3 <= len(recorded.intervals) <= recorded.last
    assert replayed(run) == []


def test_a_run_without_kept_checkpoints_is_replayed_from_its_seed(
    unbroken: Path, replayed: Callable[..., list[str]]
) -> None:
    assert RecordedRun.read(unbroken).intervals[0][:3] == (None, 1, 9)
    assert replayed(unbroken) == []


def test_what_is_kept_stays_and_changes_no_number(start: Start) -> None:
    saving = start(*KEPT, "checkpoint.every_steps=1", name="a")
    plain = start(*KEPT, "checkpoint.keep_at=[]", name="b")
    names = [f"kept-0000000{step}.pt" for step in (0, 2, 4, 6)]
    names += [f"step-0000000{step}.pt" for step in (7, 8)]
    assert sorted(path.name for path in (saving / "checkpoints").iterdir()) == names
    hashes = [load_record(run)["pretrain"]["final_sha256"] for run in (saving, plain)]
    assert hashes[0] == hashes[1]


def test_a_validation_that_a_crash_threw_away_is_not_held_against_the_run(
    start: Start, unbroken: Path, replayed: Callable[..., list[str]]
) -> None:
    """At half of the compute, in step 6; crashed in step 8 and resumed from step 4, with three steps' compute lost."""

    def crash() -> None:
        raise KeyboardInterrupt

    compute = f"budget.exaflops={load_record(unbroken)['pretrain']['exaflops']}"
    settings = ["budget.steps=null", compute, "train.log_every=4", "checkpoint.every_steps=4"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before_step(patch, 8, crash)
        start(*settings, name="a")
    run = start(*settings, name="a", resume=True)
    assert [event["event"] for event in events_of(run)].count("validation") == 2
    assert list(RecordedRun.read(run).validations) == [RecordedRun.read(run).last] == [9]
    assert replayed(run) == []


def test_a_signal_ends_a_replay_wherever_it_comes(
    unbroken: Path, replayed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in its loop alone: nothing is to be saved, so the command line's handlers stay."""
    monkeypatch.setattr(Validator, "validate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        replayed(unbroken)


def test_the_stated_probability_is_right() -> None:
    """The share of 2,000 draws that cover the interval with forged weights is the stated one."""
    intervals = []
    for number in range(20):
        end = Saved(5 * number + 5, "")
        begin = Saved(5 * number, "") if number else None
        intervals.append(Interval(begin, 5 * number + 1, 5 * number + 5, end))
    rng = random.Random(0)
    for count in (1, 3, 10):
        hits = 0
        for _ in range(2000):
            forged = intervals[rng.randrange(20)]
            hits += forged in replay.draw(intervals, count, rng.getrandbits(32))
        assert hits / 2000 == pytest.approx(count / 20, abs=0.04)
        chosen = replay.draw(intervals, count, 0)
        assert f"probability {count / 20:.0%}" in replay.coverage(intervals, chosen, 100)
        assert replay.steps_share(chosen, 100) == count / 20


# Forgeries. A forger writes whatever agrees: the means, the chain, the hashes of checkpoints. --------


@pytest.fixture(scope="module")
def honest(
    tmp_path_factory: pytest.TempPathFactory, compose: Compose, tiny_overrides: list[str]
) -> Start:
    """`honest(*overrides)`: a run that kept its checkpoints, made once for each set of overrides; read-only."""
    runs, made = tmp_path_factory.mktemp("honest"), dict[tuple[str, ...], Path]()

    def call(*overrides: str) -> Path:
        if overrides not in made:
            name = f"run{len(made)}"
            launch.main(
                compose(*tiny_overrides, *KEPT, *overrides), Invocation(name, runs, device="cpu")
            )
            made[overrides] = runs / name
        return made[overrides]

    return call


def change_losses(run: Path, change: Callable[[int, float], float]) -> None:
    """Change each step's loss to `change(step, loss)`, and the means with them."""

    def edit(event: Json) -> None:
        first = event["step"] - len(event["each_loss"]) + 1
        event["each_loss"] = [change(s, x) for s, x in enumerate(event["each_loss"], first)]
        event["loss"] = sum(event["each_loss"]) / len(event["each_loss"])

    forge(run, edit, "steps")


def change_recipe(run: Path, key: str, value: Any) -> None:
    """Change a setting of the recipe that the log has."""
    *sections, name = key.split(".")

    def edit(event: Json) -> None:
        node = event.get("recipe") or {}
        for section in sections:
            node = node.get(section, {})
        if name in node:
            node[name] = value

    forge(run, edit, "start")


def change_environment(run: Path, **values: Any) -> None:
    """Change what the log says of the hardware."""
    forge(run, lambda event: event["environment"].update(values), "setup")


def checkpoint_of(run: Path, steps: int) -> Path:
    """The file of a checkpoint."""
    return next((run / "checkpoints").glob(f"*-{steps:08d}.pt"))


def reseal(run: Path) -> None:
    """Give each checkpoint in the log the hash that its file has now."""
    hashes: dict[str, str] = {}

    def edit(event: Json) -> None:
        if event["event"] == "checkpoint":
            files = list((run / "checkpoints").glob(f"*-{event['step']:08d}.pt"))
            if files:
                hashes[event["sha256"]] = file_sha256(files[0])
        if event.get("sha256") in hashes:
            event["sha256"] = hashes[event["sha256"]]

    forge(run, edit, "checkpoint", "resume")


def alter(run: Path, steps: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the contents of a checkpoint."""
    path = checkpoint_of(run, steps)
    state = read(path)
    change(state)
    torch.save(state, path)
    reseal(run)


def smuggle(run: Path, steps: int, other: Path, from_steps: int) -> None:
    """Put in weights and optimizer of another run's checkpoint, with counters and random states of this one's."""
    source = read(checkpoint_of(other, from_steps))
    taken = {name: source[name] for name in ("model", "optimizer")}
    alter(run, steps, lambda state: state.update(taken))


def copy_steps(run: Path, other: Path, first: int, last: int) -> None:
    """Take the losses of another run."""
    source = RecordedRun.read(other).steps
    change_losses(run, lambda s, x: source[s].loss or 0.0 if first <= s <= last else x)


def blurred(run: Path, *distances: int) -> Callable[[int, float], float]:
    """A step's loss is the mean of those so many steps behind it."""
    at = {step: recorded.loss or 0.0 for step, recorded in RecordedRun.read(run).steps.items()}
    return lambda step, _: sum(at[min(8, max(1, step + d))] for d in distances) / len(distances)


def moments(state: dict[str, Any]) -> None:
    for each in state["optimizer"]["state"].values():
        each["exp_avg"] *= 2


def one_weight(state: dict[str, Any]) -> None:
    next(iter(state["model"].values())).view(-1)[3] += 1e-6


def lower_validation(event: Json) -> None:
    event["loss"] *= 0.99


def later_progress(event: Json) -> None:
    event["each_progress"] = [min(1.0, progress + 0.01) for progress in event["each_progress"]]


def without_steps(run: Path, last: int) -> None:
    """Leave out the first rows of the log."""
    events = [e for e in events_of(run) if e["event"] != "steps" or e["step"] > last]
    write_events(run, events)


def final_of(run: Path, other: Path, steps: int) -> None:
    """Take the last checkpoint, final/ and the validation of a run that trained longer."""
    smuggle(run, 8, other, steps)
    theirs = {event["event"]: event for event in events_of(other)}
    measured = ("loss", "accuracy", "all_mask_loss", "all_mask_accuracy")

    def edit(event: Json) -> None:
        if event["event"] == "exported":
            event["files"] = theirs["exported"]["files"]
        elif event.get("held_out_tokens"):
            event.update({name: theirs["validation"][name] for name in measured})

    forge(run, edit, "exported", "validation")
    shutil.rmtree(run / "final")
    shutil.copytree(other / "final", run / "final")


SEED, RATE, LONG = ("seed=1",), ("optim.lr=0.01",), ("budget.steps=24",)
Forge = Callable[[Path, Start], Any]
FORGERIES: dict[str, Forge] = {
    "the curve is one per cent lower": lambda run, _: change_losses(run, lambda s, x: 0.99 * x),
    "the curve is 0.001 nats lower": lambda run, _: change_losses(run, lambda s, x: x - 1e-3),
    "the second half is lower": lambda run, _: change_losses(run, lambda s, x: x - 0.1 * (s > 4)),
    "the curve is shifted by a step": lambda run, _: change_losses(run, blurred(run, 1)),
    "the curve is smoothed": lambda run, _: change_losses(run, blurred(run, -1, 0, 1)),
    "one step is edited": lambda run, _: change_losses(run, lambda s, x: x - 1e-6 * (s == 5)),
    "an interval of another seed": lambda run, other: copy_steps(run, other(*SEED), 3, 4),
    "the log of another rate": lambda run, other: copy_steps(run, other(*RATE), 1, 8),
    "gradient norms are lower": lambda run, _: forge(
        run, lambda event: event.update(grad_norm=0.9 * event["grad_norm"]), "steps"
    ),
    "validations are lower": lambda run, _: forge(run, lower_validation, "validation"),
    "each step's progress is later": lambda run, _: forge(run, later_progress, "steps"),
    "more tokens": lambda run, _: forge(
        run, lambda event: event.update(tokens=2 * event["tokens"]), "steps"
    ),
    "the recipe's seed": lambda run, _: change_recipe(run, "seed", 1),
    "the recipe's batch": lambda run, _: change_recipe(run, "train.batch_size", 4),
    "the recipe's sequence length": lambda run, _: change_recipe(run, "train.sequence_length", 16),
    "the recipe's learning rate": lambda run, _: change_recipe(run, "optim.lr", 2e-3),
    "the recipe's schedule": lambda run, _: change_recipe(run, "schedule.decay", 0.9),
    "the recipe's share of targets": lambda run, _: change_recipe(run, "objective.rate", 0.15),
    "the recipe's dropout": lambda run, _: change_recipe(run, "model.dropout", 0.1),
    "trained weights at the start": lambda run, other: smuggle(run, 0, run, 8),
    "more steps at a quarter": lambda run, other: smuggle(run, 2, other(*LONG), 18),
    "another rate at a half": lambda run, other: smuggle(run, 4, other(*RATE), 4),
    "another seed at three quarters": lambda run, other: smuggle(run, 6, other(*SEED), 6),
    "a checkpoint that the log does not have": lambda run, other: shutil.copy(
        checkpoint_of(other(*SEED), 4), checkpoint_of(run, 4)
    ),
    "one weight of a checkpoint": lambda run, _: alter(run, 4, one_weight),
    "the optimizer's moments": lambda run, _: alter(run, 6, moments),
    "the counters of a checkpoint": lambda run, _: alter(
        run, 4, lambda state: state["work"].update(sequences=state["work"]["sequences"] + 8)
    ),
    "a kept checkpoint is gone": lambda run, _: checkpoint_of(run, 4).unlink(),
    "final/ of a run that trained longer": lambda run, other: final_of(run, other(*LONG), 24),
    "final/ without its checkpoint": lambda run, _: forge(
        run, lambda event: event["files"].update({"model.safetensors": "0f" * 32}), "exported"
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_run_is_named(
    honest: Start, tmp_path: Path, replayed: Callable[..., list[str]], forgery: str
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    FORGERIES[forgery](run, honest)
    assert replayed(run)


def test_a_log_without_all_its_steps_is_refused(
    honest: Start, tmp_path: Path, compose: Compose
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    without_steps(run, 3)
    with pytest.raises(UserError, match="does not have each step"):
        replay.main(compose(), HERE, path=run, **EVERYTHING)


@pytest.mark.parametrize("how", ["pretrained", "other data"])
def test_a_run_that_continued_honestly_from_what_was_smuggled_in_is_named(
    start: Start,
    honest: Start,
    make_corpus: Start,
    tmp_path: Path,
    replayed: Callable[..., list[str]],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the beginning is false, and every file was made by training: pretrained weights at the start; or another
    corpus, which the log does not name."""
    if how == "pretrained":
        trained = read(checkpoint_of(honest(*LONG), 24))["model"]
        original = run_module.start_engine

        def start_engine(*arguments: Any) -> Any:
            engine, work = original(*arguments)
            engine.model.load_state_dict(trained)
            return engine, work

        with monkeypatch.context() as patch:
            patch.setattr(run_module, "start_engine", start_engine)
            run = start(*KEPT, name="a")
    else:
        run = start(*KEPT, f"data.corpus={make_corpus(tmp_path / 'other', seed=1)}", name="a")
        (claimed,) = [event for event in events_of(honest()) if event["event"] == "setup"]
        names = ("corpus", "manifest_sha256", "windows")
        forge(run, lambda event: event.update({n: claimed[n] for n in names}), "setup")
    assert any("losses" in problem for problem in replayed(run))


def test_smuggled_at_a_quarter_and_trained_on_from_there(
    start: Start, honest: Start, replayed: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Stopped, other weights put into its checkpoints, resumed: the log is that of real training at every step.

    The interval that ends there names it, and no other.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        stop_in_step(patch, 2)
        start(*KEPT, name="a")
    run = tmp_path / "runs" / "a"
    smuggle(run, 2, honest(*LONG), 18)
    run = start(*KEPT, name="a", resume=True)
    (problem,) = replayed(run)
    assert "from the seed" in problem and "00000002.pt" in problem


def test_weights_swapped_in_during_training_are_named_by_the_interval_that_covers_the_step(
    start: Start, honest: Start, compose: Compose
) -> None:
    """A wrapper trains off the clock and puts the weights in before step 5: everything else is real training.

    Of all draws of one interval, the share that names it is the stated probability.
    """
    weights = read(checkpoint_of(honest(*LONG), 24))["model"]
    forward_backward, calls = Engine.forward_backward, [0]

    def swapped(self: Engine, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            self.model.load_state_dict(weights)
        return forward_backward(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "forward_backward", swapped)
        run = start(*KEPT, name="a")
    recorded = RecordedRun.read(run)
    prepared = Replay.of(recorded, compose(), HERE)
    named = {}
    for interval in recorded.intervals:
        named[interval] = bool(prepared.outcome(interval).problems)
    assert [interval for interval, is_named in named.items() if is_named] == [
        next(interval for interval in recorded.intervals if interval.first == 5)
    ]
    draws = [replay.draw(recorded.intervals, 1, seed)[0] for seed in range(200)]
    share = sum(named[interval] for interval in draws) / len(draws)
    assert share == pytest.approx(1 / len(recorded.intervals), abs=0.1)


def test_elsewhere_a_tolerance_is_measured(
    honest: Start, tmp_path: Path, replayed: Callable[..., list[str]]
) -> None:
    """With another number of threads an honest run passes, and a curve that is one per cent lower fails."""
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    change_environment(run, threads=7)
    assert replayed(run) == []
    for more, is_named in ((1, True), (-1, False)):
        alter(
            run,
            4,
            lambda state, more=more: state["work"].update(tokens=state["work"]["tokens"] + more),
        )
        named = any("work.tokens" in problem for problem in replayed(run))
        assert named == is_named, "a count has no rounding"
    smuggle(run, 4, honest(*SEED), 4)
    assert any("00000004.pt" in problem for problem in replayed(run))
    change_losses(run, lambda step, loss: 0.99 * loss)
    assert len([problem for problem in replayed(run) if "losses" in problem]) == 4


@pytest.mark.parametrize("name", ["loss", "all_mask_loss"])
def test_elsewhere_too_each_loss_of_the_last_validation_is_compared(
    honest: Start, tmp_path: Path, compose: Compose, name: str
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    change_environment(run, threads=7)
    for factor, problems in ((1.0, 0), (0.99, 1)):

        def edit(event: Json, factor: float = factor) -> None:
            if event.get("held_out_tokens"):
                event[name] *= factor

        forge(run, edit, "validation")
        (outcome,) = Replay.of(RecordedRun.read(run), compose(), HERE).end()
        assert outcome.allowed > 0 and len(outcome.problems) == problems, outcome.problems


@pytest.mark.parametrize(
    "where", ["memory.offload_optimizer=false", "memory.offload_optimizer=true"]
)
def test_the_repetitions_that_a_tolerance_is_made_of_differ_in_every_step(
    honest: Start, tmp_path: Path, compose: Compose, where: str
) -> None:
    """Also where the optimizer has copies of the weights."""
    run = tmp_path / "a"
    shutil.copytree(honest(), run)
    change_environment(run, threads=7)
    repeating = Replay.of(RecordedRun.read(run), compose(where), HERE)
    repeating = replace(repeating, rounding=1e-2)
    once, twin = (repeating.repeat(Interval(None, 1, 3, None), number) for number in range(2))
    assert all(a != b for a, b in zip(once.losses, twin.losses, strict=True))


H9 = {"device": {"kind": "cuda", "name": "H9"}}


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        (["parallel.compression=qsgd"], {"devices": 2}, "parallel.compression=qsgd on 2"),
        (["model.dropout=0.2"], {"devices": 2}, "dropout on 2 processes"),
        (["model.attention_dropout=0.2"], H9, "dropout by random numbers of H9"),
        (["parallel.compression=qsgd"], {}, ""),
        ([], {"devices": 2}, ""),
    ],
)
def test_a_run_with_numbers_that_one_process_here_does_not_have_is_refused(
    honest: Start,
    tmp_path: Path,
    replayed: Callable[..., list[str]],
    settings: list[str],
    change: Any,
    says: str,
) -> None:
    """And not called false."""
    run = tmp_path / "a"
    shutil.copytree(honest(*settings), run)

    def edit(event: Json) -> None:
        place = event["environment"] if "device" in change else event
        place.update(change)

    forge(run, edit, "setup")
    if not says:
        assert replayed(run) == []
        return
    with pytest.raises(UserError, match=f"{says}.* does not repeat"):
        replayed(run)


def test_random_numbers_are_drawn_as_the_run_drew_them_elsewhere_too(
    honest: Start, tmp_path: Path, compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drawn numbers depend on the way of computing: it is that of the run, not of this call."""
    run = tmp_path / "a"
    overrides = (
        "model.attention_dropout=0.2",
        "train.packing=documents",
        "attention.kernel=padded",
    )
    shutil.copytree(honest(*overrides), run)
    change_environment(run, threads=7)
    replay.main(compose("attention.kernel=sdpa"), HERE, path=run, **EVERYTHING)
    assert "within a measured tolerance" in capsys.readouterr().out


def test_what_is_missing_is_said_in_one_line(
    honest: Start, tmp_path: Path, compose: Compose, make_corpus: Start
) -> None:
    run = tmp_path / "a"
    shutil.copytree(honest(), run)

    def refused(*overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            replay.main(compose(*overrides), HERE, path=run, **EVERYTHING)
        return str(caught.value)

    assert "not the corpus" in refused(f"data.corpus={make_corpus(tmp_path / 'other', seed=1)}")
    assert str(tmp_path / "gone") in refused(f"data.corpus={tmp_path / 'gone'}")
    run = tmp_path
    assert "no such run log" in refused()
