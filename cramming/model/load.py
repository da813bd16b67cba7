"""Model folders read: results of this suite, and stock checkpoints of its families (export.py)."""

import itertools
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from cramming.config import UserError, build, require
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.export import CRAMMING_FORMAT, START, START_FIELDS, weight_names
from cramming.model.heads import MaskedLM
from cramming.model.stock import families, from_stock

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first existing file is read
# classes of transformers with a fine-tuned head, and all those without a masked-LM head
FINE_TUNED_CLASS = re.compile("Classification$|QuestionAnswering$|MultipleChoice$")
BARE_CLASS = re.compile(rf"(?<!LMHead)Model$|{FINE_TUNED_CLASS.pattern}")


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


def load_masked_lm_config(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> ModelConfig:
    """Return the configuration of a folder's masked language model; raise UserError for an encoder without a head."""
    lacks_head = f"{folder}: an encoder without a masked-LM head (architectures in config.json)"
    require(not _is_bare(folder), f"{lacks_head}. Use a model of objective=mlm.")
    return load_encoder_config(folder, dropout, attention_dropout)


def load_masked_lm(
    folder: Path, dropout: float | None = None, attention_dropout: float | None = None
) -> MaskedLM:
    """Return the masked language model of a folder; raise UserError if its weights lack the head."""
    model = MaskedLM(load_masked_lm_config(folder, dropout, attention_dropout))
    config = model.config
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
        stored_names = weight_names(family, model.config, head)
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
    stored_names = weight_names(family, config, wanted)
    state = {}
    for parameter, tensor in wanted.items():
        names = stored_names[parameter]
        for name, part in zip(names, tensor.chunk(len(names))):
            require(name in stored, f"{folder}: its weights lack {name}. Get the folder anew.")
            shapes = f"{list(stored[name].shape)}, config.json makes it {list(part.shape)}"
            has_shape = stored[name].shape == part.shape
            require(has_shape, f"{folder}: weight {name} has the shape {shapes}. Get it anew.")
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
    prefix = families()[family].prefix if family else "encoder."
    return family, _with_prefix(read_weights(weight_file(folder)), prefix)


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
        raise UserError(f"{path}: not a model configuration ({error}). Get it anew.") from None


def weight_file(folder: Path) -> Path:
    """Return the weight file of a model folder; raise UserError if it has none."""
    files = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    require(files, f"{folder}: no weights. Expected {' or '.join(WEIGHT_FILES)}.")
    return files[0]


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file of safetensors or torch; raise UserError if it cannot be read."""
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{file}: the weights cannot be read ({str(error).splitlines()[0]}). Get them anew."
        ) from None
