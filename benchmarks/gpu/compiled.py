"""A training step through torch.compile for a card that is not there: its kernels, their bytes, registers and time.

Inductor makes its kernels as for the card and Triton's ptxas makes cubins of them; where they would be launched, the
graph that they were made from runs on fake tensors instead, so that the backward graph is compiled as well. Bytes are
inductor's own count of what a kernel must read and write; operations are torch's formulas. Operations outside of
compiled code (`runtime.compile=blocks` leaves some) are counted too, by the sizes of their tensors.
"""

import copy
import math
import re
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from fake_card import Card
from steps import VOCABULARY, config_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import graph as lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cramming.engine import build_model
from cramming.model import heads
from cramming.model.attention import Packing
from cramming.model.config import flops_per_token
from cramming.parallel import apply as applying
from cramming.parallel.mesh import Mesh
from cramming.precision import Precision


@dataclass
class Kernel:
    """One kernel of a pass. `launches` in one micro-batch; bytes and operations of one launch; registers and bytes of
    spilled registers per thread where Triton made it."""

    name: str
    kind: str  # triton | product | attention | other | uncompiled
    backward: bool
    launches: int
    bytes: float
    flops: float
    registers: int = 0
    spilled: int = 0


class Compiler:
    """A backend of torch.compile that notes the kernels of each graph that runs. `pretend` must have been called."""

    def __init__(self, card: Card) -> None:
        self.kernels: list[Kernel] = []  # of all that ran since this was last emptied
        self.is_running = False  # code that is compiled
        self.resources: dict[
            str, tuple[int, int]
        ] = {}  # registers and spilled bytes by a Triton kernel's name
        self.seconds: list[float] = []
        self.graph: Any = None
        inductor.compile_threads = 1
        inductor.joint_graph_constant_folding = False  # would compute with real tensors
        inductor.fx_graph_cache = inductor.use_static_triton_launcher = False
        inductor.benchmark_kernel = True  # notes each kernel's bytes
        torch._functorch.config.enable_autograd_cache = False  # type: ignore[attr-defined]
        _believe(card)
        self._follow()

    def __call__(self, module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=self._compile)

    def _compile(self, module: Any, inputs: Any, **options: Any) -> Any:
        plain, began = copy.deepcopy(module), time.perf_counter()
        compile_fx_inner(module, inputs, **options)
        self.seconds.append(time.perf_counter() - began)
        kernels = self._kernels(bool(options.get("is_backward")))

        def run(arguments: list[Any]) -> Any:
            self.kernels.extend(kernels)
            self.is_running = True
            results = plain(*arguments)
            self.is_running = False
            arguments.clear()
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _follow(self) -> None:
        codegen = lowering.GraphLowering.codegen

        def noted(graph: Any) -> Any:
            self.graph, self.code = graph, codegen(graph)
            return self.code

        lowering.GraphLowering.codegen = noted  # type: ignore[method-assign]
        resources = self.resources

        autotuner: Any = triton_heuristics.CachingAutotuner
        precompile = autotuner._precompile_worker

        def only_first(self: Any) -> None:
            self.configs = (
                self.configs and self.configs[:1]
            )  # which is fastest only a card can tell
            precompile(self)

        def no_launcher(self: Any) -> None:
            self.launchers = [lambda *_, **__: None]
            (result,) = self.compile_results
            resources[self.inductor_meta["kernel_name"]] = _resources(result.kernel.asm["cubin"])

        autotuner._precompile_worker, autotuner._make_launchers = only_first, no_launcher

    def _kernels(self, backward: bool) -> list[Kernel]:
        """The kernels of the graph that was compiled last."""
        kernels = []
        source = self.code[0].value if hasattr(self.code[0], "value") else self.code[0]
        for name in dict.fromkeys(re.findall(r"^ *(triton_\w+)\.run\(", source, re.M)):
            gigabytes = re.search(
                rf"'kernel_name': '{name}'.*?'kernel_num_gb': ([\d.e-]+)", source, re.S
            )
            assert gigabytes, name
            launches = len(
                re.findall(rf"^ *{name}\.run\((?!\*args)", source, re.M)
            )  # not in its benchmark
            size = float(gigabytes[1]) * 1e9
            kernels.append(
                Kernel(name, "triton", backward, launches, size, 0, *self.resources[name])
            )
        with V.set_graph_handler(self.graph):
            for node in self.graph.scheduler.nodes:
                if node.is_extern() and type(node.node).__name__ != "MultiOutput":
                    kernels.append(_extern(node, backward))
        return kernels


