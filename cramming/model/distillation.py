"""Knowledge distillation (Hinton et al. 2015; Sanh et al. 2019, "DistilBERT"): a masked language model with a teacher.

At the targets the student learns the teacher's distribution over the vocabulary beside the hidden token. As in
`linear_cross_entropy` the logits exist in chunks only; autograd computes those of a chunk again in the backward pass.
Shapes: M targets, D hidden size, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cramming.config import UserError, file_sha256, require

from .attention import Packing
from .config import ModelConfig
from .encoder import Encoder
from .heads import MaskedLM, chunk_elements
from .load import load_masked_lm_config, load_weights, weight_file

# Tensors of the size of a chunk's logits that autograd keeps, for each that `linear_cross_entropy` needs
CHUNK_TENSORS = 4


def teacher_config(folder: Path, sha256: str | None) -> ModelConfig:
    """Return the configuration of a teacher, without dropout.

    Raises UserError where there is no masked language model, or one whose weights have another SHA-256.
    """
    try:
        config = load_masked_lm_config(folder, dropout=0.0, attention_dropout=0.0)
        weights = weight_file(folder)
    except UserError as error:
        raise UserError(f"objective.teacher={error}") from None
    require(
        sha256 is None or file_sha256(weights) == sha256,
        f"objective.teacher_sha256={sha256}: the weights in {folder} are others. Restore the teacher.",
    )
    return config


class DistilledLM(MaskedLM):
    """Masked language model that learns from the one in the folder `teacher`, too.

    The gradient is that of (1 - weight) * cross entropy + weight * T^2 * KL(teacher || student), with both
    distributions at the temperature T. The value of the loss is the cross entropy alone, in training too, so that
    curves compare with those of other runs. The teacher is no submodule: it is not trained and not saved.
    """

    def __init__(
        self,
        config: ModelConfig,
        teacher: Path,
        sha256: str | None,
        weight: float,
        temperature: float,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.weight, self.temperature = weight, temperature
        its_config = teacher_config(teacher, sha256)
        require(
            its_config.vocab_size == config.vocab_size,
            f"objective.teacher={teacher}: it has {its_config.vocab_size} entries, this model"
            f" {config.vocab_size}. Set model.vocab_size={its_config.vocab_size}.",
        )
        with torch.random.fork_rng(devices=[]):  # the student's dropout does not depend on it
            model = MaskedLM(its_config, **options)
        if detect_fake_mode() is None:  # `cramming plan` has tensors without data
            load_weights(model, teacher)
        self._teacher = (model.eval(),)  # in a tuple: no submodule

    @property
    def teacher(self) -> MaskedLM:
        """Teacher, in evaluation mode."""
        return self._teacher[0]

    @property
    def encoders(self) -> list[Encoder]:
        """Encoders of both models, which have the same number format."""
        return [self.encoder, self.teacher.encoder]

    def _apply(self, fn: Any, recurse: bool = True) -> "DistilledLM":
        """Move the teacher, too."""
        self.teacher._apply(fn, recurse)
        super()._apply(fn, recurse)
        return self

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        target_positions_M: Tensor,
        target_ids_M: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the summed cross entropy and the hits; in training the loss has the gradient of the mix."""
        inputs = ids_T, positions_T, packing, target_positions_M
        if not self.training or self.weight == 0:
            return super().forward(*inputs, target_ids_M)
        with torch.no_grad():
            taught_MD = self.teacher.at_targets(*inputs)
        return self.mixed_loss(self.at_targets(*inputs), taught_MD, target_ids_M)

    def mixed_loss(
        self, hidden_MD: Tensor, taught_MD: Tensor, target_ids_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the summed cross entropy with the gradient of the mix, and the hits.

        `hidden_MD` and `taught_MD` are the inputs of the student's and of the teacher's decoder.
        """
        elements = self.loss_chunk or chunk_elements(hidden_MD.device) // CHUNK_TENSORS
        rows = max(1, elements // len(self.decoder()))
        chunks = zip(hidden_MD.split(rows), taught_MD.split(rows), target_ids_M.split(rows))
        mixes, losses, hits = [], [], []
        for chunk in chunks:
            mix, loss, right = checkpoint(
                self._chunk_sums, *chunk, use_reentrant=False, preserve_rng_state=False
            )
            mixes.append(mix)
            losses.append(loss)
            hits.append(right)
        mixed = torch.stack(mixes).sum()
        loss = torch.stack(losses).sum()
        return mixed + (loss - mixed).detach(), torch.stack(hits).sum()

    def _chunk_sums(
        self, hidden_MD: Tensor, taught_MD: Tensor, target_ids_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of the mix, of the cross entropy and of the hits over targets that are not negative."""
        logits_MV = self.decode(hidden_MD).float()
        is_target_M = target_ids_M >= 0
        loss = F.cross_entropy(logits_MV, target_ids_M, ignore_index=-100, reduction="sum")
        log_student_MV = (logits_MV / self.temperature).log_softmax(-1)
        with torch.no_grad():
            taught_MV = self.teacher.decode(taught_MD).float() / self.temperature
            log_teacher_MV = taught_MV.log_softmax(-1)
        terms_MV = F.kl_div(log_student_MV, log_teacher_MV, reduction="none", log_target=True)
        divergence = (terms_MV.sum(-1) * is_target_M).sum()
        mix = (1 - self.weight) * loss + self.weight * self.temperature**2 * divergence
        wanted_M = logits_MV.gather(1, target_ids_M.clamp(min=0)[:, None]).squeeze(1)
        hits = ((wanted_M == logits_MV.amax(-1)) & is_target_M).sum()
        return mix, loss.detach(), hits
