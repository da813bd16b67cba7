"""Duplicates are found however they are batched; the split does not depend on the order."""

import random

import pytest

from data_prep.dedup import exact as dedup
from data_prep.dedup.exact import SCALE, HeldOut, SeenBefore, content_hash


@pytest.mark.parametrize("newest", [3, 1 << 18])  # 3: almost everything goes through the sorted part
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
    found = [flag for at in range(0, 500, batch) for flag in memory.ask(hashes[at : at + batch])]
    assert found == expected


def test_content_hash_depends_on_content_and_seed() -> None:
    assert content_hash(b"a", 0) == content_hash(b"a", 0)
    assert len({content_hash(b"a", 0), content_hash(b"b", 0), content_hash(b"a", 1), content_hash(b"a", -1)}) == 4


def split(numbers: list[int], fraction: float) -> tuple[list[int], list[int]]:
    held_out = HeldOut[int](fraction)
    decided = [item for number in numbers for item in held_out.assign(number, number)] + held_out.finish()
    assert sorted(number for _, number in decided) == sorted(numbers)
    return ([n for s, n in decided if s == "train"], [n for s, n in decided if s == "validation"])


@pytest.mark.parametrize("fraction", [0.0, 1e-6, 0.1, 0.5])
@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_split_is_independent_of_order_and_never_without_validation(fraction: float, count: int) -> None:
    rng = random.Random(count)
    numbers = [rng.randrange(SCALE) for _ in range(count)]
    train, validation = split(numbers, fraction)
    expected = [n for n in numbers if n < int(fraction * SCALE)] or [min(numbers)]
    assert sorted(validation) == sorted(expected)
    for _ in range(5):
        rng.shuffle(numbers)
        again = split(numbers, fraction)
        assert (sorted(again[0]), sorted(again[1])) == (sorted(train), sorted(validation))
