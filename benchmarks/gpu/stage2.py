"""Stage 2: Hugging Face's compiled loops and ours, the memory of a small card, and each lever with and without."""

import statistics
from functools import partial
from typing import Any, NamedTuple

from in_process import InProcess
from lab import Lab, Row

from cramming.bench.main import measure
from cramming.bench.worker import Worker, warm_up

SMALL_CARD_GB = 11.0


class Lever(NamedTuple):
    """Settings that are to be faster than their absence; with and without also have `common`, of `model`.

    `rows`: sequences of a micro-batch, where it is not the scale's. One block is compiled for all, which takes a tenth
    of the time, unless `common` says otherwise.
    """

    name: str
    overrides: tuple[str, ...]
    common: tuple[str, ...] = ()
    model: str = "bert-base"
    packing: str = "rows"
    rows: int = 0
    rows_without: int = 0


MODEL, BF16 = ("runtime.compile=model",), ("precision.mode=bf16",)
LEVERS: tuple[Lever, ...] = (  # the most wanted first
    Lever("fp8", ("precision.mode=fp8",)),
    Lever("bf16 residual stream", ("precision.residual=bf16",), BF16),
    Lever("max-autotune", ("runtime.tune=max-autotune",)),
    Lever("fp8 by rows", ("precision.mode=fp8", "precision.fp8_scaling=rowwise")),
    Lever("micro-batches of 65,536 tokens against 8,192", (), rows_without=64),
    Lever("micro-batches of 131,072 tokens", (), rows=1024),
    Lever("the whole pass compiled", MODEL),
    Lever("all logits at once", ("memory.loss_chunk=1073741824",)),
    Lever("coordinate descent", ("runtime.tune=coordinate-descent",)),
    Lever(
        "CUDA graphs, micro-batches of 4,096 tokens",
        ("runtime.cuda_graphs=true",),
        MODEL,
        rows=32,
        rows_without=32,
    ),
    Lever("bf16 residual stream, ModernBERT", ("precision.residual=bf16",), BF16, model="modern"),
    Lever(
        "FlexAttention on documents",
        ("attention.kernel=flex",),
        model="modern",
        packing="documents",
    ),
)


def rows(lab: Lab) -> list[Row]:
    """The most wanted first."""
    short, _ = lab.scale.lengths
    levers = [
        Row(
            f"lever: {lever.name}",
            70 if MODEL[0] in (*lever.common, *lever.overrides) else 35,
            partial(with_and_without, lab, lever),
        )
        for lever in LEVERS
    ]
    return [
        Row(
            f"BERT {short} against Hugging Face",
            110,
            partial(against_loop, lab, "bert-base", "bert loop"),
        ),
        Row("BERT-base in 11 GiB", 45, partial(capped, lab, "bert-base")),
        *levers[:2],
        Row(
            f"ModernBERT {short} against Hugging Face",
            140,
            partial(against_loop, lab, "modern", "modernbert loop"),
        ),
        *levers[2:5],
        Row("BERT-large in 11 GiB", 70, partial(capped, lab, "bert-large")),
        *levers[5:],
    ]


def pair(lab: Lab, base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, interleaved; `speedup` is that of the second."""
    with InProcess(base) as worker:
        base_first = [warm_up(worker, 1), warm_up(worker, 1)]
        found = measure(worker, other, lab.scale.rounds, lab.scale.steps, InProcess)
    return {**found, "base_first_steps_seconds": base_first}


def against_loop(lab: Lab, model: str, peer: str) -> dict[str, Any]:
    """The same tokens, shapes, number format and optimizer; rows are full, so there is nothing to unpad."""
    length = lab.scale.lengths[0]
    return pair(lab, lab.spec(model, length, peer=peer), lab.spec(model, length))


def capped(lab: Lab, model: str) -> dict[str, Any]:
    """Ours in the memory of a small card, in a process of its own, which finds the micro-batch by trying."""
    length, sequences = lab.scale.lengths[0], lab.scale.capped
    compiled = "blocks" if lab.scale.compiled != "off" else "off"
    spec = lab.spec(
        model, length, f"runtime.compile='{compiled}'", "train.micro_batch=auto", rows=sequences
    )
    with Worker(spec | {"memory_gb": SMALL_CARD_GB}, shares_code=True) as worker:
        first_seconds = warm_up(worker, 1)
        found = worker.run(1, 2)
    tokens = sequences * length
    return {
        **worker.facts,
        "memory_gb": SMALL_CARD_GB,
        "tokens_per_step": tokens,
        "peak_bytes": found.peak_bytes,
        "tokens_per_second": tokens / statistics.median(found.seconds),
        "first_steps_seconds": first_seconds,
        "raw_seconds": found.seconds,
        "losses": found.losses,
    }


def with_and_without(lab: Lab, lever: Lever) -> dict[str, Any]:
    """As many tokens a step with the lever as without."""
    length = lab.scale.lengths[1 if lever.packing == "documents" else 0]
    blocks = "blocks" if lab.scale.compiled != "off" else "off"
    sequences = lab.scale.batch // length
    specs = []
    for rows, more in ((lever.rows_without, ()), (lever.rows, lever.overrides)):
        rows = min(rows or lab.scale.micro // length, sequences)
        texts = [
            t for t in (*lever.common, *more) if blocks != "off" or not t.startswith("runtime.")
        ]
        overrides = {text.split("=")[0]: text for text in (f"runtime.compile='{blocks}'", *texts)}
        if lab.device.type == "cpu" and "precision.mode=fp8" in more:
            overrides["emulated"] = "precision.emulate_fp8=true"
        micro_batches = sequences // rows
        found = lab.spec(
            lever.model,
            length,
            *overrides.values(),
            packing=lever.packing,
            rows=rows,
            micro_batches=micro_batches,
        )
        specs.append(found)
    return {"overrides": lever.overrides, "common": lever.common, **pair(lab, *specs)}
