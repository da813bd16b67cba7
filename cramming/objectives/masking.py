"""Choice of the target tokens of a row, and of the tokens that are shown in their place.

Every random choice is a hash of (seed, sample index, position): the masks of a sample are the same whatever batch, rank
or process it appears in, and a later epoch, with other sample indices, has others (dynamic masking, Liu et al. 2019,
section 4.1). Shapes: N rows, L tokens per row, C = round(rate * L) targets per row, M = N * C; they never change.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

IGNORE = -100  # the target id at a position that is no target, as in torch's cross entropy
BLOCK, PER_BLOCK = 20, 3  # in the validation text, 3 of each 20 tokens are targets
_SELECT, _REPLACE, _TOKEN, _SAMPLE = 1, 2, 3, 4  # streams of random numbers, not correlated
_NEVER = np.uint64(2**64 - 1)  # the key of a token that cannot be chosen; other keys have 63 bits


class Masked(NamedTuple):
    """Inputs [N, L], and flat positions and original ids [M] of the targets (id IGNORE where a row has too few).

    `uniform_M`: for each target a random number in [0, 1), with which a replacement is sampled; None where none is.
    """

    ids_NL: np.ndarray
    target_positions_M: np.ndarray
    target_ids_M: np.ndarray
    uniform_M: np.ndarray | None = None


def hash64(seed: int, *keys: np.ndarray | int) -> np.ndarray:
    """Return uniform uint64 numbers from integer keys that broadcast together.

    Chained finalisers of SplitMix64 (Steele et al. 2014).
    """
    state = np.asarray(seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _mix(state + np.asarray(key).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return _mix(state + np.uint64(0x9E3779B97F4A7C15))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class Targets(ABC):
    """Choice of targets in one phase of an objective. Equal objects choose the same.

    `rate`: share of the tokens; `is_causal`: no token sees a later one; `needs_uniform`: the model samples a
    replacement for each target from a random number in [0, 1).
    """

    rate: float
    is_causal: ClassVar[bool] = False
    needs_uniform: ClassVar[bool] = False

    def per_row(self, length: int) -> int:
        """Return the number of targets in a row of `length` tokens, at least one."""
        return max(1, round(self.rate * length))

    @abstractmethod
    def mask(self, masker: "Masker", ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Return inputs and targets of rows whose sample indices are `samples_N`."""


@dataclass(frozen=True)
class MaskedTargets(Targets):
    """Hidden tokens: `mask_share` are shown as [MASK], `random_share` as a random token, the rest unchanged."""

    mask_share: float
    random_share: float

    def mask(self, masker: "Masker", ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Return the rows with their targets hidden."""
        count = self.per_row(ids_NL.shape[1])
        chosen_NC, is_target_NC = masker.choose(
            ids_NL, ~masker.is_special_V[ids_NL], samples_N, count
        )
        keys = samples_N[:, None], chosen_NC
        return self.hide(
            masker, ids_NL, chosen_NC, is_target_NC, keys, needs_uniform=self.needs_uniform
        )

    def hide(
        self,
        masker: "Masker",
        ids_NL: np.ndarray,
        chosen_NC: np.ndarray,
        is_target_NC: np.ndarray,
        keys: tuple[np.ndarray, ...],
        *,
        needs_uniform: bool,
    ) -> Masked:
        """Return the rows with the positions `chosen_NC` hidden where `is_target_NC`; `keys` broadcast to [N, C]."""
        targets_NC = np.take_along_axis(ids_NL, chosen_NC, 1).astype(np.int64)
        kind_NC = hash64(masker.seed, _REPLACE, *keys).astype(np.float64) / 2.0**64
        pick_NC = hash64(masker.seed, _TOKEN, *keys) % np.uint64(len(masker.regular_ids))
        is_masked_NC = kind_NC < self.mask_share
        is_random_NC = ~is_masked_NC & (kind_NC < self.mask_share + self.random_share)
        shown_NC = np.where(is_masked_NC, masker.mask_id, targets_NC)
        shown_NC = np.where(is_random_NC, masker.regular_ids[pick_NC.astype(np.int64)], shown_NC)
        inputs_NL = ids_NL.astype(np.int64)
        np.put_along_axis(inputs_NL, chosen_NC, np.where(is_target_NC, shown_NC, targets_NC), 1)
        positions_M = (np.arange(len(ids_NL))[:, None] * ids_NL.shape[1] + chosen_NC).reshape(-1)
        target_ids_M = np.where(is_target_NC, targets_NC, IGNORE).reshape(-1)
        uniform_M = None
        if needs_uniform:  # 24 bits, which fp32 holds exactly: no number is rounded to 1
            bits_NC = hash64(masker.seed, _SAMPLE, *keys) >> np.uint64(40)
            uniform_M = (bits_NC.astype(np.float32) / np.float32(2**24)).reshape(-1)
        return Masked(inputs_NL, positions_M, target_ids_M, uniform_M)


class Masker:
    """Targets of one phase for one vocabulary and seed.

    `weights_V`: relative frequency with which each id is chosen as a target; None: all are equal.
    """

    def __init__(
        self,
        targets: Targets,
        vocab_size: int,
        mask_id: int,
        special_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        assert mask_id in special_ids
        self.targets, self.mask_id, self.seed = targets, mask_id, seed
        self.weights_V: np.ndarray | None = None
        self.is_special_V = np.zeros(vocab_size, dtype=bool)
        self.is_special_V[list(special_ids)] = True
        self.regular_ids = np.flatnonzero(~self.is_special_V)

    def __call__(self, ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Mask rows `ids_NL` whose sample indices are `samples_N`. Special tokens are never targets."""
        return self.targets.mask(self, ids_NL, samples_N)

    def choose(
        self,
        answers_NL: np.ndarray,
        can_be_target_NL: np.ndarray,
        samples_N: np.ndarray,
        count: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` ascending positions of each row, [N, C], and whether each of them can be a target.

        `answers_NL`: the id to predict at each position, which decides its weight.
        """
        positions_L = np.arange(answers_NL.shape[1])
        keys_NL = hash64(self.seed, _SELECT, samples_N[:, None], positions_L[None, :])
        keys_NL >>= np.uint64(1)
        never: np.uint64 | float = _NEVER
        if self.weights_V is not None:
            keys_NL, never = _weighted_keys(keys_NL, self.weights_V[answers_NL]), np.inf
        keys_NL[~can_be_target_NL] = never
        chosen_NC = np.sort(np.argpartition(keys_NL, count - 1, axis=1)[:, :count], axis=1)
        return chosen_NC, np.take_along_axis(keys_NL, chosen_NC, 1) != never


def _weighted_keys(keys_NL: np.ndarray, weights_NL: np.ndarray) -> np.ndarray:
    """Return keys of which the least are a sample without replacement by weights (Efraimidis & Spirakis 2006).

    They are exponentially distributed, with the weights as rates; of equal weights, in the order of the 63-bit keys.
    """
    uniform_NL = (keys_NL >> np.uint64(10)).astype(np.float64) / 2.0**53
    return -np.log1p(-uniform_NL) / weights_NL
