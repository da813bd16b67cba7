"""Honest runs of many shapes: `verify` finds each in order, and no report calls it invalid.

What a rule says of a run that did nothing wrong is a false alarm, however the run came to its end.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cramming import launch
from cramming.invocation import Invocation
from cramming.train_parts import Validator
from cramming.verbs import OPTIONS
from eval import glue
from eval.archive import SUFFIX, pack
from eval.rules.load import load_runs
from eval.rules.table import KINDS
from eval.verify import Inputs, verify_run
from tests.conftest import before_step
from tests.eval.glue_layouts import write_glue
from tests.eval.rules.forge import Event, forge, of_kind, read_events
from tests.eval.rules.test_forgeries import both, every, within

Run = Callable[..., Path]
Compose = Callable[..., dict[str, Any]]
Check = Callable[[Path], None]
# Of forty steps, scored on one small task with one seed; the corpus is the honest run's.
SMALL = ("eval.seeds=[0]", "eval.tasks=[rte]", "checkpoint.every_steps=15")
STEPS = ("budget.steps=40",)

SHAPES: dict[str, tuple[str, ...]] = {
    "another seed": (*STEPS, "seed=7"),
    "a budget of tokens": ("budget.tokens=7000",),
    "a budget of minutes": ("budget.minutes=0.05",),
    "a budget of exaFLOPs": ("budget.exaflops=1e-9",),
    "a batch ramp": (*STEPS, "train.batch_ramp={start: 0.25, until: 0.6}", "train.micro_batch=2"),
    "a batch ramp by the clock": (
        "budget.minutes=0.05",
        "train.batch_ramp={start: 0.5, until: 0.8}",
    ),
    "phases of the objective": (*STEPS, "objective=causal-then-mlm"),
    "masks by loss": (*STEPS, "objective=mlm-by-loss"),
    "all masked": (*STEPS, "objective=mlm-allmask"),
    "replaced tokens": (*STEPS, "objective=rtd"),
    "a teacher": (*STEPS, "objective=distill", "start=teacher", "objective.teacher=TEACHER"),
    "averaged weights": (*STEPS, "train.average={start: 0.5, every: 0.1}"),
    "a start from counts": (*STEPS, "start=cooccurrence"),
    "muon": (*STEPS, "optim=muon"),
    "lamb, cosine": (*STEPS, "optim=lamb", "schedule=cosine"),
    "adagrad, triangle": (*STEPS, "optim=adagrad", "schedule=triangle"),
    "checkpoints kept": (*STEPS, "checkpoint.keep_at=[0,0.5]"),
    "bf16": (*STEPS, "precision.mode=bf16"),
    "no validation while it trains": (*STEPS, "train.validations=0"),
    "packed documents": (*STEPS, "train.packing=documents"),
    "a curriculum": (*STEPS, "train.order=sentence_length"),
    "rows of odd steps": (*STEPS, "train.log_every=7"),
    "recomputed activations": (*STEPS, "memory.checkpoint_every=1"),
    "shorter than a row of the log": ("budget.steps=3",),
    "a peak between two rows": (
        "budget.steps=8",
        "train.log_every=7",
        "train.validations=0",
        "schedule=triangle",
    ),
    "validated on one row": (*STEPS, "train.validation_tokens=10"),
    "validated on a block and a bit": (
        *STEPS,
        "train.sequence_length=22",
        "train.validation_tokens=22",
    ),
    "a rate by batch and width": (
        *STEPS,
        "optim.lr_scale={rule: sqrt, base_batch: 64}",
        "optim.lr_width={base_width: 64, power: -0.5}",
    ),
    "the open division": (*STEPS, "division=open"),
    "two tasks, five seeds": (*STEPS, "eval.tasks=[rte,stsb]", "eval.seeds=[0,1,2,3,4]"),
    "scored by weights that diverged": (
        *STEPS,
        "eval.tasks=[rte,stsb]",
        "eval.hyperparameters.learning_rate=1e30",
        "eval.hyperparameters.max_grad_norm=null",
    ),
    "from random weights too, and baselines": (
        *STEPS,
        "eval.init=[pretrained,random]",
        "eval.baselines=true",
    ),
}


@pytest.fixture
def call(honest_run: Path, tmp_path: Path) -> Invocation:
    """The call that makes a small run, `runs/run`."""
    return Invocation("run", tmp_path / "runs", honest_run.parents[1] / "corpora", "cpu")


@pytest.fixture
def overrides(clean_tree: tuple[str, ...]) -> tuple[str, ...]:
    """Settings of a small run."""
    replaced = ("budget.steps=", "eval.seeds=", "checkpoint.")
    unchanged = [setting for setting in clean_tree if not setting.startswith(replaced)]
    return (*unchanged, *SMALL)


@pytest.fixture
def settings(
    overrides: tuple[str, ...], compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> Compose:
    """Settings of a small run with more overrides; each training is as one of a process of its own."""
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    return lambda *more: compose(*overrides, *more)


@pytest.fixture
def train(settings: Compose, call: Invocation) -> Run:
    """`train(*overrides, ended=[(10, "stop"), (5, "kill")])`: processes that end so, resumed each time; then scored."""

    def make(
        *overrides: str,
        ended: list[tuple[int, str]] | None = None,
        score: bool = True,
        resume: bool = False,
    ) -> Path:
        chosen, here = settings(*overrides), replace(call, resume=resume)
        for step, how in ended or ():
            if how == "kill":
                assert in_a_child(chosen, here, step) == -signal.SIGKILL
            else:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
                    before_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
                    launch.main(chosen, here)
            here = replace(here, resume=True)
        launch.main(chosen, here)
        if score:
            glue.main(chosen, here)
        return here.run_folder

    return make


def in_a_child(chosen: dict[str, Any], call: Invocation, killed_at: int | None = None) -> int:
    """Train in another process, which may get `kill -9` before a step; returns its exit code."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            if killed_at:
                before_step(patch, killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            launch.main(chosen, call)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def assert_in_order(inputs: Inputs) -> Check:
    """Check that nothing but the closed division's rules is broken, by verify and by a report."""

    def check(run: Path) -> None:
        result = verify_run(run, inputs)
        broken = [each for each in result.findings if not each.ok and KINDS[each.rule] != "closed"]
        assert result.in_order and not broken, (result.problems, broken)
        for loaded in load_runs(run.parent):
            assert not loaded.problem and loaded.verdict.division in ("closed", "open")

    return check


@pytest.mark.parametrize("shape", SHAPES)
def test_an_honest_run_is_in_order(
    shape: str, train: Run, assert_in_order: Check, honest_run: Path
) -> None:
    teacher = str(honest_run / "final")
    assert_in_order(train(*(word.replace("TEACHER", teacher) for word in SHAPES[shape])))


@pytest.mark.parametrize(
    "ended",
    [
        [(10, "stop")],
        [(12, "stop"), (8, "stop")],
        [(20, "kill")],
        [(6, "kill")],
        [(25, "kill"), (8, "stop")],
    ],
    ids=[
        "stopped",
        "stopped twice",
        "killed",
        "killed before a checkpoint",
        "killed, then stopped",
    ],
)
def test_a_run_that_was_resumed_is_in_order(
    ended: list[tuple[int, str]], train: Run, assert_in_order: Check
) -> None:
    assert_in_order(train(*STEPS, ended=ended))


def test_a_run_that_was_stopped_while_it_validated_is_in_order(
    settings: Compose, train: Run, assert_in_order: Check, call: Invocation
) -> None:
    original = Validator.validate

    def stopped(self: Validator, *rest: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *rest)

    chosen = (*STEPS, "train.log_every=50")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Validator, "validate", stopped)
        launch.main(settings(*chosen), call)
    launch.main(settings(*chosen), replace(call, resume=True))
    glue.main(settings(*chosen), call)
    assert_in_order(call.run_folder)


