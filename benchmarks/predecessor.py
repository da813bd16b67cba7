"""Training throughput against the predecessor (github.com/JonasGeiping/cramming), in one interleaved run.

Its crammed BERT, trained by its own engine (compiled, as its default is) on random tokens, beside our crammed BERT of
the same shapes, masked share, optimizer constants and number format: fp32, or with `--precision bf16` bf16 by autocast,
which it has for GPUs alone, so that its engine is told here that a CPU can do it too.
It needs an environment of its own:

    python -m venv old && old/bin/pip install "torch>=2.11,<2.14" transformers==4.57.6 datasets==5.0.1 hydra-core \
        evaluate pynvml psutil zstandard einops
    git clone https://github.com/JonasGeiping/cramming checkout
    python benchmarks/predecessor.py --python old/bin/python --checkout checkout --out <file>.md

Its data loader is left out, in its favour: batches come ready from memory there, and are masked on the clock here.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES = {"256x4": (256, 4, 4, 32), "768x16": (768, 16, 12, 16)}  # hidden size, layers, heads, sequences per step
LENGTH, VOCABULARY = 128, 32768


def serve() -> None:
    """The predecessor's side, run by its own Python in its checkout: the worker protocol of cramming.bench.worker."""
    import time

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(sys.stdin.readline())
    sys.path.insert(0, spec["checkout"])
    import torch
    from hydra import compose, initialize_config_dir

    import cramming

    rows, device = spec["rows"], torch.device(spec["device"])
    with initialize_config_dir(str(Path(spec["checkout"], "cramming", "config").absolute()), version_base="1.1"):
        cfg = compose("cfg_pretrain", [
            "arch=crammed-bert", "train=bert-o4", f"arch.hidden_size={spec['hidden']}", "train.batch_size_ramp=0",
            f"arch.num_transformer_layers={spec['layers']}", f"arch.attention.num_attention_heads={spec['heads']}",
            f"arch.intermed_size={4 * spec['hidden']}", f"train.batch_size={rows}", f"impl.microbatch_size={rows}",
        ])  # fmt: skip
    model = cramming.construct_model(cfg.arch, VOCABULARY)

    class Tokenizer:
        model_max_length = LENGTH

    setup = {"device": device, "dtype": torch.float}
    engine, *_ = cramming.load_backend(model, None, Tokenizer(), cfg.train, cfg.impl, 0.0, setup=setup)
    engine.train(cfg.train.pretrain_in_train_mode)
    generator = torch.Generator().manual_seed(0)
    targets = int(cfg.train.objective.mlm_probability * rows * LENGTH)
    bf16 = spec["precision"] == "bf16"
    if bf16:  # its own engine's context, which it builds for CUDA only
        engine.amp_settings = {"device_type": device.type, "enabled": True, "dtype": torch.bfloat16}
    print(json.dumps({"flops_per_token": 0.0, "precision": spec["precision"]}), file=answers, flush=True)
    for line in sys.stdin:
        command, seconds, losses = json.loads(line), [], []
        for _ in range(command["count"]):
            ids = torch.randint(5, VOCABULARY, (rows, LENGTH), generator=generator)
            labels = torch.full((rows * LENGTH,), -100)
            places = torch.randperm(rows * LENGTH, generator=generator)[:targets]
            labels[places] = ids.view(-1)[places]
            batch = {
                "input_ids": ids.view(-1).index_fill(0, places, 4).view(rows, LENGTH),
                "labels": labels.view(rows, -1),
            }
            began = time.perf_counter()
            losses.append(float(engine.step(engine.to_device(batch))))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        print(json.dumps({"seconds": seconds, "losses": losses, "peak_bytes": 0}), file=answers, flush=True)


def specs_of(shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The predecessor, then our crammed BERT of the same shapes in the same number format, eager and compiled."""
    from cramming.overrides import compose

    hidden, layers, heads, rows = SHAPES[shape]
    common = {"device": args.device, "vocab_size": VOCABULARY}
    specs = [{
        **common, "name": "predecessor", "checkout": str(args.checkout.absolute()), "precision": args.precision,
        "hidden": hidden, "layers": layers, "heads": heads, "rows": rows,
    }]  # fmt: skip
    for name, compiled in (("ours, eager", "off"), ("ours, compiled", "model")):
        settings = compose([
            "model=crammed-bert", "optim=adamw", f"precision={args.precision}", f"model.hidden_size={hidden}",
            f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.intermediate_size={2 * hidden}",
            f"train.batch_size={rows}", f"train.micro_batch={rows}", f"train.sequence_length={LENGTH}",
            f"runtime.compile='{compiled}'",
        ])  # fmt: skip
        specs.append({**common, "name": name, "settings": settings})
    return specs


def compare(shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The predecessor and both of our modes on one shape."""
    from cramming.bench.main import measure
    from cramming.bench.worker import Worker, warm_up

    old_spec, *ours = specs_of(shape, args)
    results = []
    with Worker(old_spec, [str(args.python), __file__, "--serve"]) as old:
        warm_up(old)
        for spec in ours:
            row = measure(old, spec, args.rounds, args.steps)
            row |= {"shape": shape, "tokens_per_step": old_spec["rows"] * LENGTH, "peer": "predecessor"}
            results.append({**row, "name": spec["name"]})
            print({k: v for k, v in results[-1].items() if k != "raw_seconds"}, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path)
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    from peers import write

    rows = [row for shape in args.shapes for row in compare(shape, args)]
    if args.out:
        git = ["git", "-C", str(args.checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        how = f"--rounds {args.rounds} --steps {args.steps} --precision {args.precision}"
        title, command = "Training throughput against the predecessor", f"python benchmarks/predecessor.py {how}"
        write(args.out, title, command, rows, predecessor=commit)


if __name__ == "__main__":
    main()
