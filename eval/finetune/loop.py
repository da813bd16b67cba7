"""Fine-tuning of one model on one task with one seed, and its predictions.

Every task, seed and initialisation gets the same hyperparameters, and the weights after the last epoch are scored. A
batch is a sequence of tokens without padding, gathered from arrays that were tokenized once. On a CPU the same seed
gives bitwise equal numbers, whatever else runs, if the number of threads per run is the same.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cramming.data.task_files import Task
from cramming.model.attention import Packing
from cramming.model.encoder import Encoder
from cramming.optim.build import parameter_groups
from cramming.precision import Mode, Precision, PrecisionConfig
from eval.finetune.config import Hyperparameters, Init
from eval.finetune.encode import Encoded, EncodedTask
from eval.finetune.models import (
    Classifier,
    ModelSource,
    build_classifier,
    build_token_classifier,
)
from eval.finetune.targets import Target, target_of


class Batch(NamedTuple):
    """Packed examples: inputs of the model, and labels.

    `rows_S` holds the indices of these labels in the split. For tasks that label words, S counts words, and `firsts_S`
    holds the indices of their first tokens in the batch.
    """

    ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor
    packing: Packing
    labels_S: Tensor | None
    rows_S: Tensor
    firsts_S: Tensor | None = None


class PackedSplit:
    """Arrays of a split on the device, from which any choice of examples is packed into a batch there.

    Only `lengths_N` is in main memory: the sizes of a batch are known without waiting for the device.
    """

    def __init__(self, encoded: Encoded, device: torch.device) -> None:
        self.device = device
        self.lengths_N = torch.from_numpy(np.diff(encoded.starts_N))
        self.ids_T = torch.from_numpy(encoded.ids_T).to(device)
        self.types_T = torch.from_numpy(encoded.types_T).to(device)
        self.starts_N = torch.from_numpy(encoded.starts_N).to(device)
        self.labels_N: Tensor | None = None
        if encoded.labels_N is not None:
            self.labels_N = torch.from_numpy(encoded.labels_N).to(device)
        self.words_T: Tensor | None = None
        if encoded.words_T is not None:
            self.words_T = torch.from_numpy(encoded.words_T).to(device)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def batch(self, chosen_S: Tensor) -> Batch:
        """Return the examples `chosen_S` (int64 [S], in main memory) end to end."""
        lengths_S = self.lengths_N[chosen_S]
        lengths = tuple(lengths_S.tolist())
        total, longest = sum(lengths), max(lengths)
        if self.device.type == "cuda":
            chosen_S = chosen_S.pin_memory()  # otherwise the copy waits for the steps before it
        chosen_S = chosen_S.to(self.device, non_blocking=True)
        starts_S = self.starts_N[chosen_S]
        lengths_S = self.starts_N[chosen_S + 1] - starts_S
        bounds_S = F.pad(lengths_S.cumsum(0), (1, 0))
        begins_2S = torch.stack((bounds_S[:-1], starts_S))  # in the batch, and in the split
        firsts_T, sources_T = begins_2S.repeat_interleave(lengths_S, 1, output_size=total)
        positions_T = torch.arange(total, device=self.device) - firsts_T
        index_T = sources_T + positions_T
        rows_S, word_firsts_S = chosen_S, None
        if self.words_T is not None:
            words_T = self.words_T[index_T]
            word_firsts_S = (words_T >= 0).nonzero().squeeze(1)
            rows_S = words_T[word_firsts_S]
        return Batch(
            ids_T=self.ids_T[index_T].long(),
            positions_T=positions_T,
            types_T=self.types_T[index_T].long(),
            packing=Packing(bounds_S.int(), None, longest, lengths=lengths),
            labels_S=None if self.labels_N is None else self.labels_N[rows_S],
            rows_S=rows_S,
            firsts_S=word_firsts_S,
        )


def shrink_vocabulary(encoder: Encoder, train: Encoded) -> tuple[Encoded, Callable[[], None]]:
    """Reduce the encoder's tables of token and value vectors to the tokens of its training set.

    Returns the training set with ids in the smaller tables, and a function that restores the whole tables with the
    trained vectors. A small task uses a fifth of the vocabulary; gradients of the other vectors would be written as
    zeros, and read by the optimizer, in every step. The numbers are bitwise equal (with gradient clipping, up to
    rounding).
    """
    tables: list[tuple[nn.Module, str, nn.Embedding]] = []
    tables.append((encoder.embeddings, "tokens", encoder.embeddings.tokens))
    if encoder.value_tokens is not None:
        tables.append((encoder, "value_tokens", encoder.value_tokens))
    used_V, ids_T = np.unique(train.ids_T, return_inverse=True)
    used = torch.from_numpy(used_V).long().to(encoder.embeddings.tokens.weight.device)
    for module, name, full in tables:
        small = nn.Embedding.from_pretrained(full.weight.detach()[used], freeze=False)
        setattr(module, name, small)

    def restore() -> None:
        for module, name, full in tables:
            with torch.no_grad():
                full.weight[used] = getattr(module, name).weight
            setattr(module, name, full)

    return replace(train, ids_T=ids_T.astype(np.int32)), restore


def by_length(lengths_N: Tensor, tokens: int) -> Iterator[Tensor]:
    """Yield examples in order of length, in groups of about `tokens` tokens, which need almost no padding."""
    order_N = lengths_N.argsort(stable=True)
    ends_N = lengths_N[order_N].cumsum(0)
    group_N = (ends_N - 1) // tokens
    sizes = torch.unique_consecutive(group_N, return_counts=True)[1].tolist()
    yield from order_N.split(sizes)


# Raised by every change of this code, or of the weights of an initialisation, that changes a number: stored runs are
# then repeated. The last change: means are summed in fp32, and a BERT's pooler is read from any file of weights.
FINETUNING_VERSION: dict[Init, int] = {"pretrained": 8, "random": 10}

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 32768}


@dataclass(frozen=True)
class TaskRun:
    """Fine-tuning run with all of its inputs, which can be sent to another process. `threads` are those of a CPU."""

    task: Task
    seed: int
    init: Init
    data: EncodedTask
    source: ModelSource
    hyper: Hyperparameters
    precision: Mode
    device: str
    threads: int = 1


@dataclass(frozen=True)
class Predictions:
    """Predictions per entry: class numbers, scores for regression, or 0 and 1 for each of several labels.

    They are NaN where the model's output was not finite. `epoch` is the number of epochs.
    """

    scored: dict[str, np.ndarray]
    blind: dict[str, np.ndarray]
    train_loss: float
    seconds: float
    epoch: int


def finetune(run: TaskRun, on_examples: Callable[[int], None] = lambda count: None) -> Predictions:
    """Train on the task's training set and predict its other sets. `on_examples` is called with each step's examples.

    A loss that is not finite ends the training with its epoch; the predictions are then NaN.
    """
    started, task, device = time.perf_counter(), run.task, torch.device(run.device)
    torch.manual_seed(run.seed)
    build = build_token_classifier if task.kind == "tokens" else build_classifier
    model = build(run.source, run.init, task.outputs, run.hyper).to(device)
    if run.hyper.freeze:
        model.encoder.requires_grad_(False)
    number_format = Precision(
        PrecisionConfig(mode=run.precision, tf32=run.precision != "fp32"), device
    )
    train_set, restore = run.data.train, None
    # Without weight decay a token vector that no training text uses never changes.
    if run.source.is_native and run.hyper.weight_decay == 0 and not run.hyper.freeze:
        train_set, restore = shrink_vocabulary(model.encoder, train_set)
    assert run.data.train.labels_N is not None, task.name
    target = target_of(task, run.data.train.labels_N)
    split = PackedSplit(train_set, device)
    loss, epoch = train(model, split, run, target, number_format, on_examples)
    if restore:
        restore()

    def predict_sets(sets: Mapping[str, Encoded]) -> dict[str, np.ndarray]:
        predictions = {}
        for name, encoded in sets.items():
            split = PackedSplit(encoded, device)
            predictions[name] = predict(model, target, split, number_format, math.isnan(loss))
        return predictions

    scored, blind = predict_sets(run.data.scored), predict_sets(run.data.blind)
    return Predictions(scored, blind, loss, time.perf_counter() - started, epoch)


def train(
    model: Classifier,
    split: PackedSplit,
    run: TaskRun,
    target: Target,
    number_format: Precision,
    on_examples: Callable[[int], None],
) -> tuple[float, int]:
    """Train in place on `split`, and return the last epoch's mean loss and its number.

    The first epoch with a step whose loss is not finite is the last one, and its mean is NaN.
    """
    hyper = run.hyper
    groups = parameter_groups(model, hyper.weight_decay)  # only matrices decay, as in pretraining
    betas = (hyper.beta1, hyper.beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=hyper.learning_rate, betas=betas, eps=hyper.eps, fused=True
    )
    generator = torch.Generator().manual_seed(run.seed)
    steps_per_epoch = -(-len(split) // hyper.batch_size)
    total_steps = hyper.epochs * steps_per_epoch
    model.train()
    if hyper.freeze:
        model.encoder.eval()  # without dropout, so that the head is trained on the states of inference
    for epoch in range(hyper.epochs):
        losses = []
        order_N = torch.randperm(len(split), generator=generator)
        for step, chosen_S in enumerate(order_N.split(hyper.batch_size)):
            progress = (epoch * steps_per_epoch + step + 1) / (total_steps + 1)
            for group in optimizer.param_groups:
                group["lr"] = hyper.learning_rate_at(progress)
            loss = train_step(model, target, split.batch(chosen_S), optimizer, hyper, number_format)
            losses.append(len(chosen_S) * loss)
            on_examples(len(chosen_S))
        # once per epoch, because reading a loss waits for the device
        mean = torch.stack(losses).sum().item() / len(split)
        if not np.isfinite(mean):
            return math.nan, epoch + 1
    return mean, hyper.epochs


def train_step(
    model: Classifier,
    target: Target,
    batch: Batch,
    optimizer: torch.optim.AdamW,
    hyper: Hyperparameters,
    number_format: Precision,
) -> Tensor:
    """Run one step of the optimizer, and return the loss."""
    with number_format.autocast():
        logits_SC = logits_of(model, batch).float()
    assert batch.labels_S is not None
    loss = target.loss(logits_SC, batch.labels_S)
    scaler = number_format.scaler
    scaler.scale(loss).backward()
    if hyper.max_grad_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), hyper.max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def logits_of(model: Classifier, batch: Batch) -> Tensor:
    """Return the logits [S, C] of a batch's examples, or of its words for a task that labels words."""
    logits: Tensor = model(batch.ids_T, batch.positions_T, batch.packing, batch.types_T)
    return logits if batch.firsts_S is None else logits[batch.firsts_S]


