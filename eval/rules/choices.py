"""R20's evidence: what a result may have been chosen from, by the record and the history of fine-tunings."""

import json
from collections.abc import Mapping

from eval.rules.reading import Record, at, entries, few, number
from eval.rules.validity import before, fine_tuned, made_with

UNNAMED = "scored epochs not on record"


def other_sets(record: Record, init: str, section: Record) -> list[str]:
    """How many sets of hyperparameters there were to choose from: in a sweep, in the history of the trained model."""
    competes = init == "pretrained"
    runs = [*fine_tuned(record, init), *_tried_elsewhere(record)] if competes else []
    count = len({json.dumps(made_with(run), sort_keys=True, default=str) for run in (section, *runs)})
    said = [swept(section), f"one of {count} sets in its history" if count > 1 else "", _other_outcomes(runs)]
    names = ", ".join(str(at(other, "run")) for other in entries(at(record, "elsewhere")))
    return [*filter(None, said), *([f"same weights as {names}"] if competes and names and any(said) else [])]


def _tried_elsewhere(record: Record) -> list[Record]:
    """What other runs of the report fine-tuned of the same weights and suite before this one began: what came later
    cannot have been a choice for this one. Records of before version 5 do not say when they began."""
    own = fine_tuned(record, "pretrained")
    began, suite = min((str(run.get("time")) for run in own), default=""), at(record, "glue.pretrained.suite")
    lines = [line for other in entries(at(record, "elsewhere")) for line in entries(at(other, "lines"))]
    tried = [line for line in lines if isinstance(line, Mapping) and line.get("suite") == suite]
    return [line for line in tried if not before(record, "5") and str(line.get("time")) <= began]


def _other_outcomes(runs: list[Record]) -> str:
    """Such as `rte seed 0 has 2 outcomes in its history`: one set fine-tuned again, on all data and by the same version
    of the code, with other scores."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        scores = run.get("scores")
        same = json.dumps([made_with(run), run.get("seed"), run.get("version")], sort_keys=True, default=str)
        for entry, value in scores.items() if isinstance(scores, Mapping) and run.get("subset") is not True else ():
            found.setdefault((f"{entry} seed {run.get('seed')}", same), set()).add(repr(value))
    several = [f"{name} has {len(values)}" for (name, _), values in found.items() if len(values) > 1]
    return f"{few(several)} outcomes in its history" if several else ""


def other_epochs(section: Record) -> list[str]:
    """What keeps the scored weights from being, by the record, those after the last epoch."""
    tasks, last, silent, others = section.get("tasks"), number(section, "hyperparameters.epochs"), False, []
    for name, task in tasks.items() if isinstance(tasks, Mapping) else ():
        epochs, values = at(task, "scored_epochs"), entries(at(task, f"metrics.{at(task, 'main_metric')}.per_seed"))
        # A run whose loss is not finite ends before its last epoch, and has no score.
        scored = [number(epoch) for epoch, value in zip(entries(epochs), values) if number(value) is not None]
        silent = silent or epochs is None
        if epochs is not None and (len(entries(epochs)) != len(values) or any(e != last for e in scored)):
            others.append(str(name))
    return [UNNAMED] * silent + ([f"not the last epoch of every seed of {', '.join(others)}"] if others else [])


def swept(section: Record) -> str:
    """Such as `best of 6 sets of hyperparameters`; empty where nothing was chosen in a sweep."""
    if section.get("sweep") is None:
        return ""
    return f"best of {len(entries(at(section, 'sweep.points')))} sets of hyperparameters"
