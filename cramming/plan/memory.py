"""Peak memory of a training step, from a step on tensors without data.

The model, the optimizer and the engine of a run execute one step under `FakeTensorMode` while torch's `MemTracker`
follows every storage: within 1 % of the peak resident set of a CPU run in eight configurations
(benchmarks/results/memory_cpu_2026-11-28.md). Not simulated: compiled code, copies in 8 bits, offloading (what it saves
of weights and states is subtracted), a GPU's dropout (a CPU's keeps more), and scratch memory inside kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from cramming.data.batches import Batch
from cramming.engine import build_model, equip
from cramming.model.attention import Packing
from cramming.model.heads import CHUNK_ELEMENTS, cuda_chunks
from cramming.parallel.mesh import Mesh
from cramming.precision import DTYPES, resolve_residual
from cramming.recipe import Config, Hardware

# Category of a plan -> those of MemTracker.
CATEGORIES = {
    "weights": ("Parameter", "Buffer"),
    "gradients": ("Gradient",),
    "optimizer": ("Optstate",),
    "activations": ("Activation",),
    "workspace": ("Temp", "Other"),
}
CPU = torch.device("cpu")  # stands in for a GPU, too: fake CUDA tensors need a CUDA build of torch
# Tokens of a micro-batch. Larger ones are no faster: by the dry run (BERT-base, H200) micro-batches of 65,536 tokens
# cost 9 % less per token than those of 8,192, and those of 262,144 tokens less than 1 % less again.
ENOUGH_TOKENS, MAX_TOKENS = 8_192, 131_072
FIRST_TOKENS = 16_384  # the size that is tried first: fits into 11 GB with BERT-base
# Share of a CPU's free memory to plan with. `runtime.keep_heap` keeps freed memory in the process, where it is not
# always usable again: the peak resident set was 1.1 to 2.3 times the predicted peak
# (benchmarks/results/memory_cpu_2026-11-21.md).
CPU_SHARE = 0.4

aten = torch.ops.aten


class Simulation:
    """Steps of one configuration on one device, without data.

    `memory_bytes` of a GPU decides how many logits exist at a time.
    """

    def __init__(self, config: Config, hardware: Hardware, memory_bytes: float = 0.0) -> None:
        self.config, self.hardware = config, hardware
        self._is_gpu = hardware.kind == "cuda"
        self._is_flash = is_flash(config, hardware)
        self._executed = executed_config(config, hardware, memory_bytes)
        self._fake_mode = FakeTensorMode()
        # Truncated initialisation repeats while any number is out of bounds, which must be false.
        with self._without_data(truth=False):
            model = build_model(self._executed)
        with self._without_data():
            self._engine = equip(model, self._executed, Mesh.solo(CPU), CPU)
            self._make_gradients()
            self._engine.optimizer.step()  # makes the optimizer's state
            self._engine.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, int]:
        """Return the bytes between two steps by category: weights and optimizer state."""
        return self._by_category(self._tracker(), "current")

    def peak(self, rows: int, accumulates: bool = False) -> dict[str, int]:
        """Return the bytes at the peak of a step by category.

        `accumulates`: gradients of an earlier micro-batch exist. All micro-batches after the first are alike.
        """
        if accumulates:
            with self._without_data():
                self._make_gradients()
        tracker = self._tracker()
        with self._without_data(tracker=tracker):
            batch = batch_without_data(self._executed, rows)
            if self._is_flash:
                batch = replace(batch, packing=batch.packing._replace(causal=False))
            self._engine.step([batch], 0.0)
        by_category = self._by_category(tracker, "peak")
        if self._is_gpu and self.config.model.relative_positions:
            by_category["workspace"] += self._bias_bytes(rows)
        return by_category

    @contextmanager
    def _without_data(
        self, truth: bool = True, tracker: MemTracker | None = None
    ) -> Iterator[None]:
        """Run everything inside on fake tensors, uncompiled."""
        eager = torch.compiler.set_stance("force_eager")
        with eager, self._fake_mode, tracker or nullcontext(), _Answers(truth):
            yield

    def _tracker(self) -> MemTracker:
        tracker = MemTracker()
        tracker.memory_tracking = _WithoutModulePeaks()
        tracker.track_external(self._engine.model, self._engine.optimizer)
        return tracker

    def _by_category(self, tracker: MemTracker, kind: str) -> dict[str, int]:
        (snapshot,) = tracker.get_tracker_snapshot(kind).values()
        sizes = {getattr(part, "value", part): size for part, size in snapshot.items()}
        by_category: dict[str, int] = {}
        for name, parts in CATEGORIES.items():
            by_category[name] = sum(sizes[part] for part in parts)
        if self._is_gpu:
            self._subtract_offloaded(by_category)
        return by_category

    def _subtract_offloaded(self, by_category: dict[str, int]) -> None:
        """Subtract weights and states that a GPU does not hold; activations are counted as if they stayed."""
        memory, parameters = self.config.memory, self.config.parameters
        if memory.offload_optimizer:
            by_category["optimizer"] = 0
        if memory.offload_weights:
            share = 1 - parameters.without_embeddings / parameters.total
            for name in ("weights", "gradients", "optimizer"):
                by_category[name] = int(share * by_category[name])

    def _bias_bytes(self, rows: int) -> int:
        """Return the bytes of relative positions on a GPU: the mask, its gradient in a layer, and the sum of these."""
        length, dtype = self.config.train.sequence_length, DTYPES[self.hardware.mode]
        return 3 * rows * self.config.model.num_heads * length**2 * dtype.itemsize

    def _make_gradients(self) -> None:
        for parameter in self._engine.parameters:
            parameter.grad = torch.empty_like(parameter)


def executed_config(config: Config, hardware: Hardware, memory_bytes: float) -> Config:
    """Return the configuration that the simulation executes: uncompiled, on one CPU, with nothing offloaded.

    fp8 runs as bf16, whose tensors it keeps. FlashAttention on a GPU runs as SDPA over whole rows, as it makes no mask.
    A GPU's relative positions are counted, not executed: with a gradient of the mask a CPU has no fused attention.
    """
    mode, attention, model, train = hardware.mode, config.attention, config.model, config.train
    precision = config.precision.replace(
        mode="bf16" if mode == "fp8" else mode,
        emulate_fp8=False,
        fp8_scaling="tensorwise",
        residual=resolve_residual(config.precision.residual, mode, hardware.kind),
    )
    memory = config.memory.replace(
        activation_budget=None,
        offload_activations=False,
        offload_weights=False,
        offload_optimizer=False,
    )
    if hardware.kind == "cuda":
        chunk = memory.loss_chunk or CHUNK_ELEMENTS[cuda_chunks(memory_bytes)]
        memory = memory.replace(loss_chunk=chunk)
        model = replace(model, relative_positions=0)
    if is_flash(config, hardware):
        model = replace(model, local_window=None, global_every=1)
        train = train.replace(packing="rows")
    is_auto_on_gpu = attention.kernel == "auto" and hardware.kind == "cuda"
    if is_auto_on_gpu or attention.kernel in ("varlen", "flex"):
        attention = attention.replace(kernel="sdpa")
    return config.replace(
        model=model,
        train=train,
        attention=attention,
        precision=precision,
        memory=memory,
        runtime=config.runtime.replace(compile="off", tune="off", cuda_graphs=False),
        parallel=config.parallel.replace(tp=1, sequence=False),
    )


def is_flash(config: Config, hardware: Hardware) -> bool:
    """Return whether attention on this GPU makes no mask and keeps no scores."""
    kernel = config.attention.kernel
    model = config.model
    needs_scores = model.attention_dropout > 0.0 or model.relative_positions > 0
    has_flash = hardware.has_flash and hardware.mode != "fp32" and not needs_scores
    by_flash = has_flash and kernel in ("auto", "varlen")
    return hardware.kind == "cuda" and (by_flash or kernel == "flex")


def batch_without_data(config: Config, rows: int) -> Batch:
    """Return a micro-batch of the objective's largest phase without values; documents are half a row long."""
    length = config.train.sequence_length
    phase = config.objective.largest_phase
    tokens, targets = rows * length, rows * phase.per_row(length)
    whole_rows = config.train.packing == "rows"
    half = length // 2
    lengths = (length,) * rows if whole_rows else (half, length - half) * rows
    packing = Packing(
        torch.empty(len(lengths) + 1, dtype=torch.int32),
        row_length=length if whole_rows else None,
        max_length=length,
        aligned_length=length,
        causal=phase.is_causal,
        lengths=lengths,
    )
    return Batch(
        ids_T=_numbers(tokens),
        positions_T=_numbers(tokens),
        packing=packing,
        target_positions_M=_numbers(targets),
        target_ids_M=_numbers(targets),
        num_targets=targets,
        uniform_M=torch.empty(targets) if phase.needs_uniform else None,
    )


