"""Masked language modelling beside a teacher's predictions; its model is in cramming/model/distillation.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cramming.config import LocalPath, Positive, Share, UserError, file_sha256, require
from cramming.data.corpus import Corpus
from cramming.data.manifest import TOKENIZER
from cramming.model.config import ModelConfig
from cramming.objectives.mlm import MaskedObjective

if TYPE_CHECKING:
    from cramming.model.heads import PretrainedModel

NO_TEACHER = "objective.teacher=null: no teacher. Give a model folder, such as runs/<name>/final."


class DistillObjective(MaskedObjective):
    """Prediction of hidden tokens, and of what another model predicts for them.

    `teacher`: the folder of a masked language model with the corpus's tokenizer. `teacher_sha256`: of its weights;
    without it a resume or a replay does not notice that they have changed. `weight`: the share of its predictions in
    the gradient. `temperature` divides the logits of both models.

    The loss in the log is that of the hidden tokens. Model compute is the student's: the teacher's passes are not
    counted, because a run's log must tell its compute without the teacher's folder.
    """

    teacher: LocalPath | None
    teacher_sha256: str | None
    weight: Share
    temperature: Positive

    @property
    def teacher_folder(self) -> Path:
        """Folder of the teacher; UserError where none is set."""
        if self.teacher is None:
            raise UserError(NO_TEACHER)
        return self.teacher

    def require_corpus(self, corpus: Corpus, length: int) -> None:
        """Raise UserError unless the teacher has the corpus's tokenizer, and positions for rows of this length."""
        from cramming.model.distillation import teacher_config

        longest = teacher_config(self.teacher_folder, self.teacher_sha256).max_length
        require(
            length <= longest,
            f"train.sequence_length={length}: above the {longest} of objective.teacher. Lower it.",
        )
        file = self.teacher_folder / TOKENIZER
        is_same = file.is_file() and file_sha256(file) == corpus.manifest.tokenizer.sha256
        require(
            is_same,
            f"objective.teacher={self.teacher}: its {TOKENIZER} is not that of {corpus.folder}."
            " Take the corpus that it was trained on.",
        )

    def build_model(self, config: ModelConfig, **options: Any) -> "PretrainedModel":
        """Return the student with random weights, and its teacher."""
        from cramming.model.distillation import DistilledLM

        teacher = self.teacher_folder, self.teacher_sha256
        return DistilledLM(config, *teacher, self.weight, self.temperature, **options)


OBJECTIVE = DistillObjective
