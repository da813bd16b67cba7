"""Model folders: the result of a finished run, and the start of fine-tuning.

Where `transformers` has the architecture (`stock.stock_family`), the folder loads there without code of this suite.
Any other combination of choices gets `model_type: "cramming"` and a copy of the files of this package that compute it
(`trust_remote_code=True`). Both can be read, and stock checkpoints of these families from elsewhere.
"""

import dataclasses
import itertools
import json
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from cramming.config import UserError, build, file_sha256, require
from cramming.files import overwrite_atomically
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.heads import MaskedLM
from cramming.model.stock import Names, families, from_stock, stock_family, to_stock

# transformers' name of a special token -> its entry in the tokenizers of this suite
SPECIAL_TOKENS = {
    f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")
}
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first existing file is read
# classes of transformers without a masked-LM head, among them those with a fine-tuned one
BARE_CLASS = re.compile(r"(?<!LMHead)Model$|Classification$|QuestionAnswering$|MultipleChoice$")
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

# Writing --------------------------------------------------------------------------------------------------------------


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
    if stock_family(config) in ("modernbert", "roberta"):
        roles = {"cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
        ids |= {f"{name}_token_id": token_ids[f"{role}_token"] for name, role in roles.items()}
    return ids


def _stock_state(model: MaskedLM | Encoder) -> dict[str, Tensor]:
    """Return the weights under the names that they have in a model folder."""
    prefix = "" if isinstance(model, MaskedLM) else "encoder."
    state = {
        prefix + name: p.detach().to("cpu", torch.float32) for name, p in model.state_dict().items()
    }
    stored_names = _stored_names(stock_family(model.config), model.config, state)
    stock: dict[str, Tensor] = {}
    for parameter, tensor in state.items():
        names = stored_names[parameter]
        for name, part in zip(names, tensor.chunk(len(names))):
            stock[name] = part.contiguous()
    return stock


def _stored_names(family: str | None, config: ModelConfig, parameters: Iterable[str]) -> Names:
    """Return the names in the folder's weights for each parameter."""
    if family:
        return families()[family].names(config)
    return {name: (ADAPTER_NAMES.get(name, name),) for name in parameters}


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a model folder, by name."""
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}


# Reading --------------------------------------------------------------------------------------------------------------


def load_encoder_config(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> ModelConfig:
    """Return the configuration of a model folder, in the format of this suite or stock.

    The two rates, unless None, replace the folder's.
    """
    node, where = _read_config(folder), f"{folder}/config.json"
    family = node.get("model_type")
    rates: dict[str, float] = {}
    if dropout is not None:
        rates["dropout"] = dropout
    if attention_dropout is not None:
        rates["attention_dropout"] = attention_dropout
    if family == "cramming":
        if node.get("format") != CRAMMING_FORMAT:
            raise UserError(
                f"{where}: format {node.get('format')} is not {CRAMMING_FORMAT}. Use the version that wrote it."
            )
        return build(ModelConfig, {**node.get("model", {}), **rates}, where)
    if family not in families():
        known = ", ".join(["cramming", *families()])
        raise UserError(f"{where}: unsupported model_type {family!r}. Use one of {known}.")
    if dropout is not None:
        node |= {"embedding_dropout": dropout, "mlp_dropout": dropout}
    start = {field: value for field, value in node.get(START, {}).items() if field in START_FIELDS}
    return build(ModelConfig, from_stock(node, families()[family], where) | start | rates, where)


def load_masked_lm(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> MaskedLM:
    """Return the masked language model of a folder; raise UserError if its weights lack the head."""
    lacks_head = f"{folder}: an encoder without a masked-LM head (architectures in config.json)"
    require(not _is_bare(folder), f"{lacks_head}. Use a model of objective=mlm.")
    config = load_encoder_config(folder, dropout, attention_dropout)
    model = MaskedLM(config)
    model.load_state_dict(_load_state(folder, config, model.state_dict()))
    return model


def load_weights(model: MaskedLM, folder: Path) -> bool:
    """Load a folder's weights into a model of its configuration; return whether the folder has a masked-LM head.

    Without one the model keeps its own head, and only the encoder is loaded.
    """
    state = model.state_dict()
    family, stored = _read_stored_weights(folder)
    head = [name for name in state if not name.startswith("encoder.")]
    if family is None:
        has_head = not _is_bare(folder)
    else:
        stored_names = _stored_names(family, model.config, head)
        head_weights = itertools.chain.from_iterable(stored_names[name] for name in head)
        has_head = all(name in stored for name in head_weights)
    wanted = state
    if not has_head:
        wanted = {name: tensor for name, tensor in state.items() if name not in head}
    model.load_state_dict(_load_state(folder, model.config, wanted), strict=has_head)
    return has_head


def load_exported(folder: Path) -> MaskedLM | Encoder:
    """Return the model that `save_pretrained` wrote: a masked language model, or an encoder without a head."""
    return load_encoder(folder) if _is_bare(folder) else load_masked_lm(folder)


def _is_bare(folder: Path) -> bool:
    """Return whether the folder's configuration names a class without a masked-LM head.

    Weights cannot tell: a head that is tied to the embeddings may have none.
    """
    return any(map(BARE_CLASS.search, _read_config(folder).get("architectures") or ()))


def load_encoder(
    folder: Path,
    kernel: str = "auto",
    dropout: float | None = None,
    attention_dropout: float | None = None,
) -> Encoder:
    """Return the encoder alone, for fine-tuning.

    The folder may be a checkpoint without a masked-LM head (`BertModel` and the like).
    """
    config = load_encoder_config(folder, dropout, attention_dropout)
    encoder = Encoder(config, kernel)
    state = _load_state(
        folder, config, {f"encoder.{name}": p for name, p in encoder.state_dict().items()}
    )
    encoder.load_state_dict(
        {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    )
    return encoder


def _load_state(
    folder: Path, config: ModelConfig, wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the wanted parameters, in their shapes, from the folder's weights, whatever their names there."""
    family, stored = _read_stored_weights(folder)
    stored_names = _stored_names(family, config, wanted)
    state = {}
    for parameter, tensor in wanted.items():
        names = stored_names[parameter]
        for name, part in zip(names, tensor.chunk(len(names))):
            require(name in stored, f"{folder}: its weights lack {name}")
            shapes = f"{list(stored[name].shape)}, config.json makes it {list(part.shape)}"
            has_shape = stored[name].shape == part.shape
            require(has_shape, f"{folder}: weight {name} has the shape {shapes}")
        state[parameter] = torch.cat([stored[name] for name in names]).to(torch.float32)
    # In a folder of this suite every layer must be described, other weights may be superfluous.
    ignored = families()[family].ignored if family else r"(?!encoder\.blocks\.)"
    known = set(itertools.chain.from_iterable(stored_names.values()))
    unexpected = [name for name in stored.keys() - known if not re.match(ignored, name)]
    if unexpected:
        raise UserError(
            f"{folder}: unexpected weight {min(unexpected)}. config.json describes no such part."
        )
    return state


def _read_stored_weights(folder: Path) -> tuple[str | None, dict[str, Tensor]]:
    """Return the stock family (None for this suite's format) and the weights under their masked-LM names."""
    model_type = _read_config(folder)["model_type"]
    family = None if model_type == "cramming" else model_type
    weights = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    require(weights, f"{folder}: no weights. Expected {' or '.join(WEIGHT_FILES)}.")
    prefix = families()[family].prefix if family else "encoder."
    return family, _with_prefix(read_weights(weights[0]), prefix)


def _with_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights under their masked-LM names.

    A bare encoder's names get the prefix, norms of TensorFlow-era checkpoints their present names.
    """
    bare = not any(name.startswith(prefix) for name in weights)
    renamed = {}
    for name, tensor in weights.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        renamed[prefix + name if bare else name] = tensor
    return renamed


def _read_config(folder: Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    require(
        path.is_file(),
        f"{folder}: no config.json. Expected a model folder, such as runs/<name>/final.",
    )
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a model configuration ({error})") from None


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file of safetensors or torch; raise UserError if it cannot be read."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{file}: the weights cannot be read ({str(error).splitlines()[0]})"
        ) from None
