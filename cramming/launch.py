"""The first instructions of a training process: its log and clock begin before torch is imported.

Whatever the process spends is charged: imports, the hashing of a large corpus, a start that is killed.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cramming.budget import BudgetClock, BudgetConfig
from cramming.config import build
from cramming.files import clear, explain_os_error
from cramming.progress import say
from cramming.record import (
    RECORD,
    is_run,
    is_untouched,
    load_record,
    refuse_finished_run,
    run_folder,
    run_lock,
    write_record,
)
from cramming.resume import all_changes, check_resume, refuse_lost_log
from cramming.runlog import RUN_LOG, EventLog, read_log, training_of

BrokenRules = Callable[[Mapping[str, Any]], list[str]]


def main(settings: dict[str, Any], broken_rules: BrokenRules = lambda record: []) -> None:
    """Run the verb `pretrain`, once per process. `broken_rules`: what a run breaks before its first step, in words."""
    folder = run_folder(settings)
    if int(os.environ.get("RANK", "0")) != 0:
        if is_run(folder) and load_record(folder)["pretrain"]["status"] == "finished":
            return
        from cramming import pretrain

        pretrain.main(settings, None, broken_rules)
        return
    with run_lock(folder):
        if refuse_finished_run(settings):
            say(f"{folder}: already finished, nothing to do")
            if not (folder / RECORD).exists():
                write_record(folder)
            return
        is_new = is_untouched(folder)
        if settings["resume"] and not is_run(folder):
            say(f"resume=true: no run in {folder} to resume, a new one begins")
        clock = begin(folder, settings)
        with _free_name_unless_trained(folder, clock, is_new):
            from cramming import pretrain

            pretrain.main(settings, clock, broken_rules)
        write_record(folder)


def check(settings: dict[str, Any]) -> None:
    """Raise UserError for what can be known to be wrong before training; nothing is written."""
    from cramming import pretrain

    pretrain.check(settings)


def begin(folder: Path, settings: Mapping[str, Any]) -> BudgetClock:
    """Start the clock of a new run, or of one that is resumed; UserError where it cannot be."""
    budget = build(BudgetConfig, settings["budget"], "budget")
    path = folder / RUN_LOG
    training = training_of(read_log(path))
    refuse_lost_log(folder, training)
    if training.processes:
        check_resume(folder, settings, budget, training)
    clock = BudgetClock(budget, EventLog(path), training)
    if not clock.has_ended:
        recipe = training.processes[0].start.recipe if training.processes else None
        changed = None if recipe is None else all_changes(recipe, settings)
        sha256 = clock.start(
            settings["division"],
            recipe=settings if recipe is None else None,
            changed=changed,
        )
        if recipe is None:
            say(f"{path}: first event {sha256}")
    return clock


@contextmanager
def _free_name_unless_trained(folder: Path, clock: BudgetClock, is_new: bool) -> Iterator[None]:
    """Clear the folder of a new run that ends before its first step: there is nothing to resume."""
    try:
        yield
    except BaseException as error:
        clock.close("failed")
        keeps_run = not is_new or clock.has_trained or getattr(error, "keeps_run", False)
        if keeps_run:
            write_record(folder)
        else:
            clear(folder)
        if isinstance(error, OSError):
            raise explain_os_error(
                error, folder, "run with resume=true" if keeps_run else "run again"
            ) from None
        raise
