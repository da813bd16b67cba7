"""Facts that follow from a run's recipe: sizes of a step, the schedule, the model and the cost of a token.

The plausibility rules compare the log with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError

from cramming.config import UserError, build, choose
from cramming.model.config import LastLayer, ModelConfig
from cramming.objectives import OBJECTIVES, Objective
from cramming.record_schema import Record, Section
from cramming.schedule import SCHEDULES, BatchRamp, PeakRate, Schedule, sequences_per_step


class _RecipeSection(Section):
    """Section of a recipe, in which a whole number may be written as 1e3, as on a command line."""

    model_config = ConfigDict(strict=False)


class TrainSettings(_RecipeSection):
    """Settings of section `train` that are compared with the log."""

    sequence_length: int
    batch_size: int
    batch_ramp: dict[str, Any] | None
    log_every: int
    validations: int
    validation_tokens: int


class _Budget(_RecipeSection):
    heartbeat_seconds: float


class _Attention(_RecipeSection):
    last_layer: LastLayer


class _Named(_RecipeSection):
    """Section of the recipe of which the rules read only `name`, `mode` or `compile`."""

    name: str | None = None
    mode: str | None = None
    compile: str | None = None


class _Settings(_RecipeSection):
    """Sections of a recipe that the rules read."""

    seed: int
    budget: _Budget
    train: TrainSettings
    attention: _Attention
    start: _Named
    precision: _Named
    runtime: _Named


@dataclass(frozen=True)
class RecipeFacts:
    """Settings of a run, built as the training process builds them."""

    settings: _Settings
    ramp: BatchRamp | None
    schedule: Schedule
    objective: Objective
    model: ModelConfig
    peak_learning_rate: float

    @classmethod
    def of(cls, record: Record) -> "RecipeFacts":
        """Build the facts from the record's copy of the recipe; raise UserError if no run starts with it."""
        recipe = record.config
        try:
            settings = _Settings.model_validate(recipe)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{place} of the recipe: {first['msg']}") from None
        ramp = settings.train.batch_ramp
        model = _model(recipe, record.corpus.vocab_size or 0)
        optim = _section(recipe, "optim")
        rate = build(PeakRate, {name: optim.get(name) for name in PeakRate.model_fields}, "optim")
        return cls(
            settings=settings,
            ramp=None if ramp is None else build(BatchRamp, ramp, "train.batch_ramp"),
            schedule=choose(SCHEDULES, recipe.get("schedule"), "schedule"),
            objective=choose(OBJECTIVES, recipe.get("objective"), "objective"),
            model=model,
            peak_learning_rate=rate.peak_learning_rate(
                settings.train.batch_size, model.hidden_size
            ),
        )

    @property
    def is_plain(self) -> bool:
        """True if the objective has a single phase, of a masked language model, from the first step to the last."""
        return self.objective.has_masked_lm and len(self.objective.phases_by_start) == 1

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of one token of training, for a plain objective."""
        length, last_layer = self.settings.train.sequence_length, self.settings.attention.last_layer
        return self.objective.flops_per_token(self.model, length, 0.0, last_layer)

    def sequences_at(self, progress: float) -> int:
        """Return the sequences of a step that begins at this progress."""
        return sequences_per_step(self.ramp, progress, self.settings.train.batch_size)


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    if not isinstance(section, Mapping):
        raise UserError(f"{name} of the recipe is no section")
    return section


def _model(recipe: Mapping[str, Any], corpus_vocabulary: int) -> ModelConfig:
    """Return the model with the vocabulary that training fills in: the corpus's, padded to a multiple of 64."""
    section = _section(recipe, "model")
    vocabulary = section.get("vocab_size") or (corpus_vocabulary + 63) // 64 * 64
    return build(ModelConfig, {**section, "vocab_size": vocabulary}, "model")
