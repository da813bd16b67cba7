"""One candidate of a comparison, in a process of its own: it builds once, then runs steps when told to.

Candidates must not share a process: compiled code, kept memory and peak memory belong to processes. The parent writes
one JSON object per line, first a specification (workload.py), then `{"first": i, "count": n}`; the worker answers each
with one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from cramming import device as devices
from cramming.bench.workload import Candidate, Spec, Workload
from cramming.config import UserError
from cramming.device import compile_seconds


@dataclass(frozen=True)
class Steps:
    """What some steps cost: seconds and loss of each; of the process so far, peak memory in bytes and seconds of
    compilation."""

    seconds: list[float]
    losses: list[float]
    peak_bytes: int
    compile_seconds: float = 0.0


class Worker:
    """The parent's end: a context manager, so that no process outlives its measurement, and no file of its.

    All files of the process go to a temporary folder of its own, compiled code too: each candidate compiles anew. Not
    with `shares_code`, where the time of compilation is not measured.
    """

    def __init__(self, spec: Spec, command: Sequence[str] | None = None, shares_code: bool = False) -> None:
        # A killed process's compiler threads may write for a moment more.
        self._folder = tempfile.TemporaryDirectory(prefix="cramming-bench-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        own = {"TMPDIR": self._folder.name}
        if not shares_code:
            own["TORCHINDUCTOR_CACHE_DIR"] = str(Path(self._folder.name) / "compiled")
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "cramming.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env={**os.environ, **own},
        )  # fmt: skip
        try:
            self.rebuild(spec)
        except BaseException:
            self._end()
            raise

    def run(self, first: int, count: int) -> Steps:
        """Steps first .. first + count - 1."""
        return Steps(**self._ask({"first": first, "count": count}))

    def rebuild(self, spec: Spec) -> None:
        """Another candidate in the same process, where neither time nor memory is measured: a start takes seconds."""
        self.spec = spec
        self.facts = self._ask(spec)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # the process has ended: below it is said why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            reason = (self._errors.read().strip().splitlines() or [f"it ended with exit code {code}"])[-1]
            raise UserError(f"bench: {self.spec['name']}: {reason}")
        return cast(dict[str, Any], json.loads(line))

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):  # what it never read
                    stream.close()
        try:
            self._process.wait(timeout=5)  # its input has ended, so it does, and ends its compiler's processes
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._folder.cleanup()


def warm_up(worker: Worker, steps: int = 2) -> float:
    """Untimed first steps (compilation, buffers); their seconds."""
    began = time.perf_counter()
    worker.run(0, steps)
    return time.perf_counter() - began


def facts_of(candidate: Workload) -> dict[str, Any]:
    """What is known once it is built; `micro_batch=auto` is a number then."""
    names = ("flops_per_token", "precision", "micro_batches")
    return {name: getattr(candidate, name) for name in names}


def serve(make: Callable[[Spec, torch.device], Workload]) -> None:
    """The worker's life: build a candidate, then answer until the parent closes the pipe.

    stdout is the pipe to the parent, so what libraries print goes to stderr.
    """
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    candidate: Workload | None = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if "settings" in message:
                device = devices.select(message["device"])
                if "memory_gb" in message:
                    devices.cap_memory(device, message["memory_gb"])
                candidate = make(message, device)
                answer = facts_of(candidate)
            else:
                assert candidate
                seconds, losses = candidate.run(message["first"], message["count"])
                peak, compiled = devices.peak_memory_bytes(candidate.device), compile_seconds()
                answer = {"seconds": seconds, "losses": losses, "peak_bytes": peak, "compile_seconds": compiled}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    serve(Candidate)
