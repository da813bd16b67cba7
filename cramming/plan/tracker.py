"""Follows every tensor storage while it lives, and counts the arithmetic and the traffic of every operation.

A `StorageTracker` is a dispatch mode: it sees each operation after autograd, as a kernel launch. A storage counts until
Python and C++ have let go of it, so the sum is what an allocator without waste would hold. Two effects of a dispatch
mode are corrected: numbers read from a tensor without data, and gradients that autograd would add in place.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
MODE_MACHINERY = ("torch/_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py")
PLAIN = (Tensor, nn.Parameter, FakeTensor)
HOST = "host"  # the category of what is not on the device, where both are called by one name: it has no size


class Operation(NamedTuple):
    """One kernel: its matrix arithmetic in floating-point operations, and the bytes it must read and write."""

    flops: int
    bytes: int


@dataclass(slots=True)
class _Entry:
    """A live storage. `ref` keeps the callback alive that ends it."""

    size: int
    category: str
    ref: weakref.ref[Any] | None = None


class StorageTracker(TorchDispatchMode):
    """Live bytes on `device_type` by category, now and at the largest sum; and the operations, by phase.

    A new storage gets the present `category`; `reclassify` moves it later. Where host and device have one name, what
    begins as `HOST`, and what is computed from such tensors alone, is not counted. `scratch(func, args)`: bytes that a
    kernel takes for itself while it runs.
    """

    def __init__(
        self, device_type: str, scratch: Callable[[Any, tuple[Any, ...]], int] | None = None
    ):
        super().__init__()
        self.device_type, self.scratch = device_type, scratch
        self.category, self.phase = "activations", "pass"
        self.truth = True  # of every boolean that is read
        self.live: Counter[str] = Counter()
        self.total = 0
        self.operations: dict[str, Counter[Operation]] = {}
        self._entries: dict[int, _Entry] = {}
        self.reset_peak()

    def reset_peak(self) -> None:
        """Begin a new measurement at what lives now."""
        self.peak, self.peak_by_category = self.total, Counter(self.live)
        self.operations = {}

    def reclassify(self, tensor: Tensor, category: str) -> None:
        """Count the tensor's storage, unless it is on the host, under `category` from now on."""
        for storage in _storages(tensor):
            entry = self._entries.get(id(storage))
            if entry and entry.category != HOST:
                self.live[entry.category] -= entry.size
                self.live[category] += entry.size
                entry.category = category

    def category_of(self, tensor: Tensor) -> str | None:
        """Under what the tensor is counted; None if it is not."""
        entry = self._entries.get(id(next(_storages(tensor))))
        return entry.category if entry else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.prim.device.default
        ):  # three of four calls: autograd asks fake tensors where they are
            return _device(args[0])
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor made of tensors: its own operations come by here next
        if func is aten._local_scalar_dense.default:
            return (
                self.truth
                if args[0].dtype == torch.bool
                else 0.0
                if args[0].is_floating_point()
                else 0
            )
        if func is aten.add.Tensor and _is_autograds_own_sum(*args):
            func = aten.add_.Tensor
        if self.scratch:
            self._note_sum(self.total + self.scratch(func, args))
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [self._note(tensor, func, args, kwargs or {}) for tensor in outputs]
        self._count(func, args, kwargs or {}, result, outputs, any(fresh))
        return result

    def _note(self, tensor: Tensor, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the tensor has a storage that was not there before."""
        fresh = False
        for storage in _storages(tensor):
            key = id(storage)
            if key in self._entries or _device(tensor).type != self.device_type:
                continue
            category = self.category
            if func is aten._to_copy.default and self.category_of(args[0]) == "weights":
                category = "workspace"  # a copy of weights in 16 bits
            elif kwargs.get("device") is None and self._all_on_host(args):
                category = HOST
            entry = self._entries[key] = _Entry(
                0 if category == HOST else storage.nbytes(), category
            )
            entry.ref = weakref.ref(storage, partial(self._freed, key))
            self.live[category] += entry.size
            self.total += entry.size
            self._note_sum(self.total)
            fresh = True
        return fresh

    def _all_on_host(self, args: Any) -> bool:
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(inputs) and all(self.category_of(tensor) == HOST for tensor in inputs)

    def _note_sum(self, total: int) -> None:
        if total > self.peak:
            self.peak, self.peak_by_category = total, Counter(self.live)
            self.peak_by_category["workspace"] += total - self.total

    def _freed(self, key: int, _: Any) -> None:
        entry = self._entries.pop(key)
        self.live[entry.category] -= entry.size
        self.total -= entry.size

    def _count(
        self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor], fresh: bool
    ) -> None:
        writes = _writes(func)
        if func in ALLOCATIONS or not (fresh or writes):  # memory without a kernel, or a view
            return
        if func in GATHERS:
            moved = 2 * sum(map(_bytes, outputs))
        else:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            moved = sum(map(_bytes, inputs)) + sum(
                map(_bytes, inputs[:1] if writes and not outputs else outputs)
            )
        formula = FLOPS.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        self.operations.setdefault(self.phase, Counter())[Operation(flops, moved)] += 1


FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
GATHERS = {
    aten.embedding.default,
    aten.index_select.default,
    aten.gather.default,
}  # read what they return, no more


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _device(tensor: Tensor) -> torch.device:
    """Where the tensor is, or pretends to be; asking a fake tensor for `device` would be one more operation."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _storages(tensor: Tensor) -> Iterator[Any]:
    if type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


@cache
def _writes(func: Any) -> bool:
    """Whether an operation changes one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _is_autograds_own_sum(old: Any, new: Any, **_: Any) -> bool:
    """Whether this addition is the engine's, of gradients that reach one tensor by two ways.

    It writes into the first one where nobody else holds that, except under a dispatch mode. It is called from C++: the
    nearest Python frame is autograd's entry, or there is none (the thread of a GPU).
    """
    if not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return False
    if torch.is_grad_enabled() or not _is_dense(old):
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(MODE_MACHINERY):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(tensor.stride(), tensor.shape) if si != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
