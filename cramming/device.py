"""What this process computes on: the device's name, peak rate and memory, and the seeds."""

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from cramming.config import UserError
from cramming.environment import cpu_name


@dataclass(frozen=True)
class DeviceInfo:
    """A device as the record names it; the peak of 16-bit products (cramming/plan/cards.py) is null where unknown."""

    kind: str
    name: str
    memory_bytes: int
    peak_tflops: float | None


def select(requested: str) -> torch.device:
    """`auto`, `cpu` or `cuda` -> torch device; UserError if a GPU is asked for and none is there, or an AMD one is."""
    has_gpu, problem = requested != "cpu" and torch.cuda.is_available(), None
    if requested not in ("auto", "cpu", "cuda"):
        problem = "choose one of auto, cpu, cuda"
    elif torch.version.hip and has_gpu:  # ROCm calls itself cuda
        problem = "this torch is built for AMD GPUs (ROCm), which nothing here was tried on; set device=cpu, or take an"
        problem += " NVIDIA GPU"
    elif requested == "cuda" and not has_gpu:
        build = "this torch build has no CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        problem = f"{build} (torch {torch.__version__}); use device=cpu or install a CUDA build"
    if problem:
        raise UserError(f"device={requested}: {problem}")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def describe(device: torch.device) -> DeviceInfo:
    """Name, memory in bytes and peak rate of `device`."""
    if device.type == "cuda":
        from cramming.plan import cards  # only here: training on a CPU needs none

        properties = torch.cuda.get_device_properties(device)
        card = cards.find(properties.name, properties.total_memory)
        return DeviceInfo("cuda", properties.name, properties.total_memory, card.tflops if card else None)
    return DeviceInfo("cpu", cpu_name(), psutil.virtual_memory().total, None)


def nvml_uuid(device: torch.device) -> str | None:
    """The name by which NVML finds a GPU, whichever are visible here; None for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch. Data order and masks do not depend on these states: they are pure functions."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's random state on the CPU and, where there is one, on the GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def set_random_states(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Put back what `random_states` gave."""
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(gpu)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cap_memory(device: torch.device, gigabytes: float) -> None:
    """Let this process allocate as much as a smaller GPU has, in GiB; torch's share only. Nothing on a CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 2**30 / total), device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the GPU, or the resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# This process's memory limit and use, where a container sets one: (limit, use), version 2 and 1 of control groups.
_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Main memory that this process can still get: what the system has free, or less if its container has a limit."""
    available = psutil.virtual_memory().available
    for limit, used in ((Path(a), Path(b)) for a, b in _GROUP_FILES):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            available = min(available, max(0, int(text) - int(used.read_text())))
    return available


# How libraries below torch say it, who raise a RuntimeError: CUDA itself, cuBLAS and cuDNN, Triton, torch on a CPU.
_NO_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory|DefaultCPUAllocator"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for a tensor or a library's workspace: not everybody has a class for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
