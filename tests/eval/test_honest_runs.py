"""Honest runs of many shapes: `verify` finds each in order, and the report none invalid. What a rule says of a run that
did nothing wrong is a false alarm, whichever way it came to its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import checkpoint, pretrain
from cramming.journal import JOURNAL, read_journal
from cramming.record import load_metrics, setup_hash
from cramming.train_state import TrainState
from eval import glue
from eval.archive import SUFFIX, pack
from eval.rules.load import load_runs
from eval.verify import Means, verify_run
from tests.conftest import before_step
from tests.eval.test_forgeries import every, lines, put
from tests.eval.test_forgeries import record as as_record
from tests.eval.test_forgeries import settings as as_settings

Run = Callable[..., Path]
Compose = Callable[..., dict[str, Any]]
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
    "averaged weights": (*STEPS, "train.average={start: 0.5, every: 0.1}"),
    "a start from counts": (*STEPS, "start=cooccurrence"),
    "muon": (*STEPS, "optim=muon"),
    "lamb, cosine": (*STEPS, "optim=lamb", "schedule=cosine"),
    "adagrad, triangle": (*STEPS, "optim=adagrad", "schedule=triangle"),
    "checkpoints kept": (*STEPS, "checkpoint.keep_at=[0,0.5]"),
    "bf16": (*STEPS, "precision.mode=bf16"),
    "no validation while it trains": (*STEPS, "train.validations=0"),
    "trackers": (*STEPS, "trackers=[tensorboard]"),
    "packed documents": (*STEPS, "train.packing=documents"),
    "a curriculum": (*STEPS, "train.order=sentence_length"),
    "rows of odd steps": (*STEPS, "train.log_every=7"),
    "recomputed activations": (*STEPS, "memory.checkpoint_every=1"),
    "shorter than a row of the log": ("budget.steps=3",),
    "a short run, a peak between two rows": (
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
    "numbers as text": (
        "budget.minutes='0.05'",
        "optim.lr='1e-3'",
        "budget.heartbeat_seconds='0.5'",
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
def overrides(clean_tree: tuple[str, ...], honest_run: Path, tmp_path: Path) -> tuple[str, ...]:
    """Of a small run, `runs/run`."""
    kept = (
        one
        for one in clean_tree
        if not one.startswith(("name=", "budget.steps=", "eval.seeds=", "checkpoint."))
    )
    places = (
        f"runs={tmp_path / 'runs'}",
        f"corpora={honest_run.parents[1] / 'corpora'}",
        "name=run",
    )
    return (*kept, *SMALL, *places)


@pytest.fixture
def settings(
    overrides: tuple[str, ...], compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> Compose:
    """Of a small run with more overrides; each training is as one of a process of its own."""
    monkeypatch.setattr("cramming.budget.process_age_seconds", lambda: 0.0)
    return lambda *more: compose(*overrides, *more)


@pytest.fixture
def train(settings: Compose) -> Run:
    """`train(*overrides, ended=[(10, "stop"), (5, "kill")])`: its processes end so before these steps of theirs, and
    are resumed; then the run is scored."""

    def call(
        *overrides: str, ended: list[tuple[int, str]] | None = None, score: bool = True
    ) -> Path:
        chosen = settings(*overrides)
        for step, how in ended or ():
            if how == "kill":
                assert in_a_child(chosen, step) == -signal.SIGKILL
            else:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
                    before_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
                    pretrain.main(chosen)
            chosen["resume"] = True
        pretrain.main(chosen)
        if score:
            glue.main(chosen)
        return Path(chosen["runs"]) / chosen["name"]

    return call


def in_a_child(chosen: dict[str, Any], killed_at: int | None = None) -> int:
    """Train in another process, which may get `kill -9` before a step; its exit code."""
    if (child := os.fork()) == 0:
        with pytest.MonkeyPatch.context() as patch:
            if killed_at:
                before_step(patch, killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            pretrain.main(chosen)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def assert_in_order(means: Means) -> Callable[[Path], None]:
    def check(run: Path) -> None:
        found = verify_run(run, means)
        broken = [finding for finding in found.findings if not finding.ok]
        broken = [
            finding for finding in broken if finding.rule in ("R1", "R3", "R4", "R5", "R7", "R27")
        ]
        assert found.in_order and not broken, (found.problems, broken)
        for loaded in load_runs(run.parent):
            assert not loaded.problem and loaded.verdict.division != "invalid", (
                loaded.label,
                loaded.verdict.broken,
            )

    return check


Check = Callable[[Path], None]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_honest_run_is_in_order(shape: str, train: Run, assert_in_order: Check) -> None:
    assert_in_order(train(*SHAPES[shape]))


def test_a_run_whose_checkpoints_are_written_while_it_trains_is_in_order(
    train: Run, assert_in_order: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: an entry in the journal comes after heartbeats of later steps."""
    write = checkpoint.overwrite_atomically

    def slowly(path: Path, write_file: Callable[[Path], object]) -> None:
        time.sleep(0.3)
        write(path, write_file)

    monkeypatch.setattr(checkpoint, "BACKGROUND_DEVICES", {"cpu"})
    monkeypatch.setattr(checkpoint, "overwrite_atomically", slowly)
    run = train(*STEPS, "budget.heartbeat_seconds=0.01")
    steps = [event["steps"] for event in read_journal(run / JOURNAL)]
    assert steps != sorted(steps)
    assert_in_order(run)


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
def test_a_run_that_was_interrupted_and_went_on_is_in_order(
    ended: list[tuple[int, str]], train: Run, assert_in_order: Check
) -> None:
    assert_in_order(train(*STEPS, ended=ended))


