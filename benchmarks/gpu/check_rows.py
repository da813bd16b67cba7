"""Rows about correctness: whether every default path trains, and whether 16 bits give the gradients of fp32."""

import math
from itertools import product
from typing import Any

import torch
from in_process import InProcess, release, train_step
from lab import Lab, Result, Spec
from record import last_line
from torch import Tensor

from cramming.bench.tricks import changed
from cramming.bench.worker import Candidate
from cramming.config import UserError

MODELS = ("bert-base", "crammed-bert", "modern", "best")
MODES = ("fp32", "bf16", "fp16", "fp8")
OPTIMIZERS = ("optim=muon", "optim=normuon", "optim=adamw8bit")
MEMORY = ("memory=selective", "memory=offload-all")
LAYERS, SEQUENCES, STEPS = 2, 8, 2
CLOSE_NATS, CLOSE_NORM = 0.05, 0.1  # to fp32, after two steps; relative
LEAST_COSINE = 0.98  # of a weight's gradients in bf16 and in fp32

Numbers = tuple[float, float]  # loss in nats, gradient norm


def default_paths(lab: Lab) -> Result:
    """Train two steps of every combination that a user gets without choosing a kernel; compare with fp32."""
    lab.go.touch()  # from here on nothing is timed for a while
    results: dict[str, str] = {}
    for model, packing in product(MODELS, ("rows", "documents")):
        spec = _small_spec(lab, model, packing)
        right: Numbers | None = None
        for mode in MODES:
            settings = changed(spec["settings"], {"precision.mode": mode, **_emulation(lab, mode)})
            numbers, outcome = _train(lab, spec | {"settings": settings})
            right = right or numbers
            results[f"{model} {packing} {mode}"] = outcome or _compared(numbers, right)
        lab.note(paths=results)
        release(lab.device)
    right, _ = _train(lab, _small_spec(lab, "crammed-bert", "rows"))
    for override in (*MEMORY, *OPTIMIZERS):
        numbers, outcome = _train(lab, _small_spec(lab, "crammed-bert", "rows", override))
        is_comparable = override not in OPTIMIZERS  # another optimizer trains otherwise
        judged = _compared(numbers, right) if is_comparable else _finite(numbers)
        results[override] = outcome or judged
        lab.note(paths=results)  # an optimizer that compiles for too long loses no other path
    failed = [f"{k}: {v}" for k, v in results.items() if not v.startswith(("ok", "refused"))]
    return {"paths": results, "failed": failed}


def tell_paths(result: Result) -> str:
    """Return how many trained, and each that did not in a line of its own."""
    paths, failed = result["paths"], result["failed"]
    refused = [name for name, outcome in paths.items() if outcome.startswith("refused")]
    count = len(paths) - len(refused) - len(failed)
    line = f"{count} of {len(paths)} train as fp32 does, {len(refused)} refused, {len(failed)} not"
    return "\n".join([line, *failed])


def _small_spec(lab: Lab, model: str, packing: str, *more: str) -> Spec:
    small = [f"model.num_layers={LAYERS}", "runtime.compile='off'"]
    return lab.spec(model, lab.scale.lengths[0], *small, *more, packing=packing, rows=SEQUENCES)


def _train(lab: Lab, spec: Spec) -> tuple[Numbers | None, str]:
    """Return loss and gradient norm of the last step, or how it failed."""
    try:
        candidate = Candidate(spec, lab.device)
        for step in range(STEPS):
            stats = train_step(candidate, step)
    except UserError as error:
        return None, f"refused: {error}"
    except Exception as error:  # each path is a result of its own
        return None, f"{type(error).__name__}: {last_line(str(error))}"
    return (stats.loss, stats.grad_norm), ""


def _emulation(lab: Lab, mode: str) -> dict[str, bool]:
    """Return the setting by which a CPU computes fp8."""
    return {"precision.emulate_fp8": mode == "fp8" and lab.device.type == "cpu"}


