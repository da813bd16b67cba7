"""Scores in a run log: metrics over seeds, averages over tasks, the history of fine-tunings.

Pure functions of the events `scoring` and `finetuned`. A scoring counts once all of its tasks and seeds have a
result; an incomplete one is listed as unfinished and replaces nothing.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import stdtrit

from cramming.config import UserError, settings_hash
from cramming.data.suites import SUITES, Average
from cramming.runlog import (
    RESTORE,
    RUN_LOG,
    Entry,
    Event,
    Finetuned,
    LabelledSet,
    Measured,
    MinimalPairs,
    Scoring,
)

# Path in the record: section, then the suite in those of `BESIDE`; initialisation, baseline or SHA-256 of a checkpoint.
SectionKey = tuple[str, ...]

# Baselines without an encoder, which no rule checks: section of the record -> initialisation in its row
WITHOUT_ENCODER = {"floor": "bag of words", "constant": "constant class"}
RANKED_INITS = ("pretrained", "random")
CHECKPOINTS, PROBE = "checkpoints", "probe"
BESIDE = (CHECKPOINTS, PROBE)  # sections that replace no score of the fine-tuned final model
# Points of a sweep are compared only if these are equal.
_SAME_POINT = ("suite", "seeds", "conditions")


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values, or None if there are none or one is missing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the values with median, mean, sample standard deviation and Student's 95 % interval of the mean.

    All are None if a value is; the last two also for one seed.
    """
    known = [value for value in values if value is not None]
    complete = len(known) == len(values)
    mean = statistics.fmean(known) if complete else None
    std = statistics.stdev(known) if complete and len(known) > 1 else None
    interval = None
    if mean is not None and std is not None:
        half = float(stdtrit(len(known) - 1, 0.975)) * std / len(known) ** 0.5
        interval = [mean - half, mean + half]
    return {
        "per_seed": list(values),
        "median": statistics.median(known) if complete else None,
        "mean": mean,
        "std": std,
        "mean_ci95": interval,
    }


@dataclass(frozen=True)
class Point:
    """Complete point of a sweep, and its section."""

    scoring: Scoring
    section: dict[str, Any]


