"""Packed batches as a pure function of a sample index, and the one validation of all runs.

A sample is a window of `sequence_length` tokens of the corpus, one flat stream; sample i of epoch e is window
permutation_e(i), a keyed bijection computed per index, so neither memory nor start-up time grows with the corpus and
any position can be resumed from one integer. Each epoch shifts all windows by another offset. A batch is the rows of
consecutive samples laid end to end. Without `shuffle` samples come in the order of the stream: a curriculum
(`train.order`).

`packing: rows` makes a row one sequence whatever documents it holds (the paper's choice; fastest). `packing:
documents` ends a sequence at the end of each document, with positions from zero and no attention across (NeoBERT,
table 3: packing without such a mask costs 2.8 % of the GLUE score).

Shapes: T = rows * sequence_length tokens, S bounds (cumulative starts, then T repeated up to a fixed size), M
targets. The fixed size is a bound on the sequences of a whole batch (`BatchSource.max_sequences`), tighter than rows
times the worst window, because attention kernels allocate memory for each entry (FlashAttention's backward pass: 128
tokens in fp32).
"""

import copy
import math
import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cramming.config import UserError
from cramming.data.corpus import TokenStream
from cramming.data.manifest import Manifest
from cramming.model.attention import Packing
from cramming.objectives.masking import (
    BLOCK,
    IGNORE,
    PER_BLOCK,
    Masked,
    MaskedTargets,
    Masker,
    Targets,
    hash64,
)

PackingMode = Literal["rows", "documents"]

SEED = 20_221_228  # seed of the validation
# length of the excerpts of the held-out split that form the validation text
EXCERPT_TOKENS = 1024
# Devlin et al. 2019, section 3.1, whatever the objective of the run
BERT_MASKING = MaskedTargets(PER_BLOCK / BLOCK, 0.8, 0.1)
# every target is shown as [MASK]
ALL_MASK = replace(BERT_MASKING, mask_share=1.0, random_share=0.0)
_PERMUTE, _OFFSET, _CHOOSE = 11, 12, 21  # streams of random numbers


