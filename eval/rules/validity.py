"""Rules for both divisions: the conditions under which a run's numbers are listed.

Each check's docstring is the rule's sentence in docs/reference/rules.md; `eval.rules.table` numbers them.
"""

from collections.abc import Iterator

from cramming.budget import RULES_VERSION
from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES
from cramming.record_schema import Record, TaskScore
from eval.rules.evidence import NO_SCORES, Outcome, all_or, count_of, official_sizes, other_sizes
from eval.tasks.metrics import is_value

ROUNDING = 1e-9


def versions_named(record: Record) -> Outcome:
    """The log names the suite's version, and version 7 of the rules."""
    words = f"suite {record.suite_version}, rules {record.rules_version}"
    return bool(record.suite_version) and record.rules_version == RULES_VERSION, words


def pretraining_finished(record: Record) -> Outcome:
    """Pretraining ended as finished, and its model was validated and exported."""
    training = record.training
    if training.status == "exhausted":
        return False, "the budget ended without a completed step"
    if training.status != "finished":
        return False, f"pretraining is {training.status or 'of unknown status'}, not finished"
    return True, f"finished after {training.steps} steps"


def budget_kept(record: Record) -> Outcome:
    """Training spent no more than the limit of its budget."""
    budget = record.training.budget
    limit, spent, seconds = budget.limit, budget.spent, budget.spent_seconds
    if limit is None or spent is None or seconds is None:
        return False, "no budget on record"
    words = f"{spent:.6g} of {limit:.6g} {budget.unit}, {seconds:.1f} s"
    return spent <= limit * (1 + ROUNDING) and budget.overrun_seconds == 0, words


def scoring_finished(record: Record) -> Outcome:
    """The trained model is scored on every development set of its suite, and no scoring is unfinished."""
    if record.unfinished:
        return False, "; ".join(record.unfinished)
    if record.trained is None:
        return False, "no scores of the trained model" if record.glue else NO_SCORES
    return True, f"{len(record.trained.tasks)} sets scored"


def scores_in_range(record: Record) -> Outcome:
    """Scores are of a suite that this version knows, each value is within its metric's range, the main metric is the
    task's, and a score that is missing says why.
    """
    problems: list[str] = []
    for init, section in record.glue.items():
        if section.suite not in AVERAGES:
            problems.append(f"{init}: no suite {section.suite}")
        for entry, task in section.tasks.items():
            wrong = _score_problems(entry, task)
            problems += [f"{init}/{entry}: {problem}" for problem in wrong]
    return all_or(problems, "all values in range" if record.glue else NO_SCORES)


def _score_problems(entry: str, task: TaskScore) -> Iterator[str]:
    if entry not in ENTRIES:
        yield "no such entry"
        return
    main = ENTRIES[entry][0].main_metric
    if task.main_metric != main:
        yield f"the main metric is {main}, not {task.main_metric}"
    if task.task != ENTRIES[entry][0].name or task.title != ENTRIES[entry][1].title:
        yield f"it is called {task.title} of {task.task}"
    for name, metric in task.metrics.items():
        for value in metric.per_seed:
            if value is not None and not is_value(name, value):
                yield f"{value:g} is no value of {name}"
    if task.score is None and not task.problem:
        yield "neither a score nor the reason why not"


def subsets_marked(record: Record) -> Outcome:
    """The official numbers of examples are GLUE's, and a task that was trained or scored on other than these is marked
    as a subset.
    """
    problems: list[str] = []
    marked: list[str] = []
    for init, entry, task in record.tasks():
        name = f"{init}/{entry}"
        for key, size in official_sizes(record, init, entry).items():
            official = f"official_{key}"
            if getattr(task, official) != size:
                problems.append(f"{name}: {official} is {count_of(task, official)}, not {size}")
        differs = other_sizes(record, init, entry, task)
        if task.subset:
            marked.append(name)
        elif differs:
            problems.append(f"{name} is not marked as a subset: {', '.join(differs)}")
    return all_or(problems, f"marked subsets: {', '.join(marked) or 'none'}")
