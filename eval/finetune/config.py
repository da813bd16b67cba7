"""Settings of `cramming glue`: section `eval`, with one set of hyperparameters for all tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cramming.config import Count, Fraction, NotNegative, Positive, Seed, Within, require
from cramming.data.suites import SourceName
from cramming.model.config import Pooling
from cramming.schedule import Constant, Cosine, Linear, learning_rate_factor

Init = Literal["pretrained", "random"]  # weights that fine-tuning starts from
SELECTION = "last epoch"  # epoch whose weights are scored


@dataclass(frozen=True)
class Hyperparameters:
    """Global hyperparameters. `warmup` is a share of all steps; `dropout` applies to the classification head too.

    `pooling` takes the first token or the mean of a sequence, or compares the means of its two texts; `pooler` adds a
    dense layer with tanh.
    """

    epochs: Count
    batch_size: Count
    learning_rate: Positive
    schedule: Literal["constant", "linear", "cosine"]
    warmup: Fraction
    weight_decay: NotNegative
    beta1: Fraction
    beta2: Fraction
    eps: Positive
    max_grad_norm: Positive | None
    dropout: Fraction
    attention_dropout: Fraction
    pooling: Pooling
    pooler: bool
    max_length: Annotated[int, Within(lambda length: length >= 8, "at least 8 tokens")]

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate after `progress` in [0, 1] of all steps."""
        shapes = {
            "constant": Constant(start=0.0, warmup=self.warmup),
            "linear": Linear(start=0.0, warmup=self.warmup, final=0.0),
            "cosine": Cosine(start=0.0, warmup=self.warmup, final=0.0),
        }
        return self.learning_rate * learning_rate_factor(shapes[self.schedule], progress)


@dataclass(frozen=True)
class EvalConfig:
    """Section `eval`; conf/eval/glue_sane.yaml explains each setting.

    `sweep` chooses by the reported scores, which the closed division does not allow. `threads` is part of the result,
    unlike `workers`.
    """

    source: SourceName
    data_dir: Path | None
    tasks: tuple[str, ...] | None
    init: tuple[Init, ...]
    seeds: tuple[Seed, ...]
    predict_test: bool
    baselines: bool
    sweep: bool
    minimal_pairs: Path | None
    workers: Count | None
    threads: Count
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    hyperparameters: Hyperparameters

    def __post_init__(self) -> None:
        for name, values in {"init": self.init, "seeds": self.seeds, "tasks": self.tasks}.items():
            require(
                values is None or 0 < len(values) == len(set(values)),
                f"{name} must name at least one, each once",
            )
        given = self.source == "embedded" and self.data_dir
        require(not given, "data_dir is for real GLUE data; add eval=glue_sane")
