"""A `cramming` encoder for Hugging Face transformers. torch and transformers are all that this file needs.

It lies beside the weights of every model whose architecture stock transformers lacks, and is what
`AutoModel....from_pretrained(folder, trust_remote_code=True)` runs: the encoder alone and with heads for masked
language modelling, classification of sequences and of tokens, and question answering. It computes what the suite's own
model computes, on padded batches: attention is `scaled_dot_product_attention`, whatever `attn_implementation` says.
The choices that make up an architecture are the keys of `model` in config.json.

Shapes: B rows, L places in a row, D hidden size, H heads, K head size, V vocabulary.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def _choice(name: str) -> Any:
    """An attribute of the configuration that is kept in its `model`, under our name."""
    return property(lambda self: self.model.get(name), lambda self, value: self.model.update({name: value}))


class CrammingConfig(PretrainedConfig):
    """`model` holds the architecture's choices; the usual names read and write there too."""

    model_type = "cramming"
    vocab_size = _choice("vocab_size")
    hidden_size = _choice("hidden_size")
    num_hidden_layers = _choice("num_layers")
    num_attention_heads = _choice("num_heads")
    intermediate_size = _choice("intermediate_size")
    max_position_embeddings = _choice("max_length")
    type_vocab_size = _choice("token_types")
    initializer_range = _choice("init_std")
    hidden_dropout_prob = _choice("dropout")
    attention_probs_dropout_prob = _choice("attention_dropout")

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        classifier_pooling: str = "mean",  # mean, or cls: the first token
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        self.model = dict(model or {})
        self.classifier_pooling = classifier_pooling
        self.classifier_dropout = classifier_dropout
        super().__init__(**{"tie_word_embeddings": self.model.get("tie_embeddings", True), **kwargs})


def _norm(c: SimpleNamespace, present: bool = True) -> nn.Module:
    if not present:
        return nn.Identity()
    if c.norm == "rmsnorm":
        return nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
    return nn.LayerNorm(c.hidden_size, eps=c.norm_eps, bias=c.norm_bias)


def _frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


class ScaledSinusoid(nn.Module):
    """Sinusoids times one trained scalar."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.max_length, self.width = max_length, width
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, positions: Tensor) -> Tensor:
        places = torch.arange(self.max_length, device=positions.device, dtype=torch.float32)
        angles = places[:, None] * _frequencies(self.width, 10_000.0, places.device)
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
        return F.embedding(positions, (self.scale * table).to(self.scale.dtype))


class Embeddings(nn.Module):
    """Token, position and token-type vectors, summed, then norm and dropout."""

    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        tables = {"learned": nn.Embedding, "scaled_sinusoidal": ScaledSinusoid}
        self.positions = tables[c.positions](c.max_length, c.hidden_size) if c.positions in tables else None
        self.token_types = nn.Embedding(c.token_types, c.hidden_size) if c.token_types else None
        self.norm = _norm(c, c.embedding_norm)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, hidden: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        if self.token_types is not None:
            hidden = hidden + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        return self.dropout(self.norm(hidden))


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.heads, self.head_size, self.dropout = c.num_heads, c.hidden_size // c.num_heads, c.attention_dropout
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size, bias=c.attention_bias)
        self.out = nn.Linear(c.hidden_size, c.hidden_size, bias=c.attention_bias)
        self.q_norm = nn.RMSNorm(self.head_size, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_size, eps=c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, self.head_size))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, L, K]
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _rope_tables(positions: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, fp32 [B or 1, 1, L, K], in the half-split layout."""
    angles = positions.float()[:, None, :, None] * _frequencies(head_size, theta, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class MLP(nn.Module):
    """D -> intermediate size -> D; gated when the choice is `glu`."""

    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.gated = c.mlp == "glu"
        self.up = nn.Linear(c.hidden_size, (2 if self.gated else 1) * c.intermediate_size, bias=c.mlp_bias)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.activation = ACTIVATIONS[c.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(hidden)))
        value, gate = self.up(hidden).chunk(2, dim=-1)
        return self.down(self.activation(value) * gate)


class Block(GradientCheckpointingLayer):
    """Attention and MLP, each with a residual; the norm before each (`pre`) or after each sum (`post`)."""

    def __init__(self, c: SimpleNamespace, layer: int) -> None:
        super().__init__()
        self.pre = c.norm_order == "pre"
        self.attn_norm = _norm(c, layer > 0 or c.first_attn_norm)
        self.attn = Attention(c)
        self.mlp_norm = _norm(c)
        self.mlp = MLP(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        if self.pre:
            hidden = hidden + self.dropout(self.attn(self.attn_norm(hidden), rope, mask))
            return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        hidden = self.attn_norm(hidden + self.dropout(self.attn(hidden, rope, mask)))
        return self.mlp_norm(hidden + self.dropout(self.mlp(hidden)))


class HeadTransform(nn.Module):
    """Dense, activation and norm before the vocabulary."""

    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size, bias=c.head_bias)
        self.activation = ACTIVATIONS[c.activation]
        self.norm = _norm(c)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))


