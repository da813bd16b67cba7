"""What stands on the encoder in pretraining: the masked-language-model head with its loss.

Only target positions go through the vocabulary projection, and its logits never exist as a whole:
`linear_cross_entropy` walks over the targets in chunks and forms gradients from each chunk's logits at once (as
Liger-Kernel does; Hsu et al. 2024). Shapes: T tokens, M targets, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Packing
from .config import LastLayer, ModelConfig
from .encoder import Encoder, compute_dtype
from .init import initialize
from .layers import ACTIVATIONS, make_norm

# Logits at a time. Few rows make slow matrix products, and each chunk reads and writes all of the weight gradient: on a
# CPU 2^22 takes 1.2 times as long as 2^24 (docs/log.md). A chunk needs 8 bytes an element in 16 bits, 2 GiB at 2^28: a
# card of 40 GB or more can spare that. `memory.loss_chunk` sets another number.
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**26, "large cuda": 2**28}
LARGE_CARD_BYTES = 38 * 2**30  # sold as 40 GB
FP16_SUM = 6e4  # below 65504, its largest number, by what partial sums may be rounded up


@torch.compiler.assume_constant_result  # a property of the device: asked while compiling, not traced
def chunk_elements(device: torch.device) -> int:
    """How many logits exist at a time on this device."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS["cpu"]
    share = torch.cuda.get_per_process_memory_fraction(device)
    return CHUNK_ELEMENTS[
        cuda_chunks(share * torch.cuda.get_device_properties(device).total_memory)
    ]


def cuda_chunks(memory_bytes: float) -> str:
    """Which row of `CHUNK_ELEMENTS` a GPU of so much memory has."""
    return "large cuda" if memory_bytes >= LARGE_CARD_BYTES else "cuda"


