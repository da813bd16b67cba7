"""A small search for the one global set of hyperparameters: one grid for all tasks, chosen by the mean over all tasks.

    cramming glue --multirun name=first eval.sweep=true eval.hyperparameters.learning_rate=2e-5,4e-5,8e-5 \\
        eval.hyperparameters.batch_size=16,32 ...

Every point of the grid is a scoring like any other and lies in `glue/<init>/sweep/<hash>/`. After each, the record gets
the best point so far, for all initialisations the same one, with the list of all points and how it was chosen. By that
mark the rules (R20) know a choice by the scores that are printed, which the closed division does not allow. What a
task would like best by itself is never looked at: that would be one set per task.
"""

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cramming.config import settings_hash
from cramming.files import overwrite_atomically
from cramming.progress import say
from eval.finetune.config import Hyperparameters
from eval.rules.typed_json import number

# Points are compared only where all of this is the same; `conditions` are the model, data, code and device by task.
SAME = ("suite", "seeds", "conditions")


def point_folder(place: Path, hyper: Hyperparameters) -> Path:
    """Where the results of one set are kept, below `glue/<init>`."""
    return place / "sweep" / settings_hash(asdict(hyper))


def choose(glue: Path, inits: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The sections of the best point for the record, by init; its files are copied to `glue/<init>/`.

    The pretrained model decides where it is scored. Only points that all of `inits` have, scored as the latest, count.
    """
    judge = "pretrained" if "pretrained" in inits else inits[0]
    by_init = {init: _points(glue / init / "sweep") for init in inits}
    points = {name: p for name, p in by_init[judge].items() if all(name in found for found in by_init.values())}
    means = {name: statistics.fmean(scores) for name, p in points.items() if (scores := _scores(p)) is not None}
    if not means:
        say("sweep: no point has all its scores yet, nothing is chosen")
        return {}
    best = max(means, key=lambda name: means[name])
    varied = _varied([p["hyperparameters"] for p in points.values()])
    listed = [
        {"hyperparameters": {key: p["hyperparameters"][key] for key in varied}, "mean": means.get(name)}
        for name, p in points.items()
    ]
    entries = ", ".join(points[best]["tasks"])
    mark = {"points": listed, "chosen_by": f"mean of the dev scores of {judge} over {entries}", "mean": means[best]}
    say(f"sweep: {len(points)} points, best {listed[list(points).index(best)]['hyperparameters']}: {means[best]:.2f}")
    return {init: _adopt(glue / init, best, mark) for init in inits}


def _points(folder: Path) -> dict[str, dict[str, Any]]:
    """The finished points that can be compared with the latest, by name."""
    files = sorted(folder.glob("*/section.json"), key=lambda file: file.stat().st_mtime_ns)
    found = {file.parent.name: section for file in files if (section := _section(file))}
    latest = _kind(list(found.values())[-1]) if found else []
    return {name: section for name, section in sorted(found.items()) if _kind(section) == latest}


def _section(file: Path) -> dict[str, Any] | None:
    """None where it is damaged: scoring the point again, from its stored pieces, mends it."""
    try:
        section = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        section = None
    if isinstance(section, dict) and {"tasks", "hyperparameters"} <= section.keys():
        return section
    say(f"sweep: {file} is damaged, its point does not count; score it again")
    return None


def _kind(section: Mapping[str, Any]) -> list[Any]:
    return [section.get(key) for key in SAME]


def _scores(section: Mapping[str, Any]) -> list[float] | None:
    """All scores of a point; None as soon as one is missing."""
    scores = [number(task.get("score")) for task in section["tasks"].values()]
    known = [value for value in scores if value is not None]
    return known if known and len(known) == len(scores) else None


def _varied(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in sets[0] if len({json.dumps(one.get(key)) for one in sets}) > 1]


def _adopt(place: Path, best: str, mark: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the point's results to where an ordinary scoring has them; its section with the mark."""
    point = place / "sweep" / best
    for name in ("pieces", "predictions", "glue.json", "timing.json"):
        _copy(point / name, place / name)
    section: dict[str, Any] = json.loads((point / "section.json").read_text(encoding="utf-8"))
    return {**section, "sweep": dict(mark)}


def _copy(source: Path, target: Path) -> None:
    def write(temporary: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, temporary)
        else:
            shutil.copyfile(source, temporary)

    overwrite_atomically(target, write)
