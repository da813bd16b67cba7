"""Masked language modelling (Devlin et al. 2019, BERT)."""

from dataclasses import replace
from typing import Self

from pydantic import model_validator

from cramming.config import Section, Share, shown
from cramming.objectives.masking import MaskedTargets, Targets
from cramming.objectives.objective import Objective, Rate, require_shares


class Phase(Section):
    """Share `rate` of the tokens that are targets from progress `at` on."""

    at: Share
    rate: Rate


class MaskedObjective(Objective):
    """Prediction of hidden tokens.

    `rate` of the tokens of each row are targets; of these `mask_share` are shown as [MASK], `random_share` as a random
    token and the rest unchanged. BERT: 0.15 and 0.8/0.1 (Devlin et al. 2019, section 3.1). The paper: 0.25 and 0.8/0.1.

    `phases`, in their order, change the rate during the run: a falling one learns much early and trains late on what
    fine-tuning sees, almost whole text (Ankner et al. 2023, "Dynamic masking rate schedules"; mmBERT, Marone et al.
    2025: 30, 15, 5 %). They are steps, not a line, because the number of targets is in every shape.
    """

    rate: Rate
    mask_share: Share
    random_share: Share
    phases: tuple[Phase, ...] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        starts = [phase.at for phase in self.phases or ()]
        if starts != sorted(starts):
            raise ValueError(
                f"phases={shown(self.phases)}: not in order. Sort them by `at`, the share of the budget."
            )
        require_shares(self.mask_share, self.random_share)
        return self

    @property
    def targets(self) -> MaskedTargets:
        """Targets of the first phase."""
        return MaskedTargets(self.rate, self.mask_share, self.random_share)

    @property
    def phases_by_start(self) -> dict[float, Targets]:
        """Targets of each phase by the share of the budget at which it begins."""
        phases: dict[float, Targets] = {0.0: self.targets}
        for phase in self.phases or ():
            phases[phase.at] = replace(self.targets, rate=phase.rate)
        return phases


OBJECTIVE = MaskedObjective
