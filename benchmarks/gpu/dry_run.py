"""The GPU's code on a machine that has none: every step traced on fake `cuda` tensors, the compiled ones to cubins.

    <environment with the CUDA build of torch>/bin/python benchmarks/gpu/dry_run.py --raw dry_run.jsonl

Each result is a line of the raw file; what stands there is not done again, so a run can be broken off. `--only` takes
the pieces whose JSON contains a text:

    steps      models x memory tricks x number formats, each in both packings by the attention kernels: the engine's own
               step (forward, backward, clipping, update); fine-tuning and `plan` too. A device mistake or a wrong
               signature fails, a number that the host reads within a pass is counted.
    compiled   the step of BERT-base, crammed BERT, ModernBERT and `model=best` through torch.compile (fullgraph) and
               inductor for sm_90, sm_80 and sm_75 (in fp16): kernels, bytes, registers and spills; minutes each. A
               kernel that computes angles fails: rotary tables are made once, not for each head of each layer.

With `--report` nothing is tried: tables of both, with a roofline, go into `--out` (a result file) and `--docs` (a
section of docs/results/tricks.md).

It needs torch's CUDA build with Triton (for the H200's versions: torch 2.11.0+cu130, Triton 3.6), gcc, and what the
suite needs. It says nothing about whether a number is right, nor how fast a kernel is: the roofline is a reckoning.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import fake_card
from fake_card import CARDS

sys.path.append(str(Path(__file__).parents[2]))  # a checkout works without an installation

ANGLES = re.compile(r"^triton_.*_(cos|sin|arange_.*pow)(_|$)")  # `pow` alone is a square
MODELS = ("bert-base", "crammed-bert", "modern", "best")
TOKENS = 65536  # of a micro-batch
COMPILED = {
    "precision": "bf16",
    "precision.residual": "bf16",
    "optim": "adamw",
    "runtime.compile": "model",
}
TURING = ("precision=fp16", "precision.residual=fp32")  # has no bf16


def pieces() -> Iterator[dict[str, Any]]:
    """Yield the steps to try, the most wanted first."""
    yield from uncompiled_pieces()
    yield from compiled_pieces()


def uncompiled_pieces() -> Iterator[dict[str, Any]]:
    """Whole steps, fine-tuning and `plan`."""
    from steps import MEMORY, MODES, OPTIMIZERS

    for mode, model in product(MODES, MODELS):
        yield training(model, mode)
        yield {"part": "finetuning", "model": model, "mode": mode}
    for mode, memory, model in product(MODES, list(MEMORY)[1:], MODELS):
        yield training(model, mode, memory)
    for optimizer in OPTIMIZERS:
        yield training("crammed-bert", "bf16", optimizer=optimizer)
    for model in MODELS:
        yield {"part": "plan", "model": model, "mode": "bf16", "sheet": "H200"}


def training(
    model: str, mode: str, memory: str = "plain", optimizer: str = "adamw"
) -> dict[str, Any]:
    """Steps that are not compiled."""
    piece = {"part": "training", "model": model, "mode": mode}
    return piece | {"memory": memory, "optimizer": optimizer}


def compiled_pieces() -> Iterator[dict[str, Any]]:
    """Compiled steps: each model on each card, then what single settings change."""
    for model in MODELS:
        yield job("sm_90", model, 128)
    for model in MODELS:
        yield job("sm_75", model, 128, *TURING, tokens=16384)
    for model in MODELS:
        yield job("sm_80", model, 128)
    for model in MODELS:
        yield job("sm_90", model, 512)
    for model in MODELS:
        yield job("sm_90", model, 128, "precision.residual=fp32", name="fp32 residual")
    for model in MODELS:
        yield job("sm_90", model, 128, "runtime.compile=blocks", name="blocks")
    yield job("sm_90", "bert-base", 128, tokens=8192, name="micro-batches of 8,192 tokens")
    yield job("sm_90", "bert-base", 128, "precision=fp8", name="fp8")
    short = "model.num_layers=4"
    yield job("sm_90", "modern", 512, short, packing="documents", name="documents")
    flex = "attention.kernel=flex"
    yield job("sm_90", "modern", 512, flex, short, packing="documents", name="flex")


def job(
    architecture: str,
    model: str,
    length: int,
    *changes: str,
    tokens: int = TOKENS,
    packing: str = "rows",
    name: str = "",
) -> dict[str, Any]:
    """A compiled step with `changes` to the settings of `COMPILED`."""
    settings = COMPILED | dict(change.split("=") for change in changes)
    overrides = [f"model={model}", *(f"{key}={value}" for key, value in settings.items())]
    return {
        "part": "compiled",
        "architecture": architecture,
        "model": model,
        "name": name,
        "overrides": overrides,
        "length": length,
        "rows": tokens // length,
        "targets": length // 4,
        "packing": packing,
    }


def try_piece(piece: dict[str, Any]) -> dict[str, Any]:
    """In a process that believes in a card: the result of one piece."""
    import steps

    part, rest = piece["part"], {k: v for k, v in piece.items() if k != "part"}
    if part == "compiled":
        from compiled import compiled_step

        try:
            return checked(compiled_step(CARDS[piece["architecture"]], piece))
        except Exception as error:
            return {
                **piece,
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            }
    outcome: dict[str, Any] = {
        "training": steps.training,
        "finetuning": steps.finetuning,
        "plan": steps.planning,
    }[part](**rest)
    return {**piece, **outcome}


def checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return a compiled step's row, with an `error` if it has a kernel that computes angles."""
    names = [kernel["name"] for kernel in row["kernels"]]
    computing = [name for name in names if ANGLES.search(name)]
    if not computing:
        return row
    return row | {"error": f"angles are computed in {len(computing)} kernels: {computing[0]}"}


