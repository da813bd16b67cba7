"""Sequence classifier on the encoder, the model that fine-tuning trains.

Shapes: T tokens, D hidden size, S sequences, C labels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import Packing, sequence_ids
from .config import Pooling
from .encoder import Encoder
from .init import initialize


class SequenceClassifier(nn.Module):
    """Encoder with pooling to one vector per sequence, optionally dense and tanh, then dropout and a linear layer.

    `pooling` is "mean" of the tokens, "cls" for the first token, or "pairs": the means of the first and of the second
    text (token types 0 and 1), the absolute value of their difference and their product [4 D], as SentEval and GLUE's
    baselines compare two sentences (Conneau et al. 2017, Wang et al. 2018); zeros stand for a missing second text.
    `pooler_size` is the width of the tanh layer, or None for no such layer; the crammed BERT has a mean and 1024,
    BERT its first token and its hidden size. One label means regression: the loss is the caller's. New layers are
    initialised here, the encoder stays unchanged. Empty sequences give the logits of a zero vector.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_labels: int,
        pooling: Pooling = "mean",
        pooler_size: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = pooling
        width = encoder.config.hidden_size * (4 if pooling == "pairs" else 1)
        self.pooler = nn.Linear(width, pooler_size) if pooler_size else None
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(pooler_size or width, num_labels)
        initialize(self, encoder.config, done=encoder)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        token_types_T: Tensor | None = None,
    ) -> Tensor:
        """Return logits [S, C], one row per sequence.

        With `cls` pooling the late layers compute the first tokens only.
        """
        bounds_S = packing.bounds_S
        # Rows of packed documents hold different numbers of first tokens, which `restrict` does not take.
        if self.pooling == "cls" and packing.aligned_length is None:
            firsts_S = bounds_S[:-1].long().clamp(max=len(ids_T) - 1)
            has_no_empty = packing.lengths is not None and min(packing.lengths) > 0
            packing = packing._replace(one_query_each=has_no_empty)
            hidden_SD = self.encoder(ids_T, positions_T, packing, token_types_T, firsts_S)
            pooled_SD = hidden_SD * (bounds_S.diff() > 0)[:, None]
        else:
            hidden_TD = self.encoder(ids_T, positions_T, packing, token_types_T)
            if self.pooling == "pairs":
                assert token_types_T is not None
                pooled_SD = _pair_pooling(hidden_TD, bounds_S, token_types_T)
            else:
                pooled_SD = POOLINGS[self.pooling](hidden_TD, bounds_S)
        if self.pooler is not None:
            pooled_SD = self.pooler(pooled_SD).tanh()
        return self.classifier(self.dropout(pooled_SD))


def _means(hidden_TD: Tensor, ids_T: Tensor, count: int) -> Tensor:
    """Return the mean [count, D] of the tokens with each id, 0 for an id without tokens.

    Sums are in fp32: on a GPU a sum in 16 bits is rounded at each token, and bf16 counts to 256 only.
    """
    x_TD = hidden_TD.float()
    sums_XD = x_TD.new_zeros((count, x_TD.shape[1])).index_add(0, ids_T, x_TD)
    # not `bincount`, which waits for the GPU
    counts_X = x_TD.new_zeros(count).index_add(0, ids_T, torch.ones_like(x_TD[:, 0]))
    return (sums_XD / counts_X.clamp(min=1)[:, None]).to(hidden_TD.dtype)


def _mean_pooling(hidden_TD: Tensor, bounds_S: Tensor) -> Tensor:
    return _means(hidden_TD, sequence_ids(bounds_S, hidden_TD.shape[0]), bounds_S.shape[0] - 1)


def _cls_pooling(hidden_TD: Tensor, bounds_S: Tensor) -> Tensor:
    firsts_SD = hidden_TD.index_select(0, bounds_S[:-1].long().clamp(max=hidden_TD.shape[0] - 1))
    return firsts_SD * (bounds_S.diff() > 0)[:, None]


def _pair_pooling(hidden_TD: Tensor, bounds_S: Tensor, types_T: Tensor) -> Tensor:
    """Return [S, 4 D]: both texts' means, the absolute difference and the product."""
    texts = 2 * (len(bounds_S) - 1)
    texts_T = 2 * sequence_ids(bounds_S, len(hidden_TD)) + (types_T == 1)
    means_XD = _means(hidden_TD, texts_T, texts)
    first_SD, second_SD = means_XD[::2], means_XD[1::2]
    return torch.cat(
        [first_SD, second_SD, (first_SD - second_SD).abs(), first_SD * second_SD], dim=1
    )


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean_pooling,
    "cls": _cls_pooling,
}
