"""The validation asks the same of every run: the same tokens, whatever the run's windows, batches and masks are."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from cramming.data.batches import (
    ALL_MASK,
    BERT_MASKING,
    EXCERPT_TOKENS,
    BatchSource,
    HeldOut,
    tokens_per_byte,
    validation_text,
)
from cramming.data.corpus import Corpus, TokenStream
from cramming.objectives.masking import BLOCK, IGNORE, PER_BLOCK, MaskedTargets, Masker
from cramming.record import load_record


def held_out(
    corpus: Corpus,
    length: int,
    packing: Literal["rows", "documents"] = "rows",
    rate: float = 0.15,
    seed: int = 0,
    max_tokens: int = 700,
) -> HeldOut:
    objective = MaskedTargets(rate, 1.0, 0.0)
    masker = Masker(
        objective, corpus.vocab_size, corpus.special_ids.mask, tuple(corpus.special_ids), seed
    )
    return HeldOut(
        BatchSource(corpus.stream("validation"), masker, length, packing, seed), max_tokens
    )


def asked(text: HeldOut, form: MaskedTargets, rows: int) -> list[tuple[int, int, int]]:
    """Place in the text, target and what stands there instead, of every target of all batches."""
    targets, tokens = [], 0
    for batch in text.batches(form, rows):
        valid = batch.target_ids_M != IGNORE
        assert int(valid.sum()) == batch.num_targets
        places = batch.target_positions_M[valid]
        targets += zip(
            (places + tokens).tolist(),
            batch.target_ids_M[valid].tolist(),
            batch.ids_T[places].tolist(),
        )
        tokens += len(batch.ids_T)
    return targets


@pytest.mark.parametrize("form", [BERT_MASKING, ALL_MASK])
def test_the_same_tokens_are_asked_for_whatever_a_run_trains_with(
    tiny_corpus: Path, form: MaskedTargets
) -> None:
    corpus = Corpus.open(tiny_corpus)
    text = held_out(corpus, 32)
    expected = asked(text, form, 4)
    assert expected == sorted(set(expected)) and len({place for place, *_ in expected}) == len(
        expected
    )
    assert all(text.ids_N[place] == target > 4 for place, target, _ in expected)
    for length, rows, packing, rate in itertools.product(
        (16, 31, 64, 350), (1, 3, 64), ("rows", "documents"), (0.4,)
    ):
        other = held_out(corpus, length, packing, rate, seed=7)  # type: ignore[arg-type]
        assert asked(other, form, rows) == expected, (length, rows, packing)


def test_shapes_never_change_and_rows_have_as_many_places(tiny_corpus: Path) -> None:
    """Batches of one size, the last one filled up; the places of a row ascend and lie in it."""
    for packing, rows in (("rows", 5), ("documents", 5), ("rows", 1000)):
        batches = held_out(Corpus.open(tiny_corpus), 24, packing).batches(BERT_MASKING, rows)  # type: ignore[arg-type]
        shapes = {
            tuple(t.shape for t in (b.ids_T, b.packing.bounds_S, b.target_ids_M)) for b in batches
        }
        assert len(shapes) == 1
        for batch in batches:
            count = len(batch.ids_T) // 24
            places = batch.target_positions_M.view(count, -1)
            assert (places.diff(dim=1) > 0).all()
            assert torch.equal(places // 24, torch.arange(count)[:, None].expand_as(places))


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_a_text_of_one_row_is_one_batch(
    tiny_corpus: Path, packing: Literal["rows", "documents"]
) -> None:
    text = held_out(Corpus.open(tiny_corpus), 40, packing, max_tokens=40)
    assert len(text.ids_N) == 40
    (batch,) = text.batches(MaskedTargets(0.15, 0.0, 0.0), 4)  # targets stay as they are
    assert batch.ids_T.tolist() == text.ids_N.tolist()
    assert batch.num_targets == text.is_target_N.sum()
    bounds = {0, *text.starts.tolist(), 40} if packing == "documents" else {0, 40}
    assert set(batch.packing.bounds_S.tolist()) == bounds


def test_three_of_twenty_tokens_are_targets(tiny_corpus: Path) -> None:
    masker = Masker(MaskedTargets(0.4, 1.0, 0.0), 1000, 4, (0, 1, 2, 3, 4), 0)
    ids = np.random.default_rng(0).integers(5, 1000, 40_000)
    ids[5000:5018] = 3  # of this block two tokens are regular
    text = HeldOut(
        BatchSource(TokenStream.of_array(ids, np.array([0])), masker, 128, "rows", 0), 20_000
    )
    counts = text.is_target_N[: len(text.ids_N) // BLOCK * BLOCK].reshape(-1, BLOCK).sum(1)
    assert set(counts) <= {2, PER_BLOCK} and (counts == PER_BLOCK).mean() > 0.99
    targets = asked(text, BERT_MASKING, 16)
    shares = [np.mean([shown == kind for _, _, shown in targets]) for kind in (4,)]
    unchanged_share = np.mean([shown == target for _, target, shown in targets])
    assert shares[0] == pytest.approx(0.8, abs=0.03) and unchanged_share == pytest.approx(
        0.1, abs=0.02
    )
    assert {shown for _, _, shown in asked(text, ALL_MASK, 16)} == {4}


def test_the_text_is_spread_over_the_whole_split() -> None:
    """Also where it is a part only: documents lie in the order of their sources."""
    stream = TokenStream.of_array(np.arange(100_000), np.arange(0, 100_000, 700))
    ids, starts = validation_text(stream, 10 * EXCERPT_TOKENS + 5)
    assert len(ids) == 10 * EXCERPT_TOKENS and ids[0] == 0 and ids[-1] == 99_999
    assert (np.diff(ids[::EXCERPT_TOKENS]) > 9000).all()
    assert set(starts) == {
        place for place, token in enumerate(ids) if token % 700 == 0 or place % EXCERPT_TOKENS == 0
    }
    assert len(validation_text(stream, 300)[0]) == 300
    assert len(validation_text(TokenStream.of_array(np.arange(50), np.array([0])), 300)[0]) == 50


def test_a_validation_loss_does_not_depend_on_the_runs_own_masking(
    start: Callable[..., Path],
) -> None:
    """After a first step, whose learning rate is 0, all have the weights that the seed gives."""
    runs = {
        rate: start(
            "budget.steps=1", f"objective.rate={rate}", f"train.micro_batch={rows}", name=f"r{rate}"
        )
        for rate, rows in ((0.15, 4), (0.4, 8))
    }
    first, second = (load_record(run)["pretrain"]["validation"] for run in runs.values())
    for key in ("loss", "all_mask_loss", "accuracy", "targets", "tokens"):
        assert first[key] == pytest.approx(second[key], rel=1e-5), key
    assert first["loss"] != first["all_mask_loss"] and first["targets"] < 0.15 * first["tokens"] + 3
    assert first["bits_per_byte"] is None  # a corpus without a count of its bytes


def test_tokens_per_byte_are_those_of_all_tokens(tiny_corpus: Path) -> None:
    """Special tokens do not count, so that vocabularies compare; None where bytes were not counted."""
    manifest = Corpus.open(tiny_corpus).manifest
    documents = sum(shard.documents for shards in manifest.splits.values() for shard in shards)
    counts: dict[str, Any] = {"tokens": 1000 + 2 * documents, "bytes": 4000}
    assert tokens_per_byte(dataclasses.replace(manifest, statistics=counts)) == 0.25
    assert tokens_per_byte(manifest) is None
