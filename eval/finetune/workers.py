"""Fine-tuning runs, one after the other or in several processes.

A small model leaves most of a many-core CPU, and of a GPU, idle, so several (task, seed) runs work in parallel. On a
CPU each has a fixed number of threads: sums are then computed in the same order, and the numbers do not depend on the
number of processes.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from multiprocessing.sharedctypes import Synchronized

import torch

from cramming.config import UserError
from cramming.device import available_bytes, is_out_of_memory, keep_freed_memory
from cramming.precision import float32_products
from cramming.process_pool import CONTEXT, process_pool, usable_cores
from eval.finetune.loop import Predictions, TaskRun, finetune

POLL_SECONDS = 0.5
# Number of kernels that oneDNN caches; it reads this variable when it makes the first kernel, long after its import.
# Batches of another length need other kernels, so most of the usual 1024 are used once and take 0.55 GB (docs/log.md,
# 2026-11-24).
KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# Python, torch, its kernels and a task's arrays: a process with 7M parameters used 1.31e9 of 1.37e9 predicted bytes.
PROCESS_BYTES = 1.2e9
WEIGHT_COPIES = 6  # weights as read and in training, gradients, two moments, activations
# On the GPU: CUDA's context and kernels, a task's arrays, and the activations of `EVALUATION_TOKENS`, which are the
# largest part. Estimated for BERT-base, not measured.
GPU_PROCESS_BYTES = 3e9
FREE_SHARE = 0.7  # share of the free memory to use
DIED = "a fine-tuning process died (out of memory?); finished runs are kept; run again with a smaller eval.workers"
ALONE = (
    "fine-tuning ran out of memory; finished runs are kept; run again where more is free, or under another name with a"
    " smaller eval.hyperparameters.batch_size"
)

OnExamples = Callable[[int], None]


def choose_workers(
    wanted: int | None, threads: int, runs: int, seeds: int, device: torch.device, weight_bytes: int
) -> int:
    """Return the number of processes to use: as wanted, or as many as cores and memory allow.

    On a GPU it is at most the number of seeds.
    """
    if wanted is None:
        copies = WEIGHT_COPIES * weight_bytes
        fitting = int(FREE_SHARE * available_bytes() / (PROCESS_BYTES + copies))
        wanted = min(usable_cores() // threads, fitting)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            wanted = min(wanted, seeds, int(FREE_SHARE * free / (GPU_PROCESS_BYTES + copies)))
    return max(1, min(wanted, runs))


def run_all(
    runs: Iterable[TaskRun], workers: int, on_examples: OnExamples
) -> Iterator[tuple[TaskRun, Predictions]]:
    """Yield each run with its result, as they finish; `runs` is read lazily.

    With one worker all happens in this process.
    """
    threads = torch.get_num_threads()
    try:
        if workers == 1:
            yield from ((run, _run(run, on_examples)) for run in runs)
        else:
            yield from _run_in_pool(runs, workers, on_examples)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(ALONE if workers == 1 else DIED) from None
    finally:
        torch.set_num_threads(threads)


def _run(run: TaskRun, on_examples: OnExamples) -> Predictions:
    torch.set_num_threads(run.threads)
    if run.device == "cpu":
        keep_freed_memory()
        os.environ.setdefault(*KERNEL_CACHE)
    # cuDNN's attention plans for about a second per shape, and each batch has another shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with float32_products(tf32=run.precision != "fp32"):
        return finetune(run, on_examples)


def _run_in_pool(
    runs: Iterable[TaskRun], workers: int, on_examples: OnExamples
) -> Iterator[tuple[TaskRun, Predictions]]:
    counter = CONTEXT.Value("q", 0)
    queue, waiting, counted = iter(runs), dict[Future[Predictions], TaskRun](), 0
    with process_pool(workers, DIED, _begin_worker, inherited=(counter,)) as submit:
        while True:
            # one more than there are workers, so that no worker waits for its next run
            for run in islice(queue, workers + 1 - len(waiting)):
                waiting[submit(_run_in_worker, run)] = run
            if not waiting:
                return
            done, _ = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            on_examples(counter.value - counted)
            counted = counter.value
            # results first, so that none is lost to an error
            for future in sorted(done, key=lambda each: each.exception() is not None):
                yield waiting.pop(future), future.result()


_counter: "Synchronized[int]"


def _begin_worker(counter: "Synchronized[int]") -> None:
    global _counter
    _counter = counter


def _run_in_worker(run: TaskRun) -> Predictions:
    return _run(run, _count)


def _count(examples: int) -> None:
    with _counter.get_lock():
        _counter.value += examples
