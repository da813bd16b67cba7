"""One fine-tuning run: one task, one seed, one model; and its predictions.

Every task, seed and initialisation gets the same hyperparameters. The weights after the last epoch are scored, unless
`selection="best"` asks for each run's best epoch. A batch is one run of tokens without padding, gathered from arrays
that were tokenized once. On a CPU the same seed gives the same numbers bit for bit, whatever else runs, as long as the
number of threads per run is the same.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cramming.data.task_files import TASKS, Task
from cramming.model.heads import SequenceClassifier
from cramming.optim import parameter_groups
from cramming.precision import Mode, Precision, PrecisionConfig
from eval.finetune.batches import Batch, PackedSplit, UsedVocabulary, by_length
from eval.finetune.classifier import build_classifier
from eval.finetune.config import Hyperparameters, Init, Selection
from eval.finetune.encode import Encoded, EncodedTask
from eval.finetune.models import ModelSource
from eval.tasks.metrics import score

# Raised by every change of this code, or of the weights that an initialisation means, that changes a number: its stored
# runs are then done again. The last: training examples are in an order of their own before a seed shuffles them.
FINETUNING_VERSION: dict[Init, int] = {"pretrained": 6, "random": 8}

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 32768}


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run, complete: it can be sent to another process. `threads` are those of a CPU."""

    task: str
    seed: int
    init: Init
    data: EncodedTask
    source: ModelSource
    hyper: Hyperparameters
    precision: Mode
    device: str
    threads: int = 1
    selection: Selection = "last"


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


def finetune(run: TaskRun, on_examples: Callable[[int], None] = lambda count: None) -> Predictions:
    """Train on the task's training set and predict its other sets. `on_examples` hears of every trained example.

    A loss that is not finite ends the training with its epoch, whose predictions are NaN.
    """
    started, task, device, hyper = time.perf_counter(), TASKS[run.task], torch.device(run.device), run.hyper
    torch.manual_seed(run.seed)
    model = build_classifier(run.source, run.init, task.outputs, hyper).to(device)
    number_format = Precision(PrecisionConfig(run.precision, tf32=run.precision != "fp32"), device)
    # A row of the word embedding that no training text uses has no gradient, and without weight decay never changes.
    vocabulary = UsedVocabulary(model.encoder, run.data.train) if run.source.own and hyper.weight_decay == 0 else None
    split = PackedSplit(vocabulary.train if vocabulary else run.data.train, device)
    best, found = -math.inf, None
    for epoch, loss in enumerate(train(model, task, split, run.seed, hyper, number_format, on_examples), start=1):
        failed = not np.isfinite(loss)
        if run.selection == "last" and epoch < hyper.epochs and not failed:
            continue
        with vocabulary.whole() if vocabulary else nullcontext():
            scored, blind = (
                {name: predict(model, task, PackedSplit(s, device), number_format, failed) for name, s in sets.items()}
                for sets in (run.data.scored, run.data.blind)
            )
        reached = math.inf if run.selection == "last" else dev_score(task, run.data.scored, scored)
        if found is None or reached > best:
            best, found = reached, Predictions(scored, blind, loss, 0.0, epoch)
    assert found is not None
    return replace(found, seconds=time.perf_counter() - started)


def dev_score(task: Task, sets: Mapping[str, Encoded], predictions: Mapping[str, np.ndarray]) -> float:
    """Mean of the main metric over the task's labelled sets; minus infinity where it is not defined."""
    values = []
    for name, found in predictions.items():
        labels_N = sets[name].labels_N
        assert labels_N is not None
        values.append(score((task.main_metric,), found, labels_N).values[task.main_metric])
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
    groups = parameter_groups(model, hyper.weight_decay)  # decay only on matrices, as in pretraining
    betas = (hyper.beta1, hyper.beta2)
    optimizer = torch.optim.AdamW(groups, lr=hyper.learning_rate, betas=betas, eps=hyper.eps, fused=True)
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
            losses.append(train_step(model, task, split.batch(chosen_S), optimizer, hyper, number_format))
            on_examples(len(chosen_S))
        mean = torch.stack(losses).mean().item()  # once an epoch: every look at a loss waits for the device
        yield mean if np.isfinite(mean) else math.nan
        if not np.isfinite(mean):
            return


def train_step(
    model: SequenceClassifier,
    task: Task,
    batch: Batch,
    optimizer: torch.optim.AdamW,
    hyper: Hyperparameters,
    number_format: Precision,
) -> Tensor:
    """One step of the optimizer; returns the loss."""
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
