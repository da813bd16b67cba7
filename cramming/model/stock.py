"""The architectures that `transformers` has, as points of this suite's model.

For each: which choices the stock class fixes, how its configuration and ours translate into each other, and one table
of names, own parameter -> stock parameters, that serves both directions; several stock names for one own parameter mean
that the stock matrices are stacked (BERT's query, key and value). What a stock configuration can say and this model
cannot compute is refused by name, never dropped. `export` does the reading and writing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cramming.config import UserError
from cramming.model.config import ModelConfig

HF_ACTIVATIONS = {  # as transformers spells them -> ours; the first spelling of each is the one written
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

Names = dict[str, tuple[str, ...]]  # own parameter -> stock parameters, stacked along the first axis


class Family(NamedTuple):
    """A stock architecture: its class, its fixed choices, and both translations."""

    architecture: str
    fixed: dict[str, Any]  # fields of ModelConfig that the stock class fixes
    prefix: str  # of the bare encoder's parameters inside the masked-LM class
    to_stock: Callable[[ModelConfig], dict[str, Any]]
    from_stock: Callable[[dict[str, Any]], dict[str, Any]]
    names: Callable[[ModelConfig], Names]
    ignored: str  # regular expression of other parameters that a checkpoint may hold


# BERT -----------------------------------------------------------------------------------------------------------------


def _bert_to_stock(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": _stock_activation(config),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "classifier_dropout": None,
        "is_decoder": False,
        "add_cross_attention": False,
        "use_cache": True,
    }


def _bert_from_stock(node: dict[str, Any]) -> dict[str, Any]:
    _only(node, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    _only(node, tie_word_embeddings=True)
    return {
        "activation": _own_activation(node, "hidden_act"),
        "dropout": node.get("hidden_dropout_prob", 0.1),
        "attention_dropout": node.get("attention_probs_dropout_prob", 0.1),
        "max_length": node.get("max_position_embeddings", 512),
        "token_types": node.get("type_vocab_size", 2),
        "norm_eps": node.get("layer_norm_eps", 1e-12),
        "init_std": node.get("initializer_range", 0.02),
    }


def _bert_names(config: ModelConfig) -> Names:
    pairs = {
        "encoder.embeddings.tokens": ["bert.embeddings.word_embeddings"],
        "encoder.embeddings.positions": ["bert.embeddings.position_embeddings"],
        "encoder.embeddings.token_types": ["bert.embeddings.token_type_embeddings"],
        "encoder.embeddings.norm": ["bert.embeddings.LayerNorm"],
        "transform.dense": ["cls.predictions.transform.dense"],
        "transform.norm": ["cls.predictions.transform.LayerNorm"],
    }
    for i in range(config.num_layers):
        own, stock = f"encoder.blocks.{i}", f"bert.encoder.layer.{i}"
        pairs[f"{own}.attn.qkv"] = [f"{stock}.attention.self.{part}" for part in ("query", "key", "value")]
        pairs[f"{own}.attn.out"] = [f"{stock}.attention.output.dense"]
        pairs[f"{own}.attn_norm"] = [f"{stock}.attention.output.LayerNorm"]
        pairs[f"{own}.mlp.up"] = [f"{stock}.intermediate.dense"]
        pairs[f"{own}.mlp.down"] = [f"{stock}.output.dense"]
        pairs[f"{own}.mlp_norm"] = [f"{stock}.output.LayerNorm"]
    return _expand(pairs) | {"decoder_bias": ("cls.predictions.bias",)}


# ModernBERT -----------------------------------------------------------------------------------------------------------


def _modern_to_stock(config: ModelConfig) -> dict[str, Any]:
    every = config.global_every if config.local_window is not None else 1
    activation = _stock_activation(config)
    thetas = {"full_attention": config.rope_theta_global, "sliding_attention": config.rope_theta_local}
    return {
        "hidden_activation": activation,
        "classifier_activation": activation,
        "max_position_embeddings": config.max_length,
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "classifier_bias": config.head_bias,
        "decoder_bias": config.decoder_bias,
        # the nearest that the stock class has: it drops inside the MLP, this model after it; equal when evaluating
        "embedding_dropout": config.dropout,
        "mlp_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "local_attention": config.local_window or 128,
        # transformers 5 reads the next two and leaves the three after them alone, 4 the other way round
        "layer_types": ["sliding_attention" if i % every else "full_attention" for i in range(config.num_layers)],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "global_attn_every_n_layers": every,
        "global_rope_theta": config.rope_theta_global,
        "local_rope_theta": config.rope_theta_local,
        "initializer_range": config.init_std,
        "initializer_cutoff_factor": 2.0,
    }


def _modern_from_stock(node: dict[str, Any]) -> dict[str, Any]:
    activation = _own_activation(node, "hidden_activation")
    if _own_activation(node, "classifier_activation") != activation:
        raise UserError("classifier_activation differs from hidden_activation, which this suite's model cannot do")
    if node.get("embedding_dropout", 0.0) != node.get("mlp_dropout", 0.0):
        raise UserError(
            "embedding_dropout differs from mlp_dropout: this suite's model has one rate; choose it with dropout"
        )
    return {
        "activation": activation,
        "max_length": node.get("max_position_embeddings", 8192),
        "norm_eps": node.get("norm_eps", 1e-5),
        "norm_bias": node.get("norm_bias", False),
        "attention_bias": node.get("attention_bias", False),
        "mlp_bias": node.get("mlp_bias", False),
        "head_bias": node.get("classifier_bias", False),
        "decoder_bias": node.get("decoder_bias", True),
        "tie_embeddings": node.get("tie_word_embeddings", True),
        "dropout": node.get("mlp_dropout", 0.0),
        "attention_dropout": node.get("attention_dropout", 0.0),
        "local_window": node.get("local_attention", 128),
        "global_every": _global_every(node),
        "rope_theta_global": _rope_theta(node, "full_attention", "global_rope_theta", 160_000.0),
        "rope_theta_local": _rope_theta(node, "sliding_attention", "local_rope_theta", 10_000.0),
        "init": "depth_scaled",
        "init_std": node.get("initializer_range", 0.02),
    }


def _global_every(node: dict[str, Any]) -> int:
    kinds = node.get("layer_types")
    if kinds is None:
        return node.get("global_attn_every_n_layers", 3)
    places = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    every = places[1] if len(places) > 1 else len(kinds)
    if places != list(range(0, len(kinds), every)):
        raise UserError(f"layer_types has its global layers at {places}; only every n-th, from layer 0, is supported")
    return every


def _rope_theta(node: dict[str, Any], kind: str, old_key: str, default: float) -> float:
    parameters = (node.get("rope_parameters") or {}).get(kind) or {}
    if parameters.get("rope_type", "default") != "default" or node.get("rope_scaling"):
        raise UserError(f"rope_parameters: only rope_type 'default' is supported, not {parameters or 'rope_scaling'}")
    return parameters.get("rope_theta", node.get(old_key, default))


def _modern_names(config: ModelConfig) -> Names:
    pairs = {
        "encoder.embeddings.tokens": ["model.embeddings.tok_embeddings"],
        "encoder.embeddings.norm": ["model.embeddings.norm"],
        "encoder.final_norm": ["model.final_norm"],
        "transform.dense": ["head.dense"],
        "transform.norm": ["head.norm"],
    }
    for i in range(config.num_layers):
        own, stock = f"encoder.blocks.{i}", f"model.layers.{i}"
        pairs[f"{own}.attn_norm"] = [f"{stock}.attn_norm"]
        pairs[f"{own}.attn.qkv"] = [f"{stock}.attn.Wqkv"]
        pairs[f"{own}.attn.out"] = [f"{stock}.attn.Wo"]
        pairs[f"{own}.mlp_norm"] = [f"{stock}.mlp_norm"]
        pairs[f"{own}.mlp.up"] = [f"{stock}.mlp.Wi"]
        pairs[f"{own}.mlp.down"] = [f"{stock}.mlp.Wo"]
    return _expand(pairs) | {"decoder_bias": ("decoder.bias",), "decoder_weight": ("decoder.weight",)}


def _expand(modules: Mapping[str, list[str]]) -> Names:
    return {
        f"{own}.{kind}": tuple(f"{name}.{kind}" for name in stock)
        for own, stock in modules.items()
        for kind in ("weight", "bias")
    }


_SHARED = {"norm": "layernorm", "embedding_norm": True, "qk_norm": False, "head_transform": True}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        architecture="BertForMaskedLM",
        fixed=_SHARED
        | {
            "norm_order": "post",
            "norm_bias": True,
            "final_norm": False,
            "first_attn_norm": True,
            "positions": "learned",
        }
        | {"local_window": None, "mlp": "plain", "attention_bias": True, "mlp_bias": True, "head_bias": True}
        | {"decoder_bias": True, "tie_embeddings": True},
        prefix="bert.",
        to_stock=_bert_to_stock,
        from_stock=_bert_from_stock,
        names=_bert_names,
        ignored=r"(bert\.pooler|cls\.seq_relationship|cls\.predictions\.decoder|classifier|qa_outputs)\."
        r"|bert\.embeddings\.(position_ids|token_type_ids)$",
    ),
    "modernbert": Family(
        architecture="ModernBertForMaskedLM",
        fixed=_SHARED
        | {"norm_order": "pre", "final_norm": True, "first_attn_norm": False, "positions": "rope", "mlp": "glu"}
        | {"token_types": 0},
        prefix="model.",
        to_stock=_modern_to_stock,
        from_stock=_modern_from_stock,
        names=_modern_names,
        ignored=r"(classifier|decoder)\.",
    ),
}


def stock_family(config: ModelConfig) -> str | None:
    """The transformers model type that computes exactly this configuration, or None."""
    for name, family in FAMILIES.items():
        if all(getattr(config, field) == value for field, value in family.fixed.items()):
            return name if name != "bert" or config.token_types > 0 else None
    return None


def _stock_activation(config: ModelConfig) -> str:
    return next(stock for stock, own in HF_ACTIVATIONS.items() if own == config.activation)


def _own_activation(node: dict[str, Any], key: str) -> str:
    value = node.get(key, "gelu")
    if value not in HF_ACTIVATIONS:
        raise UserError(f"{key}={value!r}: supported are {', '.join(HF_ACTIVATIONS)}")
    return HF_ACTIVATIONS[value]


def _only(node: dict[str, Any], **supported: Any) -> None:
    for key, value in supported.items():
        if node.get(key, value) != value:
            raise UserError(f"{key}={node[key]!r}: only {value!r} is supported")
