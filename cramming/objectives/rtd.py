"""Replaced-token detection (Clark et al. 2020, ELECTRA); its model is in cramming/model/replaced_tokens.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from cramming.config import Positive
from cramming.model.config import LastLayer, ModelConfig, ParameterCount
from cramming.objectives.masking import MaskedTargets
from cramming.objectives.mlm import MaskedObjective

if TYPE_CHECKING:
    from cramming.model.heads import PretrainedModel


@dataclass(frozen=True)
class SampledTargets(MaskedTargets):
    """Hidden tokens, each with a random number by which its replacement is drawn."""

    needs_uniform: ClassVar[bool] = True


class ReplacedTokensObjective(MaskedObjective):
    """Detection of the tokens that a small generator, itself a masked language model, has put in place of targets.

    `weight` of the encoder's loss beside the generator's (theirs: 50), and `generator_width`, the generator's share of
    the encoder's width, heads and inner width (they find 1/4 to 1/2 best). The other settings say how the generator's
    targets are chosen and hidden.
    """

    weight: Positive
    generator_width: Annotated[float, Field(gt=0, le=1)]
    has_masked_lm: ClassVar[bool] = False
    validation_name: ClassVar[str] = "loss of telling replaced tokens"
    validation_prefix: ClassVar[str] = "replaced_token_"

    @property
    def targets(self) -> MaskedTargets:
        """Targets of the first phase."""
        return SampledTargets(self.rate, self.mask_share, self.random_share)

    def build_model(self, config: ModelConfig, **options: Any) -> "PretrainedModel":
        """Return the encoder and its generator with random weights."""
        from cramming.model.replaced_tokens import ReplacedTokens

        return ReplacedTokens(config, self.generator_width, self.weight, **options)

    def count_parameters(self, config: ModelConfig) -> ParameterCount:
        """Return the number of trained parameters, the generator's included."""
        from cramming.model.replaced_tokens import count_parameters

        return count_parameters(config, self.generator_width)

    def flops_per_token(
        self, config: ModelConfig, length: int, progress: float, last_layer: LastLayer
    ) -> float:
        """Return the model FLOPs of one training token, the generator's included."""
        from cramming.model.replaced_tokens import flops_per_token

        targets_per_token = self.at(progress).per_row(length) / length
        return flops_per_token(config, self.generator_width, length, targets_per_token, last_layer)


OBJECTIVE = ReplacedTokensObjective
