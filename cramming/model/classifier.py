"""A classifier of sequences on the encoder: what fine-tuning trains.

Shapes: T tokens, D hidden size, S sequences, C labels.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from .attention import Packing, sequence_ids
from .encoder import Encoder
from .init import initialize


class SequenceClassifier(nn.Module):
    """One vector per sequence (mean of its tokens, or its first), optionally dense and tanh, dropout, linear.

    `pooler_size` is the width of the tanh layer, None for none; the crammed BERT has a mean and 1024, BERT its first
    token and its hidden size. One label means regression: the loss is the caller's. New layers are initialised here,
    the encoder stays as it is. Empty sequences give the logits of a zero vector.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_labels: int,
        pooling: Literal["mean", "cls"] = "mean",
        pooler_size: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = POOLINGS[pooling]
        width = encoder.config.hidden_size
        self.pooler = nn.Linear(width, pooler_size) if pooler_size else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(pooler_size or width, num_labels)
        initialize(self, encoder.config, done=encoder)

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, packing: Packing, token_types_T: Tensor | None = None
    ) -> Tensor:
        """Logits [S, C], one row per sequence. Where only the first tokens count, the late layers compute no others."""
        bounds_S = packing.bounds_S
        if self.pooling is not _cls_pooling or packing.aligned_length is not None:
            pooled_SD = self.pooling(self.encoder(ids_T, positions_T, packing, token_types_T), bounds_S)
        else:
            firsts_S = bounds_S[:-1].long().clamp(max=len(ids_T) - 1)
            hidden_SD = self.encoder(ids_T, positions_T, packing, token_types_T, firsts_S)
            pooled_SD = hidden_SD * (bounds_S.diff() > 0)[:, None]
        if self.pooler is not None:
            pooled_SD = self.pooler(pooled_SD).tanh()
        return self.classifier(self.dropout(pooled_SD))


def _mean_pooling(hidden_TD: Tensor, bounds_S: Tensor) -> Tensor:
    sums_SD = hidden_TD.new_zeros((len(bounds_S) - 1, hidden_TD.shape[1]))
    sums_SD = sums_SD.index_add(0, sequence_ids(bounds_S, len(hidden_TD)), hidden_TD)
    return sums_SD / bounds_S.diff().clamp(min=1)[:, None]


def _cls_pooling(hidden_TD: Tensor, bounds_S: Tensor) -> Tensor:
    firsts_SD = hidden_TD.index_select(0, bounds_S[:-1].long().clamp(max=len(hidden_TD) - 1))
    return firsts_SD * (bounds_S.diff() > 0)[:, None]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": _mean_pooling, "cls": _cls_pooling}
