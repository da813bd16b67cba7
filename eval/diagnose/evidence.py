"""Evidence of a diagnosis: facts of the corpus, of the run's log and of its weights. No torch.

Each part may be missing: a corpus has no run, an archive has no checkpoints, and a corpus may be gone. A number that is
not known is NaN, which no comparison holds for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cramming.objectives.masking import MaskedTargets

TENTH = 10  # a loss is the mean over this part of the steps: one step has noise


@dataclass(frozen=True)
class CorpusFacts:
    """Counts of a corpus. Shares are of the sampled tokens.

    `unigram`, `bigram`, `trigram`: entropies in nats per held-out token. `repeated`: windows of about 12 words that
    were there before; `repeated_text`: the most frequent one. `unseen`: held-out tokens that the sample does not have.
    `neighbour_gain`, `far_gain`: nats by which the word before, or the third before, predicts a word better than its
    frequency. `used_entries`: entries of the vocabulary that the sample has.
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

    `losses_S`: of each step in nats, NaN where not finite. `norms_R`: gradient norm of the last step of
    each row. `form`: how targets are hidden in the phase that most steps are in. `skipped`: steps that
    moved no weight. `validations`: step and loss, in the form that is one for all runs. `all_mask_loss`: of the final
    weights, every target behind [MASK]. `predicts_tokens`: losses are of tokens, and compare with entropies.
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
        return _mean(self.losses_S[-max(1, len(self.losses_S) // TENTH) :])

    @property
    def best_loss(self) -> float:
        """Lowest mean loss of any tenth of the steps."""
        size = max(1, len(self.losses_S) // TENTH)
        means = [_mean(self.losses_S[at : at + size]) for at in range(0, len(self.losses_S), size)]
        finite = [mean for mean in means if math.isfinite(mean)]
        return min(finite, default=math.nan)

    @property
    def last_validation(self) -> float:
        """Loss of the last validation; NaN where there was none."""
        return self.validations[-1][1] if self.validations else math.nan

    @property
    def clipped(self) -> float:
        """Share of the logged steps whose gradient was longer than `optim.clip`; NaN without one."""
        if self.clip is None or not len(self.norms_R):
            return math.nan
        return float((self.norms_R > self.clip).mean())

    @property
    def noise(self) -> float:
        """Standard deviation of a step's loss around its neighbours', in the second half of the run."""
        losses = self.losses_S[len(self.losses_S) // 2 :]
        differences = np.diff(losses[np.isfinite(losses)])
        return float(differences.std() / math.sqrt(2)) if len(differences) > 1 else math.nan


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the weights from the checkpoints.

    `changes`: by parameter, the change from the first checkpoint to the last across its first direction, over its
    length: 0 where a parameter was at most shrunk. `distance`: change of all matrices over their length, from the state
    before the first step to the second checkpoint, in `distance_steps` steps. `turn`: cosine between that change and
    the next one. `loss_scale`: of fp16. `losses`: mean loss in nats if the right answer were the token so many places
    behind. `order_use`: change of the states at hidden words, over their length, when the visible words of each
    sequence are shuffled; `context_use`: when those of all sequences are. `order_loss`: by how much the former raises
    the loss.
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
    """All that a diagnosis reads."""

    corpus: CorpusFacts | None = None
    run: RunFacts | None = None
    model: ModelFacts | None = None

    @property
    def hidden_loss(self) -> float:
        """Nats for a token that is hidden behind [MASK]: of the final weights, else of the last checkpoint."""
        if self.run and self.run.all_mask_loss is not None:
            return self.run.all_mask_loss
        return self.model.losses.get(0, math.nan) if self.model else math.nan


def shown_loss(entropy: float, form: MaskedTargets | None) -> float:
    """Return the loss of a predictor with this entropy on targets of which some show themselves or another token.

    It knows how often a shown token is the right one. None: all targets are hidden.
    """
    if form is None:
        return entropy
    itself = max(0.0, 1 - form.mask_share - form.random_share)
    if itself == 0.0:
        return entropy
    trust = itself / (itself + form.random_share)
    behind_random = entropy - math.log(1 - trust) if form.random_share else 0.0
    return form.mask_share * entropy + form.random_share * behind_random - itself * math.log(trust)


def _mean(losses: np.ndarray) -> float:
    return float(losses.mean()) if len(losses) else math.nan
