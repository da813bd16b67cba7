"""Model configuration, and parameters and operations counted from it without building the model.

An encoder is a point in a space of independent choices (norm order, positions, MLP, attention window, head ...).
BERT, the crammed BERT of Geiping & Goldstein (2022) and ModernBERT (Warner et al. 2024) are three YAML files in
`conf/model/`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
Pooling = Literal["mean", "cls", "pairs"]  # of a classifier (classifier.py)
# the tokens for which a masked language model computes its late layers
LastLayer = Literal["all", "targets"]
Init = Literal["normal", "truncated", "depth_scaled", "small"]

_LEAST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_layers": 1,
    "num_heads": 1,
    "intermediate_size": 1,
    "max_length": 1,
    "local_window": 2,
    "global_every": 1,
    "late_layers": 1,
    "value_embeddings": 0,
    "convolution": 0,
    "token_types": 0,
    "position_offset": 0,
    "relative_positions": 0,
}
_POSITIVE = ("norm_eps", "init_std", "rope_theta_global", "rope_theta_local", "logit_softcap")


@dataclass(frozen=True)
class ModelConfig:
    """Section `model`. Every field is independent of the others unless said here.

    A dataclass without pydantic, which validates it from outside: this file is copied into exported models.
    """

    vocab_size: int | None = (
        None  # rows of the embedding; null: the corpus's vocabulary, padded to a multiple of 64
    )
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = (
        3072  # input width of the MLP's second matrix (with `glu` the first has 2x as many rows)
    )
    max_length: int = 512  # longest sequence; the size of the table for learned positions

    # Rows of a table of learned positions that no token has, before that of the first token (RoBERTa: 2)
    position_offset: int = 0

    norm_order: Literal["pre", "post"] = "post"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-12
    norm_bias: bool = True
    embedding_norm: bool = True
    final_norm: bool = False
    first_attn_norm: bool = (
        True  # false: no norm before the first attention (ModernBERT: embedding_norm does it)
    )

    positions: Literal["learned", "scaled_sinusoidal", "rope", "none"] = "learned"
    rope_theta_global: float = 160_000.0
    rope_theta_local: float = 10_000.0

    # Rows of a table of trained terms of attention scores, one for each head, by the distance from query to key: half
    # of the rows for each direction, beyond 128 tokens always the same one. All layers share it (Raffel et al. 2020,
    # T5, section 2.1; MPNet, Song et al. 2020, has 32 beside learned positions). 0: none
    relative_positions: int = 0

    local_window: int | None = (
        None  # tokens in all, as ModernBERT counts: local layers see local_window // 2 each way
    )
    global_every: int = (
        1  # layer i is global when i % global_every == 0; the others are local if there is a window
    )
    qk_norm: bool = False  # RMS norm of each head's queries and keys
    # The last so many layers take keys and values from the states that enter the first of them (the stream that all
    # tokens have), so each token's way through them depends on no other's: pretraining computes them at targets alone
    # (`SparseQueries` of NarrowBERT, Li et al. 2023, section 2). With 1 the model is the usual one.
    late_layers: int = 1
    # Layer n - 1 - i of n also receives what layer i gave, times a trained scalar (Jordan et al. 2024, modded-nanogpt,
    # record 11, after U-Net, Ronneberger et al. 2015)
    unet_skips: bool = False
    # The values of the first so many layers and of the last so many are mixed, by trained scalars, with vectors of the
    # tokens; a table serves one of the first and one of the last (modded-nanogpt, records 14 and 15)
    value_embeddings: int = 0
    value_residual: bool = (
        False  # so are those of later layers with the first layer's (Zhou et al. 2024, section 3)
    )
    attention_gate: bool = (
        False  # each head's output times a sigmoid of the layer's input (Qiu et al. 2025, 2.2)
    )

    # Before each layer a token also receives its neighbours, up to so many to each side, times trained weights per
    # channel (ConvBERT, Jiang et al. 2020; canon layers, Allen-Zhu 2025)
    convolution: int = 0

    mlp: Literal["plain", "glu"] = "plain"
    activation: Activation = "gelu"  # relu2: ReLU squared (So et al. 2021, Primer, section 4)
    attention_bias: bool = True
    mlp_bias: bool = True

    head_transform: bool = True  # dense, activation and norm before the vocabulary projection
    head_bias: bool = True  # bias of that dense layer
    decoder_bias: bool = True
    tie_embeddings: bool = True
    logit_softcap: float | None = (
        None  # c: logits are c tanh(logits / c) (Gemma 2, Gemma Team 2024, section 2)
    )
    token_types: int = 2  # rows of the token-type table; 0: none

    dropout: float = 0.0  # after the embedding and after every attention and MLP output
    attention_dropout: float = 0.0  # of attention probabilities
    init: Init = "normal"
    init_std: float = 0.02
    # what attention and MLP add to the residual stream starts at zero (Zhang et al. 2019, Fixup, section 3); mimetic
    # attention, which is about that very product, keeps its own
    zero_residual: bool = False
    attention_init: Literal["random", "mimetic"] = "random"  # mimetic: see init.py

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            _require(value is None or value >= least, f"{name}={value}: expected at least {least}.")
        for name in _POSITIVE:
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name}={value}: expected a number above 0.")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            _require(0.0 <= value < 1.0, f"{name}={value}: expected at least 0 and below 1.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        _require(
            self.hidden_size % self.num_heads == 0,
            f"hidden_size={self.hidden_size}: not a multiple of model.num_heads={self.num_heads}."
            " Change one of them.",
        )
        _require(
            self.positions not in ("rope", "scaled_sinusoidal") or self.head_size % 2 == 0,
            f"positions={self.positions}: needs an even head size, not hidden_size / num_heads ="
            f" {self.head_size}. Change model.num_heads.",
        )
        _require(
            self.relative_positions in (0, *range(4, 257, 2)),
            f"relative_positions={self.relative_positions}: expected 0, or an even number from 4 to 256.",
        )
        _require(
            not (self.norm == "rmsnorm" and self.norm_bias),
            "norm_bias=true: model.norm=rmsnorm has no bias. Set it to false.",
        )
        _require(
            self.late_layers <= self.num_layers,
            f"late_layers={self.late_layers}: more than model.num_layers={self.num_layers}. Lower it.",
        )
        _require(
            2 * self.value_embeddings <= self.num_layers,
            f"value_embeddings={self.value_embeddings}: more than half of"
            f" model.num_layers={self.num_layers}. Lower it.",
        )

    @property
    def head_size(self) -> int:
        """Width of one head's queries, keys and values."""
        return self.hidden_size // self.num_heads

    def half_window(self, layer: int) -> int | None:
        """Return the number of tokens that layer `layer` sees to each side, or None for all of them."""
        if self.local_window is None or layer % self.global_every == 0:
            return None
        return self.local_window // 2

    @property
    def num_skips(self) -> int:
        """Pairs of layers that a U-net skip connects."""
        return self.num_layers // 2 if self.unet_skips else 0

    @property
    def num_convolutions(self) -> int:
        """Number of convolutions: one before each layer that is computed for all tokens."""
        return self.num_layers - self.late_layers + 1 if self.convolution else 0

    def value_table(self, layer: int) -> int | None:
        """Return the index of the value embedding that layer `layer` mixes into its values, or None."""
        first_of_last = self.num_layers - self.value_embeddings
        if self.value_embeddings <= layer < first_of_last:
            return None
        return layer if layer < self.value_embeddings else layer - first_of_last

    def value_sources(self, layer: int) -> int:
        """Return the number of other vectors that layer `layer` mixes into its values."""
        return (self.value_table(layer) is not None) + (self.value_residual and layer > 0)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class ParameterCount(NamedTuple):
    """Numbers of trained parameters."""

    total: int
    without_embeddings: (
        int  # without the tables of tokens (a tied decoder), values, positions and token types
    )


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Return the number of parameters of `MaskedLM(config)`, each counted once (a tied decoder adds nothing)."""
    vocab = _vocabulary(config)
    width, inner = config.hidden_size, config.intermediate_size
    norm = width * (2 if config.norm_bias else 1)
    up = inner * (2 if config.mlp == "glu" else 1)
    attention = 4 * width * width + (4 * width if config.attention_bias else 0)
    attention += 2 * config.head_size if config.qk_norm else 0
    gate = config.num_heads * (width + (1 if config.attention_bias else 0))
    attention += gate if config.attention_gate else 0
    mlp = width * up + inner * width + (up + width if config.mlp_bias else 0)
    body = config.num_layers * (attention + mlp + 2 * norm)
    body -= norm if not config.first_attn_norm else 0
    body += norm * (config.embedding_norm + config.final_norm)
    if config.head_transform:
        body += width * width + (width if config.head_bias else 0) + norm
    sources = [config.value_sources(layer) for layer in range(config.num_layers)]
    body += config.num_skips + sum(1 + count for count in sources if count)  # scalars
    body += config.num_convolutions * 2 * config.convolution * width
    body += vocab if config.decoder_bias else 0
    body += 0 if config.tie_embeddings else vocab * width
    body += 1 if config.positions == "scaled_sinusoidal" else 0
    tables = vocab * (1 + config.value_embeddings) + config.token_types
    if config.positions == "learned":
        tables += config.max_length + config.position_offset
    relative = config.relative_positions * config.num_heads
    return ParameterCount(body + tables * width + relative, body)


def flops_per_token(
    config: ModelConfig,
    sequence_length: int,
    targets_per_token: float,
    last_layer: LastLayer = "targets",
) -> float:
    """Return floating-point operations of one forward and backward pass of `MaskedLM`, per input token.

    With D hidden size, F intermediate size (G = 2F for a GLU, else F), V vocabulary, L sequence length, t targets per
    token, a multiply-add counted as 2 and a backward pass as twice the forward:

        3 * [ sum over layers of 2 (4 D^2 + D G + F D + D H) + 4 D C_layer ]  +  3 * t * 2 (D^2 if head transform + D V)

    The term D H counts only with gates of H heads. C is the mean number of keys that a query sees: L in a global layer,
    and in a local layer of half window W the part of 2 W + 1 that lies in the row: L if W >= L - 1, else
    (2 W + 1) - W (W + 1) / L. Sequences are taken as whole rows: documents packed into a row attend to less than is
    counted. A late layer computed at the targets only has the share t of all but its keys and values, so it counts as
    t * (2 (2 D^2 + D G + F D + D H) + 4 D C) + 4 D^2. Embedding lookups, norms, activations, softmax, scalars,
    convolutions and the optimizer are not counted (PaLM, Chowdhery et al. 2022, appendix B); recomputation is not
    either.
    """
    width = config.hidden_size
    body = encoder_flops(config, sequence_length, targets_per_token, last_layer)
    head = 2 * width * _vocabulary(config) + (2 * width * width if config.head_transform else 0)
    return 3.0 * (body + targets_per_token * head)


def encoder_flops(
    config: ModelConfig, sequence_length: int, targets_per_token: float, last_layer: LastLayer
) -> float:
    """Return floating-point operations of the encoder's forward pass per input token; see `flops_per_token`."""
    width, inner = config.hidden_size, config.intermediate_size
    up = inner * (2 if config.mlp == "glu" else 1)
    gates = width * config.num_heads if config.attention_gate else 0
    matrices = config.num_layers * 2 * (4 * width * width + width * up + inner * width + gates)
    half_windows = [config.half_window(layer) for layer in range(config.num_layers)]
    keys = [_keys_per_query(half_window, sequence_length) for half_window in half_windows]
    body = matrices + 4 * width * sum(keys)
    if last_layer == "targets":
        late = config.late_layers
        rows = 2 * width * width + width * up + inner * width + gates
        at_targets = late * 2 * rows + 4 * width * sum(keys[-late:])
        body -= (1 - targets_per_token) * at_targets
    return body


def _keys_per_query(half_window: int | None, length: int) -> float:
    if half_window is None or half_window >= length - 1:
        return float(length)
    return (2 * half_window + 1) - half_window * (half_window + 1) / length


def _vocabulary(config: ModelConfig) -> int:
    assert config.vocab_size is not None, (
        "vocab_size is filled in from the corpus before anything is counted or built"
    )
    return config.vocab_size
