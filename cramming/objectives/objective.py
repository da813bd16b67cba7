"""Base class of all objectives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from cramming.config import Section
from cramming.data.corpus import Corpus
from cramming.hooks import Hook
from cramming.model import config as costs
from cramming.model.config import LastLayer, ModelConfig, ParameterCount
from cramming.objectives.masking import Targets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cramming.model.heads import PretrainedModel

Rate = Annotated[float, Field(gt=0, lt=1)]


def require_shares(mask_share: float, random_share: float) -> None:
    """Raise ValueError for shares of the targets that are more than the whole."""
    if mask_share + random_share > 1 + 1e-9:
        raise ValueError(
            f"random_share={random_share:g}: more than the whole with mask_share={mask_share:g}."
            " Lower one of them."
        )


class Objective(Section, ABC):
    """Targets of each phase of a run, and the model that predicts them.

    `has_masked_lm`: the trained model predicts hidden tokens, so its validation loss compares with that of others.
    `gives_losses`: a forward pass returns the loss of each target too.
    """

    name: str
    has_masked_lm: ClassVar[bool] = True
    gives_losses: ClassVar[bool] = False
    validation_name: ClassVar[str] = "validation loss"
    validation_prefix: ClassVar[str] = ""  # of loss and accuracy in the log's validation events

    @property
    @abstractmethod
    def phases_by_start(self) -> Mapping[float, Targets]:
        """Targets of each phase by the share of the budget at which it begins, ascending from 0."""

    def at(self, progress: float) -> Targets:
        """Return the targets of the phase in force at this share of the budget."""
        begun = [start for start in self.phases_by_start if start <= progress]
        return self.phases_by_start[begun[-1]]

    @property
    def largest_phase(self) -> Targets:
        """Targets of the phase that needs the most memory; of two with as many a causal one, for its masks."""

        def size(targets: Targets) -> tuple[float, bool]:
            return targets.rate, targets.is_causal

        return max(self.phases_by_start.values(), key=size)

    @property
    def kind(self) -> str:
        """Name in the record: what the model learns."""
        return self.name

    def describe(self, length: int) -> str:
        """Return the targets of each phase in words, in rows of `length` tokens."""
        phases = []
        for start, targets in self.phases_by_start.items():
            causal = "causal " if targets.is_causal else ""
            since = f" from {start:.0%} of the budget on" if start else ""
            phases.append(f"{targets.per_row(length)} {causal}targets per sequence{since}")
        return ", ".join(phases)

    def require_corpus(self, corpus: Corpus, length: int) -> None:
        """Raise UserError if the objective cannot be trained on rows of `length` tokens of this corpus."""

    def build_model(self, config: ModelConfig, **options: Any) -> "PretrainedModel":
        """Return the model with random weights. `options`: attention kernel, `last_layer`, `loss_chunk`."""
        from cramming.model.heads import MaskedLM

        return MaskedLM(config, **options, gives_losses=self.gives_losses)

    def count_parameters(self, config: ModelConfig) -> ParameterCount:
        """Return the number of trained parameters."""
        return costs.count_parameters(config)

    def flops_per_token(
        self, config: ModelConfig, length: int, progress: float, last_layer: LastLayer
    ) -> float:
        """Return the model FLOPs of one training token at this share of the budget, in rows of `length` tokens."""
        targets_per_token = self.at(progress).per_row(length) / length
        return costs.flops_per_token(config, length, targets_per_token, last_layer)

    def hooks(
        self,
        vocab_size: int,
        device: "torch.device",
        sum_over_ranks: "Callable[[Tensor], None]",
    ) -> list[Hook]:
        """Return the objective's work around training steps.

        `sum_over_ranks` sums a tensor over the processes with other samples, in place.
        """
        return []
