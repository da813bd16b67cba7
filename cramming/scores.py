"""Scores as a run log gives them: metrics over seeds, averages over tasks, the history of fine-tunings.

Pure functions of the events `scoring` and `finetuned`. A scoring counts once all of its tasks and seeds are there; what
has not finished is listed as unfinished and replaces nothing.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import stdtrit

from cramming.data.suites import SUITES, Average
from cramming.runlog import Entry, Finetuned, MinimalPairs, Scoring

# Baselines without an encoder, which no rule judges: the record's section -> the initialisation that its row has.
WITHOUT_ENCODER = {"floor": "bag of words", "constant": "constant class"}
RANKED_INITS = ("pretrained", "random")
# Points of a sweep are compared only where all of this is the same.
_SAME_POINT = ("suite", "seeds", "conditions")


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values; None where there is none, or one is missing."""
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


@dataclass
class Scores:
    """Everything that a log says of scores.

    `sections`: by (section, init) the last complete scoring. `history`: one row per fine-tuning that rules judge.
    `unfinished`: scorings that lack results, in words.
    """

    sections: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    minimal_pairs: MinimalPairs | None = None


def scores_of(entries: Sequence[Entry]) -> Scores:
    """Fold the events of a log into its scores."""
    scores = Scores()
    results: dict[tuple[str, str], Finetuned] = {}
    open_scorings: dict[tuple[str, str], Scoring] = {}
    points: dict[str, list[dict[str, Any]]] = {}
    current: Scoring | None = None
    for entry in entries:
        event = entry.event
        if isinstance(event, MinimalPairs):
            scores.minimal_pairs = event
        elif isinstance(event, Scoring):
            current = event
        elif isinstance(event, Finetuned) and current is not None:
            results[run_name(event.task, event.seed), event.key] = event
            if current.section == "glue" and current.init in RANKED_INITS:
                scores.history.append(_history_row(current, event))
        else:
            continue
        if current is None:
            continue
        place = (current.section, current.init)
        if missing_results(current, results):
            open_scorings[place] = current
            continue
        open_scorings.pop(place, None)
        section: dict[str, Any] | None = _section(current, results, len(scores.history))
        if current.sweep and section is not None:
            section = _add_point(points, place, section)
        if section is not None:
            _drop_other_suites(scores, current)
            scores.sections[place] = section
    scores.unfinished = [_describe_unfinished(s, results) for s in open_scorings.values()]
    return scores


def run_name(task: str, seed: int) -> str:
    """Return the name of one fine-tuning within a scoring."""
    return f"{task}-seed{seed}"


def missing_results(scoring: Scoring, results: Mapping[tuple[str, str], Finetuned]) -> list[str]:
    """Return the names of the fine-tunings that a scoring still lacks."""
    return [name for name, key in scoring.keys.items() if (name, key) not in results]


def _describe_unfinished(scoring: Scoring, results: Mapping[tuple[str, str], Finetuned]) -> str:
    missing = missing_results(scoring, results)
    return f"{scoring.suite}, {scoring.init}: {len(missing)} of {len(scoring.keys)} not fine-tuned"


def _history_row(scoring: Scoring, event: Finetuned) -> dict[str, Any]:
    """Return what the rules need to know of one fine-tuning."""
    mains = {name: entry["main_metric"] for name, entry in scoring.entries.items()}
    scores = {
        name: found["metrics"].get(mains[name])
        for name, found in event.entries.items()
        if name in mains
    }
    return {
        "time": event.time,
        "suite": scoring.suite,
        "init": scoring.init,
        "task": event.task,
        "seed": event.seed,
        "version": scoring.version,
        "subset": any(scoring.entries[name].get("subset") for name in scores),
        "hyperparameters": scoring.hyperparameters,
        "selection": scoring.selection,
        "precision": scoring.precision,
        "threads_per_run": scoring.threads_per_run,
        "scores": scores,
        "model_sha256": scoring.model_sha256,
        "predictions_sha256": event.predictions,
        "key": event.key,
        "git": (scoring.environment or {}).get("git"),
    }