@torch.inference_mode()
def predict(
    model: Classifier,
    target: Target,
    split: PackedSplit,
    number_format: Precision,
    failed: bool = False,
) -> np.ndarray:
    """Return predictions in the split's order: class numbers, scores, or 0 and 1 for each of several labels.

    Their shape is [N], or [N, C] for several labels, in float64. They are NaN where the output is not finite, and
    everywhere after a `failed` training. A word beyond the maximum length gets the most frequent label.
    """
    rows = len(split) if split.labels_N is None else len(split.labels_N)
    predictions_N = torch.full((rows, *target.shape), float("nan"), dtype=torch.float64)
    if failed:
        return predictions_N.numpy()
    if split.words_T is not None:
        predictions_N.fill_(target.default)
    model.eval()
    for chosen_S in by_length(split.lengths_N, EVALUATION_TOKENS[split.device.type]):
        batch = split.batch(chosen_S)
        with number_format.autocast():
            logits_SC = logits_of(model, batch)
        logits_SC = logits_SC.double().cpu()
        values_S = target.predictions(logits_SC)
        values_S[~logits_SC.isfinite().all(-1)] = float("nan")
        rows_S = chosen_S if batch.firsts_S is None else batch.rows_S.cpu()
        predictions_N[rows_S] = values_S
    return predictions_N.numpy()
