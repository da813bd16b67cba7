"""What a plan costs beside memory: hours, the corpus that has to be there first, electricity, money.

What preparing costs is reckoned from what was measured here (benchmarks/results/preparation_*): files of 1 and 4 GB,
two workers, all filters and the search for the tasks' text. The corpus is to have as many tokens as training sees, so
that it sees none twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cramming.checks import Config
from cramming.plan.search import Target, tokens_in_budget
from cramming.progress import format_count

POWER_SHARE = 0.9  # of its limit that a card takes in training; assumed
BYTES_BESIDE_IDS = 0.01  # per token: where documents start. A token's id is 2 bytes, 4 above 65,536 entries
PREPARATION_BYTES = 0.7e9  # peak memory, all processes together
INDEX_BYTES = 0.085  # per token: of it the index of near-duplicates, 76 MB for 4 GB of text
TOKENS_PER_CORE_SECOND = 0.46e6  # 2.06 MB of text, 4.5 bytes of it a token


@dataclass(frozen=True)
class Costs:
    """Of one setting in the whole budget; null is what is not known (a CPU's electricity) or not asked (the price)."""

    tokens: float
    hours: float
    tokens_per_day: float
    corpus_bytes: float
    preparation_memory_bytes: float
    preparation_core_hours: float
    kwh: float | None
    price: float | None

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], config: Config, target: Target, tokens_per_second: float, price: float | None
    ) -> "Costs":
        """At this rate; `price` is an hour's."""
        tokens = tokens_in_budget(config, tokens_per_second)
        hours = tokens / tokens_per_second / 3600
        bytes_per_id = 2 if (config.model.vocab_size or 0) <= 2**16 else 4
        index = INDEX_BYTES * tokens if settings["data"]["near_duplicates"]["enabled"] else 0.0
        return cls(
            tokens=tokens,
            hours=hours,
            tokens_per_day=86400 * tokens_per_second,
            corpus_bytes=(bytes_per_id + BYTES_BESIDE_IDS) * tokens,
            preparation_memory_bytes=PREPARATION_BYTES + index,
            preparation_core_hours=tokens / TOKENS_PER_CORE_SECOND / 3600,
            kwh=None if target.watts is None else target.watts * POWER_SHARE * hours / 1000,
            price=None if price is None else price * hours,
        )

    def lines(self, target: Target) -> Iterator[str]:
        """As they are printed."""
        yield (
            f"training: {format_count(self.tokens, 'tokens')} in {self.hours:.3g} h;"
            f" {format_count(self.tokens_per_day, 'tokens')} in a day"
        )
        yield (
            f"preparing as many: {format_count(self.corpus_bytes, 'B')} of disk beside the text,"
            f" {format_count(self.preparation_memory_bytes, 'B')} of memory, {self.preparation_core_hours:.2g} core"
            " hours; by measurements on Wikipedia with all filters (benchmarks/results/preparation_*)"
        )
        if self.kwh is not None:
            yield (
                f"electricity: {self.kwh:.3g} kWh, {POWER_SHARE:.0%} (assumed) of {target.watts:.0f} W"
                f" ({target.watts_basis}); the card alone"
            )
        else:
            yield f"electricity: not reckoned, the power of {target.name} is not known"
        if self.price is not None:
            yield f"price: {self.price:.2f}, {self.hours:.3g} h at plan.price_per_hour"
