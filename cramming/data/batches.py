"""Packed batches: a pure function from a sample index to tensors; and the one validation of all runs.

A sample is a window of `sequence_length` tokens of the corpus, one flat stream; sample i of epoch e is window
permutation_e(i), a keyed bijection computed per index, so neither memory nor start-up grows with the corpus and any
position can be resumed from one integer. Each epoch shifts all windows by another offset. A batch is the rows of
consecutive samples laid end to end. Without `shuffle` samples come in the stream's order: a curriculum (`train.order`).

`packing: rows` lets a row be one sequence whatever documents it holds (the paper's choice; fastest). `packing:
documents` ends a sequence at each document's end, with positions from zero and no attention across (NeoBERT, table 3:
packing without such a mask costs 2.8 % of the GLUE score).

Shapes: T = rows * sequence_length tokens, S bounds (cumulative starts, then T repeated up to a fixed size), M targets.
That size is by what the corpus's documents come to in so many rows, not by the worst window in each of them: attention
kernels have memory for every sequence that there may be (FlashAttention's backward pass: 128 tokens in fp32).
"""

import copy
import math
import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
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

Packed = Literal["rows", "documents"]

SEED, STRETCH = 20_221_228, 1024  # of the validation, whose text is stretches of so many tokens
PINNED = MaskedTargets(PER_BLOCK / BLOCK, 0.8, 0.1)  # Devlin et al. 2019, section 3.1
ALL_MASK = replace(PINNED, mask_share=1.0, random_share=0.0)  # no target shows itself
_PERMUTE, _OFFSET, _CHOOSE = 11, 12, 21  # streams of random numbers


