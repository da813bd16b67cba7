"""Fine-tuning on GLUE against a `Trainer` loop with dynamic padding, as `run_glue.py` does it: speed and scores.

Same encoder, task, examples, epochs, batch size, learning rate and its course, dropout, AdamW and number format; the
same number of cores. The other side is `transformers.Trainer` with `DataCollatorWithPadding` in one process that uses
all cores, tokenized beforehand, no checkpoints, no evaluation but the last; ours is what `cramming glue` runs: a
process of one thread per core, or on a GPU one per seed. Each measurement is a process of its own, from its start to
its last prediction, imports and tokenizing included. Sides alternate over groups of seeds, and who begins alternates
too.

    python benchmarks/glue.py --model <Hugging Face BERT folder> --data <GLUE folder> --out benchmarks/results/<name>.md
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "gpu"))
from run import end_with_parent

TASKS = ("rte", "mrpc", "cola")
SIDES = ("trainer", "cramming")


def read(arguments: argparse.Namespace) -> dict[str, Any]:
    """The tasks' data without test sets, cut to `--examples`."""
    from cramming.data.task_files import GLUE as TABLE
    from eval.tasks.datasets import TaskData
    from eval.tasks.locate import read_task

    def cut(data: TaskData) -> TaskData:
        train, count = data.train, arguments.examples or len(data.train)
        labels = None if train.labels is None else train.labels[:count]
        shortened = replace(
            train, texts=tuple(column[:count] for column in train.texts), labels=labels
        )
        return replace(data, train=shortened, blind=())

    return {name: cut(read_task(arguments.data, TABLE[name])) for name in arguments.tasks}


def hyperparameters(arguments: argparse.Namespace) -> Any:
    from eval.finetune.config import Hyperparameters

    return Hyperparameters(
        epochs=arguments.epochs,
        batch_size=16,
        learning_rate=arguments.rate,
        schedule="cosine",
        warmup=0.1,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.98,
        eps=1e-6,
        max_grad_norm=None,
        dropout=0.1,
        attention_dropout=0.0,
        pooling="cls",
        pooler=True,
        max_length=128,
    )


def run_cramming(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from eval.finetune.encode import encode_task, load_encoder
    from eval.finetune.loop import TaskRun
    from eval.finetune.models import open_model
    from eval.finetune.workers import run_all

    source, hyper, data = open_model(arguments.model), hyperparameters(arguments), read(arguments)
    encode = load_encoder(source.folder, source.is_native, hyper.max_length, source.vocab_size)
    encoded = {name: encode_task(task_data, encode) for name, task_data in data.items()}
    how = (source, hyper, arguments.precision, arguments.device)
    runs = [
        TaskRun(data[n].task, seed, "pretrained", encoded[n], *how)
        for n in data
        for seed in arguments.seeds
    ]
    runs.sort(key=lambda run: -len(run.data.train.ids_T))
    workers = len(arguments.seeds) if arguments.device == "cuda" else arguments.cores
    outcomes = run_all(runs, min(workers, len(runs)), lambda count: None)
    return [
        result(data[r.task.name], r.seed, p.scored[r.task.scored[0].source.entry], p.seconds)
        for r, p in outcomes
    ]


def run_trainer(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(arguments.cores)
    tokenizer, data = AutoTokenizer.from_pretrained(arguments.model), read(arguments)
    rows = []
    for task_data in data.values():
        train, dev = (
            tokenized(tokenizer, split) for split in (task_data.train, task_data.scored[0])
        )
        for seed in arguments.seeds:
            started = time.perf_counter()
            predictions = train_and_predict(arguments, tokenizer, task_data.task, train, dev, seed)
            rows.append(result(task_data, seed, predictions, time.perf_counter() - started))
    return rows


def tokenized(tokenizer: Any, split: Any) -> Any:
    encoded = tokenizer(*split.texts, truncation=True, max_length=128, padding=False)
    columns = {**encoded, "labels": split.labels.tolist()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def train_and_predict(
    arguments: argparse.Namespace, tokenizer: Any, task: Any, train: Any, dev: Any, seed: int
) -> Any:
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    hyper = hyperparameters(arguments)
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # as eval/finetune/workers.py does, for both sides alike
    set_seed(seed)
    rates = {
        "hidden_dropout_prob": hyper.dropout,
        "attention_probs_dropout_prob": hyper.attention_dropout,
    }
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model, num_labels=task.outputs, **rates
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=hyper.epochs,
            per_device_train_batch_size=hyper.batch_size,
            per_device_eval_batch_size=hyper.batch_size,
            learning_rate=hyper.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=hyper.warmup,
            weight_decay=hyper.weight_decay,
            adam_beta1=hyper.beta1,
            adam_beta2=hyper.beta2,
            adam_epsilon=hyper.eps,
            max_grad_norm=0.0,
            seed=seed,
            use_cpu=arguments.device == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            bf16=arguments.precision == "bf16",
            dataloader_pin_memory=arguments.device == "cuda",
        )
        trainer = Trainer(model, settings, DataCollatorWithPadding(tokenizer), train_dataset=train)
        trainer.train()
        logits = trainer.predict(dev).predictions
    return logits.squeeze(-1) if task.regression else logits.argmax(-1)


def result(data: Any, seed: int, predictions: Any, seconds: float) -> dict[str, Any]:
    import numpy as np

    from eval.tasks.metrics import score

    task = data.task
    values = score(
        (task.main_metric,), np.asarray(predictions, np.float64), data.scored[0].labels
    ).values
    return {
        "task": task.name,
        "seed": seed,
        "seconds": round(seconds, 2),
        "score": 100 * values[task.main_metric],
    }


def measure(side: str, arguments: argparse.Namespace, seeds: list[int]) -> dict[str, Any]:
    """One process of one side, timed from outside. RuntimeError with the end of what it said if it fails."""
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--model",
        str(arguments.model),
        "--data",
        str(arguments.data),
    ]
    command += [
        "--epochs",
        str(arguments.epochs),
        "--rate",
        str(arguments.rate),
        "--cores",
        str(arguments.cores),
    ]
    command += ["--precision", arguments.precision, "--device", arguments.device]
    command += ["--tasks", *arguments.tasks, "--seeds", *map(str, seeds)]
    command += ["--examples", str(arguments.examples)] if arguments.examples else []
    threads = {
        "OMP_NUM_THREADS": str(arguments.cores if side == "trainer" else 1),
        "HF_HUB_OFFLINE": "1",
    }
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    begun = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": path, **threads}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, preexec_fn=end_with_parent
    )
    if done.returncode:
        raise RuntimeError(f"{side} ended with code {done.returncode}: {done.stderr[-1500:]}")
    runs = json.loads(done.stdout.splitlines()[-1])
    return {
        "side": side,
        "seeds": seeds,
        "seconds": round(time.perf_counter() - begun, 2),
        "runs": runs,
    }


