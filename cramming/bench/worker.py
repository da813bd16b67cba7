"""Candidate of a comparison in a separate process: it is built once, then runs steps on request.

Candidates must not share a process: compiled code, cached memory and peak memory belong to processes. The parent
writes one JSON object per line, first a specification, then `{"first": i, "count": n}`; the worker answers each with
one. A specification has `name`, `settings`, `vocab_size`, `device` and `micro_batches`. Optional: `memory_gb` limits
the device's memory, `perturbed` (relative size, seed) moves the starting weights, and `repeat_skipped` repeats a step
that changed no weight, as fp16 skips some until its loss scale fits.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import Batch, BatchSource, prefetch_batches
from cramming.data.corpus import TokenStream
from cramming.device import compile_seconds, prepare_heap
from cramming.engine import build_engine
from cramming.objectives.masking import Masker, Targets
from cramming.parallel.mesh import Mesh
from cramming.plan.micro_batch import find_micro_batch
from cramming.recipe import Config

Spec = Mapping[str, Any]
WARMUP_STEPS = 20  # steps until the learning rate reaches its peak
SPECIAL = ("pad", "unk", "cls", "sep", "mask")
TOPICS = 4
BATCHES_OF_TEXT = 200  # before the synthetic text repeats itself
GPU_TOKENS = 2**22  # length of the text that all candidates on a GPU share


@dataclass(frozen=True)
class Steps:
    """Measurements of consecutive steps: seconds and loss of each.

    `peak_bytes` (memory) and `compile_seconds` are those of the process so far.
    """

    seconds: list[float]
    losses: list[float]
    peak_bytes: int
    compile_seconds: float = 0.0


class Worker:
    """Parent's end of a worker process: a context manager that leaves no process and no file behind.

    All files of the process go to a temporary folder, compiled code too: each candidate compiles anew. With
    `shares_code`, for uses that do not measure the time of compilation, compiled code is shared.
    """

    def __init__(
        self, spec: Spec, command: Sequence[str] | None = None, shares_code: bool = False
    ) -> None:
        # Compiler threads of a killed process may still write for a moment.
        self._folder = tempfile.TemporaryDirectory(
            prefix="cramming-bench-", ignore_cleanup_errors=True
        )
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        variables = {"TMPDIR": self._folder.name}
        if not shares_code:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(Path(self._folder.name) / "compiled")
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "cramming.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **variables},
        )
        try:
            self.rebuild(spec)
        except BaseException:
            self.__exit__()
            raise

    def run(self, first: int, count: int) -> Steps:
        """Return the measurements of steps first .. first + count - 1."""
        return Steps(**self._request({"first": first, "count": count}))

    def rebuild(self, spec: Spec) -> None:
        """Build another candidate in the same process, where neither time nor memory is measured.

        The start of a process takes seconds.
        """
        self.spec = spec
        self.facts = self._request(spec)

    def _request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # the process has ended; the reason is read below
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            error_lines = self._errors.read().strip().splitlines()
            reason = error_lines[-1] if error_lines else f"it ended with exit code {code}"
            raise UserError(f"bench: {self.spec['name']}: {reason}")
        return cast(dict[str, Any], json.loads(line))

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):  # closing flushes input that was never read
                    stream.close()
        try:
            # At the end of its input the process ends, and the processes of its compiler with it.
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._folder.cleanup()


def warm_up(worker: Worker, steps: int = 2) -> float:
    """Run the untimed first steps (compilation, buffers), and return their seconds."""
    began = time.perf_counter()
    worker.run(0, steps)
    return time.perf_counter() - began


class Workload:
    """Tokens, shapes, learning rate and timing that all candidates share.

    The seconds of a step run from the end of the step before to its own synchronised end, so they include masking.
    """

    precision: str
    micro_batches = 1

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.device = device
        config = Config.of(spec["settings"])
        model = replace(config.model, vocab_size=spec["vocab_size"])
        train = config.train.replace(batch_ramp=None)
        self.config = config = config.replace(model=model, train=train)
        self.train, self.objective, self.optim = config.train, config.objective, config.optim
        self.flops_per_token = config.flops_per_token()
        rows = self.train.batch_size
        if device.type == "cuda":
            # one text for all sizes of a step, because making it takes seconds
            rows = GPU_TOKENS // BATCHES_OF_TEXT // self.train.sequence_length
        self.source = topic_batches(
            self.objective.at(0.0),
            spec["vocab_size"],
            self.train.sequence_length,
            self.train.packing,
            rows,
        )

    def step(self, batches: Sequence[Batch], step: int) -> float:
        """Train on the micro-batches of one step, and return the loss."""
        raise NotImplementedError

    def run(self, first: int, count: int) -> tuple[list[float], list[float]]:
        """Return seconds and loss of each step.

        On a GPU the batches of the first step are ready before it starts, as in a run.
        """
        made = self.batches(first, count)
        ready = [next(made)] if self.device.type == "cuda" else []
        losses, ends = [], [time.perf_counter()]
        for step, batches in enumerate(itertools.chain(ready, made), first):
            losses.append(self.step(batches, step))
            devices.synchronize(self.device)
            ends.append(time.perf_counter())
        return [end - before for before, end in itertools.pairwise(ends)], losses

    def batches(self, first: int, count: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of `count` steps, on a GPU prefetched and pinned, as in a run."""
        rows = self.train.batch_size // self.micro_batches
        indices = range(count * self.micro_batches)

        def make(index: int) -> Batch:
            return self.source.batch(first * self.train.batch_size + index * rows, rows)

        if self.device.type == "cpu":  # prefetching threads would compete with the step for cores
            made = (make(index) for index in indices)
        else:
            depth = max(self.config.runtime.prefetch, self.micro_batches)
            made = prefetch_batches(make, self.device, depth)
        with closing(made):
            for _ in range(count):
                yield list(itertools.islice(made, self.micro_batches))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, constant after a warm-up."""
        return self.config.peak_learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)


class Candidate(Workload):
    """The suite's engine, trained as `cramming pretrain` trains it."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        super().__init__(spec, device)
        prepare_heap(self.config.runtime, device)
        torch.manual_seed(0)
        self.engine = build_engine(self.config, Mesh(self.config.parallel, device), device)
        self.precision = self.engine.precision.mode
        self.repeat_skipped = spec.get("repeat_skipped", False)
        rows = self.train.batch_size
        if spec.get("micro_batches"):
            self.micro_batches = spec["micro_batches"]
        elif self.train.micro_batch == "auto":
            micro_batch, *_ = find_micro_batch(self.engine, self.source.batch, self.config, rows)
            self.micro_batches = rows // micro_batch
        else:
            self.micro_batches = rows // self.train.micro_batch
        if spec.get("perturbed"):
            size, seed = spec["perturbed"]
            perturb(self.engine.parameters, size, seed)

    def step(self, batches: Sequence[Batch], step: int) -> float:
        """Train on the micro-batches of one step, and return the loss."""
        while True:
            stats = self.engine.step(batches, self.learning_rate(step))
            if not (stats.skipped and self.repeat_skipped):
                return stats.loss


