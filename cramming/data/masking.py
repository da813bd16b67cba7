"""Masked language modelling on packed windows: which tokens are hidden, and behind what; and its causal phases.

Every random choice is a hash of (seed, sample index, position): the masks of a sample are the same whatever batch, rank
or process it appears in, and a later epoch, with other sample indices, has others (dynamic masking, Liu et al. 2019,
section 4.1). Shapes: N rows, L tokens per row, C = round(rate * L) targets per row, M = N * C; they never change.
"""

from itertools import groupby
from typing import Annotated, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from cramming.config import Fraction, Positive, Section, Share, shown

IGNORE = -100  # the target id of a place without a target, as in torch's cross entropy
BLOCK, PER_BLOCK = 20, 3  # of the validation: of each so many tokens so many are targets

# Streams of random numbers that must not be correlated with each other.
_SELECT, _REPLACE, _TOKEN, _SAMPLE = 1, 2, 3, 4


Rate = Annotated[float, Field(gt=0, lt=1)]


class Phase(Section):
    """From progress `at` on (a share of the budget) `rate` of the tokens are targets, in a `causal` phase or not."""

    at: Share
    rate: Rate
    causal: bool = False


class ByLoss(Section):
    """Tokens with a high mean loss are targets more often, from progress `start` to `until` (shares of the budget).

    A token's weight is its loss beside the mean one, to the `power`, from every `every` of the budget on anew
    (cramming/data/token_losses.py).
    """

    start: Fraction
    until: Share
    every: Positive
    power: Positive

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> Self:
        if self.until <= self.start:
            raise ValueError(
                f"until={self.until:g}: not after start={self.start:g}. Raise it, or lower start."
            )
        return self


class ObjectiveConfig(Section):
    """How targets are chosen and hidden.

    `rate` of the tokens of each row are targets; of these `mask_share` are shown as [MASK], `random_share` as a random
    token and the rest unchanged. BERT: 0.15 and 0.8/0.1 (Devlin et al. 2019, section 3.1). The paper: 0.25 and 0.8/0.1.

    `phases`, in their order, change the rate during the run: a falling one learns much early and trains late on what
    fine-tuning sees, almost whole text (Ankner et al. 2023, "Dynamic masking rate schedules"; mmBERT, Marone et al.
    2025: 30, 15, 5 %). They are steps, not a line, because the number of targets is in every shape.

    `causal`: nothing is hidden, no token sees one after it, and a target is the token after the place that is asked.
    Gisserot-Boukhlef et al. 2025 ("Should we still pretrain encoders with masked language modeling?") find such a phase
    before masked ones best at fixed compute. There too `rate` of the tokens are targets: the vocabulary projection, a
    small model's largest product, costs the same.

    `by_loss`: which tokens are targets, not how many, follows what the model still gets wrong. Null: all alike.
    """

    name: str
    rate: Rate
    mask_share: Share
    random_share: Share
    phases: tuple[Phase, ...] | None = None
    causal: bool = False
    by_loss: ByLoss | None = None
    replaces_tokens: ClassVar[bool] = (
        False  # whether the encoder is shown tokens sampled for the targets
    )
    validation_name: ClassVar[str] = "validation loss"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        begins = [phase.at for phase in self.phases or ()]
        if begins != sorted(begins):
            raise ValueError(
                f"phases={shown(self.phases)}: not in order. Sort them by `at`, the share of the budget."
            )
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"random_share={self.random_share:g}: more than the whole with mask_share={self.mask_share:g}."
                " Lower one of them."
            )
        return self

    def targets_per_row(self, length: int) -> int:
        """Targets in a row of `length` tokens, at least one; of the first phase where there are several."""
        return max(1, round(self.rate * length))

    def at(self, progress: float) -> "ObjectiveConfig":
        """The phase in force at this share of the budget."""
        begun = [phase for phase in self.phases or () if phase.at <= progress]
        now = begun[-1] if begun else self
        return self.replace(rate=now.rate, causal=now.causal, phases=None)

    @property
    def each_phase(self) -> "dict[float, ObjectiveConfig]":
        """What is in force one after the other, by where it begins."""
        return {
            begin: self.at(begin) for begin in [0.0, *(phase.at for phase in self.phases or ())]
        }

    def with_most_targets(self) -> "ObjectiveConfig":
        """The phase that needs the most memory; of two with as many targets a causal one, for its masks."""
        return max(self.each_phase.values(), key=lambda phase: (phase.rate, phase.causal))

    @property
    def kinds(self) -> str:
        """For the record: "mlm", or with other phases such as "causal, then mlm"."""
        kinds = ("causal" if phase.causal else self.name for phase in self.each_phase.values())
        return ", then ".join(kind for kind, _ in groupby(kinds))


class ReplacedTokensConfig(ObjectiveConfig):
    """Replaced-token detection (Clark et al. 2020, ELECTRA): the encoder tells which tokens a generator has put there.

    The other fields say how the generator's targets are chosen and hidden. `weight` of the encoder's loss beside the
    generator's (theirs: 50), and `generator_width`, the generator's share of the encoder's width, heads and inner width
    (they find 1/4 to 1/2 best).
    """

    weight: Positive
    generator_width: Annotated[float, Field(gt=0, le=1)]
    replaces_tokens: ClassVar[bool] = True
    validation_name: ClassVar[str] = "loss of telling replaced tokens"

    @model_validator(mode="after")
    def _masks_alone(self) -> Self:
        if self.causal or any(phase.causal for phase in self.phases or ()):
            raise ValueError(
                f"causal={shown(self.causal)}: a causal phase is for objective=mlm."
                " Set causal=false, in each of objective.phases too."
            )
        if self.by_loss:
            raise ValueError(
                f"by_loss={shown(self.by_loss)}: for objective=mlm only. Set it to null."
            )
        return self