NO_TRAFFIC = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
READS_ROWS = ("embedding", "gather", "index_select")  # of its first tensor no more than it returns
WRITES_ROWS = ("index_add_", "scatter_add_")  # reads and writes as much as its last tensor has


class Uncompiled(TorchDispatchMode):
    """Notes each operation outside of compiled code, with the bytes that it reads and writes."""

    supports_higher_order_operators = True  # FlexAttention is one, in compiled code

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()
        self.compiler = compiler

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: code is compiled in spite of this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.compiler.is_running or func.namespace == "prim":  # "on which device is a tensor?"
            return result
        if not _is_view(func):
            self._note(func, [args, kwargs], result)
        return result

    def _note(self, func: Any, arguments: Any, result: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name in NO_TRAFFIC:
            return
        arguments_read, made = _tensors(arguments), _tensors(result)
        if name in READS_ROWS:
            arguments_read = [*arguments_read[1:], *made]
        if name in WRITES_ROWS:
            arguments_read, made = [*arguments_read[1:], arguments_read[-1]], [arguments_read[-1]]
        size = float(sum(tensor.numel() * tensor.itemsize for tensor in [*arguments_read, *made]))
        if not size:
            return
        backward = torch._C._current_graph_task_id() != -1
        packet = func.overloadpacket
        flops, kind = 0.0, "uncompiled"
        if packet in flop_registry:
            flops, kind = float(flop_registry[packet](*arguments[0], out_val=result)), "product"
        self.compiler.kernels.append(Kernel(f"aten.{name}", kind, backward, 1, size, flops))


def _is_view(func: Any) -> bool:
    """Return whether the operation returns memory of its arguments and writes nothing."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors on the device."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.device.type == "cuda"]


def _extern(node: Any, backward: bool) -> Kernel:
    ir = node.node
    name = str(
        getattr(ir, "op_overload", None) or ir.get_kernel_name() or type(ir).__name__
    ).removesuffix(".default")
    flops, kind = float(node.estimate_flops() or 0), "product"
    if "attention" in name or "varlen" in name:
        flops, kind = _attention_flops(ir, "backward" in name), "attention"
    elif not flops:
        kind = "other"
    size = float(node.get_read_write_buffers_sizes())
    return Kernel(name, kind, backward, 1, size + _copied(ir, name), flops)


def _copied(ir: Any, name: str) -> float:
    """Return the bytes that `addmm` moves before its product, which inductor does not count.

    A matrix to add is copied into the result (aten/src/ATen/native/cuda/Blas.cpp); a bias is not.
    """
    if not name.startswith("aten.addmm"):
        return 0.0
    sizes = [[int(n) for n in part.get_size()] for part in (ir.inputs[0], ir)]
    if sizes[0] != sizes[1]:
        return 0.0
    return 2.0 * math.prod(sizes[1]) * ir.get_dtype().itemsize


def _attention_flops(ir: Any, backward: bool) -> float:
    """Two products forward and five backward, over all pairs of a row (of a window where there is one)."""
    sizes = [[int(n) for n in part.get_size()] for part in ir.inputs[backward : backward + 2]]
    query, key = sizes
    if len(query) == 4:
        pairs = query[0] * query[1] * query[2] * key[2]
    else:  # varlen: [T, H, K]; the longest sequence and the window stand in the call
        origin = next(node for node in ir.origins if "varlen" in str(node.target))
        call = [*origin.args, *origin.kwargs.values()]
        windows = [tuple(arg) for arg in call if isinstance(arg, list | tuple) and len(arg) == 2]
        reach = max(arg for arg in call if type(arg) is int)
        if windows and windows[0][0] >= 0:
            reach = min(reach, sum(windows[0]) + 1)
        pairs = query[0] * query[1] * reach
    return pairs * query[-1] * (10.0 if backward else 4.0)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack (spilled registers), per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage, text
    return int(usage[1]), int(usage[2])


def _believe(card: Card) -> None:
    """Answer inductor and Triton what they ask beside torch.cuda."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.runtime.triton_helpers as helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = card.capability
    number = major * 10 + minor

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", number, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            return lambda *_, **__: 1.0

    cuda: Any = interface.CudaInterface
    for part in (cuda, cuda.Worker):
        part.get_device_properties = staticmethod(lambda *_: torch.cuda.get_device_properties())
    cuda.is_available = staticmethod(lambda: True)
    cuda.get_compute_capability = staticmethod(lambda *_: number)
    driver.set_active(Driver())
    helpers.set_driver_to_gpu = lambda: None


def compiled_step(card: Card, job: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward pass of one micro-batch, compiled as the configuration says: what they consist of.

    `job`: overrides, sequence length, rows, targets per row, packing and, where it is to be another, the number of
    logits in a chunk.
    """
    compiler = Compiler(card)
    rows, length = job["rows"], job["length"]
    config = config_of(job["overrides"], length, job["packing"])
    if "chunk" in job:
        heads.CHUNK_ELEMENTS["cuda"] = heads.CHUNK_ELEMENTS["large cuda"] = job["chunk"]
    applying.compile_arguments = lambda _: {"backend": compiler, "fullgraph": True}
    began = time.perf_counter()
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        with torch.device("cuda"):
            model = build_model(config)
        precision = Precision(config.precision, torch.device("cuda"))
        precision.convert(model.encoder)
        applying.apply(
            model,
            config.memory,
            config.runtime,
            config.parallel,
            Mesh.solo(torch.device("cuda")),
            precision,
        )
        _pass(model, precision, job)  # compiles
        graphs = counters["stats"]["unique_graphs"]
        compiler.kernels.clear()
        model.zero_grad(set_to_none=True)
        with Uncompiled(compiler):
            _pass(model, precision, job)
    return {
        **job,
        "architecture": card.architecture,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": flops_per_token(
            config.model, length, job["targets"] / length, config.attention.last_layer
        ),
        "tokens": rows * length,
        "vocabulary": VOCABULARY,
        "graphs": graphs,
        "recompiled": counters["stats"]["unique_graphs"] - graphs,
        "breaks": sum(counters["graph_break"].values()),
        "compile_seconds": compiler.seconds,
        "seconds": time.perf_counter() - began,
        "kernels": [asdict(kernel) for kernel in _merged(compiler.kernels)],
    }


def _pass(model: Any, precision: Precision, job: dict[str, Any]) -> None:
    with precision.autocast():
        loss, _ = model(*_batch(job))
    loss.backward()


def _merged(kernels: list[Kernel]) -> list[Kernel]:
    """Launches that are alike counted together."""
    merged = dict[tuple[Any, ...], Kernel]()
    for kernel in kernels:
        key = (kernel.name, kernel.backward, kernel.bytes, kernel.flops)
        known = merged.setdefault(key, replace(kernel, launches=0))
        known.launches += kernel.launches
    return list(merged.values())


def _batch(job: dict[str, Any]) -> list[Any]:
    rows, length = job["rows"], job["length"]
    tokens, targets, whole = rows * length, rows * job["targets"], job["packing"] == "rows"
    numbers = [
        torch.zeros(n, dtype=torch.int64, device="cuda") for n in (tokens, tokens, targets, targets)
    ]
    bounds = torch.zeros(rows * (1 if whole else 8) + 1, dtype=torch.int32, device="cuda")
    packing = Packing(bounds, length if whole else None, length, length)
    return [numbers[0], numbers[1], packing, numbers[2], numbers[3]]
