"""Replaced-token detection (Clark et al. 2020, "ELECTRA"): a generator fills in masked tokens, the encoder finds them.

The generator is a small masked language model of the same family. Tokens sampled from what it predicts stand in for the
targets, and the encoder says of every token whether it is the original one. So all tokens teach it, not the targets
alone. Both share the token embeddings: the generator projects them to its width and predicts with the same table. It
learns by its own loss, not by the encoder's, as sampling has no gradient. What is fine-tuned is the encoder; the
generator is thrown away. Shapes: T tokens, M targets, R rows, D hidden size, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import config as costs
from .attention import Packing
from .config import LastLayer, ModelConfig, ParameterCount
from .encoder import Encoder
from .heads import MaskedLM, PretrainedModel, capped, chunk_elements, make_transform
from .init import initialize


def generator_config(config: ModelConfig, share: float) -> ModelConfig:
    """A generator with this share of the encoder's heads, and so of its width, and of its inner width; the layers are
    as many. It has no value embeddings, which would be tables of its own."""
    heads = max(1, round(share * config.num_heads))
    inner = max(1, round(config.intermediate_size * heads / config.num_heads))
    width = heads * config.head_size
    return replace(
        config, num_heads=heads, hidden_size=width, intermediate_size=inner, value_embeddings=0
    )


class ReplacedTokens(PretrainedModel):
    """The encoder with a head that tells replaced tokens, and the generator.

    The encoder is always computed for all tokens; `last_layer` is about the generator, whose loss is of targets alone.
    `weight`: of the encoder's loss beside the generator's.
    """

    def __init__(
        self,
        config: ModelConfig,
        generator_width: float,
        weight: float,
        kernel: str = "auto",
        last_layer: LastLayer = "targets",
        loss_chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.weight = config, weight
        self.encoder = Encoder(config, kernel)
        self.transform = make_transform(config, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        narrow, tokens = generator_config(config, generator_width), self.encoder.embeddings.tokens
        self.generator = MaskedLM(narrow, kernel, last_layer, loss_chunk, tokens)
        initialize(self, config, done=nn.ModuleList([self.encoder, self.generator]))

    def also(self) -> str:
        """The generator's width and weights; the table of tokens is not its own."""
        own = sum(p.numel() for name, p in self.named_parameters() if name.startswith("generator."))
        return (
            f"; generator {self.generator.config.hidden_size} wide with {own:,} of the parameters"
        )

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        target_positions_M: Tensor,
        target_ids_M: Tensor,
        uniform_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Loss and the share of tokens told right, both times the number of targets.

        In training the loss is the generator's mean over targets and `weight` times the encoder's mean over tokens; in
        evaluation it is the encoder's alone. Each row counts by its targets: so micro-batches add up to their batch,
        and rows without targets, which only fill it up, count nothing. `uniform_M` decides what is sampled, so the same
        batch is always shown the same way by the same weights.
        """
        states_MD = self.generator.at_targets(ids_T, positions_T, packing, target_positions_M)
        sampled_M = sample(self.generator, states_MD, uniform_M)
        is_target_M = target_ids_M >= 0
        shown_M = torch.where(is_target_M, sampled_M, ids_T.index_select(0, target_positions_M))
        replaced_M = (is_target_M & (sampled_M != target_ids_M)).float()
        shown_T = ids_T.scatter(0, target_positions_M, shown_M)
        replaced_T = torch.zeros_like(ids_T, dtype=torch.float32).scatter(
            0, target_positions_M, replaced_M
        )
        logits_T = self.logits(shown_T, positions_T, packing)
        length = packing.whole_rows or len(ids_T)
        targets_R = is_target_M.view(len(ids_T) // length, -1).sum(1)
        losses_T = F.binary_cross_entropy_with_logits(logits_T, replaced_T, reduction="none")
        hits_T = ((logits_T > 0) == (replaced_T > 0)).float()
        loss, hits = (
            (x_T.view(-1, length).mean(1) * targets_R).sum() for x_T in (losses_T, hits_T)
        )
        if self.training:
            loss = self.generator.loss(states_MD, target_ids_M)[0] + self.weight * loss
        return loss, hits

    def logits(self, ids_T: Tensor, positions_T: Tensor, packing: Packing) -> Tensor:
        """Of each token being a replaced one, fp32 [T]."""
        hidden_TD = self.encoder(ids_T, positions_T, packing)
        return self.classifier(self.transform(hidden_TD)).squeeze(1).float()


@torch.no_grad()
def sample(generator: MaskedLM, states_MD: Tensor, uniform_M: Tensor) -> Tensor:
    """Token ids [M] drawn from the generator's predictions, by the inverse of their cumulative distribution.

    One number of [0, 1) for each target decides, where Gumbel noise would need one for each entry of the vocabulary: so
    a draw depends on nothing but the target's own number. As many logits exist at a time as in the loss.
    """
    weight, bias, softcap = (
        generator.decoder(),
        generator.decoder_bias,
        generator.config.logit_softcap,
    )
    rows = max(1, (generator.loss_chunk or chunk_elements(states_MD.device)) // weight.shape[0])
    found = []
    for states, uniform in zip(states_MD.split(rows), uniform_M.split(rows)):
        logits = capped(F.linear(states, weight, bias), softcap)
        cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1)
        found.append(
            torch.searchsorted(
                cumulative, uniform[:, None] * cumulative[:, -1:], right=True
            ).squeeze(1)
        )
    return torch.cat(found).clamp(max=weight.shape[0] - 1)


def count_parameters(config: ModelConfig, generator_width: float) -> ParameterCount:
    """Parameters of `ReplacedTokens`, each counted once."""
    generator = generator_config(config, generator_width)
    bare = [replace(c, head_transform=False, decoder_bias=False) for c in (config, generator)]
    encoder, small = (costs.count_parameters(c) for c in bare)
    width, narrow, vocab = config.hidden_size, generator.hidden_size, config.vocab_size or 0
    bias = width if config.head_bias else 0
    norm = width * (2 if config.norm_bias else 1)
    heads = (
        width + 1 + width * narrow + narrow * width + bias
    )  # classifier, the generator's ways from and to the table
    heads += width * width + bias + 2 * norm if config.head_transform else 0
    heads += vocab if config.decoder_bias else 0
    without_embeddings = encoder.without_embeddings + small.without_embeddings + heads
    return ParameterCount(encoder.total + small.total - vocab * narrow + heads, without_embeddings)


def flops_per_token(
    config: ModelConfig,
    generator_width: float,
    sequence_length: int,
    targets_per_token: float,
    last_layer: LastLayer,
) -> float:
    """As `cramming.model.config.flops_per_token`, of both models; logits are computed once more to sample from them."""
    generator = generator_config(config, generator_width)
    width, narrow, t = config.hidden_size, generator.hidden_size, targets_per_token
    logits = 2 * width * (config.vocab_size or 0)
    found = costs.encoder_flops(config, sequence_length, t, "all") + 2 * width
    found += 2 * width * width if config.head_transform else 0
    found += costs.encoder_flops(generator, sequence_length, t, last_layer) + 2 * width * narrow
    return 3.0 * (found + t * (2 * narrow * width + logits)) + t * logits