def test_a_run_by_the_clock_of_the_cpu_that_was_killed_is_in_order(
    settings: Compose, assert_in_order: Check, call: Invocation
) -> None:
    """It counts what a process has used, so each is a new one."""
    chosen = settings("budget.minutes=0.03", "budget.clock=cpu")
    assert in_a_child(chosen, call, 4) == -signal.SIGKILL
    assert in_a_child(chosen, replace(call, resume=True)) == 0
    glue.main(chosen, call)
    assert_in_order(call.run_folder)


def test_further_scorings_are_in_order(
    train: Run, settings: Compose, inputs: Inputs, assert_in_order: Check, call: Invocation
) -> None:
    """Repetition, more seeds, another task, other hyperparameters; an interrupted run is unfinished."""
    always = (*STEPS, "eval.baselines=true")
    two = ("eval.seeds=[0,1]", "eval.tasks=[rte,cola]")
    run = train(*always)
    for overrides in (
        (),
        ("eval.seeds=[0,1]",),
        two,
        (*two, "eval.hyperparameters.learning_rate=1e-4"),
    ):
        glue.main(settings(*always, *overrides), call)
        assert_in_order(run)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("eval.finetune.scoring.show_result", interrupt)
        glue.main(settings(*always, *two, "eval.hyperparameters.learning_rate=3e-3"), call)
    assert verify_run(run, inputs).is_unfinished
    glue.main(settings(*always, *two, "eval.hyperparameters.learning_rate=3e-3"), call)
    assert_in_order(run)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_scores_along_the_way_are_in_order_unless_the_weights_are_others(
    train: Run, settings: Compose, inputs: Inputs, assert_in_order: Check, call: Invocation
) -> None:
    chosen = (*STEPS, "checkpoint.keep_at=[0,0.5]")
    run = train(*chosen)
    for share in (0.5, 0.0):
        glue.main(settings(*chosen), call, checkpoint=share)
    assert_in_order(run)
    assert verify_run(run, inputs).checked[-1].endswith("weights of 2 of 2 checkpoints compared")
    forge(run, lambda events: of_kind(events, "scoring")[-1].update(model_sha256="ab" * 32))
    assert any("step 0 has other weights" in each for each in verify_run(run, inputs).problems)


