"""Architectures of `transformers` as configurations of this suite's model.

A `Family` holds the choices that a stock class fixes, and tables that translate settings and parameter names in both
directions. A parameter of this suite may stack several stock matrices (BERT's query, key and value). Stock settings
that this model cannot compute are refused by name, never dropped.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from cramming.config import UserError
from cramming.model.config import ModelConfig

HF_ACTIVATIONS = {  # name in transformers -> name here
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
# name here -> the first of its names in transformers
STOCK_ACTIVATIONS = {name: stock for stock, name in reversed(HF_ACTIVATIONS.items())}
SIZES = {  # stock setting -> field of ModelConfig; every configuration must have them
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}

# parameter here -> stock parameters, stacked along the first axis
Names = dict[str, tuple[str, ...]]
Node = dict[str, Any]  # a stock configuration


class Family(NamedTuple):
    """Stock architecture: its classes, its fixed choices, and the translations."""

    architecture: str
    encoder: str  # the class without a masked-LM head
    fixed: dict[str, Any]  # fields of ModelConfig that the stock class fixes
    # stock setting -> field of ModelConfig, and the default of the stock class
    settings: dict[str, tuple[str, Any]]
    only: dict[str, Any]  # stock settings for which this suite's model supports this value alone
    to_node: Callable[[ModelConfig], Node]  # further stock settings, from a ModelConfig
    # further fields of ModelConfig, from stock settings; raises ValueError for unsupported values
    from_node: Callable[[Node], Node]
    names: Callable[[ModelConfig], Names]
    prefix: str  # prefix of the bare encoder's parameters inside the masked-LM class
    ignored: str  # regular expression of other parameters that a checkpoint may hold
    covers: Callable[[ModelConfig], bool] = lambda config: True  # conditions beside `fixed`
    sizes: dict[str, str] = SIZES


def to_stock(config: ModelConfig, family: Family) -> Node:
    """Return the stock configuration of a ModelConfig."""
    node = {key: getattr(config, field) for key, field in family.sizes.items()}
    for key, (field, _) in family.settings.items():
        value = getattr(config, field)
        node[key] = STOCK_ACTIVATIONS[value] if field == "activation" else value
    return node | {"tie_word_embeddings": config.tie_embeddings} | family.to_node(config)


def from_stock(node: Node, family: Family, where: str) -> Node:
    """Return the fields of ModelConfig; raise UserError, prefixed by `where`, for unsupported settings."""
    sizes = family.sizes
    settings = {key: (field, None) for key, field in sizes.items()} | family.settings
    fields: Node = {}
    try:
        for key, value in family.only.items():
            if node.get(key, value) != value:
                raise ValueError(f"{key}={node[key]!r}: only {value!r} is supported")
        for key, (field, default) in settings.items():
            value = node[key] if key in sizes else node.get(key, default)
            value = HF_ACTIVATIONS[value] if field == "activation" else value
            if fields.setdefault(field, value) != value:
                raise ValueError(
                    f"{key}={value!r}: this suite's model has one {field}, here {fields[field]!r}"
                )
        return family.fixed | fields | family.from_node(node)
    except KeyError as error:
        raise UserError(
            f"{where}: {key}={node.get(key)!r} is missing or not supported ({error})"
        ) from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def parameters_of(
    modules: Mapping[str, tuple[str, ...]], layers: int, per_layer: Mapping[str, tuple[str, ...]]
) -> Names:
    """Return the names of weights and biases of modules; `{i}` in the names of `per_layer` is the layer."""
    expanded = dict(modules)
    for i in range(layers):
        for module, stock_modules in per_layer.items():
            expanded[module.format(i=i)] = tuple(name.format(i=i) for name in stock_modules)
    names: Names = {}
    for module, stock_modules in expanded.items():
        for kind in ("weight", "bias"):
            names[f"{module}.{kind}"] = tuple(f"{name}.{kind}" for name in stock_modules)
    return names


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


def _modern_to_node(config: ModelConfig) -> Node:
    """Return the stock settings of layer types and rotary angles.

    transformers 5 reads `layer_types` and `rope_parameters`, transformers 4 the three settings after them.
    """
    every = config.global_every if config.local_window is not None else 1
    thetas = {
        "full_attention": config.rope_theta_global,
        "sliding_attention": config.rope_theta_local,
    }
    layer_types = ["sliding_attention"] * config.num_layers
    for layer in range(0, config.num_layers, every):
        layer_types[layer] = "full_attention"
    return {
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "local_attention": config.local_window or 128,
        "layer_types": layer_types,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
        "global_attn_every_n_layers": every,
        "global_rope_theta": config.rope_theta_global,
        "local_rope_theta": config.rope_theta_local,
        "initializer_cutoff_factor": 2.0,
    }


def _modern_from_node(node: Node) -> Node:
    layers = node["num_hidden_layers"]
    every = node.get("global_attn_every_n_layers", 3)
    rope = node.get("rope_parameters") or {}
    kinds = node.get("layer_types")
    if kinds:
        global_layers = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        every = global_layers[1] if len(global_layers) > 1 else layers
        if global_layers != list(range(0, layers, every)):
            raise ValueError(
                f"layer_types has its global layers at {global_layers}. Only every n-th is supported, from 0 on."
            )
    fields = {
        "local_window": node.get("local_attention", 128),
        "global_every": every,
        "init": "depth_scaled",
    }
    kinds_of_layers = {
        "global": ("full_attention", 160_000.0),
        "local": ("sliding_attention", 10_000.0),
    }
    for name, (kind, default) in kinds_of_layers.items():
        theta = node.get(f"{name}_rope_theta", default)  # the key of transformers 4
        parameters = {"rope_theta": theta, **(rope.get(kind) or {})}
        if parameters.get("rope_type", "default") != "default" or node.get("rope_scaling"):
            raise ValueError(
                f"rope_parameters: only rope_type 'default' is supported, not {parameters}"
            )
        fields[f"rope_theta_{name}"] = float(parameters["rope_theta"])
    return {"tie_embeddings": node.get("tie_word_embeddings", True), **fields}


_SHARED = {
    "position_offset": 0,
    "relative_positions": 0,
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
        to_node=lambda config: {**BERT_ONLY, "classifier_dropout": None, "use_cache": True},
        from_node=lambda node: {},
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
            # The stock class drops inside the MLP, this model after it: the nearest setting, equal in evaluation.
            "embedding_dropout": ("dropout", 0.0),
            "mlp_dropout": ("dropout", 0.0),
            "attention_dropout": ("attention_dropout", 0.0),
            "initializer_range": ("init_std", 0.02),
        },
        only={},
        to_node=_modern_to_node,
        from_node=_modern_from_node,
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
    """Return all families by transformers' model type. BERT's relatives are imported late: most runs need none."""
    return FAMILIES | importlib.import_module("cramming.model.stock_relatives").RELATIVES


def stock_family(config: ModelConfig) -> str | None:
    """Return the transformers model type that computes exactly this configuration, or None."""
    for name, family in families().items():
        has_fixed = all(getattr(config, field) == value for field, value in family.fixed.items())
        if has_fixed and family.covers(config):
            return name
    return None
