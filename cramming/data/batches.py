"""Packed batches: a pure function from a sample index to tensors.

The corpus is one flat stream of tokens. A sample is a window of `sequence_length` tokens of it; sample i of epoch e is
window permutation_e(i), where the permutation is a keyed bijection computed per index, so that neither memory nor
start-up time grows with the corpus and any position can be resumed from one integer. Each epoch shifts all windows by
another offset, so that cuts fall elsewhere. A batch is the rows of consecutive samples laid end to end. Without
`shuffle` the permutation is left out, and the samples come as the stream has them: a curriculum (`train.order`).

`packing: rows` lets a row be one sequence whatever documents it holds (the paper's choice; fastest). `packing:
documents` ends a sequence at each document's end, with positions from zero and no attention across (NeoBERT, table 3:
packing without such a mask costs 2.8 % of the GLUE score).

Shapes: T = rows * sequence_length tokens, S bounds (cumulative starts, then T repeated up to a fixed size), M targets.

That size is by what the corpus's documents come to in so many rows, not by the worst window in each of them: attention
kernels have memory for every sequence that there may be (FlashAttention's backward pass: 128 tokens in fp32).
"""

import math
import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cramming.config import UserError
from cramming.data.corpus import TokenStream
from cramming.data.masking import IGNORE, Masker, hash64
from cramming.model.attention import Packing

_PERMUTE, _OFFSET = 11, 12


