"""The settings of `cramming glue`: section `eval`, with one set of hyperparameters for all tasks."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cramming.config import check_rules
from cramming.schedule import Constant, Cosine, Linear, learning_rate_factor
from eval.tasks.locate import SourceName

Init = Literal["pretrained", "random"]  # the weights that fine-tuning starts from
Selection = Literal["last", "best"]  # the epoch whose weights are scored
SELECTIONS: dict[Selection, str] = {"last": "last epoch", "best": "best epoch of each run by its own dev score"}


@dataclass(frozen=True)
class Hyperparameters:
    """The global set. `warmup` is a share of all steps; `dropout` also that of the classification head.

    `pooling` takes the first token or the mean of a sequence; `pooler` puts a dense layer with tanh behind it.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    max_grad_norm: float | None
    dropout: float
    attention_dropout: float
    pooling: Literal["cls", "mean"]
    pooler: bool
    max_length: int

    def __post_init__(self) -> None:
        positive = {name: getattr(self, name) for name in ("epochs", "batch_size", "learning_rate", "eps")}
        positive |= {"max_grad_norm": 1.0 if self.max_grad_norm is None else self.max_grad_norm}
        shares = {n: getattr(self, n) for n in ("warmup", "dropout", "attention_dropout", "beta1", "beta2")}
        check_rules(
            *((value > 0, f"{name}={value} must be above 0") for name, value in positive.items()),
            *((0 <= value < 1, f"{name}={value} must be in [0, 1)") for name, value in shares.items()),
            (self.weight_decay >= 0, f"weight_decay={self.weight_decay} must not be negative"),
            (self.max_length >= 8, f"max_length={self.max_length} must be at least 8 tokens"),
        )

    def learning_rate_at(self, progress: float) -> float:
        """The learning rate after `progress` in [0, 1] of all steps."""
        shapes = {
            "constant": Constant(start=0.0, warmup=self.warmup),
            "linear": Linear(start=0.0, warmup=self.warmup, final=0.0),
            "cosine": Cosine(start=0.0, warmup=self.warmup, final=0.0),
        }
        return self.learning_rate * learning_rate_factor(shapes[self.schedule], progress)


@dataclass(frozen=True)
class EvalConfig:
    """Section `eval`; conf/eval/glue_sane.yaml says what each setting does.

    `selection: best` and `sweep` choose by the scores that are printed, which the closed division does not allow.
    `threads` is part of the result, unlike `workers`.
    """

    source: SourceName
    data_dir: Path | None
    tasks: tuple[str, ...] | None
    init: tuple[Init, ...]
    seeds: tuple[int, ...]
    predict_test: bool
    selection: Selection
    baselines: bool
    sweep: bool
    minimal_pairs: Path | None
    workers: int | None
    threads: int
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    hyperparameters: Hyperparameters

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        lists = {"init": self.init, "seeds": self.seeds}
        check_rules(
            *(
                (values and len(set(values)) == len(values), f"{name}={list(values)} must name at least one, each once")
                for name, values in lists.items()
            ),
            (all(0 <= s < 2**63 for s in self.seeds), f"seeds={list(self.seeds)} must be between 0 and 2^63"),
            (self.tasks is None or self.tasks, "tasks=[] names none; null means all that are there"),
            (
                min(count for count in (self.threads, self.workers) if count is not None) >= 1,
                "threads and workers must be at least 1",
            ),
            (self.threads <= cores, f"threads={self.threads}: this machine has {cores} cores"),
            (
                self.source != "embedded" or self.data_dir is None,
                "data_dir is for real GLUE data; add eval=glue_sane",
            ),
        )
