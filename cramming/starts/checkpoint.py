"""A start from a published checkpoint (`start=checkpoint`): its model section, its tokenizer and its weights.

When a recipe is composed, `completed` writes the checkpoint's model and tokenizer into it, so that it says in full what
is trained. The weights are read on the clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from cramming.config import UserError, require, shown
from cramming.data.corpus import Corpus
from cramming.data.manifest import TOKENIZER
from cramming.engine import Engine
from cramming.hub import download_model
from cramming.model.heads import MaskedLM
from cramming.model.load import load_encoder_config, load_weights
from cramming.progress import say
from cramming.recipe import CheckpointStart, Config

COUNTED_AT_ONCE = 1 << 22  # tokens
SUPPORTED = (
    "BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, MPNet, ModernBERT and models of this suite"
)
FREE = ("dropout", "attention_dropout")  # settings of the model that may differ from the checkpoint


def completed(recipe: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a recipe with the model of `start.path`, and with its tokenizer where none is set.

    `overrides` as they were typed: those of the model's rates of dropout hold. Raises UserError for any other, and
    where there is no checkpoint that this suite's model covers.
    """
    start = recipe["start"]
    if start["path"] is None:
        return dict(recipe)
    folder = checkpoint_folder(str(start["path"]))
    model = _model_of(folder)
    for word in overrides:
        setting = word.lstrip("+").partition("=")[0]
        require(
            setting != "model",
            f"{word}: start.path={folder} decides about the model. Leave one of them out.",
        )
        name = setting.removeprefix("model.")
        if not setting.startswith("model.") or name not in model:
            continue
        typed = recipe["model"][name]
        require(
            name in FREE or typed == model[name],
            f"{setting}={shown(typed)}: the checkpoint has {shown(model[name])}. Leave it out.",
        )
        model[name] = typed
    tokenizer = dict(recipe["tokenizer"])
    if tokenizer["path"] is None:
        tokenizer["path"] = str(_tokenizer_file(folder))
    return {
        **recipe,
        "start": {**start, "path": str(folder)},
        "model": model,
        "tokenizer": tokenizer,
    }


def checkpoint_folder(path: str) -> Path:
    """Return the folder of a checkpoint, a local one or the hub's of this name; UserError where there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = download_model(path, "start.path")
    return folder.absolute()


def set_weights(engine: Engine, corpus: Corpus, config: Config) -> None:
    """Load the checkpoint's weights; all processes get those of the first."""
    assert isinstance(config.start, CheckpointStart) and config.start.path is not None
    model = engine.whole_model(config)
    if isinstance(model, MaskedLM):  # rank 0's
        _require_same_tokenizer(corpus, config.start.path)
        load_checkpoint(model, config.start.path, corpus)
    if engine.strategy:
        engine.strategy.load_weights(model.state_dict() if model else {})


def load_checkpoint(model: MaskedLM, folder: Path, corpus: Corpus) -> bool:
    """Load a checkpoint; return whether it has a masked-LM head.

    A new head has the logarithm of the training text's token frequencies as its bias: the best guess without context.
    """
    has_head = load_weights(model, folder)
    if has_head:
        return True
    say(f"{folder}: no masked-LM head in the checkpoint, so training begins with a new one")
    if model.decoder_bias is not None:
        frequencies_V = _frequencies(corpus, len(model.decoder_bias))
        with torch.no_grad():
            model.decoder_bias.copy_(frequencies_V.log())
    return False


def _frequencies(corpus: Corpus, vocab_size: int) -> Tensor:
    """Return the shares of the entries in the training text, fp64 [V], each counted once more than it is there."""
    stream = corpus.stream("train")
    counts_V = np.zeros(vocab_size)
    for first in range(0, stream.num_tokens, COUNTED_AT_ONCE):
        length = min(COUNTED_AT_ONCE, stream.num_tokens - first)
        ids_T = stream.gather(np.array([first]), length)[0]
        counts_V += np.bincount(ids_T, minlength=vocab_size)
    counts_V[list(corpus.special_ids)] = 0
    counts_V += 1
    return torch.from_numpy(counts_V / counts_V.sum())


def _model_of(folder: Path) -> dict[str, Any]:
    try:
        return asdict(load_encoder_config(folder))
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}. Give a checkpoint of {SUPPORTED}.") from None


def _tokenizer_file(folder: Path) -> Path:
    file = folder / TOKENIZER
    require(
        file.is_file(),
        f"start.path={folder}: no {TOKENIZER} there."
        " transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one.",
    )
    return file


def _require_same_tokenizer(corpus: Corpus, folder: Path) -> None:
    """Raise UserError where the corpus has other entries than the checkpoint's tokenizer."""
    file = _tokenizer_file(folder)
    entries, theirs = (
        Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
        for path in (file, corpus.tokenizer_file)
    )
    require(
        entries == theirs,
        f"data.corpus={corpus.folder}: its tokenizer is not the checkpoint's."
        f" Prepare it with tokenizer.path={file}.",
    )
