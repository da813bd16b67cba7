"""Batches of fine-tuning: any choice of examples end to end without padding, and no word vector that nobody uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cramming.model.attention import Packing
from cramming.model.encoder import Encoder
from eval.encode import Encoded


class Batch(NamedTuple):
    """Some examples, packed: what the model takes, and their labels."""

    ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor
    packing: Packing
    labels_S: Tensor | None


class PackedSplit:
    """A split's arrays as tensors, from which any choice of examples is packed into a batch."""

    def __init__(self, encoded: Encoded, device: torch.device) -> None:
        self.device = device
        self.ids_T = torch.from_numpy(encoded.ids_T)
        self.types_T = torch.from_numpy(encoded.types_T)
        self.starts_N = torch.from_numpy(encoded.starts_N[:-1])
        self.lengths_N = torch.from_numpy(np.diff(encoded.starts_N))
        self.labels_N = None if encoded.labels_N is None else torch.from_numpy(encoded.labels_N)

    def __len__(self) -> int:
        return len(self.starts_N)

    def batch(self, chosen_S: Tensor) -> Batch:
        """The examples `chosen_S` (int64 [S]) end to end."""
        lengths_S = self.lengths_N[chosen_S]
        bounds_S = torch.zeros(len(chosen_S) + 1, dtype=torch.int64)
        torch.cumsum(lengths_S, 0, out=bounds_S[1:])
        total = int(bounds_S[-1])
        firsts_T = bounds_S[:-1].repeat_interleave(lengths_S, output_size=total)
        positions_T = torch.arange(total) - firsts_T
        index_T = self.starts_N[chosen_S].repeat_interleave(lengths_S, output_size=total) + positions_T
        packing = Packing(self._to(bounds_S.int()), None, int(lengths_S.max()))
        labels_S = None if self.labels_N is None else self._to(self.labels_N[chosen_S])
        ids_T, types_T = self.ids_T[index_T].long(), self.types_T[index_T].long()
        return Batch(self._to(ids_T), self._to(positions_T), self._to(types_T), packing, labels_S)

    def _to(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class VocabularyPart:
    """While a model trains, the word vectors of the tokens that its training set has, and no others.

    They are a fifth of the vocabulary on a small task; gradients of the others would be written as zeros, and read by
    the optimizer, in every step. The numbers are the same bit for bit (with gradient clipping, to rounding).
    """

    def __init__(self, encoder: Encoder, train: Encoded) -> None:
        self.place = encoder.embeddings
        self.full = self.place.tokens
        used_V, ids_T = np.unique(train.ids_T, return_inverse=True)
        self.train = replace(train, ids_T=ids_T.astype(np.int32))
        self.used_V = torch.from_numpy(used_V).long().to(self.full.weight.device)
        self.small = nn.Embedding.from_pretrained(self.full.weight.detach()[self.used_V], freeze=False)
        self.place.tokens = self.small

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The model with its whole vocabulary again, as far as it is trained."""
        with torch.no_grad():
            self.full.weight[self.used_V] = self.small.weight
        self.place.tokens = self.full
        try:
            yield
        finally:
            self.place.tokens = self.small


def by_length(lengths_N: Tensor, tokens: int) -> Iterator[Tensor]:
    """Examples in order of length, in groups of about `tokens` tokens, so that a group needs next to no padding."""
    order_N = lengths_N.argsort(stable=True)
    ends_N = lengths_N[order_N].cumsum(0)
    group_N = (ends_N - 1) // tokens
    sizes = torch.unique_consecutive(group_N, return_counts=True)[1].tolist()
    yield from order_N.split(sizes)
