"""Two masked language models on the same held-out text with the same masks.

Losses are of targets that are all shown as [MASK], 15 % of each window. The interval of the difference is a paired
bootstrap over documents (Efron & Tibshirani 1993, section 16.4): documents are drawn anew with replacement, and the
difference of the two mean losses per target is taken each time. Pseudo-perplexity masks one token at a time (Salazar
et al. 2020, "Masked Language Model Scoring", section 2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cramming.data.corpus import Corpus
from cramming.model.attention import Packing
from cramming.model.heads import MaskedLM
from cramming.progress import Progress

RATE = 0.15
SEED = 0
RESAMPLES = 2000
FEW_DOCUMENTS = 20  # with fewer documents the bootstrap resamples windows
PERPLEXITY_WINDOWS, PERPLEXITY_TOKENS = 16, 32
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}


class Window(NamedTuple):
    """Part of a held-out document, framed by the special tokens."""

    document: int
    ids_L: np.ndarray


class Query(NamedTuple):
    """Text as the model sees it, the ascending places of its hidden tokens, and these tokens."""

    ids_L: np.ndarray
    places_M: np.ndarray
    targets_M: np.ndarray


@dataclass(frozen=True)
class Comparison:
    """Losses in nats per target before and after, and the 95 % interval of their difference.

    `unit` is what the bootstrap resampled, "documents" or "windows". Perplexities are pseudo-perplexities.
    """

    text: str
    documents: int
    windows: int
    targets: int
    unit: str
    before: float
    after: float
    low: float
    high: float
    perplexity_before: float
    perplexity_after: float

    @property
    def difference(self) -> float:
        """Loss after minus loss before: below zero is better."""
        return self.after - self.before


def held_out_windows(corpus: Corpus, length: int, max_tokens: int) -> list[Window]:
    """Return windows of at most `length` tokens from held-out documents in a seeded order.

    The document with which the windows have `max_tokens` tokens together is the last.
    """
    stream, special = corpus.stream("validation"), corpus.special_ids
    order = np.random.default_rng(SEED).permutation(stream.num_documents)
    windows_per_document = max(1, -(-max_tokens // (length * stream.num_documents)))
    windows = list[Window]()
    tokens = 0
    for number in order.tolist():
        body = stream.document(number)[1:-1]
        starts = range(0, len(body), length - 2)
        for start in starts[:windows_per_document]:
            ids = np.concatenate([[special.cls], body[start : start + length - 2], [special.sep]])
            windows.append(Window(number, ids))
            tokens += len(ids)
        if tokens >= max_tokens:
            break
    return windows


def masked(windows: Sequence[Window], mask_id: int) -> list[Query]:
    """Return each window with 15 % of its tokens hidden, at least one; the window's number seeds the choice."""
    queries = []
    for number, window in enumerate(windows):
        inside = len(window.ids_L) - 2
        generator = np.random.default_rng([SEED, number])
        count = max(1, round(RATE * inside))
        places_M = 1 + np.sort(generator.choice(inside, count, replace=False))
        queries.append(hidden(window.ids_L, places_M, mask_id))
    return queries


def hidden(ids_L: np.ndarray, places_M: np.ndarray, mask_id: int) -> Query:
    """Return a text with the tokens at these places shown as [MASK]."""
    shown_L = ids_L.copy()
    shown_L[places_M] = mask_id
    return Query(shown_L, places_M, ids_L[places_M])


def one_at_a_time(windows: Sequence[Window], mask_id: int) -> list[Query]:
    """Return one query for each token of each window, in which only this token is hidden.

    Windows are cut to `PERPLEXITY_TOKENS` tokens.
    """
    queries = []
    for window in windows:
        body_L = window.ids_L[1:-1][: PERPLEXITY_TOKENS - 2]
        ids_L = np.concatenate([window.ids_L[:1], body_L, window.ids_L[-1:]])
        for place in range(1, len(ids_L) - 1):
            queries.append(hidden(ids_L, np.array([place]), mask_id))
    return queries


