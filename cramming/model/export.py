"""Model folders: what a finished run leaves behind, and what fine-tuning starts from.

Where the architecture is one that `transformers` has (`stock.stock_family`), the folder loads there without code of
ours; any other combination of choices gets `model_type: "cramming"` and a copy of the files of this package that
compute it (`trust_remote_code=True`). Reading accepts both, and stock checkpoints of these families from elsewhere.
"""

import dataclasses
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

# What the tokenizers of this suite call them; the keys are those of transformers.
SPECIAL_TOKENS = {
    f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")
}
WEIGHT_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # of which the first that is there is read
OWN_FORMAT = 2
OWN_NAMES = {
    "decoder_weight": "decoder.weight",
    "decoder_bias": "decoder.bias",
}  # own parameter -> the adapter's
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
# How random weights are drawn, which no stock configuration says: fine-tuning from random weights must begin as the run
# began. A folder without this key means the stock family's usual start.
START, START_FIELDS = "cramming_start", ("init", "zero_residual", "attention_init")

# Writing --------------------------------------------------------------------------------------------------------------


def save_pretrained(
    model: MaskedLM | Encoder,
    folder: Path,
    tokenizer_file: Path,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
) -> None:
    """Write `folder` (replaced whole, never half-written): weights, configuration and tokenizer.

    An encoder alone is written as the class without a masked-LM head.
    `special_tokens` maps transformers' names ("pad_token") to the tokenizer's entries. UserError when the tokenizer
    does not fit the model or `folder` holds something other than a model.
    """
    if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise UserError(
            f"{folder}: is there already and is not a model folder; choose another name"
        )
    config = model.config
    ids = _special_ids(config, tokenizer_file, special_tokens)
    # ModernBERT's forward has no token_type_ids at all
    inputs = [
        "input_ids",
        *(["token_type_ids"] if config.token_types > 1 else []),
        "attention_mask",
    ]
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_length,
    }
    files = {
        "config.json": {
            "dtype": "float32",
            **_config_node(config, isinstance(model, MaskedLM)),
            **ids,
        },
        "special_tokens_map.json": dict(special_tokens),
        "tokenizer_config.json": {**tokenizer, "model_input_names": inputs, **special_tokens},
    }

    def write(temporary: Path) -> None:
        temporary.mkdir()
        for name, node in files.items():
            (temporary / name).write_text(json.dumps(node, indent=2, sort_keys=True) + "\n")
        # not `save_file`, whose errors of the system are none, and whose file has a mode of its own
        (temporary / "model.safetensors").write_bytes(
            safetensors.torch.save(_stock_state(model), {"format": "pt"})
        )
        shutil.copyfile(tokenizer_file, temporary / "tokenizer.json")
        for name in CODE if stock_family(config) is None else ():
            shutil.copyfile(Path(__file__).with_name(name), temporary / name)

    overwrite_atomically(folder, write)


def _config_node(config: ModelConfig, has_head: bool) -> dict[str, Any]:
    name = stock_family(config)
    if name is None:
        head, bare = AUTO_CLASSES["AutoModelForMaskedLM"], AUTO_CLASSES["AutoModel"]
        own = {
            "model_type": "cramming",
            "architectures": [head if has_head else bare],
            "format": OWN_FORMAT,
        }
        auto_map = {
            auto: f"hf_adapter.{name}"
            for auto, name in AUTO_CLASSES.items()
            if has_head or name != head
        }
        return own | {"auto_map": auto_map, "model": dataclasses.asdict(config)}
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
    """The token ids that transformers' configurations carry."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_file.read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{tokenizer_file}: not a tokenizer.json ({str(error).splitlines()[0]})"
        ) from None
    entries = tokenizer.get_vocab_size()
    found: dict[str, Any] = {
        kind: tokenizer.token_to_id(token) for kind, token in special_tokens.items()
    }
    if entries > (config.vocab_size or 0):
        raise UserError(
            f"{tokenizer_file}: {entries} entries do not fit the model's vocabulary of {config.vocab_size}"
        )
    if missing := [kind for kind, index in found.items() if index is None]:
        raise UserError(
            f"{tokenizer_file}: has no entry {special_tokens[missing[0]]!r} ({missing[0]})"
        )
    ids = {"pad_token_id": found["pad_token"]}
    if stock_family(config) in ("modernbert", "roberta"):
        roles = {"cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
        ids |= {f"{name}_token_id": found[f"{role}_token"] for name, role in roles.items()}
    return ids


def _stock_state(model: MaskedLM | Encoder) -> dict[str, Tensor]:
    prefix = "" if isinstance(model, MaskedLM) else "encoder."
    state = {
        prefix + name: p.detach().to("cpu", torch.float32) for name, p in model.state_dict().items()
    }
    names = _names(stock_family(model.config), model.config, state)
    stock: dict[str, Tensor] = {}
    for own, tensor in state.items():
        stock |= {
            name: part.contiguous() for name, part in zip(names[own], tensor.chunk(len(names[own])))
        }
    return stock


def _names(family: str | None, config: ModelConfig, own: Iterable[str]) -> Names:
    """Own parameter -> names in the folder's weights."""
    return (
        families()[family].names(config)
        if family
        else {name: (OWN_NAMES.get(name, name),) for name in own}
    )


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a model folder, by name."""
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}


# Reading --------------------------------------------------------------------------------------------------------------


def load_encoder_config(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> ModelConfig:
    """The configuration of a model folder, own or stock; the two rates, when given, replace the folder's."""
    node, where = _read_config(folder), f"{folder}/config.json"
    family = node.get("model_type")
    rates = {"dropout": dropout, "attention_dropout": attention_dropout}
    given = {name: rate for name, rate in rates.items() if rate is not None}
    if family == "cramming":
        if node.get("format") != OWN_FORMAT:
            raise UserError(
                f"{where}: format {node.get('format')} is not {OWN_FORMAT}; use the suite that wrote it"
            )
        return build(ModelConfig, {**node.get("model", {}), **given}, where)
    if family not in families():
        known = ", ".join(["cramming", *families()])
        raise UserError(
            f"{where}: model_type {family!r} is not one that this suite's model covers ({known})"
        )
    if dropout is not None:
        node |= {"embedding_dropout": dropout, "mlp_dropout": dropout}
    start = {field: value for field, value in node.get(START, {}).items() if field in START_FIELDS}
    return build(ModelConfig, from_stock(node, families()[family], where) | start | given, where)


