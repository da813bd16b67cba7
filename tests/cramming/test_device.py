"""A device's peak rate is that of its own row of the table, or none: never a sibling's; an untried GPU is refused."""

import pytest
import torch

from cramming.config import UserError
from cramming.device import PEAK_TFLOPS, is_out_of_memory, peak_tflops, select


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX A4000", "RTX A4000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 141GB HBM3e", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
    ],
)
def test_the_names_that_drivers_give_are_known(name: str, row: str) -> None:
    assert peak_tflops(name) == PEAK_TFLOPS[row]


@pytest.mark.parametrize("row", PEAK_TFLOPS)
@pytest.mark.parametrize("other", ["Ti Laptop GPU", "D", "SUPER", "Max-Q", "Ada Generation", "MIG 1g.5gb", "GRID"])
def test_an_unknown_sibling_has_no_peak(row: str, other: str) -> None:
    assert peak_tflops(f"NVIDIA {row}") == PEAK_TFLOPS[row]
    assert peak_tflops(f"NVIDIA {row} {other}") is None


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA A10", "Quadro RTX 6000", "NVIDIA", ""])
def test_a_device_that_is_not_in_the_table_has_none(name: str) -> None:
    assert peak_tflops(name) is None


def test_only_geforce_cards_are_halved() -> None:
    """The Titan has the 2080 Ti's chip with a few more units."""
    assert 2.2 < PEAK_TFLOPS["TITAN RTX"] / PEAK_TFLOPS["RTX 2080 Ti"] < 2.6


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
