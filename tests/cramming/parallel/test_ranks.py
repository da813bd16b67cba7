"""Runs of several processes (gloo, one thread each) are the run of one process, whatever the strategy; what that costs.

What is stated: losses over 30 steps within 1e-5, relative, of the single process's; measured 1.3e-7. Processes are
started once, for all cases of a kind.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cramming.config import UserError
from cramming.optim.build import NEED_WHOLE_MATRICES, OPTIMIZERS
from cramming.parallel.mesh import COMPRESSIONS, data_size
from cramming.recipe import Config, Hardware, check
from cramming.record import load_metrics, load_record, run_lock
from cramming.runlog import RUN_LOG, Checkpoint, End, read_log, training_of

from .rank_worker import assert_same, launch, run_cases, train

TOLERANCE = 1e-5
ONE = ["model=tiny", "model.num_layers=1", "train.micro_batch=8"]
SHARED = [*ONE, "objective=rtd"]
CUTTABLE = sorted(OPTIMIZERS.keys() - {*NEED_WHOLE_MATRICES, "adamw"})
# On how many processes, and how; a step's eight sequences are two micro-batches in each of two processes, one in four.
PLAIN = {
    f"{name}-{ranks}": (ranks, [f"parallel={name}", "train.micro_batch=2"])
    for ranks in (2, 4)
    for name in ("ddp", "zero1", "zero2", "zero3")
}
HYBRID = {"zero3-2x2": (4, ["parallel=zero3", "train.micro_batch=1", "parallel.shards=2"])}
FURTHER = {
    "zero1-2x2": (
        4,
        [
            "parallel=zero1",
            "train.micro_batch=2",
            "parallel.shards=2",
            "memory.offload_optimizer=true",
        ],
    ),
    "zero2-2x2": (4, ["parallel=zero2", "train.micro_batch=1", "parallel.shards=2"]),
    "zero2-host": (2, ["parallel=zero2", "train.micro_batch=2", "memory.offload_optimizer=true"]),
    "zero2-tp2": (4, ["parallel=zero2", "train.micro_batch=4", "parallel.tp=2"]),
}
SPREAD: dict[str, tuple[int, list[str]]] = PLAIN | HYBRID | FURTHER
COMPRESSED = {
    name: [*PLAIN["ddp-4"][1], f"parallel.compression={name}"]
    for name in COMPRESSIONS
    if name != "none"
}


@pytest.fixture(scope="module")
def spread(
    case: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of every rank for each case.

    Two copies of two shards leave a checkpoint of step 3, from which others resume; there copies are also cut by `tp`.
    So do two models that share a table, from one strategy to another.
    """
    folder = tmp_path_factory.mktemp("spread")
    three, six, shared = (str(folder / f"{name}.pt") for name in ("three", "six", "shared"))
    cut_twice = ["parallel=zero3", "train.micro_batch=4", "parallel.tp=2", "parallel.shards=2"]
    cases = {
        **{name: case(ONE + how, ranks) for name, (ranks, how) in SPREAD.items()},
        "to 3": case(ONE + HYBRID["zero3-2x2"][1], 4, steps=3, save=three),
        "to 6": case(ONE + cut_twice, 4, steps=3, load=three, save=six),
        "to 9": case([*ONE, *PLAIN["zero1-2"][1], "parallel.shards=1"], 2, steps=3, load=six),
        "shared to 3": case(SHARED + PLAIN["zero3-2"][1], 2, steps=3, save=shared),
        "shared to 6": case(
            [*SHARED, *PLAIN["zero1-2"][1], "memory.offload_optimizer=true"],
            2,
            steps=3,
            load=shared,
        ),
        **{name: case(ONE + how, 4, steps=14) for name, how in COMPRESSED.items()},
        **{
            name: case([*ONE, *PLAIN["zero3-2"][1], f"optim={name}"], 2, steps=4)
            for name in CUTTABLE
        },
    }
    return {**run_cases(folder, cases), "shared": shared}


@pytest.mark.parametrize("name", SPREAD)
def test_each_strategy_gives_the_losses_of_one_process(spread: Any, alone: Any, name: str) -> None:
    single = alone(ONE)
    for rank_result in spread[name]:
        assert rank_result["steps"] == spread[name][0]["steps"]
        assert_same(name, rank_result["steps"], single["steps"])
        assert rank_result["validation"][0] == pytest.approx(single["validation"][0], rel=TOLERANCE)