def load_masked_lm(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> MaskedLM:
    """A masked language model from an own folder or a stock one; UserError if its weights lack the head."""
    lacks_head = f"{folder}: an encoder without a masked-LM head (architectures in config.json)"
    require(not _is_bare(folder), f"{lacks_head}; take a model of objective=mlm")
    config = load_encoder_config(folder, dropout, attention_dropout)
    model = MaskedLM(config)
    model.load_state_dict(_own_state(folder, config, model.state_dict()))
    return model


def load_weights(model: MaskedLM, folder: Path) -> bool:
    """Load a folder's weights into a model of its configuration; return whether the folder has a masked-LM head.

    Without one the model keeps its own head, and only the encoder is loaded.
    """
    state = model.state_dict()
    family, found = _weights_of(folder)
    head = [name for name in state if not name.startswith("encoder.")]
    names = _names(family, model.config, head)
    if family is None:
        has_head = not _is_bare(folder)
    else:
        has_head = all(name in found for own in head for name in names[own])
    wanted = {name: p for name, p in state.items() if has_head or name not in head}
    model.load_state_dict(_own_state(folder, model.config, wanted), strict=has_head)
    return has_head


def load_exported(folder: Path) -> MaskedLM | Encoder:
    """What `save_pretrained` was given: a masked language model, or an encoder that never had its head."""
    return load_encoder(folder) if _is_bare(folder) else load_masked_lm(folder)


def _is_bare(folder: Path) -> bool:
    """Whether the folder says that its encoder has no head; tied to its embeddings a head may have no weight."""
    bare = {AUTO_CLASSES["AutoModel"], *(family.encoder for family in families().values())}
    return bool(bare & {*(_read_config(folder).get("architectures") or ())})


def load_encoder(
    folder: Path,
    kernel: str = "auto",
    dropout: float | None = None,
    attention_dropout: float | None = None,
) -> Encoder:
    """The encoder alone: for fine-tuning, also from checkpoints without a masked-LM head (`BertModel` and the like)."""
    config = load_encoder_config(folder, dropout, attention_dropout)
    encoder = Encoder(config, kernel)
    state = _own_state(
        folder, config, {f"encoder.{name}": p for name, p in encoder.state_dict().items()}
    )
    encoder.load_state_dict(
        {name.removeprefix("encoder."): tensor for name, tensor in state.items()}
    )
    return encoder


def _own_state(
    folder: Path, config: ModelConfig, wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The parameters that are wanted, in these shapes, from whatever names the folder's weights have."""
    family, found = _weights_of(folder)
    names = _names(family, config, wanted)
    if missing := [name for own in wanted for name in names[own] if name not in found]:
        raise UserError(f"{folder}: its weights lack {missing[0]}")
    ignored = (
        families()[family].ignored if family else r"(?!encoder\.blocks\.)"
    )  # of an own folder only layers count
    known = {name for stock in names.values() for name in stock}
    if unexpected := [name for name in found if name not in known and not re.match(ignored, name)]:
        raise UserError(
            f"{folder}: unexpected weight {unexpected[0]}; config.json describes no such part"
        )
    for own, tensor in wanted.items():
        for name, part in zip(names[own], tensor.chunk(len(names[own]))):
            shapes = f"{list(found[name].shape)}, config.json makes it {list(part.shape)}"
            require(
                found[name].shape == part.shape, f"{folder}: weight {name} has the shape {shapes}"
            )
    return {
        own: torch.cat([found[name] for name in names[own]]).to(torch.float32) for own in wanted
    }


def _weights_of(folder: Path) -> tuple[str | None, dict[str, Tensor]]:
    """Return the stock family, None of an own folder, and the weights by their names in the masked-LM class."""
    kind = _read_config(folder)["model_type"]
    family = None if kind == "cramming" else kind
    weights = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    require(weights, f"{folder}: no weights; expected {' or '.join(WEIGHT_FILES)}")
    prefix = families()[family].prefix if family else "encoder."
    return family, _with_prefix(read_weights(weights[0]), prefix)


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
    require(
        path.is_file(),
        f"{folder}: no config.json; expected a model folder, such as runs/<name>/final",
    )
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a model configuration ({error})") from None


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a weight file, of safetensors or of torch; UserError where it cannot be read."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{file}: the weights cannot be read ({str(error).splitlines()[0]})"
        ) from None
