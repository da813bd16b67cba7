"""The benchmark counts winners as duels do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def honesty(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import duel_honesty

    return duel_honesty


def test_winners_are_counted_with_the_pairs_that_they_took(honesty: Any) -> None:
    won, drawn = [-1.0, -1.01, -0.99, 5.0], [-1.0, 1.0, -1.0, 1.0]
    assert honesty.winners(np.array([won, drawn]), honesty.TEST) == [3]


def test_the_report_says_what_was_counted(honesty: Any) -> None:
    rows = np.random.default_rng(3).normal(0.0, 0.1, (40, 4)).tolist()
    text, raw = honesty.report(rows, 2, 1.0)
    assert "2 ended with a winner (5.0%)" in text and raw["planted"]["duels"] == 20
    assert 0.04 < raw["normal_with_a_winner"] < 0.06 and raw["sd_nats"] == pytest.approx(
        0.1, rel=0.2
    )
