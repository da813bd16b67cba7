"""Training throughput against Hugging Face's `Trainer` with `BertForMaskedLM`, in one interleaved run.

Both sides train the same architecture (BERT, dropout 0) from random weights on the same random tokens, with the same
vocabulary, sequence length, tokens per step, number format and optimizer (fused AdamW, clipping at 0.5). The peer is
used as its documentation says: a dataset of token lists, `DataCollatorForLanguageModeling`, `Trainer.train()`. Rounds
alternate between the sides; the first step of each round (warm-up) is left out; the ratio is that of the medians.

    python benchmarks/throughput.py --out benchmarks/results/throughput_cpu_<date>.md

Needs the extra `bench` (accelerate).
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from cramming.data.batches import Batch
from cramming.data.masking import IGNORE, Masker, ObjectiveConfig
from cramming.device import select
from cramming.engine import Engine
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.optim import OptimConfig, build_optimizer
from cramming.parallel.mesh import Mesh, ParallelConfig
from cramming.precision import Precision, PrecisionConfig
from cramming.record import cpu_name

VOCABULARY, LENGTH, RATE, CLIP = 32768, 128, 0.25, 0.5
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SHAPES = {"256x4": (256, 4, 4, 32), "768x12": (768, 12, 12, 16)}  # hidden size, layers, heads, sequences per step
OPTIM = OptimConfig("adamw", lr=1e-4, betas=(0.9, 0.98), eps=1e-12, weight_decay=0.01, clip=CLIP)


class StepTimes(TrainerCallback):
    """Notes when each step of the Trainer ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


class Peer:
    """Trainer + BertForMaskedLM. The weights go on through the rounds; the optimizer is new in each."""

    def __init__(self, hidden: int, layers: int, heads: int, rows: int, dtype: str, device: torch.device):
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model, self.rows, self.dtype, self.device = BertForMaskedLM(config), rows, dtype, device
        self.tokenizer = word_tokenizer()

    def step_seconds(self, steps: int, seed: int) -> list[float]:
        times = StepTimes()
        ids = random_rows((steps + 1) * self.rows, seed)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=self.rows, max_steps=steps + 1,
                optim="adamw_torch_fused", max_grad_norm=CLIP, learning_rate=OPTIM.lr, bf16=self.dtype == "bf16",
                use_cpu=self.device.type == "cpu", report_to="none", save_strategy="no", logging_strategy="no",
                disable_tqdm=True,
            )  # fmt: skip
            collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=RATE)
            dataset = [{"input_ids": row} for row in ids.tolist()]
            Trainer(self.model, arguments, collator, dataset, callbacks=[times]).train()
        return list(np.diff(times.ends))


class Ours:
    """`Engine.step` on batches masked by `Masker`, as `cramming pretrain` does."""

    def __init__(self, hidden: int, layers: int, heads: int, rows: int, dtype: str, device: torch.device):
        config = ModelConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_layers=layers, num_heads=heads, intermediate_size=4 * hidden
        )
        model = MaskedLM(config).to(device)
        precision = Precision(PrecisionConfig(mode=dtype, tf32=True), device)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, OPTIM)
        self.rows = rows
        self.engine = Engine(model, optimizer, precision, CLIP, Mesh(ParallelConfig("auto"), device), device)
        self.masker = Masker(ObjectiveConfig("mlm", RATE, 0.8, 0.1), VOCABULARY, 4, (0, 1, 2, 3, 4), seed=0)

    def step_seconds(self, steps: int, seed: int) -> list[float]:
        ids = random_rows((steps + 1) * self.rows, seed)
        ends = []
        for first in range(0, len(ids), self.rows):
            stats = self.engine.step([self._batch(ids[first : first + self.rows], first)], OPTIM.lr)
            assert stats is not None and not stats.skipped
            ends.append(time.perf_counter())
        return list(np.diff(ends))

    def _batch(self, ids_NL: np.ndarray, first: int) -> Batch:
        rows, length = ids_NL.shape
        masked = self.masker(ids_NL, np.arange(first, first + rows))
        bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
        return Batch(
            torch.from_numpy(masked.ids_NL.reshape(-1)), torch.arange(length).repeat(rows),
            Packing(bounds, length, length), torch.from_numpy(masked.target_positions_M),
            torch.from_numpy(masked.target_ids_M), int((masked.target_ids_M != IGNORE).sum()),
        )  # fmt: skip


def word_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {token: i for i, token in enumerate([*SPECIAL.values(), *(f"w{i}" for i in range(5, VOCABULARY))])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), **SPECIAL)


def random_rows(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, VOCABULARY, (rows, LENGTH))


SIDES: dict[str, type[Peer] | type[Ours]] = {"trainer": Peer, "ours": Ours}


def compare(shape: str, dtype: str, rounds: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Interleaved rounds of both sides; tokens per second per step, medians and their ratio."""
    hidden, layers, heads, rows = SHAPES[shape]
    sides = {name: side(hidden, layers, heads, rows, dtype, device) for name, side in SIDES.items()}
    raw: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name, side in sides.items():
            raw[name] += [rows * LENGTH / s for s in side.step_seconds(steps, seed=round_)]
    medians = {name: statistics.median(values) for name, values in raw.items()}
    ratio = medians["ours"] / medians["trainer"]
    row = {"shape": shape, "dtype": dtype, "tokens_per_step": rows * LENGTH, **medians, "ratio": ratio}
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return {**row, "raw": {k: [round(v, 1) for v in values] for k, values in raw.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = select(args.device)
    transformers.logging.set_verbosity_error()
    rows = [compare(s, d, args.rounds, args.steps, device) for s in args.shapes for d in args.dtypes]
    if args.out:
        args.out.write_text(report(rows, args), encoding="utf-8")


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    lines = [
        "# Training throughput against Hugging Face Trainer + BertForMaskedLM", "",
        f"`python benchmarks/throughput.py --shapes {' '.join(args.shapes)} --dtypes {' '.join(args.dtypes)}"
        f" --rounds {args.rounds} --steps {args.steps}`: sequences of {LENGTH},"
        f" vocabulary {VOCABULARY}, {RATE:.0%} of tokens masked on both sides, dropout 0, fused AdamW, clipping; rounds"
        " alternate in one process; tokens/s per step, medians.", "",
        f"{cpu_name()}, {torch.get_num_threads()} threads, {platform.platform()}, Python {platform.python_version()},"
        f" torch {torch.__version__}, transformers {transformers.__version__}", "",
        "| shape | dtype | tokens/step | Trainer tok/s | ours tok/s | ratio |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['shape']} | {r['dtype']} | {r['tokens_per_step']} | {r['trainer']:.0f} | {r['ours']:.0f}"
            f" | **{r['ratio']:.2f}** |"
        )
    lines += ["", "Raw tokens/s of every step:", "", "```json"]
    lines += [json.dumps({k: r[k] for k in ("shape", "dtype", "raw")}) for r in rows]
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    main()
