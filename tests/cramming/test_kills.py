"""Killed at any write, a run loses nothing: its weights are those of the unbroken run, and its time stays charged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cramming import launch
from cramming.invocation import Invocation
from cramming.record import load_record, write_record
from cramming.runlog import RUN_LOG, read_log, training_of
from tests.faults import Crash, dying_at

Result = Callable[[Path], dict[str, Any]]
SHORT = ["budget.steps=4", "checkpoint.every_steps=2", "checkpoint.keep_at=[0.5]"]


@pytest.fixture(scope="module")
def train(compose: Callable[..., dict[str, Any]], tiny_overrides: list[str]) -> Callable[..., Path]:
    """`train(runs, ...)` trains the run `a` in the folder `runs`."""

    def call(runs: Path, *overrides: str, resume: bool = False) -> Path:
        launch.main(
            compose(*tiny_overrides, *SHORT, *overrides),
            Invocation(runs=runs, name="a", device="cpu", resume=resume),
        )
        return runs / "a"

    return call


@pytest.fixture(scope="module")
def operations(
    tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Path]
) -> tuple[list[str], Path]:
    """The file operations of an unbroken run, and its folder."""
    runs = tmp_path_factory.mktemp("whole")
    with dying_at(runs) as faults:
        run = train(runs)
    return faults.names, run


def die_and_resume(train: Callable[..., Path], runs: Path, crash_at: int) -> Path:
    """Train, die at an operation, and resume as often as it takes."""
    with dying_at(runs, crash_at), pytest.raises(Crash):
        train(runs)
    charged = 0.0
    if (runs / "a" / RUN_LOG).exists():
        charged = training_of(read_log(runs / "a" / RUN_LOG)).spent_seconds
    try:
        status = load_record(runs / "a")["pretrain"]["status"]
    except (OSError, ValueError):
        status = "none"
    run = train(runs, resume=True)
    write_record(run)
    if status != "finished":
        assert training_of(read_log(run / RUN_LOG)).spent_seconds >= charged
    return run


def check(run: Path, whole: Path, result: Result) -> None:
    """The run is as if it had never been broken, and nothing temporary is left."""
    assert result(run) == result(whole)
    files = {path.name for path in run.rglob("*") if path.is_file()}
    assert files == {path.name for path in whole.rglob("*") if path.is_file()}


def test_killed_at_one_operation_of_each_kind(
    tmp_path: Path, train: Callable[..., Path], operations: tuple[list[str], Path], result: Result
) -> None:
    names, whole = operations
    kinds = {name: index + 1 for index, name in enumerate(names)}
    assert {"fsync", "write run.jsonl"} <= kinds.keys() and len(kinds) > 8
    for crash_at in kinds.values():
        check(die_and_resume(train, tmp_path / str(crash_at), crash_at), whole, result)


@pytest.mark.slow
def test_killed_at_every_operation(
    tmp_path: Path, train: Callable[..., Path], operations: tuple[list[str], Path], result: Result
) -> None:
    names, whole = operations
    for crash_at in range(1, len(names) + 1):
        check(die_and_resume(train, tmp_path / str(crash_at), crash_at), whole, result)


@pytest.mark.slow
def test_killed_at_every_operation_of_a_resume(
    tmp_path: Path, train: Callable[..., Path], operations: tuple[list[str], Path], result: Result
) -> None:
    """The first process dies in its second half, the second one at every operation that it comes to."""
    names, whole = operations
    first = len(names) * 2 // 3
    crash_at = 0
    while True:
        crash_at += 1
        runs = tmp_path / str(crash_at)
        with dying_at(runs, first), pytest.raises(Crash):
            train(runs)
        try:
            with dying_at(runs, crash_at):
                train(runs, resume=True)
        except Crash:
            check(train(runs, resume=True), whole, result)
        else:
            break
    assert crash_at > 20
