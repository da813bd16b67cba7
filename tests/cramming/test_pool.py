"""The pool of processes: whatever ends it, it ends at once and leaves nobody behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from cramming.config import UserError
from cramming.process_pool import WorkerDiedError, process_pool

DIED = "a worker died"
LARGE = (
    1 << 20
)  # bytes: far more than a pipe holds, so that whoever is killed is killed while it writes


def double(number: int) -> int:
    return 2 * number


def large(_: int) -> bytes:
    return bytes(LARGE)


def who(_: int) -> int:
    return os.getpid()


def refuse(what: str) -> NoReturn:
    raise UserError(f"no {what}")


class UnsendableError(Exception):
    def __init__(self, first: int, two: int) -> None:
        super().__init__(first + two)


def fail_oddly() -> NoReturn:
    raise UnsendableError(1, 2)


def fail_to_begin() -> NoReturn:
    raise RuntimeError("cannot begin")


def test_results_and_errors_come_back() -> None:
    with process_pool(2, DIED) as submit:
        assert [submit(double, number).result() for number in range(5)] == [0, 2, 4, 6, 8]
        with pytest.raises(UserError, match="no bread") as caught:
            submit(refuse, "bread").result()
        assert "in refuse" in str(caught.value.__notes__), "where it happened in the worker"
        with pytest.raises(RuntimeError, match="UnsendableError"):
            submit(fail_oddly).result()
        with pytest.raises(Exception, match="pickle"):
            submit(lambda: 1).result()
        assert submit(double, 21).result() == 42, "it goes on after errors"


@pytest.mark.parametrize("moment", [0.0, 0.002, 0.01, 0.05])
def test_a_worker_that_is_killed_while_it_writes_is_found_at_once(moment: float) -> None:
    with pytest.raises(WorkerDiedError, match=DIED), process_pool(2, DIED) as submit:
        victim = submit(who, 0).result()
        answers = [submit(large, number) for number in range(200)]
        time.sleep(moment)
        os.kill(victim, signal.SIGKILL)
        for answer in answers:
            answer.result(timeout=60)


def test_what_begins_may_be_larger_than_a_pipe_and_may_fail() -> None:
    with process_pool(2, DIED, len, (bytes(LARGE),)) as submit:
        assert submit(double, 4).result(timeout=60) == 8
    with pytest.raises(WorkerDiedError), process_pool(1, DIED, fail_to_begin) as submit:
        submit(double, 1).result(timeout=60)


PROGRAM = """
import signal
from cramming.process_pool import process_pool
from answers import large
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background inherits as ignored
    try:
        with process_pool(2, "died") as submit:
            submit(large, 0).result()
            print("ready", flush=True)
            answers = [submit(large, number) for number in range(10**5)]
            while True:  # a main process that is busy, so that results wait in their pipes
                sum(range(10**5))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


Started = tuple["subprocess.Popen[str]", list[psutil.Process]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A program whose workers write large answers, and the processes below it."""
    (tmp_path / "answers.py").write_text(f"def large(_):\n    return bytes({LARGE})\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "program.py"]
    program = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    yield program, psutil.Process(program.pid).children(recursive=True)
    program.kill()
    program.communicate()


def all_gone(processes: list[psutil.Process]) -> bool:
    return len(processes) >= 2 and not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_it_at_once(started: Started, times: int) -> None:
    program, workers = started
    for _ in range(times):
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all of them
        time.sleep(0.05)
    out, _ = program.communicate(timeout=60)
    assert (times > 1 or out == "interrupted\n") and all_gone(workers)


def test_nobody_outlives_a_killed_parent(started: Started) -> None:
    program, workers = started
    program.kill()
    program.communicate(timeout=60)
    assert all_gone(workers)


def test_no_worker_sees_ctrl_c() -> None:
    """Neither that of the first pool of a process, with which Python starts a helper of its own."""
    script = (
        "import signal\n"
        "from cramming.process_pool import process_pool\n"
        "if __name__ == '__main__':\n"
        "    with process_pool(1, 'died') as submit:\n"
        "        print(signal.SIGINT in submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"]
