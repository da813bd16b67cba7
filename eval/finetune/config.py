"""Settings of `cramming glue`: section `eval`, with one set of hyperparameters for all tasks."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from cramming.config import Count, Fraction, LocalPath, NotNegative, Positive, Section, Seed
from cramming.data.suites import SourceName
from cramming.model.config import Pooling
from cramming.schedule import Constant, Cosine, Linear, learning_rate_factor

Init = Literal["pretrained", "random"]  # weights that fine-tuning starts from
SELECTION = "last epoch"  # epoch whose weights are scored


class Hyperparameters(Section):
    """Global hyperparameters. `warmup` is a share of all steps; `dropout` applies to the classification head too.

    `pooling` takes the first token or the mean of a sequence, or compares the means of its two texts; `pooler` adds a
    dense layer with tanh. `freeze` trains only the head, on the hidden states of an unchanged encoder.
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
    max_length: Annotated[int, Field(ge=8)]
    freeze: bool = False

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `freeze` if it is off, because older results are stored by the hash of the other settings."""
        values: dict[str, Any] = serialize(self)
        if not self.freeze:
            del values["freeze"]
        return values

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate after `progress` in [0, 1] of all steps."""
        shapes = {
            "constant": Constant(start=0.0, warmup=self.warmup),
            "linear": Linear(start=0.0, warmup=self.warmup, final=0.0),
            "cosine": Cosine(start=0.0, warmup=self.warmup, final=0.0),
        }
        return self.learning_rate * learning_rate_factor(shapes[self.schedule], progress)


class EvalConfig(Section):
    """Section `eval`; conf/eval/glue_sane.yaml explains each setting.

    `sweep` chooses by the reported scores, which the closed division does not allow. `threads` is part of the result,
    unlike `workers`.
    """

    source: SourceName
    data_dir: LocalPath | None
    tasks: tuple[str, ...] | None
    init: tuple[Init, ...]
    seeds: tuple[Seed, ...]
    predict_test: bool
    baselines: bool
    sweep: bool
    minimal_pairs: LocalPath | None
    workers: Count | None
    threads: Count
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    hyperparameters: Hyperparameters

    @field_validator("init", "seeds", "tasks")
    @classmethod
    def _names_each_once(cls, values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        if values is not None and not 0 < len(values) == len(set(values)):
            raise ValueError("expected at least one, each once.")
        return values

    @model_validator(mode="after")
    def _reads_one_source(self) -> Self:
        if self.source == "embedded" and self.data_dir:
            raise ValueError(
                f"data_dir={self.data_dir}: for real GLUE data. Choose eval=glue_sane."
            )
        return self
