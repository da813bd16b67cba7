"""The ledger of duels: an append-only file of JSON lines, so that no candidate is forgotten and none is fought twice.

    {"event": "configuration", "hash": "9b1c...", "settings": {...}}
    {"event": "duel", "id": "3f2a...", "base": {"hash": ..., "overrides": ...}, "candidate": {...}, "error": 0.05, ...}
    {"event": "start", "id": "3f2a...", "seed": 4}
    {"event": "pair", "id": "3f2a...", "seed": 4, "base": {"loss": 5.31, ...}, "candidate": {"loss": 5.22, ...}, ...}
    {"event": "verdict", "id": "3f2a...", "verdict": "win", "mean": -0.09, "low": -0.12, "high": -0.05, "p": 0.004, ...}

A line names the one before it by its SHA-256, as a run's journal does (cramming/journal.py).
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cramming.config import UserError
from cramming.journal import Journal, read_lines
from eval.duel.sequential_test import FEWEST, RULE, SequentialTest

LEDGER = "ledger.jsonl"
TERMS = (
    "base",
    "candidate",
    *RULE,
    "measure",
    "seed",
    "device",
    "clock",
    "budgets",
    "code",
    "corpora",
)


@dataclass
class Duel:
    """What the ledger knows of one duel: its first line, its pairs in the order in which they were fought, its last."""

    id: str
    terms: Mapping[str, Any]
    pairs: list[dict[str, Any]] = field(default_factory=list)
    starts: int = 0  # of pairs: more than there are pairs where some were interrupted
    verdict: dict[str, Any] | None = None

    @property
    def test(self) -> SequentialTest:
        """The rule that was set before the first pair."""
        rule = {name: self.terms[name] for name in RULE}
        return SequentialTest(**rule, higher_is_better=self.terms["measure"] == "score")

    def differences(self, measure: str) -> list[float]:
        """Candidate minus base, pair by pair; without pairs of which a side has no such number."""
        found = [(pair["candidate"].get(measure), pair["base"].get(measure)) for pair in self.pairs]
        return [
            candidate - base
            for candidate, base in found
            if candidate is not None and base is not None
        ]

    def score_differences(self) -> list[float]:
        """Of the mean score over the tasks that all runs of the duel have, pair by pair."""
        scores = [
            pair[side].get("scores") or {} for pair in self.pairs for side in ("candidate", "base")
        ]
        common = (
            [task for task in scores[0] if all(found.get(task) is not None for found in scores)]
            if scores
            else []
        )
        means = (
            [sum(found[task] for task in common) / len(common) for found in scores]
            if common
            else []
        )
        return [candidate - base for candidate, base in zip(means[::2], means[1::2])]


class Ledger:
    """The file in `folder`; every entry is on the disk when a call returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER

    def duels(self) -> dict[str, Duel]:
        """All duels by their id, in the order in which they began; UserError for a line that was altered."""
        try:
            return self._duels()
        except (KeyError, AttributeError) as error:
            raise UserError(
                f"{self.path}: not a ledger of duels ({error}); restore it or set duel.folder"
            ) from None

    def _duels(self) -> dict[str, Duel]:
        found: dict[str, Duel] = {}
        for line in read_lines(self.path):
            event = line["event"]
            if event == "duel":
                known = {
                    "first_look": FEWEST,
                    "corpora": None,
                    **line,
                }  # which older lines do not have
                found[line["id"]] = Duel(line["id"], {key: known[key] for key in TERMS})
            elif event == "start":
                found[line["id"]].starts += 1
            elif event == "pair":
                found[line["id"]].pairs.append(line)
            elif event == "verdict":
                found[line["id"]].verdict = line
        return found

    def configurations(self) -> dict[str, dict[str, Any]]:
        """All settings that ever fought, by their hash."""
        return {
            line["hash"]: line["settings"]
            for line in read_lines(self.path)
            if line["event"] == "configuration"
        }

    def write(self, event: str, **values: Any) -> None:
        """Append one entry."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(Journal(self.path)) as journal:
            journal.write({"event": event, **values})