def _drop_other_suites(scores: Scores, scoring: Scoring) -> None:
    """Remove the sections of another suite: a record holds GLUE or the embedded tasks, not both."""
    for place, section in list(scores.sections.items()):
        if place[0] == scoring.section and section["suite"] != scoring.suite:
            del scores.sections[place]


def _section(
    scoring: Scoring, results: Mapping[tuple[str, str], Finetuned], history_entries: int
) -> dict[str, Any]:
    """Return the record's section of a complete scoring."""
    tasks = {}
    seconds: dict[str, float] = {}
    for entry, facts in scoring.entries.items():
        names = [run_name(facts["task"], seed) for seed in scoring.seeds]
        of_task = [results[name, scoring.keys[name]] for name in names]
        seconds |= {name: each.seconds for name, each in zip(names, of_task, strict=True)}
        tasks[entry] = {
            **_task_score(entry, facts, of_task, scoring.seeds),
            "hyperparameters": scoring.hyperparameters,
            "seconds": sum(each.seconds for each in of_task),
        }
    stated = scoring.model_dump(
        exclude={"event", "time", "section", "entries", "keys", "sweep", "version"},
        exclude_none=True,
    )
    if scoring.init in WITHOUT_ENCODER:
        stated["init"] = WITHOUT_ENCODER[scoring.init]
    averages = SUITES[scoring.suite].averages if scoring.suite in SUITES else {}
    return {
        **stated,
        "split": "dev",
        "tasks": tasks,
        "averages": {name: _average(average, tasks) for name, average in averages.items()},
        "seconds": sum(seconds.values()),
        "predictions": {name: results[name, key].predictions for name, key in scoring.keys.items()},
        "history_entries": history_entries,
    }


def _task_score(
    entry: str, facts: Mapping[str, Any], results: Sequence[Finetuned], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the metrics of one entry over seeds; one missing value leaves the summary of its metric None."""
    of_entry = [result.entries[entry] for result in results]
    metrics = {
        name: spread([each["metrics"].get(name) for each in of_entry]) for name in facts["metrics"]
    }
    median = metrics[facts["main_metric"]]["median"]
    problems: list[str] = []
    notes: list[str] = []
    for seed, each in zip(seeds, of_entry, strict=True):
        problems += [f"seed {seed}: {text}" for text in each.get("problems", [])]
        notes += [f"seed {seed}: {text}" for text in each.get("notes", [])]
    return {
        **facts,
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


def _add_point(
    points: dict[str, list[dict[str, Any]]], place: tuple[str, str], point: dict[str, Any]
) -> dict[str, Any] | None:
    """Add a point of a sweep; return the best so far with the list of all, or None if none has all scores.

    The pretrained model decides for all initialisations where it is scored.
    """
    section, init = place
    mine = points.setdefault(f"{section}/{init}", [])
    mine[:] = [other for other in mine if _comparable(other, point)]
    mine[:] = [other for other in mine if other["hyperparameters"] != point["hyperparameters"]]
    mine.append(point)
    judged = points.get(f"{section}/pretrained") or mine
    means = [mean_of([task["score"] for task in each["tasks"].values()]) for each in judged]
    known = [(mean, index) for index, mean in enumerate(means) if mean is not None]
    if not known:
        return None
    best_mean, index = max(known, key=lambda pair: pair[0])
    best = judged[index]["hyperparameters"]
    chosen = next((each for each in mine if each["hyperparameters"] == best), None)
    if chosen is None:
        return None
    first = judged[0]["hyperparameters"]
    varied = [
        key
        for key in first
        if len({json.dumps(each["hyperparameters"].get(key)) for each in judged}) > 1
    ]
    listed = [
        {"hyperparameters": {key: each["hyperparameters"][key] for key in varied}, "mean": mean}
        for each, mean in zip(judged, means, strict=True)
    ]
    judge = judged[0]["init"]
    chosen_by = f"mean of the dev scores of {judge} over {', '.join(chosen['tasks'])}"
    mark = {"points": listed, "chosen_by": chosen_by, "mean": best_mean}
    return {**chosen, "history_entries": point["history_entries"], "sweep": mark}


def _comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in _SAME_POINT)