@pytest.mark.parametrize("version", ["now", "before 2026-11-26"])
def test_a_run_that_was_stopped_while_it_validated_is_in_order(
    version: str,
    settings: Compose,
    train: Run,
    assert_in_order: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log has the step before its validation; earlier versions wrote it when they stopped, behind it."""
    original = TrainState.validate

    def stopped(self: TrainState, *rest: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *rest)

    chosen = (*STEPS, "train.log_every=50")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(TrainState, "validate", stopped)
        pretrain.main(settings(*chosen))
    run = train(*chosen, "resume=true")
    log = [(row["step"], "validation_loss" in row) for row in load_metrics(run)]
    assert log == [(15, False), (20, False), (20, True), (30, False), (40, False), (40, True)]
    if version != "now":
        lines("metrics.jsonl", lambda rows: [rows[0], rows[2], rows[1], *rows[3:]])(run)
    assert_in_order(run)


def test_a_run_by_the_clock_that_was_killed_is_in_order(
    settings: Compose, assert_in_order: Check
) -> None:
    """That of the CPU, whatever else the machine does; it counts what a process has used, so each is a new one."""
    chosen = settings("budget.minutes=0.03", "budget.clock=cpu")
    assert in_a_child(chosen, 4) == -signal.SIGKILL
    chosen["resume"] = True
    assert in_a_child(chosen) == 0
    glue.main(chosen)
    assert_in_order(Path(chosen["runs"]) / "run")


def test_further_scorings_are_in_order(
    train: Run, settings: Compose, assert_in_order: Check
) -> None:
    """The same once more, more seeds, another task, other hyperparameters, and those that were broken off: between two
    results, with one task more, and with settings whose first results have taken the place of the record's."""
    always, two = (*STEPS, "eval.baselines=true"), ("eval.seeds=[0,1]", "eval.tasks=[rte,cola]")
    run = train(*always)
    for overrides in (
        (),
        ("eval.seeds=[0,1]",),
        two,
        (*two, "eval.hyperparameters.learning_rate=1e-4"),
    ):
        glue.main(settings(*always, *overrides))
        assert_in_order(run)
    three = ("eval.seeds=[0,1]", "eval.tasks=[rte,cola,mrpc]")
    for tasks, rate in ((("eval.seeds=[0,1,2]", two[1]), "1e-4"), (three, "1e-4"), (two, "1e-3")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("eval.finetune.scoring.show_result", interrupt)
            glue.main(settings(*always, *tasks, f"eval.hyperparameters.learning_rate={rate}"))
        assert_in_order(run)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_scoring_that_was_broken_off_and_predicted_the_same_is_in_order(
    train: Run, settings: Compose, means: Means, assert_in_order: Check
) -> None:
    """At rates of almost nothing: the record's scores can be computed again from the later one's predictions."""

    def scored(rate: str) -> None:
        rates = ("eval.hyperparameters.epochs=1", f"eval.hyperparameters.learning_rate={rate}")
        glue.main(settings(*STEPS, "eval.seeds=[0,1]", *rates))

    def broken_off(rate: str) -> None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("eval.finetune.scoring.summarise", interrupt)
            scored(rate)

    run = train(*STEPS, score=False)
    scored("1e-2")
    broken_off("1e-10")
    assert_in_order(run)
    assert "0 values" in verify_run(run, means).looked_at[0]
    scored("1e-10")
    broken_off("2e-10")
    assert_in_order(run)
    assert "2 values" in verify_run(run, means).looked_at[0]


def test_a_sweep_is_in_order(
    train: Run, settings: Compose, means: Means, assert_in_order: Check
) -> None:
    """The first point is the best; the second's predictions are not in its place, unless somebody put them there."""
    run = train(*STEPS, score=False)
    for rate in ("1e-2", "1e-10"):
        rates = ("eval.hyperparameters.epochs=1", f"eval.hyperparameters.learning_rate={rate}")
        glue.main(settings(*STEPS, "eval.sweep=true", *rates))
    assert_in_order(run)
    assert "1 values" in verify_run(run, means).looked_at[0]
    kept = run / "glue" / "pretrained" / "predictions" / "rte-seed0.npz"
    (other,) = (
        file
        for file in run.glob("glue/*/sweep/*/*/*.npz")
        if file.read_bytes() != kept.read_bytes()
    )
    shutil.copy(other, kept)
    assert any("rte seed 0: accuracy is" in problem for problem in verify_run(run, means).problems)


def test_a_run_that_was_never_scored_is_told_from_a_forged_one(train: Run, means: Means) -> None:
    """It has no scores, which R6 asks for; nothing of it disagrees."""
    found = verify_run(train(*STEPS, score=False), means)
    assert not found.problems and next(f for f in found.findings if f.rule == "R27").ok


@pytest.fixture
def copied(honest_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest_run, tmp_path / "runs" / "honest")


def moved(run: Path, *devices: dict[str, Any]) -> None:
    """Each process of the run was on another device, as a GPU's writes it."""
    hashes: list[str] = []

    def change(record: dict[str, Any]) -> None:
        training, machines = record["pretrain"], [record["environment"], *record.get("resumed", [])]
        for machine, device in zip(machines, devices, strict=True):
            machine["device"].update(device, kind="cuda")
        hashes.extend(map(setup_hash, machines))
        (run / "environment.json").write_text(json.dumps(machines[0]))
        rate, peak = (
            training["exaflops"] * 1e18 / training["budget"]["spent_seconds"],
            devices[-1]["peak_tflops"],
        )
        training.update(
            peak_memory_bytes=40 * 2**30, model_flops_utilization=peak and rate / (peak * 1e12)
        )

    def hashed(rows: list[dict[str, Any]]) -> None:
        for row, sha256 in zip(
            [row for row in rows if row["event"] == "start"], hashes, strict=True
        ):
            row["setup"] = sha256

    as_record(change)(run)
    lines("budget.jsonl", hashed)(run)
    as_settings("device", "auto")(run)


A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 79 * 2**30, "peak_tflops": 312.0}


@pytest.mark.parametrize(
    "device",
    [
        A100,
        {**A100, "peak_tflops": 330.0},  # which a later version's table says otherwise
        {**A100, "name": "a card that nobody knows", "peak_tflops": None},
    ],
    ids=str,
)
def test_a_run_recorded_on_another_device_is_in_order(
    device: dict[str, Any], copied: Path, assert_in_order: Check
) -> None:
    moved(copied, device)
    assert_in_order(copied)


def test_a_run_that_went_on_on_another_device_is_in_order(
    train: Run, assert_in_order: Check
) -> None:
    """What was measured is of the last one; memory, peak and speed of the first say nothing of it."""
    run = train(*STEPS, ended=[(10, "stop")])
    moved(run, {"name": "Tesla T4", "memory_bytes": 15 * 2**30, "peak_tflops": 65.0}, A100)
    assert_in_order(run)


def test_what_an_earlier_process_forced_stays_on_record(
    copied: Path, assert_in_order: Check
) -> None:
    """The gate's findings are the last process's."""
    put("pretrain.forced", ["compile", "fp8"])(copied)
    put("pretrain.gate", {"compile": "forced"})(copied)
    assert_in_order(copied)


def retimed(run: Path, seconds: Callable[[float], float], wall: Callable[[float], float]) -> None:
    """What happened so many seconds after the start of a run of one process happens at others, by either clock."""

    def move(rows: list[dict[str, Any]]) -> None:
        begin = rows[0]["wall"] - wall(rows[0]["elapsed"])
        for row in rows:
            row["wall"] = begin + wall(row["elapsed"])
            row.update({name: seconds(row[name]) for name in ("elapsed", "last_step_seconds")})

    lines("budget.jsonl", move)(run)
    every("metrics.jsonl", "seconds", seconds)(run)
    last = json.loads((run / "budget.jsonl").read_text().splitlines()[-1])

    def change(record: dict[str, Any]) -> None:
        training, took = record["pretrain"], last["last_step_seconds"]
        training["budget"].update(spent_seconds=took)
        training["budget"]["processes"][0]["spent_seconds"] = last["elapsed"]
        training.update(
            tokens_per_second=last["tokens"] / took,
            data_wait_share=last["data_wait_seconds"] / took,
        )

    as_record(change)(run)


def test_a_process_that_was_stopped_for_a_while_is_in_order(
    copied: Path, assert_in_order: Check
) -> None:
    """As by SIGSTOP, or with its machine: both clocks go on, and nobody writes a heartbeat or makes a step."""
    when = (
        json.loads((copied / "record.json").read_text())["pretrain"]["budget"]["spent_seconds"]
        - 0.1
    )
    retimed(copied, *[lambda t: t + 1000 * (t > when)] * 2)
    assert_in_order(copied)


def test_the_time_of_many_cores_is_in_order(copied: Path, assert_in_order: Check) -> None:
    """A second of the wall clock is minutes of their time, and heartbeats of older versions came by the wall clock."""
    retimed(copied, lambda t: 300 * t, lambda t: t)
    lines("budget.jsonl", lambda rows: rows[0].update(clock="cpu"))(copied)
    put("pretrain.budget.clock", "cpu")(copied)
    as_settings("budget.clock", "cpu")(copied)
    assert_in_order(copied)


def test_rates_of_an_older_version_are_in_order(copied: Path, assert_in_order: Check) -> None:
    """The last row had that of a step which came too late, and no row had each accuracy."""

    def older(rows: list[dict[str, Any]]) -> None:
        steps = [row for row in rows if row.pop("each_accuracy", None)]
        steps[-1]["lr"] += 0.005 * max(row["lr"] for row in steps)

    lines("metrics.jsonl", older)(copied)
    assert_in_order(copied)


def test_what_people_do_with_folders_is_in_order(copied: Path, assert_in_order: Check) -> None:
    """Checkpoints and weights deleted, a report written, renamed, an archive beside."""
    pack(copied, copied / f"honest{SUFFIX}")
    assert_in_order(copied)
    shutil.rmtree(copied / "checkpoints")
    shutil.rmtree(copied / "final")
    (copied / "report").mkdir()
    (copied / "report" / "report.html").write_text("made of it")
    assert_in_order(copied.rename(copied.with_name("another name")))


@pytest.mark.slow
def test_a_run_of_two_ranks_is_in_order(
    overrides: tuple[str, ...], settings: Compose, tmp_path: Path, assert_in_order: Check
) -> None:
    """Of the open division, by R10."""
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
        [*torchrun, "pretrain", *overrides, *STEPS],
        check=True,
        timeout=300,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    glue.main(settings(*STEPS))
    assert_in_order(tmp_path / "runs" / "run")