@dataclass(frozen=True)
class Batch:
    """One micro-batch on some device. `num_targets` counts the places whose target is not IGNORE."""

    ids_T: Tensor
    positions_T: Tensor
    packing: Packing
    target_positions_M: Tensor
    target_ids_M: Tensor
    num_targets: int
    uniform_M: Tensor | None = (
        None  # random numbers in [0, 1), where the objective samples replacements
    )

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the forward pass of the model takes."""
        places = (
            self.ids_T,
            self.positions_T,
            self.packing,
            self.target_positions_M,
            self.target_ids_M,
        )
        return places if self.uniform_M is None else (*places, self.uniform_M)

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`; from pinned memory the copy does not block."""
        return (
            self
            if device.type == "cpu"
            else self.map(lambda tensor: tensor.to(device, non_blocking=True))
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `change` applied to each of its tensors."""
        return replace(self, **tree_map_only(Tensor, change, vars(self)))


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
        packing: Packed,
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
        self.sequence_length, self.packing, self.seed, self.shuffle = (
            sequence_length,
            packing,
            seed,
            shuffle,
        )
        # One window less than fits, so that every offset leaves as many.
        self.num_windows = stream.num_tokens // sequence_length - 1
        self._most_sequences: dict[int, int] = {}  # by rows

    def of(self, targets: Targets, weights_V: np.ndarray | None = None) -> "BatchSource":
        """Return a source of the same samples with other targets, or other weights of the ids."""
        other = copy.copy(self)
        other.masker = copy.copy(self.masker)
        other.masker.targets, other.masker.weights_V = targets, weights_V
        return other

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

    def _most_documents(self, rows: int) -> int:
        starts, length = self.stream.document_starts, self.sequence_length
        if not self.shuffle:
            return _most_starts_within(starts, rows * length)
        most = _most_starts_within(starts, length)
        counts = np.diff(
            np.flatnonzero(np.diff(starts // length, prepend=-1, append=-1))
        )  # no empty windows: too many
        windows = max(self.num_windows, int(starts[-1]) // length + 1)
        mean = len(starts) / windows
        spread, tail = (
            rows * (float((counts**2).sum()) / windows - mean**2),
            most * math.log(1e12) / 3,
        )
        return min(
            rows * most,
            math.ceil(rows * mean + (tail + math.sqrt(tail**2 + 2 * spread * math.log(1e12)))),
        )

    def window_starts(self, samples_N: np.ndarray) -> np.ndarray:
        """Start tokens [N] in the stream of the samples' windows."""
        epochs_N, index_N = np.divmod(samples_N.astype(np.int64), self.num_windows)
        starts_N = np.empty_like(index_N)
        for epoch in np.unique(epochs_N):
            here = epochs_N == epoch
            key = int(hash64(self.seed, _PERMUTE, int(epoch)))
            offset = int(hash64(self.seed, _OFFSET, int(epoch)) % np.uint64(self.sequence_length))
            window_N = (
                permute(index_N[here], self.num_windows, key) if self.shuffle else index_N[here]
            )
            starts_N[here] = window_N * self.sequence_length + offset
        return starts_N

    def batch(self, first_sample: int, rows: int) -> Batch:
        """The batch of samples first_sample .. first_sample + rows - 1, on the CPU."""
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
            Packing(
                torch.from_numpy(bounds_S),
                row_length,
                length,
                length,
                self.masker.targets.is_causal,
            ),
            torch.from_numpy(masked.target_positions_M),
            torch.from_numpy(masked.target_ids_M),
            int((masked.target_ids_M != IGNORE).sum()),
            None if masked.uniform_M is None else torch.from_numpy(masked.uniform_M),
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


class HeldOut:
    """The one validation of all runs: what is asked of a model does not depend on what or how it trains.

    The text is stretches evenly spread over the held-out split, end to end, at most `most_tokens`. Of each 20 of its
    tokens 3 are targets; which ones, and behind what, is a hash of the token's place in that text, so runs with other
    sequence lengths, packing, micro-batches, seeds or objectives answer for the same tokens. Rows and batches that the
    text does not fill are filled from its beginning, without targets.
    """

    def __init__(self, source: BatchSource, most_tokens: int) -> None:
        """`source`: batches of the held-out split with the run's sequence length and packing."""
        self.source, self.length = source, source.sequence_length
        self.ids_N, self.starts = validation_text(source.stream, max(most_tokens, self.length))
        self.is_target_N = _chosen_targets(self.ids_N, source.masker.is_special_V)

    def batches(self, form: MaskedTargets, rows: int) -> list[Batch]:
        """All of the text in batches of one size, of at most so many rows: nothing compiles twice."""
        needed = math.ceil(len(self.ids_N) / self.length)
        rows = min(rows, needed)
        number = math.ceil(needed / rows)
        missing = number * rows * self.length - len(self.ids_N)
        ids_P = np.resize(self.ids_N, len(self.ids_N) + missing)
        starts = np.append(self.starts, len(self.ids_N)) if missing else self.starts
        is_target_RL = np.pad(self.is_target_N, (0, missing)).reshape(-1, self.length)
        masker = copy.copy(self.source.masker)
        masker.seed, masker.weights_V = SEED, None
        masker.targets = _HeldOutTargets(
            form.rate, form, is_target_RL, self.source.masker.targets.draws
        )
        source = _InPlace(
            TokenStream.of_array(ids_P, starts), masker, self.length, self.source.packing
        )
        return [source.batch(first, rows) for first in range(0, number * rows, rows)]


def validation_text(stream: TokenStream, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The text's ids [N], and ascending places in it where a document or a stretch begins."""
    size = min(STRETCH, most, stream.num_tokens)
    count = min(most, stream.num_tokens) // size
    begins = (
        np.linspace(0, stream.num_tokens - size, count).astype(np.int64)
        if count > 1
        else np.zeros(1, np.int64)
    )
    documents = stream.document_starts
    starts = []
    for k, begin in enumerate(begins):
        low, high = np.searchsorted(documents, [begin, begin + size])
        starts.append(k * size + np.append(0, documents[low:high] - begin))
    return stream.gather(begins, size).reshape(-1), np.unique(np.concatenate(starts))


def _chosen_targets(ids_N: np.ndarray, is_special_V: np.ndarray) -> np.ndarray:
    """Which tokens are targets, bool [N]: in each block the `PER_BLOCK` regular ones with the least hashes."""
    never = np.uint64(2**64 - 1)
    keys = hash64(SEED, _CHOOSE, np.arange(-(-len(ids_N) // BLOCK) * BLOCK)) >> np.uint64(1)
    keys[len(ids_N) :] = never
    keys[: len(ids_N)][is_special_V[ids_N]] = never
    keys_KB = keys.reshape(-1, BLOCK)
    least_K3 = np.argpartition(keys_KB, PER_BLOCK - 1, axis=1)[:, :PER_BLOCK]
    chosen_KB = np.zeros(keys_KB.shape, dtype=bool)
    np.put_along_axis(chosen_KB, least_K3, True, axis=1)
    return (chosen_KB & (keys_KB != never)).reshape(-1)[: len(ids_N)]


@dataclass(frozen=True, eq=False)
class _HeldOutTargets(Targets):
    """Targets at fixed places of the text, hidden as `form` says; row r holds the tokens from r * L on."""

    form: MaskedTargets
    is_target_RL: np.ndarray
    has_uniform: bool

    def per_row(self, length: int) -> int:
        """Return the largest number of targets of a row: all have as many places, so shapes never change."""
        return max(1, int(self.is_target_RL.sum(1).max()))

    def mask(self, masker: Masker, ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Mask rows whose numbers are `samples_N`; those with fewer targets than others have places without one."""
        length = ids_NL.shape[1]
        is_target_NL = self.is_target_RL[samples_N]
        first_NC = np.argsort(~is_target_NL, axis=1, kind="stable")[:, : self.per_row(length)]
        chosen_NC = np.sort(first_NC, axis=1)
        is_target_NC = np.take_along_axis(is_target_NL, chosen_NC, 1)
        keys = (samples_N[:, None] * length + chosen_NC,)
        return self.form.hide(masker, ids_NL, chosen_NC, is_target_NC, keys, draws=self.has_uniform)


class _InPlace(BatchSource):
    """Windows where the text has them: sample r is row r."""

    def __init__(self, stream: TokenStream, masker: Masker, length: int, packing: Packed) -> None:
        self.stream, self.masker, self.sequence_length, self.packing = (
            stream,
            masker,
            length,
            packing,
        )
        self.seed, self.shuffle, self._most_sequences = SEED, False, {}

    def window_starts(self, samples_N: np.ndarray) -> np.ndarray:
        """Row r begins at token r * L."""
        return samples_N * self.sequence_length


def tokens_per_byte(manifest: Manifest) -> float | None:
    """Return tokens, without the special ones, per UTF-8 byte of a corpus, as preparation counted them.

    Times nats per target with every target behind [MASK], over ln 2, this gives bits per byte, by which vocabularies
    compare. It is what a token costs beside the other 85 %, not a likelihood of the text. None where the corpus has no
    such count.
    """
    counted = manifest.statistics
    if not counted.get("bytes"):
        return None
    documents = sum(shard.documents for shards in manifest.splits.values() for shard in shards)
    tokens = counted["tokens"] - 2 * documents  # each document has [CLS] and [SEP]
    return float(tokens / counted["bytes"])


def made_ahead(make: Callable[[int], Batch], device: torch.device, depth: int) -> Generator[Batch]:
    """`prefetch`, for a GPU into pinned memory, from where copies to it do not wait."""
    if device.type != "cuda":
        return prefetch(make, depth)
    return prefetch(lambda index: make(index).map(Tensor.pin_memory), depth)


def prefetch(make: Callable[[int], Batch], depth: int) -> Generator[Batch]:
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
