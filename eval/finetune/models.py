"""Where the model to be scored comes from, and the classifier that is fine-tuned.

A folder whose architecture this suite has (its own, stock BERT and ModernBERT) is loaded into the suite's encoder,
which works on packed sequences. Every other Hugging Face encoder is wrapped by `StockEncoder`, which pads inside and
has the same interface. Random initialisation means the same architecture with fresh weights from the fine-tuning seed,
of the scale that the folder's own run drew (`init`). Where that run's weights had a design before they had seen any
text (`attention_init: mimetic`), `designed` is its start, and says what of the score is the design's.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cramming.config import UserError, expand_home, file_sha256, settings_hash
from cramming.hub import prepare_hub
from cramming.model.attention import Packing
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.export import load_encoder, load_encoder_config
from cramming.model.heads import SequenceClassifier
from eval.rules.record import Record

Init = Literal["pretrained", "random", "designed"]  # the weights that fine-tuning starts from
OWN_TYPES = ("cramming", "bert", "modernbert")
# Their first position is that behind the padding token's number.
POSITIONS_BEHIND_PADDING = (
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "longformer",
    "mpnet",
)  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# What no number depends on: weights that are not the loaded ones, and what only people read.
NOT_SETTINGS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".md")


@dataclass(frozen=True)
class ModelSource:
    """A model folder: `label` is what the user called it, `own` whether the suite's encoder can run it.

    `sha256` is that of the weight file (of all their hashes where there are several), `weight_bytes` what they take;
    `files` has the SHA-256, by name, of the loaded weights and of every file of settings, the tokenizer's included;
    `designed` tells whether the weights had a design before training.
    """

    folder: Path
    label: str
    own: bool
    vocab_size: int
    max_length: int | None
    sha256: str
    weight_bytes: int
    files: dict[str, str]
    designed: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """Of `files`, all but the weights. Which a stock tokenizer reads differs between them, so that all count."""
        return {name: sha256 for name, sha256 in self.files.items() if Path(name).suffix not in NOT_SETTINGS}


def open_model(path: str | Path) -> ModelSource:
    """Describe the model at a folder or under a hub name; UserError where there is none, or none that can be read."""
    folder = expand_home(path, "model_path")
    if folder.is_file():
        raise UserError(f"model_path={path}: is a file; give the folder it is in")
    if not folder.is_dir():
        folder = _download(str(path))
    settings = folder / "config.json"
    if not settings.is_file():
        raise UserError(f"{folder}: no config.json; expected a Hugging Face model folder")
    try:
        config = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{settings}: not readable as JSON ({error})") from None
    _refuse_odd_config(settings, config)
    weights = next((found for p in WEIGHT_FILES if (found := sorted(folder.glob(p)))), None)
    if not weights:
        raise UserError(f"{folder}: no weights; expected model.safetensors or pytorch_model.bin")
    files = {
        file.name: file_sha256(file)
        for file in sorted(folder.iterdir())
        if file.is_file() and (file in weights or file.suffix not in NOT_SETTINGS) and not file.name.startswith(".")
    }
    hashes = [files[file.name] for file in weights]
    sha256 = hashes[0] if len(hashes) == 1 else settings_hash(hashes)
    size = sum(file.stat().st_size for file in weights)
    own = _own_config(folder, config.get("model_type"))
    if own is not None:
        assert own.vocab_size is not None, folder
        designed = own.attention_init != "random"
        return ModelSource(folder, str(path), True, own.vocab_size, position_limit(own), sha256, size, files, designed)
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UserError(f"{settings}: no vocab_size; model type {config.get('model_type')!r} is not a text encoder")
    positions = config.get("max_position_embeddings")
    if positions is not None and config.get("model_type") in POSITIONS_BEHIND_PADDING:
        positions -= 1 + (config.get("pad_token_id") or 0)
    return ModelSource(folder, str(path), False, vocab_size, positions, sha256, size, files)


def altered(record: Record, files: Mapping[str, str]) -> str | None:
    """What is wrong with a run's `final/`, whose `files` are these: the first that is not as pretraining wrote it, in
    words. Records of before version 5 of the rules name the weights and the tokenizer only."""
    written = record.training.final_files
    if not written:
        known = {"model.safetensors": record.training.final_sha256, "tokenizer.json": record.corpus.tokenizer.sha256}
        written = dict(files) | {name: sha256 for name, sha256 in known.items() if sha256}
    for name in sorted({*written, *files}):
        if name not in files:
            return f"{name}: is missing"
        if name not in written:
            return f"{name}: was not written by pretraining"
        if files[name] != written[name]:
            return f"{name}: is not as pretraining wrote it (by its SHA-256)"
    return None


def refuse_changed(folder: Path, files: Mapping[str, str]) -> None:
    """UserError where one of `files`, by SHA-256, is not what it was when the model was opened."""
    for name, sha256 in files.items():
        if not (folder / name).is_file() or file_sha256(folder / name) != sha256:
            raise UserError(f"{folder / name}: was changed while the model was being scored; restore it and run again")


def _refuse_odd_config(file: Path, config: Any) -> None:
    """UserError: no encoder's configuration, as far as it can be told from it."""
    if not isinstance(config, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(config).__name__}")
    if config.get("is_encoder_decoder"):
        raise UserError(f"{file}: model type {config.get('model_type')!r} has a decoder; give an encoder")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        value = config.get(name, 1)
        absent = value is None and name == "max_position_embeddings"
        if not absent and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"{file}: {name}={value!r} must be a whole number above 0")


