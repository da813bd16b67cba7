"""Do LAMB and LARS train with very large batches where AdamW does not? The same number of samples for every row.

    python benchmarks/large_batch.py --corpus <folder> --runs <folder> > large_batch_<device>_<date>.md

Real runs of `cramming pretrain` on a very small model: a budget in tokens, batches by accumulation of micro-batches,
warm-up over a fifth of the budget (as You et al. 2020, table 4, at 32k sequences). First each optimizer's rate at the
smallest batch, from a grid, with a quarter of the samples; then all batches with that rate carried over by
`optim.lr_scale`; then, at the largest batch, AdamW and LAMB with other powers of the batch than the rules', and the
best of these with other seeds. `found.jsonl` in `--runs` has the results so far, from which the same command goes on.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from cramming.bench.tables import versions
from cramming.data.corpus import Corpus
from cramming.environment import cpu_name
from cramming.record import load_record

ROOT = Path(__file__).resolve().parent.parent
LENGTH, MICRO_BATCH = 16, 512
BATCHES = [256, 2048, 16384, 65536]
BASE, LARGEST = BATCHES[0], BATCHES[-1]
SEQUENCES = 8 * LARGEST
SETTINGS = (
    "model=crammed-bert model.hidden_size=32 model.num_layers=2 model.num_heads=2 model.intermediate_size=64"
    f" train.sequence_length={LENGTH} train.validations=0 train.validation_tokens=65536 schedule=linear"
    " schedule.warmup=0.2 precision=fp32 runtime.compile=off division=open checkpoint.every_minutes=60"
).split()
GRIDS = {"adamw": [3e-3, 1e-2, 3e-2], "lamb": [1e-2, 3e-2, 1e-1], "lars": [3.0, 10.0, 30.0]}
RULES = {"sqrt": 0.5, "linear": 1.0}  # and the power of the batch that each is
OTHER_POWERS = [0.0, 0.25]
SEEDS = [1, 2]  # other than the one that has chosen the rates


def overrides(
    optimizer: str, batch: int, rate: float, rule: str | None, sequences: int, seed: int
) -> list[str]:
    """Return the overrides of one run. With a rule, `rate` is that of the smallest batch."""
    scale = f"{{rule: {rule}, base_batch: {BASE}}}" if rule else "null"
    return [
        f"optim={optimizer}",
        f"optim.lr={rate:.4g}",
        f"optim.lr_scale={scale}",
        f"train.batch_size={batch}",
        f"train.micro_batch={min(batch, MICRO_BATCH)}",
        f"budget.tokens={sequences * LENGTH}",
        f"seed={seed}",
    ]


class Runs:
    """On a corpus, `jobs` at a time with a thread each; none is done twice, and with no jobs none is done."""

    def __init__(self, corpus: Path, folder: Path, jobs: int) -> None:
        self.folder, self.jobs, self.ledger, self.lock = (
            folder.resolve(),
            jobs,
            folder / "found.jsonl",
            Lock(),
        )
        vocab_size = Corpus.open(corpus).vocab_size
        self.common = [
            *SETTINGS,
            f"data.corpus={corpus.resolve()}",
            f"tokenizer.vocab_size={vocab_size}",
        ]
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.ledger.read_text(encoding="utf-8").splitlines() if self.ledger.exists() else []
        self.done = {" ".join(row["overrides"]): row for row in map(json.loads, lines)}

    def loss(
        self,
        optimizer: str,
        batch: int,
        rate: float,
        rule: str | None = None,
        sequences: int = SEQUENCES,
        seed: int = 0,
    ) -> dict[str, Any]:
        """`loss` (None: diverged), `steps` and `peak` of the learning rate; nothing for a run that is not done."""
        settings = overrides(optimizer, batch, rate, rule, sequences, seed)
        if " ".join(settings) not in self.done and self.jobs:
            row = self._train(f"{optimizer}-{batch}-{rate:.4g}-{rule}-{sequences}-{seed}", settings)
            with self.lock, self.ledger.open("a", encoding="utf-8") as ledger:
                ledger.write(json.dumps(row) + "\n")
                self.done[" ".join(settings)] = row
        return self.done.get(" ".join(settings), {})

    def _train(self, name: str, settings: list[str]) -> dict[str, Any]:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        place = ["--runs", str(self.folder), "--name", name, "--device", "cpu"]
        command = [sys.executable, "-m", "cramming", "pretrain", *self.common, *settings, *place]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        diverged = "not finite" in done.stderr
        assert done.returncode == 0 or diverged, f"{name}: {done.stderr[-2000:]}"
        pretrain = load_record(folder)["pretrain"]
        loss = None if diverged else pretrain["validation"]["loss"]
        print(f"{name}: {loss}", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
        return {
            "overrides": settings,
            "steps": pretrain.get("steps"),
            "peak": pretrain.get("peak_learning_rate"),
            "loss": loss,
        }

    def all(self, cases: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        """`loss` of each."""
        with ThreadPoolExecutor(max(1, self.jobs)) as pool:
            return list(pool.map(lambda case: self.loss(*case), cases))


def entropy(corpus: Corpus) -> float:
    """Nats of a held-out token by the frequencies of the training text: what a model without context reaches."""
    shares = []
    for split in ("train", "validation"):
        stream = corpus.stream(split)
        ids_N = stream.gather(np.zeros(1, np.int64), stream.num_tokens).reshape(-1)
        counts_V = np.bincount(ids_N, minlength=corpus.vocab_size) + 1e-9
        shares.append(counts_V / counts_V.sum())
    return float(-(shares[1] * np.log(shares[0])).sum())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(
        "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])
        + "\n",
        flush=True,
    )


def cell(row: dict[str, Any]) -> str:
    """The loss, and the peak of the learning rate."""
    if not row:
        return "not run"
    return "diverged" if row["loss"] is None else f"{row['loss']:.3f} ({row['peak']:.3g})"


def order(row: dict[str, Any]) -> float:
    return row["loss"] if row.get("loss") is not None else math.inf


def tune(runs: Runs) -> dict[str, float]:
    """Each optimizer's best rate of its grid at the smallest batch, with a quarter of the samples."""
    cases = [
        (optimizer, BASE, rate, None, SEQUENCES // 4)
        for optimizer, grid in GRIDS.items()
        for rate in grid
    ]
    rows_by_case = dict(zip(cases, runs.all(cases)))
    print(f"Rates at {BASE} sequences, {SEQUENCES // 4:,} samples: validation loss (rate)\n")
    table(
        ["optimizer", "", "", ""],
        [[o, *(cell(rows_by_case[case]) for case in cases if case[0] == o)] for o in GRIDS],
    )
    return {
        o: min(
            (case for case in cases if case[0] == o), key=lambda case: order(rows_by_case[case])
        )[2]
        for o in GRIDS
    }


def by_rule(runs: Runs, rates: dict[str, float]) -> None:
    """All batches, optimizers and rules."""
    columns = [(optimizer, rule) for optimizer in GRIDS for rule in RULES]
    cases = [
        (o, b, rates[o], rule) for b in BATCHES for o, rule in columns if b > BASE or rule == "sqrt"
    ]
    rows_by_case = dict(zip(cases, runs.all(cases)))
    print(
        f"The same {SEQUENCES:,} samples, rates carried over from {BASE}: validation loss (peak of the rate)\n"
    )
    rows = []
    for batch in BATCHES:
        cells = [
            rows_by_case[o, batch, rates[o], rule if batch > BASE else "sqrt"]
            for o, rule in columns
        ]
        rows.append([str(batch), str(SEQUENCES // batch), *map(cell, cells)])
    table(["batch", "steps", *(f"{optimizer}, {rule}" for optimizer, rule in columns)], rows)


def by_power(runs: Runs, rates: dict[str, float]) -> None:
    """AdamW and LAMB at the largest batch: rates by powers of the batch, and other seeds of the best."""
    names, ratio = ("adamw", "lamb"), LARGEST / BASE
    runs.all([(o, LARGEST, rates[o] * ratio**power) for o in names for power in OTHER_POWERS])
    powers = sorted([*OTHER_POWERS, *RULES.values()])
    rule_of = {power: rule for rule, power in RULES.items()}
    rows, best = [], {}
    for o in names:
        cases = [
            (o, LARGEST, *((rates[o], rule_of[p]) if p in rule_of else (rates[o] * ratio**p, None)))
            for p in powers
        ]
        measured = runs.all(cases)
        rows.append([o, *map(cell, measured)])
        best[o] = min(zip(cases, measured), key=lambda each: order(each[1]))[0]
    print(
        f"{LARGEST} sequences, {SEQUENCES // LARGEST} steps, the rate carried over by a power of the batch\n"
    )
    table(["optimizer", *(f"{power:g}" for power in powers)], rows)
    chosen = [
        (*best[o], *([None] if len(best[o]) == 3 else []), SEQUENCES, seed)
        for o in names
        for seed in SEEDS
    ]
    measured = runs.all(chosen)
    print(f"The best of each row, seeds {SEEDS}:")
    for place, o in enumerate(names):
        print(
            f"- {o}: {', '.join(map(cell, measured[place * len(SEEDS) : (place + 1) * len(SEEDS)]))}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="made by `cramming prepare`")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="0: only print what is there")
    arguments = parser.parse_args()
    corpus = Corpus.open(arguments.corpus)
    runs = Runs(arguments.corpus, arguments.runs, arguments.jobs)
    print(
        f"{cpu_name()}, a thread a run, torch {versions()['torch']}; settings of all runs: {' '.join(SETTINGS)}\n"
    )
    print(
        f"{corpus.vocab_size} entries; by word frequencies alone {entropy(corpus):.3f} nats.\n",
        flush=True,
    )
    rates = tune(runs)
    by_rule(runs, rates)
    by_power(runs, rates)
    print(f"\nRaw:\n\n```\n{runs.ledger.read_text(encoding='utf-8')}```")


if __name__ == "__main__":
    main()
