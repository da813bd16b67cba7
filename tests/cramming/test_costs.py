"""What a budget costs: plain arithmetic over the rate, with what is not known left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cramming.config import UserError, build
from cramming.plan.costs import POWER_SHARE, Costs
from cramming.plan.roofline import Rates
from cramming.plan.search import PlanConfig, Target, planned_config

Compose = Callable[..., dict[str, Any]]
CARD = Target("cuda", "RTX 4090", 24 * 2**30, "bf16", Rates(1.0, 1.0, 1.0, ""), False, (8, 9), 450.0, "data sheet")
CPU = replace(CARD, kind="cpu", name="a CPU", watts=None)
TOKENS = ["budget=tokens", "budget.tokens=3.6e9"]


def costs(compose: Compose, *overrides: str, target: Target = CARD, price: float | None = None) -> Costs:
    """At 100,000 tokens a second."""
    settings = compose(*overrides)
    return Costs.of(settings, planned_config(settings), target, 1e5, price)


def test_a_budget_of_hours_gives_tokens_and_one_of_tokens_hours(compose: Compose) -> None:
    day, tokens = costs(compose, "budget=hours", "budget.hours=24"), costs(compose, *TOKENS)
    assert (day.hours, day.tokens) == pytest.approx((24, 8.64e9))
    assert (tokens.hours, tokens.tokens) == pytest.approx((10, 3.6e9))
    assert day.tokens_per_day == tokens.tokens_per_day == 8.64e9


def test_electricity_and_money_grow_with_the_hours(compose: Compose) -> None:
    found = costs(compose, *TOKENS, price=0.4)
    assert found.kwh == pytest.approx(POWER_SHARE * 4.5)
    assert found.price == pytest.approx(4.0)
    lines = list(found.lines(CARD))
    assert any("electricity: 4.05 kWh" in line and "450 W (data sheet)" in line for line in lines)
    assert any("price: 4.00, 10 h" in line for line in lines)


def test_what_is_not_known_is_said_and_what_is_not_asked_left_out(compose: Compose) -> None:
    found = costs(compose, *TOKENS, target=CPU)
    assert found.kwh is found.price is None
    lines = list(found.lines(CPU))
    assert any("the power of a CPU is not known" in line for line in lines)
    assert not any("price" in line for line in lines)


def test_preparing_is_what_was_measured(compose: Compose) -> None:
    """4 GB of Wikipedia: 2.006 bytes a token, 632 MB and 76 MB of index, 2,081 processor seconds (strict filters)."""
    text = ["budget=tokens", f"budget.tokens={4e9 / 4.5}"]
    plain = costs(compose, *text)
    found = costs(compose, *text, "data.near_duplicates.enabled=true")
    assert found.corpus_bytes / found.tokens == pytest.approx(2.006, rel=0.01)
    assert found.preparation_memory_bytes - plain.preparation_memory_bytes == pytest.approx(76e6, rel=0.02)
    assert plain.preparation_memory_bytes == pytest.approx(632e6, rel=0.15)
    assert plain.preparation_core_hours * 3600 == pytest.approx(2081, rel=0.15)
    large = costs(compose, *text, "tokenizer.vocab_size=100000")
    assert large.corpus_bytes / large.tokens == pytest.approx(4.006, rel=0.01)


@pytest.mark.parametrize("price", ["0", "-1"])
def test_a_price_is_above_zero(compose: Compose, price: str) -> None:
    with pytest.raises(UserError, match=r"price_per_hour=.* is not above 0"):
        build(PlanConfig, compose(f"plan.price_per_hour={price}")["plan"], "plan")
