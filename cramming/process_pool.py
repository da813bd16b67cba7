"""A pool of worker processes that leaves nothing behind and never hangs.

Each worker has a pipe of its own, so a crash of the worker is the end of its pipe, detected at once; with a shared
queue (`concurrent.futures`, `multiprocessing.Pool`) the parent hangs when a worker is killed while it writes. Workers
are spawned, never see Ctrl-C (the parent ends them) and watch their parent, so that none survives its `kill -9`.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from cramming.config import UserError

CONTEXT = multiprocessing.get_context("spawn")

Submit = Callable[..., Future[Any]]
Map = Callable[
    [Callable[[Any], Any], Iterable[Any]], list[Any]
]  # a function's result for each item
Calls = SimpleQueue[
    tuple[Future[Any], tuple[Callable[..., Any], tuple[Any, ...]]] | None
]  # None: there are no more


class WorkerDiedError(UserError):
    """A worker process is gone: what was finished before is kept, and the same command may go on."""


@contextmanager
def process_pool(
    workers: int,
    died: str,
    begin: Callable[..., object] = tuple,  # does nothing
    sent: Sequence[Any] = (),
    inherited: Sequence[Any] = (),
) -> Iterator[Submit]:
    """A pool for the length of the block: `submit(function, *arguments)` gives the future of a result.

    Each worker first calls `begin(*inherited, *sent)`; `inherited` must be small, but may hold a lock or a shared
    counter. All are killed when the block ends by an error. A call given to a worker that died ends in
    `WorkerDiedError(died)`.
    """
    calls: Calls = SimpleQueue()
    processes, threads = list[SpawnProcess](), list[threading.Thread]()

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        calls.put((future, (function, arguments)))
        return future

    try:
        for _ in range(workers):
            process, pipe = _start(partial(begin, *inherited))
            processes.append(process)
            threads.append(
                threading.Thread(target=_serve, args=(pipe, sent, calls, died), daemon=True)
            )
            threads[-1].start()
        yield submit
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for _ in threads:
            calls.put(None)
        for thread in threads:
            thread.join()
        for process in processes:
            process.join()


def usable_cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def serial_map(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The results in order, by this process."""
    return [function(item) for item in items]


@contextmanager
def parallel_map(workers: int, died: str) -> Iterator[Map]:
    """A map by so many processes for the length of the block; by fewer than two it is `serial_map`."""
    if workers < 2:
        yield serial_map
        return
    with process_pool(workers, died) as submit:
        yield lambda function, items: [
            future.result() for future in [submit(function, item) for item in items]
        ]


def _start(begin: Callable[..., object]) -> tuple[SpawnProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_work, args=(theirs, begin), daemon=True)
    resource_tracker.ensure_running()  # `start` would do so, and let Ctrl-C through again (Python 3.11)
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # inherited: a worker never sees Ctrl-C
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def _serve(pipe: Connection, sent: Sequence[Any], calls: Calls, died: str) -> None:
    """In the parent, a thread for each worker: hands it one call after the other."""
    begun = False
    with pipe:
        while item := calls.get():
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if not begun:  # by the pipe, as the start of a process does not notice its crash
                    pipe.send(sent)
                    begun = True
                pipe.send(call)
                good, value = pipe.recv()
            except (EOFError, OSError):
                future.set_exception(WorkerDiedError(died))
            except Exception as error:  # an argument that cannot be pickled
                future.set_exception(error)
            else:
                (future.set_result if good else future.set_exception)(value)


def _work(pipe: Connection, begin: Callable[..., object]) -> None:
    """In the worker."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with suppress(EOFError):
        begin(*pipe.recv())
        while True:
            function, arguments = pipe.recv()
            try:
                answer = (True, function(*arguments))
            except BaseException as error:
                answer = (False, _sendable(error))
            pipe.send(answer)


def _sendable(error: BaseException) -> Exception:
    """The error with the worker's traceback as a note; the traceback alone where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    with suppress(Exception):
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, Exception):
            again.add_note(trace)
            return again
    return RuntimeError(trace)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
