"""A small search for the one global set of hyperparameters: one grid for all tasks, chosen by the mean over all tasks.

    cramming glue --multirun name=first eval.sweep=true eval.hyperparameters.learning_rate=2e-5,4e-5,8e-5 \\
        eval.hyperparameters.batch_size=16,32 ...

Every point of the grid is a scoring like any other and lies in `glue/<init>/sweep/<hash>/`. After each, the record gets
the best point so far, the same one for all initialisations, with the list of all points and how it was chosen. By that
mark the rules (R20) know a choice by the scores that are printed, which the closed division does not allow.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cramming.config import settings_hash
from cramming.progress import say
from eval.finetune.config import Hyperparameters
from eval.tasks.metrics import mean_of

# Points are compared only where all of this is the same; `conditions` are the model, data, code and device by task.
SAME = ("suite", "seeds", "conditions")


def point_folder(place: Path, hyper: Hyperparameters) -> Path:
    """Where the results of one set are kept, below `glue/<init>`."""
    return place / "sweep" / settings_hash(asdict(hyper))


def choose(glue: Path, inits: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The sections of the best point for the record, by init; its files are copied to `glue/<init>/`, where those of
    other tasks and seeds stay.

    The pretrained model decides where it is scored. Only points that all of `inits` have, scored as the latest, count.
    """
    judge = "pretrained" if "pretrained" in inits else inits[0]
    by_init = {init: _points(glue / init / "sweep") for init in inits}
    points = {
        name: p
        for name, p in by_init[judge].items()
        if all(name in found for found in by_init.values())
    }
    scores = {name: [task["score"] for task in p["tasks"].values()] for name, p in points.items()}
    means = {name: mean for name, found in scores.items() if (mean := mean_of(found)) is not None}
    if not means:
        say("sweep: no point has all its scores yet, nothing is chosen")
        return {}
    best = max(means, key=lambda name: means[name])
    sets = [point["hyperparameters"] for point in points.values()]
    varied = [key for key in sets[0] if len({json.dumps(one.get(key)) for one in sets}) > 1]
    listed = {
        name: {
            "hyperparameters": {key: p["hyperparameters"][key] for key in varied},
            "mean": means.get(name),
        }
        for name, p in points.items()
    }
    chosen_by = f"mean of the dev scores of {judge} over {', '.join(points[best]['tasks'])}"
    mark = {"points": list(listed.values()), "chosen_by": chosen_by, "mean": means[best]}
    compared = (
        f"{len(points)} points, best {listed[best]['hyperparameters']}" if varied else "1 point"
    )
    say(f"sweep: {compared}: {means[best]:.2f}")
    chosen = {}
    for init, found in by_init.items():
        only_here = shutil.ignore_patterns("section.json")
        shutil.copytree(
            glue / init / "sweep" / best, glue / init, ignore=only_here, dirs_exist_ok=True
        )
        # A section comes after all that its choice has looked at: no later point is a scoring that was broken off.
        came_after = max(point["history_entries"] for point in found.values())
        chosen[init] = {**found[best], "history_entries": came_after, "sweep": mark}
    return chosen


def _points(folder: Path) -> dict[str, dict[str, Any]]:
    """The finished points that can be compared with the latest, by name."""
    files = sorted(folder.glob("*/section.json"), key=lambda file: file.stat().st_mtime_ns)
    found = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    same = {name: [section.get(key) for key in SAME] for name, section in found.items()}
    return {
        name: found[name] for name in sorted(found) if same[name] == same[files[-1].parent.name]
    }
