"""The encoder: embeddings, a for-loop over blocks, a final norm.

Math only: no device, rank or precision is decided here. Checkpointing, compilation and sharding wrap `encoder.blocks`
from outside. Shapes: T tokens of all sequences end to end, D hidden size, H heads, K head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import attention
from .attention import Layout, Packing
from .config import ModelConfig
from .init import initialize
from .layers import (
    MLP,
    Dropout,
    RMSNorm,
    Rope,
    ScaledSinusoid,
    apply_rope,
    make_norm,
    materialized,
    residual_sum,
    rope_tables,
)

# half window -> rotary tables and attention layout of all blocks with that window
Shared = dict[int | None, tuple[Rope | None, Layout]]
# vectors that a block mixes into its values, each [T, D] or [T, H, K]
Values = tuple[Tensor, ...]


class Embeddings(nn.Module):
    """Sum of token, position and token-type vectors, then norm and dropout.

    If `tokens` is the token table of another encoder, its vectors are projected to this encoder's width.
    """

    def __init__(self, config: ModelConfig, tokens: nn.Embedding | None = None) -> None:
        super().__init__()
        assert config.vocab_size is not None, (
            "vocab_size is filled in from the corpus before the model is built"
        )
        width = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, width) if tokens is None else tokens
        self.projection = (
            None if tokens is None else nn.Linear(tokens.embedding_dim, width, bias=False)
        )
        self.positions: nn.Module | None = None
        self.position_offset = config.position_offset
        if config.positions == "learned":
            # a trained vector per position (Devlin et al. 2019)
            self.positions = nn.Embedding(config.max_length + config.position_offset, width)
        elif config.positions == "scaled_sinusoidal":
            self.positions = ScaledSinusoid(config.max_length, width)
        self.token_types = nn.Embedding(config.token_types, width) if config.token_types else None
        self.norm = make_norm(config, config.embedding_norm)
        self.dropout = Dropout(config.dropout)

    def forward(self, ids_T: Tensor, positions_T: Tensor, token_types_T: Tensor | None) -> Tensor:
        hidden_TD = self.tokens(ids_T)
        if self.projection is not None:
            projected_TD = self.projection(hidden_TD)
            hidden_TD = projected_TD.to(hidden_TD.dtype)  # autocast lowers products, not the stream
        if self.token_types is not None:
            # A table of one row gives both texts of a pair the same type.
            has_one_type = self.token_types.num_embeddings == 1
            if has_one_type or token_types_T is None:
                hidden_TD = hidden_TD + self.token_types.weight[0]
            else:
                hidden_TD = hidden_TD + self.token_types(token_types_T)
        if self.positions is not None:
            hidden_TD = hidden_TD + self.positions(positions_T + self.position_offset)
        return self.dropout(self.norm(hidden_TD))


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, eps=config.norm_eps) if config.qk_norm else None
        width, heads, sources = config.hidden_size, config.num_heads, config.value_sources(layer)
        self.gate = (
            nn.Linear(width, heads, bias=config.attention_bias) if config.attention_gate else None
        )
        self.value_scales = nn.Parameter(torch.empty(1 + sources)) if sources else None
        self.returns_values = config.value_residual and layer == 0

    def forward(
        self,
        x_TD: Tensor,
        rope: Rope | None,
        layout: Layout,
        context_TD: Tensor | None,
        values: Values,
    ) -> tuple[Tensor, Values]:
        """Return the output, [T, D] or [M, D] of the query subset, and the values [T, H, K] if later blocks use them.

        With a context, `x_TD` holds the states of the queries alone. `values` are mixed into this block's values.
        """
        q, k, v = self._project(x_TD, layout, context_TD)
        if self.value_scales is not None:
            own_scale, *other_scales = self.value_scales
            v = own_scale * v
            for scale, other in zip(other_scales, values, strict=True):
                v = v + scale * other.view_as(v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            cos, sin = rope
            q = apply_rope(q, (layout.at_queries(cos), layout.at_queries(sin)))
            k = apply_rope(k, rope)
        dropout = self.dropout if self.training else 0.0
        mixed_THK = attention.attend(q, k, v, layout, dropout)
        if self.gate is not None:
            x_MD = x_TD if context_TD is not None else layout.at_queries(x_TD)
            gates_MH = self.gate(x_MD).sigmoid()
            mixed_THK = mixed_THK * gates_MH[:, :, None]
        values_out = (v,) if self.returns_values else ()
        return self.out(mixed_THK.flatten(1)), values_out

    def _project(
        self, x_TD: Tensor, layout: Layout, context_TD: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return queries of the query subset, and keys and values of all tokens."""
        if layout.queries_M is None and context_TD is None:
            return self.qkv(x_TD).view(x_TD.shape[0], 3, -1, self.head_size).unbind(1)
        width = self.qkv.weight.shape[0] // 3  # a tensor-parallel rank has only some of the heads
        weight_q, weight_kv = self.qkv.weight.split([width, 2 * width])
        bias_q = bias_kv = None
        if self.qkv.bias is not None:
            bias_q, bias_kv = self.qkv.bias.split([width, 2 * width])
        x_MD, keys_TD = x_TD, context_TD
        if keys_TD is None:
            x_MD, keys_TD = layout.at_queries(x_TD), x_TD
        q_MD = F.linear(x_MD, weight_q, bias_q)
        kv_TX = F.linear(keys_TD, weight_kv, bias_kv)
        k, v = kv_TX.view(keys_TD.shape[0], 2, -1, self.head_size).unbind(1)
        return q_MD.view(x_MD.shape[0], -1, self.head_size), k, v


