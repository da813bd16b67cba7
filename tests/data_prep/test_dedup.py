"""Duplicates are found however they are batched; the split does not depend on the order."""

import random

import numpy as np
import pytest

from data_prep.dedup import exact as dedup
from data_prep.dedup.exact import SCALE, HeldOut, SeenBefore, content_hash


@pytest.mark.parametrize(
    "newest", [3, 1 << 18]
)  # 3: almost everything goes through the sorted part
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_seen_before_equals_a_set(monkeypatch: pytest.MonkeyPatch, newest: int, batch: int) -> None:
    monkeypatch.setattr(dedup, "NEWEST", newest)
    rng = random.Random(0)
    hashes = [rng.choice([0, SCALE - 1, *range(150)]) for _ in range(500)]
    seen, expected = set[int](), []
    for number in hashes:
        expected.append(number in seen)
        seen.add(number)
    memory = SeenBefore()
    given = np.array(hashes, dtype=np.uint64)
    found = [
        flag for at in range(0, 500, batch) for flag in memory.ask(given[at : at + batch]).tolist()
    ]
    assert found == expected


def test_content_hash_depends_on_content_and_seed() -> None:
    assert content_hash(b"a", 0) == content_hash(b"a", 0)
    assert (
        len(
            {
                content_hash(b"a", 0),
                content_hash(b"b", 0),
                content_hash(b"a", 1),
                content_hash(b"a", -1),
            }
        )
        == 4
    )


def split(numbers: list[int], fraction: float, batch: int) -> tuple[list[int], list[int]]:
    held_out, splits, kept_back = HeldOut(fraction), (list[int](), list[int]()), list[int]()
    for at in range(0, len(numbers), batch):
        given = numbers[at : at + batch]
        places, out, left = held_out.assign(np.array(given, dtype=np.uint64))
        assert (places < 0).sum() + (left < 0).sum() == len(kept_back)
        for place, validation in zip(places.tolist(), out.tolist()):
            splits[validation].append(kept_back[0] if place < 0 else given[place])
        kept_back = [kept_back[0] if place < 0 else given[place] for place in left.tolist()]
    splits[1].extend(kept_back)
    assert sorted([*splits[0], *splits[1]]) == sorted(numbers)
    return splits


@pytest.mark.parametrize("fraction", [0.0, 1e-6, 0.1, 0.5])
@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_split_is_independent_of_order_and_never_without_validation(
    fraction: float, count: int
) -> None:
    rng = random.Random(count)
    numbers = [rng.randrange(SCALE) for _ in range(count)]
    train, validation = split(numbers, fraction, 1)
    assert all(
        split(numbers, fraction, batch) == (train, validation) for batch in (2, 7, 100)
    )  # their order as well
    expected = [n for n in numbers if n < int(fraction * SCALE)] or [min(numbers)]
    assert sorted(validation) == sorted(expected)
    for _ in range(5):
        rng.shuffle(numbers)
        again = split(numbers, fraction, 3)
        assert (sorted(again[0]), sorted(again[1])) == (sorted(train), sorted(validation))
