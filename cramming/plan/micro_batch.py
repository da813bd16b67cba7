"""`train.micro_batch=auto`: the largest micro-batch that fits.

On a GPU it is found by trying: forward and backward passes of two real micro-batches with the trained model itself, the
update refused, so weights, optimizer and random states stay as they were; running out of memory is survived. What runs
compiled is tried compiled too, from the largest size that fits as written on: compiled code needs less. Space
for the optimizer's state, which the first update makes, is held meanwhile, and a margin for what a try does not show.
Where that was not enough, the training ends with a record of the next smaller size, and a resume goes on with it. On a
CPU running out of memory ends the process, so there the predicted peak is compared with the memory that is free.

The result changes speed only: a step's loss is the mean over all its targets, however they are cut, and how many these
are does not depend on it. Where the batch grows, that is because the micro-batch divides what it grows by
(`schedule.ramp_step`).
"""

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from cramming import device as devices
from cramming.config import UserError
from cramming.data.batches import Batch
from cramming.engine import Engine
from cramming.parallel.mesh import Mesh
from cramming.plan.memory import Recipe, Simulation, largest_below, largest_fitting, micro_batch_sizes
from cramming.progress import format_count, say
from cramming.record import load_record, write_record_section

CPU_SHARE = 0.9  # of the free memory: other processes and the page cache want some
# Of a GPU's memory. A try is two micro-batches without an update; a day of training cuts freed memory into pieces,
# updates and validates. A guess, not measured: half as much again as `cramming plan` allows for that.
GPU_MARGIN = 0.06


class Found(NamedTuple):
    """The chosen number of sequences, and a sentence for the record."""

    rows: int
    how: str


def micro_batch_of_run(
    folder: Path, engine: Engine, make_batch: Callable[[int, int], Batch], recipe: Recipe, sequences: int
) -> int:
    """The number that `auto` stands for in this run: what its record says (a resume), else found now and recorded.

    It divides `sequences`: of one step in this process, or by which its steps grow.
    """
    mesh = engine.mesh
    recorded = load_record(folder).get("pretrain", {}).get("micro_batch", 0) if mesh.is_main else 0
    rows = int(mesh.from_main(float(recorded or 0)))
    if rows == 0:
        rows, how = find_micro_batch(engine, make_batch, recipe, sequences)
        if mesh.is_main:
            write_record_section(folder, pretrain={"micro_batch": rows, "micro_batch_found": how})
            say(f"train.micro_batch: {rows} sequences ({how})")
    return rows


def find_micro_batch(engine: Engine, make_batch: Callable[[int, int], Batch], recipe: Recipe, sequences: int) -> Found:
    """The largest size that divides `sequences` and fits on the engine's device.

    `make_batch(first_sample, rows)` gives real batches. With several processes the smallest result of all counts.
    """
    sizes = micro_batch_sizes(sequences)
    find = by_trying if engine.device.type == "cuda" else by_prediction
    largest, how = find(engine, make_batch, recipe, sizes)
    rows = int(engine.mesh.min(float(largest or 0)))
    if rows == 0:
        raise UserError(
            f"train.micro_batch=auto: not even one sequence of {recipe.config.train.sequence_length} fits in the memory"
            f" of {engine.device}; use memory=checkpoint or a smaller model (`cramming plan` shows what each needs)"
        )
    return Found(rows, f"auto, {how}")


Finding = tuple[int | None, str]


def by_trying(engine: Engine, make_batch: Callable[[int, int], Batch], recipe: Recipe, sizes: list[int]) -> Finding:
    """On a GPU: real passes, bisecting."""
    missing = 0 if engine.optimizer.state else Simulation(recipe).tracker.live["optimizer"]
    margin = margin_bytes(engine.device)
    tried = dict[int, bool]()

    def noted(rows: int, compiled: bool = False) -> bool:
        tried[rows] = tries(engine, make_batch, missing + margin, compiled)(rows)
        return tried[rows]

    rows = largest_fitting(sizes, noted)
    if recipe.config.runtime.compile != "off":  # each try compiles anew: from what fits eagerly on, one by one
        for larger in sizes[sizes.index(rows) + 1 if rows else 0 :]:
            if not noted(larger, compiled=True):
                break
            rows = larger
    torch.cuda.reset_peak_memory_stats(engine.device)  # the record's peak is the training's
    results = (f"{size} {'fits' if ok else 'does not fit'}" for size, ok in sorted(tried.items()))
    return rows, f"tried on {engine.device} with {format_count(margin, 'B')} held back: {', '.join(results)}"


def margin_bytes(device: torch.device) -> int:
    """What a try leaves free of the memory that this process may have on a GPU."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(GPU_MARGIN * share * devices.describe(device).memory_bytes)


def by_prediction(engine: Engine, make_batch: Callable[[int, int], Batch], recipe: Recipe, sizes: list[int]) -> Finding:
    """On a CPU: simulated peaks against the memory that is free now; the weights are there already."""
    simulation = Simulation(recipe)
    free = (CPU_SHARE * devices.available_bytes() + simulation.tracker.live["weights"]) / recipe.waste
    peaks: dict[int, int] = {}

    def peak(rows: int) -> int:
        peaks[rows] = simulation.step(rows, sizes[-1] // rows).peak_bytes
        return peaks[rows]

    rows = largest_below(sizes, peak, free, simulation.floor)
    results = (f"{size} needs {format_count(peaks[size], 'B')}" for size in sorted(peaks))
    return rows, f"predicted for {engine.device} with {format_count(free, 'B')} to use: {', '.join(results)}"


def tries(
    engine: Engine, make_batch: Callable[[int, int], Batch], missing: int, compiled: bool = False
) -> Callable[[int], bool]:
    """`fits(rows)` by trying, compiled or as written, while `missing` bytes are held for what is still to come."""

    def fits(rows: int) -> bool:
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

    return fits


def try_step(engine: Engine, batches: list[Batch], compiled: bool = False) -> None:
    """Forward and backward passes of `batches` without an update; nothing of the engine's state changes.

    What is compiled runs eagerly here unless `compiled`: that needs no less memory, and no time to compile each size.
    Ranks do not wait for each other: one of them may run out of memory.
    """
    alone = copy.copy(engine)
    alone.mesh = Mesh.solo(engine.device)
    devices_used = [engine.device] if engine.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices_used))
        if not compiled:
            stack.enter_context(uncompiled(engine.model))
        alone.forward_backward(batches)
        alone.discard()
        devices.synchronize(engine.device)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Within it what `parallel.apply` compiled of a model runs as it is written.

    Not by a stance of torch.compile, which would hold for FlexAttention too: that compiles itself, and eagerly it makes
    the scores of all pairs.
    """
    calls = {part: part._compiled_call_impl for part in model.modules() if part._compiled_call_impl is not None}
    for part in calls:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in calls.items():
            part._compiled_call_impl = call


def release(engine: Engine) -> None:
    """Give back what a try, finished or not, has left."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code for a size that was tried (FlexAttention's): few may be kept, then it stays eager
    engine.optimizer.zero_grad(set_to_none=True)
    gc.collect()  # an exception's frames hold tensors in circles
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
