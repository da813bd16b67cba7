"""Where training starts: weights drawn at random, or word vectors counted from the run's own text.

A masked language model first learns which words occur at all and then which occur together; a small model spends a
fifth of a short budget on that plateau. Both can be counted: `embeddings: cooccurrence` sets the token embeddings (and
a decoder of its own, with its bias) from neighbouring tokens (cramming/data/cooccurrence.py). The counting is part of
training: it reads the training split only, and runs on the budget's clock.

Shapes: V vocabulary, D width of the model.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cramming.data.stream import TokenStream
from cramming.model.heads import MaskedLM


@dataclass(frozen=True)
class StartConfig:
    """Section `start`.

    Tokens within `window` of each other count as neighbours, nearer ones more. At most `max_tokens` tokens, evenly from
    the whole training split, are read. `embedding_std` and `decoder_std`: root mean squares of the vectors' entries.
    All four are 0 where `embeddings` is random.
    """

    embeddings: Literal["random", "cooccurrence"]
    window: int
    max_tokens: int
    embedding_std: float
    decoder_std: float

    def __post_init__(self) -> None:
        choose = f"choose it by start={self.embeddings}"
        for name in ("window", "max_tokens", "embedding_std", "decoder_std"):
            value = getattr(self, name)
            if self.embeddings == "random" and value != 0:
                raise ValueError(
                    f"{name}={value} does nothing with embeddings=random; {choose}, which has 0, or set start.{name}=0"
                )
            if self.embeddings == "cooccurrence" and value <= 0:
                raise ValueError(f"{name}={value} is not above 0; {choose}, which has a value, or set start.{name}")


def start_from_text(
    model: MaskedLM, stream: TokenStream, special_ids: tuple[int, ...], config: StartConfig, seed: int
) -> None:
    """Set the token embeddings, and a decoder of its own with its bias, from the text.

    Entries that never occur beside another, special tokens among them, keep their random vectors, brought to the same
    size, as are token types: sums of vectors of one size, of which none is drowned by another.
    """
    from cramming.data.cooccurrence import count_pairs, word_vectors  # scipy takes time to import

    embeddings = model.encoder.embeddings
    vocab_size, width = embeddings.tokens.weight.shape
    pairs = count_pairs(stream, vocab_size, special_ids, config.window, config.max_tokens)
    vectors_VD, known_V = (torch.from_numpy(a) for a in word_vectors(pairs, width, seed))
    with torch.no_grad():
        _fill(embeddings.tokens.weight, vectors_VD, known_V, config.embedding_std)
        if embeddings.token_types is not None:
            _resize(embeddings.token_types.weight, config.embedding_std)
        if model.decoder_weight is not None:
            _fill(model.decoder_weight, vectors_VD, known_V, config.decoder_std)
            if model.decoder_bias is not None:
                model.decoder_bias.copy_(_log_shares(torch.from_numpy(pairs.sum(axis=1))))


def _fill(weight_VD: Tensor, vectors_VD: Tensor, known_V: Tensor, std: float) -> None:
    _resize(weight_VD, std)
    weight_VD[known_V] = (std * vectors_VD[known_V]).to(weight_VD)


def _resize(weight: Tensor, std: float) -> None:
    """Bring the root mean square of the entries to `std`."""
    weight.mul_(std / weight.square().mean().sqrt())


def _log_shares(totals_V: Tensor) -> Tensor:
    """Logarithm of each entry's share of the text, [V]: the best guess without context. Unseen entries count once."""
    counts_V = totals_V.clamp(min=1.0)
    return (counts_V / counts_V.sum()).log()
