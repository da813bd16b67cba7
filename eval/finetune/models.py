"""The model folder to score, opened once and unchanged until its last file is read, and the classifier made of it.

The suite's encoder runs architectures that it has (its own, stock BERT and ModernBERT), transformers every other, which
`StockEncoder` wraps and pads inside. Random initialisation means the same architecture with fresh weights from the
fine-tuning seed, of the scale that the folder's own run drew.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cramming.config import UserError, file_sha256, require
from cramming.device import is_out_of_memory
from cramming.hub import prepare_hub
from cramming.model.attention import Packing
from cramming.model.classifier import SequenceClassifier
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.export import WEIGHT_FILES, load_encoder, load_encoder_config, read_weights
from cramming.model.init import initialize
from eval.finetune.config import Hyperparameters, Init

OWN_TYPES = ("cramming", "bert", "modernbert")
CANNOT_LOAD = "transformers cannot load it"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")  # with those that are sharded
# What no number depends on: weights that are not the loaded ones, and what only people read.
NOT_SETTINGS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".md")


@dataclass(frozen=True)
class ModelSource:
    """A model folder: `label` is what the user called it, `own` whether the suite's encoder can run it.

    `sha256` is that of the weight file (of all their hashes where there are several), `weight_bytes` what they take;
    `files` has the SHA-256, by name, of the loaded weights and of every file of settings, the tokenizer's included.
    """

    folder: Path
    label: str
    own: bool
    vocab_size: int
    max_length: int | None
    sha256: str
    weight_bytes: int
    files: dict[str, str]

    @property
    def settings(self) -> dict[str, str]:
        """Of `files`, all but the weights. Which a stock tokenizer reads differs between them, so that all count."""
        return {
            name: sha256
            for name, sha256 in self.files.items()
            if Path(name).suffix not in NOT_SETTINGS
        }


def open_model(path: str | Path) -> ModelSource:
    """Describe the model at a folder or under a hub name; UserError where there is none, or none that can be read."""
    folder = Path(path)
    require(
        not folder.is_file(),
        f"--model={path}: is a file, not a folder; give the folder it is in",
    )
    if not folder.is_dir():
        folder = _download(str(path))
    file = folder / "config.json"
    require(file.is_file(), f"{folder}: no config.json; expected a Hugging Face model folder")
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: not a JSON object ({error})") from None
    kind = config.get("model_type")
    require(
        not config.get("is_encoder_decoder"),
        f"{file}: model type {kind!r} has a decoder; give an encoder",
    )
    weights = _weight_files(folder)
    require(weights, f"{folder}: no weights; expected model.safetensors or pytorch_model.bin")
    files = {
        file.name: file_sha256(file)
        for file in sorted(folder.iterdir())
        if file.is_file()
        and (file in weights or file.suffix not in NOT_SETTINGS)
        and not file.name.startswith(".")
    }
    hashes = [files[file.name] for file in weights]
    sha256 = hashes[0]
    if len(hashes) > 1:
        sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
    size = sum(file.stat().st_size for file in weights)
    is_whole = any(file.name in WEIGHT_FILES for file in weights)
    if (
        own := _own_config(folder, kind) if is_whole or kind == "cramming" else None
    ):  # which nothing else could load
        assert own.vocab_size is not None, folder
        return ModelSource(
            folder, str(path), True, own.vocab_size, position_limit(own), sha256, size, files
        )
    require(config.get("vocab_size"), f"{file}: no vocab_size; {kind!r} is not a text encoder")
    causal = f"{file}: this {kind!r} is a decoder, whose tokens do not see those after them; give an encoder"
    require(not _is_causal(config), causal)
    positions = config.get("max_position_embeddings")
    if positions is not None:
        positions -= _first_position(folder)
    return ModelSource(
        folder, str(path), False, config["vocab_size"], positions, sha256, size, files
    )


@contextmanager
def quiet_transformers(folder: Path, failing: str) -> Iterator[None]:
    """Without its report and progress bars, which would come with every task and seed; UserError for what it raises."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # a wrong config.json or damaged weights end in errors of every kind
        raise UserError(f"{folder}: {failing} ({' '.join(str(error).split())[:200]})") from None
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# What transformers says of shapes that differ stands in the report alone, if it is to raise for them.
LOADING_INFO = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def missing_weights(loaded: Mapping[str, Any]) -> list[str]:
    """The weights that a model has not from its files, by what transformers tells: missing, or of another shape."""
    return sorted({*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})


