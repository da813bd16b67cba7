"""The architectures that `transformers` has, as points of this suite's model.

For each: which choices the stock class fixes, and two tables that serve both directions, of settings and of parameters;
several stock parameters for one of ours mean that the stock matrices are stacked (BERT's query, key and value). What
a stock configuration can say and this model cannot compute is refused by name, never dropped.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from cramming.config import UserError
from cramming.model.config import ModelConfig

HF_ACTIVATIONS = {  # as transformers spells them -> ours; the first spelling of each is the one written
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
SIZES = {  # stock setting -> ours, in every family; a configuration must have them
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}

Names = dict[
    str, tuple[str, ...]
]  # own parameter -> stock parameters, stacked along the first axis
Node = dict[str, Any]  # a stock configuration


class Family(NamedTuple):
    """A stock architecture: its classes, its fixed choices, and the translations."""

    architecture: str
    encoder: str  # the class without a masked-LM head
    fixed: dict[str, Any]  # fields of ModelConfig that the stock class fixes
    settings: dict[
        str, tuple[str, Any]
    ]  # stock setting -> field of ModelConfig, and the stock class's default
    only: dict[str, Any]  # settings of which this suite's model has this one value
    written: Callable[[ModelConfig], Node]  # further settings that follow from ours
    read: Callable[
        [Node], Node
    ]  # further fields that follow from stock settings; refuses what has no counterpart
    names: Callable[[ModelConfig], Names]
    prefix: str  # of the bare encoder's parameters inside the masked-LM class
    ignored: str  # regular expression of other parameters that a checkpoint may hold
    covers: Callable[[ModelConfig], bool] = lambda config: True  # beside the fixed fields
    sizes: dict[str, str] = SIZES


def to_stock(config: ModelConfig, family: Family) -> Node:
    """The stock configuration."""
    node = {key: getattr(config, field) for key, field in family.sizes.items()}
    node |= {key: getattr(config, field) for key, (field, _) in family.settings.items()}
    for key in (key for key, (field, _) in family.settings.items() if field == "activation"):
        node[key] = next(stock for stock, own in HF_ACTIVATIONS.items() if own == config.activation)
    return node | {"tie_word_embeddings": config.tie_embeddings} | family.written(config)


def from_stock(node: Node, family: Family, where: str) -> Node:
    """The fields of ModelConfig; UserError, which begins with `where`, for what it cannot express."""
    sizes = family.sizes
    rows = [(key, (field, None)) for key, field in sizes.items()] + list(family.settings.items())
    found: Node = {}
    try:
        for key, value in family.only.items():
            if node.get(key, value) != value:
                raise ValueError(f"{key}={node[key]!r}: only {value!r} is supported")
        for key, (field, default) in rows:
            value = node[key] if key in sizes else node.get(key, default)
            value = HF_ACTIVATIONS[value] if field == "activation" else value
            if found.setdefault(field, value) != value:
                raise ValueError(
                    f"{key}={value!r}: this suite's model has one {field}, here {found[field]!r}"
                )
        return family.fixed | found | family.read(node)
    except KeyError as error:
        raise UserError(
            f"{where}: {key}={node.get(key)!r} is missing or not supported ({error})"
        ) from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def parameters_of(
    modules: Mapping[str, tuple[str, ...]], layers: int, per_layer: Mapping[str, tuple[str, ...]]
) -> Names:
    """Weights and biases of modules; `{i}` in the names of `per_layer` is the layer."""
    expanded = dict(modules)
    for i in range(layers):
        expanded |= {
            own.format(i=i): tuple(name.format(i=i) for name in names)
            for own, names in per_layer.items()
        }
    return {
        f"{own}.{kind}": tuple(f"{name}.{kind}" for name in names)
        for own, names in expanded.items()
        for kind in ("weight", "bias")
    }


# BERT -----------------------------------------------------------------------------------------------------------------

BERT_MODULES = {
    "encoder.embeddings.tokens": ("bert.embeddings.word_embeddings",),
    "encoder.embeddings.positions": ("bert.embeddings.position_embeddings",),
    "encoder.embeddings.token_types": ("bert.embeddings.token_type_embeddings",),
    "encoder.embeddings.norm": ("bert.embeddings.LayerNorm",),
    "transform.dense": ("cls.predictions.transform.dense",),
    "transform.norm": ("cls.predictions.transform.LayerNorm",),
}
BERT_LAYER = {
    "encoder.blocks.{i}.attn.qkv": tuple(
        f"bert.encoder.layer.{{i}}.attention.self.{part}" for part in ("query", "key", "value")
    ),
    "encoder.blocks.{i}.attn.out": ("bert.encoder.layer.{i}.attention.output.dense",),
    "encoder.blocks.{i}.attn_norm": ("bert.encoder.layer.{i}.attention.output.LayerNorm",),
    "encoder.blocks.{i}.mlp.up": ("bert.encoder.layer.{i}.intermediate.dense",),
    "encoder.blocks.{i}.mlp.down": ("bert.encoder.layer.{i}.output.dense",),
    "encoder.blocks.{i}.mlp_norm": ("bert.encoder.layer.{i}.output.LayerNorm",),
}

# ModernBERT -----------------------------------------------------------------------------------------------------------

_MODERN_MODULES = {
    "encoder.embeddings.tokens": ("model.embeddings.tok_embeddings",),
    "encoder.embeddings.norm": ("model.embeddings.norm",),
    "encoder.final_norm": ("model.final_norm",),
    "transform.dense": ("head.dense",),
    "transform.norm": ("head.norm",),
}
_MODERN_LAYER = {
    "encoder.blocks.{i}.attn_norm": ("model.layers.{i}.attn_norm",),
    "encoder.blocks.{i}.attn.qkv": ("model.layers.{i}.attn.Wqkv",),
    "encoder.blocks.{i}.attn.out": ("model.layers.{i}.attn.Wo",),
    "encoder.blocks.{i}.mlp_norm": ("model.layers.{i}.mlp_norm",),
    "encoder.blocks.{i}.mlp.up": ("model.layers.{i}.mlp.Wi",),
    "encoder.blocks.{i}.mlp.down": ("model.layers.{i}.mlp.Wo",),
}


def _modern_written(config: ModelConfig) -> Node:
    """transformers 5 reads `layer_types` and `rope_parameters`, 4 the three settings after them."""
    every = config.global_every if config.local_window is not None else 1
    thetas = {
        "full_attention": config.rope_theta_global,
        "sliding_attention": config.rope_theta_local,
    }
    return {
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "local_attention": config.local_window or 128,
        "layer_types": [
            "sliding_attention" if i % every else "full_attention" for i in range(config.num_layers)
        ],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
        "global_attn_every_n_layers": every,
        "global_rope_theta": config.rope_theta_global,
        "local_rope_theta": config.rope_theta_local,
        "initializer_cutoff_factor": 2.0,
    }


def _modern_read(node: Node) -> Node:
    layers = node["num_hidden_layers"]
    every, rope = node.get("global_attn_every_n_layers", 3), node.get("rope_parameters") or {}
    if kinds := node.get("layer_types"):
        places = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        every = places[1] if len(places) > 1 else layers
        if places != list(range(0, layers, every)):
            raise ValueError(
                f"layer_types has its global layers at {places}; only every n-th is supported, from 0 on"
            )
    fields = {
        "local_window": node.get("local_attention", 128),
        "global_every": every,
        "init": "depth_scaled",
    }
    old = {
        "global": ("full_attention", 160_000.0),
        "local": ("sliding_attention", 10_000.0),
    }  # transformers 4: a key each
    for name, (kind, default) in old.items():
        given = {"rope_theta": node.get(f"{name}_rope_theta", default), **(rope.get(kind) or {})}
        if given.get("rope_type", "default") != "default" or node.get("rope_scaling"):
            raise ValueError(f"rope_parameters: only rope_type 'default' is supported, not {given}")
        fields[f"rope_theta_{name}"] = float(given["rope_theta"])
    return {"tie_embeddings": node.get("tie_word_embeddings", True), **fields}


_SHARED = {
    "position_offset": 0,
    "norm": "layernorm",
    "embedding_norm": True,
    "qk_norm": False,
    "late_layers": 1,
    "head_transform": True,
    "logit_softcap": None,
    "unet_skips": False,
    "value_embeddings": 0,
    "value_residual": False,
    "attention_gate": False,
    "convolution": 0,
}
BERT_ONLY = {"is_decoder": False, "add_cross_attention": False}
BERT_FIXED = {
    **_SHARED,
    "norm_order": "post",
    "norm_bias": True,
    "final_norm": False,
    "first_attn_norm": True,
    "positions": "learned",
    "local_window": None,
    "mlp": "plain",
    "attention_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "decoder_bias": True,
    "tie_embeddings": True,
}
BERT_ABSOLUTE = {
    **BERT_ONLY,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
BERT_SETTINGS: dict[str, tuple[str, Any]] = {
    "hidden_act": ("activation", "gelu"),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "max_position_embeddings": ("max_length", 512),
    "type_vocab_size": ("token_types", 2),
    "layer_norm_eps": ("norm_eps", 1e-12),
    "initializer_range": ("init_std", 0.02),
}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        architecture="BertForMaskedLM",
        encoder="BertModel",
        fixed=BERT_FIXED,
        settings=BERT_SETTINGS,
        only=BERT_ABSOLUTE,
        written=lambda config: {**BERT_ONLY, "classifier_dropout": None, "use_cache": True},
        read=lambda node: {},
        names=lambda config: {
            **parameters_of(BERT_MODULES, config.num_layers, BERT_LAYER),
            "decoder_bias": ("cls.predictions.bias",),
        },
        prefix="bert.",
        ignored=r"(bert\.pooler|cls\.seq_relationship|cls\.predictions\.decoder|classifier|qa_outputs)\."
        r"|bert\.embeddings\.(position_ids|token_type_ids)$",
        covers=lambda config: config.token_types > 0,
    ),
    "modernbert": Family(
        architecture="ModernBertForMaskedLM",
        encoder="ModernBertModel",
        fixed={
            **_SHARED,
            "norm_order": "pre",
            "final_norm": True,
            "first_attn_norm": False,
            "positions": "rope",
            "mlp": "glu",
            "token_types": 0,
        },
        settings={
            "hidden_activation": ("activation", "gelu"),
            "classifier_activation": ("activation", "gelu"),
            "max_position_embeddings": ("max_length", 8192),
            "norm_eps": ("norm_eps", 1e-5),
            "norm_bias": ("norm_bias", False),
            "attention_bias": ("attention_bias", False),
            "mlp_bias": ("mlp_bias", False),
            "classifier_bias": ("head_bias", False),
            "decoder_bias": ("decoder_bias", True),
            # the nearest that the stock class has: it drops inside the MLP, this model after it; equal when evaluating
            "embedding_dropout": ("dropout", 0.0),
            "mlp_dropout": ("dropout", 0.0),
            "attention_dropout": ("attention_dropout", 0.0),
            "initializer_range": ("init_std", 0.02),
        },
        only={},
        written=_modern_written,
        read=_modern_read,
        names=lambda config: {
            **parameters_of(_MODERN_MODULES, config.num_layers, _MODERN_LAYER),
            "decoder_bias": ("decoder.bias",),
            "decoder_weight": ("decoder.weight",),
        },
        prefix="model.",
        ignored=r"(classifier|decoder)\.",
    ),
}


@cache
def families() -> dict[str, Family]:
    """Return all families by transformers' model type. BERT's relatives are loaded here: most runs have none."""
    return FAMILIES | importlib.import_module("cramming.model.stock_relatives").RELATIVES


def stock_family(config: ModelConfig) -> str | None:
    """The transformers model type that computes exactly this configuration, or None."""
    for name, family in families().items():
        has_fixed = all(getattr(config, field) == value for field, value in family.fixed.items())
        if has_fixed and family.covers(config):
            return name
    return None
