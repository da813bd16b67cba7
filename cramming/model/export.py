"""Model folders: how the result of a run is written; load.py reads it.

Where `transformers` has the architecture (`stock.stock_family`), the folder loads there without code of this suite.
Any other combination of choices gets `model_type: "cramming"` and a copy of the files of this package that compute it
(`trust_remote_code=True`).
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from cramming.config import UserError, file_sha256
from cramming.files import overwrite_atomically
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.heads import MaskedLM
from cramming.model.stock import Names, families, stock_family, to_stock

# transformers' name of a special token -> its entry in the tokenizers of this suite
SPECIAL_TOKENS = {
    f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")
}
CRAMMING_FORMAT = 2
# parameter of this suite -> parameter of the adapter (hf_adapter.py)
ADAPTER_NAMES = {"decoder_weight": "decoder.weight", "decoder_bias": "decoder.bias"}
CODE = (  # files of this folder that `trust_remote_code` needs; config.json names the first
    "hf_adapter.py",
    "attention.py",
    "attention_kernels.py",
    "classifier.py",
    "config.py",
    "convolution.py",
    "encoder.py",
    "flex.py",
    "heads.py",
    "init.py",
    "layers.py",
    "packing.py",
    "relative_positions.py",
)
AUTO_CLASSES = {  # class of transformers -> class of hf_adapter.py
    "AutoConfig": "CrammingConfig",
    "AutoModel": "CrammingModel",
    "AutoModelForMaskedLM": "CrammingForMaskedLM",
    "AutoModelForSequenceClassification": "CrammingForSequenceClassification",
    "AutoModelForTokenClassification": "CrammingForTokenClassification",
    "AutoModelForQuestionAnswering": "CrammingForQuestionAnswering",
}
# Initialisation, which no stock configuration states: fine-tuning from random weights must start as the run started.
# A folder without this key means the usual initialisation of the stock family.
START, START_FIELDS = "cramming_start", ("init", "zero_residual", "attention_init")


def save_pretrained(
    model: MaskedLM | Encoder,
    folder: Path,
    tokenizer_file: Path,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
) -> None:
    """Write weights, configuration and tokenizer to `folder`, which is replaced whole and never half-written.

    An encoder alone is written as the class without a masked-LM head. `special_tokens` maps transformers' names
    ("pad_token") to the tokenizer's entries. Raises UserError if the tokenizer does not fit the model or `folder`
    holds something other than a model.
    """
    from cramming.tokenizer_config import tokenizer_config  # not read before the first step

    is_model_folder = (folder / "config.json").is_file()
    if folder.exists() and not is_model_folder and any(folder.iterdir()):
        raise UserError(f"{folder}: exists and is not a model folder. Choose another name.")
    config = model.config
    ids = _special_ids(config, tokenizer_file, special_tokens)
    inputs = ["input_ids", "attention_mask"]
    if config.token_types > 1:  # the forward pass of ModernBERT has no argument token_type_ids
        inputs.insert(1, "token_type_ids")
    tokenizer = {
        **tokenizer_config(tokenizer_file, special_tokens),
        "model_max_length": config.max_length,
        "model_input_names": inputs,
    }
    files = {
        "config.json": {
            "dtype": "float32",
            **_config_node(config, isinstance(model, MaskedLM)),
            **ids,
        },
        "special_tokens_map.json": dict(special_tokens),
        "tokenizer_config.json": tokenizer,
    }

    def write(temporary: Path) -> None:
        temporary.mkdir()
        for name, node in files.items():
            (temporary / name).write_text(json.dumps(node, indent=2, sort_keys=True) + "\n")
        save_weights(model, temporary)
        shutil.copyfile(tokenizer_file, temporary / "tokenizer.json")
        if stock_family(config) is None:
            for name in CODE:
                shutil.copyfile(Path(__file__).with_name(name), temporary / name)

    overwrite_atomically(folder, write)


def save_weights(model: MaskedLM | Encoder, folder: Path) -> None:
    """Write the weights of a model to its folder."""
    # not `save_file`, which raises no OSError on a full disk and ignores the umask
    weights = safetensors.torch.save(_stock_state(model), {"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)


def _config_node(config: ModelConfig, has_head: bool) -> dict[str, Any]:
    """Return the model part of config.json, stock where transformers has the architecture."""
    name = stock_family(config)
    if name is None:
        auto_classes = dict(AUTO_CLASSES)
        if not has_head:
            del auto_classes["AutoModelForMaskedLM"]
        architecture = auto_classes["AutoModelForMaskedLM" if has_head else "AutoModel"]
        return {
            "model_type": "cramming",
            "architectures": [architecture],
            "format": CRAMMING_FORMAT,
            "auto_map": {auto: f"hf_adapter.{name}" for auto, name in auto_classes.items()},
            "model": dataclasses.asdict(config),
        }
    family = families()[name]
    architecture = family.architecture if has_head else family.encoder
    start = {field: getattr(config, field) for field in START_FIELDS}
    return {
        "model_type": name,
        "architectures": [architecture],
        **to_stock(config, family),
        START: start,
    }


def _special_ids(
    config: ModelConfig, tokenizer_file: Path, special_tokens: Mapping[str, str]
) -> dict[str, int]:
    """Return the token ids that transformers' configurations contain."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_file.read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{tokenizer_file}: not a tokenizer.json ({str(error).splitlines()[0]})"
        ) from None
    entries = tokenizer.get_vocab_size()
    if entries > (config.vocab_size or 0):
        raise UserError(
            f"{tokenizer_file}: {entries} entries do not fit the model's vocabulary of {config.vocab_size}"
        )
    token_ids: dict[str, Any] = {}
    for kind, token in special_tokens.items():
        token_ids[kind] = tokenizer.token_to_id(token)
        if token_ids[kind] is None:
            raise UserError(f"{tokenizer_file}: has no entry {token!r} ({kind})")
    ids = {"pad_token_id": token_ids["pad_token"]}
    if stock_family(config) in ("modernbert", "mpnet", "roberta"):
        roles = {"cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
        ids |= {f"{name}_token_id": token_ids[f"{role}_token"] for name, role in roles.items()}
    return ids


def _stock_state(model: MaskedLM | Encoder) -> dict[str, Tensor]:
    """Return the weights under the names that they have in a model folder."""
    prefix = "" if isinstance(model, MaskedLM) else "encoder."
    state = {
        prefix + name: p.detach().to("cpu", torch.float32) for name, p in model.state_dict().items()
    }
    stored_names = weight_names(stock_family(model.config), model.config, state)
    stock: dict[str, Tensor] = {}
    for parameter, tensor in state.items():
        names = stored_names[parameter]
        for name, part in zip(names, tensor.chunk(len(names))):
            stock[name] = part.contiguous()
    return stock


def weight_names(family: str | None, config: ModelConfig, parameters: Iterable[str]) -> Names:
    """Return the names in the folder's weights for each parameter."""
    if family:
        return families()[family].names(config)
    return {name: (ADAPTER_NAMES.get(name, name),) for name in parameters}


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a model folder, by name."""
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