@torch.no_grad()
def perturb(weights: Iterable[Tensor], size: float, seed: int) -> None:
    """Move every weight up or down, at random, by the relative `size`; zeros stay."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_((1 + size * signs).to(weight))


@functools.lru_cache(maxsize=4)  # one process may serve many candidates
def topic_batches(
    targets: Targets,
    vocab_size: int,
    sequence_length: int,
    packing: Literal["rows", "documents"],
    rows: int,
    seed: int = 0,
) -> BatchSource:
    """Return batches of synthetic text, equal on all machines, from which a model learns during the whole measurement.

    Ids are below `vocab_size`; the text repeats itself after about `BATCHES_OF_TEXT` batches of `rows` sequences. A
    document has one of a few topics, each with its own frequent words. Half of its tokens are drawn from the topic, and
    half follow from the token before. Frequencies are learned in tens of steps, the topics soon after, which needs
    attention, and the successors last.
    """
    rng = np.random.default_rng(seed)
    first, words = len(SPECIAL), vocab_size - len(SPECIAL)
    num_tokens = max(BATCHES_OF_TEXT * rows, 1000) * sequence_length
    document_length = max(8, sequence_length * 3 // 4)
    documents = -(-min(num_tokens, 2**24) // document_length)
    # the words of each topic, most frequent first
    order_KW = np.stack([rng.permutation(words) for _ in range(TOPICS)])
    successor_W = rng.permutation(words)
    topic_D = rng.integers(0, TOPICS, documents)
    share_W = np.arange(1, words + 1) ** -1.5
    rank_DL = rng.choice(words, (documents, document_length), p=share_W / share_W.sum())
    ids_DL = order_KW[topic_D[:, None], rank_DL]
    follows_DL = rng.random((documents, document_length)) < 0.5
    for position in range(1, document_length):
        successors_D = successor_W[ids_DL[:, position - 1]]
        drawn_D = ids_DL[:, position]
        ids_DL[:, position] = np.where(follows_DL[:, position], successors_D, drawn_D)
    ids_DL += first
    ids_DL[:, 0] = SPECIAL.index("cls")
    stream = TokenStream.of_array(ids_DL.reshape(-1), np.arange(0, ids_DL.size, document_length))
    masker = Masker(targets, vocab_size, SPECIAL.index("mask"), tuple(range(first)), seed)
    return BatchSource(stream, masker, sequence_length, packing, seed)


def facts_of(candidate: Workload) -> dict[str, Any]:
    """Return the properties of a built candidate, in which `micro_batch=auto` is resolved."""
    return {
        name: getattr(candidate, name) for name in ("flops_per_token", "precision", "micro_batches")
    }


def serve(make: Callable[[Spec, torch.device], Workload]) -> None:
    """Build a candidate, then answer the parent's requests until it closes the pipe.

    stdout is the pipe to the parent, so output of libraries is redirected to stderr.
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
                    cap_memory(device, message["memory_gb"])
                candidate = make(message, device)
                answer = facts_of(candidate)
            else:
                assert candidate
                seconds, losses = candidate.run(message["first"], message["count"])
                peak, compiled = devices.peak_memory_bytes(candidate.device), compile_seconds()
                answer = {
                    "seconds": seconds,
                    "losses": losses,
                    "peak_bytes": peak,
                    "compile_seconds": compiled,
                }
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def cap_memory(device: torch.device, gigabytes: float) -> None:
    """Limit torch's allocations to the memory of a smaller GPU, in GiB. Does nothing on a CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 2**30 / total), device)


if __name__ == "__main__":
    serve(Candidate)
