"""Every row of the large-batch table trains on the same tokens, at a rate that follows its batch by the row's rule."""

from pathlib import Path
from typing import Any

import pytest

from cramming.overrides import compose
from cramming.recipe import Config


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import large_batch

    return large_batch


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lars"])
@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0), (None, 0.0)])
def test_rows_differ_in_batch_and_rate_alone(
    bench: Any, optimizer: str, rule: str | None, power: float
) -> None:
    for batch in (bench.BASE, bench.LARGEST):
        typed = [
            *bench.SETTINGS,
            *bench.overrides(optimizer, batch, 0.01, rule, bench.SEQUENCES, seed=1),
        ]
        config = Config.of(compose(typed))
        assert (config.optim.name, config.train.batch_size) == (optimizer, batch)
        assert config.peak_learning_rate == pytest.approx(0.01 * (batch / 256) ** power)
        assert config.budget.limit == bench.SEQUENCES * config.train.sequence_length
        assert config.budget.limit % (batch * config.train.sequence_length) == 0, (
            "the last step is a whole one"
        )
