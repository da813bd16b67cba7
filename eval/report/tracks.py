"""Tracks: what a run competes in. Scores compare by one budget, in hours on one kind of device or in equal work.

Hours belong to a device and a clock. ExaFLOPs, tokens and steps are equal work on unequal hardware, so any device may
take part. There is no track of time on a reference device: a record has the throughput of its own device alone
(`tokens_per_second`), and what another would have taken is not measured anywhere in it.
"""

from collections.abc import Collection
from typing import NamedTuple

from cramming.plan import cards
from cramming.record_schema import Record
from eval.report.wording import amount_words

UNITS = ("hours", "exaflops", "tokens", "steps")  # in the order in which the tables stand
# ExaFLOPs of a day on the cramming paper's cards (JonasGeiping/cramming, the budgets beside the paper's results).
DAYS = {5.0: "RTX 2080 Ti", 8.0: "RTX A4000", 13.0: "RTX A6000"}


class Track(NamedTuple):
    """A budget; `clock` and `device` are None where the unit is not hours."""

    unit: str
    limit: float
    clock: str | None
    device: str | None

    @property
    def title(self) -> str:
        """Such as `24 h on RTX A6000`, `13 exaFLOPs on any device (the day of an RTX A6000)`."""
        amount = amount_words(self.unit, self.limit)
        if self.unit == "hours":
            return f"{amount}{' of CPU time' * (self.clock == 'cpu')} on {self.device}"
        day = DAYS.get(self.limit) if self.unit == "exaflops" else None
        return f"{amount} on any device{f' (the day of an {day})' if day else ''}"


def track_for(unit: str, limit: float, clock: str | None, device: str | None) -> Track:
    """The track of a budget; cards are known by their model, whatever the driver calls them."""
    if unit != "hours":
        return Track(unit, limit, None, None)
    card = cards.find(device) if device else None
    return Track(unit, limit, clock or "wall", card.name if card else device)


def track_of(record: Record) -> Track | None:
    """The track of a run; None without a budget of a known unit."""
    budget, device = record.training.budget, record.environment.device
    if budget.unit not in UNITS or budget.limit is None:
        return None
    return track_for(budget.unit, budget.limit, budget.clock, device.name or device.kind)


def in_order(tracks: Collection[Track | None]) -> list[Track | None]:
    """As their tables stand: hours first, longer before shorter; what has no track comes last."""
    known = [track for track in tracks if track]
    ordered = sorted(
        known, key=lambda t: (UNITS.index(t.unit), -t.limit, str(t.device), str(t.clock))
    )
    return [*ordered, *(track for track in tracks if track is None)]
