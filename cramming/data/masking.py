"""Masked language modelling on packed windows: which tokens are hidden, and behind what.

Every random choice is a hash of (seed, sample index, position), not a draw from a generator with a state. So the masks
of a sample are the same whatever batch, rank or process it appears in, resuming needs no random state, and the whole
batch is computed in a few vector operations. A sample seen again in a later epoch has another sample index, so it gets
other masks (dynamic masking, Liu et al. 2019, section 4.1).

The number of targets per row is fixed, round(rate * length), so that shapes never change.

Shapes: N rows, L tokens per row, M = N * targets_per_row.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

IGNORE = -100  # the target id of a place without a target, as in torch's cross entropy

# Streams of random numbers that must not be correlated with each other.
_SELECT, _REPLACE, _TOKEN = 1, 2, 3


@dataclass(frozen=True)
class ObjectiveConfig:
    """How targets are chosen and hidden.

    `rate` of the tokens of each row are targets; of these `mask_share` are shown as [MASK], `random_share` as a random
    token and the rest unchanged. BERT: 0.15 and 0.8/0.1 (Devlin et al. 2019, section 3.1). The paper: 0.25 and 0.8/0.1.
    """

    name: Literal["mlm"]
    rate: float
    mask_share: float
    random_share: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"rate={self.rate} is not between 0 and 1")
        if self.mask_share < 0 or self.random_share < 0 or self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"mask_share={self.mask_share} and random_share={self.random_share} are not shares of one whole"
            )

    def targets_per_row(self, length: int) -> int:
        """Targets in a row of `length` tokens, at least one."""
        return max(1, round(self.rate * length))


class Masked(NamedTuple):
    """Inputs [N, L], and flat positions and original ids [M] of the targets (id IGNORE where a row has too few)."""

    ids_NL: np.ndarray
    target_positions_M: np.ndarray
    target_ids_M: np.ndarray


def hash64(seed: int, *keys: np.ndarray | int) -> np.ndarray:
    """Uniform uint64 numbers from integer keys that broadcast together: chained SplitMix64 finalisers (Steele 2014)."""
    state = np.asarray(seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _mix(state + np.asarray(key).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return _mix(state + np.uint64(0x9E3779B97F4A7C15))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Masker:
    """Applies an objective for one vocabulary."""

    def __init__(self, config: ObjectiveConfig, vocab_size: int, mask_id: int, special_ids: tuple[int, ...], seed: int):
        assert mask_id in special_ids
        self.config, self.mask_id, self.seed = config, mask_id, seed
        self.is_special_V = np.zeros(vocab_size, dtype=bool)
        self.is_special_V[list(special_ids)] = True
        self.regular_ids = np.flatnonzero(~self.is_special_V)

    def shown(self, targets_NC: np.ndarray, *keys: np.ndarray) -> np.ndarray:
        """What stands in the place of each target; `keys` of the hash broadcast to them."""
        kind_NC = hash64(self.seed, _REPLACE, *keys).astype(np.float64) / 2.0**64
        pick_NC = hash64(self.seed, _TOKEN, *keys) % np.uint64(len(self.regular_ids))
        shown_NC = np.where(kind_NC < self.config.mask_share, self.mask_id, targets_NC)
        random_NC = (kind_NC >= self.config.mask_share) & (kind_NC < self.config.mask_share + self.config.random_share)
        return np.where(random_NC, self.regular_ids[pick_NC.astype(np.int64)], shown_NC)

    def __call__(self, ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Mask rows `ids_NL` whose sample indices are `samples_N`. Special tokens are never targets."""
        rows, length = ids_NL.shape
        count = self.config.targets_per_row(length)
        keys_NL = hash64(self.seed, _SELECT, samples_N[:, None], np.arange(length)[None, :])
        keys_NL >>= np.uint64(1)  # room for a value above every key: the tokens that may not be chosen
        never = np.uint64(2**64 - 1)
        keys_NL[self.is_special_V[ids_NL]] = never
        chosen_NC = np.sort(np.argpartition(keys_NL, count - 1, axis=1)[:, :count], axis=1)
        row_N1 = np.arange(rows)[:, None]
        targets_NC = ids_NL[row_N1, chosen_NC].astype(np.int64)
        valid_NC = keys_NL[row_N1, chosen_NC] != never

        shown_NC = self.shown(targets_NC, samples_N[:, None], chosen_NC)
        inputs_NL = ids_NL.astype(np.int64)
        inputs_NL[row_N1, chosen_NC] = np.where(valid_NC, shown_NC, targets_NC)
        positions_M = (row_N1 * length + chosen_NC).reshape(-1)
        return Masked(inputs_NL, positions_M, np.where(valid_NC, targets_NC, IGNORE).reshape(-1))
