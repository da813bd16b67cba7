"""How this process executes the step: compiled or not, where its compiled code is kept, what becomes of freed memory.

None of it changes a number of the training beyond the rounding of compiled kernels. It is called before the first large
allocation and the first compilation, by the entry that trains.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cramming import CACHE_VARIABLES, GIVEN_CACHES
from cramming.files import remove

COMPILE_CACHE = "compile_cache"  # in the run's folder
MAX_VARIANTS = 32  # of one compiled function: 8 for each of a few shapes
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h


@dataclass(frozen=True)
class RuntimeConfig:
    """The `runtime` section.

    `compile: blocks` compiles one block and reuses it for all, `model` the whole forward and backward pass. `tune`
    (GPU) lets the compiler try more kernels before it takes one: `coordinate-descent` other tiles of its own,
    `max-autotune` also its own matrix products beside the libraries'; trying is on the clock. `cuda_graphs` (GPU,
    `compile: model`) replays a pass's launches as one: for small micro-batches, whose kernels are done before the host
    starts the next.
    `keep_heap` (CPU, glibc) keeps freed memory in the process instead of handing it back after every step.
    `prefetch` is the number of batches made ahead.
    """

    compile: Literal["off", "blocks", "model"]
    keep_heap: bool
    prefetch: int
    tune: Literal["off", "coordinate-descent", "max-autotune"] = "off"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if self.tune != "off" and self.compile == "off":
            raise ValueError(f"tune={self.tune} does nothing with compile=off; set runtime.compile=model, or it to off")
        if self.cuda_graphs and self.compile != "model":
            raise ValueError(f"cuda_graphs=true goes with compile=model, not {self.compile}; set runtime.compile=model")
        if self.prefetch < 1:
            raise ValueError(f"prefetch={self.prefetch} is below 1")


TUNING: dict[str, dict[str, Any]] = {  # as torch.compile's modes have it (`torch._inductor.list_mode_options`)
    "off": {},
    "coordinate-descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}


def compile_arguments(config: RuntimeConfig) -> dict[str, Any]:
    """What `nn.Module.compile` is called with."""
    options = {**TUNING[config.tune], **({"triton.cudagraphs": True} if config.cuda_graphs else {})}
    return {"options": options} if options else {}


def prepare(config: RuntimeConfig, device: torch.device, run_folder: Path) -> None:
    """Settings of the process that must be made before the first step.

    Compiled code is kept in the run's own folder, so that a resume does not compile again, and no run has from another
    what should be on its clock. Whatever `compile` says: FlexAttention and torchao's optimizers compile in any case.
    """
    own = (run_folder / COMPILE_CACHE).absolute()
    for variable, place in zip(CACHE_VARIABLES, (own, own / "triton")):
        os.environ[variable] = GIVEN_CACHES.get(variable, str(place))
    prepare_heap(config, device)


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


def prepare_heap(config: RuntimeConfig, device: torch.device) -> None:
    """`keep_heap`, where the device is a CPU."""
    if config.keep_heap and device.type == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> bool:
    """Let malloc never return memory to the system; False where the C library has no such option.

    A step on a CPU frees and takes again hundreds of MB of activations. By default glibc unmaps each large block and
    the kernel then clears every page of the next one: at hidden size 256 and 4,096 tokens that was 70,000 page faults
    and about a tenth of the step. One arena for all threads keeps the peak near what is in use at once.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS, Windows
        return False
    return all(mallopt(*option) == 1 for option in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)))


def forbid_fallback() -> None:
    """Let the compiler make as many variants of a function as a run needs, and fail instead of running it as written.

    All blocks are one function to it: with local and global layers the first, the last, training and validation are 8
    variants, which is its own limit. Beyond that it would go on uncompiled without a word.
    """
    import torch._dynamo.config as dynamo

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
    """For how long this process has compiled so far; without what kernels try in their first launch (`tune`)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    times = dynamo.cumulative_time_spent_ns if dynamo else {}
    return sum(times.get(name, 0.0) for name in ("entire_frame_compile", "entire_backward_compile")) / 1e9
