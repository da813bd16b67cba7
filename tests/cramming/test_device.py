"""An untried GPU is refused; every library that ran out of memory is understood."""

import pytest
import torch

from cramming.config import UserError
from cramming.device import is_out_of_memory, select


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_an_amd_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, requested: str) -> None:
    """torch built for ROCm calls its devices cuda."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=f"device={requested}: .*ROCm.*set device=cpu"):
        select(requested)
    assert select("cpu").type == "cpu"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_every_library_that_ran_out_of_memory_is_understood(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        UserError("cpu ran out of memory in training: CUDA error: out of memory"),  # has been explained already
        OSError("out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
