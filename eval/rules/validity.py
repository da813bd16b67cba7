"""R1 to R9, for both divisions: can the numbers of a record be trusted? A record that breaks one is invalid.

Each check's docstring is the rule's sentence in docs/rules.md (a test compares them); `eval.rules.table` numbers them.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES
from cramming.record import FORMAT_VERSION
from cramming.record_schema import Record, Scores, TaskScore
from cramming.scores import mean_of
from eval.rules.evidence import (
    NO_SCORES,
    Outcome,
    all_or,
    count_of,
    kept,
    official_sizes,
    other_sizes,
)
from eval.tasks.metrics import agree, is_value

# Averages are recomputed from the medians; anything beyond rounding to two digits is an inconsistency.
SCORE_TOLERANCE = 0.006
# Versions of the rules under which a number means the same, and that ask for the same evidence.
COMPARABLE = ("5", "6")


def format_and_versions(record: Record) -> Outcome:
    """The record has this version's format, and names the suite's version and a comparable version of the rules (5 or
    6; an earlier one only in this project's own record, known by its hash).
    """
    said = f"format {record.format}, suite {record.suite_version}, rules {record.rules_version}"
    comparable = record.known or record.rules_version in COMPARABLE
    return record.format == FORMAT_VERSION and bool(record.suite_version) and comparable, said


def finite_numbers(record: Record) -> Outcome:
    """Every number in the record is finite; what could not be measured is null."""

    def walk(node: Any, path: str) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{path}{key} is {value}"
            elif isinstance(value, (dict, list)):
                yield from walk(value, f"{path}{key}.")

    return all_or(walk(record.raw, ""), "all numbers are finite")


def pretraining_finished(record: Record) -> Outcome:
    """Pretraining ended as finished, and its steps, tokens, parameters, losses and speed are recorded."""
    training = record.training
    if training.status != "finished":
        why = (
            ": the budget ended without a step that was kept"
            if training.status == "exhausted"
            else ", not finished"
        )
        return False, f"pretraining is {training.status or 'of unknown status'}{why}"
    needed = ("parameters", "steps", "tokens", "train_loss", "tokens_per_second")
    loss = "replaced_token_loss" if training.objective == "rtd" else "loss"
    values = {key: getattr(training, key) for key in needed} | {
        f"validation.{loss}": getattr(training.validation, loss)
    }
    absent = (f"pretrain.{key} is missing" for key, value in values.items() if value is None)
    return all_or(absent, f"finished after {training.steps} steps")


def budget_kept(record: Record) -> Outcome:
    """The budget names its unit and limit, training spent no more than the limit, and the overrun is 0."""
    budget = record.training.budget
    limit, spent, seconds, overrun = (
        budget.limit,
        budget.spent,
        budget.spent_seconds,
        budget.overrun_seconds,
    )
    if not budget.unit or limit is None or spent is None or seconds is None or overrun is None:
        keys = ("unit", "limit", "spent", "spent_seconds", "overrun_seconds")
        return (
            False,
            f"{', '.join(f'pretrain.budget.{k}' for k in keys if getattr(budget, k) is None)} is missing",
        )
    ok = limit > 0 and spent <= limit * (1 + 1e-9) and overrun == 0
    return ok, f"{spent:.6g} of {limit:.6g} {budget.unit}, {seconds:.1f} s, overrun {overrun:g} s"


def journal_agrees(record: Record) -> Outcome:
    """The journal budget.jsonl lies beside the record, has the recorded SHA-256, and by itself gives the recorded
    processes, steps, seconds and spent budget; every process had the limit of config.yaml, read the corpus of the
    record and went on from a checkpoint of this journal only, none trained after the run's end, and metrics.jsonl knows
    of no later step.
    """
    if record.journal is None:
        return False, "budget.jsonl is not beside the record"
    return all_or(record.journal.problems, record.journal.summary or "")


def scores_stated(record: Record) -> Outcome:
    """Scores are those of the development split, and state the suite, the seeds and the selection."""
    problems = (
        [] if record.trained else ["no scores of the trained model" if record.glue else NO_SCORES]
    )
    for init, section in record.glue.items():
        if section.suite not in AVERAGES:
            problems.append(
                f"glue.{init}.suite is {section.suite!r}, not one of {', '.join(AVERAGES)}"
            )
        stated = {"seeds": section.seeds, "selection": section.selection, "tasks": section.tasks}
        problems += [f"glue.{init}.{key} is missing" for key, value in stated.items() if not value]
        if section.split != "dev":
            problems.append(f"glue.{init}.split is {section.split!r}, not 'dev'")
    return all_or(problems, "dev split; seeds and selection stated")


def scores_are_medians(record: Record) -> Outcome:
    """A score is 100 times the median of the task's main metric over all stated seeds, whose values are within the
    metric's range and in the history of fine-tunings; a missing score is null and says why.
    """
    problems = []
    for init, entry, task in record.tasks():
        wrong = _score_problems(entry, task, len(record.glue[init].seeds))
        problems += [f"{init}/{entry}{said}" for said in wrong]
    problems += _against_history(record)
    count = len(record.history_file.entries) if record.history_file else 0
    told = (
        f"{count} fine-tunings in the history"
        if count
        else "no history: the record is older than that"
    )
    return all_or(
        problems, f"every score is the median over its seeds; {told}" if record.glue else NO_SCORES
    )


def _score_problems(entry: str, task: TaskScore, seeds: int) -> Iterator[str]:
    main = ENTRIES[entry][0].main_metric if entry in ENTRIES else task.main_metric
    if task.main_metric != main:
        yield f": the main metric is {main}, not {task.main_metric}"
    for name, metric in task.metrics.items():
        for value in metric.per_seed:
            if value is not None and not is_value(name, value):
                yield f": {value:g} is no value of {name}"
    found = task.metrics.get(main or "")
    measured = [value for value in (found.per_seed if found else []) if value is not None]
    if task.score is None:
        if not task.problem:
            yield " has neither a score nor the reason why not"
    elif not measured or len(measured) != seeds:
        yield f": {len(measured)} values for {seeds} seeds"
    elif abs(task.score - 100 * statistics.median(measured)) > SCORE_TOLERANCE:
        yield f": score {task.score:.2f}, median of seeds {100 * statistics.median(measured):.2f}"


def _against_history(record: Record) -> Iterator[str]:
    """Where glue/history.jsonl is not the recorded one, or has another value, or none. The known records are of before
    there was a history."""
    past = record.history_file
    if past is None:
        if record.history or (record.glue and not record.known):
            yield "glue/history.jsonl is not beside the record"
    elif past.problem:
        yield past.problem
    elif past.sha256 is None or record.history is None or record.history.sha256 != past.sha256:
        yield "the SHA-256 of glue/history.jsonl is not the recorded one"
    else:
        for init, section in record.glue.items():
            if lacking := sorted(set(_not_in_history(record, init, section))):
                yield f"not in the history as recorded: {init}/{', '.join(lacking)}"


def _not_in_history(record: Record, init: str, section: Scores) -> Iterator[str]:
    """The entries of a section with a value that the history does not have for the same seed and settings.

    Witnesses are the lines that the section came after, and of several of the same run the last: it is what was kept.
    """
    told: dict[tuple[str, str], float | None] = {}
    for line in kept(record, init):
        told |= {(entry, str(line.seed)): value for entry, value in line.scores.items()}
    for entry, task in section.tasks.items():
        for seed, value in zip(section.seeds, task.main.per_seed):
            if value is not None and not agree(value, told.get((entry, str(seed)))):
                yield entry


def averages_complete(record: Record) -> Outcome:
    """Every average of the suite is there with its definition in words: the mean of all its entries, or null with the
    list of what is missing.
    """
    problems = (
        p for init, section in record.glue.items() for p in _average_problems(init, section)
    )
    return all_or(problems, "each average is the mean of all its entries, or not printed")


def _average_problems(init: str, section: Scores) -> Iterator[str]:
    scores = {name: task.score for name, task in section.tasks.items()}
    for name, average in AVERAGES.get(section.suite or "", {}).items():
        found, where = section.averages.get(name), f"{init}/{name}"
        absent = [entry for entry in average.entries if scores.get(entry) is None]
        expected = mean_of([scores.get(entry) for entry in average.entries])
        if found is None:
            yield f"{where} is not in the record"
            continue
        if not found.definition:
            yield f"{where} has no definition"
        if found.value is None:
            if not found.missing:
                yield f"{where} has neither a value nor a list of what is missing"
        elif expected is None:
            yield f"{where} has a value although {', '.join(absent)} is missing"
        elif abs(found.value - expected) > SCORE_TOLERANCE:
            yield f"{where} is {found.value:.2f}, its entries give {expected:.2f}"


def subsets_marked(record: Record) -> Outcome:
    """The official numbers of examples are GLUE's, and a task that was trained or scored on other than these is marked
    as a subset.
    """
    problems, marked = [], []
    for init, entry, task in record.tasks():
        name = f"{init}/{entry}"
        for key, size in official_sizes(record, init, entry).items():
            if getattr(task, f"official_{key}") != size:
                problems.append(
                    f"{name}: official_{key} is {count_of(task, f'official_{key}')}, not {size}"
                )
        if task.subset:
            marked.append(name)
        elif differs := other_sizes(record, init, entry, task):
            problems.append(f"{name} is not marked as a subset: {', '.join(differs)}")
    return all_or(problems, f"marked subsets: {', '.join(marked) or 'none'}")