def position_limit(config: ModelConfig) -> int | None:
    """The longest sequence that a model of the suite can read; None where there is no limit."""
    return None if config.positions in ("rope", "none") else config.max_length


def _own_config(folder: Path, model_type: str | None) -> ModelConfig | None:
    """The suite's configuration of this model, or None for another architecture or a variant it lacks."""
    if model_type not in OWN_TYPES:
        return None
    try:
        return load_encoder_config(folder, dropout=0.0, attention_dropout=0.0)
    except UserError:
        if model_type == "cramming":  # nothing else could load it
            raise
        return None


def _download(name: str) -> Path:
    """The hub's model of this name as a local folder; UserError at once where it cannot be had."""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(f"model_path={name}: no such folder, and not a name on the hub")
    online = prepare_hub()
    from huggingface_hub import snapshot_download

    texts = ["*.json", "*.txt", "*.model"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*texts, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*texts, "pytorch_model*.bin"]))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:150] if online else "no connection to the hub, and not in the cache"
        raise UserError(f"model_path={name}: no such folder, and {reason}; give a local model folder") from None
    return folder


def build_classifier(
    source: ModelSource,
    init: Init,
    outputs: int,
    dropout: float,
    attention_dropout: float,
    pooling: str,
    pooler: bool,
) -> SequenceClassifier:
    """A classifier with `outputs` logits on the source's encoder, whose weights are what `init` says.

    New weights come from torch's global generator. UserError where a file that was read is not the source's any more.
    """
    if source.own:
        encoder = _own_encoder(source, init, dropout, attention_dropout)
        refuse_changed(source.folder, source.settings)
    else:
        encoder = cast(Encoder, StockEncoder(source.folder, init, dropout, attention_dropout))
        refuse_changed(source.folder, source.files)
    size = encoder.config.hidden_size if pooler else None
    model = SequenceClassifier(encoder, outputs, cast(Any, pooling), size, dropout)
    trained = pretrained_pooler(source.folder) if init == "pretrained" and pooling == "cls" else {}
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


def _own_encoder(source: ModelSource, init: Init, dropout: float, attention_dropout: float) -> Encoder:
    config = load_encoder_config(source.folder, dropout, attention_dropout)
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

        try:
            config = AutoConfig.from_pretrained(folder)
            for names, rate in ((self.DROPOUTS, dropout), (self.ATTENTION_DROPOUTS, attention_dropout)):
                for name in names:
                    if isinstance(getattr(config, name, None), float | int):
                        setattr(config, name, rate)
            missing: list[str] = []
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