def _encoder_class(model_type: str) -> Any:
    """transformers' automatic class for the encoder of this type: `AutoModel` gives T5's a decoder as well."""
    from transformers import AutoModel, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS,
    )

    return AutoModelForTextEncoding if model_type in ENCODERS else AutoModel


def _first_position(folder: Path) -> int:
    """How many rows of the table of positions no token reads: RoBERTa and its like begin behind the padding's."""
    from transformers import AutoConfig

    with quiet_transformers(folder, CANNOT_LOAD), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = _encoder_class(config.model_type).from_config(config)
    tables = [
        module for name, module in model.named_modules() if name.endswith("position_embeddings")
    ]
    paddings = [
        table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None
    ]
    return 1 + max(paddings, default=-1)


def _weight_files(folder: Path) -> list[Path]:
    """All that a folder has in the first format that it has; several where they are sharded."""
    return next(
        (found for pattern in WEIGHT_PATTERNS if (found := sorted(folder.glob(pattern)))), []
    )


def altered(written: Mapping[str, str], files: Mapping[str, str]) -> str | None:
    """Return the first of a run's `files` in `final/` that is not as pretraining wrote it, in words, or None.

    Both map names to SHA-256.
    """
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
        file = folder / name
        same = file.is_file() and file_sha256(file) == sha256
        require(
            same, f"{file}: was changed while the model was being scored; restore it and run again"
        )


