"""Model folders to score, each opened once and checked to be unchanged, and the classifier built from one.

The suite's encoder runs the architectures that it covers (its own, stock BERT and ModernBERT), transformers every
other, which `StockEncoder` wraps and pads inside. Random initialisation means the same architecture with fresh
weights from the fine-tuning seed, of the scale that the folder's run used.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cramming.config import UserError, file_sha256, require
from cramming.device import is_out_of_memory
from cramming.hub import download_model
from cramming.model.attention import Packing
from cramming.model.classifier import SequenceClassifier
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.init import initialize
from cramming.model.load import (
    FINE_TUNED_CLASS,
    WEIGHT_FILES,
    load_encoder,
    load_encoder_config,
    read_weights,
)
from cramming.progress import say
from eval.finetune.config import Hyperparameters, Init

NATIVE_TYPES = ("cramming", "bert", "distilbert", "modernbert")
CANNOT_LOAD = "transformers cannot load it"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")  # sharded files included
# files that no number depends on: weights that are not loaded, and texts for people
NOT_SETTINGS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".md")


@dataclass(frozen=True)
class ModelSource:
    """Model folder: `label` is the user's name for it, and `is_native` tells whether the suite's encoder can run it.

    `sha256` is that of the weight file (of the hashes of several files), `weight_bytes` their size; `files` holds the
    SHA-256, by name, of the loaded weights and of every file of settings, the tokenizer's included. `checkpoint` is the
    SHA-256 of the checkpoint that the model was written from, None for a final model.
    """

    folder: Path
    label: str
    is_native: bool
    vocab_size: int
    max_length: int | None
    sha256: str
    weight_bytes: int
    files: dict[str, str]
    checkpoint: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """Hashes in `files` of all files but the weights.

        Stock tokenizers read different files, so all of them count.
        """
        names = [name for name in self.files if Path(name).suffix not in NOT_SETTINGS]
        return {name: self.files[name] for name in names}


def open_model(path: str | Path) -> ModelSource:
    """Return a description of the model in a folder or under a hub name; raise UserError if it cannot be read."""
    folder = Path(path)
    require(
        not folder.is_file(),
        f"--model={path}: is a file. Give the folder that contains the model.",
    )
    if not folder.is_dir():
        folder = download_model(str(path), "--model")
    file = folder / "config.json"
    config = _read_encoder_config(file)
    kind = config.get("model_type")
    fine_tuned = [
        name for name in config.get("architectures") or () if FINE_TUNED_CLASS.search(name)
    ]
    if fine_tuned:
        say(f"{path}: the fine-tuned head of {fine_tuned[0]} is dropped, only its encoder is used")
    weights = _weight_files(folder)
    require(weights, f"{folder}: no weights. Expected model.safetensors or pytorch_model.bin.")
    files = _hash_files(folder, weights)
    hashes = [files[weight_file.name] for weight_file in weights]
    sha256 = hashes[0]
    if len(hashes) > 1:
        sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
    size = sum(weight_file.stat().st_size for weight_file in weights)
    suite_config = None
    is_whole = any(weight_file.name in WEIGHT_FILES for weight_file in weights)
    if is_whole or kind == "cramming":  # transformers alone loads sharded weights
        suite_config = _suite_config(folder, kind)
    if suite_config:
        assert suite_config.vocab_size is not None, folder
        limit = position_limit(suite_config)
        return ModelSource(
            folder, str(path), True, suite_config.vocab_size, limit, sha256, size, files
        )
    require(config.get("vocab_size"), f"{file}: no vocab_size: {kind!r} is not a text encoder.")
    causal = f"{file}: this {kind!r} is a decoder, whose tokens do not see those after them; give an encoder"
    require(not _is_causal(config), causal)
    positions = config.get("max_position_embeddings")
    if positions is not None:
        positions -= _first_position(folder)
    return ModelSource(
        folder, str(path), False, config["vocab_size"], positions, sha256, size, files
    )


def _read_encoder_config(file: Path) -> dict[str, Any]:
    require(file.is_file(), f"{file.parent}: no config.json. Give a Hugging Face model folder.")
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: not a JSON object ({error})") from None
    kind = config.get("model_type")
    require(
        not config.get("is_encoder_decoder"),
        f"{file}: model type {kind!r} has a decoder. Give an encoder.",
    )
    return config


def _hash_files(folder: Path, weights: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of the weights and of every file of settings, by name."""
    hashes = {}
    for file in sorted(folder.iterdir()):
        is_read = file in weights or file.suffix not in NOT_SETTINGS
        if file.is_file() and is_read and not file.name.startswith("."):
            hashes[file.name] = file_sha256(file)
    return hashes


