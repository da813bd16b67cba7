"""A start from word vectors that are counted from the text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from cramming.data.corpus import TokenStream
from cramming.model.config import ModelConfig
from cramming.model.heads import MaskedLM
from cramming.recipe import CooccurrenceStart
from cramming.starts.cooccurrence import _decompose, count_pairs, start_from_text, word_vectors

VOCAB, SPECIAL, CPU = 40, (0, 1, 2), torch.device("cpu")
CONFIG = CooccurrenceStart(
    name="cooccurrence", window=2, max_tokens=1_000_000, embedding_std=0.1, decoder_std=0.05
)
MODEL = ModelConfig(
    VOCAB, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_length=64
)


def two_topics(tokens: int = 20_000) -> TokenStream:
    """Stretches of ten tokens from 3..19 or from 20..37; 38 and 39 never occur; a special token between stretches."""
    rng = np.random.default_rng(0)
    topics = rng.integers(0, 2, tokens // 10)
    ids = np.where(
        topics[:, None] == 0,
        rng.integers(3, 20, (len(topics), 10)),
        rng.integers(20, 38, (len(topics), 10)),
    )
    return TokenStream.of_array(
        np.pad(ids, ((0, 0), (1, 0)), constant_values=1).reshape(-1), np.array([0])
    )


def test_pairs_are_counted_as_by_hand() -> None:
    ids = np.array([3, 4, 1, 4, 5, 3])
    counts = count_pairs(
        TokenStream.of_array(ids, np.array([0])), 6, (1,), window=2, max_tokens=100
    ).toarray()
    expected = np.zeros((6, 6))
    for first, a in enumerate(ids):
        for second, b in enumerate(ids):
            distance = abs(first - second)
            if 0 < distance <= 2 and 1 not in (a, b):
                expected[a, b] += (3 - distance) / 2
    np.testing.assert_allclose(counts, expected)


def test_a_bounded_count_reads_the_whole_stream_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cramming.starts.cooccurrence.CHUNK", 50)
    ids = np.arange(1000) % 500  # each pair of neighbours stands for its place
    counts = count_pairs(
        TokenStream.of_array(ids, np.array([0])), 500, (), window=1, max_tokens=200
    )
    assert counts.sum() == 2 * 4 * 49  # four stretches of 50 tokens
    assert (
        counts.diagonal(1).nonzero()[0].max() > 200 and counts.diagonal(1).nonzero()[0].min() == 0
    )


def test_few_tokens_are_still_read_from_all_of_the_text() -> None:
    ids = np.repeat([3, 4], 100_000)  # another source's words in its second half
    counts = count_pairs(
        TokenStream.of_array(ids, np.array([0])), 5, (), window=1, max_tokens=50_000
    ).diagonal()
    assert counts[3] == pytest.approx(counts[4], rel=0.05) and counts.sum() == pytest.approx(
        100_000, rel=0.01
    )


def test_words_of_one_topic_are_alike() -> None:
    pairs = count_pairs(two_topics(), VOCAB, SPECIAL, window=2, max_tokens=1_000_000)
    vectors, known = word_vectors(pairs, 2, 0, CPU)
    assert not known[[*SPECIAL, 38, 39]].any() and known[3:38].all()
    torch.testing.assert_close(vectors[known].square().mean(1), torch.ones(35))
    alike = vectors @ vectors.T
    assert min(alike[3:20, 3:20].mean(), alike[20:38, 20:38].mean()) > alike[3:20, 20:38].mean() + 2
    repeated, _ = word_vectors(pairs, 2, 0, CPU)
    assert torch.equal(vectors, repeated)


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_large_seeds_will_do(seed: int) -> None:
    pairs = count_pairs(two_topics(2_000), VOCAB, SPECIAL, window=2, max_tokens=1_000_000)
    vectors, known = word_vectors(pairs, 2, seed, CPU)
    assert known[3:38].all() and vectors.isfinite().all()


def test_entries_beside_no_other_are_unknown_at_every_width() -> None:
    """Rounding gives them vectors that are not zero, the longer the more columns there are."""
    generator = np.random.default_rng(0)
    stream = TokenStream.of_array(generator.integers(3, 900, 60_000), np.array([0]))
    vectors, known = word_vectors(count_pairs(stream, 1000, SPECIAL, 2, 1_000_000), 700, 0, CPU)
    assert known[3:900].all() and not known[:3].any() and not known[900:].any()
    assert not vectors[~known].any()


@pytest.mark.parametrize("width", [3, 8, 40, 50])
def test_the_factors_are_those_of_a_full_decomposition(width: int) -> None:
    """Up to their signs: products of vectors are compared. Beyond the matrix's size the columns are zero."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((VOCAB, VOCAB)))[0] for _ in range(2))
    matrix = (left * np.geomspace(10, 1e-3, VOCAB) @ right.T).astype(np.float32)
    factors = _decompose(sparse.csr_array(matrix), width, 0, CPU)
    expected = left[:, :width] * np.geomspace(10, 1e-3, VOCAB)[:width] ** 0.25
    assert factors.shape == (VOCAB, width)
    torch.testing.assert_close(
        factors @ factors.T, torch.from_numpy(expected @ expected.T).float(), rtol=0, atol=0.02
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_start_from_text_knows_the_words(tied: bool) -> None:
    torch.manual_seed(0)
    model = MaskedLM(replace(MODEL, tie_embeddings=tied))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    start_from_text(model, two_topics(), SPECIAL, CONFIG, 0, CPU)
    changed = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    decoder = set() if tied else {"decoder_weight", "decoder_bias"}
    assert (
        changed
        == {"encoder.embeddings.tokens.weight", "encoder.embeddings.token_types.weight"} | decoder
    )
    weight = model.encoder.embeddings.tokens.weight
    assert torch.allclose(weight.square().mean(1)[3:38].sqrt(), torch.tensor(0.1))
    if not tied:
        assert (
            model.decoder_bias is not None
            and model.decoder_bias.exp().sum().item() == pytest.approx(1.0)
        )
        assert model.decoder_bias[10] > model.decoder_bias[39]


@pytest.mark.parametrize("memory", ["memory.offload_optimizer=true", "memory=offload-all"])
def test_weights_counted_from_the_text_outlive_a_step_with_offloading(
    start: Callable[..., Path], result: Callable[[Path], dict[str, Any]], memory: str
) -> None:
    """The optimizer's copies in main memory were made before the start and follow it."""
    runs = [
        start(m, "start=cooccurrence", "budget.steps=1", name=n)
        for n, m in (("a", "memory.checkpoint_every=0"), ("b", memory))
    ]
    assert len({result(run)["final_sha256"] for run in runs}) == 1


def test_an_empty_text_leaves_random_vectors() -> None:
    model = MaskedLM(MODEL)
    start_from_text(
        model,
        TokenStream.of_array(np.ones(64, dtype=np.int64), np.array([0])),
        SPECIAL,
        CONFIG,
        0,
        CPU,
    )
    assert all(parameter.isfinite().all() for parameter in model.parameters())
