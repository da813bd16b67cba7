"""What a resume continues: a run whose log and checkpoints tell of the same past, with the run's own settings.

The log (cramming/runlog.py) says what was spent. Were it lost, cut short or replaced, the clock would give time back;
were a checkpoint another run's, training would be given. Whatever contradicts the log ends the resume before anything
is written. A whole folder that was put back to an earlier moment cannot be told from that moment.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cramming.budget import BudgetConfig, unit_on
from cramming.config import UserError, shown
from cramming.data.manifest import MANIFEST, Manifest
from cramming.progress import budget_text
from cramming.record import RECORD
from cramming.runlog import RUN_LOG, Training

_ANOTHER = "Start again under another name"
# Sections and settings that a resume may change: where the corpus lies, how the model is scored, and what the gate lets
# pass. The log keeps what any of the run's processes forced, and how many devices each had.
_FREE_TO_CHANGE = {
    "checkpoint",
    "data.corpus",
    "data.workers",
    "data.ray",
    "eval",
    "division",
    "gates",
    "forced",
    "parallel",
}
_COMPRESSION = "parallel.compression."  # the part of `parallel` that changes numbers


def check_resume(
    folder: Path,
    settings: Mapping[str, Any],
    corpus: Path,
    budget: BudgetConfig,
    training: Training,
) -> None:
    """Raise UserError where settings, budget or corpus are not those of the run in `folder`, or its log is not whole.

    Nothing is read but the log, the corpus's manifest and the names of the checkpoints.
    """
    refuse_changed_settings(folder, training.recipe, settings)
    start = training.processes[0].start
    if (unit_on(start.clock, start.unit), start.limit) != (
        unit_on(budget.clock, budget.unit),
        budget.limit,
    ):
        raise UserError(
            f"budget.{budget.unit}={budget.limit:g}: the run in {folder} has a limit of"
            f" {budget_text(start.unit, start.limit)} by the {start.clock} clock. {_ANOTHER}."
        )
    _refuse_other_corpus(folder, settings, corpus, training)
    refuse_lost_log(folder, training)


def refuse_changed_settings(
    folder: Path, recipe: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raise UserError where settings differ from the recipe of the run in `folder`."""
    for key, before, now in changed_settings(recipe, settings):
        raise UserError(
            f"{key}={shown(now)}: the run in {folder} was started with {shown(before)}."
            f" Resume with the same settings. {_ANOTHER} to change them."
        )


def refuse_lost_log(folder: Path, training: Training) -> None:
    """Raise UserError where a checkpoint has a later step than the log: that was cut short, or is another run's."""
    newest = max(_steps_of_files(folder), default=None)
    if not training.processes and (newest is not None or (folder / RECORD).exists()):
        raise UserError(f"{folder}: a run without its log {RUN_LOG}. Restore the log. {_ANOTHER}.")
    if newest is None:
        return
    logged = max((saved.steps for saved in training.all_saved), default=-1)
    if newest > max(logged, training.counters.get("steps", 0)):
        raise UserError(
            f"{folder / 'checkpoints'}: a checkpoint of step {newest}, which {RUN_LOG} does not reach."
            f" Put back what was there. {_ANOTHER}."
        )


def _steps_of_files(folder: Path) -> Iterator[int]:
    """Yield the number of steps in the name of each checkpoint."""
    for path in (folder / "checkpoints").glob("*.pt"):
        number = path.stem.rpartition("-")[2]
        if number.isdigit():
            yield int(number)


def _refuse_other_corpus(
    folder: Path, settings: Mapping[str, Any], corpus: Path, training: Training
) -> None:
    """Raise UserError where the corpus's manifest is not the one that the run began with."""
    setup = training.setup
    if setup is None or setup.corpus is None:
        return
    began_with = {corpus: setup.manifest_sha256}
    validation = settings["train"]["validation_corpus"]
    if validation is not None:
        began_with[Path(validation)] = setup.corpus["validation"]["manifest_sha256"]
    for place, sha256 in began_with.items():
        manifest = place / MANIFEST
        if manifest.is_file() and Manifest.load(manifest).sha256() != sha256:
            raise UserError(
                f"{place}: not the corpus that the run in {folder} was started with (its manifest"
                f" differs). Restore that one. {_ANOTHER}."
            )


def changed_settings(
    recipe: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that no resume may change and that differs: its name, the value then, and now.

    A value is None where there is no such setting.
    """
    before, now = leaves(recipe), leaves(settings)
    for each in (before, now):
        each.setdefault(f"{_COMPRESSION}name", "none")
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) == now.get(key):
            continue
        is_free = key in _FREE_TO_CHANGE or key.split(".")[0] in _FREE_TO_CHANGE
        if not is_free or key.startswith(_COMPRESSION):
            yield key, before.get(key), now.get(key)


def all_changes(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the recipe, by dotted name."""
    before, now = leaves(recipe), leaves(settings)
    return {key: value for key, value in now.items() if before.get(key) != value}


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name: `{"a": {"b": 1}}` -> `{"a.b": 1}`; a list is a leaf."""
    if not isinstance(node, Mapping):
        return {path: list(node) if isinstance(node, tuple) else node}
    by_name: dict[str, Any] = {}
    for key, child in node.items():
        by_name |= leaves(child, f"{path}.{key}".lstrip("."))
    return by_name
