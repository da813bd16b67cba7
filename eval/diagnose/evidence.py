"""Evidence of a diagnosis: facts of the corpus, of the run's log and of its weights. No torch.

Each part may be missing: a corpus has no run, an archive has no checkpoints, and a corpus may be gone. An unknown
number is NaN, so that comparisons with it are false.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cramming.objectives.masking import MaskedTargets

PARTS = 10  # of the steps of a run, over each of which losses are averaged: those of single steps are noisy


@dataclass(frozen=True)
class CorpusFacts:
    """Facts of a corpus, counted in a sample of its training tokens.

    Attributes:
        unigram: Cross entropy of held-out tokens in nats per token, also `bigram` and `trigram`.
        repeated: Share of the windows of about 12 words that occur earlier in the sample.
        repeated_text: Most frequent window, which occurs `repeated_times` times.
        unseen: Share of the held-out tokens whose entry does not occur in the sample.
        unknown: Share of the sampled tokens that are the unknown token.
        used_entries: Number of entries of the vocabulary that occur in the sample.
        neighbour_gain: Nats by which the word before predicts a word better than its frequency does.
        far_gain: The same for the third word before.
    """

    vocab_size: int
    sampled_tokens: int
    unigram: float
    bigram: float
    trigram: float
    repeated: float
    repeated_text: str
    repeated_times: int
    unseen: float
    unknown: float
    tokens_per_word: float | None
    used_entries: int
    neighbour_gain: float
    far_gain: float
    tokens_per_document: float


@dataclass(frozen=True)
class RunFacts:
    """Facts about a training from its log.

    Attributes:
        losses_S: Loss of each step in nats, NaN if it is not finite.
        norms_R: Gradient norm of the last step of each logged row.
        clip: Largest gradient norm (`optim.clip`), or None without clipping.
        skipped: Number of steps that changed no weight.
        validations: Step and pinned validation loss in nats.
        all_mask_loss: Validation loss of the final weights with every target shown as [MASK].
        predicts_tokens: Whether losses are of predicted tokens, and so compare with entropies.
        rate: Share of the tokens that are targets, in the middle of the budget.
        form: Form in which targets are shown, in the middle of the budget; None if they are not masked.
        peak_rate: Peak learning rate.
    """

    status: str
    steps: int
    epochs: float
    losses_S: np.ndarray
    norms_R: np.ndarray
    clip: float | None
    skipped: int
    validations: tuple[tuple[int, float], ...]
    all_mask_loss: float | None
    objective: str
    predicts_tokens: bool
    rate: float
    form: MaskedTargets | None
    sequences_per_step: int
    sequence_length: int
    peak_rate: float
    precision: str

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of a full step."""
        return self.sequences_per_step * self.sequence_length

    @property
    def first_loss(self) -> float:
        """Loss of the first steps, before anything is learnt."""
        return _mean(self.losses_S[:3])

    @property
    def last_loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        return _mean(self.losses_S[-max(1, len(self.losses_S) // PARTS) :])

    @property
    def best_loss(self) -> float:
        """Lowest mean loss of any tenth of the steps."""
        size = max(1, len(self.losses_S) // PARTS)
        means = [_mean(self.losses_S[at : at + size]) for at in range(0, len(self.losses_S), size)]
        finite = [mean for mean in means if math.isfinite(mean)]
        return min(finite, default=math.nan)

    @property
    def last_validation(self) -> float:
        """Loss of the last validation; NaN where there was none."""
        return self.validations[-1][1] if self.validations else math.nan

    @property
    def clipped(self) -> float:
        """Share of the logged gradients that were clipped; NaN without clipping or without logged norms."""
        if self.clip is None or not len(self.norms_R):
            return math.nan
        return float((self.norms_R > self.clip).mean())

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of a step's loss, from differences of neighbours in the second half."""
        losses = self.losses_S[len(self.losses_S) // 2 :]
        differences = np.diff(losses[np.isfinite(losses)])
        return float(differences.std() / math.sqrt(2)) if len(differences) > 1 else math.nan


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the weights from the checkpoints. Lengths are Euclidean norms.

    Attributes:
        changes: Relative change of each parameter from the first checkpoint to the last: the length of its component
            orthogonal to the first value, over the length of that value. So shrinking alone counts as 0.
        distance: Length of the change of all matrices over their length, from the state before the first step to the
            second checkpoint, which is after `distance_steps` steps.
        turn: Cosine between that change and the change to the third checkpoint.
        loss_scale: Loss scale of fp16 in the last checkpoint.
        losses: Mean loss in nats by offset, if the right answer were the token `offset` places behind the hidden one.
        order_use: Relative change of the states at hidden words if the visible words of each sequence are shuffled.
        context_use: The same if visible words are shuffled across sequences.
        order_loss: Nats by which the loss rises if the visible words of each sequence are shuffled.
    """

    changes: Mapping[str, float] = field(default_factory=dict)
    distance: float = math.nan
    distance_steps: int = 0
    turn: float = math.nan
    loss_scale: float = math.nan
    losses: Mapping[int, float] = field(default_factory=dict)
    order_use: float = math.nan
    context_use: float = math.nan
    order_loss: float = math.nan


@dataclass(frozen=True)
class Evidence:
    """Facts that a diagnosis reads."""

    corpus: CorpusFacts | None = None
    run: RunFacts | None = None
    model: ModelFacts | None = None

    @property
    def hidden_loss(self) -> float:
        """Loss in nats of targets shown as [MASK]: that of the final weights, or else that of the last checkpoint."""
        if self.run and self.run.all_mask_loss is not None:
            return self.run.all_mask_loss
        return self.model.losses.get(0, math.nan) if self.model else math.nan


def shown_loss(entropy: float, form: MaskedTargets | None) -> float:
    """Return the training loss of a predictor whose loss on targets shown as [MASK] is `entropy`.

    In training some targets are shown unchanged and some as a random token. The predictor knows how often a shown
    token is the right one. Without a `form` all targets are shown as [MASK].
    """
    if form is None:
        return entropy
    unchanged_share = max(0.0, 1 - form.mask_share - form.random_share)
    if unchanged_share == 0.0:
        return entropy
    trust = unchanged_share / (unchanged_share + form.random_share)
    loss_of_random = entropy - math.log(1 - trust) if form.random_share else 0.0
    loss_of_unchanged = -math.log(trust)
    return (
        form.mask_share * entropy
        + form.random_share * loss_of_random
        + unchanged_share * loss_of_unchanged
    )


def _mean(losses: np.ndarray) -> float:
    return float(losses.mean()) if len(losses) else math.nan
