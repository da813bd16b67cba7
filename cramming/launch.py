"""The first instructions of a training process: its log and clock begin before torch is imported.

Whatever the process spends is charged: imports, the hashing of a large corpus, a start that is killed.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from cramming.budget import BudgetClock, BudgetConfig
from cramming.config import build
from cramming.data.manifest import corpus_folder
from cramming.files import clear, explain_os_error
from cramming.invocation import Invocation
from cramming.progress import say
from cramming.record import (
    RECORD,
    is_run,
    is_untouched,
    load_record,
    refuse_finished_run,
    run_lock,
    write_record,
)
from cramming.resume import all_changes, check_resume, refuse_lost_log
from cramming.runlog import RUN_LOG, EventLog, read_log, training_of

BrokenRules = Callable[[Mapping[str, Any]], list[str]]


def main(
    recipe: dict[str, Any],
    invocation: Invocation,
    broken_rules: BrokenRules = lambda record: [],
) -> None:
    """Run the verb `pretrain` in this process. `broken_rules` describes the rules that a record breaks."""
    folder = invocation.run_folder
    _require_trackers(invocation)
    if int(os.environ.get("RANK", "0")) != 0:
        if is_run(folder) and load_record(folder)["pretrain"]["status"] == "finished":
            return
        _pretrain(recipe, invocation, None, broken_rules)
        return
    with run_lock(folder):
        if refuse_finished_run(invocation):
            say(f"{folder}: already finished, nothing to do")
            if not (folder / RECORD).exists():
                write_record(folder)
            return
        is_new = is_untouched(folder)
        if invocation.resume and not is_run(folder):
            say(f"--resume: no run in {folder} to resume, a new one begins")
        clock = begin(recipe, invocation)
        with _free_name_unless_trained(folder, clock, is_new):
            _pretrain(recipe, invocation, clock, broken_rules)
        write_record(folder)


def _pretrain(
    recipe: Mapping[str, Any],
    invocation: Invocation,
    clock: BudgetClock | None,
    broken_rules: BrokenRules,
) -> None:
    """Build the typed configuration and train. The code below sees no untyped recipe."""
    from cramming import pretrain
    from cramming.recipe import Config

    corpus = corpus_folder(recipe, invocation.corpora)
    pretrain.main(Config.of(recipe), corpus, invocation, clock, broken_rules)


def check(recipe: dict[str, Any], invocation: Invocation) -> Iterator[str]:
    """Return lines about what would be trained; raise UserError for a mistake. Nothing is written.

    The lines are made lazily: a sweep that reads none measures no speed, which would take memory of a GPU.
    """
    from cramming import pretrain, preview
    from cramming.plan.search import planned_vocabulary
    from cramming.recipe import Config

    _require_trackers(invocation)
    corpus = corpus_folder(recipe, invocation.corpora)
    config = pretrain.check(Config.of(recipe), corpus, invocation.device)
    vocab_size = planned_vocabulary(recipe)
    lines = preview.training_lines(config, corpus, vocab_size, invocation.device)
    return chain([f"run: {invocation.run_folder}"], lines)


def _require_trackers(invocation: Invocation) -> None:
    """Raise UserError for a tracker that cannot be used. Their module is imported only if one is requested."""
    if invocation.trackers:
        from cramming.trackers import require_trackers

        require_trackers(invocation.trackers)


def begin(recipe: Mapping[str, Any], invocation: Invocation) -> BudgetClock:
    """Start the clock of a new or resumed run; raise UserError if the run cannot be resumed."""
    budget = build(BudgetConfig, recipe["budget"], "budget")
    folder = invocation.run_folder
    path = folder / RUN_LOG
    training = training_of(read_log(path))
    refuse_lost_log(folder, training)
    if training.processes:
        check_resume(folder, recipe, corpus_folder(recipe, invocation.corpora), budget, training)
    clock = BudgetClock(budget, EventLog(path), training)
    if not clock.has_ended:
        is_first = not training.processes
        sha256 = clock.start(
            invocation.name,
            recipe["division"],
            recipe=recipe if is_first else None,
            changed=None if is_first else all_changes(training.recipe, recipe),
        )
        if is_first:
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
                error, folder, "run with --resume" if keeps_run else "run again"
            ) from None
        raise
