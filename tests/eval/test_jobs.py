"""How many fine-tuning processes there are."""

import pytest
import torch

from eval import jobs

CPU = torch.device("cpu")


def test_memory_decides_how_many_work_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process can get, a container's limit included; never none."""
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    for free, workers in ((1e12, 8), (3 * jobs.PROCESS_BYTES, 2), (0, 1)):
        monkeypatch.setattr(jobs, "available_bytes", lambda free=free: free)
        assert jobs.choose_workers(None, 1, 100, CPU, 0) == workers
    assert jobs.choose_workers(5, 1, 3, CPU, 0) == 3