@pytest.mark.slow
def test_compiled_blocks_and_losses_are_those_of_one_process(
    case: Callable[..., dict[str, Any]], alone: Any, tmp_path: Path
) -> None:
    """Weights that are gathered, or on another process, are no others in compiled code."""
    compiled = [*ONE, "model.num_layers=2", "runtime.compile=blocks"]
    ways = {
        "zero3": ["parallel=zero3", "train.micro_batch=2"],
        "ddp": ["parallel=ddp", "train.micro_batch=2"],
        "pp": ["parallel=pp", "train.micro_batch=4"],
    }
    cases = {name: case([*compiled, *how], 2, steps=3) for name, how in ways.items()}
    expected = alone([*ONE, "model.num_layers=2"], steps=3)["steps"]
    for name, rank_results in run_cases(tmp_path, cases).items():
        assert_same(name, rank_results[0]["steps"], expected)


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_run_learns_with_compressed_gradients_too(spread: Any, name: str) -> None:
    """All ranks alike; other losses than with exact sums, which shows that something else is sent, but near them."""
    exact = [loss for loss, *_ in spread["ddp-4"][0]["steps"][:14]]
    for rank_result in spread[name]:
        losses = [loss for loss, *_ in rank_result["steps"]]
        assert losses == [loss for loss, *_ in spread[name][0]["steps"]] and losses[0] == exact[0]
        assert losses != exact and losses == pytest.approx(exact, abs=0.3)


@pytest.mark.parametrize("name", CUTTABLE)
def test_optimizers_that_are_not_refused_work_on_cut_weights(
    spread: Any, alone: Any, name: str
) -> None:
    assert_same(name, spread[name][0]["steps"], alone([*ONE, f"optim={name}"], steps=4)["steps"])


def test_a_checkpoint_of_copies_of_shards_goes_on_in_others(spread: Any, alone: Any) -> None:
    steps = [step for name in ("to 3", "to 6", "to 9") for step in spread[name][0]["steps"]]
    assert_same("2 x 2, 1 x 2 x 2, 2 x 1", steps, alone(ONE)["steps"][:9])


def test_a_parameter_with_two_names_is_loaded_by_both(
    spread: Any, alone: Any, case: Callable[..., Any]
) -> None:
    """The generator of objective=rtd has the encoder's token table."""
    resumed_steps = [
        step for name in ("shared to 3", "shared to 6") for step in spread[name][0]["steps"]
    ]
    single = train(case(SHARED, steps=3, load=spread["shared"]))["steps"]
    assert_same("zero3 to zero1", resumed_steps, alone(SHARED, steps=6)["steps"])
    assert_same("zero3 to one", single, resumed_steps[3:])


@pytest.mark.parametrize("name", [*PLAIN, *HYBRID])
def test_what_is_sent_and_held_follows_the_formula(spread: Any, alone: Any, name: str) -> None:
    """The formula is that of docs/guides/several_processes.md, without the sums of losses and norms.

    k micro-batches, N processes, S to a copy.
    """
    ranks, strategy, parameters = SPREAD[name][0], name.split("-")[0], alone(ONE)["parameters"]
    k, shards = 2 if ranks == 2 or name in HYBRID else 1, 2 if name in HYBRID else ranks
    gathered, scattered = {"zero2": (1, k), "zero3": (2 * k, k)}.get(strategy, (1, 1))
    summed = 1.0 if strategy == "ddp" else 1 / shards if name in HYBRID else 0.0
    for rank_result in spread[name]:
        counted = rank_result["collectives"]
        assert counted["allreduce_"] / parameters == pytest.approx(summed, abs=0.01)
        if strategy != "ddp":
            assert counted["_allgather_base_"] * shards / parameters == pytest.approx(
                gathered, rel=0.01
            )
            assert counted["_reduce_scatter_base_"] / parameters == pytest.approx(
                scattered, rel=0.01
            )
            assert rank_result["moments"] * shards == pytest.approx(2 * parameters, rel=0.01)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(runs: Path, compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]) -> Run:
    """`run(ranks, name, *overrides, at=..., ...)`: what a process of the verb is given."""
    model = ["model.num_layers=4", "model.num_heads=4", "model.hidden_size=16"]
    fast = ["train.micro_batch=1", "budget.steps=30", "optim.lr=1e-2"]

    def of(
        ranks: int, name: str, *overrides: str, resume: bool = False, **signal: Any
    ) -> dict[str, Any]:
        settings = compose(*tiny_overrides, *model, *fast, *overrides)
        call = {"name": name, "runs": str(runs), "resume": resume}
        return {"settings": settings, "call": call, "ranks": ranks, **signal}

    return of


VERB = Path(__file__).with_name("verb_worker.py")


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in load_metrics(run) if "loss" in row}