def run(raw: Path, only: str | None) -> None:
    """Try what the raw file lacks: compiled steps in a process each, the others in one as long as it lives."""
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    left = [piece for piece in pieces() if not only or only in json.dumps(piece)]
    left = [p for p in left if not any(all(row.get(k) == v for k, v in p.items()) for row in done)]
    while left:
        together = (
            [p for p in left if p["part"] != "compiled"]
            if left[0]["part"] != "compiled"
            else left[:1]
        )
        child = subprocess.Popen(
            [sys.executable, __file__, "--pieces", json.dumps(together)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout
        results = (json.loads(line) for line in child.stdout if line.startswith('{"part"'))
        for piece in together:
            row = next(results, None) or {**piece, "error": "the process ended"}
            left.remove(piece)
            with raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            summary = row.get("error") or row.get("outcomes") or f"{len(row['kernels'])} kernels"
            print(
                " ".join(str(v) for v in piece.values() if isinstance(v, str)), summary, flush=True
            )
            if row.get("error") == "the process ended":
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--raw", type=Path, help="results, one a line; what is there is not done again"
    )
    parser.add_argument("--only", help="pieces whose JSON contains this text")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument("--out", type=Path, help="the result file to write")
    parser.add_argument(
        "--docs",
        type=Path,
        help="the file whose section on the dry run is replaced: docs/results/tricks.md",
    )
    parser.add_argument("--pieces", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        from report import write

        return write(args.raw, args.out, args.docs)
    if reason := fake_card.missing():
        raise SystemExit(f"dry_run: {reason}")
    if not args.pieces:
        return run(args.raw, args.only)
    card = CARDS[args.pieces[0].get("architecture", "sm_90")]
    fake_card.start_anew_with_stub(card)
    fake_card.pretend(card)
    logging.disable(logging.ERROR)  # fake tensors log each failure that is caught
    warnings.simplefilter("ignore")
    for piece in args.pieces:
        print(json.dumps(try_piece(piece)), flush=True)
    os._exit(0)  # threads of autograd do not end well without a device


if __name__ == "__main__":
    main()
