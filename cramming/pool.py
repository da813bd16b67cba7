"""A pool of worker processes that leaves nothing behind.

Workers are spawned, never see Ctrl-C (the parent ends them) and watch their parent, so that none outlives it, not even
after a `kill -9`. One that dies on its own, mostly for want of memory, ends the work with one line.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from cramming.config import UserError

CONTEXT = multiprocessing.get_context("spawn")

Submit = Callable[..., Future[Any]]


class WorkerDiedError(UserError):
    """A worker process is gone: what was finished before is kept, and the same command may go on."""


@contextmanager
def process_pool(workers: int, begin: Callable[..., object], arguments: tuple[Any, ...], died: str) -> Iterator[Submit]:
    """A pool for the length of the block: `submit(function, *arguments)` gives the future of a result.

    Each worker first calls `begin(*arguments)`. All are killed when the block ends by an error; WorkerDiedError(`died`)
    when it does because one of them died.
    """
    pool = ProcessPoolExecutor(workers, CONTEXT, initializer=_begin, initargs=(begin, arguments))

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with _ctrl_c_held_back():
            return pool.submit(function, *arguments)

    try:
        yield submit
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise WorkerDiedError(died) from None
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """For us a moment, for the process that starts in it always: it is ended by us, without a word, from the first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(begin: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    begin(*arguments)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
