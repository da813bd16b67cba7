"""Pool of worker processes that leaves no process behind and never hangs.

Each worker has a separate pipe, whose end reveals a crash of the worker at once; with a shared queue
(`concurrent.futures`, `multiprocessing.Pool`) the parent hangs when a worker is killed while it writes. Workers are
spawned, do not receive Ctrl-C (the parent ends them) and watch their parent, so that none survives its `kill -9`.
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
# (function, items) -> the function's result for each item
Map = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]
Call = tuple[Future[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
Calls = SimpleQueue[Call | None]  # None ends the queue


class WorkerDiedError(UserError):
    """A worker process died; finished work is stored, and the same command can resume."""


@contextmanager
def process_pool(
    workers: int,
    died: str,
    begin: Callable[..., object] = tuple,  # does nothing
    sent: Sequence[Any] = (),
    inherited: Sequence[Any] = (),
) -> Iterator[Submit]:
    """Yield a pool for the length of the block: `submit(function, *arguments)` returns the future of a result.

    Each worker first calls `begin(*inherited, *sent)`; `inherited` must be small, but may hold a lock or a shared
    counter. All workers are killed when the block ends by an error. A call of a worker that died fails with
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
            thread = threading.Thread(target=_serve, args=(pipe, sent, calls, died), daemon=True)
            threads.append(thread)
            thread.start()
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
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def serial_map(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return the results in order, computed in this process."""
    return [function(item) for item in items]


@contextmanager
def parallel_map(workers: int, died: str) -> Iterator[Map]:
    """Yield a map with this many processes for the length of the block; with fewer than two it is `serial_map`."""
    if workers < 2:
        yield serial_map
        return
    with process_pool(workers, died) as submit:

        def run_map(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            futures = [submit(function, item) for item in items]
            return [future.result() for future in futures]

        yield run_map


def _start(begin: Callable[..., object]) -> tuple[SpawnProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_work, args=(theirs, begin), daemon=True)
    # `start` would start the tracker too, but unblock Ctrl-C (Python 3.11).
    resource_tracker.ensure_running()
    # The mask is inherited: workers do not receive Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def _serve(pipe: Connection, sent: Sequence[Any], calls: Calls, died: str) -> None:
    """Send calls to one worker, one after the other, in a thread of the parent."""
    begun = False
    with pipe:
        while True:
            item = calls.get()
            if item is None:
                return
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if not begun:
                    # through the pipe, because the start of a process does not detect its crash
                    pipe.send(sent)
                    begun = True
                pipe.send(call)
                succeeded, value = pipe.recv()
            except (EOFError, OSError):
                future.set_exception(WorkerDiedError(died))
            except Exception as error:  # an argument that cannot be pickled
                future.set_exception(error)
            else:
                if succeeded:
                    future.set_result(value)
                else:
                    future.set_exception(value)


def _work(pipe: Connection, begin: Callable[..., object]) -> None:
    """Serve calls in the worker process until the parent closes the pipe."""
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
    """Return the error with the worker's traceback as a note, or the traceback alone if the error cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    with suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(copy, Exception):
            copy.add_note(trace)
            return copy
    return RuntimeError(trace)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