class Vocabulary:
    """The entries that a decoder's rows stand for: all of them here, in order. A part of a vocabulary that is cut
    (cramming/experimental/tensor.py) begins at `first` and gives what all parts together come to."""

    first = 0

    def joined(self, top: Tensor, lse: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each target over the whole vocabulary, [M, 1]: the largest logit, log sum exp, and the target's own logit,
        which is 0 where this part does not have it."""
        return top, lse, wanted

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all parts."""
        return partial


WHOLE = Vocabulary()


class _LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. The gradients are made in the forward pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        dtype: torch.dtype,
        chunk: int | None,
        softcap: float | None,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = hidden_MD.to(dtype), weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        grads = _Gradients(hidden, weight, bias) if any(ctx.needs_input_grad) else None
        loss, hits, losses_M = _sums(
            hidden, weight, bias, targets_M, grads, chunk, softcap, vocabulary
        )
        if grads is not None:
            d_hidden, *d_others = grads.finish()
            ctx.save_for_backward(vocabulary.sum(d_hidden), *d_others)
            ctx.dtype = hidden_MD.dtype
        ctx.mark_non_differentiable(hits, losses_M)
        return loss, hits, losses_M

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        for gradient in (d_hidden, d_weight, d_bias):
            if gradient is not None:
                gradient.mul_(d_loss)
        return d_hidden.to(ctx.dtype), d_weight, d_bias, None, None, None, None, None


def _sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets_M: Tensor,
    grads: "_Gradients | None",
    chunk: int | None = None,
    softcap: float | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and hits over all chunks, and each target's loss; gradients go to `grads`, where any are wanted.

    Not summed in place: torch 2.11 compiles a function that returns such a sum to one whose gradients are zero.
    """
    loss = hidden.new_zeros((), dtype=torch.float32)
    hits, losses = targets_M.new_zeros(()), [loss.new_zeros(0)]
    rows = max(1, (chunk or chunk_elements(hidden.device)) // weight.shape[0])
    for first in range(0, hidden.shape[0], rows):
        h, target = hidden[first : first + rows], targets_M[first : first + rows]
        logits = capped(F.linear(h, weight, bias), softcap)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        counted, index = (target >= 0)[:, None], (target - vocabulary.first)[:, None]
        here = (index >= 0) & (index < weight.shape[0])  # the target is one of these rows
        index = index.clamp(0, weight.shape[0] - 1)
        # The largest entries by `amax`: `argmax` takes 6 times as long in fp32 and 10 in bf16 on a CPU (docs/log.md).
        top = logits.amax(-1, keepdim=True)
        # log sum exp by way of the likeliest entry, whose probability is at least 1 / V and so cannot underflow
        own_lse = top.float() - probabilities.amax(-1, keepdim=True).log()
        top, lse, wanted = vocabulary.joined(top, own_lse, logits.gather(1, index).where(here, 0))
        losses.append(((lse - wanted.float()) * counted).squeeze(1))
        loss = loss + losses[-1].sum()
        hits = hits + ((wanted == top) & counted).sum()
        if grads is not None:
            slope = None if softcap is None else 1 - (logits / softcap).square()  # of the cap
            grads.add(
                first, h, probabilities.mul_(counted * (own_lse - lse).exp()), index, here, slope
            )
    return loss, hits, torch.cat(losses)


class _Gradients:
    """Sums of gradients over chunks, in fp32 whatever the products' type.

    In fp16 most probabilities are subnormal: they are raised by 2^6 before the products and the sums lowered again. A
    sum over many rows could then pass what fp16 holds: `_within_fp16` lowers what goes into it.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.low_weight = weight
        self.raised = 64.0 if weight.dtype == torch.float16 else 1.0
        self.hidden = torch.empty_like(hidden, dtype=torch.float32)
        self.weight: Tensor | None = (
            None  # the largest of all: begun by the first chunk's product, not by zeros
        )
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(
        self,
        first: int,
        h: Tensor,
        probabilities: Tensor,
        index: Tensor,
        here: Tensor,
        slope: Tensor | None,
    ) -> None:
        """Gradients of one chunk's summed loss. Uses `probabilities` up, which are 0 where no target counts: d logits =
        probabilities - one-hot targets."""
        d_logits = probabilities.scatter_add_(1, index, -here.float())
        if slope is not None:
            d_logits.mul_(slope)
        if self.bias is not None:
            self.bias += d_logits.sum(0)
        low = (d_logits * self.raised if self.raised != 1.0 else d_logits).to(h.dtype)
        self.hidden[first : first + len(h)] = low @ self.low_weight
        if low.dtype == torch.float16:
            share = _within_fp16(low, h)
            added = low.t() @ (h * share)
            self.weight = (
                added.float().div_(share)
                if self.weight is None
                else self.weight.addcdiv_(added, share)
            )
        elif self.weight is None:
            self.weight = (low.t() @ h).float()
        elif low.dtype == torch.float32:
            self.weight.addmm_(low.t(), h)
        else:
            self.weight += low.t() @ h

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of hidden states, weight and bias; zeros where there was no target at all."""
        if self.weight is None:
            self.weight = torch.zeros_like(self.low_weight, dtype=torch.float32)
        if self.raised != 1.0:
            self.hidden /= self.raised
            self.weight /= self.raised
        return self.hidden, self.weight, self.bias


def _within_fp16(low_MV: Tensor, hidden_MD: Tensor) -> Tensor:
    """A power of two, at most 1: times that, no entry of `low.T @ hidden` passes fp16's largest number, 65504.

    An entry is at most the largest sum of a column of |low| times the largest |hidden|. 350 rows of one target, raised
    by 64, with hidden states of 3 pass it, and no loss scale would help, as it is applied later. NaN where an input is:
    the step is then skipped.
    """
    columns_V = torch.linalg.vector_norm(low_MV, 1, dim=0, dtype=torch.float32)
    bound = columns_V.max() * hidden_MD.abs().max().float()
    return (FP16_SUM / bound).log2().floor().clamp(max=0.0).exp2()


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(logits / softcap)` in fp32 (Gemma Team 2024, Gemma 2, section 2); None: logits as they are."""
    return logits if softcap is None else softcap * (logits.float() / softcap).tanh()


def linear_cross_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_M: Tensor,
    dtype: torch.dtype,
    chunk: int | None = None,
    softcap: float | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over targets that are not negative of the cross entropy of `hidden @ weight.T + bias`, hits, and the terms.

    `softcap` bounds the logits (see `capped`). Products run in `dtype`, softmax and sums in fp32. Returns an fp32
    scalar; an int64 scalar: targets whose logit is the largest, or one of several that are, as happens in 16 bits; and
    the sum's terms, fp32 [M] without a gradient, 0 for a negative target.
    Only `chunk` logits exist at a time (None: what suits the device). The backward pass can run once; under `no_grad`
    nothing is made for it. `vocabulary`: the entries that the rows of `weight` are.
    """
    if not torch.is_grad_enabled():  # `needs_input_grad` would say yes here too
        bias = None if bias_V is None else bias_V.to(dtype)
        return _sums(
            hidden_MD.to(dtype),
            weight_VD.to(dtype),
            bias,
            targets_M,
            None,
            chunk,
            softcap,
            vocabulary,
        )
    loss, hits, losses_M = _LinearCrossEntropy.apply(
        hidden_MD, weight_VD, bias_V, targets_M, dtype, chunk, softcap, vocabulary
    )
    return loss, hits, losses_M


class PretrainedModel(nn.Module):
    """An encoder and what stands on it in pretraining.

    A forward pass gives the loss (fp32 scalar) and hits (scalar), both as sums over the batch's targets.
    """

    config: ModelConfig
    encoder: Encoder

    @property
    def encoders(self) -> list[Encoder]:
        """All that are computed: that of a generator too."""
        return [module for module in self.modules() if isinstance(module, Encoder)]

    def also(self) -> str:
        """What a line about the model says besides the encoder."""
        return ""


class MaskedLM(PretrainedModel):
    """Encoder and masked-language-model head. A tied decoder is the embedding itself: no second name for it exists.

    `last_layer` says for which tokens the late layers (`config.late_layers`, usually one) are computed: all of them, or
    the targets, which is all that the loss needs (same numbers, less work). `loss_chunk`: how many logits exist at a
    time, None for what suits the device. `tokens`: another encoder's token table, of any width, to share and decode by.
    `gives_losses`: a forward pass also gives the loss of each target, fp32 [M].
    """

    def __init__(
        self,
        config: ModelConfig,
        kernel: str = "auto",
        last_layer: LastLayer = "targets",
        loss_chunk: int | None = None,
        tokens: nn.Embedding | None = None,
        gives_losses: bool = False,
    ) -> None:
        super().__init__()
        self.gives_losses, self.vocabulary = gives_losses, WHOLE
        self.config, self.last_layer, self.loss_chunk = config, last_layer, loss_chunk
        self.encoder = Encoder(config, kernel, tokens)
        vocab, width = self.encoder.embeddings.tokens.weight.shape
        self.transform = make_transform(config, width, must_project=tokens is not None)
        self.decoder_weight = (
            None if config.tie_embeddings else nn.Parameter(torch.empty(vocab, config.hidden_size))
        )
        self.decoder_bias = nn.Parameter(torch.empty(vocab)) if config.decoder_bias else None
        initialize(self, config, done=self.encoder)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        target_positions_M: Tensor,
        target_ids_M: Tensor,
    ) -> tuple[Tensor, ...]:
        """Summed loss over the targets that are not -100 (fp32 scalar), and how many are hit (int64 scalar).

        Targets ascend, and each row of the packing has as many (padded with -100 where it has fewer).
        """
        found = self.loss(
            self.at_targets(ids_T, positions_T, packing, target_positions_M), target_ids_M
        )
        return found if self.gives_losses else found[:2]

    def at_targets(
        self, ids_T: Tensor, positions_T: Tensor, packing: Packing, target_positions_M: Tensor
    ) -> Tensor:
        """What the decoder multiplies, [M, D]."""
        if self.last_layer == "targets":
            hidden_MD = self.encoder(ids_T, positions_T, packing, queries_M=target_positions_M)
        else:
            hidden_MD = self.encoder(ids_T, positions_T, packing).index_select(
                0, target_positions_M
            )
        return self.transform(hidden_MD)

    def loss(self, hidden_MD: Tensor, target_ids_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, hits and losses of what `at_targets` found."""
        weight = self.decoder()
        return linear_cross_entropy(
            hidden_MD,
            weight,
            self.decoder_bias,
            target_ids_M,
            compute_dtype(weight),
            self.loss_chunk,
            self.config.logit_softcap,
            self.vocabulary,
        )

    def logits(
        self, ids_T: Tensor, positions_T: Tensor, packing: Packing, target_positions_M: Tensor
    ) -> Tensor:
        """Scores over the vocabulary at any tokens, [M, V]."""
        hidden_MD = self.transform(
            self.encoder(ids_T, positions_T, packing).index_select(0, target_positions_M)
        )
        return capped(
            F.linear(hidden_MD, self.decoder(), self.decoder_bias), self.config.logit_softcap
        )

    def decoder(self) -> Tensor:
        """The matrix [V, D] that states are multiplied with."""
        return (
            self.encoder.embeddings.tokens.weight
            if self.decoder_weight is None
            else self.decoder_weight
        )


class HeadTransform(nn.Module):
    """Dense, activation, norm: what BERT and ModernBERT put before the decoder, whose width is `width` or D."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(
            config.hidden_size, width or config.hidden_size, bias=config.head_bias
        )
        self.activation = ACTIVATIONS[config.activation]
        self.norm = make_norm(config, width=width)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_MD)))


def make_transform(config: ModelConfig, width: int, must_project: bool = False) -> nn.Module:
    """What the configuration has between the encoder's states and a decoder of this width."""
    if config.head_transform:
        return HeadTransform(config, width)
    return (
        nn.Linear(config.hidden_size, width, bias=config.head_bias)
        if must_project
        else nn.Identity()
    )
