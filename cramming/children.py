"""Verbs as child processes: those of a pipeline and the jobs of a multirun, ended with their parent and as it was."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

CHECK = "--check"  # with a verb of the pipeline or `run`: check the settings, and what they name, and end


def run_or_exit(arguments: Sequence[str]) -> None:
    """Run `cramming <arguments>` as a child process; end with its exit code (128 + signal) if that is not 0."""
    code = run_process([sys.executable, "-m", "cramming", *arguments])
    if code != 0:
        sys.exit(code if code > 0 else 128 - code)


def run_process(command: list[str]) -> int:
    """Exit code of a child that gets our SIGTERM passed on; Ctrl-C reaches it by itself, and it ends in its own way.

    On Linux it gets a SIGTERM as well when we are gone without having been able to pass anything on (`kill -9`).
    """
    child = subprocess.Popen(command, preexec_fn=_end_with_parent(os.getpid()) if sys.platform == "linux" else None)
    previous = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """For a new process, before its program starts: the kernel sends it a SIGTERM when its parent has died."""
    prctl = ctypes.CDLL(None).prctl  # found here: little may be done between fork and exec

    def begin() -> None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of linux/prctl.h
        if os.getppid() != parent:  # it has died already
            os._exit(128 + signal.SIGTERM)

    return begin
