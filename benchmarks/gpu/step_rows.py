"""Rows about training steps: ours by themselves, beside other trainers, and with and without a lever."""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import predict
import sampler
import torch
from in_process import InProcess
from lab import Lab, Result, Spec
from record import last_line

from cramming import device as devices
from cramming.bench.worker import Worker, warm_up
from cramming.config import UserError

GB = 1e9
SMALL_CARD_GIB = 11.0
PREDECESSOR_ROWS = 128  # its micro-batch
PREDECESSOR_IMPORTS = ("pandas", "pyarrow")  # of what it imports, all that the bundle leaves out
TURNS = 3
TURNS_IN_TIMED = 8  # turns of a comparison take so much less than the timed part of a speed row
CLOSE_NATS = 0.02  # of a compiled step's loss to an eager one's
FURTHEST = 3
# The first pattern that a kernel's name has; what has none is elementwise. The backward pass of cuDNN's attention has
# the helpers `cudnn::fusion::compute_dot_do_o_specialized` and `cudnn::fusion::convert_dq_to_16bits`.
KINDS = (
    ("attention", r"fmha|flash|attention|cudnn.*sdp|cudnn::fusion"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas|triton_tem|aten::(mm|bmm|addmm)"),
    ("optimizer and copies", r"multi_tensor|Memcpy|Memset"),
)
ELEMENTWISE, IDLE = "elementwise", "idle"


class Lever(NamedTuple):
    """Settings that are to make a step faster than `without`, at an estimated cost and with a value beside other rows.

    Both sides also have `common`, of `model`; `other` is the model with the lever, if another. `rows`: sequences of a
    micro-batch where they are not the scale's.
    """

    seconds: float
    value: float
    overrides: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    common: tuple[str, ...] = ("runtime.compile=blocks",)
    model: str = "bert-base"
    other: str = ""
    packing: str = "rows"
    rows: int = 0
    rows_without: int = 0


BF16, MODEL = "precision.mode=bf16", ("runtime.compile=model",)
LEVERS = {
    "bf16 stream": Lever(
        24, 56, (BF16, "precision.residual=bf16"), (BF16, "precision.residual=fp32")
    ),
    "fp8": Lever(24, 54, ("precision.mode=fp8",)),
    "best beside crammed": Lever(25, 52, model="crammed-bert", other="best"),
    "131,072 tokens": Lever(20, 48, rows=1024),
    "FlexAttention": Lever(25, 46, ("attention.kernel=flex",), model="modern", packing="documents"),
    "CUDA graphs, 4,096 tokens": Lever(
        30, 44, ("runtime.cuda_graphs=true",), common=MODEL, rows=32, rows_without=32
    ),
    "max-autotune": Lever(80, 36, ("runtime.tune=max-autotune",), common=MODEL),
}


def speed_cases(lab: Lab) -> dict[str, tuple[str, int, str]]:
    """Return model, length and packing of our training steps by the row that measures them."""
    short, long = lab.scale.lengths
    return {
        f"ours bert-base {short}": ("bert-base", short, "rows"),
        f"ours crammed-bert {short}": ("crammed-bert", short, "rows"),
        f"ours modern {long} documents": ("modern", long, "documents"),
        f"ours best {short}": ("best", short, "rows"),
    }


def speed_spec(lab: Lab, name: str, micro_batches: int = 0) -> Spec:
    """Return our training step of a row; it has a whole batch unless `micro_batches` says otherwise."""
    model, length, packing = speed_cases(lab)[name]
    count = micro_batches or lab.scale.batch // lab.scale.micro
    return lab.spec(model, length, packing=packing, micro_batches=count)


def speed(lab: Lab, name: str, keep: bool = False) -> Result:
    """Measure our step; with `keep` a later row finds the candidate in `lab.candidates`."""
    spec = speed_spec(lab, name)
    settings = spec["settings"]
    eager_settings = {**settings, "runtime": {**settings["runtime"], "compile": "off"}}
    try:
        with InProcess(spec | {"settings": eager_settings}) as eager:
            stats, peak = eager.step(0)
        lab.note(eager={"loss": stats.loss, "norm": stats.grad_norm, "peak_bytes": peak})
    except RuntimeError as error:  # one that does not fit takes no measurement with it
        lab.note(eager={"error": str(error).splitlines()[0]})
    with ExitStack() as stack:
        ours = InProcess(spec)
        stack.callback(ours.close)
        began = time.perf_counter()
        stats, _ = ours.step(0)
        first = {"loss": stats.loss, "norm": stats.grad_norm}
        first |= {"seconds": time.perf_counter() - began, "cache_hits": ours.cache_hits}
        lab.note(first=first, plan=predict.planned(lab), **ours.facts)
        lab.note(**_timed(lab, ours))
        lab.note(told=tell_speed(lab.record.result(name)).strip())
        lab.note(**_profile(lab, ours))
        if keep:
            stack.pop_all()
            lab.candidates[name] = ours
    result = lab.record.result(name)
    losses = [side["loss"] for side in (result["eager"], result["first"]) if "loss" in side]
    failed = not max(losses) - min(losses) <= CLOSE_NATS  # or one is no number
    furthest = _furthest_from_bytes(lab, result)
    return {"shares": shares_of(result), "furthest": furthest, "failed": failed}


def _timed(lab: Lab, ours: InProcess) -> Result:
    """Load the device, then time steps for some seconds."""
    seconds = ours.run(1, 1).seconds[0]
    loaded = ours.run(2, max(1, round(lab.scale.load / seconds))).seconds
    began = time.time()
    steps = max(2, round(lab.scale.timed / statistics.median(loaded)))
    timed = ours.run(2 + len(loaded), steps)
    median, quarters = statistics.median(timed.seconds), statistics.quantiles(timed.seconds, n=4)
    return {
        "tokens_per_second": ours.tokens_per_step / median,
        "spread": (quarters[2] - quarters[0]) / 2 / median,
        "peak_bytes": timed.peak_bytes,
        "compile_seconds": timed.compile_seconds,
        "clocks": sampler.medians(lab.work, lab.uuid, began, time.time()),
        "step_seconds": timed.seconds,
        "losses": timed.losses,
        "peak_tflops": devices.describe(lab.device).peak_tflops,
        "ceilings": {k: lab.record.result("ceilings").get(k) for k in ("burst", "sustained")},
    }


def _profile(lab: Lab, ours: InProcess) -> Result:
    """Return the kernels of a step, or why the profiler has none: some virtual machines refuse it the counters."""
    try:
        kernels = profile_of(partial(ours.run, 2, 1), lab.device)
    except (RuntimeError, AssertionError) as error:
        return {"no_profile": last_line(str(error)) or type(error).__name__}
    return {"profile": kernels} if kernels else {"no_profile": "the profiler names no kernel"}


def tell_speed(result: Result) -> str:
    """Return rate, shares of both ceilings, memory, compilation, correctness, clocks; then the profile."""
    tflops = result["tokens_per_second"] * result["flops_per_token"] / 1e12
    eager, first, planned_bytes = result["eager"], result["first"], result["plan"].get("peak_bytes")
    parts = [f"{result['tokens_per_second']:,.0f} tok/s +-{result['spread']:.1%}"]
    for name, ceiling in result["ceilings"].items():
        parts += [f"{tflops / ceiling:.0%} of {ceiling:.0f} {name}"] if ceiling else []
    memory = f"{result['peak_bytes'] / GB:.1f} GB"
    memory += f" (eager {eager['peak_bytes'] / GB:.1f})" if "peak_bytes" in eager else ""
    memory += f" (plan {planned_bytes / GB:.1f})" if planned_bytes else ""
    is_close = abs(first["loss"] - eager.get("loss", 0.0)) <= CLOSE_NATS
    loss = "as eager" if is_close else f"EAGER {eager.get('loss', eager.get('error'))}"
    parts += [memory, f"first {first['seconds']:.0f} s", f"loss {first['loss']:.2f} {loss}"]
    if clocks := result["clocks"]:
        parts.append(f"{clocks['mhz']:.0f} MHz {clocks['watts']:.0f} W")
    profile = [f"{name} {share:.0%}" for name, share in result.get("shares", {}).items()]
    if not profile and "no_profile" in result:
        profile = [f"no profile: {result['no_profile']}"]
    return "\n".join([", ".join(parts), " / ".join(profile), *result.get("furthest", [])])


def profile_of(work: Callable[[], object], device: torch.device) -> list[tuple[str, int, float]]:
    """Return name, launches and microseconds of every kernel on the device, the slowest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        work()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = []
    for event in profiler.key_averages():
        if event.device_type == kind and not event.is_user_annotation:
            taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            kernels.append((event.key, event.count, taken))
    return sorted(kernels, key=lambda kernel: -kernel[2])


def shares_of(result: Result) -> dict[str, float]:
    """Return the shares of a step's time by kind of kernel, and of none; empty without a profile."""
    profile = result.get("profile", [])
    if not profile:
        return {}
    step_us = statistics.median(result["step_seconds"]) * 1e6
    shares = dict.fromkeys([*(kind for kind, _ in KINDS), ELEMENTWISE], 0.0)
    for name, _, taken in profile:
        kind = next((kind for kind, text in KINDS if re.search(text, name, re.I)), ELEMENTWISE)
        shares[kind] += taken / step_us
    return {**shares, IDLE: max(0.0, 1 - sum(shares.values()))}


def _furthest_from_bytes(lab: Lab, result: Result) -> list[str]:
    """Return the kernels that take longest beyond what their bytes would take; without predictions the slowest."""
    sizes = predict.read(lab.bundle)["kernels"].get(lab.row, {})
    bytes_per_us = lab.record.result("ceilings").get("copy_gb_per_second", 0.0) * 1e3
    losses = Counter[str]()
    for name, launches, taken in result.get("profile", []):
        least = launches * sizes.get(name, 0.0) / bytes_per_us if bytes_per_us else 0.0
        if least or not sizes:
            text = f"{name[:90]}: {taken / 1e3:.2f} ms, its bytes {least / 1e3:.2f} ms"
            losses[text] = round(taken - least)
    return [text for text, _ in losses.most_common(FURTHEST)]


def pair(lab: Lab, base: Spec, other: Spec, turns: int = TURNS, reuse: str = "") -> Result:
    """Measure two candidates in turns; `other` may be the candidate of an earlier row, `reuse`."""
    with ExitStack() as stack:
        ours = lab.candidates.pop(reuse, None)
        is_warm = ours is not None
        if ours:
            ours.cut_step(other)
        # Compiled code of many candidates would reach the compiler's limit.
        for unused in lab.candidates.values():
            unused.close()
        lab.candidates.clear()
        ours = ours or InProcess(other)
        stack.callback(ours.close)
        return interleaved(lab, stack.enter_context(InProcess(base)), ours, turns, is_warm)


def against_loop(lab: Lab, model: str, peer: str, turns: int) -> Result:
    """Measure Hugging Face's compiled loop in turns with ours, both with one micro-batch a step."""
    length = lab.scale.lengths[0]
    theirs, ours = lab.spec(model, length, peer=peer), lab.spec(model, length)
    return pair(lab, theirs, ours, turns, reuse=f"ours {model} {length}")


def interleaved(
    lab: Lab, base: InProcess | Worker, other: InProcess, turns: int, is_warm: bool = False
) -> Result:
    """Warm both up, then time them in turns of some seconds; the ratio is that of their tokens per second.

    `is_warm`: `other` has trained before, so that its first step here has no compilation to tell of.
    """
    sides: dict[str, tuple[InProcess | Worker, int, Result]] = {}
    for name, candidate in (("base", base), ("other", other)):
        first_seconds = warm_up(candidate, 1)
        step_seconds = warm_up(candidate, 2) / 2
        steps = max(1, round(lab.scale.timed / TURNS_IN_TIMED / step_seconds))
        result = {**candidate.facts, "step_seconds": []}
        if name == "base" or not is_warm:
            result["first_seconds"] = first_seconds
        sides[name] = candidate, steps, result
        lab.note(**{name: result})
    for turn in range(turns):
        for candidate, steps, result in sides.values():
            turn_steps = candidate.run(2 + turn * steps, steps)
            train = candidate.spec["settings"]["train"]
            result["step_seconds"] += turn_steps.seconds
            result["tokens_per_second"] = (
                train["batch_size"]
                * train["sequence_length"]
                / statistics.median(result["step_seconds"])
            )
            result["peak_bytes"], result["loss"] = turn_steps.peak_bytes, turn_steps.losses[-1]
        measured: Result = {name: result for name, (_, _, result) in sides.items()}
        rates = {name: result["tokens_per_second"] for name, result in measured.items()}
        measured["ratio"] = rates["other"] / rates["base"]
        lab.note(**measured, told=tell_pair(measured))
    return {"ratio": measured["ratio"]}


def tell_pair(result: Result) -> str:
    """Return the ratio, and of both sides rate, memory and loss."""
    sides = []
    for side in (result["other"], result["base"]):
        parts = [f"{side['tokens_per_second']:,.0f} tok/s", f"{side['peak_bytes'] / GB:.1f} GB"]
        if "first_seconds" in side:
            parts.append(f"first {side['first_seconds']:.0f} s")
        sides.append(", ".join([*parts, f"loss {side['loss']:.2f}"]))
    return f"{result['ratio']:.2f}x: {' against '.join(sides)}"


def with_and_without(lab: Lab, lever: Lever) -> Result:
    """Measure as many tokens a step with the lever as without."""
    length = lab.scale.lengths[lever.packing == "documents"]
    sequences = lab.scale.batch // length
    sides = (
        (lever.model, lever.rows_without, lever.without),
        (lever.other or lever.model, lever.rows, lever.overrides),
    )
    specs = []
    for model, rows, overrides in sides:
        chosen = [*lever.common, *overrides]
        if lab.scale.compiled == "off":
            chosen = [text for text in chosen if not text.startswith("runtime.")]
        if lab.device.type == "cpu" and "precision.mode=fp8" in chosen:
            chosen.append("precision.emulate_fp8=true")
        rows = min(rows or lab.scale.micro // length, sequences)
        sizes = {"rows": rows, "micro_batches": sequences // rows}
        specs.append(lab.spec(model, length, *chosen, packing=lever.packing, **sizes))
    return pair(lab, *specs)


def blocks(lab: Lab) -> str:
    """Return the setting that compiles quickest."""
    return f"runtime.compile='{'off' if lab.scale.compiled == 'off' else 'blocks'}'"


def capped(lab: Lab, model: str) -> Result:
    """Train in the memory of a small card, in a process of its own, which finds the micro-batch by trying."""
    length, sequences = lab.scale.lengths[0], lab.scale.capped
    spec = lab.spec(model, length, blocks(lab), "train.micro_batch=auto", rows=sequences)
    with Worker(spec | {"memory_gb": SMALL_CARD_GIB}, shares_code=True) as worker:
        first_seconds = warm_up(worker, 1)
        steps = worker.run(1, 2)
        rate = sequences * length / statistics.median(steps.seconds)
        result = {"tokens_per_second": rate, "peak_bytes": steps.peak_bytes, **worker.facts}
    return {**result, "first_seconds": first_seconds}


def tell_capped(result: Result) -> str:
    """Return what fits, and its rate."""
    return (
        f"{result['tokens_per_second']:,.0f} tok/s in {SMALL_CARD_GIB:.0f} GiB,"
        f" {result['micro_batches']} micro-batches, peak {result['peak_bytes'] / GB:.2f} GB,"
        f" first {result['first_seconds']:.0f} s"
    )


def against_predecessor(lab: Lab, peer: str) -> Result:
    """Measure the predecessor in a process with packages of its own, in turns with our crammed BERT.

    Both train steps of as many tokens as the speed rows, in the predecessor's micro-batches: clipping, the optimizer
    and the wait for the device then cost as little as in a run. Its process inherits `PYTORCH_ALLOC_CONF` from this
    one, so it has expandable segments as well.
    """
    if lab.bundle is None or not (lab.bundle / "predecessor").exists():
        raise UserError("--bundle: the predecessor is not in it. Make one with bundle.py.")
    missing = [name for name in PREDECESSOR_IMPORTS if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise UserError(f"the predecessor imports {names}, which no bundle brings. Install that.")
    from peers import Checkout, predecessor_spec, worker_of

    length, scale = lab.scale.lengths[0], lab.scale
    rows = min(PREDECESSOR_ROWS, scale.micro // length)
    sizes = {"rows": rows, "micro_batches": scale.batch // (rows * length)}
    theirs = lab.spec("crammed-bert", length, peer=peer, **sizes)
    checkout = Checkout(lab.bundle / "predecessor", path=[lab.work / "predecessor_site"])
    spec = predecessor_spec(theirs, checkout)
    if scale.compiled == "off":
        spec["overrides"].append("impl.compile_torch=False")
    with worker_of(spec, shares_code=True) as base:
        lab.note(peer_versions=base.facts.get("versions"))
        with InProcess(lab.spec("crammed-bert", length, blocks(lab), **sizes)) as ours:
            return interleaved(lab, base, ours, TURNS)
