"""The model folder to score: opened once, described, and unchanged until its last file is read.

The suite's encoder runs architectures that it has (its own, stock BERT and ModernBERT), transformers every other
encoder (eval/finetune/classifier.py).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cramming.config import UserError, expand_home, file_sha256, require, settings_hash
from cramming.hub import prepare_hub
from cramming.model.config import ModelConfig
from cramming.model.export import load_encoder_config
from cramming.record_schema import Record

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
        return {name: sha256 for name, sha256 in self.files.items() if Path(name).suffix not in NOT_SETTINGS}


def open_model(path: str | Path) -> ModelSource:
    """Describe the model at a folder or under a hub name; UserError where there is none, or none that can be read."""
    folder = expand_home(path, "model_path")
    require(not folder.is_file(), f"model_path={path}: is a file; give the folder it is in")
    if not folder.is_dir():
        folder = _download(str(path))
    config = _read_config(folder / "config.json")
    weights = next((found for p in WEIGHT_FILES if (found := sorted(folder.glob(p)))), [])
    require(weights, f"{folder}: no weights; expected model.safetensors or pytorch_model.bin")
    files = {
        file.name: file_sha256(file)
        for file in sorted(folder.iterdir())
        if file.is_file() and (file in weights or file.suffix not in NOT_SETTINGS) and not file.name.startswith(".")
    }
    hashes = [files[file.name] for file in weights]
    sha256 = hashes[0] if len(hashes) == 1 else settings_hash(hashes)
    size = sum(file.stat().st_size for file in weights)
    if own := _own_config(folder, config.get("model_type")):
        assert own.vocab_size is not None, folder
        return ModelSource(folder, str(path), True, own.vocab_size, position_limit(own), sha256, size, files)
    vocab_size = config.get("vocab_size", 0)
    require(vocab_size, f"{folder / 'config.json'}: no vocab_size; {config.get('model_type')!r} is not a text encoder")
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
        file = folder / name
        same = file.is_file() and file_sha256(file) == sha256
        require(same, f"{file}: was changed while the model was being scored; restore it and run again")


def _read_config(file: Path) -> dict[str, Any]:
    """A model's config.json; UserError where it is none of an encoder, as far as it can be told from it."""
    require(file.is_file(), f"{file.parent}: no config.json; expected a Hugging Face model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not readable as JSON ({error})") from None
    require(isinstance(config, dict), f"{file}: expected a JSON object, found {type(config).__name__}")
    decoder = config.get("is_encoder_decoder")
    require(not decoder, f"{file}: model type {config.get('model_type')!r} has a decoder; give an encoder")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        value = config.get(name, 1)
        absent = value is None and name == "max_position_embeddings"
        valid = absent or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        require(valid, f"{file}: {name}={value!r} must be a whole number above 0")
    return config


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
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    require(is_name, f"model_path={name}: no such folder, and not a name on the hub")
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
