"""Functions on groups of texts, in processes: order, errors, and what happens when a process dies."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from cramming.process_pool import WorkerDiedError
from data_prep import prepare, workers
from data_prep.prepare import UNFINISHED
from data_prep.sources import plain_text
from data_prep.workers import Workers
from tests.data_prep.calls import main


def lengths(texts: list[str]) -> tuple[int, list[int]]:
    time.sleep(len(texts[0]) / 1000)  # long ones are ready later than those behind them
    return os.getpid(), [len(text) for text in texts]


def meet(texts: list[str]) -> int:
    """Ends when another process is here as well."""
    here, until = Path(texts[0]), time.monotonic() + 60
    (here / str(os.getpid())).touch()
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    return os.getpid()


def refuse(texts: list[str]) -> None:
    raise UserError(f"cannot read {texts[0]}")


def die(texts: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def groups(count: int) -> Iterator[tuple[int, list[str]]]:
    for number in range(count):
        yield number, ["x" * (50 if number % 3 == 0 else 1), "y"]


def test_results_come_in_the_order_of_the_groups_from_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "HERE_FIRST", 2)
    with Workers(2, {"lengths": lengths}) as pool:
        found = list(pool.map("lengths", groups(20)))
    assert [(kept, sizes) for kept, (_, sizes) in found] == [
        (n, [len(t) for t in texts]) for n, texts in groups(20)
    ]
    where = [process for _, (process, _) in found]
    assert where[:2] == [os.getpid()] * 2 and os.getpid() not in where[2:]
    assert not multiprocessing.active_children()


def test_of_a_large_text_nothing_is_worked_on_here() -> None:
    with Workers(2, {"lengths": lengths}, large=True) as pool:
        assert os.getpid() not in {process for _, (process, _) in pool.map("lengths", groups(3))}


def test_two_processes_work_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workers, "HERE_FIRST", 0)
    with Workers(2, {"meet": meet}) as pool:
        found = {
            process for _, process in pool.map("meet", [(n, [str(tmp_path)]) for n in range(2)])
        }
    assert len(found) == 2


def test_a_stage_that_is_off_holds_nothing_back_and_a_small_text_starts_no_process() -> None:
    read = []

    def empty() -> Iterator[tuple[int, list[str]]]:
        for number in range(100):
            read.append(number)
            yield number, []

    with Workers(4, {"lengths": lengths}) as pool:
        for kept, _ in pool.map("off", empty()):
            assert read[-1] == kept
        assert {process for _, (process, _) in pool.map("lengths", groups(workers.HERE_FIRST))} == {
            os.getpid()
        }


FAILURES: dict[str, tuple[Callable[[list[str]], None], int, type[Exception], str]] = {
    "error here": (refuse, 5, UserError, "cannot read xxx"),
    "error in a process": (refuse, 0, UserError, "cannot read xxx"),
    "crash": (die, 0, WorkerDiedError, r"out of memory\?.*data\.workers"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_or_a_crash_in_a_worker_is_the_callers_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    function, here_first, error, message = FAILURES[name]
    monkeypatch.setattr(workers, "HERE_FIRST", here_first)
    with pytest.raises(error, match=message), Workers(2, {"f": function}) as pool:
        list(pool.map("f", groups(5)))
    assert not multiprocessing.active_children()


def test_the_work_before_a_death_is_kept(
    text_file: Path,
    tmp_path: Path,
    text_config: Any,
    run: Any,
    contents: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "HERE_FIRST", 0)
    monkeypatch.setattr(plain_text, "BLOCK_BYTES", 500)
    whole, broken = (
        text_config(text_file, corpus=str(tmp_path / n), shard_tokens=3000)
        for n in ("whole", "broken")
    )
    run(whole)
    save = prepare.Unfinished.save

    def kill_one(self: prepare.Unfinished, folder: Path) -> None:
        save(self, folder)
        if len(self.shards["train"]) == 2:
            multiprocessing.active_children()[0].kill()

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Unfinished, "save", kill_one)
        with pytest.raises(WorkerDiedError):
            main(broken)
    assert (tmp_path / "broken" / UNFINISHED).is_file() and (
        tmp_path / "broken" / "train-00001.bin"
    ).is_file()
    run(broken)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
