"""A candidate of a comparison in this process, in place of one of its own (cramming.bench.worker).

Starting a process and importing torch takes seconds. What processes keep apart is kept apart here: the precision of
fp32 products is set before each turn, and what other candidates hold is no part of the peak. `clean` puts the
compiler's state and settings back.
"""

import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cramming import device as devices
from cramming.bench.worker import Candidate, Steps, facts_of
from cramming.device import compile_seconds
from cramming.hooks import StepResult

sys.path.append(str(Path(__file__).parents[1]))
MAX_TRIES = 10  # of a step: each skip halves the loss scale
COMPILER = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


class InProcess:
    """Candidate with the interface of `Worker`: `facts`, `run`, `rebuild`; a context manager."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.rebuild(spec)

    def rebuild(self, spec: Mapping[str, Any]) -> None:
        """Build another candidate in place of this one."""
        from peers import candidate_of

        self.spec = spec
        self.candidate: Any = None
        self.device = devices.select(spec["device"])
        release(self.device)
        before, self._compiled_before = allocated(self.device), compile_seconds()
        self._hits_before = cache_hits()
        self.candidate = candidate_of(spec, self.device)
        self._held_bytes = allocated(self.device) - before  # grows by the optimizer's state
        self._precision = torch.get_float32_matmul_precision()
        self.facts = facts_of(self.candidate)

    def run(self, first: int, count: int) -> Steps:
        """Train the steps from `first` on."""
        with self._measuring() as peak:
            seconds, losses = self.candidate.run(first, count)
        return Steps(seconds, losses, peak[0], compile_seconds() - self._compiled_before)

    def step(self, index: int) -> tuple[StepResult, int]:
        """Train one step of ours; return its numbers and the peak of memory in bytes."""
        with self._measuring() as peak:
            stats = train_step(self.candidate, index)
        return stats, peak[0]

    def cut_step(self, spec: Mapping[str, Any]) -> None:
        """Train one micro-batch a step from now on, which is what `spec` says; what is compiled serves on."""
        rows = self.candidate.train.batch_size // self.candidate.micro_batches
        self.candidate.train = self.candidate.train.replace(batch_size=rows)
        self.candidate.micro_batches = 1
        self.spec, self.facts = spec, facts_of(self.candidate)

    @contextmanager
    def _measuring(self) -> Iterator[list[int]]:
        """Give a list that holds this candidate's peak of memory afterwards."""
        torch.set_float32_matmul_precision(self._precision)
        before, peak = allocated(self.device), list[int]()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.append(devices.peak_memory_bytes(self.device) - (before - self._held_bytes))
        self._held_bytes += allocated(self.device) - before

    @property
    def cache_hits(self) -> int:
        """Graphs that the compiler has found in its cache since this candidate was built."""
        return cache_hits() - self._hits_before

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        train = self.spec["settings"]["train"]
        return int(train["batch_size"] * train["sequence_length"])

    def close(self) -> None:
        """Forget the candidate."""
        self.candidate = None
        release(self.device)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def train_step(candidate: Candidate, index: int) -> StepResult:
    """Train one step of ours; return its numbers. A step that fp16 skips is repeated until its loss scale fits."""
    batches = next(candidate.batches(index, 1))
    for _ in range(MAX_TRIES):
        stats = candidate.engine.step(batches, candidate.learning_rate(index))
        if not stats.skipped:
            break
    return stats


def cache_hits() -> int:
    """Return how many graphs the compiler has found in its cache since this process began."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["inductor"]["fxgraph_cache_hit"]) if dynamo else 0


def allocated(device: torch.device) -> int:
    """Return the bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    """Give back a GPU's memory that nothing holds any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def clean(device: torch.device, candidates: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Undo what was set and compiled within. Compiled code stays while one of `candidates` needs it."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    compiler = [importlib.import_module(name) for name in COMPILER]
    settings = [module.get_config_copy() for module in compiler]
    try:
        yield
    finally:
        if not candidates:
            torch.compiler.reset()
        for module, before in zip(compiler, settings, strict=True):
            for key, value in module.get_config_copy().items():
                if value is not before[key] and value != before[key]:
                    setattr(module, key, before[key])
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        release(device)