# Only causal language models by transformers' tables, and encoders nevertheless.
ENCODERS_ALL_THE_SAME = ("xlnet", "bert-generation")


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Whether no token of this model sees those after it: a type that `transformers` has as a causal language model
    only, or a decoder by its own configuration, unless that says that it reads both ways."""
    from transformers.models.auto import modeling_auto

    if config.get("is_causal") is False or config.get("use_bidirectional_attention") in (
        True,
        "all",
    ):
        return False
    causal, masked = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    kind = config.get("model_type")
    return bool(config.get("is_decoder")) or (
        kind in causal and kind not in masked and kind not in ENCODERS_ALL_THE_SAME
    )


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
    online = prepare_hub()
    from huggingface_hub import snapshot_download

    texts = ["*.json", "*.txt", "*.model"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*texts, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*texts, "pytorch_model*.bin"]))
    except (OSError, ValueError) as error:
        reason = (
            " ".join(str(error).split())[:150]
            if online
            else "no connection to the hub, and not in the cache"
        )
        raise UserError(
            f"--model={name}: no such folder, and {reason}; give a local model folder"
        ) from None
    return folder


class TokenClassifier(nn.Module):
    """Dropout and a linear layer on the hidden state of each token: logits [T, C]."""

    def __init__(self, encoder: Encoder, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(encoder.config.hidden_size, num_labels)
        initialize(self, encoder.config, done=encoder)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        packing: Packing,
        token_types_T: Tensor | None = None,
    ) -> Tensor:
        """Logits [T, C]."""
        hidden_TD = self.encoder(ids_T, positions_T, packing, token_types_T)
        return self.classifier(self.dropout(hidden_TD))


Classifier = SequenceClassifier | TokenClassifier


def build_token_classifier(
    source: ModelSource, init: Init, outputs: int, hyper: Hyperparameters
) -> TokenClassifier:
    """Return a classifier of tokens with `outputs` logits, as `build_classifier` does one of sequences."""
    return TokenClassifier(_build_encoder(source, init, hyper), outputs, hyper.dropout)


def build_classifier(
    source: ModelSource, init: Init, outputs: int, hyper: Hyperparameters
) -> SequenceClassifier:
    """A classifier with `outputs` logits on the source's encoder, whose weights are what `init` says.

    New weights come from torch's global generator. UserError where a file that was read is not the source's any more.
    """
    encoder = _build_encoder(source, init, hyper)
    size = encoder.config.hidden_size if hyper.pooler else None
    model = SequenceClassifier(encoder, outputs, hyper.pooling, size, hyper.dropout)
    trained = (
        pretrained_pooler(source.folder) if init == "pretrained" and hyper.pooling == "cls" else {}
    )
    if trained and model.pooler is not None:
        model.pooler.load_state_dict(trained)
    return model


def _build_encoder(source: ModelSource, init: Init, hyper: Hyperparameters) -> Encoder:
    """Return the encoder; a `StockEncoder` has its interface."""
    encoder: Encoder | StockEncoder
    if source.own:
        config = load_encoder_config(source.folder, hyper.dropout, hyper.attention_dropout)
        encoder = Encoder(replace(config, attention_init="random") if init == "random" else config)
        if init == "pretrained":
            encoder.load_state_dict(_pretrained_state(source.folder, tuple(source.files.items())))
    else:
        encoder = StockEncoder(source.folder, init, hyper.dropout, hyper.attention_dropout)
    refuse_changed(source.folder, source.settings if source.own else source.files)
    return cast(Encoder, encoder)


@lru_cache(maxsize=1)
def pretrained_pooler(folder: Path) -> dict[str, Tensor]:
    """The dense layer that BERT's next-sentence task has trained on the first token, where a BERT folder has one.

    Fine-tuning starts from it, as `BertForSequenceClassification` does.
    """
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") != "bert":
        return {}
    found = {}
    for file in _weight_files(folder):
        for name, tensor in read_weights(file).items():
            if name.removeprefix("bert.") in ("pooler.dense.weight", "pooler.dense.bias"):
                found[name.rpartition(".")[2]] = tensor.float()
    return found


@lru_cache(maxsize=1)
def _pretrained_state(folder: Path, files: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """The encoder's weights, read once per process, from `files` with these SHA-256: they may be read hours after the
    model was opened.

    Reading builds a model, which draws random numbers; they must not shift those of the run that happens to come first.
    """
    with torch.random.fork_rng(devices=[]):
        state = load_encoder(folder, dropout=0.0, attention_dropout=0.0).state_dict()
    refuse_changed(folder, dict(files))
    return state


class StockEncoder(nn.Module):
    """Any `AutoModel` behind the interface of the suite's encoder: packed tokens in, packed hidden states out."""

    DROPOUTS = (
        "hidden_dropout_prob",
        "dropout",
        "dropout_rate",
        "embd_pdrop",
        "hidden_dropout",
        "embedding_dropout",
        "mlp_dropout",
    )
    ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")

    def __init__(self, folder: Path, init: Init, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        from transformers import AutoConfig

        missing: list[str] = []
        with quiet_transformers(folder, CANNOT_LOAD):
            config = AutoConfig.from_pretrained(folder)
            for names, rate in (
                (self.DROPOUTS, dropout),
                (self.ATTENTION_DROPOUTS, attention_dropout),
            ):
                for name in names:
                    if isinstance(getattr(config, name, None), float | int):
                        setattr(config, name, rate)
            encoder = _encoder_class(config.model_type)
            if init == "pretrained":
                self.model, loaded = encoder.from_pretrained(
                    folder, config=config, dtype=torch.float32, **LOADING_INFO
                )
                missing = [
                    name for name in missing_weights(loaded) if "pooler" not in name
                ]  # not used here
            else:
                self.model = encoder.from_config(config, dtype=torch.float32)
        lack = f"its weights lack {', '.join(missing[:3])} ..., or have them in another shape"
        require(not missing, f"{folder}: {lack}; they are not of this config.json")
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
        inputs = {
            "input_ids": _pad(ids_T, valid_SL, self.pad_id),
            "attention_mask": valid_SL.long(),
        }
        if self.takes_types and token_types_T is not None:
            inputs["token_type_ids"] = _pad(token_types_T, valid_SL, 0)
        try:
            hidden_SLD = self.model(**inputs).last_hidden_state
        except (RuntimeError, ValueError) as error:
            what = f"model type {self.model.config.model_type!r}: transformers' code for it"
            reason = " ".join(str(error).split())[:200]
            if isinstance(
                error, ValueError
            ):  # as of X-MOD, where its config.json has no default_language
                raise UserError(f"{what} refuses its input ({reason})") from None
            if is_out_of_memory(error) or not torch.is_autocast_enabled(ids_T.device.type):
                raise
            raise UserError(
                f"{what} fails in 16 bits ({reason}); set eval.precision=fp32"
            ) from None
        # By place, not by `valid_SL`, whose count the host would wait for.
        row_T = torch.bucketize(
            torch.arange(len(ids_T), device=ids_T.device), packing.bounds_S[1:], right=True
        )
        place_T = row_T * packing.max_length + positions_T
        return hidden_SLD.flatten(0, 1).index_select(
            0, place_T if wanted_M is None else place_T[wanted_M]
        )


def _pad(values_T: Tensor, valid_SL: Tensor, filler: int) -> Tensor:
    return torch.full(
        valid_SL.shape, filler, dtype=torch.long, device=values_T.device
    ).masked_scatter(valid_SL, values_T.long())
