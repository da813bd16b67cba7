"""One fine-tuning run: one task, one seed, one model; and its predictions.

Every task, seed and initialisation gets the same `Hyperparameters` object. The weights after the last epoch are
scored, not the best ones; whoever asks for those (`selection="best"`) gets a score that was selected on its own test,
and the record says so. Sequences are packed: a batch of examples is one run of tokens without padding, gathered
from arrays that were tokenized once, so a step costs little beside the model itself. On a CPU the same seed gives the
same numbers bit for bit, whatever else runs, as long as the number of threads per run is the same.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cramming.data.task_files import Task
from cramming.model.heads import SequenceClassifier
from cramming.optim import parameter_groups
from cramming.precision import Mode, Precision, PrecisionConfig
from cramming.schedule import ScheduleConfig, learning_rate_factor
from eval.finetune.batches import Batch, PackedSplit, VocabularyPart, by_length
from eval.finetune.encode import Encoded, EncodedTask
from eval.finetune.models import Init, ModelSource, build_classifier
from eval.tasks.metrics import score

Selection = Literal["last", "best"]
# Raised by every change of this code, or of the weights that an initialisation means, that changes a number: its stored
# runs are then done again. The last: training examples are in an order of their own before a seed shuffles them.
FINETUNING_VERSION: dict[Init, int] = {"pretrained": 6, "random": 8, "designed": 8}

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 32768}


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
        for name in ("epochs", "batch_size", "learning_rate", "eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("warmup", "dropout", "attention_dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.weight_decay < 0 or (self.max_grad_norm is not None and self.max_grad_norm <= 0):
            raise ValueError("weight_decay must not be negative, and max_grad_norm above 0 or null")
        if self.max_length < 8:
            raise ValueError(f"max_length={self.max_length} must be at least 8 tokens")

    def learning_rate_at(self, progress: float) -> float:
        """The learning rate after `progress` in [0, 1] of all steps."""
        shape = ScheduleConfig(self.schedule, self.warmup, 0.0, "linear", 0.0, 0.0, 1.0, 0.0)
        return self.learning_rate * learning_rate_factor(shape, progress)


@dataclass(frozen=True)
class Predictions:
    """Class numbers (scores for regression) per entry; NaN where the model's output was not finite.

    `epoch` is the one whose weights were scored.
    """

    scored: dict[str, np.ndarray]
    blind: dict[str, np.ndarray]
    train_loss: float
    seconds: float
    epoch: int


def finetune(
    task: Task,
    data: EncodedTask,
    source: ModelSource,
    init: Init,
    seed: int,
    hyper: Hyperparameters,
    precision: Mode,
    device: torch.device,
    on_examples: Callable[[int], None] = lambda count: None,
    selection: Selection = "last",
) -> Predictions:
    """Train on the task's training set and predict its other sets. `on_examples` hears of every trained example.

    A loss that is not finite ends the training with its epoch, whose predictions are NaN.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = build_classifier(
        source, init, task.outputs, hyper.dropout, hyper.attention_dropout, hyper.pooling, hyper.pooler
    ).to(device)
    number_format = Precision(PrecisionConfig(precision, tf32=precision != "fp32"), device)  # fp32 is nothing less
    # A row of the word embedding that no training text uses has no gradient, and without weight decay never changes.
    part = VocabularyPart(model.encoder, data.train) if source.own and hyper.weight_decay == 0 else None
    split = PackedSplit(part.train if part else data.train, device)
    best, found = -math.inf, None
    for epoch, loss in enumerate(train(model, task, split, seed, hyper, number_format, on_examples), start=1):
        failed = not np.isfinite(loss)
        if selection == "last" and epoch < hyper.epochs and not failed:
            continue
        with part.whole() if part else nullcontext():
            scored, blind = (
                predict_sets(model, task, s, device, number_format, failed) for s in (data.scored, data.blind)
            )
        reached = math.inf if selection == "last" else dev_score(task, data, scored)
        if found is None or reached > best:
            best, found = reached, Predictions(scored, blind, loss, 0.0, epoch)
    assert found is not None
    return replace(found, seconds=time.perf_counter() - started)