def test_each_suite_is_compared_with_its_own_labels(
    train: Run, settings: Compose, inputs: Inputs, call: Invocation, tmp_path: Path
) -> None:
    run = train(*STEPS)
    data = write_glue(tmp_path / "glue")
    probe = ("eval.source=local", f"eval.data_dir={data}", "eval.hyperparameters.freeze=true")
    glue.main(settings(*STEPS, *probe), call)
    for tasks, words in ((None, "not computed again"), (data, f"in {data}")):
        result = verify_run(run, replace(inputs, tasks=tasks))
        embedded, of_glue = [line for line in result.checked if line.startswith("scores: ")]
        assert result.in_order and "generated anew" in embedded and words in of_glue


def test_a_sweep_is_in_order(
    train: Run, settings: Compose, assert_in_order: Check, call: Invocation
) -> None:
    run = train(*STEPS, score=False)
    for rate in ("1e-2", "1e-10"):
        rates = ("eval.hyperparameters.epochs=1", f"eval.hyperparameters.learning_rate={rate}")
        glue.main(settings(*STEPS, "eval.sweep=true", *rates), call)
    assert_in_order(run)


@pytest.fixture
def copied(honest_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_run, tmp_path / "runs" / "honest"))


A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 79 * 2**30, "peak_tflops": 312.0}


