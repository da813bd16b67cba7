"""Checks before a resume: settings, corpus and checkpoints must be those of the run in the log.

The log (cramming/runlog.py) has the time that was spent. If the log was lost, cut short or replaced, a resume would get
spent time back, and with a checkpoint of another run it would get training for free. Any contradiction ends the resume
before anything is written. A whole folder that was restored to an earlier state is not detected.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cramming.budget import BudgetConfig, unit_on
from cramming.config import UserError, expand_home, shown
from cramming.data.manifest import MANIFEST, Manifest
from cramming.progress import budget_text
from cramming.record import RECORD
from cramming.runlog import RUN_LOG, Training

_ANOTHER = "Start again under another name"
# Sections and settings that a resume may change: the folder of the corpus, the scoring of the model, the gate. The log
# has the forced settings and the number of devices of each process.
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
    """Raise UserError if settings, budget or corpus are not those of the run in `folder`.

    Reads only the corpus's manifest.
    """
    refuse_changed_settings(folder, training.recipe, settings)
    start = training.processes[0].start
    limit_at_start = (unit_on(start.clock, start.unit), start.limit)
    if limit_at_start != (unit_on(budget.clock, budget.unit), budget.limit):
        raise UserError(
            f"budget.{budget.unit}={budget.limit:g}: the run in {folder} has a limit of"
            f" {budget_text(start.unit, start.limit)} by the {start.clock} clock. {_ANOTHER}."
        )
    _refuse_other_corpus(folder, settings, corpus, training)


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
    """Raise UserError if a checkpoint has a later step than the log, which was then cut short, lost or replaced."""
    newest = max(_steps_of_files(folder), default=None)
    if not training.processes and (newest is not None or (folder / RECORD).exists()):
        raise UserError(f"{folder}: a run without its log {RUN_LOG}. Restore the log. {_ANOTHER}.")
    if newest is None:
        return
    logged = max((saved.steps for saved in training.all_saved), default=-1)
    if newest > max(logged, training.counters.get("steps", 0)):
        raise UserError(
            f"{folder / 'checkpoints'}: a checkpoint of step {newest}, which {RUN_LOG} does not reach."
            f" Restore the folder's files. {_ANOTHER}."
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
    """Raise UserError if the corpus's manifest is not the one that the run began with."""
    setup = training.setup
    if setup is None or setup.corpus is None:
        return
    hashes = {corpus: setup.manifest_sha256}
    validation = settings["train"]["validation_corpus"]
    if validation is not None:
        place = expand_home(validation, "train.validation_corpus")
        hashes[place] = setup.corpus["validation"]["manifest_sha256"]
    for corpus_folder, sha256 in hashes.items():
        manifest = corpus_folder / MANIFEST
        if manifest.is_file() and Manifest.load(manifest).sha256() != sha256:
            raise UserError(
                f"{corpus_folder}: not the corpus that the run in {folder} was started with (its manifest"
                f" differs). Restore that one. {_ANOTHER}."
            )


def changed_settings(
    recipe: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, earlier value and present value of each setting that differs and that no resume may change.

    The value of a missing setting is None.
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
    """Return the present values of settings that differ from the recipe, by dotted name."""
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