@contextmanager
def quiet_transformers(folder: Path, failing: str) -> Iterator[None]:
    """Hide transformers' report and progress bars, which would appear for every task and seed, inside the block.

    Any error of transformers is raised as a UserError.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # a wrong config.json or damaged weights cause errors of any type
        raise UserError(f"{folder}: {failing} ({' '.join(str(error).split())[:200]})") from None
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# With this, transformers returns the names of weights of other shapes; otherwise only its report names them.
LOADING_INFO = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def missing_weights(loaded: Mapping[str, Any]) -> list[str]:
    """Return the weights of a model that its files lack or have in another shape.

    `loaded` is transformers' loading information.
    """
    return sorted({*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])})


def _encoder_class(model_type: str) -> Any:
    """Return transformers' automatic class for the encoder of this type; `AutoModel` includes the decoder of T5."""
    from transformers import AutoModel, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES as ENCODERS,
    )

    return AutoModelForTextEncoding if model_type in ENCODERS else AutoModel


def _first_position(folder: Path) -> int:
    """Return the number of rows of the position table that no token reads.

    RoBERTa and similar models start behind the row of the padding.
    """
    from transformers import AutoConfig

    with quiet_transformers(folder, CANNOT_LOAD), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = _encoder_class(config.model_type).from_config(config)
    paddings = []
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            paddings.append(padding)
    return 1 + max(paddings, default=-1)


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder in the first format that it has; several if they are sharded."""
    for pattern in WEIGHT_PATTERNS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def altered(written: Mapping[str, str], files: Mapping[str, str]) -> str | None:
    """Return a message for the first of a run's `files` in `final/` that differs from the `written` ones, or None.

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
    """Raise UserError if one of `files`, by SHA-256, was changed since the model was opened."""
    for name, sha256 in files.items():
        file = folder / name
        is_unchanged = file.is_file() and file_sha256(file) == sha256
        require(
            is_unchanged,
            f"{file}: changed while the model was scored. Restore the file and run again.",
        )


# encoders that transformers' tables list as causal language models only
ENCODERS_LISTED_AS_CAUSAL = ("xlnet", "bert-generation")


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether no token of this model sees later ones.

    That holds for types that `transformers` has as causal language models only, and for decoders by their
    configuration, unless it states that the model reads both ways.
    """
    from transformers.models.auto import modeling_auto

    if config.get("is_causal") is False:
        return False
    if config.get("use_bidirectional_attention") in (True, "all"):
        return False
    if config.get("is_decoder"):
        return True
    kind = config.get("model_type")
    if kind in ENCODERS_LISTED_AS_CAUSAL:
        return False
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return kind in causal and kind not in masked


def position_limit(config: ModelConfig) -> int | None:
    """Return the longest sequence that a model of the suite can read, or None if there is no limit."""
    return None if config.positions in ("rope", "none") else config.max_length


def _suite_config(folder: Path, model_type: str | None) -> ModelConfig | None:
    """Return the suite's configuration of this model, or None for an architecture or variant that it lacks."""
    if model_type not in NATIVE_TYPES:
        return None
    try:
        return load_encoder_config(folder, dropout=0.0, attention_dropout=0.0)
    except UserError:
        if model_type == "cramming":  # nothing else could load it
            raise
        return None


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
        """Return logits [T, C]."""
        hidden_TD = self.encoder(ids_T, positions_T, packing, token_types_T)
        return self.classifier(self.dropout(hidden_TD))


Classifier = SequenceClassifier | TokenClassifier


def build_token_classifier(
    source: ModelSource, init: Init, outputs: int, hyper: Hyperparameters
) -> TokenClassifier:
    """Return a classifier of tokens with `outputs` logits, initialised like those of `build_classifier`."""
    return TokenClassifier(_build_encoder(source, init, hyper), outputs, hyper.dropout)


