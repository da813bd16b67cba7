"""A training step on tensors without data: what it would hold in memory and what it would compute.

The real model, optimizer and engine, with the memory tricks applied, run under FakeTensorMode, so each trick is
predicted by the code that executes it; a `StorageTracker` sees every allocation and release. Not simulated:
`torch.compile` (which chooses by itself what to keep), fp8's copies in 8 bits, what an allocator wastes, and what lies
outside torch's tensors. Within `fake_gpu` CPU tensors are treated as a GPU that this machine lacks would treat them.
Bounds of sequences have no values here: a kernel that would read them is given sequences of one length.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from cramming.data.batches import Batch
from cramming.engine import build_model, equip
from cramming.model import attention, heads
from cramming.model.attention import Layout, Packing
from cramming.model.heads import CHUNK_ELEMENTS, PretrainedModel, cuda_chunks
from cramming.model.layers import Dropout
from cramming.parallel.mesh import Mesh
from cramming.parallel.offload import CopyStream
from cramming.plan.tracker import HOST, Operation, StorageTracker
from cramming.precision import resolve_residual
from cramming.recipe import Config, Hardware

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "head", "workspace")
TOKENS_PER_DOCUMENT = (
    256  # no corpus is known here: a document more than the rows begins in so many tokens
)
# cuBLAS keeps a workspace per handle, and the backward pass runs in a thread with a handle of its own: two of torch's
# default size on Hopper. From torch's source, not measured here.
CUBLAS_BYTES = 2 * 32 * 2**20
# `runtime.keep_heap` on a CPU: freed memory stays in the process and is not always of use again. The peak resident set
# was 1.1 to 2.3 times the predicted peak (benchmarks/results); the most with checkpointing.
KEPT_HEAP = 2.5
FAKE_FLASH = "fake flash attention"
FLASH_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",  # the fake kernel's
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_flash_attention_backward",
    "torch_attn::_varlen_attn_backward",
)


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
    """Steps of one configuration at one place; `memory_bytes` of a GPU that is not here: a large one has more logits at
    a time."""

    def __init__(self, config: Config, place: Hardware, memory_bytes: float = 0.0) -> None:
        self.config, self.place = config, place
        self.on_gpu = place.kind == "cuda"
        is_fake = self.on_gpu and not torch.cuda.is_available()
        self.device = torch.device("cpu" if is_fake else place.kind)
        self.sequences = 0  # of the batch, as FlashAttention's bounds have them
        scratch = partial(flash_scratch, lambda: self.sequences)
        self.tracker = StorageTracker(self.device.type, scratch if self.on_gpu else None)
        chunk = CHUNK_ELEMENTS[cuda_chunks(memory_bytes)]
        self._faking = partial(fake_gpu, self.tracker, chunk) if is_fake else nullcontext
        self._without_data = FakeTensorMode()
        precision = torch.get_float32_matmul_precision()
        with self._simulating("weights"):
            executed = self._executed(is_fake)
            self.tracker.truth = False  # no random number is outside its bounds
            with self.device:  # tensors without data cannot be moved
                model = build_model(executed)
            if executed.memory.offload_weights:
                for encoder in model.encoders:
                    self._move_to_host(encoder.blocks)
            self.tracker.truth = True  # gradients are finite
            self.engine = equip(model, executed, Mesh.solo(self.device), self.device)
            if self.on_gpu:
                update_all_at_once(self.engine.optimizer)
        torch.set_float32_matmul_precision(precision)
        self._follow()
        with self._simulating(
            "optimizer"
        ):  # a first update makes its state; then any step can be simulated
            self._make_gradients()
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad(set_to_none=True)
            for tensor in tree_leaves(dict(self.engine.optimizer.state)):
                if isinstance(tensor, Tensor):
                    self.tracker.reclassify(tensor, "optimizer")

    def step(self, rows: int, micro_batches: int = 1) -> StepCost:
        """One optimizer step. From the second micro-batch on all are alike, so it alone stands for more."""
        tracker = self.tracker
        with self._simulating("gradients"):
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
        peak = {name: tracker.peak_by_category[name] for name in CATEGORIES}
        peak["workspace"] += CUBLAS_BYTES if self.on_gpu else 0
        return StepCost(
            peak, tracker.operations["pass"], tracker.operations.get("update", Counter())
        )

    def _move_to_host(self, blocks: nn.Module) -> None:
        """What `parallel.apply.place` does, with new parameters: those without data cannot be moved."""
        copy_stream = CopyStream(self.device)
        for module in blocks.modules():
            for name, parameter in module.named_parameters(recurse=False):
                host = copy_stream.host_empty(parameter).copy_(parameter.detach())
                setattr(module, name, nn.Parameter(host, requires_grad=parameter.requires_grad))

    def _make_gradients(self) -> None:
        for parameter in self.engine.parameters:
            parameter.grad = torch.empty_like(parameter)

    @contextmanager
    def _simulating(self, category: str) -> Iterator[None]:
        """Everything inside happens on tensors without data; random states stay as they are."""
        self.tracker.category, self.tracker.phase = category, "pass"
        with ExitStack() as stack:
            stack.enter_context(patch.dict(attention.KERNELS, padded=PADDED))
            stack.enter_context(self._faking())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._without_data)
            stack.enter_context(self.tracker)
            yield

    def _executed(self, is_fake: bool) -> Config:
        """The configuration, uncompiled, on one device, in the resolved number format; fp8 as bf16, whose tensors it
        keeps."""
        config, mode = self.config, self.place.mode
        uses_flash = (
            self.place.has_flash and mode != "fp32" and config.model.attention_dropout == 0.0
        )
        kernel = config.attention.kernel
        if is_fake and kernel == "auto":  # it would say what suits a CPU
            kernel = "varlen" if uses_flash else "sdpa"
        if is_fake and kernel in ("varlen", "flex"):
            kernel = FAKE_FLASH
        elif kernel == "flex":  # it exists compiled only; what it saves is what the others do
            kernel = "varlen" if uses_flash else "sdpa"
        number_format = "bf16" if mode == "fp8" else mode
        precision = config.precision.replace(
            mode=number_format,
            emulate_fp8=False,
            fp8_scaling="tensorwise",
            residual=resolve_residual(config.precision.residual, mode, self.place.kind),
        )
        return config.replace(
            # unvalidated: no setting names the kernel of a fake GPU
            attention=config.attention.model_copy(update={"kernel": kernel}),
            memory=config.memory.replace(activation_budget=None),
            runtime=config.runtime.replace(compile="off", tune="off", cuda_graphs=False),
            parallel=config.parallel.replace(tp=1, sequence=False),
            precision=precision,
        )

    def _follow(self) -> None:
        """Hooks that tell the tracker in which part of a step it is."""
        tracker, model = self.tracker, self.engine.model
        assert isinstance(model, PretrainedModel)

        def begin_blocks(*_: Any) -> None:
            tracker.category = "activations"

        def begin_head(_: Any, __: Any, hidden: Tensor) -> None:
            tracker.category = "head"
            if hidden.requires_grad:
                hidden.register_hook(
                    begin_blocks
                )  # its gradient is there: the head's backward pass is over

        def note_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                tracker.reclassify(parameter.grad, "gradients")

        model.register_forward_pre_hook(begin_blocks)
        model.encoder.register_forward_hook(begin_head)
        for parameter in self.engine.parameters:
            parameter.register_post_accumulate_grad_hook(note_gradient)

    def _batch(self, rows: int) -> Batch:
        config, length = self.config, self.config.train.sequence_length
        objective = config.objective.with_most_targets()
        tokens, targets = rows * length, rows * objective.targets_per_row(length)
        whole_rows = config.train.packing == "rows"
        sequences = rows + (0 if whole_rows else tokens // TOKENS_PER_DOCUMENT)
        windows = {config.model.half_window(layer) for layer in range(config.model.num_layers)}
        windowed = any(window is not None and window < length - 1 for window in windows)
        by_bounds = self.place.has_flash and (windowed or not whole_rows)
        self.sequences = sequences if by_bounds else 0  # else rows go to SDPA, without bounds
        bounds = torch.empty(sequences + 1, dtype=torch.int32, device=self.device)
        numbers = [
            torch.empty(n, dtype=torch.int64, device=self.device)
            for n in (tokens, tokens, targets, targets)
        ]
        packing = Packing(bounds, length if whole_rows else None, length, length, objective.causal)
        uniform = torch.empty(targets, device=self.device) if objective.replaces_tokens else None
        return Batch(numbers[0], numbers[1], packing, numbers[2], numbers[3], targets, uniform)


def heap_factor(config: Config, kind: str) -> float:
    """By how much more than its tensors a process may hold."""
    return KEPT_HEAP if kind == "cpu" and config.runtime.keep_heap else 1.0


def micro_batch_sizes(batch_size: int) -> list[int]:
    """The micro-batches to choose from, ascending: powers of two that divide the batch, and the whole batch."""
    powers = [2**k for k in range(batch_size.bit_length()) if batch_size % 2**k == 0]
    return powers if powers[-1] == batch_size else [*powers, batch_size]


def largest_fitting(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the ascending `sizes` for which `fits(size)` is true, by few calls; None if there is none.

    The last size is tried first: without accumulated gradients it may need less than the one before.
    """
    if fits(sizes[-1]):
        return sizes[-1]
    low, high = 0, len(sizes) - 1  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None


