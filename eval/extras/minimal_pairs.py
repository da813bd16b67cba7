"""Minimal pairs: does a masked language model find the grammatical one of two sentences likelier? No fine-tuning.

The files are BLiMP's (Warstadt et al. 2020): JSON lines with `sentence_good` and `sentence_bad`, one paradigm per file.
A sentence's pseudo-log-likelihood is the sum over its tokens of the log probability of each when it alone is masked
(Salazar et al. 2020, "Masked Language Model Scoring"). Equal likelihoods count as a miss; chance is 50.
"""

import json
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cramming.config import UserError, require, settings_hash
from cramming.model.attention import Packing
from cramming.model.export import load_masked_lm
from cramming.progress import Progress
from cramming.runlog import MinimalPairs
from eval.finetune.encode import load_encoder, mask_and_frame
from eval.finetune.loop import by_length
from eval.finetune.models import LOADING_INFO, ModelSource, missing_weights, quiet_transformers

BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}
FIELDS = ("sentence_good", "sentence_bad")
DEFINITION = (
    "share of pairs whose grammatical sentence has the higher pseudo-log-likelihood, times 100;"
    " mean over paradigms"
)

# Masked copies, one [length] tensor each, and the masked place of each -> log probability of `targets` there.
LogProbabilities = Callable[[list[Tensor], Tensor, Tensor], Tensor]


class Pairs(NamedTuple):
    """One paradigm: grammatical and ungrammatical sentences, side by side."""

    name: str
    good: list[str]
    bad: list[str]


def read_pairs(folder: Path) -> list[Pairs]:
    """Return every paradigm of a folder; raise UserError with file and line for malformed data."""
    files = sorted(folder.glob("*.jsonl"))
    require(
        files,
        f"eval.minimal_pairs={folder}: no .jsonl files. Give a folder with the data files of BLiMP.",
    )
    paradigms = []
    for file in files:
        rows = []
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                row = json.loads(line)
                rows.append(tuple(row[field] for field in FIELDS))
                "".join(rows[-1]).encode()  # fails unless all are text without unpaired surrogates
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{file}:{number}: not a JSON object with texts {' and '.join(FIELDS)}."
                ) from None
        require(rows, f"{file}: no pairs in this file")
        good, bad = (list(column) for column in zip(*rows))
        paradigms.append(Pairs(file.stem, good, bad))
    return paradigms


def score_pairs(
    source: ModelSource,
    paradigms: Sequence[Pairs],
    device: torch.device,
    max_length: int,
    known: MinimalPairs | None,
) -> MinimalPairs:
    """Return accuracy per paradigm and its mean; `known` itself if it is of this model and these pairs."""
    key = settings_hash(source.sha256, source.settings, paradigms, max_length)
    if known is not None and known.key == key:
        return known
    encode = load_encoder(source.folder, source.is_native, max_length, source.vocab_size)
    mask, frame = mask_and_frame(source.folder, source.is_native)
    model = open_masked_lm(source, device)
    batch_tokens = BATCH_TOKENS[device.type]
    scores = {}
    with Progress("minimal pairs", sum(len(p.good) for p in paradigms), "pairs") as bar:
        for paradigm in paradigms:
            good, bad = (
                likelihoods(encode((sentences,))[0], mask, frame, model, batch_tokens)
                for sentences in (paradigm.good, paradigm.bad)
            )
            accuracy = 100 * float((good > bad).mean())
            scores[paradigm.name] = {"accuracy": accuracy, "pairs": len(good)}
            bar.advance(len(good))
    return MinimalPairs(
        model=source.label,
        model_sha256=source.sha256,
        key=key,
        definition=DEFINITION,
        accuracy=float(np.mean([each["accuracy"] for each in scores.values()])),
        paradigms=scores,
    )


def likelihoods(
    sentences: Sequence[Sequence[int]],
    mask: int,
    frame: Set[int],
    model: LogProbabilities,
    batch_tokens: int,
) -> np.ndarray:
    """Return the pseudo-log-likelihood of each sentence, float64 [N]. Special tokens, `frame`, are not scored.

    Masked copies are batched in order of length, which keeps padding short.
    """
    total_N = np.zeros(len(sentences))
    copies = []  # (index of the sentence, position of its masked token)
    for index, ids in enumerate(sentences):
        copies += [(index, position) for position, token in enumerate(ids) if token not in frame]
    if not copies:
        return total_N
    lengths = torch.tensor([len(sentences[index]) for index, _ in copies])
    for batch_C in by_length(lengths, batch_tokens):
        owners, positions = zip(*(copies[number] for number in batch_C.tolist()))
        targets, masked = [], []
        for owner, position in zip(owners, positions):
            ids_L = torch.tensor(sentences[owner])
            targets.append(ids_L[position])
            masked.append(ids_L.index_fill(0, torch.tensor(position), mask))
        values = model(masked, torch.tensor(positions), torch.stack(targets))
        np.add.at(total_N, list(owners), values.double().cpu().numpy())
    return total_N


def open_masked_lm(source: ModelSource, device: torch.device) -> LogProbabilities:
    """Return the model's log probabilities; UserError where it has no masked-LM head."""
    try:
        return (_own_model if source.is_native else _stock_model)(source.folder, device)
    except UserError as error:
        raise UserError(f"eval.minimal_pairs: {error}. Or set eval.minimal_pairs=null.") from None


def _own_model(folder: Path, device: torch.device) -> LogProbabilities:
    model = load_masked_lm(folder, dropout=0.0, attention_dropout=0.0).to(device).eval()

    @torch.inference_mode()
    def log_probabilities(copies: list[Tensor], places: Tensor, targets: Tensor) -> Tensor:
        lengths_S = torch.tensor([len(copy) for copy in copies])
        bounds_S = torch.cat([torch.zeros(1, dtype=torch.long), lengths_S.cumsum(0)])
        positions_T = torch.cat([torch.arange(len(copy)) for copy in copies]).to(device)
        packing = Packing(bounds_S.int().to(device), None, int(lengths_S.max()))
        masked_M = (bounds_S[:-1] + places).to(device)
        logits_MV = model.logits(torch.cat(copies).to(device), positions_T, packing, masked_M)
        return logits_MV.float().log_softmax(-1).gather(1, targets.to(device)[:, None]).squeeze(1)

    return log_probabilities


def _stock_model(folder: Path, device: torch.device) -> LogProbabilities:
    from transformers import AutoModelForMaskedLM

    with quiet_transformers(folder, "no masked language model"):
        model, loaded = AutoModelForMaskedLM.from_pretrained(
            folder, dtype=torch.float32, **LOADING_INFO
        )
    missing = missing_weights(loaded)
    require(
        not missing,
        f"{folder}: no masked language model: its weights lack {', '.join(missing[:3])}",
    )
    model.to(device).eval()

    @torch.inference_mode()
    def log_probabilities(copies: list[Tensor], places: Tensor, targets: Tensor) -> Tensor:
        ids_SL = torch.nn.utils.rnn.pad_sequence(
            copies, batch_first=True, padding_value=model.config.pad_token_id or 0
        )
        valid_SL = (
            torch.arange(ids_SL.shape[1]) < torch.tensor([len(copy) for copy in copies])[:, None]
        )
        logits_SLV = model(
            input_ids=ids_SL.to(device), attention_mask=valid_SL.long().to(device)
        ).logits
        logits_SV = logits_SLV[torch.arange(len(copies), device=device), places.to(device)]
        return logits_SV.float().log_softmax(-1).gather(1, targets.to(device)[:, None]).squeeze(1)

    return log_probabilities