@dataclass
class Scores:
    """Scores in a log, updated event by event.

    `sections` holds by place in the record the last complete scoring, of a sweep the best; `sources` the scorings that
    each section is computed from. `history` has one row per fine-tuning that rules check, `results` the last result
    by run name and key. `current` is the scoring that the next fine-tuning belongs to.
    """

    sections: dict[SectionKey, dict[str, Any]] = field(default_factory=dict)
    sources: dict[SectionKey, list[Scoring]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    minimal_pairs: MinimalPairs | None = None
    measured: Measured | None = None
    results: dict[tuple[str, str], Finetuned] = field(default_factory=dict)
    current: Scoring | None = None
    _open: dict[SectionKey, Scoring] = field(default_factory=dict)
    _points: dict[SectionKey, dict[str, Point]] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[str]:
        """Descriptions of the scorings of the final model that lack results."""
        lacking = [scoring for key, scoring in self._open.items() if key[0] not in BESIDE]
        return [self._describe_unfinished(scoring) for scoring in lacking]

    def add(self, event: Event) -> None:
        """Update by one event; events that are not about scores change nothing."""
        if isinstance(event, MinimalPairs):
            self.minimal_pairs = event
        elif isinstance(event, Measured):
            self.measured = event
        elif isinstance(event, Scoring):
            self.current = event
            self._update(event)
        elif isinstance(event, Finetuned) and self.current is not None:
            self.results[run_name(event.task, event.seed), event.key] = event
            if self.current.section == "glue" and self.current.init in RANKED_INITS:
                self.history.append(_history_row(self.current, event))
            self._update(self.current)

    def cannot_follow(self, event: Event) -> str | None:
        """Return why no scoring writes this event at this point, or None."""
        if isinstance(event, Scoring):
            expected: set[str] = set()
            for entry in event.entries.values():
                expected.update(run_name(entry.task, seed) for seed in event.seeds)
            return None if set(event.keys) == expected else "keys are not those of tasks and seeds"
        if not isinstance(event, Finetuned):
            return None
        if self.current is None:
            return "finetuned before the first scoring"
        name = run_name(event.task, event.seed)
        entries = {n for n, entry in self.current.entries.items() if entry.task == event.task}
        if self.current.keys.get(name) != event.key or set(event.entries) != entries:
            return f"{name} is not of the scoring before it"
        return None

    def missing(self, scoring: Scoring) -> list[str]:
        """Return the names of the fine-tunings that a scoring lacks."""
        return [name for name, key in scoring.keys.items() if (name, key) not in self.results]

    def section_of(self, scoring: Scoring) -> dict[str, Any]:
        """Return the section of a complete scoring as if it were the last."""
        return _section(scoring, self.results, len(self.history))

    def is_current(self, scoring: Scoring) -> bool:
        """Return whether a section is computed from this scoring, whatever its time, machine and code."""
        key = section_key(scoring)
        return any(_same(scoring, source) for source in self.sources.get(key, []))

    def _describe_unfinished(self, scoring: Scoring) -> str:
        count = len(self.missing(scoring))
        return f"{scoring.suite}, {scoring.init}: {count} of {len(scoring.keys)} not fine-tuned"

    def _update(self, scoring: Scoring) -> None:
        """Compute the section of a complete scoring, or store an incomplete one."""
        key = section_key(scoring)
        if self.missing(scoring):
            self._open[key] = scoring
            return
        self._open.pop(key, None)
        section = self.section_of(scoring)
        if scoring.sweep is None:
            self._set(key, section, [scoring])
            return
        points = self._points.setdefault(key, {})
        name = settings_hash(scoring.hyperparameters)
        points.pop(name, None)
        points[name] = Point(scoring, section)  # after `pop`, so that the latest is the last
        self._choose_point(key[:-1], scoring.sweep)

    def _set(self, key: SectionKey, section: dict[str, Any], sources: list[Scoring]) -> None:
        """Set a section, and drop those of another suite: a record holds GLUE or the embedded tasks, not both.

        A baseline without an encoder, which a probe has beside it, replaces no score of a model.
        """
        others = []
        for other, known in self.sections.items():
            if other[:-1] == key[:-1] and known["suite"] != section["suite"]:
                others.append(other)
        if key[-1] in WITHOUT_ENCODER and any(other[-1] in RANKED_INITS for other in others):
            return
        for other in others:
            del self.sections[other], self.sources[other]
        self.sections[key] = section
        self.sources[key] = sources

    def _choose_point(self, section: SectionKey, inits: Sequence[str]) -> None:
        """Set the sections of a sweep to its best point, the same for all initialisations, with the list of all points.

        The pretrained model decides if it is scored. Only points that all of `inits` have, scored as the latest,
        count. Nothing changes while an initialisation lacks the latest point, or if no point has all of its scores.
        """
        all_points = {init: self._points.get((*section, init), {}) for init in inits}
        latest = {next(reversed(points), None) for points in all_points.values()}
        if len(latest) > 1:
            return
        by_init = {init: _comparable(points) for init, points in all_points.items()}
        deciding_init = "pretrained" if "pretrained" in inits else inits[0]
        names = sorted(set.intersection(*map(set, by_init.values())))
        means = {name: _mean_score(by_init[deciding_init][name].section) for name in names}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if not known:
            return
        best = max(known, key=lambda name: known[name])
        sets = [by_init[deciding_init][name].section["hyperparameters"] for name in names]
        tasks = ", ".join(by_init[deciding_init][best].section["tasks"])
        mark = {
            "points": _list_points(sets, list(means.values())),
            "chosen_by": f"mean of the dev scores of {deciding_init} over {tasks}",
            "mean": known[best],
        }
        for init, points in by_init.items():
            # A section is later than all points that its choice compares: no later point was interrupted.
            came_after = max(point.section["history_entries"] for point in points.values())
            chosen = {**points[best].section, "history_entries": came_after, "sweep": mark}
            self._set((*section, init), chosen, [points[name].scoring for name in names])


def section_key(scoring: Scoring) -> SectionKey:
    """Return the place of a scoring in the record: checkpoints and frozen probes have sections of their own."""
    if scoring.checkpoint is not None:
        return CHECKPOINTS, scoring.suite, scoring.checkpoint
    if scoring.hyperparameters.get("freeze"):
        return PROBE, scoring.suite, scoring.init
    return scoring.section, scoring.init


def scores_of(entries: Sequence[Entry]) -> Scores:
    """Return the scores in the events of a log; raise UserError for an event that cannot follow the ones before it."""
    scores = Scores()
    for entry in entries:
        problem = scores.cannot_follow(entry.event)
        if problem:
            raise UserError(f"{RUN_LOG}:{entry.line}: {problem}. {RESTORE}.")
        scores.add(entry.event)
    return scores


def run_name(task: str, seed: int) -> str:
    """Return the name of one fine-tuning within a scoring."""
    return f"{task}-seed{seed}"


def is_subset(scoring: Scoring, task: str) -> bool:
    """Return whether a task is trained or scored on another number of examples than the official one."""
    return any(entry.subset for entry in scoring.entries.values() if entry.task == task)


def _same(scoring: Scoring, other: Scoring) -> bool:
    """Return whether two scorings are equal apart from their time, machine and code."""
    changing = {"time", "environment"}
    return scoring.model_dump(exclude=changing) == other.model_dump(exclude=changing)


def _history_row(scoring: Scoring, event: Finetuned) -> dict[str, Any]:
    """Return the facts of one fine-tuning that the rules need."""
    scores = {
        name: result.metrics.get(scoring.entries[name].main_metric)
        for name, result in event.entries.items()
    }
    return {
        "time": event.time,
        "suite": scoring.suite,
        "init": scoring.init,
        "task": event.task,
        "seed": event.seed,
        "version": scoring.version,
        "subset": is_subset(scoring, event.task),
        "hyperparameters": scoring.hyperparameters,
        "selection": scoring.selection,
        "checkpoint": scoring.checkpoint,
        "precision": scoring.precision,
        "threads_per_run": scoring.threads_per_run,
        "scores": scores,
        "model_sha256": scoring.model_sha256,
        "predictions_sha256": event.predictions,
        "key": event.key,
        "git": (scoring.environment or {}).get("git"),
    }


def _section(
    scoring: Scoring, results: Mapping[tuple[str, str], Finetuned], history_entries: int
) -> dict[str, Any]:
    """Return the record's section of a complete scoring."""
    of_runs = {name: results[name, key] for name, key in scoring.keys.items()}
    tasks = {}
    for name, entry in scoring.entries.items():
        of_task = [of_runs[run_name(entry.task, seed)] for seed in scoring.seeds]
        tasks[name] = {
            **_task_score(name, entry, of_task),
            "hyperparameters": scoring.hyperparameters,
            "seconds": sum(result.seconds for result in of_task),
        }
    stated = scoring.model_dump(
        exclude={"event", "time", "section", "entries", "keys", "sweep", "version"},
        exclude_none=True,
    )
    if scoring.init in WITHOUT_ENCODER:
        stated["init"] = WITHOUT_ENCODER[scoring.init]
    averages = SUITES[scoring.suite].averages
    return {
        **stated,
        "split": "dev",
        "tasks": tasks,
        "averages": {name: _average(average, tasks) for name, average in averages.items()},
        "seconds": sum(result.seconds for result in of_runs.values()),
        "predictions": {name: result.predictions for name, result in of_runs.items()},
        "history_entries": history_entries,
    }


def _task_score(name: str, entry: LabelledSet, results: Sequence[Finetuned]) -> dict[str, Any]:
    """Return the metrics of one labelled set over seeds; one missing value leaves the summary of its metric None."""
    of_entry = [result.entries[name] for result in results]
    metrics = {}
    for metric in entry.metrics:
        metrics[metric] = spread([scores.metrics.get(metric) for scores in of_entry])
    median = metrics[entry.main_metric]["median"] if entry.main_metric in metrics else None
    problems: list[str] = []
    notes: list[str] = []
    for result, scores in zip(results, of_entry, strict=True):
        problems += [f"seed {result.seed}: {text}" for text in scores.problems]
        notes += [f"seed {result.seed}: {text}" for text in scores.notes]
    return {
        **entry.model_dump(),
        "metrics": metrics,
        "scored_epochs": [result.epoch for result in results],
        "score": None if median is None else 100 * median,
        "problem": "; ".join(problems) or None,
        "notes": notes,
    }


def _average(average: Average, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    scores = {entry: tasks.get(entry, {}).get("score") for entry in average.entries}
    return {
        "value": mean_of(list(scores.values())),
        "tasks": list(average.entries),
        "missing": [entry for entry, value in scores.items() if value is None],
        "subsets": [entry for entry in scores if tasks.get(entry, {}).get("subset")],
        "definition": average.definition,
    }


def _comparable(points: Mapping[str, Point]) -> dict[str, Point]:
    """Return the points of one initialisation that can be compared with the latest, by name."""
    if not points:
        return {}
    latest = list(points.values())[-1].section
    comparable = {}
    for name, point in points.items():
        if all(point.section.get(key) == latest.get(key) for key in _SAME_POINT):
            comparable[name] = point
    return comparable


def _mean_score(section: Mapping[str, Any]) -> float | None:
    return mean_of([task["score"] for task in section["tasks"].values()])


def _list_points(
    sets: Sequence[Mapping[str, Any]], means: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Return the hyperparameters that differ between the points, and each point's mean score."""
    varied = []
    for key in sets[0]:
        values = {json.dumps(each.get(key)) for each in sets}
        if len(values) > 1:
            varied.append(key)
    points: list[dict[str, Any]] = []
    for each, mean in zip(sets, means, strict=True):
        points.append({"hyperparameters": {key: each.get(key) for key in varied}, "mean": mean})
    return points
