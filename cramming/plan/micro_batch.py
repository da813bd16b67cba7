"""`train.micro_batch=auto`: the largest micro-batch that fits, of at most 131,072 tokens.

On a GPU it is found by trying: forward and backward passes of two real micro-batches with the trained model itself,
uncompiled and without an update. On a CPU running out of memory ends the process, so the simulated peak is compared
with the free memory. The result changes the speed only.
"""

import copy
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.engine import Engine
from cramming.parallel.mesh import Mesh
from cramming.plan.memory import (
    CPU_SHARE,
    FIRST_TOKENS,
    Simulation,
    largest_fitting,
    micro_batch_sizes,
)
from cramming.progress import say
from cramming.recipe import Config, Hardware
from cramming.runlog import Log, MicroBatch, Training

# Of a GPU's memory. A try is two micro-batches without an update; a day of training cuts freed memory into pieces,
# updates and validates. A guess, not measured.
GPU_MARGIN = 0.06
MakeBatch = Callable[[int, int], Batch]  # (first sample, rows) -> a real batch


def micro_batch_of_run(
    training: Training,
    log: Log | None,
    engine: Engine,
    make_batch: MakeBatch,
    config: Config,
    sequences: int,
) -> int:
    """Return the micro-batch of this run: the one in its log (a resume), else the one found now, which is logged.

    It divides `sequences`: those of one step in this process, or those by which its steps grow. A resume on more
    processes has fewer of them, and takes the largest number that divides both.
    """
    known = training.micro_batch.sequences if training.micro_batch else 0
    rows = int(engine.mesh.from_main(float(known)))
    if rows == 0:
        rows, how = find_micro_batch(engine, make_batch, config, sequences)
        if log:
            log.append(MicroBatch(sequences=rows, how=how))
            say(f"train.micro_batch: {rows} sequences ({how})")
    return math.gcd(rows, sequences)


def find_micro_batch(
    engine: Engine, make_batch: MakeBatch, config: Config, sequences: int
) -> tuple[int, str]:
    """Return the largest size that divides `sequences` and fits on every process's device, and how it was found."""
    length = config.train.sequence_length
    is_gpu = engine.device.type == "cuda"
    fits = _trial(engine, make_batch, config) if is_gpu else _prediction(engine, config, sequences)
    results: dict[int, str] = {}

    def noted(rows: int) -> bool:
        is_fitting = fits(rows)
        results[rows] = "fits" if is_fitting else "does not fit"
        return is_fitting

    sizes = micro_batch_sizes(sequences, length)
    largest = largest_fitting(sizes, noted, FIRST_TOKENS // length)
    rows = int(-engine.mesh.max(-float(largest or 0))[0])  # the smallest of all processes
    if rows == 0:
        raise UserError(
            f"train.micro_batch=auto: not even one sequence of {length} fits in the memory of {engine.device}. Use"
            " memory.checkpoint_every=1 or a smaller model (see `cramming plan`)."
        )
    tried = ", ".join(f"{size} {results[size]}" for size in sorted(results))
    return rows, f"auto, {'tried' if is_gpu else 'predicted'} on {engine.device}: {tried}"


def a_step_fits(engine: Engine, make_batch: MakeBatch, rows: int, reserved_bytes: int) -> bool:
    """Return whether two micro-batches of `rows` fit while `reserved_bytes` are held for other uses."""
    reserve = None
    try:
        reserve = torch.empty(reserved_bytes, dtype=torch.uint8, device=engine.device)
        try_step(engine, [make_batch(0, rows), make_batch(rows, rows)])
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        return False
    finally:
        del reserve
        release(engine)
    return True


def try_step(engine: Engine, batches: list[Batch]) -> None:
    """Run forward and backward passes without an update, uncompiled and in this process alone.

    Uncompiled passes need no less memory, and no time to compile each size. The engine stays unchanged.
    """
    alone = copy.copy(engine)
    alone.mesh, alone.strategy = Mesh.solo(engine.device), None
    gpus = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), uncompiled(engine.model):
        alone.discard(alone.forward_backward(batches))
        devices.synchronize(engine.device)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run modules that `parallel.apply` compiled as they are written; FlexAttention still compiles itself."""
    calls = {
        module: module._compiled_call_impl
        for module in model.modules()
        if module._compiled_call_impl is not None
    }
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call


def release(engine: Engine) -> None:
    """Free the memory that a try, finished or not, has left."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # FlexAttention's code for the tried size: only so many may be kept
    engine.optimizer.zero_grad(set_to_none=True)
    gc.collect()  # an exception's frames hold tensors in circles
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(engine.device)  # the record's peak is that of training


def _prediction(engine: Engine, config: Config, sequences: int) -> Callable[[int], bool]:
    """Return whether a simulated peak fits into the memory that is free now, beside the weights that exist."""
    simulation = Simulation(config, Hardware.here(config, engine.device))
    usable_bytes = CPU_SHARE * (devices.available_bytes() + simulation.state()["weights"])

    def fits(rows: int) -> bool:
        peak = simulation.peak(rows, accumulates=sequences > rows)
        return sum(peak.values()) <= usable_bytes

    return fits


def _trial(engine: Engine, make_batch: MakeBatch, config: Config) -> Callable[[int], bool]:
    """Return whether real passes fit, with memory reserved for the optimizer's state and a margin."""
    device = engine.device
    share = torch.cuda.get_per_process_memory_fraction(device)
    reserved_bytes = int(GPU_MARGIN * share * devices.describe(device).memory_bytes)
    if not engine.optimizer.state:
        reserved_bytes += Simulation(config, Hardware.here(config, device)).state()["optimizer"]
    return lambda rows: a_step_fits(engine, make_batch, rows, reserved_bytes)