OBJECTIVES: dict[str, type[ObjectiveConfig]] = {"mlm": ObjectiveConfig, "rtd": ReplacedTokensConfig}


class Masked(NamedTuple):
    """Inputs [N, L], and flat positions and original ids [M] of the targets (id IGNORE where a row has too few).

    `uniform_M`: for each target a random number in [0, 1), with which a replacement is sampled; None where none is.
    """

    ids_NL: np.ndarray
    target_positions_M: np.ndarray
    target_ids_M: np.ndarray
    uniform_M: np.ndarray | None = None


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


def _weighted(keys_NL: np.ndarray, weights_NL: np.ndarray) -> np.ndarray:
    """Float keys of which the least are a sample without replacement by weights (Efraimidis & Spirakis 2006).

    They are exponentially distributed, with the weights as rates; of equal weights, in the order of the 63-bit keys.
    """
    uniform_NL = (keys_NL >> np.uint64(10)).astype(np.float64) / 2.0**53
    return -np.log1p(-uniform_NL) / weights_NL


class Masker:
    """Applies an objective for one vocabulary. `weights_V`: how often an id is a target beside others, if not alike."""

    weights_V: np.ndarray | None = None

    def __init__(
        self,
        config: ObjectiveConfig,
        vocab_size: int,
        mask_id: int,
        special_ids: tuple[int, ...],
        seed: int,
    ):
        assert mask_id in special_ids
        self.config, self.mask_id, self.seed = config, mask_id, seed
        self.replaces_tokens = config.replaces_tokens
        self.is_special_V = np.zeros(vocab_size, dtype=bool)
        self.is_special_V[list(special_ids)] = True
        self.regular_ids = np.flatnonzero(~self.is_special_V)

    def __call__(self, ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Mask rows `ids_NL` whose sample indices are `samples_N`. Special tokens are never targets.

        So a causal target is of the document of the place that is asked: the next one begins with [CLS].
        """
        length, causal = ids_NL.shape[1], self.config.causal
        count = self.config.targets_per_row(length)
        answers_NL = np.roll(ids_NL, -1, axis=1) if causal else ids_NL
        keys_NL = hash64(self.seed, _SELECT, samples_N[:, None], np.arange(length)[None, :])
        keys_NL >>= np.uint64(
            1
        )  # room for a value above every key: the tokens that may not be chosen
        never: np.uint64 | float = np.uint64(2**64 - 1)
        if self.weights_V is not None:
            keys_NL, never = _weighted(keys_NL, self.weights_V[answers_NL]), np.inf
        keys_NL[self.is_special_V[answers_NL]] = never
        if causal:
            keys_NL[:, -1] = never  # after the last token of a row comes another row
        chosen_NC = np.sort(np.argpartition(keys_NL, count - 1, axis=1)[:, :count], axis=1)
        is_target_NC = np.take_along_axis(keys_NL, chosen_NC, 1) != never
        if causal:
            places_M = (np.arange(len(ids_NL))[:, None] * length + chosen_NC).reshape(-1)
            targets_M = np.where(is_target_NC.reshape(-1), answers_NL.reshape(-1)[places_M], IGNORE)
            return Masked(ids_NL.astype(np.int64), places_M, targets_M.astype(np.int64))
        return self.hide(ids_NL, chosen_NC, is_target_NC, samples_N[:, None], chosen_NC)

    def hide(
        self, ids_NL: np.ndarray, chosen_NC: np.ndarray, is_target_NC: np.ndarray, *keys: np.ndarray
    ) -> Masked:
        """The rows with what is shown at the `chosen_NC` places where `is_target_NC`; `keys` broadcast to them."""
        targets_NC = np.take_along_axis(ids_NL, chosen_NC, 1).astype(np.int64)
        kind_NC = hash64(self.seed, _REPLACE, *keys).astype(np.float64) / 2.0**64
        pick_NC = hash64(self.seed, _TOKEN, *keys) % np.uint64(len(self.regular_ids))
        shown_NC = np.where(kind_NC < self.config.mask_share, self.mask_id, targets_NC)
        random_NC = (kind_NC >= self.config.mask_share) & (
            kind_NC < self.config.mask_share + self.config.random_share
        )
        shown_NC = np.where(random_NC, self.regular_ids[pick_NC.astype(np.int64)], shown_NC)
        inputs_NL = ids_NL.astype(np.int64)
        np.put_along_axis(inputs_NL, chosen_NC, np.where(is_target_NC, shown_NC, targets_NC), 1)
        positions_M = (np.arange(len(ids_NL))[:, None] * ids_NL.shape[1] + chosen_NC).reshape(-1)
        uniform_M = None
        if self.replaces_tokens:  # of 24 bits, which fp32 holds: 1 is never reached by rounding
            bits_NC = hash64(self.seed, _SAMPLE, *keys) >> np.uint64(40)
            uniform_M = (bits_NC.astype(np.float32) / np.float32(2**24)).reshape(-1)
        return Masked(
            inputs_NL,
            positions_M,
            np.where(is_target_NC, targets_NC, IGNORE).reshape(-1),
            uniform_M,
        )
