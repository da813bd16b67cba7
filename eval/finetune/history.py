"""Warnings before a fine-tuning that would give a run a second result to choose from (R17).

Each fine-tuning is an event of the run log, even if its scoring is never completed; the record lists them as
`history`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cramming.progress import say
from cramming.runlog import Scoring
from cramming.scores import is_subset

# settings of a scoring that are the user's choice
PROTOCOL = ("hyperparameters", "selection", "precision", "threads_per_run")


def warn_of_choices(
    history: Sequence[Mapping[str, Any]], scoring: Scoring, todo: Sequence[tuple[str, int]]
) -> None:
    """Print the violations of R17 that the fine-tunings `todo`, by task and seed, will cause."""
    if scoring.hyperparameters.get("freeze"):
        return
    past = [row for row in history if (row["suite"], row["init"]) == (scoring.suite, scoring.init)]
    past = [row for row in past if not row["hyperparameters"].get("freeze")]
    other = _other_settings(past, scoring)
    if other:
        say(
            f"warning: this run was fine-tuned with {other}. A second set of settings keeps it out of the closed"
            " division for good (R17): to keep the first, stop now and set eval.precision, eval.threads or"
            " eval.hyperparameters as they were."
        )
    repeated = []
    for task, seed in todo:
        if _is_repeated(past, scoring, task, seed):
            repeated.append(f"{task} seed {seed}")
    if repeated:
        say(
            f"warning: {', '.join(repeated[:4])} was fine-tuned before, on other data or with its result gone. Another"
            " outcome keeps this run out of the closed division (R17)."
        )


def _other_settings(past: Sequence[Mapping[str, Any]], scoring: Scoring) -> str | None:
    """Return a setting of `PROTOCOL` that differs in an earlier fine-tuning, as text, or None."""
    for row in past:
        for name in PROTOCOL:
            now = getattr(scoring, name)
            if row[name] != now:
                return f"{name}={row[name]}, not {now}"
    return None


def _is_repeated(past: Sequence[Mapping[str, Any]], scoring: Scoring, task: str, seed: int) -> bool:
    """Return whether a task and seed was fine-tuned with these settings before, both times on all of its data."""
    if is_subset(scoring, task) or scoring.checkpoint:
        return False
    same = {name: getattr(scoring, name) for name in PROTOCOL}
    same |= {"task": task, "seed": seed, "subset": False, "version": scoring.version}
    same |= {"checkpoint": None}
    return any(same.items() <= row.items() for row in past)