def report(
    arguments: argparse.Namespace, measurements: list[dict[str, Any]], examples: dict[str, int]
) -> str:
    import torch
    import transformers

    from cramming.environment import cpu_name
    from eval.finetune.models import open_model

    encoder = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    shape = f"{encoder['num_hidden_layers']} layers, {encoder['hidden_size']} wide, {encoder['vocab_size']} word pieces"
    sizes = ", ".join(f"{name} {count}" for name, count in examples.items())
    lines = [
        "# Fine-tuning on GLUE beside Trainer",
        "",
        f"Command: `python benchmarks/glue.py --model <folder> --data <folder> --epochs {arguments.epochs}"
        f" --rate {arguments.rate} --cores {arguments.cores} --precision {arguments.precision} --tasks"
        f" {' '.join(arguments.tasks)} --seeds {' '.join(map(str, arguments.seeds))}"
        f"{f' --examples {arguments.examples}' if arguments.examples else ''}`",
        f"Encoder: {encoder['model_type']}, {shape}; SHA-256 of its weights {open_model(arguments.model).sha256[:12]}.",
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {cpu_name()} ({torch.backends.cpu.get_cpu_capability()}); {arguments.precision}, batches of 16, training"
        f" examples: {sizes}. Load average at the end: {os.getloadavg()[0]:.1f}.",
        "",
        "| side | s in all | examples/s | ratio | "
        + " | ".join(f"{t}: score, median (all)" for t in examples)
        + " |",
        "|---|---|---|---|" + "---|" * len(examples),
    ]
    work = arguments.epochs * sum(examples.values()) * len(arguments.seeds)
    seconds = {side: sum(f["seconds"] for f in measurements if f["side"] == side) for side in SIDES}
    for side in SIDES:
        cells = [side, f"{seconds[side]:.0f}", f"{work / seconds[side]:.1f}"]
        cells.append(f"{seconds['trainer'] / seconds[side]:.2f}x")
        for task in examples:
            runs = [
                r for f in measurements if f["side"] == side for r in f["runs"] if r["task"] == task
            ]
            scores = sorted(r["score"] for r in runs)
            cells.append(
                f"{statistics.median(scores):.1f} ({', '.join(f'{s:.1f}' for s in scores)})"
            )
        lines.append(f"| {' | '.join(cells)} |")
    pairs = (
        {f["side"]: f["seconds"] for f in measurements[i : i + 2]}
        for i in range(0, len(measurements), 2)
    )
    ratios = [f"{pair['trainer'] / pair['cramming']:.2f}" for pair in pairs]
    lines += [
        "",
        f"Ratio of each pair: {', '.join(ratios)}.",
        "",
        "Raw:",
        "```json",
        json.dumps(measurements),
        "```",
        "",
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a BERT that both sides load"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the official RTE/, MRPC/, CoLA/"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=4e-5)
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of matrix products, both sides",
    )
    parser.add_argument(
        "--examples", type=int, help="take this many training examples of each task (a try-out)"
    )
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = parser().parse_args()
    if arguments.side:
        runs = {"trainer": run_trainer, "cramming": run_cramming}[arguments.side](arguments)
        print(json.dumps(runs))
        return
    assert arguments.out, "--out"
    measurements: list[dict[str, Any]] = []
    groups = [
        arguments.seeds[i : i + arguments.cores]
        for i in range(0, len(arguments.seeds), arguments.cores)
    ]
    for index, seeds in enumerate(groups):
        for side in SIDES if index % 2 == 0 else SIDES[::-1]:
            measurements.append(measure(side, arguments, seeds))
            print(measurements[-1], file=sys.stderr, flush=True)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    examples = {name: len(data.train) for name, data in read(arguments).items()}
    arguments.out.write_text(report(arguments, measurements, examples), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