def _compared(numbers: Numbers | None, reference: Numbers | None) -> str:
    """Return `ok`, or by how much the numbers differ from the reference's."""
    if numbers is None or reference is None:
        return "not compared"
    (loss, norm), (right_loss, right_norm) = numbers, reference
    text = f"loss {loss:.3f} for {right_loss:.3f}, norm {norm:.3f} for {right_norm:.3f}"
    is_close = abs(loss - right_loss) <= CLOSE_NATS
    return f"ok: {text}" if is_close and is_like(norm, right_norm) else text


def _finite(numbers: Numbers | None) -> str:
    """Return `ok` and the numbers, or the numbers alone if one of them is not finite."""
    if numbers is None:
        return "not trained"
    text = f"loss {numbers[0]:.3f}, norm {numbers[1]:.3f}"
    return f"ok: {text}" if all(map(math.isfinite, numbers)) else text


def is_like(norm: float, right_norm: float) -> bool:
    """Return whether two gradient norms agree up to rounding."""
    return abs(norm - right_norm) <= CLOSE_NORM * right_norm


def parity(lab: Lab) -> Result:
    """Compare gradients of a whole micro-batch: fp32 in eight parts, the 16-bit format in four.

    A step does not depend on how it is cut; four parts leave memory to the processes that compile meanwhile.
    """
    length = lab.scale.lengths[0]
    rows = lab.scale.micro // length
    models: dict[str, Result] = {}
    for model in MODELS[:3]:
        exact = _gradients(lab, model, "precision=fp32", "precision.tf32=false", rows=rows // 8)
        rounded = _gradients(lab, model, rows=rows // 4)
        cosines = {}
        for name, gradient in exact["gradients"].items():
            other = rounded["gradients"][name].to(gradient.device)
            cosines[name] = float(torch.cosine_similarity(gradient, other, 0))
        worst = min(cosines, key=lambda name: (math.isfinite(cosines[name]), cosines[name]))
        numbers = {key: (exact[key], rounded[key]) for key in ("loss", "norm")}
        right, rounded_numbers = zip(*numbers.values(), strict=True)
        is_right = _compared(rounded_numbers, right).startswith("ok")
        is_right = is_right and cosines[worst] >= LEAST_COSINE
        row = {**numbers, "worst": worst, "cosine": cosines[worst], "is_right": is_right}
        models[model] = row
        lab.note(models=models)
        del exact, rounded
        release(lab.device)
    return {"failed": [name for name, row in models.items() if not row["is_right"]]}


def tell_parity(result: Result) -> str:
    """Return how many models have the gradients of fp32, and the distances of each, those of the wrong ones first."""
    parts = []
    for model, row in sorted(result["models"].items(), key=lambda item: item[1]["is_right"]):
        loss, norm = (f"{pair[1]:.4f} ({pair[0]:.4f})" for pair in (row["loss"], row["norm"]))
        mark = "" if row["is_right"] else " BAD"
        cosine = f"{row['cosine']:.4f} of {row['worst']}"
        parts.append(f"{model} loss {loss} norm {norm} cosine {cosine}{mark}")
    right = len(parts) - len(result["failed"])
    return f"{right} of {len(parts)} as in fp32, 16 bits (fp32): " + "\n".join(parts)


def _gradients(lab: Lab, model: str, *more: str, rows: int) -> dict[str, Any]:
    """Return loss, gradient norm and flat gradients of the first micro-batch, cut into parts of `rows`."""
    length = lab.scale.lengths[0]
    count = lab.scale.micro // length // rows
    spec = lab.spec(model, length, "runtime.compile='off'", *more, rows=rows, micro_batches=count)
    with InProcess(spec) as candidate:
        engine = candidate.candidate.engine
        step = engine.forward_backward(next(candidate.candidate.batches(0, 1)))
        gradients: dict[str, Tensor] = {}
        for name, parameter in engine.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().float().flatten().clone()
        stats = engine.update(step, 0.0)
        return {"loss": stats.loss, "norm": stats.grad_norm, "gradients": gradients}
