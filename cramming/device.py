"""What this process computes on, and how: device, seeds, memory, energy, and the compiler.

Nothing here changes a number of the training beyond the rounding of compiled kernels.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import psutil
import torch
from pydantic import model_validator

from cramming import CACHE_VARIABLES, GIVEN_CACHES
from cramming.config import Count, Section, UserError
from cramming.environment import cpu_name
from cramming.files import remove

COMPILE_CACHE = "compile_cache"  # in the run's folder
NVML = "libnvidia-ml.so.1"  # comes with the driver
MAX_VARIANTS = 32  # of one compiled function: 8 for each of a few shapes


class RuntimeConfig(Section):
    """The `runtime` section.

    `compile: blocks` compiles one block and reuses it for all, `model` the whole forward and backward pass. `tune`
    (GPU) lets the compiler try other tiles, or also its own matrix products, on the clock. `cuda_graphs` (GPU,
    `compile: model`) replays a pass's launches as one. `keep_heap` (CPU, glibc) keeps freed memory in the process.
    `prefetch`: batches made ahead.
    """

    compile: Literal["off", "blocks", "model"]
    keep_heap: bool
    prefetch: Count
    tune: Literal["off", "coordinate-descent", "max-autotune"] = "off"
    cuda_graphs: bool = False

    @model_validator(mode="after")
    def _compiles_what_it_tunes(self) -> Self:
        if self.tune != "off" and self.compile == "off":
            raise ValueError(
                f"tune={self.tune}: does nothing with runtime.compile=off. Set runtime.compile=model."
            )
        if self.cuda_graphs and self.compile != "model":
            raise ValueError(
                f"cuda_graphs=true: needs a compiled model, not runtime.compile={self.compile}."
                " Set runtime.compile=model."
            )
        return self


@dataclass(frozen=True)
class DeviceInfo:
    """A device as the record names it; the peak of 16-bit products (cramming/plan/cards.csv) is null where unknown."""

    kind: str
    name: str
    memory_bytes: int
    peak_tflops: float | None


def select(requested: str) -> torch.device:
    """Return the torch device for `auto`, `cpu` or `cuda`.

    UserError if a GPU is asked for and there is none, or this suite or the installed torch cannot use it.
    """
    has_gpu, problem = requested != "cpu" and torch.cuda.is_available(), None
    if requested not in ("auto", "cpu", "cuda"):
        problem = "choose one of auto, cpu, cuda"
    elif torch.version.hip and has_gpu:  # ROCm calls itself cuda
        problem = "this torch is built for AMD GPUs (ROCm), which nothing here was tried on; set --device=cpu, or"
        problem += " take an NVIDIA GPU"
    elif requested == "cuda" and not has_gpu:
        build = (
            "this torch build has no CUDA"
            if torch.version.cuda is None
            else "no CUDA device is visible"
        )
        problem = f"{build} (torch {torch.__version__}); use --device=cpu or install a CUDA build"
    elif has_gpu:
        problem = reason_without_kernels()
    if problem:
        raise UserError(f"--device={requested}: {problem}")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def reason_without_kernels() -> str | None:
    """Return why the installed torch cannot compute on the current GPU, with what to do; None if it can."""
    architectures, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability()
    if has_kernels(capability, architectures):
        return None
    from cramming.plan.cards import OLDEST_IN_CUDA_13

    name = torch.cuda.get_device_name()
    if capability < OLDEST_IN_CUDA_13:
        fix = "install torch's build for CUDA 12.6 (cu126; torch 2.14 is the last that has one)"
    else:
        fix = "install a newer torch, or its build for another CUDA version"
    return (
        f"torch {torch.__version__} has no kernels for {name} (compute capability"
        f" {capability[0]}.{capability[1]}; it has {' '.join(architectures)}); {fix}, or set --device=cpu"
    )


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code for one of these architectures runs on a GPU of this compute capability.

    Machine code (`sm_86`) runs on the same major and the same or a later minor version, PTX (`compute_90`) on its own
    and all later ones. With the suffix `a` either runs on its own version only, with `f` within its major version
    (CUDA C++ Programming Guide, compute capabilities). An empty list says nothing: then it is assumed.
    """
    for architecture in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if parts is None:
            continue
        kind, major, minor, suffix = parts.groups()
        version = (int(major), int(minor))
        same_family = version[0] == capability[0] and version <= capability
        is_portable = kind == "compute" and not suffix
        if version == capability or (same_family and suffix != "a"):
            return True
        if is_portable and version <= capability:
            return True
    return not architectures


