"""Model folders: what a finished run leaves behind, and what fine-tuning starts from.

A folder holds `config.json`, `model.safetensors` and the tokenizer's files. Where the architecture is one that
`transformers` has, the folder is what that library would have written and loads there without any code of ours (one
more key in `config.json`, `START`, is kept and ignored there); any other combination of choices gets `model_type:
"cramming"` and a copy of the files of this package that compute it (`trust_remote_code=True`). Which it is follows from
the configuration's fields alone (`stock.stock_family`), never from a name. Reading accepts both, and stock checkpoints
of these families from elsewhere.
"""

import dataclasses
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from cramming.config import UserError, build, file_sha256
from cramming.files import overwrite_atomically
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.heads import MaskedLM
from cramming.model.stock import FAMILIES, Names, from_stock, stock_family, to_stock

SPECIAL_TOKENS = {  # what the tokenizers of this suite call them; the keys are those of transformers
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
OWN_FORMAT = 2
READABLE_FORMATS = (1, OWN_FORMAT)  # 1 had other names for the decoder's parameters, and no code beside the weights
OWN_NAMES = {"decoder_weight": "decoder.weight", "decoder_bias": "decoder.bias"}  # own parameter -> the adapter's
CODE = (  # files of this folder that `trust_remote_code` needs; config.json names the first
    "hf_adapter.py", "attention.py", "attention_kernels.py", "config.py", "encoder.py", "flex.py", "heads.py",
    "init.py", "layers.py", "packing.py",
)  # fmt: skip
AUTO_CLASSES = {  # class of transformers -> class of hf_adapter.py
    "AutoConfig": "CrammingConfig",
    "AutoModel": "CrammingModel",
    "AutoModelForMaskedLM": "CrammingForMaskedLM",
    "AutoModelForSequenceClassification": "CrammingForSequenceClassification",
    "AutoModelForTokenClassification": "CrammingForTokenClassification",
    "AutoModelForQuestionAnswering": "CrammingForQuestionAnswering",
}
# How random weights are drawn, which no stock configuration says: fine-tuning from random weights must begin as the run
# began. A folder without this key means the stock family's usual start.
START, START_FIELDS = "cramming_start", ("init", "attention_init")

# Writing --------------------------------------------------------------------------------------------------------------


def save_pretrained(
    model: MaskedLM, folder: Path, tokenizer_file: Path, special_tokens: Mapping[str, str] = SPECIAL_TOKENS
) -> None:
    """Write `folder` (replaced whole, never half-written): weights, configuration and tokenizer.

    `special_tokens` maps transformers' names ("pad_token") to the tokenizer's entries. UserError when the tokenizer
    does not fit the model or `folder` holds something other than a model.
    """
    if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise UserError(f"{folder}: is there already and is not a model folder; choose another name")
    ids = _special_ids(model.config, tokenizer_file, special_tokens)

    def write(temporary: Path) -> None:
        temporary.mkdir()
        node = {"dtype": "float32", **_config_node(model.config), **ids}
        _write_json(temporary / "config.json", node)
        _write_weights(temporary / "model.safetensors", _stock_state(model))
        shutil.copyfile(tokenizer_file, temporary / "tokenizer.json")
        _write_json(temporary / "special_tokens_map.json", dict(special_tokens))
        _write_json(temporary / "tokenizer_config.json", _tokenizer_node(model.config) | dict(special_tokens))
        for name in CODE if stock_family(model.config) is None else ():
            shutil.copyfile(Path(__file__).with_name(name), temporary / name)

    overwrite_atomically(folder, write)


def _write_weights(file: Path, state: dict[str, Tensor]) -> None:
    """`save_file`, whose errors of the system are such errors here too, and whose file has the mode of any other."""
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(state, file, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) if code else error from None
    file.chmod(mode)


def _config_node(config: ModelConfig) -> dict[str, Any]:
    name = stock_family(config)
    if name is None:
        own = {"model_type": "cramming", "architectures": [AUTO_CLASSES["AutoModelForMaskedLM"]], "format": OWN_FORMAT}
        auto_map = {auto: f"hf_adapter.{name}" for auto, name in AUTO_CLASSES.items()}
        return own | {"auto_map": auto_map, "model": dataclasses.asdict(config)}
    family = FAMILIES[name]
    start = {field: getattr(config, field) for field in START_FIELDS}
    return {"model_type": name, "architectures": [family.architecture], **to_stock(config, family), START: start}


def _tokenizer_node(config: ModelConfig) -> dict[str, Any]:
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    if config.token_types < 2:  # ModernBERT's forward has no such argument at all
        inputs.remove("token_type_ids")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_length,
        "model_input_names": inputs,
    }


def _special_ids(config: ModelConfig, tokenizer_file: Path, special_tokens: Mapping[str, str]) -> dict[str, int]:
    """The token ids that transformers' configurations carry."""
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{tokenizer_file}: not a tokenizer.json ({str(error).splitlines()[0]})") from None
    assert config.vocab_size is not None
    if tokenizer.get_vocab_size() > config.vocab_size:
        entries = tokenizer.get_vocab_size()
        raise UserError(f"{tokenizer_file}: {entries} entries do not fit the model's vocabulary of {config.vocab_size}")
    found: dict[str, int] = {}
    for kind, token in special_tokens.items():
        index = tokenizer.token_to_id(token)
        if index is None:
            raise UserError(f"{tokenizer_file}: has no entry {token!r} ({kind})")
        found[kind] = index
    ids = {"pad_token_id": found["pad_token"]}
    if stock_family(config) == "modernbert":
        ids |= {"cls_token_id": found["cls_token"], "sep_token_id": found["sep_token"]}
        ids |= {"bos_token_id": found["cls_token"], "eos_token_id": found["sep_token"]}
    return ids


