"""A card that is not there: torch's CUDA build believes in an H200, an A100 or a 2080 Ti, and nothing is ever launched.

Three things make it. A small library (cuda_stub.c, compiled on the fly, preloaded by starting the process anew) answers
for the CUDA runtime, so that autograd's device threads, streams, events and the choice of attention kernels work.
`FakeTensorMode` keeps tensors without data on `cuda`. And `pretend` replaces what asks the driver itself: torch's
questions about the device, inductor's and Triton's.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PRELOADED = "CRAMMING_CUDA_STUB"


@dataclass(frozen=True)
class Card:
    """Properties of a device that inductor asks for; memory in GiB, sizes in KiB.

    `sheet` is its name in cramming/plan/cards.csv.
    """

    sheet: str
    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    shared_per_processor: int
    shared_per_block: int
    l2_mib: int
    threads_per_processor: int = 2048

    @property
    def architecture(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


CARDS = {
    "sm_75": Card("RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 11, 64, 64, 5, 1024),
    "sm_80": Card("A100", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 164, 163, 40),
    "sm_90": Card("H200", "NVIDIA H200", (9, 0), 132, 141, 228, 227, 50),
}


def missing() -> str | None:
    """Why nothing can be tried here; None if it can."""
    torch, triton = find_spec("torch"), find_spec("triton")
    if torch is None or not (_packages() / "torch/lib/libtorch_cuda.so").exists():
        return "this torch has no CUDA; make an environment with the CUDA build: pip install 'torch==2.11.0' (4.7 GB)"
    return None if triton else "triton is missing; pip install triton"


def _packages() -> Path:
    spec = find_spec("torch")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


def start_anew_with_stub(card: Card) -> None:
    """Replace this process by itself with the library preloaded; returns in the one that has it."""
    if os.environ.get(PRELOADED) == card.architecture:
        return
    library = Path(tempfile.gettempdir()) / f"cramming_cuda_stub_{os.getuid()}" / "libcuda.so.1"
    library.parent.mkdir(exist_ok=True)
    fresh = library.with_name(
        f"{os.getpid()}.so"
    )  # put in place whole: another process may have the old one loaded
    packages = _packages()
    # The runtime's own headers first: those in Triton are an older version's, with another struct of properties.
    folders = [
        *sorted(packages.glob("nvidia/cu*/include")),
        packages / "triton/backends/nvidia/include",
    ]
    source = Path(__file__).with_name("cuda_stub.c")
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        *(f"-I{folder}" for folder in folders),
    ]
    try:
        subprocess.run([*command, "-o", fresh, source], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit("gcc is missing; it compiles benchmarks/gpu/cuda_stub.c") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"cuda_stub.c does not compile: {error.stderr.splitlines()[0]}") from None
    fresh.replace(library)
    os.environ |= {
        "LD_PRELOAD": str(library),
        "CARD_MAJOR": str(card.capability[0]),
        PRELOADED: card.architecture,
    }
    os.execv(sys.executable, [sys.executable, *sys.argv])


def pretend(card: Card) -> None:
    """Let this process believe in `card`."""
    from types import SimpleNamespace

    import torch
    import torch._subclasses.fake_tensor as fake_tensor

    def always(value: Any) -> Any:
        return lambda *_, **__: value

    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        gcnArchName="",
        warp_size=32,
        multi_processor_count=card.processors,
        total_memory=card.memory * 2**30,
        L2_cache_size=card.l2_mib * 2**20,
        max_threads_per_multi_processor=card.threads_per_processor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=card.shared_per_block * 2**10,
        shared_memory_per_multiprocessor=card.shared_per_processor * 2**10,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    fake_tensor.init_gpu_context = always(None)
    fake_tensor.FakeTensorMode.avoid_device_init = True  # type: ignore[assignment,method-assign]  # torch.tensor(device=)
    _make_patterns_without_device(torch)
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = always(True), always(1), always(0)
    cuda._lazy_init = cuda.synchronize = always(None)
    cuda.get_device_properties = cuda._get_device_properties = always(properties)
    cuda.get_device_capability, cuda.get_device_name = always(card.capability), always(card.name)
    cuda.get_rng_state, cuda.set_rng_state = (
        always(torch.zeros(16, dtype=torch.uint8)),
        always(None),
    )
    cuda.get_per_process_memory_fraction = always(1.0)
    cuda._exchange_device = cuda._maybe_exchange_device = cuda.set_device = always(0)


def _make_patterns_without_device(torch: Any) -> None:
    """Inductor makes its attention patterns with real tensors, on the GPU where there is one: so before there is."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init(torch.device("cpu"))
    torch.cuda.is_available = available
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_: None
