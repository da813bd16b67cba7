"""Runs fine-tuning jobs, one after the other or in several processes.

A small model leaves most of a many-core CPU idle, and most of a GPU, so several (task, seed) runs work side by side. On
a CPU each has a fixed number of threads: sums are then formed in the same order however many processes there are, and
the numbers do not depend on it.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing.sharedctypes import Synchronized

import torch

from cramming.config import UserError
from cramming.data.task_files import TASKS
from cramming.device import available_bytes, is_out_of_memory
from cramming.precision import Mode, float32_products
from cramming.process_pool import CONTEXT, process_pool
from cramming.runtime import keep_freed_memory
from eval.finetune.encode import EncodedTask
from eval.finetune.loop import Hyperparameters, Predictions, Selection, finetune
from eval.finetune.models import Init, ModelSource

POLL_SECONDS = 0.5
PROCESS_BYTES = 1.2e9  # Python, torch and a task's arrays
WEIGHT_COPIES = 6  # weights as read and in training, gradients, two moments, activations
# On the GPU: CUDA's context and kernels, a task's arrays, and the activations of a group of `EVALUATION_TOKENS`, which
# are the most. By reckoning for BERT-base, not measured.
GPU_PROCESS_BYTES = 3e9
FREE_SHARE = 0.7  # of what is free now, what may be planned with
DIED = "a fine-tuning process died (out of memory?); finished runs are kept; run again with a smaller eval.workers"
ALONE = (
    "fine-tuning ran out of memory; finished runs are kept; run again where more is free, or under another name with a"
    " smaller eval.hyperparameters.batch_size"
)

OnExamples = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """One fine-tuning run, complete: it can be sent to another process."""

    task: str
    seed: int
    init: Init
    data: EncodedTask
    source: ModelSource
    hyper: Hyperparameters
    precision: Mode
    device: str
    threads: int
    selection: Selection


def choose_workers(
    wanted: int | None, threads: int, jobs: int, seeds: int, device: torch.device, weight_bytes: int
) -> int:
    """Processes to use: as wanted, else as many as cores and memory allow, and on a GPU at most one for each seed."""
    if wanted is None:
        copies = WEIGHT_COPIES * weight_bytes
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(cores // threads, int(FREE_SHARE * available_bytes() / (PROCESS_BYTES + copies)))
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            wanted = min(wanted, seeds, int(FREE_SHARE * free / (GPU_PROCESS_BYTES + copies)))
    return max(1, min(wanted, jobs))


def run_jobs(jobs: Iterable[Job], workers: int, on_examples: OnExamples) -> Iterator[tuple[Job, Predictions]]:
    """Each job with its result, as they finish; `jobs` is read lazily. With one worker all happens in this process."""
    return _run_here(jobs, on_examples) if workers == 1 else _run_in_pool(jobs, workers, on_examples)


def _run_here(jobs: Iterable[Job], on_examples: OnExamples) -> Iterator[tuple[Job, Predictions]]:
    before = torch.get_num_threads()
    try:
        for job in jobs:
            yield job, _run(job, on_examples)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(ALONE) from None
    finally:
        torch.set_num_threads(before)


def _run(job: Job, on_examples: OnExamples) -> Predictions:
    torch.set_num_threads(job.threads)
    if job.device == "cpu":
        keep_freed_memory()
    task, device = TASKS[job.task], torch.device(job.device)
    with float32_products(tf32=job.precision != "fp32"):
        return finetune(
            task, job.data, job.source, job.init, job.seed, job.hyper, job.precision, device, on_examples, job.selection
        )


def _run_in_pool(jobs: Iterable[Job], workers: int, on_examples: OnExamples) -> Iterator[tuple[Job, Predictions]]:
    counter = CONTEXT.Value("q", 0)
    queue, waiting, counted = iter(jobs), dict[Future[Predictions], Job](), 0
    try:
        with process_pool(workers, DIED, _begin_worker, inherited=(counter,)) as submit:
            while True:
                for job in islice(queue, workers + 1 - len(waiting)):  # one more than workers: nobody waits for it
                    waiting[submit(_run_in_worker, job)] = job
                if not waiting:
                    return
                done, _ = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                on_examples(counter.value - counted)
                counted = counter.value
                for future in done:
                    yield waiting.pop(future), future.result()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(DIED) from None


_counter: "Synchronized[int]"


def _begin_worker(counter: "Synchronized[int]") -> None:
    global _counter
    _counter = counter


def _run_in_worker(job: Job) -> Predictions:
    return _run(job, _count)


def _count(examples: int) -> None:
    with _counter.get_lock():
        _counter.value += examples
