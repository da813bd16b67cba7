"""Replaced-token detection (Clark et al. 2020, "ELECTRA"): a generator fills masked tokens, the encoder detects them.

The generator is a small masked language model of the same family. Tokens sampled from its predictions replace the
targets, and the encoder classifies every token as original or replaced: it learns from all tokens, not only the
targets. Both share the token embeddings: the generator projects them to its width and decodes with the same table.
Sampling has no gradient, so the generator is trained by its own loss. The encoder is fine-tuned, the generator is
thrown away. Shapes: T tokens, M targets, R rows, D hidden size, V vocabulary.
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
    """Return the configuration of a generator with this share of the encoder's heads, width and inner width.

    It has as many layers, and no value embeddings, which would be additional tables.
    """
    heads = max(1, round(share * config.num_heads))
    inner = max(1, round(config.intermediate_size * heads / config.num_heads))
    width = heads * config.head_size
    return replace(
        config, num_heads=heads, hidden_size=width, intermediate_size=inner, value_embeddings=0
    )


class ReplacedTokens(PretrainedModel):
    """Encoder with a head that detects replaced tokens, and the generator.

    The encoder is always computed for all tokens; `last_layer` concerns the generator, whose loss is at the targets
    alone. `weight` is the factor of the encoder's loss; the generator's has the factor 1.
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

    def describe_generator(self) -> str:
        """Return the generator's width and number of parameters, without the shared token table."""
        named = self.named_parameters()
        count = sum(p.numel() for name, p in named if name.startswith("generator."))
        width = self.generator.config.hidden_size
        return f"; generator {width} wide with {count:,} of the parameters"

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        target_positions_M: Tensor,
        target_ids_M: Tensor,
        uniform_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the share of tokens classified correctly, both times the number of targets.

        In training the loss is the generator's mean over targets plus `weight` times the encoder's mean over tokens;
        in evaluation it is the encoder's alone. Each row is weighted by its number of targets: micro-batches add up
        to their batch, and rows without targets, which only fill the batch up, count nothing. `uniform_M` decides the
        samples, so that the same batch and the same weights always give the same replaced tokens.
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
        loss = (losses_T.view(-1, length).mean(1) * targets_R).sum()
        hits = (hits_T.view(-1, length).mean(1) * targets_R).sum()
        if self.training:
            loss = self.generator.loss(states_MD, target_ids_M)[0] + self.weight * loss
        return loss, hits

    def logits(self, ids_T: Tensor, positions_T: Tensor, packing: Packing) -> Tensor:
        """Return the logit of each token being a replaced one, fp32 [T]."""
        hidden_TD = self.encoder(ids_T, positions_T, packing)
        return self.classifier(self.transform(hidden_TD)).squeeze(1).float()


@torch.no_grad()
def sample(generator: MaskedLM, states_MD: Tensor, uniform_M: Tensor) -> Tensor:
    """Return token ids [M] drawn from the generator's predictions, by the inverse of their cumulative distribution.

    One number of [0, 1) per target decides, where Gumbel noise would need one per entry of the vocabulary: a draw
    depends on the target's number alone. As many logits exist at a time as in the loss.
    """
    weight, bias = generator.decoder(), generator.decoder_bias
    softcap = generator.config.logit_softcap
    rows = max(1, (generator.loss_chunk or chunk_elements(states_MD.device)) // weight.shape[0])
    ids = []
    for states, uniform in zip(states_MD.split(rows), uniform_M.split(rows)):
        logits = capped(F.linear(states, weight, bias), softcap)
        cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1)
        thresholds = uniform[:, None] * cumulative[:, -1:]
        ids.append(torch.searchsorted(cumulative, thresholds, right=True).squeeze(1))
    return torch.cat(ids).clamp(max=weight.shape[0] - 1)


def count_parameters(config: ModelConfig, generator_width: float) -> ParameterCount:
    """Return the number of parameters of `ReplacedTokens`, each counted once."""
    generator = generator_config(config, generator_width)
    encoder = costs.count_parameters(replace(config, head_transform=False, decoder_bias=False))
    small = costs.count_parameters(replace(generator, head_transform=False, decoder_bias=False))
    width, narrow, vocab = config.hidden_size, generator.hidden_size, config.vocab_size or 0
    bias = width if config.head_bias else 0
    norm = width * (2 if config.norm_bias else 1)
    classifier = width + 1
    projections = width * narrow + narrow * width + bias  # generator: from and to the token table
    heads = classifier + projections
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
    """Return operations of both models per input token, as `cramming.model.config.flops_per_token` counts them.

    The generator's logits are computed a second time to sample from them.
    """
    generator = generator_config(config, generator_width)
    width, narrow, t = config.hidden_size, generator.hidden_size, targets_per_token
    logits = 2 * width * (config.vocab_size or 0)
    flops = costs.encoder_flops(config, sequence_length, t, "all") + 2 * width
    flops += 2 * width * width if config.head_transform else 0
    flops += costs.encoder_flops(generator, sequence_length, t, last_layer) + 2 * width * narrow
    return 3.0 * (flops + t * (2 * narrow * width + logits)) + t * logits