def assert_is_the_same_run(run: Path, single_run: Path, devices: int) -> None:
    actual, expected = losses(run), losses(single_run)
    assert list(expected) == list(range(1, len(expected) + 1))
    assert actual == pytest.approx(expected, rel=TOLERANCE)
    section, other = load_record(run)["pretrain"], load_record(single_run)["pretrain"]
    assert section["validation"]["loss"] == pytest.approx(
        other["validation"]["loss"], rel=TOLERANCE
    )
    assert (section["status"], section["tokens"]) == ("finished", other["tokens"])
    assert section["devices"] == devices


DROPOUT = ["model.dropout=0.2", "model.attention_dropout=0.2"]


def test_a_signal_to_any_rank_stops_all_and_the_resume_is_the_unbroken_run(
    run: Run, runs: Path
) -> None:
    """SIGTERM to rank 1 in step 6, at whose end rank 0 saves. Each process has a dropout of its own. Of two gradients
    the sum is the same in any order, so all is the same bit for bit."""
    ways, cases = ("ddp", "pp"), {}
    for way in ways:
        how = [f"parallel={way}", *DROPOUT, "budget.steps=9"]
        cases[f"unbroken {way}"] = run(2, f"unbroken-{way}", *how)
        cases[f"stopped {way}"] = run(2, f"stopped-{way}", *how, at=6, rank=1)
        cases[f"resumed {way}"] = run(2, f"stopped-{way}", *how, resume=True)
    launch(runs, cases, VERB)
    for way in ways:
        entries = read_log(runs / f"stopped-{way}" / RUN_LOG)
        ends = [entry.event for entry in entries if isinstance(entry.event, End)]
        assert [(end.steps, end.reason) for end in ends] == [(6, "stopped"), (9, "finished")]
        resumed, unbroken = runs / f"stopped-{way}", runs / f"unbroken-{way}"
        assert losses(resumed) == losses(unbroken), way
        assert final_files(resumed) == final_files(unbroken), way


def final_files(run: Path) -> dict[str, str]:
    """SHA-256 of the model's files."""
    hashes: dict[str, str] = load_record(run)["pretrain"]["final_files"]
    return hashes


# Turns of a run: how many processes, and how they share it.
WAYS: dict[str, list[tuple[int, list[str]]]] = {
    "tensor": [
        (4, ["parallel=tp", "parallel.tp=4"]),
        (2, ["parallel=zero1"]),
        (1, ["parallel=ddp"]),
        (2, ["parallel=pp"]),
        (4, ["parallel=zero3", "parallel.shards=2"]),
    ],
    "pipeline": [
        (4, ["parallel=zero3"]),
        (2, ["parallel=tp", "parallel.sequence=true"]),
        (1, ["parallel=zero2"]),
        (4, ["parallel=pp", "parallel.pp=4"]),
        (4, ["parallel=tp"]),  # two copies
    ],
    "copies": [
        (2, ["parallel=ddp"]),
        (4, ["parallel=pp"]),  # two copies
        (1, ["parallel=ddp"]),
        (4, ["parallel=zero2", "parallel.tp=2"]),
        (2, ["parallel=ddp"]),
    ],
}


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_processes_and_other_strategies(
    run: Run, runs: Path
) -> None:
    """4 -> 2 -> 1 -> 4 continues the same curve; the record keeps the largest number."""
    cases = {"one": run(1, "one")}
    for turn in range(5):
        for name, way in WAYS.items():
            ranks, how = way[turn]
            cases[f"{name}-{turn}"] = run(
                ranks, name, *how, resume=turn > 0, **({"at": 6} if turn < 4 else {})
            )
    launch(runs, cases, VERB)
    for name in WAYS:
        assert_is_the_same_run(runs / name, runs / "one", 4)
        ended = [
            process["ended"]
            for process in load_record(runs / name)["pretrain"]["budget"]["processes"]
        ]
        assert ended == ["stopped"] * 4 + ["finished"]


