"""Stock architectures that differ from BERT in names and little else: part of the table in cramming/model/stock.py."""

import re

from cramming.model.config import ModelConfig
from cramming.model.stock import (
    BERT_ABSOLUTE,
    BERT_FIXED,
    BERT_LAYER,
    BERT_MODULES,
    BERT_ONLY,
    BERT_SETTINGS,
    Family,
    Names,
    Node,
    parameters_of,
)

# RoBERTa, XLM-R and CamemBERT -----------------------------------------------------------------------------------------

_ROBERTA_HEAD = {"transform.dense": ("lm_head.dense",), "transform.norm": ("lm_head.layer_norm",)}


def _roberta_names(config: ModelConfig) -> Names:
    """Return BERT's names, with another prefix and another head."""
    encoder = parameters_of(BERT_MODULES, config.num_layers, BERT_LAYER)
    names: Names = {}
    for parameter, stock in encoder.items():
        names[parameter] = tuple(re.sub(r"^bert\.", "roberta.", name) for name in stock)
    head = parameters_of(_ROBERTA_HEAD, 0, {})
    return {**names, **head, "decoder_bias": ("lm_head.bias",)}


def _roberta_from_node(node: Node) -> Node:
    """Return the positions: those of text begin behind the padding's."""
    offset = node.get("pad_token_id", 1) + 1
    length = node.get("max_position_embeddings", 512) - offset
    return {"position_offset": offset, "max_length": length}


# DistilBERT -----------------------------------------------------------------------------------------------------------

_DISTIL_MODULES = {
    "encoder.embeddings.tokens": ("distilbert.embeddings.word_embeddings",),
    "encoder.embeddings.positions": ("distilbert.embeddings.position_embeddings",),
    "encoder.embeddings.norm": ("distilbert.embeddings.LayerNorm",),
    "transform.dense": ("vocab_transform",),
    "transform.norm": ("vocab_layer_norm",),
}
_DISTIL_LAYER = {
    "encoder.blocks.{i}.attn.qkv": tuple(
        f"distilbert.transformer.layer.{{i}}.attention.{part}_lin" for part in "qkv"
    ),
    "encoder.blocks.{i}.attn.out": ("distilbert.transformer.layer.{i}.attention.out_lin",),
    "encoder.blocks.{i}.attn_norm": ("distilbert.transformer.layer.{i}.sa_layer_norm",),
    "encoder.blocks.{i}.mlp.up": ("distilbert.transformer.layer.{i}.ffn.lin1",),
    "encoder.blocks.{i}.mlp.down": ("distilbert.transformer.layer.{i}.ffn.lin2",),
    "encoder.blocks.{i}.mlp_norm": ("distilbert.transformer.layer.{i}.output_layer_norm",),
}
_DISTIL_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "hidden_dim": "intermediate_size",
}

# MPNet ----------------------------------------------------------------------------------------------------------------

_MPNET_LAYER = {
    "encoder.blocks.{i}.attn.qkv": tuple(
        f"mpnet.encoder.layer.{{i}}.attention.attn.{part}" for part in "qkv"
    ),
    "encoder.blocks.{i}.attn.out": ("mpnet.encoder.layer.{i}.attention.attn.o",),
    "encoder.blocks.{i}.attn_norm": ("mpnet.encoder.layer.{i}.attention.LayerNorm",),
}
_MPNET_ONLY = {"hidden_act": "gelu", "relative_attention_num_buckets": 32}


def _mpnet_names(config: ModelConfig) -> Names:
    """Return RoBERTa's names, with another prefix and another attention."""
    attention = parameters_of({}, config.num_layers, _MPNET_LAYER)
    names: Names = {}
    for parameter, stock in _roberta_names(config).items():
        names[parameter] = tuple(re.sub(r"^roberta\.", "mpnet.", name) for name in stock)
    table = "encoder.relative_positions.weight"
    return {**names, **attention, table: ("mpnet.encoder.relative_attention_bias.weight",)}


RELATIVES: dict[str, Family] = {
    "roberta": Family(
        architecture="RobertaForMaskedLM",
        encoder="RobertaModel",
        fixed={key: value for key, value in BERT_FIXED.items() if key != "position_offset"}
        | {"activation": "gelu"},  # of its head, whatever hidden_act says
        settings={
            key: value
            for key, value in BERT_SETTINGS.items()
            if key not in ("hidden_act", "max_position_embeddings")
        },
        only={**BERT_ABSOLUTE, "hidden_act": "gelu"},
        to_node=lambda config: {
            **BERT_ONLY,
            "hidden_act": "gelu",
            "max_position_embeddings": config.max_length + config.position_offset,
            "classifier_dropout": None,
            "use_cache": True,
        },
        from_node=_roberta_from_node,
        names=_roberta_names,
        prefix="roberta.",
        ignored=r"(roberta\.pooler|lm_head\.decoder|classifier|qa_outputs)\."
        r"|roberta\.embeddings\.(position_ids|token_type_ids)$",
        covers=lambda config: config.token_types > 0 and config.position_offset > 0,
    ),
    "distilbert": Family(
        architecture="DistilBertForMaskedLM",
        encoder="DistilBertModel",
        fixed={**BERT_FIXED, "token_types": 0, "norm_eps": 1e-12},
        settings={
            "activation": ("activation", "gelu"),
            "dropout": ("dropout", 0.1),
            "attention_dropout": ("attention_dropout", 0.1),
            "max_position_embeddings": ("max_length", 512),
            "initializer_range": ("init_std", 0.02),
        },
        only={"tie_word_embeddings": True, "sinusoidal_pos_embds": False},
        to_node=lambda config: {"sinusoidal_pos_embds": False},
        from_node=lambda node: {},
        names=lambda config: {
            **parameters_of(_DISTIL_MODULES, config.num_layers, _DISTIL_LAYER),
            "decoder_bias": ("vocab_projector.bias",),
        },
        prefix="distilbert.",
        ignored=r"(vocab_projector|pre_classifier|classifier|qa_outputs)\."
        r"|distilbert\.embeddings\.position_ids$",
        sizes=_DISTIL_SIZES,
    ),
    "mpnet": Family(
        architecture="MPNetForMaskedLM",
        encoder="MPNetModel",
        # the class has these numbers, whatever its settings say
        fixed={
            **BERT_FIXED,
            "position_offset": 2,
            "relative_positions": 32,
            "token_types": 0,
            "activation": "gelu",
        },
        settings={
            key: BERT_SETTINGS[key]
            for key in (
                "hidden_dropout_prob",
                "attention_probs_dropout_prob",
                "layer_norm_eps",
                "initializer_range",
            )
        },
        only={**_MPNET_ONLY, "tie_word_embeddings": True},
        to_node=lambda config: {
            **_MPNET_ONLY,
            "max_position_embeddings": config.max_length + config.position_offset,
        },
        from_node=lambda node: {"max_length": node.get("max_position_embeddings", 512) - 2},
        names=_mpnet_names,
        prefix="mpnet.",
        ignored=r"(mpnet\.pooler|lm_head\.decoder|classifier|qa_outputs)\."
        r"|mpnet\.embeddings\.position_ids$",
    ),
}
# Types that compute the same as RoBERTa and have its names of weights; they are written as RoBERTa.
for _kind in ("xlm-roberta", "camembert"):
    RELATIVES[_kind] = RELATIVES["roberta"]