@dataclass(frozen=True)
class Batch:
    """Micro-batch on some device. `num_targets` counts the targets that are not IGNORE.

    `uniform_M` holds random numbers in [0, 1) where the objective samples replacements.
    """

    ids_T: Tensor
    positions_T: Tensor
    packing: Packing
    target_positions_M: Tensor
    target_ids_M: Tensor
    num_targets: int
    uniform_M: Tensor | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments of the model's forward pass."""
        tokens = (self.ids_T, self.positions_T, self.packing)
        targets = (self.target_positions_M, self.target_ids_M)
        if self.uniform_M is None:
            return (*tokens, *targets)
        return (*tokens, *targets, self.uniform_M)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`; from pinned memory the copy does not block."""
        if device.type == "cpu":
            return self
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with `change` applied to each of its tensors."""
        return replace(self, **tree_map_only(Tensor, change, vars(self)))


def permute(index_N: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Return a pseudo-random bijection of [0, size), evaluated at `index_N`.

    A four-round Feistel network on the next even number of bits. A result outside the range is permuted again until
    it is inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"): fewer than 4 iterations on average.
    """
    bits = max(size - 1, 1).bit_length()
    half = (bits + 1) // 2
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
    """Batches of one split of a corpus. Sample indices continue through the epochs without end."""

    def __init__(
        self,
        stream: TokenStream,
        masker: Masker,
        sequence_length: int,
        packing: PackingMode,
        seed: int,
        shuffle: bool = True,
    ):
        if stream.num_tokens < 2 * sequence_length:
            raise UserError(
                f"{stream.name}: {stream.num_tokens} tokens are fewer than two windows of train.sequence_length="
                f"{sequence_length}. Prepare more text, shorten the windows, or for the validation split raise"
                " data.validation_fraction."
            )
        self.stream = stream
        self.masker = masker
        self.sequence_length = sequence_length
        self.packing = packing
        self.seed = seed
        self.shuffle = shuffle
        # One window less than fits, so that their number is the same for every offset.
        self.num_windows = stream.num_tokens // sequence_length - 1
        self._max_sequences: dict[int, int] = {}  # key: rows

    def with_targets(self, targets: Targets, weights_V: np.ndarray | None = None) -> "BatchSource":
        """Return a source of the same samples with other targets, or with other weights of the ids."""
        other = copy.copy(self)
        other.masker = copy.copy(self.masker)
        other.masker.targets, other.masker.weights_V = targets, weights_V
        return other

    def max_sequences(self, rows: int) -> int:
        """Return the number of sequences that a batch of this many rows has room for.

        It is the same for all batches, so that shapes never change. With `packing: documents` a row is one sequence,
        plus one for each document that begins in it. In stream order, no more documents begin in a batch than in the
        worst window of its total length. Shuffled rows are windows drawn without replacement. Their documents exceed
        the mean by more than t with a probability of at most exp(-t^2 / (2 n v + 2 c t / 3)) (Bernstein's inequality:
        n rows, v the variance and c the maximum per window); t is chosen so that this is 1e-12. For a batch with
        even more, `batch` doubles the size.
        """
        if self.packing == "rows":
            return rows
        if rows not in self._max_sequences:
            self._max_sequences[rows] = rows + self._max_documents(rows)
        return self._max_sequences[rows]

    def _max_documents(self, rows: int) -> int:
        starts, length = self.stream.document_starts, self.sequence_length
        if not self.shuffle:
            return _max_starts_within(starts, rows * length)
        maximum = _max_starts_within(starts, length)
        # Document counts of the windows that have any; the others add nothing to the sum of squares.
        window_changes = np.diff(starts // length, prepend=-1, append=-1)
        counts = np.diff(np.flatnonzero(window_changes))
        windows = max(self.num_windows, int(starts[-1]) // length + 1)
        mean = len(starts) / windows
        variance = float((counts**2).sum()) / windows - mean**2
        exponent = math.log(1e12)  # of the probability exp(-exponent)
        linear = maximum * exponent / 3
        margin = linear + math.sqrt(linear**2 + 2 * rows * variance * exponent)
        return min(rows * maximum, math.ceil(rows * mean + margin))

    def window_starts(self, samples_N: np.ndarray) -> np.ndarray:
        """Return the start of each sample's window in the stream, [N]."""
        epochs_N, index_N = np.divmod(samples_N.astype(np.int64), self.num_windows)
        starts_N = np.empty_like(index_N)
        for epoch in np.unique(epochs_N):
            is_in_epoch_N = epochs_N == epoch
            key = int(hash64(self.seed, _PERMUTE, int(epoch)))
            offset = int(hash64(self.seed, _OFFSET, int(epoch)) % np.uint64(self.sequence_length))
            windows = index_N[is_in_epoch_N]
            if self.shuffle:
                windows = permute(windows, self.num_windows, key)
            starts_N[is_in_epoch_N] = windows * self.sequence_length + offset
        return starts_N

    def batch(self, first_sample: int, rows: int) -> Batch:
        """Return the batch of samples first_sample .. first_sample + rows - 1, on the CPU."""
        length = self.sequence_length
        samples_N = np.arange(first_sample, first_sample + rows)
        starts_N = self.window_starts(samples_N)
        masked = self.masker(self.stream.gather(starts_N, length), samples_N)
        row_length = length if self.packing == "rows" else None
        if row_length:
            bounds_S = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
            positions_T = np.tile(np.arange(length), rows)
        else:
            sequences = self._sequence_starts(starts_N)
            room = self.max_sequences(rows)
            while room < len(sequences):
                room *= 2
            bounds_S = np.full(room + 1, rows * length, dtype=np.int32)
            bounds_S[: len(sequences)] = sequences
            sizes = np.diff(np.append(sequences, rows * length))
            positions_T = np.arange(rows * length) - np.repeat(sequences, sizes)
        packing = Packing(
            torch.from_numpy(bounds_S),
            row_length,
            max_length=length,
            aligned_length=length,
            causal=self.masker.targets.is_causal,
        )
        uniform_M = None if masked.uniform_M is None else torch.from_numpy(masked.uniform_M)
        return Batch(
            ids_T=torch.from_numpy(masked.ids_NL.reshape(-1)),
            positions_T=torch.from_numpy(positions_T),
            packing=packing,
            target_positions_M=torch.from_numpy(masked.target_positions_M),
            target_ids_M=torch.from_numpy(masked.target_ids_M),
            num_targets=int((masked.target_ids_M != IGNORE).sum()),
            uniform_M=uniform_M,
        )

    def _sequence_starts(self, starts_N: np.ndarray) -> np.ndarray:
        """Return the ascending starts, within the batch, of rows and of the documents that begin inside them."""
        documents, length = self.stream.document_starts, self.sequence_length
        low_N = np.searchsorted(documents, starts_N, side="right")
        high_N = np.searchsorted(documents, starts_N + length, side="left")
        counts_N = high_N - low_N
        row_D = np.repeat(np.arange(len(starts_N)), counts_N)
        within_D = np.arange(len(row_D)) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
        inside_D = documents[low_N[row_D] + within_D] - starts_N[row_D] + row_D * length
        return np.sort(np.concatenate([np.arange(len(starts_N)) * length, inside_D]))


def _max_starts_within(document_starts: np.ndarray, length: int) -> int:
    """Return the largest number of document starts in any window of `length` tokens."""
    ends = np.searchsorted(document_starts, document_starts + length, side="left")
    return int((ends - np.arange(len(document_starts))).max())


class HeldOut:
    """The one validation of all runs: its tokens and targets do not depend on the model or its training.

    The text consists of excerpts evenly spread over the held-out split, end to end, at most `most_tokens`. Of every
    20 of its tokens 3 are targets. A hash of the token's index in that text decides which, and how they are masked,
    so runs with other sequence lengths, packing, micro-batches, seeds or objectives predict the same tokens. Rows and
    batches that the text does not fill are filled from its beginning, without targets.
    """

    def __init__(self, source: BatchSource, most_tokens: int) -> None:
        """Store the text of `source`: batches of the held-out split with the run's sequence length and packing."""
        self.source, self.length = source, source.sequence_length
        self.ids_N, self.starts = validation_text(source.stream, max(most_tokens, self.length))
        self.is_target_N = _chosen_targets(self.ids_N, source.masker.is_special_V)

    def batches(self, masking: MaskedTargets, rows: int) -> list[Batch]:
        """Return the whole text in batches of at most `rows` rows, of equal size, so that nothing compiles twice.

        `masking` says what is shown in place of the targets.
        """
        needed = math.ceil(len(self.ids_N) / self.length)
        rows = min(rows, needed)
        num_batches = math.ceil(needed / rows)
        tokens = num_batches * rows * self.length
        missing = tokens - len(self.ids_N)
        two_rows = 2 * self.length  # a source has no fewer
        ids_P = np.resize(self.ids_N, max(tokens, two_rows))
        starts = np.append(self.starts, len(self.ids_N)) if missing else self.starts
        is_target_RL = np.pad(self.is_target_N, (0, missing)).reshape(-1, self.length)
        masker = copy.copy(self.source.masker)
        masker.seed, masker.weights_V = SEED, None
        masker.targets = _HeldOutTargets(
            masking.rate, masking, is_target_RL, self.source.masker.targets.needs_uniform
        )
        stream = TokenStream.of_array(ids_P, starts)
        packing = self.source.packing
        source = _OrderedRows(stream, masker, self.length, packing, SEED, shuffle=False)
        return [source.batch(first, rows) for first in range(0, num_batches * rows, rows)]


def validation_text(stream: TokenStream, most_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the text's ids [N], and the ascending indices in it at which a document or an excerpt begins."""
    size = min(EXCERPT_TOKENS, most_tokens, stream.num_tokens)
    count = min(most_tokens, stream.num_tokens) // size
    begins = np.zeros(1, np.int64)
    if count > 1:
        begins = np.linspace(0, stream.num_tokens - size, count).astype(np.int64)
    documents = stream.document_starts
    starts = []
    for k, begin in enumerate(begins):
        low, high = np.searchsorted(documents, [begin, begin + size])
        starts.append(k * size + np.append(0, documents[low:high] - begin))
    return stream.gather(begins, size).reshape(-1), np.unique(np.concatenate(starts))


def _chosen_targets(ids_N: np.ndarray, is_special_V: np.ndarray) -> np.ndarray:
    """Return a bool [N] of the targets: in each block the `PER_BLOCK` regular tokens with the least hashes."""
    never = np.uint64(2**64 - 1)
    num_blocks = math.ceil(len(ids_N) / BLOCK)
    keys = hash64(SEED, _CHOOSE, np.arange(num_blocks * BLOCK)) >> np.uint64(1)
    keys[len(ids_N) :] = never
    keys[: len(ids_N)][is_special_V[ids_N]] = never
    keys_KB = keys.reshape(-1, BLOCK)
    least_K3 = np.argpartition(keys_KB, PER_BLOCK - 1, axis=1)[:, :PER_BLOCK]
    chosen_KB = np.zeros(keys_KB.shape, dtype=bool)
    np.put_along_axis(chosen_KB, least_K3, True, axis=1)
    return (chosen_KB & (keys_KB != never)).reshape(-1)[: len(ids_N)]


@dataclass(frozen=True, eq=False)
class _HeldOutTargets(Targets):
    """Targets at fixed positions of the text, hidden by `masking`; row r holds the tokens from r * L on."""

    masking: MaskedTargets
    is_target_RL: np.ndarray
    has_uniform: bool

    def per_row(self, length: int) -> int:
        """Return the largest number of targets in a row: every row gets this number, so that shapes never change."""
        return max(1, int(self.is_target_RL.sum(1).max()))

    def mask(self, masker: Masker, ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Mask the rows with numbers `samples_N`; rows with fewer targets than others have targets of IGNORE."""
        length = ids_NL.shape[1]
        is_target_NL = self.is_target_RL[samples_N]
        # the row's targets, then its first other tokens
        first_NC = np.argsort(~is_target_NL, axis=1, kind="stable")[:, : self.per_row(length)]
        chosen_NC = np.sort(first_NC, axis=1)
        is_target_NC = np.take_along_axis(is_target_NL, chosen_NC, 1)
        keys = (samples_N[:, None] * length + chosen_NC,)
        return self.masking.hide(
            masker, ids_NL, chosen_NC, is_target_NC, keys, needs_uniform=self.has_uniform
        )


class _OrderedRows(BatchSource):
    """Source of the validation text: sample r is row r."""

    def window_starts(self, samples_N: np.ndarray) -> np.ndarray:
        """Return the start of each row: row r begins at token r * L."""
        return samples_N * self.sequence_length


def tokens_per_byte(manifest: Manifest) -> float | None:
    """Return the number of tokens, without special ones, per UTF-8 byte of a corpus, as preparation counted them.

    Bits per byte, which are comparable between vocabularies, are this number times the loss with every target shown
    as [MASK] (nats per target), over ln 2. They measure the cost of a token given the other 85 %, not a likelihood of
    the text. None if the corpus has no byte count.
    """
    counted = manifest.statistics
    if not counted.get("bytes"):
        return None
    shards = chain.from_iterable(manifest.splits.values())
    documents = sum(shard.documents for shard in shards)
    tokens = counted["tokens"] - 2 * documents  # each document has [CLS] and [SEP]
    return float(tokens / counted["bytes"])


def prefetch_batches(
    make: Callable[[int], Batch], device: torch.device, depth: int
) -> Generator[Batch]:
    """Prefetch batches for `device`; for a GPU into pinned memory, from which copies do not block."""
    if device.type != "cuda":
        return prefetch(make, depth)
    return prefetch(lambda index: make(index).map(Tensor.pin_memory), depth)


def prefetch(make: Callable[[int], Batch], depth: int) -> Generator[Batch]:
    """Yield make(0), make(1), ..., computed in a thread, with at most `depth` waiting; close() ends the thread."""
    ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Batch | BaseException) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.2)
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
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(timeout=10)