def dev_score(task: Task, data: EncodedTask, scored: Mapping[str, np.ndarray]) -> float:
    """Mean of the main metric over the task's labelled sets; minus infinity where it is not defined."""
    values = []
    for name, predictions in scored.items():
        labels_N = data.scored[name].labels_N
        assert labels_N is not None
        values.append(score((task.main_metric,), predictions, labels_N).values[task.main_metric])
    mean = float(np.mean(values))
    return mean if np.isfinite(mean) else -math.inf


def train(
    model: SequenceClassifier,
    task: Task,
    split: PackedSplit,
    seed: int,
    hyper: Hyperparameters,
    number_format: Precision,
    on_examples: Callable[[int], None],
) -> Iterator[float]:
    """Train in place; yields the mean loss after every epoch, NaN and as the last where a step's was not finite."""
    optimizer = make_optimizer(model, hyper)
    generator = torch.Generator().manual_seed(seed)
    steps_per_epoch = -(-len(split) // hyper.batch_size)
    total_steps = hyper.epochs * steps_per_epoch
    for epoch in range(hyper.epochs):
        model.train()
        losses = []
        for step, chosen_S in enumerate(torch.randperm(len(split), generator=generator).split(hyper.batch_size)):
            progress = (epoch * steps_per_epoch + step + 1) / (total_steps + 1)
            for group in optimizer.param_groups:
                group["lr"] = hyper.learning_rate_at(progress)
            losses.append(_step(model, task, split.batch(chosen_S), optimizer, hyper, number_format))
            on_examples(len(chosen_S))
        mean = torch.stack(losses).mean().item()  # once an epoch: every look at a loss waits for the device
        yield mean if np.isfinite(mean) else math.nan
        if not np.isfinite(mean):
            return


def make_optimizer(model: nn.Module, hyper: Hyperparameters) -> torch.optim.AdamW:
    """AdamW; weight decay only on matrices, not on biases and norms, as in pretraining."""
    groups, betas = parameter_groups(model, hyper.weight_decay), (hyper.beta1, hyper.beta2)
    return torch.optim.AdamW(groups, lr=hyper.learning_rate, betas=betas, eps=hyper.eps, fused=True)


def _step(
    model: SequenceClassifier,
    task: Task,
    batch: Batch,
    optimizer: torch.optim.AdamW,
    hyper: Hyperparameters,
    number_format: Precision,
) -> Tensor:
    with number_format.autocast():
        logits_SC = model(batch.ids_T, batch.positions_T, batch.packing, batch.types_T).float()
    assert batch.labels_S is not None
    if task.regression:
        loss = F.mse_loss(logits_SC.squeeze(-1), batch.labels_S)
    else:
        loss = F.cross_entropy(logits_SC, batch.labels_S)
    scaler = number_format.scaler
    scaler.scale(loss).backward()
    if hyper.max_grad_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), hyper.max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def predict_sets(
    model: SequenceClassifier,
    task: Task,
    sets: Mapping[str, Encoded],
    device: torch.device,
    number_format: Precision,
    failed: bool,
) -> dict[str, np.ndarray]:
    """Predictions of several sets, by entry."""
    return {
        name: predict(model, task, PackedSplit(encoded, device), number_format, failed)
        for name, encoded in sets.items()
    }


@torch.inference_mode()
def predict(
    model: SequenceClassifier, task: Task, split: PackedSplit, number_format: Precision, failed: bool = False
) -> np.ndarray:
    """Predictions in the split's order, float64 [N]: class numbers or scores; NaN where the output is not finite."""
    found_N = torch.full((len(split),), float("nan"), dtype=torch.float64)
    if failed:
        return found_N.numpy()
    model.eval()
    for chosen_S in by_length(split.lengths_N, EVALUATION_TOKENS[split.device.type]):
        batch = split.batch(chosen_S)
        with number_format.autocast():
            logits_SC = model(batch.ids_T, batch.positions_T, batch.packing, batch.types_T)
        logits_SC = logits_SC.double().cpu()
        values_S = logits_SC.squeeze(-1) if task.regression else logits_SC.argmax(-1).double()
        found_N[chosen_S] = torch.where(logits_SC.isfinite().all(-1), values_S, float("nan"))
    return found_N.numpy()
