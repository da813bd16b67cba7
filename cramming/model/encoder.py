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

Shared = dict[
    int | None, tuple[Rope | None, Layout]
]  # by half window: what all blocks with it share
Values = tuple[Tensor, ...]  # what a block mixes into its own values, each [T, D] or [T, H, K]


class Embeddings(nn.Module):
    """Token, position and token-type vectors, summed, then norm and dropout.

    The vectors of another encoder's table of `tokens` are projected to this one's width.
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
            self.positions = nn.Embedding(
                config.max_length + config.position_offset, width
            )  # a trained vector each (Devlin et al. 2019)
        elif config.positions == "scaled_sinusoidal":
            self.positions = ScaledSinusoid(config.max_length, width)
        self.token_types = nn.Embedding(config.token_types, width) if config.token_types else None
        self.norm = make_norm(config, config.embedding_norm)
        self.dropout = Dropout(config.dropout)

    def forward(self, ids_T: Tensor, positions_T: Tensor, token_types_T: Tensor | None) -> Tensor:
        hidden_TD = self.tokens(ids_T)
        if self.projection is not None:
            hidden_TD = self.projection(hidden_TD).to(
                hidden_TD.dtype
            )  # autocast lowers products, not the stream
        if self.token_types is not None:
            alone = (
                self.token_types.num_embeddings == 1
            )  # then it is the type of both texts of a pair
            none = alone or token_types_T is None
            hidden_TD = hidden_TD + (
                self.token_types.weight[0] if none else self.token_types(token_types_T)
            )
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
        self.hands_on_values = config.value_residual and layer == 0

    def forward(
        self,
        x_TD: Tensor,
        rope: Rope | None,
        layout: Layout,
        context_TD: Tensor | None,
        values: Values,
    ) -> tuple[Tensor, Values]:
        """[T, D], or [M, D] of the layout's query subset, and the values [T, H, K] if later blocks want them.

        With a context `x` holds the queries' states alone. `values` are mixed into the block's own.
        """
        q, k, v = self._project(x_TD, layout, context_TD)
        if self.value_scales is not None:
            own, *scales = self.value_scales
            v = own * v
            for scale, other in zip(scales, values, strict=True):
                v = v + scale * other.view_as(v)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            cos, sin = rope
            q, k = (
                apply_rope(q, (layout.at_queries(cos), layout.at_queries(sin))),
                apply_rope(k, rope),
            )
        mixed_THK = attention.attend(q, k, v, layout, self.dropout if self.training else 0.0)
        if self.gate is not None:
            gates_TH = self.gate(
                x_TD if context_TD is not None else layout.at_queries(x_TD)
            ).sigmoid()
            mixed_THK = mixed_THK * gates_TH[:, :, None]
        return self.out(mixed_THK.flatten(1)), (v,) if self.hands_on_values else ()

    def _project(
        self, x_TD: Tensor, layout: Layout, context_TD: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Queries of the query subset, keys and values of all tokens."""
        if layout.queries_M is None and context_TD is None:
            return self.qkv(x_TD).view(len(x_TD), 3, -1, self.head_size).unbind(1)
        width = self.qkv.weight.shape[0] // 3  # of as many heads as the weight has
        weight_q, weight_kv = self.qkv.weight.split([width, 2 * width])
        bias_q, bias_kv = (
            (None, None) if self.qkv.bias is None else self.qkv.bias.split([width, 2 * width])
        )
        x_MD, keys_TD = (
            (layout.at_queries(x_TD), x_TD) if context_TD is None else (x_TD, context_TD)
        )
        q_MD = F.linear(x_MD, weight_q, bias_q)
        k, v = (
            F.linear(keys_TD, weight_kv, bias_kv)
            .view(len(keys_TD), 2, -1, self.head_size)
            .unbind(1)
        )
        return q_MD.view(len(x_MD), -1, self.head_size), k, v


class Block(nn.Module):
    """Attention and MLP, each with a residual; the norm before each (`pre`) or after each sum (`post`)."""

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
        """[T, D], or [M, D] of the layout's query subset: the other tokens then have no output at all.

        With `context_TD` keys and values are made from it, and `hidden` is of the query subset already. `values` are
        mixed into the block's own; a first block whose values others want also returns them, [T, H, K].
        """
        kept, handed_on = self._attended(hidden_TD, rope, layout, context_TD, values)
        if self.pre:
            out = residual_sum(kept, self.dropout(self.mlp(self.mlp_norm(kept))))
        else:
            out = self.mlp_norm(residual_sum(kept, self.dropout(self.mlp(kept))))
        return (out, *handed_on) if handed_on else out

    def _attended(
        self,
        hidden_TD: Tensor,
        rope: Rope | None,
        layout: Layout,
        context_TD: Tensor | None,
        values: Values,
    ) -> tuple[Tensor, Values]:
        """The stream after attention, and the values that it hands on."""
        kept = layout.at_queries(hidden_TD) if context_TD is None else hidden_TD
        if self.pre:
            context_TD = None if context_TD is None else self.attn_norm(context_TD)
            found, handed_on = self.attn(
                self.attn_norm(hidden_TD), rope, layout, context_TD, values
            )
            return _materialized_stream(residual_sum(kept, self.dropout(found))), handed_on
        found, handed_on = self.attn(hidden_TD, rope, layout, context_TD, values)
        return self.attn_norm(residual_sum(kept, self.dropout(found))), handed_on


