"""One fine-tuning run: one task, one seed, one model; and its predictions.

Every task, seed and initialisation gets the same hyperparameters, and the weights after the last epoch are scored. A
batch is one run of tokens without padding, gathered from arrays that were tokenized once. On a CPU the same seed gives
the same numbers bit for bit, whatever else runs, as long as the number of threads per run is the same.
"""

import math
import time
from collections.abc import Callable, Iterator
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
    """Some examples, packed: what the model takes, and their labels.

    `rows_S`: which of the split's labels these are. Where words are labelled, `firsts_S` has the places of their first
    tokens, S counts words and the labels are theirs.
    """

    ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor
    packing: Packing
    labels_S: Tensor | None
    rows_S: Tensor
    firsts_S: Tensor | None = None


class PackedSplit:
    """A split's arrays on the device, from which any choice of examples is packed there into a batch.

    Only `lengths_N` is in main memory: the sizes of a batch are known without asking the device.
    """

    def __init__(self, encoded: Encoded, device: torch.device) -> None:
        self.device = device
        self.lengths_N = torch.from_numpy(np.diff(encoded.starts_N))
        arrays = (encoded.ids_T, encoded.types_T, encoded.starts_N)
        self.ids_T, self.types_T, self.starts_N = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        self.labels_N = (
            None if encoded.labels_N is None else torch.from_numpy(encoded.labels_N).to(device)
        )
        self.words_T = (
            None if encoded.words_T is None else torch.from_numpy(encoded.words_T).to(device)
        )

    def __len__(self) -> int:
        return len(self.lengths_N)

    def batch(self, chosen_S: Tensor) -> Batch:
        """The examples `chosen_S` (int64 [S], in main memory) end to end."""
        lengths_S = self.lengths_N[chosen_S]
        lengths = tuple(lengths_S.tolist())
        total, longest = sum(lengths), max(lengths)
        if self.device.type == "cuda":
            chosen_S = chosen_S.pin_memory()  # else the copy would wait for the steps before it
        chosen_S = chosen_S.to(self.device, non_blocking=True)
        starts_S = self.starts_N[chosen_S]
        lengths_S = self.starts_N[chosen_S + 1] - starts_S
        bounds_S = F.pad(lengths_S.cumsum(0), (1, 0))
        places_S = torch.stack((bounds_S[:-1], starts_S))  # in the batch, and in the split
        firsts_T, sources_T = places_S.repeat_interleave(lengths_S, 1, output_size=total)
        positions_T = torch.arange(total, device=self.device) - firsts_T
        index_T = sources_T + positions_T
        rows_S, firsts_S = chosen_S, None
        if self.words_T is not None:
            words_T = self.words_T[index_T]
            firsts_S = (words_T >= 0).nonzero().squeeze(1)
            rows_S = words_T[firsts_S]
        labels_S = None if self.labels_N is None else self.labels_N[rows_S]
        packing = Packing(bounds_S.int(), None, longest, lengths=lengths)
        return Batch(
            self.ids_T[index_T].long(),
            positions_T,
            self.types_T[index_T].long(),
            packing,
            labels_S,
            rows_S,
            firsts_S,
        )


def with_used_words(encoder: Encoder, train: Encoded) -> tuple[Encoded, Callable[[], None]]:
    """Leave the encoder the vectors of the tokens that its training set has, of words and of values; returns that set,
    which numbers them anew, and what puts the whole vocabulary back, as far as it was trained.

    They are a fifth of the vocabulary on a small task; gradients of the others would be written as zeros, and read by
    the optimizer, in every step. The numbers are the same bit for bit (with gradient clipping, to rounding).
    """
    tables: list[tuple[nn.Module, str, nn.Embedding]] = [
        (encoder.embeddings, "tokens", encoder.embeddings.tokens)
    ]
    tables += (
        [(encoder, "value_tokens", encoder.value_tokens)]
        if encoder.value_tokens is not None
        else []
    )
    used_V, ids_T = np.unique(train.ids_T, return_inverse=True)
    used = torch.from_numpy(used_V).long().to(encoder.embeddings.tokens.weight.device)
    for place, name, full in tables:
        setattr(place, name, nn.Embedding.from_pretrained(full.weight.detach()[used], freeze=False))

    def put_back() -> None:
        for place, name, full in tables:
            with torch.no_grad():
                full.weight[used] = getattr(place, name).weight
            setattr(place, name, full)

    return replace(train, ids_T=ids_T.astype(np.int32)), put_back


def by_length(lengths_N: Tensor, tokens: int) -> Iterator[Tensor]:
    """Examples in order of length, in groups of about `tokens` tokens, so that a group needs next to no padding."""
    order_N = lengths_N.argsort(stable=True)
    ends_N = lengths_N[order_N].cumsum(0)
    group_N = (ends_N - 1) // tokens
    sizes = torch.unique_consecutive(group_N, return_counts=True)[1].tolist()
    yield from order_N.split(sizes)