@dataclass(frozen=True)
class Batch:
    """One micro-batch on some device. `num_targets` counts the places whose target is not IGNORE."""

    ids_T: Tensor
    positions_T: Tensor
    packing: Packing
    target_positions_M: Tensor
    target_ids_M: Tensor
    num_targets: int

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`; from pinned memory the copy does not block."""
        return self if device.type == "cpu" else self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `change` applied to each of its tensors."""
        return Batch(
            change(self.ids_T),
            change(self.positions_T),
            self.packing._replace(bounds_S=change(self.packing.bounds_S)),
            change(self.target_positions_M),
            change(self.target_ids_M),
            self.num_targets,
        )


def permute(index_N: np.ndarray, size: int, seed: int) -> np.ndarray:
    """A pseudo-random bijection of [0, size), evaluated at `index_N`.

    A four-round Feistel network on the next even number of bits; results outside the range walk the cycle until they
    fall inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"): fewer than 4 rounds on average.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    values = index_N.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for round_ in range(4):
            left, right = right, left ^ (hash64(seed, round_, right) & mask)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


class BatchSource:
    """Batches of one split of a corpus. Sample indices run on through the epochs without end."""

    def __init__(
        self,
        stream: TokenStream,
        masker: Masker,
        sequence_length: int,
        packing: Literal["rows", "documents"],
        seed: int,
        shuffle: bool = True,
    ):
        if stream.num_tokens < 2 * sequence_length:
            raise UserError(
                f"{stream.name}: {stream.num_tokens} tokens are fewer than two windows of train.sequence_length="
                f"{sequence_length}; prepare more text, shorten the windows, or for the validation split raise"
                " data.validation_fraction"
            )
        self.stream, self.masker = stream, masker
        self.sequence_length, self.packing, self.seed, self.shuffle = sequence_length, packing, seed, shuffle
        # One window less than fits, so that every offset leaves as many.
        self.num_windows = stream.num_tokens // sequence_length - 1

    def most_sequences(self, rows: int) -> int:
        """Sequences that a batch of so many rows has room for: one size for all of them, so that shapes never change.

        With `packing: documents` a row is one sequence and one more for each document that begins in it. Rows that
        follow each other in the stream have at most what any stretch of that length has. Shuffled, they are windows
        drawn without replacement, whose documents come to more than t above their mean with a probability of at most
        exp(-t^2 / (2 n v + 2 c t / 3)) (Bernstein's inequality: n rows, v the variance and c the maximum per window);
        t is chosen so that this is 1e-12. A batch that has more all the same (`batch`) takes twice the size.
        """
        if self.packing == "rows":
            return rows
        if rows not in self._most_sequences:
            self._most_sequences[rows] = rows + self._most_documents(rows)
        return self._most_sequences[rows]

    @cached_property
    def _most_sequences(self) -> dict[int, int]:
        return {}

    def _most_documents(self, rows: int) -> int:
        starts, length = self.stream.document_starts, self.sequence_length
        if not self.shuffle:
            return _most_starts_within(starts, rows * length)
        most = _most_starts_within(starts, length)
        counts = np.bincount(starts // length, minlength=self.num_windows)
        spread, tail = rows * float(counts.var()), most * math.log(1e12) / 3
        above = tail + math.sqrt(tail**2 + 2 * spread * math.log(1e12))
        return min(rows * most, math.ceil(rows * float(counts.mean()) + above))

    def window_starts(self, samples_N: np.ndarray) -> np.ndarray:
        """Start tokens [N] in the stream of the samples' windows."""
        epochs_N, index_N = np.divmod(samples_N.astype(np.int64), self.num_windows)
        starts_N = np.empty_like(index_N)
        for epoch in np.unique(epochs_N):
            here = epochs_N == epoch
            key = int(hash64(self.seed, _PERMUTE, int(epoch)))
            offset = int(hash64(self.seed, _OFFSET, int(epoch)) % np.uint64(self.sequence_length))
            window_N = permute(index_N[here], self.num_windows, key) if self.shuffle else index_N[here]
            starts_N[here] = window_N * self.sequence_length + offset
        return starts_N

    def batch(self, first_sample: int, rows: int) -> Batch:
        """The batch of samples first_sample .. first_sample + rows - 1, on the CPU."""
        length = self.sequence_length
        samples_N = np.arange(first_sample, first_sample + rows)
        starts_N = self.window_starts(samples_N)
        masked = self.masker(self.stream.gather(starts_N, length), samples_N)
        if self.packing == "rows":
            bounds_S = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
            positions_T = np.tile(np.arange(length), rows)
        else:
            sequences = self._sequence_starts(starts_N)
            room = self.most_sequences(rows)
            while room < len(sequences):
                room *= 2
            bounds_S = np.full(room + 1, rows * length, dtype=np.int32)
            bounds_S[: len(sequences)] = sequences
            sizes = np.diff(np.append(sequences, rows * length))
            positions_T = np.arange(rows * length) - np.repeat(sequences, sizes)
        return Batch(
            torch.from_numpy(masked.ids_NL.reshape(-1)),
            torch.from_numpy(positions_T),
            Packing(torch.from_numpy(bounds_S), length if self.packing == "rows" else None, length, length),
            torch.from_numpy(masked.target_positions_M),
            torch.from_numpy(masked.target_ids_M),
            int((masked.target_ids_M != IGNORE).sum()),
        )

    def _sequence_starts(self, starts_N: np.ndarray) -> np.ndarray:
        """Ascending starts, in the batch's own coordinates, of rows and of the documents that begin inside them."""
        documents, length = self.stream.document_starts, self.sequence_length
        low_N = np.searchsorted(documents, starts_N, side="right")
        high_N = np.searchsorted(documents, starts_N + length, side="left")
        counts_N = high_N - low_N
        row_D = np.repeat(np.arange(len(starts_N)), counts_N)
        within_D = np.arange(len(row_D)) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
        inside_D = documents[low_N[row_D] + within_D] - starts_N[row_D] + row_D * length
        return np.sort(np.concatenate([np.arange(len(starts_N)) * length, inside_D]))


def _most_starts_within(document_starts: np.ndarray, length: int) -> int:
    """The largest number of document starts in any window of `length` tokens."""
    ends = np.searchsorted(document_starts, document_starts + length, side="left")
    return int((ends - np.arange(len(document_starts))).max())


def made_ahead(make: Callable[[int], Batch], device: torch.device, depth: int = 3) -> Generator[Batch]:
    """`prefetch`, for a GPU into pinned memory, from where copies to it do not wait."""
    if device.type != "cuda":
        return prefetch(make, depth)
    return prefetch(lambda index: make(index).map(Tensor.pin_memory), depth)


def prefetch(make: Callable[[int], Batch], depth: int = 3) -> Generator[Batch]:
    """make(0), make(1), ... computed ahead in one thread, at most `depth` waiting; close() ends it."""
    waiting: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Batch | BaseException) -> None:
        while not stop.is_set():
            try:
                waiting.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def work() -> None:
        index = 0
        try:
            while not stop.is_set():
                put(make(index))
                index += 1
        except BaseException as error:  # delivered to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = waiting.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(timeout=10)
