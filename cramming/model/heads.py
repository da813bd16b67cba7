"""Masked-language-model head with its loss.

Only target positions go through the vocabulary projection, and its logits never exist as a whole:
`linear_cross_entropy` processes the targets in chunks and computes gradients from each chunk's logits at once (as
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

# Logits that exist at a time. Matrix products with few rows are slow, and each chunk reads and writes all of the weight
# gradient: on a CPU 2^22 takes 1.2 times as long as 2^24 (docs/log.md). A chunk needs 8 bytes per element in 16 bits,
# 2 GiB at 2^28, which a card of 40 GB or more can spare. `memory.loss_chunk` sets another number.
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**26, "large cuda": 2**28}
LARGE_CARD_BYTES = 38 * 2**30  # cards sold as 40 GB report a little less
FP16_SUM = 6e4  # below the largest fp16 number, 65504, with room for rounding of partial sums


@torch.compiler.assume_constant_result  # a property of the device: read while compiling, not traced
def chunk_elements(device: torch.device) -> int:
    """Return the number of logits that exist at a time on this device."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS["cpu"]
    share = torch.cuda.get_per_process_memory_fraction(device)
    memory_bytes = share * torch.cuda.get_device_properties(device).total_memory
    return CHUNK_ELEMENTS[cuda_chunks(memory_bytes)]


def cuda_chunks(memory_bytes: float) -> str:
    """Return the key of `CHUNK_ELEMENTS` for a GPU with this much memory."""
    return "large cuda" if memory_bytes >= LARGE_CARD_BYTES else "cuda"


