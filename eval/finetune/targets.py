"""What a fine-tuned head predicts: its loss, and the predictions that its logits mean.

Shapes: S examples, or words where those are labelled; C logits of each.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cramming.data.task_files import Task


class Target(Protocol):
    """Loss and predictions of a task. `shape`: of one prediction. `usual`: the prediction where there are no logits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one prediction."""

    @property
    def usual(self) -> float:
        """Return the most frequent label, or the mean one."""

    def loss(self, logits_SC: Tensor, labels_S: Tensor) -> Tensor:
        """Return the mean loss."""

    def predictions(self, logits_SC: Tensor) -> Tensor:
        """Return the predictions [S, *shape] of fp64 logits."""


def target_of(task: Task, labels_N: np.ndarray) -> Target:
    """Return the target of a task whose training set has these labels."""
    if task.kind == "regression":
        if task.score_range is not None or len(labels_N) < 2:
            return Number(0.0, 1.0)
        return Number(float(labels_N.mean()), float(labels_N.std()) or 1.0)
    if task.kind == "multilabel":
        return Labels(_positive_weights(labels_N) if task.balanced else None, task.outputs)
    counts_C = np.bincount(labels_N, minlength=task.outputs)
    weights = _class_weights(counts_C) if task.balanced else None
    return Classes(weights, float(counts_C.argmax()))


@dataclass(frozen=True)
class Classes:
    """One class of several; `weights_C` of the classes in the loss, None for equal ones."""

    weights_C: Tensor | None
    usual: float
    shape: tuple[int, ...] = ()

    def loss(self, logits_SC: Tensor, labels_S: Tensor) -> Tensor:
        """Return the cross entropy; 0 for no words at all."""
        if not len(labels_S):
            return logits_SC.sum()
        weights_C = None if self.weights_C is None else self.weights_C.to(logits_SC.device)
        return F.cross_entropy(logits_SC, labels_S, weights_C)

    def predictions(self, logits_SC: Tensor) -> Tensor:
        """Return the likeliest class."""
        return logits_SC.argmax(-1).double()


@dataclass(frozen=True)
class Number:
    """A number, which the model sees as `(number - mean) / std`."""

    mean: float
    std: float
    shape: tuple[int, ...] = ()

    @property
    def usual(self) -> float:
        """Return the mean label."""
        return self.mean

    def loss(self, logits_SC: Tensor, labels_S: Tensor) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(logits_SC.squeeze(-1), (labels_S - self.mean) / self.std)

    def predictions(self, logits_SC: Tensor) -> Tensor:
        """Return the numbers."""
        return logits_SC.squeeze(-1) * self.std + self.mean


@dataclass(frozen=True)
class Labels:
    """Any of `count` labels, each by itself; `weights_C` of the positive examples in the loss."""

    weights_C: Tensor | None
    count: int
    usual: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one prediction."""
        return (self.count,)

    def loss(self, logits_SC: Tensor, labels_S: Tensor) -> Tensor:
        """Return the binary cross entropy, mean over examples and labels."""
        weights_C = None if self.weights_C is None else self.weights_C.to(logits_SC.device)
        return F.binary_cross_entropy_with_logits(logits_SC, labels_S, pos_weight=weights_C)

    def predictions(self, logits_SC: Tensor) -> Tensor:
        """Return 1 for every label with a probability above one half, else 0."""
        return (logits_SC > 0).double()


def _class_weights(counts_C: np.ndarray) -> Tensor:
    """Return scikit-learn's `balanced` weights: examples / (classes * examples of the class)."""
    weights_C = counts_C.sum() / (np.count_nonzero(counts_C) * np.maximum(counts_C, 1))
    return torch.from_numpy(weights_C).float()


def _positive_weights(labels_NC: np.ndarray) -> Tensor:
    """Return negative per positive examples of each label."""
    positive_C = labels_NC.sum(0)
    weights_C = (len(labels_NC) - positive_C) / np.maximum(positive_C, 1)
    return torch.from_numpy(weights_C).float().clamp(min=1e-3)
