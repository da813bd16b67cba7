"""The log of duels, `duels.jsonl`: an append-only file in the format of a run log (cramming/runlog.py).

Its events are the settings of both sides, the start and the result of every pair, and the verdict. So no comparison is
forgotten, and none is made twice.
"""

from collections.abc import Callable, Mapping, Sequence
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
    """Result of one run: losses in nats per target, and seconds on the clock of the budget.

    `curve` has (progress, validation loss). `score` is the mean over the run's tasks, None if one of them has no score.
    The losses of a run without a model are None.
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
        """Return the value of a measure, or None if the run has none."""
        values = {"loss": self.loss, "bits_per_byte": self.bits_per_byte, "score": self.score}
        return values[measure]


class Configuration(Event):
    """Settings of a side, logged once for each hash."""

    event: Literal["configuration"] = "configuration"
    hash: str
    settings: Json


class Terms(Event):
    """Begin of a duel: everything that decides it, settled before the first pair.

    `seed` is the seed of the first pair. `budgets` are the limits of base and candidate, by unit. `code` has the commit
    and the hash of uncommitted changes. `corpora` are the SHA-256 of both manifests.
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
    """Begin of a pair's training."""

    event: Literal["start"] = "start"
    id: str
    seed: int


class PairResult(Event):
    """Results of a pair. `turned` is true if cores or order were swapped: the candidate had the first core or turn."""

    event: Literal["pair"] = "pair"
    id: str
    seed: int
    turned: bool
    code: Json
    base: SideResult
    candidate: SideResult


class Decision(Event):
    """End of a duel. The numbers are those of the last look (eval/duel/sequential_test.py).

    `why` is the reason if the duel ended because a side has no result, and then there are no numbers.
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
    """State of a duel according to the log, with pairs in the order in which they were fought."""

    terms: Terms
    pairs: list[PairResult] = field(default_factory=list)
    starts: int = 0  # started pairs, of which interrupted ones have no result
    decision: Decision | None = None

    @property
    def id(self) -> str:
        """Name of the duel: the hash of what it compares and by which rule."""
        return self.terms.id

    @property
    def test(self) -> SequentialTest:
        """Test of the duel, with the settings of its terms."""
        rule = {name: getattr(self.terms, name) for name in RULE}
        return SequentialTest(**rule, higher_is_better=self.terms.measure == "score")

    def differences(self) -> list[float]:
        """Return candidate minus base for each pair in which both sides have a result."""
        measure = self.terms.measure
        return _differences(self.pairs, lambda side: side.value(measure))

    def score_differences(self) -> list[float]:
        """Return candidate minus base of the mean score, over the tasks of which every run of the duel has a score."""
        by_run: list[dict[str, float | None]] = []
        for pair in self.pairs:
            by_run += [pair.base.scores or {}, pair.candidate.scores or {}]
        common = _common_tasks(by_run)
        if not common:
            return []
        return _differences(self.pairs, lambda side: _mean(side.scores or {}, common))


def _common_tasks(by_run: Sequence[Mapping[str, float | None]]) -> list[str]:
    """Return the tasks of which every run has a score, in the order of the first run."""
    if not by_run:
        return []
    common = list(by_run[0])
    for scores in by_run:
        common = [task for task in common if scores.get(task) is not None]
    return common


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
        """Return the settings of the sides of all duels, by hash."""
        events = [entry.event for entry in read_log(self.path, DUEL_EVENTS)]
        return {event.hash: event.settings for event in events if isinstance(event, Configuration)}

    def append(self, event: Event) -> None:
        """Append one event."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(EventLog(self.path, durable=False)) as log:
            log.append(event)
