"""Verbs as child processes: those of a pipeline and the jobs of a multirun, ended with their parent and as it was."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from cramming import CACHE_VARIABLES, GIVEN_CACHES


def run_or_exit(arguments: Sequence[str], stdout: int | None = None) -> None:
    """Run `cramming <arguments>` as a child process; exit with its code (128 + signal) if that is not 0.

    `stdout` is the file descriptor of its output, None for that of this process.
    """
    code = run_process([sys.executable, "-m", "cramming", *arguments], stdout)
    if code != 0:
        sys.exit(code if code > 0 else 128 - code)


def run_process(command: list[str], stdout: int | None = None) -> int:
    """Exit code of a child that gets our SIGTERM passed on; Ctrl-C reaches it by itself, and it ends in its own way.

    However it ends, the signal is then ours as well: nobody asked for what would come next.
    On Linux it gets a SIGTERM as well when we are gone without having been able to pass anything on (`kill -9`).
    """
    children: list[subprocess.Popen[bytes]] = []
    asked = interrupted = False

    def pass_on(*_: object) -> None:
        nonlocal asked
        asked = True
        for child in children:
            child.terminate()

    # The handler comes first: a signal that arrives while the child starts must not end us alone.
    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        ended_with_us = end_with_parent(os.getpid()) if sys.platform == "linux" else None
        children.append(
            subprocess.Popen(
                command, preexec_fn=ended_with_us, env=environment_as_given(), stdout=stdout
            )
        )
        if asked:
            children[0].terminate()
        while (code := children[0].poll()) is None:
            try:
                code = children[0].wait()
            except KeyboardInterrupt:
                interrupted = True
    finally:
        signal.signal(signal.SIGTERM, previous)
    if asked:
        signal.raise_signal(signal.SIGTERM)
    if interrupted:
        raise KeyboardInterrupt
    return code


def environment_as_given() -> dict[str, str]:
    """Without what torch, where this process has imported it, has set: a child would take that for the user's."""
    ours = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    return {**ours, **GIVEN_CACHES}


def end_with_parent(parent: int) -> Callable[[], None]:
    """For a new process to call: the kernel (Linux) sends it a SIGTERM when its parent has died."""
    prctl = ctypes.CDLL(None).prctl  # found here: little may be done between fork and exec

    def begin() -> None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of linux/prctl.h
        if os.getppid() != parent:  # it has died already
            os._exit(128 + signal.SIGTERM)

    return begin
