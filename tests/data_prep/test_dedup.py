"""Duplicates are all but the first; the split does not depend on the order."""

import random

import numpy as np
import pytest

from data_prep.dedup.exact import content_numbers, duplicates, held_out, in_sorted


def test_duplicates_are_all_but_the_first() -> None:
    rng = random.Random(0)
    keys = [rng.choice([0, 2**64 - 1, *range(150)]) for _ in range(500)]
    expected = [key in keys[:place] for place, key in enumerate(keys)]
    assert duplicates(np.array(keys, dtype=np.uint64)).tolist() == expected
    assert not len(duplicates(np.array([], dtype=np.uint64)))


def test_content_numbers_depend_on_content_and_seed() -> None:
    numbers = {content_numbers(data, seed) for data in (b"a", b"b") for seed in (-1, 0, 1)}
    assert len(numbers) == 6 and content_numbers(b"a", 0) in numbers


def test_keys_in_a_sorted_array() -> None:
    sorted_keys = np.array([3, 5, 2**64 - 1], dtype=np.uint64)
    keys = np.array([5, 4, 2**64 - 1, 0, 3], dtype=np.uint64)
    assert in_sorted(keys, sorted_keys).tolist() == [True, False, True, False, True]
    assert not in_sorted(keys, sorted_keys[:0]).any()


@pytest.mark.parametrize("fraction", [0.0, 1e-6, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_split_is_independent_of_order_and_never_without_validation(
    fraction: float, count: int
) -> None:
    rng = random.Random(count)
    numbers = [rng.randrange(2**64) for _ in range(count)]
    below = [number for number in numbers if number < fraction * 2**64]
    expected = below or sorted(numbers)[:1]
    for _ in range(5):
        rng.shuffle(numbers)
        is_out = held_out(np.array(numbers, dtype=np.uint64), fraction).tolist()
        assert sorted(n for n, out in zip(numbers, is_out) if out) == sorted(expected)