class CrammingPreTrainedModel(PreTrainedModel):
    """What the encoder and all heads share with transformers."""

    config_class = CrammingConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """For what the weights' file does not hold: new heads, or a model made from its configuration alone."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, ScaledSinusoid):
            nn.init.constant_(module.scale, module.width**-0.5)
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            nn.init.zeros_(bias)


class CrammingModel(CrammingPreTrainedModel):
    """Token ids to hidden states."""

    def __init__(self, config: CrammingConfig) -> None:
        super().__init__(config)
        c = SimpleNamespace(**config.model)
        self.choices = c
        self.embeddings = Embeddings(c)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.num_layers))
        self.final_norm = _norm(c, c.final_norm)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """`attention_mask` [B, L] is 1 for tokens and 0 for padding, which may be on either side."""
        hidden = self.embeddings.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = self._positions(hidden, attention_mask)
        hidden = self.embeddings(hidden, position_ids, token_type_ids)
        shared = {window: self._shared(window, position_ids, attention_mask) for window in self._windows()}
        states = [hidden]
        for window, block in zip(self._windows(), self.blocks):
            hidden = block(hidden, *shared[window])
            states.append(hidden)
        hidden = states[-1] = self.final_norm(hidden)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(last_hidden_state=hidden, hidden_states=tuple(states) if wanted else None)
        return _as_asked(output, self.config, return_dict)

    def _positions(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Places counted from each row's first token, [B or 1, L]."""
        length, limit = hidden.shape[1], self.choices.max_length
        if self.embeddings.positions is not None and length > limit:
            raise ValueError(f"{length} tokens in a row, but this model has {limit} positions; truncate the input")
        places = torch.arange(length, device=hidden.device)[None]
        if attention_mask is None:
            return places
        return (places - attention_mask.int().argmax(dim=1, keepdim=True)).clamp(min=0)

    def _windows(self) -> list[int | None]:
        """Per layer how many tokens it sees to each side, None for all."""
        c = self.choices
        every = range(c.num_layers)
        return [None if c.local_window is None or i % c.global_every == 0 else c.local_window // 2 for i in every]

    def _shared(self, window: int | None, position_ids: Tensor, attention_mask: Tensor | None) -> tuple[Any, Any]:
        """Rotary tables and mask (true where a key is seen) of all layers with this window."""
        c, rope = self.choices, None
        if c.positions == "rope":
            theta = c.rope_theta_global if window is None else c.rope_theta_local
            rope = _rope_tables(position_ids, c.hidden_size // c.num_heads, theta)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        if window is not None:
            places = torch.arange(position_ids.shape[1], device=position_ids.device)
            far = (places[:, None] - places).abs()
            # Padding far from every token still sees itself: a row of nothing but False would become NaN.
            mask = far <= window if mask is None else ((far <= window) & mask) | (far == 0)
        return rope, mask


def _as_asked(output: Any, config: CrammingConfig, return_dict: bool | None) -> Any:
    wanted = config.return_dict if return_dict is None else return_dict
    return output if wanted else output.to_tuple()


class CrammingForMaskedLM(CrammingPreTrainedModel):
    """Encoder and scores over the vocabulary; `labels` are -100 where there is no target."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"decoder.weight": "encoder.embeddings.tokens.weight"}

    def __init__(self, config: CrammingConfig) -> None:
        super().__init__(config)
        c = SimpleNamespace(**config.model)
        self.encoder = CrammingModel(config)
        self.transform = HeadTransform(c) if c.head_transform else nn.Identity()
        self.decoder = nn.Linear(c.hidden_size, c.vocab_size, bias=c.decoder_bias)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, output_hidden_states, True)
        encoded = self.encoder(*given)
        logits = self.decoder(self.transform(encoded.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return _as_asked(
            MaskedLMOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states), self.config, return_dict
        )


class CrammingForSequenceClassification(CrammingPreTrainedModel):
    """One vector per row (mean of its tokens, or its first), dense and tanh, dropout, `num_labels` scores.

    `labels` are class numbers, real numbers for one label (regression), or a row of 0.0 and 1.0 for several at once.
    """

    def __init__(self, config: CrammingConfig) -> None:
        super().__init__(config)
        if config.classifier_pooling not in ("mean", "cls"):
            raise ValueError(f"classifier_pooling={config.classifier_pooling!r}: choose mean or cls")
        self.encoder = CrammingModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, output_hidden_states, True)
        encoded = self.encoder(*given)
        pooled = self._pool(encoded.last_hidden_state, attention_mask)
        logits = self.classifier(self.dropout(self.pooler(pooled).tanh()))
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return _as_asked(output, self.config, return_dict)

    def _pool(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """[B, D]."""
        mask = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask.to(hidden.dtype)
        if self.config.classifier_pooling == "cls":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.argmax(dim=1)]
        return (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


class CrammingForTokenClassification(CrammingPreTrainedModel):
    """`num_labels` scores for every token; `labels` are -100 where a token has none."""

    def __init__(self, config: CrammingConfig) -> None:
        super().__init__(config)
        self.encoder = CrammingModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> TokenClassifierOutput | tuple[Tensor, ...]:
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, output_hidden_states, True)
        encoded = self.encoder(*given)
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        output = TokenClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return _as_asked(output, self.config, return_dict)


class CrammingForQuestionAnswering(CrammingPreTrainedModel):
    """Scores of every token as the answer's first and as its last."""

    def __init__(self, config: CrammingConfig) -> None:
        super().__init__(config)
        self.encoder = CrammingModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringModelOutput | tuple[Tensor, ...]:
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, output_hidden_states, True)
        encoded = self.encoder(*given)
        starts, ends = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(starts, ends, start_positions, end_positions)
        output = QuestionAnsweringModelOutput(
            loss=loss, start_logits=starts, end_logits=ends, hidden_states=encoded.hidden_states
        )
        return _as_asked(output, self.config, return_dict)
