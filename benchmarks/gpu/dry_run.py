"""The GPU's code on a machine that has none: every step traced on fake `cuda` tensors, the compiled ones to cubins.

    <environment with the CUDA build of torch>/bin/python benchmarks/gpu/dry_run.py --raw dry_run.jsonl

Each result is a line of the raw file; what stands there is not done again, so a run can be broken off. `--only` takes
the pieces whose JSON contains a text:

    steps      models x memory tricks x number formats, each in both packings by the attention kernels: the engine's own
               step (forward, backward, clipping, update); fine-tuning and `plan` too. A device mistake or a wrong
               signature fails, a number that the host reads within a pass is counted.
    compiled   the step of BERT-base, crammed BERT and ModernBERT through torch.compile (fullgraph) and inductor for
               sm_90 and sm_80: kernels, bytes, registers and spills; minutes each

With `--report` nothing is tried: tables of both, with a roofline, go into `--out` (a result file) and `--docs` (a
section of docs/tricks.md).

It needs torch's CUDA build with Triton (for the H200's versions: torch 2.11.0+cu130, Triton 3.6), gcc, and what the
suite needs. It says nothing about whether a number is right, nor how fast a kernel is: the roofline is a reckoning.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_card
from fake_card import CARDS

sys.path.append(str(Path(__file__).parents[2]))  # a checkout works without an installation

MODELS = ("bert-base", "crammed-bert", "modern")
TOKENS = 65536  # of a micro-batch


def pieces() -> Iterator[dict[str, Any]]:
    """What there is to try, the most wanted first."""
    from itertools import product

    from steps import MEMORY, MODES, OPTIMIZERS

    for mode, model in product(MODES, MODELS):
        yield {
            "part": "training",
            "model": model,
            "mode": mode,
            "memory": "plain",
            "optimizer": "adamw",
        }
        yield {"part": "finetuning", "model": model, "mode": mode}
    for mode, memory, model in product(MODES, list(MEMORY)[1:], MODELS):
        yield {
            "part": "training",
            "model": model,
            "mode": mode,
            "memory": memory,
            "optimizer": "adamw",
        }
    for optimizer in OPTIMIZERS:
        yield {
            "part": "training",
            "model": "crammed-bert",
            "mode": "bf16",
            "memory": "plain",
            "optimizer": optimizer,
        }
    for model in MODELS:
        yield {"part": "plan", "model": model, "mode": "bf16", "sheet": "H200"}
    for architecture, length, model in product(("sm_90", "sm_80"), (128, 512), MODELS):
        yield job(architecture, model, length)
    yield job("sm_90", "bert-base", 128, tokens=8192, name="micro-batches of 8,192 tokens")
    yield job("sm_90", "bert-base", 128, "precision=fp8", name="fp8")
    yield job("sm_90", "bert-base", 128, "precision.residual=fp32", name="fp32 residual")
    yield job(
        "sm_90",
        "modern",
        512,
        "attention.kernel=flex",
        "model.num_layers=4",
        packing="documents",
        name="flex",
    )
    yield job("sm_90", "modern", 512, "model.num_layers=4", packing="documents", name="documents")


def job(
    architecture: str,
    model: str,
    length: int,
    *more: str,
    tokens: int = TOKENS,
    packing: str = "rows",
    name: str = "",
) -> dict[str, Any]:
    """A compiled step."""
    overrides = [f"model={model}", "precision=bf16", "optim=adamw", *more]
    overrides = [
        text
        for text in overrides
        if text.split("=")[0] not in [m.split("=")[0] for m in more] or text in more
    ]
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
            return compiled_step(CARDS[piece["architecture"]], piece)
        except Exception as error:
            return {
                **piece,
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            }
    found: dict[str, Any] = {
        "training": steps.training,
        "finetuning": steps.finetuning,
        "plan": steps.planning,
    }[part](**rest)
    return {**piece, **found}


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
        help="the file whose section on the dry run is replaced: docs/tricks.md",
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
