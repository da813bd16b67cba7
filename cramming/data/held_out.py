"""The one validation of all runs: what is asked of a model does not depend on what or how it trains.

The text is a part of the held-out split: stretches of `STRETCH` tokens, evenly spread over it, end to end, at most
`train.validation_tokens` of them together. Of each `BLOCK` of its tokens 3 are targets, 15 %, special tokens excepted.
Which ones, and behind what, is a hash of the token's place in that text. So runs with other sequence lengths, packing,
micro-batches, seeds or objectives answer for the same tokens; what differs is the context that their windows give.
Rows and batches that the text does not fill are filled from its beginning, without targets.

Two forms: `pinned` hides 80 % of the targets behind [MASK] and 10 % behind a random token and shows the rest (Devlin et
al. 2019, section 3.1); `all_mask` hides all of them behind [MASK], so that no target shows itself.

Shapes: N tokens of the text, P of it filled up to whole batches, R rows of L tokens, C targets per row.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from cramming.data.batches import Batch, BatchSource
from cramming.data.manifest import Manifest
from cramming.data.masking import IGNORE, Masked, Masker, ObjectiveConfig, hash64
from cramming.data.stream import TokenStream

SEED = 20_221_228
BLOCK, PER_BLOCK = 20, 3
STRETCH = 1024
PINNED = ObjectiveConfig("mlm", PER_BLOCK / BLOCK, 0.8, 0.1)
ALL_MASK = replace(PINNED, mask_share=1.0, random_share=0.0)
_CHOOSE = 21


def validation_text(stream: TokenStream, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The text's ids [N], and ascending places in it where a document or a stretch begins."""
    size = min(STRETCH, most, stream.num_tokens)
    count = min(most, stream.num_tokens) // size
    begins = np.linspace(0, stream.num_tokens - size, count).astype(np.int64) if count > 1 else np.zeros(1, np.int64)
    documents = stream.document_starts
    starts = []
    for k, begin in enumerate(begins):
        low, high = np.searchsorted(documents, [begin, begin + size])
        starts.append(k * size + np.append(0, documents[low:high] - begin))
    return stream.gather(begins, size).reshape(-1), np.unique(np.concatenate(starts))


def chosen_targets(ids_N: np.ndarray, is_special_V: np.ndarray) -> np.ndarray:
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


class HeldOutMasker(Masker):
    """Rows of the text by their number, masked; row r holds the tokens from r * L on."""

    def __init__(self, like: Masker, form: ObjectiveConfig, is_target_P: np.ndarray, length: int) -> None:
        self.config, self.mask_id, self.seed = form, like.mask_id, SEED
        self.is_special_V, self.regular_ids = like.is_special_V, like.regular_ids
        self.is_target_RL = is_target_P.reshape(-1, length)
        self.targets_per_row = max(1, int(self.is_target_RL.sum(1).max()))  # of every row: shapes never change

    def __call__(self, ids_RL: np.ndarray, samples_R: np.ndarray) -> Masked:
        """Mask rows whose numbers are `samples_R`; those with fewer targets than others have places without one."""
        rows, length = ids_RL.shape
        is_target_RL = self.is_target_RL[samples_R]
        first_RC = np.argsort(~is_target_RL, axis=1, kind="stable")[:, : self.targets_per_row]
        chosen_RC, row_R1 = np.sort(first_RC, axis=1), np.arange(rows)[:, None]
        valid_RC, targets_RC = is_target_RL[row_R1, chosen_RC], ids_RL[row_R1, chosen_RC].astype(np.int64)
        shown_RC = self.shown(targets_RC, samples_R[:, None] * length + chosen_RC)
        inputs_RL = ids_RL.astype(np.int64)
        inputs_RL[row_R1, chosen_RC] = np.where(valid_RC, shown_RC, targets_RC)
        positions_M = (row_R1 * length + chosen_RC).reshape(-1)
        return Masked(inputs_RL, positions_M, np.where(valid_RC, targets_RC, IGNORE).reshape(-1))


class HeldOut:
    """The validation of a run, which reads windows of its own length from the text that is the same for all."""

    def __init__(self, source: BatchSource, most_tokens: int) -> None:
        """`source`: batches of the held-out split with the run's sequence length and packing."""
        self.source, self.length = source, source.sequence_length
        self.ids_N, self.starts = validation_text(source.stream, max(most_tokens, self.length))
        self.is_target_N = chosen_targets(self.ids_N, source.masker.is_special_V)

    def batches(self, form: ObjectiveConfig, rows: int) -> list[Batch]:
        """All of the text in batches of one size, of at most so many rows: nothing compiles twice."""
        needed = math.ceil(len(self.ids_N) / self.length)
        rows = min(rows, needed)
        number = math.ceil(needed / rows)
        missing = number * rows * self.length - len(self.ids_N)
        ids_P = np.resize(self.ids_N, len(self.ids_N) + missing)
        starts = np.append(self.starts, len(self.ids_N)) if missing else self.starts
        stream = TokenStream.of_array(ids_P, starts)
        masker = HeldOutMasker(self.source.masker, form, np.pad(self.is_target_N, (0, missing)), self.length)
        source = _InPlace(stream, masker, self.length, self.source.packing)
        return [source.batch(first, rows) for first in range(0, number * rows, rows)]


class _InPlace(BatchSource):
    """Windows where the text has them: sample r is row r."""

    def __init__(self, stream: TokenStream, masker: Masker, length: int, packing: Literal["rows", "documents"]) -> None:
        self.stream, self.masker, self.sequence_length, self.packing = stream, masker, length, packing
        self.seed, self.shuffle = SEED, False

    def window_starts(self, samples_N: np.ndarray) -> np.ndarray:
        """Row r begins at token r * L."""
        return samples_N * self.sequence_length


def bits_per_byte(all_mask_loss: float, manifest: Manifest) -> float | None:
    """Bits for each byte of text: nats per target of the form `all_mask`, times tokens per byte, over ln 2.

    Tokens, without the special ones, and UTF-8 bytes are those of the whole corpus that the held-out text belongs to,
    as preparation counted them, so vocabularies compare, with however many letters to a token. It is what a token costs
    beside the other 85 %, not a likelihood of the text. None where the corpus has no such count (format 1).
    """
    counted = manifest.statistics
    if not counted.get("bytes"):
        return None
    documents = sum(shard.documents for shards in manifest.splits.values() for shard in shards)
    tokens = counted["tokens"] - 2 * documents  # each document has [CLS] and [SEP]
    return all_mask_loss * tokens / counted["bytes"] / math.log(2)
