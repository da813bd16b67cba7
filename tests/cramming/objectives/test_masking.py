"""Masks: a pure function of seed, sample and position, with the promised counts and shares."""

from typing import Any

import numpy as np
import pytest

from cramming.config import UserError, build
from cramming.objectives import OBJECTIVES
from cramming.objectives.causal import CausalObjective, NextTokens
from cramming.objectives.masking import IGNORE, MaskedTargets, Masker, hash64
from cramming.objectives.mlm import MaskedObjective, Phase

VOCAB, SPECIAL, MASK = 1000, (0, 1, 2, 3, 4), 4


SHARES = {"rate": 0.25, "mask_share": 0.8, "random_share": 0.1}


def masker(seed: int = 0, **changes: Any) -> Masker:
    return Masker(MaskedTargets(**{**SHARES, **changes}), VOCAB, MASK, SPECIAL, seed)


def text(rows: int, length: int, special_share: float = 0.1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, VOCAB, (rows, length))
    return np.where(
        rng.random((rows, length)) < special_share, rng.integers(0, 5, (rows, length)), ids
    )


@pytest.mark.parametrize("length", [1, 2, 7, 128, 512])
@pytest.mark.parametrize("rate", [0.01, 0.15, 0.25, 0.9])
def test_every_row_has_the_same_number_of_targets_each_at_another_place(
    length: int, rate: float
) -> None:
    first_masker = masker(rate=rate)
    count = first_masker.targets.per_row(length)
    assert count == max(1, round(rate * length))
    masked = first_masker(text(9, length, 0.0), np.arange(9))
    places = masked.target_positions_M.reshape(9, count)
    assert all(len(set(row)) == count for row in places)
    assert np.array_equal(places // length, np.repeat(np.arange(9)[:, None], count, 1))
    assert (masked.target_ids_M != IGNORE).all()


def test_a_later_phase_has_fewer_of_the_same_targets() -> None:
    objective = MaskedObjective(
        name="mlm", **SHARES, phases=(Phase(at=0.5, rate=0.15), Phase(at=0.9, rate=0.05))
    )
    rates = [objective.at(progress).rate for progress in (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)]
    assert rates == [0.25, 0.25, 0.15, 0.15, 0.05, 0.05]
    assert objective.largest_phase == objective.at(0.0) == MaskedTargets(**SHARES)
    places = [
        masker(rate=objective.at(p).rate)(text(9, 100), np.arange(9)).target_positions_M
        for p in (0.0, 0.5, 0.9)
    ]
    assert [len(positions) for positions in places] == [9 * 25, 9 * 15, 9 * 5]
    assert set(places[0]) > set(places[1]) > set(places[2])


def test_a_causal_phase_ends_at_until() -> None:
    objective = CausalObjective(name="causal", **SHARES, until=0.4)
    causal = [objective.at(progress).is_causal for progress in (0.0, 0.39, 0.4, 1.0)]
    assert causal == [True, True, False, False] and objective.kind == "causal, then mlm"
    assert objective.largest_phase == objective.at(0.0)  # as many targets as later, and masks
    assert CausalObjective(name="causal", **SHARES, until=1.0).kind == "causal"


@pytest.mark.parametrize("rate", [0.01, 0.25, 0.99])
@pytest.mark.parametrize("special_share", [0.0, 0.5, 1.0])
def test_a_causal_target_is_the_next_token_and_nothing_is_hidden(
    rate: float, special_share: float
) -> None:
    ids = text(50, 64, special_share)
    causal_masker = Masker(NextTokens(rate), VOCAB, MASK, SPECIAL, 0)
    masked = causal_masker(ids, np.arange(50))
    assert np.array_equal(masked.ids_NL, ids)
    places = masked.target_positions_M.reshape(50, causal_masker.targets.per_row(64))
    valid = (masked.target_ids_M != IGNORE).reshape(places.shape)
    assert (np.diff(places) > 0).all() and np.array_equal(
        places // 64, np.repeat(np.arange(50)[:, None], valid.shape[1], 1)
    )
    assert (places[valid] % 64 < 63).all()  # the last one's next is another row's
    assert np.array_equal(
        masked.target_ids_M[valid.reshape(-1)], ids.reshape(-1)[places[valid] + 1]
    )
    regular = ~np.isin(ids[:, 1:], SPECIAL)
    assert np.array_equal(valid.sum(1), np.minimum(regular.sum(1), valid.shape[1]))


def test_targets_are_the_originals_and_nothing_else_changes() -> None:
    ids = text(64, 100)
    before = ids.copy()
    masked = masker()(ids, np.arange(64))
    valid = masked.target_ids_M != IGNORE
    places = masked.target_positions_M
    assert np.array_equal(ids, before)
    assert np.array_equal(masked.target_ids_M[valid], ids.reshape(-1)[places[valid]])
    others = np.ones(ids.size, bool)
    others[places[valid]] = False
    assert np.array_equal(masked.ids_NL.reshape(-1)[others], ids.reshape(-1)[others])


@pytest.mark.parametrize("special_share", [0.0, 0.5, 0.9, 1.0])
def test_special_tokens_are_never_targets_and_never_hidden(special_share: float) -> None:
    ids = text(50, 64, special_share)
    masked = masker()(ids, np.arange(50))
    special = np.isin(ids, SPECIAL)
    assert np.array_equal(masked.ids_NL[special], ids[special])
    assert not np.isin(masked.target_ids_M[masked.target_ids_M != IGNORE], SPECIAL).any()
    maskable = (~special).sum(1)
    per_row = (masked.target_ids_M != IGNORE).reshape(50, -1).sum(1)
    assert np.array_equal(per_row, np.minimum(maskable, masker().targets.per_row(64)))


def test_replacements_are_regular_tokens_and_all_of_them() -> None:
    ids = np.full((2000, 100), 5)
    shown = masker(mask_share=0.0, random_share=1.0)(ids, np.arange(2000)).ids_NL
    replaced = shown[shown != 5]
    assert not np.isin(replaced, SPECIAL).any()
    assert len(np.unique(replaced)) == VOCAB - len(SPECIAL) - 1


@pytest.mark.parametrize(("mask", "random"), [(0.8, 0.1), (1.0, 0.0), (0.5, 0.5), (0.0, 0.0)])
def test_shares_of_mask_random_and_unchanged(mask: float, random: float) -> None:
    ids = text(4000, 100, 0.0)
    masked = masker(mask_share=mask, random_share=random)(ids, np.arange(4000))
    shown = masked.ids_NL.reshape(-1)[masked.target_positions_M]
    hidden, same = np.mean(shown == MASK), np.mean(shown == masked.target_ids_M)
    # 100,000 targets: three standard deviations are 0.005; a random token is the original once in 995 times.
    assert hidden == pytest.approx(mask, abs=0.005)
    assert same == pytest.approx(1 - mask - random, abs=0.006)


def test_every_place_is_a_target_equally_often() -> None:
    length, rows = 40, 20_000
    places = masker()(text(rows, length, 0.0), np.arange(rows)).target_positions_M % length
    counts = np.bincount(places, minlength=length)
    expected = rows * 0.25
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected * 0.75)


