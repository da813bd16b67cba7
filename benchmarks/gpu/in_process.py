"""A candidate of a comparison in this process, in place of one of its own (cramming.bench.worker).

Starting a process and importing torch takes seconds, of which a stage has few. What processes keep apart is kept apart
here: the precision of fp32 products, which is the process's, is set before each turn, and what other candidates
hold meanwhile is no part of the peak. What is compiled, and the compiler's settings, are put back by `clean`, once no
candidate lives.
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
from cramming.bench.worker import Steps, facts_of
from cramming.device import compile_seconds

sys.path.append(str(Path(__file__).parents[1]))
COMPILER = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


class InProcess:
    """As `Worker`: `facts`, `run`, `rebuild`; a context manager."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.rebuild(spec)

    def rebuild(self, spec: Mapping[str, Any]) -> None:
        from peers import candidate_of

        self.candidate: Any = None
        self.device = devices.select(spec["device"])
        release(self.device)
        before, self._compiled_before = allocated(self.device), compile_seconds()
        self.candidate = candidate_of(spec, self.device)
        self._kept = allocated(self.device) - before  # grows by the optimizer's state
        self._precision = torch.get_float32_matmul_precision()
        self.facts = facts_of(self.candidate)

    def run(self, first: int, count: int) -> Steps:
        torch.set_float32_matmul_precision(self._precision)
        before = allocated(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, losses = self.candidate.run(first, count)
        peak = devices.peak_memory_bytes(self.device) - (before - self._kept)
        self._kept += allocated(self.device) - before
        return Steps(seconds, losses, peak, compile_seconds() - self._compiled_before)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.candidate = None
        release(self.device)


def allocated(device: torch.device) -> int:
    """Bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def clean(device: torch.device) -> Iterator[None]:
    """Behind it no compiled code, no setting of the compiler and no memory is left of what was done within."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    compiler = [importlib.import_module(name) for name in COMPILER]
    settings = [module.get_config_copy() for module in compiler]
    # A second candidate with other sizes would be compiled for any size; a run is compiled for its own.
    compiler[0].automatic_dynamic_shapes = False
    try:
        yield
    finally:
        torch.compiler.reset()
        for module, before in zip(compiler, settings, strict=True):
            for key, value in module.get_config_copy().items():
                if value is not before[key] and value != before[key]:
                    setattr(module, key, before[key])
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        release(device)
