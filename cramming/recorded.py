"""What a run folder says of a training, step by step, and the clock that lets the training loop do it once more.

The schedule follows the clock, so a step can be repeated only at the progress at which it began: `metrics.jsonl` has
that of each step, and its loss, exactly (`each_progress`, `each_loss` of a row, for the steps of its mean).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cramming import checkpoint
from cramming.budget import BudgetClock, BudgetConfig, Work
from cramming.config import require
from cramming.journal import JOURNAL, Event, Saved, parsed, read_journal
from cramming.record import load_metrics, load_record


class RecordedStep(NamedTuple):
    """The progress at which it began, and the loss of its batch, None where that was not finite."""

    progress: float
    loss: float | None


class Segment(NamedTuple):
    """Steps `first` to `last`, which follow `start` (None: the seed); `end` was saved behind them, if not None."""

    start: Saved | None
    first: int
    last: int
    end: Saved | None

    def cut(self, steps: int) -> "Segment":
        """Its first so many steps."""
        last = self.first + steps - 1
        return self if last >= self.last else self._replace(last=last, end=None)


@dataclass(frozen=True)
class RecordedRun:
    """A run folder's record, journal and log. `rows` and `validations`: rows of the log by step."""

    folder: Path
    record: dict[str, Any]
    events: list[Event]
    rows: dict[int, dict[str, Any]]
    validations: dict[int, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """UserError where there is no run, its journal is damaged, or its log does not have each step."""
        log = load_metrics(folder)
        rows = {row["step"]: row for row in log if "loss" in row}
        run = cls(
            folder,
            load_record(folder),
            read_journal(folder / JOURNAL),
            rows,
            {row["step"]: row for row in log if "progress" in row and "loss" not in row},
        )
        require(
            run.events, f"{folder / JOURNAL}: no journal there; a replay needs the whole run folder"
        )
        require(
            {"config", "environment", "corpus", "pretrain"} <= run.record.keys(),
            f"{folder / 'record.json'}: no training on record; give the folder of a run that `cramming pretrain` made",
        )
        place = folder / "metrics.jsonl"
        require(
            rows,
            f"{place}: no training step there; replay a run that has trained, with its log beside its record",
        )
        for step, row in rows.items():
            require(
                _has_each_step(row),
                f"{place}: the row of step {step} does not have the progress and the loss of each step, as an earlier"
                " version's; only newer runs can be replayed",
            )
        return run

    def path_of(self, saved: Saved) -> Path:
        """Where a checkpoint lies, or would lie."""
        return checkpoint.path_of(self.folder / "checkpoints", saved)

    @cached_property
    def steps(self) -> dict[int, RecordedStep]:
        """Every step of the log, by number from 1."""
        return {step: found for row in self.rows.values() for step, found in _each_step(row)}

    def loss_of(self, step: int) -> float | None:
        """None where it was not finite, or the log does not have the step."""
        return self.steps[step].loss if step in self.steps else None

    @property
    def last(self) -> int:
        """The number of the last step."""
        return max(self.rows)

    @cached_property
    def checkpoints(self) -> list[Saved]:
        """Those of the journal that the run went through and that are to be there, oldest first: the kept ones, and of
        the others those that have not made room for newer ones."""
        found: dict[Saved, bool] = {}
        for event in self.events:
            if event["event"] == "resume":
                found = {
                    saved: kept for saved, kept in found.items() if saved.steps <= event["steps"]
                }
            elif event["event"] == "checkpoint":
                found = {
                    saved: kept for saved, kept in found.items() if saved.steps < event["steps"]
                }
                found[Saved(event["steps"], event["sha256"])] = event.get("kept", False)
        return [saved for saved, kept in found.items() if kept or self.path_of(saved).exists()]

    @property
    def segments(self) -> list[Segment]:
        """From the seed, and from each checkpoint, to the next one or the last step."""
        points = [saved for saved in self.checkpoints if 0 < saved.steps <= self.last]
        last = None if points and points[-1].steps == self.last else Saved(self.last, "")
        ends = [None, *points, *([last] if last else [])]
        return [
            Segment(
                start, start.steps + 1 if start else 1, end.steps, end if end in points else None
            )
            for start, end in pairwise(ends)
            if end
        ]

    @property
    def seed_check(self) -> list[Segment]:
        """No step: whether the checkpoint before the first one, if there is any, is what the seed gives."""
        return [Segment(None, 1, 0, saved) for saved in self.checkpoints if saved.steps == 0]

    def contradictions(self) -> Iterator[str]:
        """Where the log disagrees with itself, or with the record, whichever steps are repeated."""
        for step, row in self.rows.items():
            losses = row["each_loss"]
            mean = None if None in losses else sum(losses) / len(losses)
            if row["loss"] != mean:
                yield f"metrics.jsonl: the row of step {step} has a loss of {row['loss']}, its steps' mean is {mean}"
            for number, found in _each_step(row):
                if found != self.steps[number]:
                    yield f"metrics.jsonl: the row of step {step} has other numbers for step {number} than a later one"
        processes = 1 + max(event["process"] for event in self.events)
        if (
            len(lines := list(_no_rows(self.folder / "metrics.jsonl"))) >= processes
        ):  # a crash leaves half a line
            shown = ", ".join(map(str, lines[:6])) + (" ..." if len(lines) > 6 else "")
            yield f"metrics.jsonl: {len(lines)} lines are no rows of a log and were left out: {shown}"
        if list(self.steps) != list(range(1, self.last + 1)):
            yield f"metrics.jsonl: not every step from 1 to {self.last} is there once, in order"
        begun = [(step - 0.5, found.progress) for step, found in self.steps.items()]
        ended = [(float(step), row["progress"]) for step, row in self.rows.items()]
        for (_, before), (step, now) in pairwise(sorted(begun + ended)):
            if now < before:
                yield f"metrics.jsonl: the progress falls from {before:.6f} to {now:.6f} at step {step:.0f}"
        section, row = self.record["pretrain"], self.rows[self.last]
        ended_logged = (
            section["status"] != "diverged"
        )  # its last steps, which changed nothing, have no row
        for name, here in (
            ("steps", self.last),
            ("tokens", row["tokens"]),
            ("train_loss", row["loss"]),
        ):
            if ended_logged and section.get(name, here) != here:
                yield f"record.json: pretrain.{name} is {section[name]}, the last row of the log has {here}"
        if self.events[-1]["process"] == 0:  # a resume may have had other settings of checkpoints
            yield from self._not_kept(self.record["config"]["checkpoint"].get("keep_at", []))

    def _not_kept(self, shares: Sequence[float]) -> Iterator[str]:
        """The log has a row of every checkpoint, so the first at or behind a share is that of the one to be kept."""
        kept = {event["steps"] for event in self.events if event.get("kept")}
        for share in shares:
            reached = (step for step, row in self.rows.items() if row["progress"] >= share)
            step = next(reached, None) if share else 0
            if step is not None and step not in kept:
                yield f"budget.jsonl: no checkpoint was kept at step {step}, as checkpoint.keep_at={share:g} wants it"


class RecordedClock(BudgetClock):
    """The clock of a replay: steps begin at the progress that the log has of them, and there is time until step `last`.

    It charges nothing and has no journal. Where the budget is in steps or tokens the progress follows from the work,
    and the log is not asked.
    """

    def __init__(self, config: BudgetConfig, work: Work, steps: Mapping[int, RecordedStep]) -> None:
        self.config, self.work, self.steps = config, work, steps
        self.last, self.lost_flops, self.slowest_update_seconds = work.steps, 0.0, 0.0

    def progress(self) -> float:
        """At which the next step begins."""
        if self.config.unit in ("steps", "tokens"):
            return super().progress()
        following = self.steps.get(self.work.steps + 1)
        return following.progress if following else 1.0

    def elapsed_seconds(self) -> float:
        """Of no meaning here."""
        return 0.0

    def has_room_for(self, *, seconds: float, tokens: int = 0, flops: float = 0.0) -> bool:
        """Whether the next step is one of those to do."""
        return self.work.steps < self.last

    def has_room_for_update(self, seconds: float) -> bool:
        """Each step of the log was updated."""
        return True

    def step_synchronised(self, update_seconds: float) -> bool:
        """And kept."""
        return True

    def is_near_the_end(self, before: float, now: float) -> bool:
        """Nothing is saved."""
        return False


def _no_rows(log: Path) -> Iterator[int]:
    """The numbers of the lines that say nothing of a step."""
    for number, line in enumerate(
        log.read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        row = parsed(line) or {}
        if type(row.get("step")) is not int or not row.keys() & {"loss", "progress"}:
            yield number


def _has_each_step(row: Mapping[str, Any]) -> bool:
    if not all(isinstance(row.get(name), float | int) for name in ("progress", "tokens")):
        return False
    progress, losses = row.get("each_progress"), row.get("each_loss")
    if (
        not isinstance(progress, list)
        or not isinstance(losses, list)
        or len(progress) != len(losses)
        or not losses
    ):
        return False
    return all(isinstance(p, float | int) for p in progress) and all(
        isinstance(x, float | int | None) for x in losses
    )


def _each_step(row: Mapping[str, Any]) -> Iterator[tuple[int, RecordedStep]]:
    each = zip(row["each_progress"], row["each_loss"], strict=True)
    return enumerate(map(RecordedStep._make, each), row["step"] - len(row["each_loss"]) + 1)
