"""Tasks in processes: order, errors, what happens when a process dies, and what is done only once."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cramming.config import UserError
from cramming.process_pool import WorkerDiedError
from data_prep.readers import plain_text
from data_prep.task_grid import PARTS, TaskGrid, map_tasks, open_grid
from tests.data_prep.calls import main


def length(text: str) -> tuple[int, int]:
    time.sleep(len(text) / 1000)  # long ones are ready later than those behind them
    return os.getpid(), len(text)


def meet(folder: str) -> int:
    """End when another process is here as well."""
    until = time.monotonic() + 60
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    return os.getpid()


def refuse(text: str) -> None:
    raise UserError(f"cannot read {text}")


def die(text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_order_from_several_processes() -> None:
    texts = ["x" * (50 if number % 3 == 0 else 1) for number in range(12)]
    results = list(map_tasks(length, texts, 2, None))
    assert [(text, size) for text, (_, size) in results] == [(text, len(text)) for text in texts]
    assert os.getpid() not in {process for _, (process, _) in results}
    assert not multiprocessing.active_children()


def test_two_processes_work_at_the_same_time(tmp_path: Path) -> None:
    assert len({process for _, process in map_tasks(meet, [str(tmp_path)] * 2, 2, None)}) == 2


@pytest.mark.parametrize(("texts", "processes"), [(["a"], 4), (["a", "b"], 1)])
def test_no_process_starts_for_one_task_or_one_worker(texts: list[str], processes: int) -> None:
    assert {worker for _, (worker, _) in map_tasks(length, texts, processes, None)} == {os.getpid()}


FAILURES: dict[str, tuple[Callable[[str], None], int, type[Exception], str]] = {
    "error here": (refuse, 1, UserError, "cannot read 0"),
    "error in a process": (refuse, 2, UserError, "cannot read 0"),
    "crash": (die, 2, WorkerDiedError, r"out of memory\?.*data\.workers"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_or_a_crash_in_a_worker_is_the_callers_error(name: str) -> None:
    function, processes, error, message = FAILURES[name]
    with pytest.raises(error, match=message):
        list(map_tasks(function, ["0", "1", "2"], processes, None))
    assert not multiprocessing.active_children()


class Numbered(NamedTuple):
    """A task that is its number."""

    number: int

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def position(self) -> float:
        return float(self.number)


def write(task: Numbered, folder: Path) -> None:
    folder.mkdir()
    (folder / "name").write_text(task.name)


def is_whole(folder: Path, name: str) -> bool:
    return (folder / "name").is_file() and (folder / "name").read_text() == name


class Nothing:
    """Inputs that do not change."""

    settings_hash = "0"

    def __init__(self, folder: Path) -> None:
        self.folder, self.compared = folder, list[dict[str, Any]]()

    def inventory(self) -> list[dict[str, Any]]:
        return []

    def changed(self, sources: Any, compared: Any) -> None:
        return None


@pytest.mark.parametrize("missing", [[], [0], [3], [0, 1, 4], list(range(6))])
def test_only_tasks_whose_part_is_missing_are_done(tmp_path: Path, missing: list[int]) -> None:
    tasks = [Numbered(number) for number in range(6)]
    with open_grid(Nothing(tmp_path)) as grid:
        expected = list(grid.parts(tasks, write, is_whole, 1, None))
    done: list[int] = []

    def noted(task: Numbered, folder: Path) -> None:
        done.append(task.number)
        write(task, folder)

    for number in missing:
        (expected[number][0] / "name").write_text("another task")
    with open_grid(Nothing(tmp_path)) as grid:
        assert list(grid.parts(tasks, noted, is_whole, 1, None)) == expected
        assert grid.finished_tasks() == 6
    assert done == missing and [position for _, position in expected] == list(range(6))


def test_the_work_before_a_death_is_kept(
    text_file: Path,
    tmp_path: Path,
    text_config: Any,
    run: Any,
    contents: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_text, "RANGE_BYTES", 10_000)
    whole, broken = (text_config(text_file, corpus=str(tmp_path / n)) for n in ("whole", "broken"))
    run(whole)
    parts, killed = TaskGrid.parts, list[int]()

    def kill_one(*arguments: Any) -> Any:
        for part in parts(*arguments):
            yield part
            if not killed:
                process = multiprocessing.active_children()[0]
                killed.append(process.pid or 0)
                process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(TaskGrid, "parts", kill_one)
        with pytest.raises(WorkerDiedError):
            main(broken)
    assert list((tmp_path / "broken" / PARTS).iterdir())
    run(broken)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
