"""Stage 3: a run that is killed and resumed, fine-tuning against `Trainer`, and every trick's speed and gate."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cramming.journal import processes_of, read_journal
from in_process import InProcess
from lab import Lab, Row, settings
from run import end_with_parent

from cramming.bench import tricks
from cramming.bench.main import Bench, BenchConfig, chosen
from cramming.bench.tricks import Trick
from cramming.config import build
from cramming.precision import DTYPES
from cramming.record import load_metrics, load_record

NAME, SEEDS = "killed-and-resumed", [0, 1, 2]
# What is measured first; the others follow in the table's order.
FIRST = (
    tricks.BEST,
    "bf16",
    "bf16 residual stream",
    "attention varlen",
    "fp8",
    "last layer at targets",
    "tf32",
    "CUDA graphs",
    "compile model",
    "checkpoint all",
    "max-autotune",
)
COMPILING = (
    "compile",
    "budget",
    "stack",
    "autotune",
    "descent",
    "graphs",
    "flex",
    "AdamW",
)  # in names of slow rows
KEPT = (
    "status",
    "steps",
    "tokens",
    "exaflops",
    "train_loss",
    "validation",
    "micro_batch",
    "energy_kwh",
    "energy_source",
)


def rows(lab: Lab) -> list[Row]:
    """The most wanted first."""
    every = {
        trick.name: trick
        for trick in chosen(None, lab.device)
        if trick.device in ("any", lab.device.type)
    }
    names = [
        *(name for name in FIRST if name in every),
        *(name for name in every if name not in FIRST),
    ]
    return [
        Row("run killed and resumed", 275, partial(killed_and_resumed, lab)),
        Row("fine-tuning against Trainer", 160, partial(fine_tuned, lab)),
        *(
            Row(
                f"trick: {name}",
                50 if any(x in name for x in COMPILING) else 10,
                partial(trick_row, lab, every[name]),
            )
            for name in names
        ),
    ]


def killed_and_resumed(lab: Lab) -> dict[str, Any]:
    """A real run on the bundle's corpus: kill -9 behind a checkpoint, then `resume=true` to the end of its budget."""
    assert lab.bundle, "--bundle: the corpus is in it"
    scale, runs = lab.scale, lab.work / "runs"
    rows, length = scale.micro // scale.lengths[0], scale.lengths[0]
    overrides = [
        text
        for text in lab.overrides("bert-base", length)
        if not text.startswith("model.vocab_size")
    ]
    command = [
        sys.executable,
        "-m",
        "cramming",
        "pretrain",
        *overrides,
        *scale.budget,
        f"name={NAME}",
        f"runs={runs}",
        f"data.corpus={lab.bundle / 'corpus'}",
        f"gates={lab.work / 'gates.json'}",
        f"device={lab.device.type}",
        f"train.batch_size={scale.batch // length}",
        f"train.micro_batch={rows}",
        "schedule=linear",
        "optim.lr=0.0005",
        "train.validations=2",
        f"train.validation_tokens={2 * scale.micro}",
        "division=open",
    ]
    folder = runs / NAME
    if not folder.exists():
        with (lab.work / "pretrain.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=lab.work, stdout=log, stderr=log, preexec_fn=end_with_parent
            )
            began = time.time()
            while process.poll() is None and (
                time.time() < began + scale.kill_after or not checkpoints(folder)
            ):
                time.sleep(0.2)
            process.send_signal(signal.SIGKILL)
            if process.wait() != -signal.SIGKILL:
                raise RuntimeError(
                    f"it ended before it was killed: {(lab.work / 'pretrain.log').read_text()[-1500:]}"
                )
    done = subprocess.run(
        [*command, "resume=true"],
        cwd=lab.work,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        raise RuntimeError(f"resume ended with code {done.returncode}: {done.stderr[-1500:]}")
    record, metrics = load_record(folder)["pretrain"], load_metrics(folder)
    losses = [(row["step"], row["loss"]) for row in metrics if "loss" in row]
    rates = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    return {
        "record": {key: record.get(key) for key in KEPT},
        "losses": losses[:: max(1, len(losses) // 40)],
        "tokens_per_second": rates[-1] if rates else None,
        "stderr": done.stderr[-800:],
        "processes": processes_of(read_journal(folder / "budget.jsonl")),
    }


def checkpoints(folder: Path) -> list[Path]:
    return list(folder.rglob("*.pt"))


def fine_tuned(lab: Lab) -> dict[str, Any]:
    """RTE and MRPC from the run above, three seeds a side: ours beside each other, Trainer's one after the other."""
    import glue

    assert lab.bundle, "--bundle: the tasks are in it"
    model = lab.left_by("run killed and resumed", "runs", NAME, "final")
    options = [
        "--model",
        str(model),
        "--data",
        str(lab.bundle / "glue"),
        "--tasks",
        "rte",
        "mrpc",
        "--epochs",
        str(lab.scale.epochs),
        "--device",
        lab.device.type,
        "--precision",
        "bf16" if lab.scale.mode == "bf16" else "fp32",
    ]
    options += ["--examples", str(lab.scale.examples)] if lab.scale.examples else []
    arguments = glue.parser().parse_args(options)
    sizes = {name: len(data.train) for name, data in glue.read(arguments).items()}
    found = {}
    for side in ("cramming", "trainer"):
        try:
            row = glue.measure(side, arguments, SEEDS)
        except RuntimeError as error:  # the line keeps what was measured before
            raise RuntimeError(f"{json.dumps(found)}\n{error}") from None
        examples = sum(sizes.values()) * len(SEEDS) * lab.scale.epochs
        inside = sum(run["seconds"] for run in row["runs"])
        found[side] = {
            **row,
            "examples": examples,
            "examples_per_second": examples / row["seconds"],
            "examples_per_second_of_training": examples / inside,
        }
    ratio = found["cramming"]["examples_per_second"] / found["trainer"]["examples_per_second"]
    return {**found, "ratio": ratio, "training_examples": sizes, "epochs": lab.scale.epochs}


def trick_row(lab: Lab, trick: Trick) -> dict[str, Any]:
    """As `cramming bench` has it, but in this process. The reference is built, and its curve run, once."""
    if "tricks" not in lab.shared:
        scale = lab.scale
        found = settings(
            *lab.overrides("bert-base", scale.lengths[0]),
            f"train.batch_size={scale.trick_batch}",
            f"train.micro_batch={scale.trick_batch}",
            f"bench.rounds={scale.rounds}",
            "bench.steps=2",
            f"bench.vocab_size={scale.vocabulary}",
            *scale.gate,
        )
        config = build(BenchConfig, found["bench"], "bench")
        lab.shared["tricks"] = Bench(found, config, lab.device, ExitStack(), InProcess)
        if lab.device.type == "cpu":  # a try-out; of 16-bit products one would take minutes there
            lab.shared["tricks"].ceilings = dict.fromkeys(product(DTYPES, (False, True)), 1e12)
    bench = lab.shared["tricks"]
    row, _ = bench.judged_row(trick)
    return {"trick": row, "floors": [asdict(floor) for floor in bench.curves.floors.values()]}
