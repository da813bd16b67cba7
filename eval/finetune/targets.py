"""Target of a fine-tuned head: its loss, and the predictions of its logits.

Shapes: S examples (words for a task that labels words), C logits of each.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cramming.data.task_files import Task


class Target(Protocol):
    """Loss and predictions of a task. `shape` is the shape of a prediction, `default` the value without logits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a prediction."""

    @property
    def default(self) -> float:
        """Most frequent label, or the mean label."""

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
    """Class of an example; `weights_C` are the weights of the classes in the loss, None for equal weights."""

    weights_C: Tensor | None
    default: float
    shape: tuple[int, ...] = ()

    def loss(self, logits_SC: Tensor, labels_S: Tensor) -> Tensor:
        """Return the cross entropy; 0 for no words at all."""
        if not len(labels_S):
            return logits_SC.sum()
        weights_C = None if self.weights_C is None else self.weights_C.to(logits_SC.device)
        return F.cross_entropy(logits_SC, labels_S, weights_C)

    def predictions(self, logits_SC: Tensor) -> Tensor:
        """Return the class of the largest logit."""
        return logits_SC.argmax(-1).double()


@dataclass(frozen=True)
class Number:
    """Number, standardized for the model as `(number - mean) / std`."""

    mean: float
    std: float
    shape: tuple[int, ...] = ()

    @property
    def default(self) -> float:
        """Mean label."""
        return self.mean

    def loss(self, logits_SC: Tensor, labels_S: Tensor) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(logits_SC.squeeze(-1), (labels_S - self.mean) / self.std)

    def predictions(self, logits_SC: Tensor) -> Tensor:
        """Return the numbers."""
        return logits_SC.squeeze(-1) * self.std + self.mean


@dataclass(frozen=True)
class Labels:
    """Any number of `count` labels, independent of each other; `weights_C` weight positive examples in the loss."""

    weights_C: Tensor | None
    count: int
    default: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a prediction."""
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
    """Return the ratio of negative to positive examples of each label."""
    positive_C = labels_NC.sum(0)
    weights_C = (len(labels_NC) - positive_C) / np.maximum(positive_C, 1)
    return torch.from_numpy(weights_C).float().clamp(min=1e-3)
