"""Next-token prediction, then masked language modelling."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from cramming.config import Share
from cramming.objectives.masking import IGNORE, Masked, MaskedTargets, Masker, Targets
from cramming.objectives.objective import Objective, Rate, require_shares


@dataclass(frozen=True)
class NextTokens(Targets):
    """The tokens that follow `rate` of the tokens. Nothing is hidden, and no token sees a later one."""

    is_causal: ClassVar[bool] = True

    def mask(self, masker: Masker, ids_NL: np.ndarray, samples_N: np.ndarray) -> Masked:
        """Return the unchanged rows and their targets. No target is in the next document: its first token is [CLS]."""
        rows, length = ids_NL.shape
        next_NL = np.roll(ids_NL, -1, axis=1)
        can_be_target_NL = ~masker.is_special_V[next_NL]
        can_be_target_NL[:, -1] = False  # the token after a row belongs to another row
        chosen_NC, is_target_NC = masker.choose(
            next_NL, can_be_target_NL, samples_N, self.per_row(length)
        )
        positions_M = (np.arange(rows)[:, None] * length + chosen_NC).reshape(-1)
        targets_M = np.where(is_target_NC.reshape(-1), next_NL.reshape(-1)[positions_M], IGNORE)
        return Masked(ids_NL.astype(np.int64), positions_M, targets_M.astype(np.int64))


class CausalObjective(Objective):
    """Next-token prediction up to the share `until` of the budget, then prediction of hidden tokens.

    Gisserot-Boukhlef et al. 2025 ("Should we still pretrain encoders with masked language modeling?") find such a phase
    before masked ones best at fixed compute. In both phases `rate` of the tokens are targets: so the vocabulary
    projection, a small model's largest product, costs the same. `mask_share` and `random_share`: as in objective=mlm.
    """

    rate: Rate
    mask_share: Share
    random_share: Share
    until: Annotated[float, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        require_shares(self.mask_share, self.random_share)
        return self

    @property
    def phases_by_start(self) -> dict[float, Targets]:
        """Targets of each phase by the share of the budget at which it begins."""
        phases: dict[float, Targets] = {0.0: NextTokens(self.rate)}
        if self.until < 1:
            phases[self.until] = MaskedTargets(self.rate, self.mask_share, self.random_share)
        return phases

    @property
    def kind(self) -> str:
        """Name in the record: what the model learns, in order."""
        return "causal, then mlm" if self.until < 1 else "causal"


OBJECTIVE = CausalObjective