@torch.inference_mode()
def losses(model: MaskedLM, queries: Sequence[Query], title: str) -> list[np.ndarray]:
    """Return the losses of each query's targets [M], in nats."""
    device = model.decoder().device
    results = list[np.ndarray]()
    with Progress(title, sum(len(query.ids_L) for query in queries), "tokens") as bar:
        for batch in _batches(queries, BATCH_TOKENS[device.type]):
            hidden_MD = model.at_targets(*inputs(batch, device))
            targets_M = torch.from_numpy(np.concatenate([query.targets_M for query in batch]))
            losses_M = model.loss(hidden_MD, targets_M.to(device))[2].double().cpu().numpy()
            ends = np.cumsum([len(query.targets_M) for query in batch])
            results += np.split(losses_M, ends[:-1])
            bar.advance(sum(len(query.ids_L) for query in batch))
    return results


def inputs(
    queries: Sequence[Query], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Packing, torch.Tensor]:
    """Return ids [T], positions [T], the packing, and the places of all targets [M]."""
    lengths_S = np.array([len(query.ids_L) for query in queries])
    bounds_S = np.concatenate([[0], np.cumsum(lengths_S)])
    ids_T = np.concatenate([query.ids_L for query in queries]).astype(np.int64)
    positions_T = np.concatenate([np.arange(length) for length in lengths_S])
    places = [start + query.places_M for start, query in zip(bounds_S, queries)]
    places_M = np.concatenate(places)
    packing = Packing(
        torch.from_numpy(bounds_S.astype(np.int32)).to(device), None, int(lengths_S.max())
    )
    return (
        torch.from_numpy(ids_T).to(device),
        torch.from_numpy(positions_T).to(device),
        packing,
        torch.from_numpy(places_M).to(device),
    )


def _batches(queries: Sequence[Query], max_tokens: int) -> list[list[Query]]:
    batches = list[list[Query]]()
    tokens = max_tokens
    for query in queries:
        if tokens + len(query.ids_L) > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(query)
        tokens += len(query.ids_L)
    return batches


def compare(
    before: MaskedLM, after: MaskedLM, corpus: Corpus, text: str, length: int, max_tokens: int
) -> Comparison:
    """Measure both models on the held-out documents of a corpus; `text` is its name on the page."""
    mask_id = corpus.special_ids.mask
    windows = held_out_windows(corpus, length, max_tokens)
    sample = windows[:PERPLEXITY_WINDOWS]
    queries = masked(windows, mask_id)
    singles = one_at_a_time(sample, mask_id)
    sums: list[np.ndarray] = []
    perplexities: list[float] = []
    for model, when in ((before, "before"), (after, "after")):
        window_losses = losses(model, queries, f"{text}, {when}")
        sums.append(np.array([losses_M.sum() for losses_M in window_losses]))
        alone = losses(model, singles, f"{text}, one token at a time, {when}")
        perplexities.append(float(np.exp(np.concatenate(alone).mean())))
    counts_W = np.array([len(query.targets_M) for query in queries])
    units_W = np.array([window.document for window in windows])
    documents = len(set(units_W.tolist()))
    unit = "documents"
    if documents < FEW_DOCUMENTS:
        unit = "windows"
        units_W = np.arange(len(windows))
    low, high = paired_interval(sums[1] - sums[0], counts_W, units_W)
    total = int(counts_W.sum())
    return Comparison(
        text=text,
        documents=documents,
        windows=len(windows),
        targets=total,
        unit=unit,
        before=float(sums[0].sum() / total),
        after=float(sums[1].sum() / total),
        low=low,
        high=high,
        perplexity_before=perplexities[0],
        perplexity_after=perplexities[1],
    )


def paired_interval(
    differences_W: np.ndarray, counts_W: np.ndarray, units_W: np.ndarray
) -> tuple[float, float]:
    """Return the central 95 % of the mean difference per target over resampled units.

    Of each window: the difference summed over its targets, the number of targets, and the number of its unit.
    """
    _, indices_W = np.unique(units_W, return_inverse=True)
    differences_U = np.bincount(indices_W, differences_W)
    counts_U = np.bincount(indices_W, counts_W)
    units = len(counts_U)
    generator = np.random.default_rng(SEED)
    draws_RU = generator.multinomial(units, np.full(units, 1 / units), size=RESAMPLES)
    means_R = (draws_RU @ differences_U) / (draws_RU @ counts_U)
    low, high = np.quantile(means_R, [0.025, 0.975])
    return float(low), float(high)
