"""The log of duels, `duels.jsonl`: an append-only file like a run's (cramming/runlog.py), with events of its own.

No candidate is forgotten and none is fought twice: both sides' settings, every pair that was started, what it gave, and
the verdict are there.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from cramming.config import UserError
from cramming.runlog import Event, EventLog, Json, Unit, read_log
from eval.duel.sequential_test import RULE, SequentialTest

DUEL_LOG = "duels.jsonl"
Measure = Literal["loss", "bits_per_byte", "score"]


class SideTerms(BaseModel):
    """One side: the hash of its settings (event `configuration`), and its overrides as they were typed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hash: str
    overrides: list[str]


class SideResult(BaseModel):
    """Result of one run: losses in nats per target, `seconds` on the clock, validations by progress.

    `score`: the mean over its tasks if it has all of them. A run without a model has no losses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: str
    loss: FiniteFloat | None = None
    all_mask_loss: FiniteFloat | None = None
    bits_per_byte: FiniteFloat | None = None
    steps: int | None = None
    tokens: int | None = None
    seconds: FiniteFloat | None = None
    curve: list[tuple[float, float | None]] = []
    scores: dict[str, float | None] | None = None
    score: FiniteFloat | None = None

    def value(self, measure: Measure) -> float | None:
        """Return what a measure gives of this run."""
        return {"loss": self.loss, "bits_per_byte": self.bits_per_byte, "score": self.score}[
            measure
        ]


class Configuration(Event):
    """All settings of a side, once for each hash."""

    event: Literal["configuration"] = "configuration"
    hash: str
    settings: Json


class Terms(Event):
    """A duel began. Everything that decides it is settled before the first pair.

    `seed`: of the first pair. `budgets`: limit by unit of base and candidate. `code`: commit, and hash of what differs
    from it. `corpora`: SHA-256 of both manifests.
    """

    event: Literal["duel"] = "duel"
    id: str
    base: SideTerms
    candidate: SideTerms
    pairs: int
    error: float
    delta: float
    first_look: int
    measure: Measure
    seed: int
    corpora: tuple[str, str]
    device: str
    clock: Literal["wall", "cpu"]
    budgets: tuple[dict[Unit, float], dict[Unit, float]]
    code: Json


class PairStart(Event):
    """A pair began to train."""

    event: Literal["start"] = "start"
    id: str
    seed: int


class PairResult(Event):
    """Both runs of a pair have ended. `turned`: on the other cores, or in the other order."""

    event: Literal["pair"] = "pair"
    id: str
    seed: int
    turned: bool
    code: Json
    base: SideResult
    candidate: SideResult


class Decision(Event):
    """A duel ended. The numbers are those of the last look (eval/duel/sequential_test.py).

    `why`: of a duel that ended because a side has no result.
    """

    event: Literal["verdict"] = "verdict"
    id: str
    verdict: Literal["win", "loss", "equivalent", "undecided", "void"]
    pairs: int | None = None
    mean: FiniteFloat | None = None
    sd: FiniteFloat | None = None
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None
    p: FiniteFloat | None = None
    pairs_needed: int | None = None
    over: bool = True
    why: str | None = None


DuelEvent = Annotated[
    Configuration | Terms | PairStart | PairResult | Decision, Field(discriminator="event")
]
DUEL_EVENTS: TypeAdapter[Any] = TypeAdapter(DuelEvent)


@dataclass
class Duel:
    """A duel as the log tells of it: pairs in the order in which they were fought."""

    terms: Terms
    pairs: list[PairResult] = field(default_factory=list)
    starts: int = 0  # of pairs: more than there are pairs where some were interrupted
    decision: Decision | None = None

    @property
    def id(self) -> str:
        """Name of the duel: the hash of what it compares and by which rule."""
        return self.terms.id

    @property
    def test(self) -> SequentialTest:
        """The rule that was set before the first pair."""
        rule = {name: getattr(self.terms, name) for name in RULE}
        return SequentialTest(**rule, higher_is_better=self.terms.measure == "score")

    def differences(self) -> list[float]:
        """Return candidate minus base, pair by pair, without pairs of which a side has no result."""
        measure = self.terms.measure
        return _differences(self.pairs, lambda side: side.value(measure))

    def score_differences(self) -> list[float]:
        """Return the differences of the mean score over the tasks that all runs of the duel have."""
        sides = [side for pair in self.pairs for side in (pair.base, pair.candidate)]
        by_run = [side.scores or {} for side in sides]
        first = by_run[0] if by_run else {}
        common = [task for task in first if all(scores.get(task) is not None for scores in by_run)]
        if not common:
            return []
        return _differences(self.pairs, lambda side: _mean(side.scores or {}, common))


def _differences(
    pairs: Sequence[PairResult], value: Callable[[SideResult], float | None]
) -> list[float]:
    differences: list[float] = []
    for pair in pairs:
        base, candidate = value(pair.base), value(pair.candidate)
        if base is not None and candidate is not None:
            differences.append(candidate - base)
    return differences


def _mean(scores: dict[str, float | None], tasks: Sequence[str]) -> float:
    return sum(scores[task] or 0.0 for task in tasks) / len(tasks)


class DuelLog:
    """The log of duels in `folder`; every event is on the disk when `append` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DUEL_LOG

    def duels(self) -> dict[str, Duel]:
        """Return all duels by id, in the order in which they began; UserError for a line that was altered."""
        duels: dict[str, Duel] = {}
        for entry in read_log(self.path, DUEL_EVENTS):
            event = entry.event
            if isinstance(event, Configuration):
                continue
            if isinstance(event, Terms):
                duels[event.id] = Duel(event)
            elif event.id not in duels:
                raise UserError(
                    f"{self.path}:{entry.line}: {event.event} of a duel that has not begun."
                    " Restore the file, or give another --duels."
                )
            elif isinstance(event, PairStart):
                duels[event.id].starts += 1
            elif isinstance(event, PairResult):
                duels[event.id].pairs.append(event)
            elif isinstance(event, Decision):
                duels[event.id].decision = event
        return duels

    def configurations(self) -> dict[str, dict[str, Any]]:
        """Return all settings that ever fought, by their hash."""
        events = [entry.event for entry in read_log(self.path, DUEL_EVENTS)]
        return {event.hash: event.settings for event in events if isinstance(event, Configuration)}

    def append(self, event: Event) -> None:
        """Append one event."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(EventLog(self.path, durable=False)) as log:
            log.append(event)
