"""How many fine-tuning processes there are."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cramming.config import UserError
from cramming.process_pool import Submit
from eval.finetune import workers


@pytest.mark.parametrize(
    ("free", "seeds", "cores", "weight_bytes", "count"),
    [
        (140e9, 5, 16, 440e6, 5),  # one for each seed
        (140e9, 50, 4, 440e6, 4),
        (24e9, 5, 16, 440e6, 2),  # BERT-base on a card of 24 GB, and of 11
        (11e9, 5, 16, 440e6, 1),
        (0, 5, 16, 0, 1),
    ],
)
def test_memory_decides_how_many_work_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
    free: float,
    seeds: int,
    cores: int,
    weight_bytes: int,
    count: int,
) -> None:
    """The memory is what this process can get, within a limit of its container; at least one works."""
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    monkeypatch.setattr(workers, "available_bytes", lambda: 1e12)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 150e9))
    gpu = torch.device("cuda")
    assert workers.choose_workers(None, 1, 100, seeds, gpu, weight_bytes) == count
    assert workers.choose_workers(3, 1, 100, seeds, gpu, weight_bytes) == 3
    for memory, expected in ((1e12, cores), (3 * workers.PROCESS_BYTES, 2), (0, 1)):
        monkeypatch.setattr(workers, "available_bytes", lambda memory=memory: memory)
        assert workers.choose_workers(None, 1, 100, seeds, torch.device("cpu"), 0) == expected


@pytest.mark.parametrize(("preset", "expected"), [(None, "64"), ("7", "7")])
def test_fine_tuning_on_a_cpu_keeps_few_of_onednns_kernels_unless_told(
    monkeypatch: pytest.MonkeyPatch, preset: str | None, expected: str
) -> None:
    name, values = workers.KERNEL_CACHE[0], list[str]()
    monkeypatch.setenv(name, preset or "")
    if preset is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(
        workers, "finetune", lambda run, on_examples: values.append(os.environ[name])
    )
    run = SimpleNamespace(threads=1, device="cpu", precision="fp32")
    list(workers.run_all([cast(workers.TaskRun, run)], 1, lambda examples: None))
    assert values == [expected]


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
]


def run_one(count: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pool(*_: Any, **__: Any) -> Iterator[Submit]:
        future = Future[Any]()
        future.set_exception(error)
        yield lambda *_: future

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(workers, "process_pool", pool)
    monkeypatch.setattr(workers, "_run", broken)
    list(workers.run_all([cast(workers.TaskRun, None)], count, lambda examples: None))


@pytest.mark.parametrize("error", NO_MEMORY)
def test_a_full_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(UserError, match=r"out of memory\?.* smaller eval\.workers"):
        run_one(2, error, monkeypatch)
    with pytest.raises(
        UserError, match=r"ran out of memory; .* smaller eval\.hyperparameters\.batch_size"
    ):
        run_one(1, error, monkeypatch)


def test_what_is_done_when_another_fails_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pool(*_: Any, **__: Any) -> Iterator[Submit]:
        def submit(_: Any, run: int) -> Future[Any]:
            future = Future[Any]()
            future.set_exception(UserError("died")) if run % 2 else future.set_result(run)
            return future

        yield submit

    monkeypatch.setattr(workers, "process_pool", pool)
    results = []
    with pytest.raises(UserError, match="died"):
        for _, result in workers.run_all(cast(Any, range(20)), 19, lambda examples: None):
            results.append(result)
    assert len(results) == 10


@pytest.mark.parametrize("count", [1, 2])
def test_another_error_of_a_worker_is_our_own_defect(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run_one(count, RuntimeError("shapes do not match"), monkeypatch)
