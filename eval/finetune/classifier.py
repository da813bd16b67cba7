"""The classifier that is fine-tuned: an encoder from a model folder with a new classification head.

Both kinds of encoder take packed sequences: the suite's own, and `StockEncoder`, which wraps any other Hugging Face
encoder and pads inside. Random initialisation means the same architecture with fresh weights from the fine-tuning seed,
of the scale that the folder's own run drew.
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cramming.config import UserError
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.export import load_encoder, load_encoder_config
from cramming.model.heads import SequenceClassifier
from eval.finetune.config import Hyperparameters, Init
from eval.finetune.models import ModelSource, refuse_changed


def build_classifier(source: ModelSource, init: Init, outputs: int, hyper: Hyperparameters) -> SequenceClassifier:
    """A classifier with `outputs` logits on the source's encoder, whose weights are what `init` says.

    New weights come from torch's global generator. UserError where a file that was read is not the source's any more.
    """
    encoder: Encoder | StockEncoder
    if source.own:
        encoder = _own_encoder(source, init, hyper)
        refuse_changed(source.folder, source.settings)
    else:
        encoder = StockEncoder(source.folder, init, hyper.dropout, hyper.attention_dropout)
        refuse_changed(source.folder, source.files)
    size = encoder.config.hidden_size if hyper.pooler else None
    model = SequenceClassifier(cast(Encoder, encoder), outputs, hyper.pooling, size, hyper.dropout)
    trained = pretrained_pooler(source.folder) if init == "pretrained" and hyper.pooling == "cls" else {}
    if trained and model.pooler is not None:
        model.pooler.load_state_dict(trained)
    return model


@lru_cache(maxsize=1)
def pretrained_pooler(folder: Path) -> dict[str, Tensor]:
    """The dense layer that BERT's next-sentence task has trained on the first token, where a BERT folder has one.

    Fine-tuning starts from it, as `BertForSequenceClassification` does.
    """
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") != "bert":
        return {}
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                if name.removeprefix("bert.") in ("pooler.dense.weight", "pooler.dense.bias"):
                    found[name.rpartition(".")[2]] = weights.get_tensor(name).float()
    return found if len(found) == 2 else {}


def _own_encoder(source: ModelSource, init: Init, hyper: Hyperparameters) -> Encoder:
    config = load_encoder_config(source.folder, hyper.dropout, hyper.attention_dropout)
    encoder = Encoder(replace(config, attention_init="random") if init == "random" else config)
    if init == "pretrained":
        encoder.load_state_dict(_pretrained_state(source.folder, tuple(source.files.items())))
    return encoder


@lru_cache(maxsize=1)
def _pretrained_state(folder: Path, files: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """The encoder's weights, read once per process, from `files` with these SHA-256: they may be read hours after the
    model was opened.

    Reading builds a model, which draws random numbers; they must not shift those of the run that happens to come first.
    """
    refuse_changed(folder, dict(files))
    with torch.random.fork_rng(devices=[]):
        state = load_encoder(folder, dropout=0.0, attention_dropout=0.0).state_dict()
    refuse_changed(folder, dict(files))
    return state


class StockEncoder(nn.Module):
    """Any `AutoModel` behind the interface of the suite's encoder: packed tokens in, packed hidden states out."""

    DROPOUTS = ("hidden_dropout_prob", "dropout", "embd_pdrop", "hidden_dropout", "embedding_dropout", "mlp_dropout")
    ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")

    def __init__(self, folder: Path, init: Init, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel

        missing: list[str] = []
        try:
            config = AutoConfig.from_pretrained(folder)
            for names, rate in ((self.DROPOUTS, dropout), (self.ATTENTION_DROPOUTS, attention_dropout)):
                for name in names:
                    if isinstance(getattr(config, name, None), float | int):
                        setattr(config, name, rate)
            if init == "pretrained":
                self.model, loaded = AutoModel.from_pretrained(
                    folder, config=config, dtype=torch.float32, output_loading_info=True
                )
                missing = sorted(name for name in loaded["missing_keys"] if "pooler" not in name)  # not used here
            else:
                self.model = AutoModel.from_config(config, dtype=torch.float32)
        except Exception as error:  # a wrong config.json or damaged weights end in errors of every kind
            raise UserError(f"{folder}: transformers cannot load it ({' '.join(str(error).split())[:200]})") from None
        if missing:
            raise UserError(
                f"{folder}: its weights lack {missing[0]} and {len(missing) - 1} more; they are not of this config.json"
            )
        self.pad_id = config.pad_token_id or 0
        self.takes_types = (getattr(config, "type_vocab_size", 0) or 0) > 1
        std = getattr(config, "initializer_range", None) or 0.02
        self.config = ModelConfig(config.vocab_size, config.hidden_size, num_heads=1, init_std=std)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        token_types_T: Tensor | None = None,
        wanted_M: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D], or of the tokens `wanted_M` [M, D]."""
        lengths_S = packing.bounds_S.diff()
        valid_SL = torch.arange(packing.max_length, device=ids_T.device) < lengths_S[:, None]
        inputs = {"input_ids": _pad(ids_T, valid_SL, self.pad_id), "attention_mask": valid_SL.long()}
        if self.takes_types and token_types_T is not None:
            inputs["token_type_ids"] = _pad(token_types_T, valid_SL, 0)
        hidden_TD = self.model(**inputs).last_hidden_state[valid_SL]
        return hidden_TD if wanted_M is None else hidden_TD.index_select(0, wanted_M)


def _pad(values_T: Tensor, valid_SL: Tensor, filler: int) -> Tensor:
    return torch.full(valid_SL.shape, filler, dtype=torch.long, device=values_T.device).masked_scatter(
        valid_SL, values_T.long()
    )
