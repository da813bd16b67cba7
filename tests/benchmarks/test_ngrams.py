"""Counted neighbours give probabilities, know a text that repeats itself, and use nothing behind [MASK]."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cramming.data.batches import ALL_MASK, PINNED

MASK, VOCABULARY = 0, 6
TEXT = np.tile([1, 2, 3, 4, 5, 3], 50)


@pytest.fixture
def neighbours(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import ngrams

    return ngrams.Neighbours(TEXT, VOCABULARY)


@pytest.mark.parametrize("window", [[1, 2, MASK, 4, 5], [5, MASK, MASK, MASK, 1], [4, 1, 3, 2, 2]])
def test_losses_are_of_probabilities(neighbours: Any, window: list[int]) -> None:
    found = [neighbours.losses(np.array(window), target, MASK, PINNED) for target in range(VOCABULARY)]
    for used in found[0]:
        assert sum(math.exp(-losses[used]) for losses in found) == pytest.approx(1.0)


def test_what_was_seen_is_known_and_what_is_hidden_is_not_used(neighbours: Any) -> None:
    seen = neighbours.losses(np.array([1, 2, MASK, 4, 5]), 3, MASK, ALL_MASK)
    assert seen["both sides"] < 0.02 < seen["unigram"]
    hidden = neighbours.losses(np.array([1, MASK, MASK, MASK, 5]), 3, MASK, ALL_MASK)
    assert len(set(hidden.values())) == 1, "the unigram's"
    shown = neighbours.losses(np.array([MASK, MASK, 4, MASK, MASK]), 4, MASK, PINNED)
    assert shown["both sides"] == pytest.approx(-math.log(0.5 + 0.5 * math.exp(-hidden["unigram"]) / 2), abs=0.01)