def _stock_state(model: MaskedLM) -> dict[str, Tensor]:
    state = {name: p.detach().to("cpu", torch.float32).contiguous() for name, p in model.state_dict().items()}
    names = _names(stock_family(model.config), model.config, state)
    stock: dict[str, Tensor] = {}
    for own, tensor in state.items():
        parts = tensor.chunk(len(names[own]))
        stock |= {name: part.contiguous() for name, part in zip(names[own], parts)}
    return stock


def _names(family: str | None, config: ModelConfig, own: Iterable[str]) -> Names:
    """Own parameter -> names in the folder's weights."""
    return FAMILIES[family].names(config) if family else {name: (OWN_NAMES.get(name, name),) for name in own}


def _write_json(path: Path, node: dict[str, Any]) -> None:
    path.write_text(json.dumps(node, indent=2, sort_keys=True) + "\n")


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a model folder, by name."""
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}


# Reading --------------------------------------------------------------------------------------------------------------


def load_encoder_config(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> ModelConfig:
    """The configuration of a model folder, own or stock; the two rates, when given, replace the folder's."""
    node = _read_config(folder)
    family = node.get("model_type")
    rates = {"dropout": dropout, "attention_dropout": attention_dropout}
    given = {name: rate for name, rate in rates.items() if rate is not None}
    where = f"{folder}/config.json"
    if family == "cramming":
        if node.get("format") not in READABLE_FORMATS:
            known = " or ".join(map(str, READABLE_FORMATS))
            raise UserError(f"{where}: format {node.get('format')} is not {known}; use the suite that wrote it")
        return build(ModelConfig, {**node.get("model", {}), **given}, where)
    if family not in FAMILIES:
        known = ", ".join(["cramming", *FAMILIES])
        raise UserError(f"{where}: model_type {family!r} is not one that this suite's model covers ({known})")
    if dropout is not None:
        node |= {"embedding_dropout": dropout, "mlp_dropout": dropout}
    try:
        stock = from_stock(node, FAMILIES[family])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    start = {field: value for field, value in node.get(START, {}).items() if field in START_FIELDS}
    return build(ModelConfig, stock | start | given, where)


def load_masked_lm(folder: Path, dropout: float | None = None, attention_dropout: float | None = None) -> MaskedLM:
    """A masked language model from an own folder or a stock one; UserError if its weights lack the head."""
    config = load_encoder_config(folder, dropout, attention_dropout)
    model = MaskedLM(config)
    model.load_state_dict(_own_state(folder, config, {n: p.shape for n, p in model.named_parameters()}))
    return model


def load_encoder(
    folder: Path, kernel: str = "auto", dropout: float | None = None, attention_dropout: float | None = None
) -> Encoder:
    """The encoder alone: for fine-tuning, also from checkpoints without a masked-LM head (`BertModel` and the like)."""
    config = load_encoder_config(folder, dropout, attention_dropout)
    encoder = Encoder(config, kernel)
    shapes = {f"encoder.{name}": p.shape for name, p in encoder.named_parameters()}
    state = _own_state(folder, config, shapes)
    encoder.load_state_dict({name.removeprefix("encoder."): tensor for name, tensor in state.items()})
    return encoder


def _own_state(folder: Path, config: ModelConfig, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The parameters named in `shapes`, from whatever names the folder's weights have."""
    found = _read_weights(folder)
    model_type = _read_config(folder)["model_type"]
    if model_type == "cramming":
        found = _with_prefix({OWN_NAMES.get(name, name): tensor for name, tensor in found.items()}, "encoder.")
        names = _names(None, config, shapes)
    else:
        family = FAMILIES[model_type]
        found = _with_prefix(found, family.prefix)
        names = family.names(config)
        known = {name for stock in names.values() for name in stock}
        for name in found:
            if name not in known and not re.match(family.ignored, name):
                raise UserError(f"{folder}: unexpected weight {name}; it is no part of {family.architecture}")
    state = {}
    for own, shape in shapes.items():
        for name in names[own]:
            if name not in found:
                raise UserError(f"{folder}: its weights lack {name}")
        tensor = torch.cat([found[name] for name in names[own]]).to(torch.float32)
        if tensor.shape != shape:
            actual = f"{list(tensor.shape)}, config.json makes it {list(shape)}"
            raise UserError(f"{folder}: weight {names[own][0]} has the shape {actual}")
        state[own] = tensor
    return state


def _with_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Masked-LM names: a bare encoder's get their prefix, TensorFlow-era norms their present names."""
    bare = not any(name.startswith(prefix) for name in weights)
    renamed = {}
    for name, tensor in weights.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        renamed[prefix + name if bare else name] = tensor
    return renamed


def _read_config(folder: Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; expected a model folder, such as runs/<name>/final")
    try:
        node = json.loads(path.read_text())
    except ValueError as error:  # a number too long to be read, too
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(node, dict):
        raise UserError(f"{path}: not a model configuration")
    return node


def _read_weights(folder: Path) -> dict[str, Tensor]:
    folder = Path(folder)
    for name, read in WEIGHT_FILES.items():
        if (folder / name).is_file():
            try:
                return read(folder / name)
            except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"{folder / name}: cannot be read ({reason})") from None
    raise UserError(f"{folder}: no weights; expected one of {', '.join(WEIGHT_FILES)}")


def _read_sharded(index: Path) -> dict[str, Tensor]:
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(index.parent / file).items()}


def _read_pickle(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


WEIGHT_FILES: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model.safetensors": load_file,
    "model.safetensors.index.json": _read_sharded,
    "pytorch_model.bin": _read_pickle,
}