def build_classifier(
    source: ModelSource, init: Init, outputs: int, hyper: Hyperparameters
) -> SequenceClassifier:
    """Return a classifier with `outputs` logits on the source's encoder, initialised according to `init`.

    New weights are drawn from torch's global generator. Raises UserError if a file of the source has changed.
    """
    encoder = _build_encoder(source, init, hyper)
    size = encoder.config.hidden_size if hyper.pooler else None
    model = SequenceClassifier(encoder, outputs, hyper.pooling, size, hyper.dropout)
    if init == "pretrained" and hyper.pooling == "cls" and model.pooler is not None:
        trained = pretrained_pooler(source.folder)
        if trained:
            model.pooler.load_state_dict(trained)
    return model


def _build_encoder(source: ModelSource, init: Init, hyper: Hyperparameters) -> Encoder:
    """Return the source's encoder; a `StockEncoder` has the same interface."""
    encoder: Encoder | StockEncoder
    if source.is_native:
        config = load_encoder_config(source.folder, hyper.dropout, hyper.attention_dropout)
        if init == "random":
            config = replace(config, attention_init="random")
        encoder = Encoder(config)
        if init == "pretrained":
            encoder.load_state_dict(_pretrained_state(source.folder, tuple(source.files.items())))
    else:
        encoder = StockEncoder(source.folder, init, hyper.dropout, hyper.attention_dropout)
    refuse_changed(source.folder, source.settings if source.is_native else source.files)
    return cast(Encoder, encoder)


@lru_cache(maxsize=1)
def pretrained_pooler(folder: Path) -> dict[str, Tensor]:
    """Return the dense layer that BERT's next-sentence task trained on the first token, {} if a folder has none.

    Fine-tuning starts from it, as `BertForSequenceClassification` does.
    """
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") != "bert":
        return {}
    state = {}
    for file in _weight_files(folder):
        for name, tensor in read_weights(file).items():
            if name.removeprefix("bert.") in ("pooler.dense.weight", "pooler.dense.bias"):
                state[name.rpartition(".")[2]] = tensor.float()
    return state


@lru_cache(maxsize=1)
def _pretrained_state(folder: Path, files: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """Return the encoder's weights, read once per process, from `files` with these SHA-256.

    They may be read hours after the model was opened. Reading builds a model, which draws random numbers; they must
    not shift those of the run that happens to come first.
    """
    with torch.random.fork_rng(devices=[]):
        state = load_encoder(folder, dropout=0.0, attention_dropout=0.0).state_dict()
    refuse_changed(folder, dict(files))
    return state


class StockEncoder(nn.Module):
    """Any `AutoModel` with the interface of the suite's encoder: packed tokens in, packed hidden states out."""

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
                # the pooler is not used
                missing = [name for name in missing_weights(loaded) if "pooler" not in name]
            else:
                self.model = encoder.from_config(config, dtype=torch.float32)
        lack = f"its weights lack {', '.join(missing[:3])} ..., or have them in another shape"
        require(not missing, f"{folder}: {lack}: the weights do not belong to this config.json.")
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
        queries_M: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [T, D], or [M, D] of the tokens `queries_M`."""
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
            if isinstance(error, ValueError):  # X-MOD without a default_language in config.json
                raise UserError(f"{what} refuses its input ({reason})") from None
            if is_out_of_memory(error) or not torch.is_autocast_enabled(ids_T.device.type):
                raise
            raise UserError(
                f"{what} fails in 16 bits ({reason}). Set eval.precision=fp32."
            ) from None
        # By index, not by `valid_SL`, for whose count the host would wait.
        tokens_T = torch.arange(len(ids_T), device=ids_T.device)
        row_T = torch.bucketize(tokens_T, packing.bounds_S[1:], right=True)
        index_T = row_T * packing.max_length + positions_T
        if queries_M is not None:
            index_T = index_T[queries_M]
        return hidden_SLD.flatten(0, 1).index_select(0, index_T)


def _pad(values_T: Tensor, valid_SL: Tensor, filler: int) -> Tensor:
    padded_SL = torch.full(valid_SL.shape, filler, dtype=torch.long, device=values_T.device)
    return padded_SL.masked_scatter(valid_SL, values_T.long())