@pytest.mark.parametrize(
    "device",
    [
        A100,
        {**A100, "peak_tflops": 330.0},  # another version's table
        {**A100, "name": "a card that is not in the table", "peak_tflops": None},
    ],
    ids=str,
)
def test_a_run_of_another_device_is_in_order(
    device: dict[str, Any], copied: Path, assert_in_order: Check
) -> None:
    forge(
        copied,
        both(
            within("environment.device", {**device, "kind": "cuda"}, "setup"),
            within("recipe.device", "auto"),
        ),
    )
    assert_in_order(copied)


def test_a_run_that_was_resumed_on_another_device_is_in_order(
    train: Run, assert_in_order: Check
) -> None:
    """Memory and peak of the first device say nothing of the last one's measurements."""
    t4 = {"name": "Tesla T4", "memory_bytes": 15 * 2**30, "peak_tflops": 65.0, "kind": "cuda"}
    devices = [t4, {**A100, "kind": "cuda"}]

    def move(events: list[Event]) -> None:
        events[0]["recipe"]["device"] = "auto"
        for setup, device in zip(of_kind(events, "setup"), devices, strict=True):
            setup["environment"]["device"] = device
        of_kind(events, "exported")[0]["peak_memory_bytes"] = 40 * 2**30

    run = train(*STEPS, ended=[(10, "stop")])
    forge(run, move)
    assert_in_order(run)


def retimed(run: Path, seconds: Callable[[float], float], wall: Callable[[float], float]) -> None:
    """Let what happened so many seconds after the start happen at others, by either clock."""

    def move(events: list[Event]) -> None:
        began = events[0]["wall"] - events[0]["elapsed"]
        for event in events:
            if "wall" in event:
                event["wall"] = began + wall(event["elapsed"])
            for key in ("elapsed", "last_step_seconds"):
                if key in event:
                    event[key] = seconds(event[key])
        for kind in ("steps", "validation"):
            every(kind, "seconds", seconds)(events)

    forge(run, move)


def test_a_process_that_was_stopped_for_a_while_is_in_order(
    copied: Path, assert_in_order: Check
) -> None:
    """After SIGSTOP both clocks advance without a heartbeat or a step."""
    events = read_events(copied)
    first = of_kind(events, "steps")[0]["seconds"]
    times = [event.get("elapsed", event.get("seconds", 0.0)) for event in events]
    times = sorted(time for time in times if time >= first)
    length, begin = max((after - before, before) for before, after in pairwise(times))

    def paused(time: float) -> float:
        return time + 1000 if time > begin + length / 2 else time

    retimed(copied, paused, paused)
    assert_in_order(copied)


def test_the_time_of_many_cores_is_in_order(copied: Path, inputs: Inputs) -> None:
    """A second of the wall clock is minutes of their time."""
    retimed(copied, lambda time: 300 * round(time, 3), lambda time: time)  # as events are rounded
    forge(copied, both(within("clock", "cpu"), within("recipe.budget.clock", "cpu")))
    result = verify_run(copied, inputs)
    assert result.in_order, [each for each in result.findings if not each.ok]


def test_what_people_do_with_folders_is_in_order(copied: Path, assert_in_order: Check) -> None:
    """Checkpoints deleted, a report written, renamed, an archive beside."""
    pack(copied, copied / f"honest{SUFFIX}")
    assert_in_order(copied)
    shutil.rmtree(copied / "checkpoints")
    (copied / "report").mkdir()
    (copied / "report" / "report.html").write_text("made of it")
    assert_in_order(copied.rename(copied.with_name("another name")))


@pytest.mark.slow
def test_a_run_of_two_ranks_is_in_order(
    overrides: tuple[str, ...],
    settings: Compose,
    tmp_path: Path,
    assert_in_order: Check,
    call: Invocation,
) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "cramming",
    ]
    subprocess.run(
        [
            *torchrun,
            "pretrain",
            *replace(call, overrides=(*overrides, *STEPS)).arguments(*OPTIONS["pretrain"]),
        ],
        check=True,
        timeout=300,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    glue.main(settings(*STEPS), call)
    assert_in_order(tmp_path / "runs" / "run")