class Encoder(nn.Module):
    """Token ids to hidden states. `kernel` names an attention kernel of `attention.KERNELS`, or is "auto".

    `tokens`: another encoder's table of token vectors, which this one shares; it is initialised already.
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
        vocab, widths = (
            self.embeddings.tokens.num_embeddings,
            config.value_embeddings * config.hidden_size,
        )
        self.value_tokens = (
            nn.Embedding(vocab, widths) if widths else None
        )  # all tables side by side
        self.convolutions = nn.ModuleList()
        if radius := config.convolution:
            from .convolution import Convolution  # only here: most runs have none

            self.convolutions.extend(
                Convolution(radius, config.hidden_size) for _ in range(config.num_convolutions)
            )
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
        """Hidden states [T, D]. Positions count from 0 within each sequence and stay below `config.max_length`.

        With `queries_M` (tokens, ascending, as many in each row) only theirs, [M, D], and the late layers compute no
        others: of their 12 D^2 multiplications per token all but the 2 D^2 of keys and values are saved elsewhere.
        """
        hidden_TD = self.embeddings(ids_T, positions_T, token_types_T)
        return self.final_norm(
            self.through(range(len(self.blocks)), hidden_TD, ids_T, positions_T, packing, queries_M)
        )

    def through(
        self,
        layers: range,
        hidden: Tensor,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        queries_M: Tensor | None = None,
    ) -> Tensor:
        """What these layers make of hidden states [T, D]; `queries_M` is for a stretch that ends with the last layer.

        A stretch begins with nothing but the hidden states: no skip, value or context comes from a layer before it.
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
            out = self.blocks[layer](
                hidden, rope, layout, context_TD if layer > first_late else None, values
            )
            hidden, first_values = (
                (out[0], out[1:]) if isinstance(out, tuple) else (out, first_values)
            )
            if layer < self.config.num_skips:
                skips.append(hidden)
        if queries_M is not None and layout.queries_M is None:
            hidden = hidden.index_select(0, queries_M)
        return hidden

    def _value_embeddings(self, ids_T: Tensor) -> Values:
        """[T, D] of each table."""
        if self.value_tokens is None:
            return ()
        found_TX = self.value_tokens(ids_T).to(compute_dtype(self.value_tokens.weight))
        return found_TX.chunk(self.config.value_embeddings, dim=-1)

    def _restricted(self, shared: Shared, queries_M: Tensor | None, num_tokens: int) -> Shared:
        """What the late layers share: of the query subset, where there is one and all of their kernels can do that."""
        if queries_M is None:
            return shared
        layers = range(len(self.blocks))[-self.config.late_layers :]
        windows = {
            self.config.half_window(layer): shared[self.config.half_window(layer)]
            for layer in layers
        }
        found = {
            window: (rope, restricted)
            for window, (rope, layout) in windows.items()
            if (restricted := attention.restrict(layout, queries_M, num_tokens)) is not None
        }
        return found if len(found) == len(windows) else shared

    def _shared(
        self, window: int | None, positions_T: Tensor, packing: Packing, hidden_TD: Tensor
    ) -> tuple[Rope | None, Layout]:
        """What all blocks with this window share: rotary tables and attention layout."""
        config = self.config
        rope = None
        if config.positions == "rope":
            theta = config.rope_theta_global if window is None else config.rope_theta_local
            rope = rope_tables(positions_T, config.head_size, theta)
        dropout = config.attention_dropout if self.training else 0.0
        dtype = compute_dtype(hidden_TD)
        return rope, attention.prepare(
            self.kernel, packing, positions_T.shape[0], window, dtype, dropout
        )


def _materialized_stream(hidden_TD: Tensor) -> Tensor:
    """Return `hidden_TD`, materialized where products are in 16 bits.

    There it saves bytes in the dry run of a GPU's compiled code (docs/results/tricks.md). Elsewhere it was not tried.
    """
    is_low = compute_dtype(hidden_TD).itemsize == 2
    return materialized(hidden_TD) if is_low else hidden_TD


def compute_dtype(like: Tensor) -> torch.dtype:
    """The type of matrix products with `like` here and now: autocast's where it is on, else the tensor's own."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
