"""One side of a comparison, in a process of its own: it builds once, then runs steps when told to.

Sides must not share a process: compiled code, kept memory and peak memory belong to processes. The parent writes one
JSON object per line (a job, then `{"first": i, "count": n}`), the worker answers each with one. What the
libraries print goes to stderr.

    {"side": "ours", "settings": {...}, "micro_batches": 1, "vocab_size": 512, "device": "cpu"}

`memory_gb` in a job is a limit of the device's memory; `moved` changes the starting weights and `repeat_skipped` does
steps anew that moved no weight (cramming.bench.curves).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cramming.config import UserError


@dataclass(frozen=True)
class Steps:
    """What some steps cost: seconds of each, loss of each, and the process's peak memory so far, in bytes.

    `compile_seconds`: for how long the process has compiled so far.
    """

    seconds: list[float]
    losses: list[float]
    peak_bytes: int
    compile_seconds: float = 0.0


class Worker:
    """A running side; a context manager, so that no process outlives its measurement, and no file of its.

    Compiled code and all else that it writes goes to a temporary folder of its own: each side compiles anew. Not with
    `shares_code`, where the time of compilation is not what is measured.
    """

    def __init__(self, job: Mapping[str, Any], command: Sequence[str] | None = None, shares_code: bool = False) -> None:
        self.job = job
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
            self.rebuild(job)
        except BaseException:
            self._end()
            raise

    def run(self, first: int, count: int) -> Steps:
        """Steps first .. first + count - 1."""
        self._tell({"first": first, "count": count})
        return Steps(**self._hear())

    def rebuild(self, job: Mapping[str, Any]) -> None:
        """Another side in the same process, where neither time nor memory is measured: a start takes seconds."""
        self.job = job
        self._tell(job)
        self.facts = self._hear()

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `_hear` says why

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            reason = (self._errors.read().strip().splitlines() or [f"it ended with exit code {code}"])[-1]
            raise UserError(f"bench: {self.job.get('name', self.job['side'])}: {reason}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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


def serve(commands: IO[str], answers: IO[str]) -> None:
    """The worker's life: build the side, then answer until the parent closes the pipe."""
    from cramming.bench.sides import SIDES
    from cramming.device import cap_memory, peak_memory_bytes, select
    from cramming.runtime import compile_seconds

    job = json.loads(commands.readline())
    device = select(job["device"])
    if "memory_gb" in job:
        cap_memory(device, job["memory_gb"])

    def build() -> Any:
        side = SIDES[job["side"]](job, device)
        _answer(answers, facts_of(side))
        return side

    side = build()
    for line in commands:
        command = json.loads(line)
        if "side" in command:
            job = command
            side = build()
            continue
        seconds, losses = side.run(command["first"], command["count"])
        peak, compiled = peak_memory_bytes(device), compile_seconds()
        _answer(answers, {"seconds": seconds, "losses": losses, "peak_bytes": peak, "compile_seconds": compiled})


def facts_of(side: Any) -> dict[str, Any]:
    """What is known of a side once it is built; `micro_batch=auto` is a number then."""
    facts = {"flops_per_token": side.flops_per_token, "precision": side.precision}
    return facts | {"micro_batches": getattr(side, "micro_batches", 1)}


def _answer(answers: IO[str], message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def main() -> None:
    """`python -m cramming.bench.worker`: stdout is the pipe to the parent, so nothing else may print there."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def warm_up(worker: Worker, steps: int = 2) -> float:
    """Untimed first steps (compilation, buffers); their seconds."""
    began = time.perf_counter()
    worker.run(0, steps)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
