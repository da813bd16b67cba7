"""`train.micro_batch=auto`: the largest micro-batch that fits, of at most 131,072 tokens.

On a GPU it is found by trying: forward and backward passes of two real micro-batches with the trained model itself and
no update; running out of memory is survived. What runs compiled is then tried compiled, from the largest size that fits
eagerly on, where the budget is long enough. On a CPU running out of memory ends the process, so there the predicted
peak is compared with the memory that is free. The result changes speed only.
"""

import copy
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.engine import Engine
from cramming.parallel.mesh import Mesh
from cramming.plan.memory import Simulation, heap_factor, largest_fitting, micro_batch_sizes
from cramming.progress import format_count, say
from cramming.recipe import Config, Hardware
from cramming.runlog import Log, MicroBatch, Training

CPU_SHARE = 0.9  # of the free memory: other processes and the page cache want some
# Of a GPU's memory. A try is two micro-batches without an update; a day of training cuts freed memory into pieces,
# updates and validates. A guess, not measured: half as much again as `cramming plan` allows for that.
GPU_MARGIN = 0.06
# Larger micro-batches are no faster: by the dry run (BERT-base, H200) a token of 65,536 costs 9 % less than one of
# 8,192, and one of 262,144 less than 1 % less than that.
MOST_TOKENS = 131_072
LEAST_HOURS_TO_COMPILE = 1.0  # each compiled try takes about a minute
MakeBatch = Callable[[int, int], Batch]  # (first sample, rows) -> a real batch


def micro_batch_of_run(
    training: Training,
    log: Log | None,
    engine: Engine,
    make_batch: MakeBatch,
    config: Config,
    sequences: int,
) -> int:
    """Return what `auto` stands for in this run: the number in its log (a resume), else found now and logged.

    It divides `sequences`: of one step in this process, or by which its steps grow. These may be fewer than when it was
    found, on fewer processes: then it is the largest number that divides both.
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
    """The largest size that divides `sequences` and fits on the engine's device, and a sentence for the record.

    With several processes the smallest result of all counts.
    """
    most = max(1, MOST_TOKENS // config.train.sequence_length)
    sizes = [size for size in micro_batch_sizes(sequences) if size <= most]
    on_gpu = engine.device.type == "cuda"
    largest, how = (
        by_trying(engine, make_batch, config, sizes)
        if on_gpu
        else by_prediction(engine, config, sizes, sequences)
    )
    rows = int(-engine.mesh.max(-float(largest or 0))[0])
    if rows == 0:
        raise UserError(
            f"train.micro_batch=auto: not even one sequence of {config.train.sequence_length} fits in the memory of"
            f" {engine.device}; use memory.checkpoint_every=1 or a smaller model (see `cramming plan`)"
        )
    return rows, f"auto, {how}"


def by_prediction(
    engine: Engine, config: Config, sizes: list[int], sequences: int
) -> tuple[int | None, str]:
    """On a CPU: simulated peaks of steps of `sequences` against the memory that is free now, beside the weights."""
    simulation = Simulation(config, Hardware.here(config, engine.device))
    there = simulation.tracker.live["weights"]
    free = (CPU_SHARE * devices.available_bytes() + there) / heap_factor(config, engine.device.type)
    peaks: dict[int, int] = {}

    def fits(rows: int) -> bool:
        peaks[rows] = simulation.step(rows, sequences // rows).peak_bytes
        return peaks[rows] <= free

    rows = largest_fitting(sizes, fits)
    results = ", ".join(f"{size} needs {format_count(peaks[size], 'B')}" for size in sorted(peaks))
    return rows, f"predicted for {engine.device} with {format_count(free, 'B')} to use: {results}"


def by_trying(
    engine: Engine, make_batch: MakeBatch, config: Config, sizes: list[int]
) -> tuple[int | None, str]:
    """On a GPU: real passes, bisecting, while room is held for the optimizer's state and a margin."""
    place, device = Hardware.here(config, engine.device), engine.device
    missing = 0 if engine.optimizer.state else Simulation(config, place).tracker.live["optimizer"]
    share = torch.cuda.get_per_process_memory_fraction(device)
    margin = int(GPU_MARGIN * share * devices.describe(device).memory_bytes)
    tried = dict[int, bool]()

    def fits(rows: int, compiled: bool = False) -> bool:
        tried[rows] = a_step_fits(engine, make_batch, rows, missing + margin, compiled)
        return tried[rows]

    rows = largest_fitting(sizes, fits)
    has_time = config.budget.unit != "hours" or config.budget.limit > LEAST_HOURS_TO_COMPILE
    if config.runtime.compile != "off" and (has_time or rows is None):
        # Each try compiles anew: from what fits eagerly on, one by one.
        for larger in sizes[sizes.index(rows) + 1 if rows else 0 :]:
            if not fits(larger, compiled=True):
                break
            rows = larger
    torch.cuda.reset_peak_memory_stats(device)  # the record's peak is the training's
    results = ", ".join(
        f"{size} {'fits' if ok else 'does not fit'}" for size, ok in sorted(tried.items())
    )
    return rows, f"tried on {device} with {format_count(margin, 'B')} held back: {results}"


def a_step_fits(
    engine: Engine, make_batch: MakeBatch, rows: int, missing: int, compiled: bool = False
) -> bool:
    """Try it, compiled or eagerly, while `missing` bytes are held for what is still to come."""
    held = None
    try:
        held = torch.empty(missing, dtype=torch.uint8, device=engine.device)
        try_step(engine, [make_batch(0, rows), make_batch(rows, rows)], compiled)
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        return False
    finally:
        del held
        release(engine)
    return True


def try_step(engine: Engine, batches: list[Batch], compiled: bool = False) -> None:
    """Forward and backward passes of `batches` without an update, by this rank alone; the engine stays as it is.

    What is compiled runs eagerly here unless `compiled`: that needs no less memory, and no time to compile each size.
    """
    alone = copy.copy(engine)
    alone.mesh, alone.spread = Mesh.solo(engine.device), None
    devices_used = [engine.device] if engine.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices_used))
        if not compiled:
            stack.enter_context(uncompiled(engine.model))
        alone.discard(alone.forward_backward(batches))
        devices.synchronize(engine.device)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Within it what `parallel.apply` compiled runs as it is written; FlexAttention, which compiles itself, does so."""
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
    """Give back what a try, finished or not, has left."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code for a size that was tried (FlexAttention's): few may be kept, then it stays eager
    engine.optimizer.zero_grad(set_to_none=True)
    gc.collect()  # an exception's frames hold tensors in circles
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
