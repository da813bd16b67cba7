"""A pool of worker processes that leaves nothing behind and never hangs.

Each worker has a pipe of its own, whose other end nobody else holds. So the end of a worker, at whatever moment, is the
end of its pipe, and found at once; a shared queue (`concurrent.futures`, `multiprocessing.Pool`) waits for ever when
one is killed while it writes. Workers are spawned, never see Ctrl-C (the parent ends them) and watch their parent, so
that none outlives it, not even after a `kill -9`.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

from cramming.config import UserError

CONTEXT = multiprocessing.get_context("spawn")

Submit = Callable[..., Future[Any]]
Calls = SimpleQueue[tuple[Future[Any], tuple[Callable[..., Any], tuple[Any, ...]]] | None]  # None: there are no more


class WorkerDiedError(UserError):
    """A worker process is gone: what was finished before is kept, and the same command may go on."""


def _nothing() -> None:
    """What a worker does first, unless it is told."""


@contextmanager
def process_pool(
    workers: int,
    died: str,
    begin: Callable[..., object] = _nothing,
    sent: Sequence[Any] = (),
    inherited: Sequence[Any] = (),
) -> Iterator[Submit]:
    """A pool for the length of the block: `submit(function, *arguments)` gives the future of a result.

    Each worker first calls `begin(*inherited, *sent)`; what is inherited must be small, but may be a lock or a shared
    counter. All are killed when the block ends by an error. What is given to a worker that died ends in
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
            process, pipe = _started(partial(begin, *inherited))
            processes.append(process)
            threads.append(threading.Thread(target=_serve, args=(pipe, sent, calls, died), daemon=True))
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


def _started(begin: Callable[..., object]) -> tuple[SpawnProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_work, args=(theirs, begin), daemon=True)
    with _ctrl_c_held_back():
        process.start()
    theirs.close()
    return process, ours


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """For us a moment, for the process that starts in it always: it is ended by us, without a word, from the first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, sent: Sequence[Any], calls: Calls, died: str) -> None:
    """In the parent, a thread for each worker: hands it one call after the other."""
    begun = False
    with pipe:
        while item := calls.get():
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if not begun:  # not with the start of the process, which cannot be told that it has died meanwhile
                    pipe.send(sent)
                    begun = True
                pipe.send(call)
                good, value = pipe.recv()
            except (EOFError, OSError):
                future.set_exception(WorkerDiedError(died))
            except Exception as error:  # what cannot be sent
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
    """The error with the worker's traceback as a note; in words alone where it cannot travel."""
    trace = "".join(traceback.format_exception(error))
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(trace)
    if not isinstance(again, Exception):
        return RuntimeError(trace)
    again.add_note(trace)
    return again


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
