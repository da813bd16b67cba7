"""A training step on tensors without data: what it would hold in memory and what it would compute.

The real model, with the configured memory tricks applied, the real optimizer and the real `Engine` run under
FakeTensorMode, so each trick is predicted by the code that executes it and no second formula has to be kept true. A
`StorageTracker` sees every allocation and release. The very first step is a small one, as it makes the optimizer's
state; then any step can be asked for.

What is not simulated: `torch.compile` (the step runs eagerly; compiled code needs as much or less), the copies in 8
bits that mode fp8 makes, what an allocator wastes, and what lies outside torch's tensors (a CUDA context). Where the
target is a GPU and this machine has none, CPU tensors stand for it (cramming/plan/stand_in.py). What is offloaded takes
no device memory then either; but its copies, and what the CPU computes, are counted as if the device did them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from cramming.checks import Config
from cramming.data.batches import Batch
from cramming.engine import build_model, equip
from cramming.model.attention import Packing
from cramming.model.heads import CHUNK_ELEMENTS, MaskedLM, cuda_chunks
from cramming.parallel.lane import Lane
from cramming.parallel.mesh import Mesh
from cramming.plan.stand_in import STAND_IN, all_at_once, as_on_cuda, flash_scratch
from cramming.plan.tracker import Operation, StorageTracker
from cramming.precision import Mode

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "head", "workspace")
TOKENS_PER_DOCUMENT = 256  # no corpus is known here: a document more than the rows begins in so many tokens
# cuBLAS keeps a workspace per handle, and the backward pass runs in a thread with a handle of its own: two of torch's
# default size on Hopper. From torch's source, not measured here.
CUBLAS_BYTES = 2 * 32 * 2**20


# `runtime.keep_heap` on a CPU: freed memory stays in the process and is not always of use again. The peak resident set
# was 1.1 to 2.3 times the predicted peak (benchmarks/results); the most with checkpointing.
KEPT_HEAP = 2.5


@dataclass(frozen=True)
class Recipe:
    """What a step does, and where: `mode` is resolved, `device_type` is cpu or cuda."""

    config: Config
    mode: Mode
    device_type: str
    memory_bytes: float = 0.0  # of a GPU that is not here: a large one has more logits at a time
    flash: bool = True  # whether a GPU that is not here has FlashAttention

    @property
    def waste(self) -> float:
        """By how much more than its tensors a process may hold."""
        return KEPT_HEAP if self.device_type == "cpu" and self.config.runtime.keep_heap else 1.0


class StepCost(NamedTuple):
    """The peak of a step, in bytes by category, and its operations: of one micro-batch, and of the update."""

    peak: dict[str, int]
    micro_batch: Counter[Operation]
    update: Counter[Operation]

    @property
    def peak_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.peak.values())

    @property
    def flops(self) -> int:
        """Matrix arithmetic of one micro-batch, recomputation included."""
        return sum(operation.flops * count for operation, count in self.micro_batch.items())


class Simulation:
    """`step(rows, micro_batches)` of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        stands_in = recipe.device_type == "cuda" and not torch.cuda.is_available()
        self.device = torch.device("cpu" if stands_in else recipe.device_type)
        self.sequences = 0  # of the batch, as FlashAttention's bounds have them
        scratch = partial(flash_scratch, lambda: self.sequences)
        self.tracker = StorageTracker(self.device.type, scratch if recipe.device_type == "cuda" else None)
        chunk = CHUNK_ELEMENTS[cuda_chunks(recipe.memory_bytes)]
        self._stand_in = partial(as_on_cuda, self.tracker, chunk) if stands_in else nullcontext
        self._fake = FakeTensorMode()
        precision = torch.get_float32_matmul_precision()
        with self._running("weights"):
            config = self._executed(stands_in)
            self.tracker.truth = False  # no random number is outside its bounds
            with self.device:  # tensors without data cannot be moved
                model = build_model(config)
            if config.memory.offload_weights:
                self._bring_home(model.encoder.blocks)
            self.tracker.truth = True  # gradients are finite
            self.engine = equip(model, config, Mesh.solo(self.device), self.device)
            if recipe.device_type == "cuda":
                all_at_once(self.engine.optimizer)
        torch.set_float32_matmul_precision(precision)
        self._follow()
        self._make_optimizer_state()

    def step(self, rows: int, micro_batches: int = 1) -> StepCost:
        """One optimizer step. From the second micro-batch on all are alike, so it alone stands for more."""
        tracker = self.tracker
        with self._running("gradients"):
            if micro_batches > 1:
                self._make_gradients()  # those of the first
            tracker.category = "activations"
            batch = self._batch(rows)
            tracker.reset_peak()
            totals = self.engine.accumulate([batch])
            assert totals is not None
            tracker.category, tracker.phase = "workspace", "update"
            self.engine.measure(*totals)
            self.engine.update(0.0)
        peak = {name: tracker.peak_parts[name] for name in CATEGORIES}
        peak["workspace"] += CUBLAS_BYTES if self.recipe.device_type == "cuda" else 0
        return StepCost(peak, tracker.operations["pass"], tracker.operations.get("update", Counter()))

    def _bring_home(self, blocks: nn.Module) -> None:
        """What `parallel.apply.place` does, with new parameters: those without data cannot be moved."""
        lane = Lane(self.device)
        for module in blocks.modules():
            for name, parameter in module.named_parameters(recurse=False):
                host = lane.host_empty(parameter).copy_(parameter.detach())
                setattr(module, name, nn.Parameter(host, requires_grad=parameter.requires_grad))

    def _make_gradients(self) -> None:
        for parameter in self.engine.parameters:
            parameter.grad = torch.empty_like(parameter)

    def _make_optimizer_state(self) -> None:
        with self._running("optimizer"):
            self._make_gradients()
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad(set_to_none=True)
            for tensor in _tensors(self.engine.optimizer.state):
                self.tracker.reclassify(tensor, "optimizer")

    @property
    def floor(self) -> int:
        """What lives between two steps: weights and the optimizer's state."""
        return self.tracker.total

    @contextmanager
    def _running(self, category: str) -> Iterator[None]:
        """Everything inside happens on tensors without data; random states stay as they are."""
        self.tracker.category, self.tracker.phase = category, "pass"
        with ExitStack() as stack:
            stack.enter_context(self._stand_in())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._fake)
            stack.enter_context(self.tracker)
            yield

    def _executed(self, stands_in: bool) -> Config:
        """The configuration, uncompiled, in the resolved number format; fp8 as bf16, whose tensors it keeps."""
        config, kernel = self.recipe.config, self.recipe.config.attention.kernel
        if stands_in and kernel == "auto":  # asked here, it would say what is best on a CPU
            kernel = "varlen" if _uses_flash(self.recipe) else "sdpa"
        if stands_in and kernel in ("varlen", "flex"):
            kernel = STAND_IN
        elif kernel == "flex":  # it exists compiled only; what it saves is what the others do
            kernel = "varlen" if _uses_flash(self.recipe) else "sdpa"
        return replace(
            config,
            attention=replace(config.attention, kernel=kernel),
            memory=replace(config.memory, activation_budget=None),
            runtime=replace(config.runtime, compile="off", tune="off", cuda_graphs=False),
            precision=replace(
                config.precision,
                mode="bf16" if self.recipe.mode == "fp8" else self.recipe.mode,
                emulate_fp8=False,
                fp8_scaling="tensorwise",
            ),
        )

    def _follow(self) -> None:
        """Hooks that tell the tracker in which part of a step it is."""
        tracker, model = self.tracker, self.engine.model
        assert isinstance(model, MaskedLM)

        def now(category: str) -> Any:
            def hook(*_: Any) -> None:
                tracker.category = category

            return hook

        def encoder_done(_: Any, __: Any, hidden: Tensor) -> None:
            tracker.category = "head"
            if hidden.requires_grad:
                hidden.register_hook(now("activations"))  # its gradient is there: the head's part is over

        model.register_forward_pre_hook(now("activations"))
        model.encoder.register_forward_hook(encoder_done)
        for parameter in self.engine.parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_made)

    def _gradient_made(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.reclassify(parameter.grad, "gradients")

    def _batch(self, rows: int) -> Batch:
        recipe, config, length = self.recipe, self.recipe.config, self.recipe.config.train.sequence_length
        tokens, targets = rows * length, rows * config.targets_per_row
        whole_rows = config.train.packing == "rows"
        sequences = rows + (0 if whole_rows else tokens // TOKENS_PER_DOCUMENT)
        windows = {config.model.half_window(layer) for layer in range(config.model.num_layers)}
        windowed = any(window is not None and window < length - 1 for window in windows)
        by_bounds = recipe.flash and (windowed or not whole_rows)
        self.sequences = sequences if by_bounds else 0  # else rows go to SDPA, without bounds
        bounds = torch.empty(sequences + 1, dtype=torch.int32, device=self.device)
        numbers = [torch.empty(n, dtype=torch.int64, device=self.device) for n in (tokens, tokens, targets, targets)]
        packing = Packing(bounds, length if whole_rows else None, length, length)
        return Batch(numbers[0], numbers[1], packing, numbers[2], numbers[3], targets)


def largest_fitting(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the ascending `sizes` for which `fits(size)` is true, asking few; None if there is none."""
    low, high = 0, len(sizes)  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None


def largest_below(sizes: list[int], peak: Callable[[int], int], limit: float, floor: int) -> int | None:
    """The largest of the ascending `sizes` whose `peak(size)` is at most `limit`; None if there is none.

    A peak is the largest of several straight lines, so the line through two sizes says where to look, and where it
    passes the limit beyond them the peak does so too; at first the line is that from `floor`, which is less than any
    peak, and tells nothing for sure. Only the last size, without accumulated gradients, may be lower than the line.
    """
    known = {0: floor}
    low, high = -1, len(sizes)  # sizes[low] fits, sizes[high] does not
    while high - low > 1:
        a, b = sorted(known)[-2:] if len(known) > 1 else (0, 0)
        index = len(sizes) // 3
        if b:
            slope = (known[b] - known[a]) / (b - a)
            index = bisect_right(sizes, b + (limit - known[b]) / slope) - 1 if slope > 0 else high - 1
            if index <= low and 0 < a < b <= sizes[low] and low + 1 < len(sizes) - 1:
                break
        index = min(max(index, low + 1), high - 1)
        known[sizes[index]] = peak(sizes[index])
        low, high = (index, high) if known[sizes[index]] <= limit else (low, index)
    return sizes[low] if low >= 0 else None


def micro_batch_sizes(batch_size: int) -> list[int]:
    """The micro-batches to choose from, ascending: powers of two that divide the batch, and the whole batch."""
    powers = [2**k for k in range(batch_size.bit_length()) if batch_size % 2**k == 0]
    return powers if powers[-1] == batch_size else [*powers, batch_size]


def _uses_flash(recipe: Recipe) -> bool:
    return recipe.flash and recipe.mode != "fp32" and recipe.config.model.attention_dropout == 0.0


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, dict):
        for child in node.values():
            yield from _tensors(child)