class Vocabulary:
    """Entries that the rows of a decoder stand for; here all entries, in order.

    A subclass for one part of a divided vocabulary (cramming/experimental/tensor.py) begins at `first` and combines the
    results of all parts.
    """

    first = 0

    def combine(self, top: Tensor, lse: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the largest logit, the log-sum-exp and the target's logit over the whole vocabulary, each [M, 1].

        `wanted` is 0 where the target is not in this part.
        """
        return top, lse, wanted

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over all parts."""
        return partial


WHOLE = Vocabulary()


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of `linear_cross_entropy`: forward computes the gradients, and backward scales them."""

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
    """Return loss and hits over all chunks, and the loss of each target; add gradients to `grads` if given.

    The loss is not summed in place: torch 2.11 compiles a function that returns such a sum to code with zero
    gradients.
    """
    loss = hidden.new_zeros((), dtype=torch.float32)
    hits, losses = targets_M.new_zeros(()), [loss.new_zeros(0)]
    rows = max(1, (chunk or chunk_elements(hidden.device)) // weight.shape[0])
    for first in range(0, hidden.shape[0], rows):
        h, target = hidden[first : first + rows], targets_M[first : first + rows]
        logits = capped(F.linear(h, weight, bias), softcap)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        counted, index = (target >= 0)[:, None], (target - vocabulary.first)[:, None]
        is_in_part = (index >= 0) & (index < weight.shape[0])
        index = index.clamp(0, weight.shape[0] - 1)
        # `amax`, because `argmax` takes 6 times as long in fp32 and 10 times in bf16 on a CPU (docs/log.md)
        top = logits.amax(-1, keepdim=True)
        # log-sum-exp from the likeliest entry, whose probability is at least 1 / V and so cannot underflow
        part_lse = top.float() - probabilities.amax(-1, keepdim=True).log()
        top, lse, wanted = vocabulary.combine(
            top, part_lse, logits.gather(1, index).where(is_in_part, 0)
        )
        losses.append(((lse - wanted.float()) * counted).squeeze(1))
        loss = loss + losses[-1].sum()
        hits = hits + ((wanted == top) & counted).sum()
        if grads is not None:
            cap_slope = None if softcap is None else 1 - (logits / softcap).square()
            probabilities.mul_(counted * (part_lse - lse).exp())
            grads.add(first, h, probabilities, index, is_in_part, cap_slope)
    return loss, hits, torch.cat(losses)


class _Gradients:
    """Sums of gradients over chunks, in fp32 whatever the type of the products.

    In fp16 most probabilities are subnormal: they are multiplied by 2^6 before the products, and the sums are divided
    by it afterwards. A sum over many rows could then exceed the range of fp16: `_within_fp16` scales its input down.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.low_weight = weight
        self.raised = 64.0 if weight.dtype == torch.float16 else 1.0
        self.hidden = torch.empty_like(hidden, dtype=torch.float32)
        # The largest gradient starts as the first chunk's product, which saves filling it with zeros.
        self.weight: Tensor | None = None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(
        self,
        first: int,
        h: Tensor,
        probabilities: Tensor,
        index: Tensor,
        is_in_part: Tensor,
        cap_slope: Tensor | None,
    ) -> None:
        """Add the gradients of one chunk's summed loss.

        d logits = probabilities - one-hot targets. `probabilities` must be 0 in rows that do not count, and is
        overwritten.
        """
        d_logits = probabilities.scatter_add_(1, index, -is_in_part.float())
        if cap_slope is not None:
            d_logits.mul_(cap_slope)
        if self.bias is not None:
            self.bias += d_logits.sum(0)
        low = (d_logits * self.raised if self.raised != 1.0 else d_logits).to(h.dtype)
        self.hidden[first : first + len(h)] = low @ self.low_weight
        if low.dtype == torch.float16:
            share = _within_fp16(low, h)
            added = low.t() @ (h * share)
            if self.weight is None:
                self.weight = added.float().div_(share)
            else:
                self.weight = self.weight.addcdiv_(added, share)
        elif self.weight is None:
            self.weight = (low.t() @ h).float()
        elif low.dtype == torch.float32:
            self.weight.addmm_(low.t(), h)
        else:
            self.weight += low.t() @ h

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of hidden states, weight and bias; all are zero if there were no targets."""
        if self.weight is None:
            self.weight = torch.zeros_like(self.low_weight, dtype=torch.float32)
        if self.raised != 1.0:
            self.hidden /= self.raised
            self.weight /= self.raised
        return self.hidden, self.weight, self.bias


def _within_fp16(low_MV: Tensor, hidden_MD: Tensor) -> Tensor:
    """Return a power of two, at most 1, that keeps `low.T @ hidden` times it below the fp16 maximum, 65504.

    An entry is at most the largest column sum of |low| times the largest |hidden|. 350 rows of one target, multiplied
    by 64, with hidden states of 3 exceed the maximum; a loss scale is applied later and cannot help. NaN inputs give
    NaN, and the step is then skipped.
    """
    columns_V = torch.linalg.vector_norm(low_MV, 1, dim=0, dtype=torch.float32)
    bound = columns_V.max() * hidden_MD.abs().max().float()
    return (FP16_SUM / bound).log2().floor().clamp(max=0.0).exp2()


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap * tanh(logits / softcap)` in fp32, or the unchanged logits if `softcap` is None.

    Gemma 2 (Gemma Team 2024, section 2).
    """
    if softcap is None:
        return logits
    return softcap * (logits.float() / softcap).tanh()


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
    """Return the summed cross entropy of `hidden @ weight.T + bias` over non-negative targets, the hits, and each term.

    The sum is an fp32 scalar. Hits, an int64 scalar, are the targets with the largest logit; in 16 bits several
    logits may share it. The terms are fp32 [M] without a gradient, 0 for a negative target. `softcap` bounds the
    logits (see `capped`). Products run in `dtype`, softmax and sums in fp32. Only `chunk` logits exist at a time
    (None: by device). The backward pass can run once; under `no_grad` no gradients are computed. `vocabulary`: the
    entries that the rows of `weight` stand for.
    """
    if not torch.is_grad_enabled():  # `needs_input_grad` is true here too
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
    """Encoder with a head for pretraining.

    A forward pass returns the loss (fp32 scalar) and hits (scalar), both as sums over the batch's targets.
    """

    config: ModelConfig
    encoder: Encoder

    @property
    def encoders(self) -> list[Encoder]:
        """All encoders of the model, including that of a generator."""
        return [module for module in self.modules() if isinstance(module, Encoder)]

    def describe_generator(self) -> str:
        """Return a description of the generator for the line about the model, or "" for a model without one."""
        return ""


class MaskedLM(PretrainedModel):
    """Encoder and masked-language-model head. A tied decoder is the embedding itself, without a second name.

    `last_layer` selects the tokens for which the late layers (`config.late_layers`, usually 1) are computed: all of
    them, or the targets, which suffice for the loss (same numbers, less work). `loss_chunk` is the number of logits
    that exist at a time, None to choose it by device. `tokens` is the token table of another encoder, of any width,
    to share and decode with. With `gives_losses` a forward pass also returns the loss of each target, fp32 [M].
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
        """Return the summed loss over targets that are not -100 (fp32 scalar) and the number of hits (int64 scalar).

        Targets ascend, and each row of the packing has equally many (padded with -100).
        """
        hidden_MD = self.at_targets(ids_T, positions_T, packing, target_positions_M)
        loss, hits, losses_M = self.loss(hidden_MD, target_ids_M)
        return (loss, hits, losses_M) if self.gives_losses else (loss, hits)

    def at_targets(
        self, ids_T: Tensor, positions_T: Tensor, packing: Packing, target_positions_M: Tensor
    ) -> Tensor:
        """Return the input of the decoder at the targets, [M, D]."""
        if self.last_layer == "targets":
            hidden_MD = self.encoder(ids_T, positions_T, packing, queries_M=target_positions_M)
        else:
            hidden_TD = self.encoder(ids_T, positions_T, packing)
            hidden_MD = hidden_TD.index_select(0, target_positions_M)
        return self.transform(hidden_MD)

    def loss(self, hidden_MD: Tensor, target_ids_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return summed loss, hits and losses of the decoder inputs that `at_targets` returns."""
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
        """Return scores over the vocabulary at any tokens, [M, V]."""
        hidden_TD = self.encoder(ids_T, positions_T, packing)
        return self.decode(self.transform(hidden_TD.index_select(0, target_positions_M)))

    def decode(self, hidden_MD: Tensor) -> Tensor:
        """Return scores over the vocabulary from the decoder inputs that `at_targets` returns, [M, V]."""
        logits_MV = F.linear(hidden_MD, self.decoder(), self.decoder_bias)
        return capped(logits_MV, self.config.logit_softcap)

    def decoder(self) -> Tensor:
        """Return the decoder matrix [V, D]."""
        if self.decoder_weight is None:
            return self.encoder.embeddings.tokens.weight
        return self.decoder_weight


class HeadTransform(nn.Module):
    """Dense layer, activation and norm before the decoder, as in BERT and ModernBERT; the output has `width` or D."""

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
    """Return the layers between the encoder's states and a decoder of this width."""
    if config.head_transform:
        return HeadTransform(config, width)
    if must_project:
        return nn.Linear(config.hidden_size, width, bias=config.head_bias)
    return nn.Identity()