class Block(nn.Module):
    """Attention and MLP with residuals, and a norm before each (`pre`) or after each sum (`post`)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre = config.norm_order == "pre"
        self.attn_norm = make_norm(config, layer > 0 or config.first_attn_norm)
        self.attn = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_TD: Tensor,
        rope: Rope | None,
        layout: Layout,
        context_TD: Tensor | None = None,
        values: Values = (),
    ) -> Tensor | Values:
        """Return the hidden states [T, D], or [M, D] of the layout's query subset.

        With `context_TD` keys and values are computed from it, and `hidden_TD` holds the query subset already.
        `values` are mixed into this block's values; a first block whose values are used later returns them too, [T,
        H, K].
        """
        residual_MD, values_out = self._attended(hidden_TD, rope, layout, context_TD, values)
        if self.pre:
            out = residual_sum(residual_MD, self.dropout(self.mlp(self.mlp_norm(residual_MD))))
        else:
            out = self.mlp_norm(residual_sum(residual_MD, self.dropout(self.mlp(residual_MD))))
        return (out, *values_out) if values_out else out

    def _attended(
        self,
        hidden_TD: Tensor,
        rope: Rope | None,
        layout: Layout,
        context_TD: Tensor | None,
        values: Values,
    ) -> tuple[Tensor, Values]:
        """Return the residual stream after attention, and the values for later blocks."""
        residual_MD = layout.at_queries(hidden_TD) if context_TD is None else hidden_TD
        if self.pre:
            context_TD = None if context_TD is None else self.attn_norm(context_TD)
            mixed_MD, values_out = self.attn(
                self.attn_norm(hidden_TD), rope, layout, context_TD, values
            )
            return _materialized_stream(
                residual_sum(residual_MD, self.dropout(mixed_MD))
            ), values_out
        mixed_MD, values_out = self.attn(hidden_TD, rope, layout, context_TD, values)
        return self.attn_norm(residual_sum(residual_MD, self.dropout(mixed_MD))), values_out


class Encoder(nn.Module):
    """Transformer encoder from token ids to hidden states.

    `kernel` names an attention kernel of `attention.KERNELS`, or is "auto". `tokens` is the token table of another
    encoder to share; it is initialised already.
    """

    def __init__(
        self, config: ModelConfig, kernel: str = "auto", tokens: nn.Embedding | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.kernel = kernel
        self.embeddings = Embeddings(config, tokens)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = make_norm(config, config.final_norm)
        rows = config.relative_positions
        self.relative_positions = nn.Embedding(rows, config.num_heads) if rows else None
        vocab = self.embeddings.tokens.num_embeddings
        widths = config.value_embeddings * config.hidden_size  # all tables side by side
        self.value_tokens = nn.Embedding(vocab, widths) if widths else None
        self.convolutions = nn.ModuleList()
        if config.convolution:
            from .convolution import Convolution  # imported late: most runs have none

            for _ in range(config.num_convolutions):
                self.convolutions.append(Convolution(config.convolution, config.hidden_size))
        self.skip_scales = nn.Parameter(torch.empty(config.num_skips)) if config.num_skips else None
        initialize(self, config, done=tokens)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        token_types_T: Tensor | None = None,
        queries_M: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [T, D], or [M, D] of `queries_M`.

        Positions count from 0 within each sequence and stay below `config.max_length`. `queries_M` are ascending
        tokens, with equally many in each row. The late layers then compute no other tokens: of 12 D^2 multiplications
        per token they spend only the 2 D^2 of keys and values elsewhere.
        """
        hidden_TD = self.embeddings(ids_T, positions_T, token_types_T)
        layers = range(len(self.blocks))
        hidden = self.run_layers(layers, hidden_TD, ids_T, positions_T, packing, queries_M)
        return self.final_norm(hidden)

    def run_layers(
        self,
        layers: range,
        hidden: Tensor,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        queries_M: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after these layers, from states [T, D] before them.

        A range of layers starts from the hidden states alone: it gets no skip, value or context of layers before it.
        `queries_M` may be given only for a range that ends with the last layer.
        """
        windows = {self.config.half_window(layer): None for layer in layers}  # in the layers' order
        shared = {window: self._shared(window, positions_T, packing, hidden) for window in windows}
        first_late = len(self.blocks) - self.config.late_layers
        embedded = self._value_embeddings(ids_T)
        first_values: Values = ()
        skips: list[Tensor] = []
        for layer in layers:
            mirrored = len(self.blocks) - 1 - layer
            if self.skip_scales is not None and mirrored < len(self.skip_scales):
                hidden = hidden + self.skip_scales[mirrored] * skips.pop()
            if layer < len(self.convolutions):
                hidden = self.convolutions[layer](hidden, positions_T, packing.causal)
            if self.config.norm_order == "pre":
                hidden = _materialized_stream(hidden)
            if layer == first_late:
                shared = self._restricted(shared, queries_M, ids_T.shape[0])
            rope, layout = shared[self.config.half_window(layer)]
            if layer == first_late:
                context_TD, skips = hidden, [layout.at_queries(skip) for skip in skips]
            table = self.config.value_table(layer)
            values = first_values if table is None else (embedded[table], *first_values)
            context = context_TD if layer > first_late else None
            hidden = self.blocks[layer](hidden, rope, layout, context, values)
            if isinstance(hidden, tuple):
                hidden, *rest = hidden
                first_values = tuple(rest)
            if layer < self.config.num_skips:
                skips.append(hidden)
        if queries_M is not None and layout.queries_M is None:
            hidden = hidden.index_select(0, queries_M)
        return hidden

    def _value_embeddings(self, ids_T: Tensor) -> Values:
        """Return the value embeddings of the tokens, [T, D] per table."""
        if self.value_tokens is None:
            return ()
        embedded_TX = self.value_tokens(ids_T).to(compute_dtype(self.value_tokens.weight))
        return embedded_TX.chunk(self.config.value_embeddings, dim=-1)

    def _restricted(self, shared: Shared, queries_M: Tensor | None, num_tokens: int) -> Shared:
        """Return the layouts of the late layers, restricted to the query subset if all of their kernels can do that."""
        if queries_M is None:
            return shared
        restricted: Shared = {}
        for layer in range(len(self.blocks))[-self.config.late_layers :]:
            window = self.config.half_window(layer)
            if window in restricted:
                continue
            rope, layout = shared[window]
            at_queries = attention.restrict(layout, queries_M, num_tokens)
            if at_queries is None:
                return shared
            restricted[window] = (rope, at_queries)
        return restricted

    def _shared(
        self, window: int | None, positions_T: Tensor, packing: Packing, hidden_TD: Tensor
    ) -> tuple[Rope | None, Layout]:
        """Return the rotary tables and the attention layout of all blocks with this window."""
        config = self.config
        rope = None
        if config.positions == "rope":
            theta = config.rope_theta_global if window is None else config.rope_theta_local
            rope = rope_tables(positions_T, config.head_size, theta)
        dropout = config.attention_dropout if self.training else 0.0
        dtype = compute_dtype(hidden_TD)
        table_RH = None if self.relative_positions is None else self.relative_positions.weight
        return rope, attention.prepare(
            self.kernel, packing, positions_T.shape[0], window, dtype, dropout, table_RH
        )


def _materialized_stream(hidden_TD: Tensor) -> Tensor:
    """Return `hidden_TD`, materialized where products are in 16 bits.

    There it saves bytes in the dry run of a GPU's compiled code (docs/results/tricks.md). Elsewhere it is unmeasured.
    """
    is_low = compute_dtype(hidden_TD).itemsize == 2
    return materialized(hidden_TD) if is_low else hidden_TD


def compute_dtype(like: Tensor) -> torch.dtype:
    """Return the type of matrix products with `like`: autocast's where autocast is on, else the type of the tensor."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
