"""Processes that end with the one that started them, alone or several beside each other."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANEW = 75  # exit code: the device does not answer this process any more; another must replace it
LAST_SECONDS = 5.0  # reserved at the end of a call: to end processes and print the summary
Process = subprocess.Popen[bytes]


def start(
    command: Sequence[Any], log: Path, own_group: bool = False, **environment: str
) -> Process:
    """Start a process that appends what it prints to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            process_group=0 if own_group else None,
            preexec_fn=end_with_parent,
        )


def end_with_parent() -> None:
    """Ask the system to kill this process when the one that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def kill(process: Process) -> None:
    """Kill a process, and its group if it has one of its own."""
    if process.poll() is None:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def tail(log: Path, size: int = 1500) -> str:
    """Return the end of what a process printed."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - size))
        return stream.read().decode(errors="replace")


@dataclass
class Jobs:
    """Named jobs that run beside each other, some at a time; each is started by a function.

    `outcomes` says of each how it ended.
    """

    waiting: dict[str, Callable[[], Process]]
    at_a_time: int
    running: dict[str, tuple[Process, float]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)

    def poll(self) -> bool:
        """Note what has ended and start what waits; return whether any is left."""
        for name, (process, began) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                self.outcomes[name] = f"{time.monotonic() - began:.0f} s"
                if process.returncode:
                    self.outcomes[name] += f", ended with code {process.returncode}"
        while self.waiting and len(self.running) < self.at_a_time:
            name = next(iter(self.waiting))
            self.running[name] = self.waiting.pop(name)(), time.monotonic()
        return bool(self.running)

    def end(self) -> dict[str, str]:
        """Kill what is left; return the outcomes."""
        for name, (process, began) in self.running.items():
            kill(process)
            self.outcomes[name] = f"late, killed after {time.monotonic() - began:.0f} s"
        self.outcomes |= dict.fromkeys(self.waiting, "late, not begun")
        self.running.clear()
        self.waiting.clear()
        return self.outcomes
