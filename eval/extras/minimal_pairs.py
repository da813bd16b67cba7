"""Minimal pairs: does a masked language model find the grammatical one of two sentences likelier? No fine-tuning.

The files are BLiMP's (Warstadt et al. 2020): JSON lines with `sentence_good` and `sentence_bad`, one paradigm per file.
A sentence's pseudo-log-likelihood is the sum over its tokens of the log probability of each when it alone is masked
(Salazar et al. 2020, "Masked Language Model Scoring"), or when the later tokens of its word are masked too (Kauf and
Ivanova 2023, "A Better Way to Do Masked Language Model Scoring"): a word of several tokens then gives away less of
itself. Equal likelihoods count as a miss; chance is 50.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cramming.config import UserError, require, settings_hash
from cramming.model.attention import Packing
from cramming.model.load import load_masked_lm
from cramming.progress import Progress
from cramming.runlog import MinimalPairs
from eval.finetune.encode import Offsets, load_word_encoder, mask_and_frame
from eval.finetune.loop import by_length
from eval.finetune.models import LOADING_INFO, ModelSource, missing_weights, quiet_transformers

BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}
FIELDS = ("sentence_good", "sentence_bad")
DEFINITION = (
    "share of pairs whose grammatical sentence has the higher pseudo-log-likelihood, times 100;"
    " mean over paradigms; by word: the later tokens of a token's word are masked with it"
)
WORD = re.compile(r"\w+|[^\w\s]")

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
    """Return accuracies per paradigm and their means; `known` itself if it is of this model and these pairs."""
    key = settings_hash(source.sha256, source.settings, paradigms, max_length, DEFINITION)
    if known is not None and known.key == key:
        return known
    encode = load_word_encoder(source.folder, source.is_native, max_length, source.vocab_size)
    mask, frame = mask_and_frame(source.folder, source.is_native)
    model = open_masked_lm(source, device)
    batch_tokens = BATCH_TOKENS[device.type]
    scores = {}
    with Progress("minimal pairs", sum(len(p.good) for p in paradigms), "pairs") as bar:
        for paradigm in paradigms:
            sides = []
            for texts in (paradigm.good, paradigm.bad):
                sentences, offsets = encode(texts)
                ends = [word_ends(*each) for each in zip(texts, offsets, strict=True)]
                sides.append(likelihoods(sentences, ends, mask, frame, model, batch_tokens))
            accuracy, word_accuracy = (100 * (sides[0] > sides[1]).mean(axis=1)).tolist()
            scores[paradigm.name] = {
                "accuracy": accuracy,
                "word_accuracy": word_accuracy,
                "pairs": len(paradigm.good),
            }
            bar.advance(len(paradigm.good))
    return MinimalPairs(
        model=source.label,
        model_sha256=source.sha256,
        key=key,
        definition=DEFINITION,
        accuracy=float(np.mean([each["accuracy"] for each in scores.values()])),
        word_accuracy=float(np.mean([each["word_accuracy"] for each in scores.values()])),
        paradigms=scores,
    )


def word_ends(text: str, offsets_L: Sequence[Offsets]) -> list[int]:
    """Return for each token the position behind the last token of its word; a special token is a word by itself."""
    starts = [match.start() for match in WORD.finditer(text)]
    words_L = []
    for position, (start, end) in enumerate(offsets_L):
        words_L.append(bisect_right(starts, end - 1) if end > start else -1 - position)
    ends: list[int] = []
    for _, tokens in groupby(words_L):
        size = len(list(tokens))
        ends += [len(ends) + size] * size
    return ends


def likelihoods(
    sentences: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    mask: int,
    frame: Set[int],
    model: LogProbabilities,
    batch_tokens: int,
) -> np.ndarray:
    """Return both pseudo-log-likelihoods of each sentence, float64 [2, N]: token by token, and by word.

    `ends`: the position behind the last token of each token's word. Special tokens, `frame`, are not scored. Masked
    copies are batched in order of length, which keeps padding short.
    """
    total_2N = np.zeros((2, len(sentences)))
    copies = []  # (index of the sentence, position of the scored token, position behind the last masked one)
    for index, ids in enumerate(sentences):
        for position, token in enumerate(ids):
            if token not in frame:
                masks = {position + 1, ends[index][position]}
                copies += [(index, position, end) for end in sorted(masks)]
    if not copies:
        return total_2N
    lengths = torch.tensor([len(sentences[index]) for index, *_ in copies])
    for batch_C in by_length(lengths, batch_tokens):
        batch = [copies[number] for number in batch_C.tolist()]
        targets, masked = [], []
        for owner, position, end in batch:
            ids_L = torch.tensor(sentences[owner])
            targets.append(ids_L[position])
            masked.append(ids_L.index_fill(0, torch.arange(position, end), mask))
        positions = torch.tensor([position for _, position, _ in batch])
        values = model(masked, positions, torch.stack(targets)).double().cpu().tolist()
        for (owner, position, end), value in zip(batch, values, strict=True):
            total_2N[0, owner] += value * (end == position + 1)
            total_2N[1, owner] += value * (end == ends[owner][position])
    return total_2N


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