def describe(device: torch.device) -> DeviceInfo:
    """Name, memory in bytes and peak rate of `device`."""
    if device.type == "cuda":
        from cramming.plan import cards  # training on a CPU needs none

        properties = torch.cuda.get_device_properties(device)
        card = cards.find(properties.name, properties.total_memory)
        return DeviceInfo(
            "cuda", properties.name, properties.total_memory, card.tflops if card else None
        )
    return DeviceInfo("cpu", cpu_name(), psutil.virtual_memory().total, None)


def random_states() -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's random state on the CPU and, where this process uses one, on the GPU."""
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    )


def set_random_states(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Put back what `random_states` gave."""
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(gpu)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Memory ---------------------------------------------------------------------------------------------------------------


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


# How libraries below torch word it in a RuntimeError. The driver's words come from loading a compiled kernel and from
# expandable segments; cuDNN 9 has names of its own for memory of the device and of the host.
_NO_MEMORY = re.compile(
    r"CUDA out of memory"
    r"|CUDA (driver )?error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CU[A-Z]+_STATUS(_[A-Z]+)*_ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER
    r"|DefaultCPUAllocator"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for a tensor or a library's workspace: not everybody has a class for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def keep_freed_memory() -> bool:
    """Let malloc never return memory to the system; False where the C library has no such option.

    A step on a CPU frees and takes again hundreds of MB of activations. By default glibc unmaps each large block and
    the kernel then clears every page of the next one: at hidden size 256 and 4,096 tokens that was 70,000 page faults
    and about a tenth of the step. One arena for all threads keeps the peak near what is in use at once.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS
        return False
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # glibc's malloc.h
    return all(
        mallopt(*option) == 1 for option in ((mmap_max, 0), (trim_threshold, -1), (arena_max, 1))
    )


# Energy ---------------------------------------------------------------------------------------------------------------


def energy_reader(device: torch.device) -> Callable[[], float | None]:
    """Return a function that reads from a GPU's driver (NVML) the joules of the whole card since it was loaded.

    It returns None on a CPU, without NVML, and where the driver does not know (a slice of a card, before Volta).
    """
    try:
        library = ctypes.CDLL(NVML) if device.type == "cuda" else None
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2() != 0:
        return lambda: None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return lambda: None

    def joules() -> float | None:
        millijoules = ctypes.c_ulonglong()
        status = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return millijoules.value / 1000 if status == 0 else None

    return joules


# FlashAttention -------------------------------------------------------------------------------------------------------

FLASH_MODULES = {3: "flash_attn_interface", 4: "flash_attn.cute"}  # as torch imports them
FLASH_GPUS = {3: (9,), 4: (9, 10)}  # major compute capabilities, by torch's own checks
FLASH_4_TORCH = (2, 13)  # its backward pass on bounds; torch 2.11 refuses it


def reason_against_flash(version: int, capability: tuple[int, int]) -> str | None:
    """Return why FlashAttention 3 or 4 cannot be used on a GPU of this compute capability; None if it can."""
    module = FLASH_MODULES[version]
    try:
        is_installed = find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        is_installed = False
    if capability[0] not in FLASH_GPUS[version]:
        majors = " or ".join(f"{major}.x" for major in FLASH_GPUS[version])
        return f"needs a GPU of compute capability {majors}"
    torch_version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version == 4 and torch_version < FLASH_4_TORCH:
        return f"needs torch 2.13 or newer, this is {torch.__version__}"
    return None if is_installed else f"needs the package with the module {module}"


def activate_flash(version: Literal["auto", 2, 3, 4]) -> None:
    """Let torch compute attention by this version of FlashAttention in this process; `auto` changes nothing."""
    if version == "auto":
        return
    from torch.nn import attention

    if version == 2:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        return
    try:
        attention.activate_flash_attention_impl(f"FA{version}")
    except (ImportError, RuntimeError, AttributeError) as error:  # a package of another version
        reason = " ".join(str(error).split())[:150]
        raise UserError(
            f"attention.flash={version}: {FLASH_MODULES[version]} does not load ({reason}); set it to auto"
        ) from None


# Compiler -------------------------------------------------------------------------------------------------------------

TUNING: dict[
    str, dict[str, Any]
] = {  # as torch.compile's modes have it (`torch._inductor.list_mode_options`)
    "off": {},
    "coordinate-descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}


def compile_arguments(config: RuntimeConfig) -> dict[str, Any]:
    """What `nn.Module.compile` is called with."""
    options = {**TUNING[config.tune], **({"triton.cudagraphs": True} if config.cuda_graphs else {})}
    return {"options": options} if options else {}


def prepare(config: RuntimeConfig, device: torch.device, run_folder: Path) -> None:
    """Settings of the process that must be made before the first large allocation and the first compilation.

    Compiled code is kept in the run's own folder, so that a resume does not compile again, and no run has from another
    what should be on its clock. Whatever `compile` says: FlexAttention and torchao's optimizers compile in any case.
    """
    own = (run_folder / COMPILE_CACHE).absolute()
    for variable, place in zip(CACHE_VARIABLES, (own, own / "triton")):
        os.environ[variable] = GIVEN_CACHES.get(variable, str(place))
    prepare_heap(config, device)


def prepare_heap(config: RuntimeConfig, device: torch.device) -> None:
    """`keep_heap`, where the device is a CPU."""
    if config.keep_heap and device.type == "cpu":
        keep_freed_memory()


def compile_cache(run_folder: Path, has_trained: bool) -> Literal["own", "given"]:
    """Where this process keeps compiled code: in the run's folder, or somewhere given.

    What is given may hold code already, whose compilation is then not on the clock. So may the run's folder until a
    step is on record (`has_trained`): what a killed process left cannot be told from a copy, and is compiled again.
    """
    if GIVEN_CACHES:
        return "given"
    if not has_trained:
        remove(run_folder / COMPILE_CACHE)
    return "own"


def forbid_fallback() -> None:
    """Let the compiler make as many variants of a function as a run needs, and fail instead of running it as written.

    All blocks are one function to it: with local and global layers the first, the last, training and validation are 8
    variants, which is its own limit. Beyond that it would go on uncompiled without a word. A second shape (validation,
    the next phase of an objective) is compiled for itself: code for any shape takes longer to make and to run.
    """
    import torch._dynamo.config as dynamo

    dynamo.automatic_dynamic_shapes = False
    dynamo.recompile_limit = MAX_VARIANTS
    dynamo.fail_on_recompile_limit_hit = True


def is_recompile_limit(error: BaseException) -> bool:
    """Whether the compiler was asked for more variants of one function than `forbid_fallback` allows."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.FailOnRecompileLimitHit)


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process so far, recompilations for other shapes included."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def compile_seconds() -> float:
    """Return the seconds that this process has compiled since the last `torch.compiler.reset`, which clears the times.

    What kernels try in their first launch (`tune`) is not in them.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    times = dynamo.cumulative_time_spent_ns if dynamo else {}
    return (
        sum(times.get(name, 0.0) for name in ("entire_frame_compile", "entire_backward_compile"))
        / 1e9
    )