# Raised by every change of this code, or of the weights that an initialisation means, that changes a number: its stored
# runs are then done again. The last: means are summed in fp32, and a BERT's pooler is found in any file of weights.
FINETUNING_VERSION: dict[Init, int] = {"pretrained": 8, "random": 10}

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 32768}


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run, complete: it can be sent to another process. `threads` are those of a CPU."""

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
    """Class numbers (scores for regression, 0 or 1 for each of several labels) per entry; NaN where the model's output
    was not finite. `epoch`: how many there were."""

    scored: dict[str, np.ndarray]
    blind: dict[str, np.ndarray]
    train_loss: float
    seconds: float
    epoch: int


def finetune(run: TaskRun, on_examples: Callable[[int], None] = lambda count: None) -> Predictions:
    """Train on the task's training set and predict its other sets. `on_examples` hears of every trained example.

    A loss that is not finite ends the training with its epoch, whose predictions are NaN.
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
    train_set, put_back = run.data.train, None
    # A row of the word embedding that no training text uses has no gradient, and without weight decay never changes.
    if run.source.own and run.hyper.weight_decay == 0 and not run.hyper.freeze:
        train_set, put_back = with_used_words(model.encoder, train_set)
    assert run.data.train.labels_N is not None, task.name
    target = target_of(task, run.data.train.labels_N)
    loss, epoch = train(
        model, PackedSplit(train_set, device), run, target, number_format, on_examples
    )
    if put_back:
        put_back()
    scored, blind = (
        {
            n: predict(model, target, PackedSplit(s, device), number_format, math.isnan(loss))
            for n, s in sets.items()
        }
        for sets in (run.data.scored, run.data.blind)
    )
    return Predictions(scored, blind, loss, time.perf_counter() - started, epoch)


def train(
    model: Classifier,
    split: PackedSplit,
    run: TaskRun,
    target: Target,
    number_format: Precision,
    on_examples: Callable[[int], None],
) -> tuple[float, int]:
    """Train in place on `split`; returns the last epoch's mean loss and its number. The first epoch in which a step's
    loss is not finite is the last one, and its mean is NaN."""
    hyper = run.hyper
    groups = parameter_groups(
        model, hyper.weight_decay
    )  # decay only on matrices, as in pretraining
    betas = (hyper.beta1, hyper.beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=hyper.learning_rate, betas=betas, eps=hyper.eps, fused=True
    )
    generator = torch.Generator().manual_seed(run.seed)
    steps_per_epoch = -(-len(split) // hyper.batch_size)
    total_steps = hyper.epochs * steps_per_epoch
    model.train()
    if hyper.freeze:
        model.encoder.eval()  # a probe reads the states that the encoder gives at inference
    for epoch in range(hyper.epochs):
        losses = []
        for step, chosen_S in enumerate(
            torch.randperm(len(split), generator=generator).split(hyper.batch_size)
        ):
            progress = (epoch * steps_per_epoch + step + 1) / (total_steps + 1)
            for group in optimizer.param_groups:
                group["lr"] = hyper.learning_rate_at(progress)
            loss = train_step(model, target, split.batch(chosen_S), optimizer, hyper, number_format)
            losses.append(len(chosen_S) * loss)
            on_examples(len(chosen_S))
        mean = torch.stack(losses).sum().item() / len(
            split
        )  # once an epoch: every look at a loss waits for the device
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
    """One step of the optimizer; returns the loss."""
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
    """Return the logits [S, C] of a batch's examples, or of its words where those are labelled."""
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
    """Predictions in the split's order, float64 [N] or [N, C]: class numbers, scores, or 0 and 1 for each label.

    NaN where the output is not finite. A word beyond the length that the model reads gets the most frequent label.
    """
    rows = len(split) if split.labels_N is None else len(split.labels_N)
    found_N = torch.full((rows, *target.shape), float("nan"), dtype=torch.float64)
    if failed:
        return found_N.numpy()
    if split.words_T is not None:
        found_N.fill_(target.usual)
    model.eval()
    for chosen_S in by_length(split.lengths_N, EVALUATION_TOKENS[split.device.type]):
        batch = split.batch(chosen_S)
        with number_format.autocast():
            logits_SC = logits_of(model, batch)
        logits_SC = logits_SC.double().cpu()
        values_S = target.predictions(logits_SC)
        values_S[~logits_SC.isfinite().all(-1)] = float("nan")
        rows_S = chosen_S if batch.firsts_S is None else batch.rows_S.cpu()
        found_N[rows_S] = values_S
    return found_N.numpy()
