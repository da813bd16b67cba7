"""Batches of fine-tuning: any choice of examples end to end without padding, and no word vector that nobody uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cramming.model.attention import Packing
from cramming.model.encoder import Encoder
from eval.finetune.encode import Encoded


class Batch(NamedTuple):
    """Some examples, packed: what the model takes, and their labels."""

    ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor
    packing: Packing
    labels_S: Tensor | None


class PackedSplit:
    """A split's arrays on the device, from which any choice of examples is packed there into a batch.

    Only `lengths_N` is in main memory: the sizes of a batch are known without asking the device.
    """

    def __init__(self, encoded: Encoded, device: torch.device) -> None:
        self.device = device
        self.lengths_N = torch.from_numpy(np.diff(encoded.starts_N))
        arrays = (encoded.ids_T, encoded.types_T, encoded.starts_N)
        self.ids_T, self.types_T, self.starts_N = (torch.from_numpy(array).to(device) for array in arrays)
        self.labels_N = None if encoded.labels_N is None else torch.from_numpy(encoded.labels_N).to(device)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def batch(self, chosen_S: Tensor) -> Batch:
        """The examples `chosen_S` (int64 [S], in main memory) end to end."""
        lengths_S = self.lengths_N[chosen_S]
        total, longest = int(lengths_S.sum()), int(lengths_S.max())
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
        labels_S = None if self.labels_N is None else self.labels_N[chosen_S]
        packing = Packing(bounds_S.int(), None, longest)
        return Batch(self.ids_T[index_T].long(), positions_T, self.types_T[index_T].long(), packing, labels_S)


class UsedVocabulary:
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