def test_a_samples_masks_do_not_depend_on_its_batch() -> None:
    ids, samples = text(30, 50), np.arange(100, 130)
    whole = masker()(ids, samples)
    for cut in (1, 7, 29):
        for part in (slice(0, cut), slice(cut, None)):
            piece = masker()(ids[part], samples[part])
            assert np.array_equal(piece.ids_NL, whole.ids_NL[part])
            assert np.array_equal(
                piece.target_ids_M, whole.target_ids_M.reshape(30, -1)[part].reshape(-1)
            )
    order = np.random.default_rng(0).permutation(30)
    assert np.array_equal(masker()(ids[order], samples[order]).ids_NL, whole.ids_NL[order])


def test_another_sample_index_or_seed_gives_other_masks() -> None:
    """A window has another sample index in another epoch. Chance agreement is 25 % of the positions."""
    ids = np.repeat(text(1, 400, 0.0), 20, 0)
    places = masker()(ids, np.arange(20) * 7919).target_positions_M.reshape(20, -1) % 400
    other_seed = masker(seed=1)(ids, np.arange(20) * 7919).target_positions_M.reshape(20, -1) % 400
    for i in range(20):
        for other in (places[(i + 1) % 20], other_seed[i]):
            assert 0.1 < len(np.intersect1d(places[i], other)) / 100 < 0.45


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**70])
def test_the_hash_is_uniform_and_its_bits_independent(seed: int) -> None:
    values = hash64(seed, 3, np.arange(20_000))
    assert len(np.unique(values)) == 20_000
    bits = (values[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.02  # 5.6 standard deviations
    assert np.abs(np.corrcoef(bits.T) - np.eye(64)).max() < 0.04
    buckets = np.bincount((values % np.uint64(97)).astype(int), minlength=97)
    assert ((buckets - 20_000 / 97) ** 2).sum() / (
        20_000 / 97
    ) < 170  # chi square, 96 degrees: p < 1e-5


def test_neighbouring_keys_and_the_order_of_keys_matter() -> None:
    flips = hash64(0, np.arange(5000)) ^ hash64(0, np.arange(1, 5001))
    changed = ((flips[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean()
    assert changed == pytest.approx(0.5, abs=0.01)
    assert hash64(0, 1, 2) != hash64(0, 2, 1)
    assert hash64(0, 1) != hash64(1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 0.0},
        {"rate": 1.0},
        {"mask_share": 0.9, "random_share": 0.2},
        {"random_share": -0.1},
    ],
)
def test_values_that_make_no_objective(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"objective.*{next(iter(changes))}="):
        build(OBJECTIVES["mlm"], {"name": "mlm", **SHARES, **changes}, "objective")