def largest_fitting(sizes: list[int], fits: Callable[[int], bool], start: int) -> int | None:
    """Return the largest of the ascending `sizes` that fits, None if none does.

    The largest size of at most `start` is tried first. If it fits, larger ones are tried until one does not; otherwise
    the smallest, and then those between the two in descending order until one fits.
    """
    below = [size for size in sizes if size <= start] or sizes[:1]
    first = below.pop()
    if fits(first):
        larger = [size for size in sizes if size > first]
        return [first, *takewhile(fits, larger)][-1]
    if not below or not fits(below[0]):
        return None
    smallest, *between = below
    return next(filter(fits, reversed(between)), smallest)


def micro_batch_sizes(sequences: int, length: int) -> list[int]:
    """Return the candidate micro-batches, ascending: powers of two that divide `sequences`, and `sequences` itself.

    None has more than `MAX_TOKENS` tokens in rows of `length`, apart from a single row.
    """
    powers = [2**k for k in range(sequences.bit_length()) if sequences % 2**k == 0]
    sizes = powers if powers[-1] == sequences else [*powers, sequences]
    max_rows = max(1, MAX_TOKENS // length)
    return [size for size in sizes if size <= max_rows]


class _Answers(TorchDispatchMode):
    """Mode that answers reads of a number from a fake tensor: `truth` for booleans, else zero.

    Three of four operations read the device of a fake tensor, which is answered before other modes see it.
    """

    def __init__(self, truth: bool) -> None:
        super().__init__()
        self.truth = truth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is not aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        if args[0].dtype == torch.bool:
            return self.truth
        return 0.0 if args[0].is_floating_point() else 0


class _WithoutModulePeaks(WeakIdKeyDictionary):
    """Statistics of modules in which MemTracker finds none to update after each operation.

    The peaks of single modules are not needed, and updating them takes three quarters of a simulation.
    """

    def values(self) -> Any:
        return ()


def _numbers(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64)