def _prepare_padded(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    """One group, its masks those of `attention_kernels._padded_prepare`: padding only where the length is rounded."""
    sequences = len(packing.bounds_S) - 1
    longest = -(-num_tokens // sequences)
    places = torch.arange(sequences * longest, device=packing.bounds_S.device)
    is_cut = half_window is not None and half_window < longest - 1
    keys = (sequences, 1) if len(places) > num_tokens and not packing.causal else ()
    mask = torch.empty(
        *keys, longest if is_cut else 1, longest, dtype=torch.bool, device=places.device
    )
    groups = ((sequences, longest),)
    return Layout(
        "padded",
        packing,
        half_window,
        groups,
        (mask if keys or is_cut else None,),
        places,
        places[:num_tokens],
    )


PADDED = attention.KERNELS["padded"]._replace(prepare=_prepare_padded, restrict=lambda *_: None)


# A GPU that is not there ----------------------------------------------------------------------------------------------


def _prepare(packing: Packing, num_tokens: int, half_window: int | None) -> Layout:
    """Whole rows without masks: the flash kernels take bounds and windows as numbers."""
    groups = ((num_tokens // packing.max_length, packing.max_length),)
    return Layout(FAKE_FLASH, packing, half_window, groups, (None,))


def _restrict(layout: Layout, queries_M: Tensor, num_tokens: int) -> Layout | None:
    """As the flash kernel does: not with a window, nor causal."""
    return None if layout.packing.causal or layout.packing.is_cut_by(layout.half_window) else layout


@contextmanager
def fake_gpu(tracker: StorageTracker, chunk_elements: int) -> Iterator[None]:
    """The kernel `FAKE_FLASH` exists, which saves what flash attention does, the head has so many logits at a time,
    dropout is the GPU's, and `tracker` knows host memory."""
    host_empty = CopyStream.host_empty
    flash = attention.KERNELS["sdpa"]._replace(prepare=_prepare, restrict=_restrict)

    def on_host(self: CopyStream, like: Tensor) -> Tensor:
        category, tracker.category = tracker.category, HOST
        try:
            return host_empty(self, like)
        finally:
            tracker.category = category

    with (
        patch.dict(attention.KERNELS, {FAKE_FLASH: flash}),
        patch.dict(heads.CHUNK_ELEMENTS, cpu=chunk_elements),
        patch.object(Dropout, "forward", nn.Dropout.forward),
        patch.object(CopyStream, "host_empty", on_host),
    ):
        yield


def update_all_at_once(optimizer: torch.optim.Optimizer) -> None:
    """On a GPU torch's optimizers work on all parameters at once unless told otherwise; on a fake one they are told."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def flash_scratch(sequences: Callable[[], int], func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that flash attention's backward pass takes to sum the queries' gradient in fp32 (FlashAttention-2's
    `dq_accum`): (T + 128 S) H K, the head size K rounded up to 32.

    S is `sequences()`, empty ones of the padded bounds included; 0 where rows of equal length need no bounds.
    """
    if func._schema.name not in FLASH_BACKWARD:
        return 0
    query = args[1]  # [T, H, K] on bounds, else [rows, H, L, K]
    num_heads, size = (
        (query.shape[1], query.shape[2]) if query.dim() == 3 else (query.shape[1], query.shape[3])
    )
    tokens = query.numel() // (num_heads * size)
    return 4 * (tokens + 128 * sequences()) * num_heads * (-(-size // 32) * 32)