def nodes(count: int) -> list[list[str]]:
    """Arguments of one torchrun on each of so many nodes, here one machine; one process on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=test",
        "--local-addr=127.0.0.1",
    ]
    return [[f"--nnodes={count}", "--nproc-per-node=1", "--max-restarts=3", *meeting]] * count


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_a_killed_rank_is_restarted_and_the_run_ends_with_the_right_weights(
    run: Run, runs: Path, agents: int
) -> None:
    """`torchrun --max-restarts`, on one node and on two: kill -9 of rank 1 in step 20, after the checkpoint of step 15;
    the clock charged the five steps that were lost. Weights are those of a run that nothing broke, losses one
    process's."""
    saving = ["parallel=zero2", "checkpoint.every_steps=5"]
    killed = f"killed-{agents}"
    launch(
        runs,
        {
            "": run(2, f"unbroken-{agents}", *saving, resume=True),
            "alone": run(1, f"alone-{agents}"),
        },
        VERB,
    )
    how = nodes(2) if agents == 2 else [["--standalone", "--nproc-per-node=2", "--max-restarts=1"]]
    launch(
        runs, {"": run(2, killed, *saving, resume=True, at=20, rank=1, signal="SIGKILL")}, VERB, how
    )
    actual, expected = (
        load_file(runs / name / "final" / "model.safetensors")
        for name in (killed, f"unbroken-{agents}")
    )
    assert actual.keys() == expected.keys()
    assert all(actual[name].equal(weight) for name, weight in expected.items())
    assert_is_the_same_run(runs / killed, runs / f"alone-{agents}", 2)
    entries = read_log(runs / killed / RUN_LOG)
    saved = [entry.event.step for entry in entries if isinstance(entry.event, Checkpoint)]
    assert max(saved) >= 15
    first, second = training_of(entries).processes
    # Rank 0 writes the log. It lives on, and ends when the other rank's connection is gone.
    assert first.ended == "failed"
    assert second.ended == "finished"
    spent = load_record(runs / killed)["pretrain"]["budget"]["spent_seconds"]
    assert spent > first.spent_seconds


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell the processes")
def test_the_processes_of_a_killed_torchrun_save_and_end(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    """Whoever kills the launcher wants the run to end, and to resume it: its folder is free again."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run, settings = (
        tmp_path / "a",
        ["budget.steps=null", "budget.minutes=2", "--runs", str(tmp_path), "--name", "a"],
    )
    launcher = subprocess.Popen(
        [*torchrun, "-m", "cramming", "pretrain", *tiny_overrides, *settings]
    )
    try:
        wait_until(lambda: len(losses(run)) > 3)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not is_locked(run))
    *_, saved, end = [entry.event for entry in read_log(run / RUN_LOG)]
    assert (saved.event, end.event, end.reason) == ("checkpoint", "end", "stopped")
    assert saved.step == end.steps >= max(losses(run))


def wait_until(is_so: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_locked(run: Path) -> bool:
    try:
        with run_lock(run):
            return False
    except UserError:
        return True


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optim=muon"], r"^optim\.name=muon: not where a process has a part .* adamw"),
        (["precision=fp16"], r"^precision\.mode=fp16: not where a process has a part"),
        (
            ["train.average={start: 0.5, every: 0.1}"],
            r"^train\.average=.*: not where a process has a part",
        ),
        (
            ["train.micro_batch=auto"],
            r"^train\.micro_batch=auto: not with parallel=zero1\. Set a number",
        ),
        (
            ["runtime.compile=model"],
            r"^runtime\.compile=model: not where a process has a part .* blocks",
        ),
        (
            ["memory.offload_activations=true"],
            r"^memory\.offload_activations=true: not where a process has a part",
        ),
    ],
)
def test_what_does_not_work_on_cut_weights_is_refused(
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    overrides: list[str],
    says: str,
) -> None:
    settings = compose(*tiny_overrides, "parallel=zero1", *overrides)
    config, first, two = (
        Config.of(settings),
        Hardware("cpu", "CPU", "fp32"),
        Hardware("cpu", "CPU", "fp32", processes=2),
    )
    two = Hardware("cpu", "CPU", "fp16", processes=2) if "precision=fp16" in overrides else two
    with pytest.raises(UserError, match=says):
        check(config, two)
    check(config, first)


def test_the_mesh_is_all_processes(
    compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]
) -> None:
    def sizes(*overrides: str) -> Any:
        return Config.of(compose(*tiny_overrides, *overrides)).parallel

    assert data_size(sizes(), 4) == 4
    assert data_size(sizes("parallel.tp=2"), 4) == 2
    assert data_size(sizes("parallel=pp", "parallel.pp=2"), 4) == 2
    assert data_size(sizes("parallel=pp", "parallel.pp=4"), 4) == 1
    with pytest.raises(UserError, match=r"^parallel\.tp=2: not with parallel=pp"):
        sizes("parallel=pp", "parallel.tp=2")
    with pytest.raises(UserError, match="a mesh of 3 x 2 x 1 = 6 processes, and there are 4"):
        data_size(sizes("parallel.dp=3", "parallel.tp=2"), 4)
    with pytest.raises(
        UserError, match=r"parallel.dp=null parallel.tp=2 parallel.pp=1: .* and there are 1"
    ):
        data_size(sizes("parallel.tp=2"), 1)
    with pytest.raises(UserError, match=r"parallel.shards=3: does not divide the 4 process"):
        data_size(sizes("parallel=zero3", "parallel.shards=3"), 4)
