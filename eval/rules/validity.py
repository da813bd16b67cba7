"""The rules for both divisions: can the numbers of a record be trusted? A record that breaks one is invalid.

Each check's docstring is the rule's sentence in docs/rules.md (a test compares them); `eval.rules.table` numbers them.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from cramming.data.task_files import ENTRIES
from cramming.journal import MAX_HEARTBEAT_SECONDS
from cramming.record import FORMAT_VERSION
from eval.finetune.history import PROTOCOL, names
from eval.rules.reading import Outcome, Record, all_or, at, entries, mean_of, not_written, number, sections, tasks_of
from eval.tasks.metrics import lowest
from eval.tasks.suites import AVERAGES

# Versions of the rules under which a number means the same. Version 2 only allows one more way to start (R13). Version
# 3 keeps sweeps (R20) out of the closed division: older records show theirs, so they are judged by that as well.
# Versions 4 and 5 ask for evidence of what was always demanded. A version that scores otherwise, or forbids what older
# records do not show, begins a new tuple.
COMPARABLE = ("1", "2", "3", "4", "5")
# Averages are recomputed from the medians; anything beyond rounding to two digits is an inconsistency.
SCORE_TOLERANCE = 0.006
VALUE_TOLERANCE = 1e-6  # another version of numpy may differ in the last bits
JOURNAL_ROUNDING_SECONDS = 0.01
NO_PRETRAINING = "no pretraining in this record"
# What pretraining writes since version 5. A run cannot go on under another version of the rules than it began with.
SINCE_5 = ("pretrain.journal_start", "pretrain.final_files", "pretrain.compiled", "corpus.changed")


def before(record: Record, version: str) -> bool:
    """Whether the record is of rules older than `version`, which did not ask for the evidence that it brought."""
    return at(record, "rules_version") in COMPARABLE[: COMPARABLE.index(version)]


def format_and_versions(record: Record) -> Outcome:
    """The record has this version's format, and names the suite's version and a comparable version of the rules (1, 2,
    3, 4 or 5), not an older one than wrote it.
    """
    found = [at(record, key) for key in ("format", "suite_version", "rules_version")]
    ok = found[0] == FORMAT_VERSION and bool(found[1]) and str(found[2]) in COMPARABLE
    said = f"format {found[0]}, suite {found[1]}, rules {found[2]}"
    later = [path for path in SINCE_5 if at(record, path) is not None]
    later += ["a linked journal"] if at(record, "journal.chained") is True else []
    if later and before(record, "5"):
        return False, f"{said}, but {', '.join(later)} as only version 5 writes it"
    return ok, said


def finite_numbers(record: Record) -> Outcome:
    """Every number in the record is finite; what could not be measured is null."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{path} is {value}"
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from walk(inner, f"{path}[{index}]")

    return all_or(list(walk(record, "")), "all numbers are finite")


def pretraining_finished(record: Record) -> Outcome:
    """Pretraining ended as finished, and its steps, tokens, parameters, losses and speed are recorded."""
    if at(record, "pretrain") is None:
        return True, NO_PRETRAINING
    status = at(record, "pretrain.status")
    if status != "finished":
        why = ": the budget ended without a step that was kept" if status == "exhausted" else ", not finished"
        return False, f"pretraining is {status or 'of unknown status'}{why}"
    needed = ("parameters", "steps", "tokens", "train_loss", "validation.loss", "tokens_per_second")
    absent = [f"pretrain.{key} is missing" for key in needed if number(record, f"pretrain.{key}") is None]
    return all_or(absent, f"finished after {at(record, 'pretrain.steps')} steps")


def budget_kept(record: Record) -> Outcome:
    """The budget names its unit and limit, training spent no more than the limit, and the overrun is 0."""
    if at(record, "pretrain") is None:
        return True, NO_PRETRAINING
    unit = at(record, "pretrain.budget.unit")
    keys = ("limit", "spent", "spent_seconds", "overrun_seconds")
    limit, spent, seconds, overrun = (number(record, f"pretrain.budget.{key}") for key in keys)
    if not unit or limit is None or spent is None or seconds is None or overrun is None:
        missing = not_written(record, ("pretrain.budget." + key for key in ("unit", *keys)))
        return False, f"{', '.join(missing) or 'a number of pretrain.budget'} is missing"
    ok = limit > 0 and spent <= limit * (1 + 1e-9) and overrun == 0
    return ok, f"{spent:.6g} of {limit:.6g} {unit}, {seconds:.1f} s, overrun {overrun:g} s"


def journal_agrees(record: Record) -> Outcome:
    """The journal budget.jsonl lies beside the record, has the recorded SHA-256, and by itself gives the recorded
    processes, steps, seconds and spent budget; every process had the limit of config.yaml, read the corpus of the
    record and went on from a checkpoint of this journal only, none trained after the run's end, and metrics.jsonl knows
    of no later step.
    """
    if at(record, "pretrain") is None:
        return True, NO_PRETRAINING
    journal = at(record, "journal")
    if not isinstance(journal, Mapping):
        return False, "budget.jsonl is not beside the record"
    if journal.get("problem"):
        return False, str(journal["problem"])
    problems = []
    if journal.get("sha256") != at(record, "pretrain.budget.journal_sha256"):
        problems.append("the SHA-256 of budget.jsonl is not the recorded one")
    if journal.get("processes") != at(record, "pretrain.budget.processes"):
        problems.append("the processes in budget.jsonl are not those of the record")
    if journal.get("steps") != at(record, "pretrain.steps"):
        problems.append(f"{journal.get('steps')} steps in budget.jsonl, {at(record, 'pretrain.steps')} in the record")
    total, last = number(journal, "total_seconds"), number(journal, "last_step_seconds")
    seconds = number(record, "pretrain.budget.spent_seconds")
    if total is None or last is None or seconds is None:
        problems.append("no seconds to compare")
    elif abs(seconds - last) > JOURNAL_ROUNDING_SECONDS or seconds > total + JOURNAL_ROUNDING_SECONDS:
        problems.append(
            f"budget.jsonl has the last step at {last:.2f} s of {total:.2f} s, the record at {seconds:.2f} s"
        )
    logged = number(journal, "logged_seconds")
    if logged is not None and total is not None and logged > total + MAX_HEARTBEAT_SECONDS:
        problems.append(f"metrics.jsonl has a step at {logged:.2f} s, budget.jsonl ends at {total:.2f} s")
    problems += [str(problem) for problem in entries(journal.get("problems"))]
    form, found = _journal_form(record, journal)
    summary = f"{len(entries(journal.get('processes')))} process(es), {total or 0:.1f} s in the journal{form}"
    uncharged = number(journal, "uncharged_seconds") or 0.0
    if uncharged > 60 + 0.01 * (total or 0.0):  # beyond what setting a clock by the network comes to
        summary += f"; by the wall clock {uncharged:.0f} s more: the machine slept, or a clock was set"
    return all_or([*problems, *found], summary)


def _journal_form(record: Record, journal: Record) -> tuple[str, list[str]]:
    """What only journals have since version 5: each line names the one before it, each start its limit."""
    if not journal.get("chained"):
        form = ", of before version 5: neither its lines nor its checkpoints are linked"
        return form, [] if before(record, "5") else ["the lines of budget.jsonl do not name the ones before them"]
    problems = []
    if journal.get("start") != at(record, "pretrain.journal_start"):
        problems.append("budget.jsonl is not the journal that the run began with")
    if number(journal, "logged_seconds") is None:
        problems.append("metrics.jsonl is not beside the record, or has no training step: restore it")
    read = entries(journal.get("corpora"))
    if None in read or not read:
        problems.append("budget.jsonl does not name the corpus that each process read: an earlier version began it")
    elif any(corpus != at(record, "corpus.manifest_sha256") for corpus in read):
        problems.append("a process in budget.jsonl read another corpus than the record's (by SHA-256 of the manifest)")
    unit, limit = at(record, "pretrain.budget.unit"), number(record, "pretrain.budget.limit")
    limits = {"config.yaml": journal.get("config_budget"), "the record": [unit, limit]}
    if not journal.get("config_there"):
        del limits["config.yaml"]
        problems.append("config.yaml is not beside the record; restore it (record.json: section config)")
    for process, budget in enumerate(entries(journal.get("budgets"))):
        problems += [
            f"process {process} had a limit of {_words(budget)}, {name} has {_words(other)}"
            for name, other in limits.items()
            if other != budget
        ]
    spent = number(journal, f"spent.{unit}")
    if unit != "hours" and spent != number(record, "pretrain.budget.spent"):
        problems.append(f"{spent} {unit} spent in budget.jsonl, {at(record, 'pretrain.budget.spent')} in the record")
    return "", problems


def _words(budget: Any) -> str:
    return f"{budget[1]} {budget[0]}" if isinstance(budget, list) and len(budget) == 2 else "none that can be read"


def scores_stated(record: Record) -> Outcome:
    """Scores are those of the development split, and state the suite, the seeds and the selection."""
    problems = [] if "pretrained" in sections(record) else ["no scores of the trained model"]
    for init, section in sections(record).items():
        if str(section.get("suite")) not in AVERAGES:
            problems.append(f"glue.{init}.suite is {section.get('suite')!r}, not one of {', '.join(AVERAGES)}")
        problems += [f"glue.{init}.{key} is missing" for key in not_written(section, ("seeds", "selection", "tasks"))]
        if section.get("split") != "dev":
            problems.append(f"glue.{init}.split is {section.get('split')!r}, not 'dev'")
    return all_or(problems, "dev split; seeds and selection stated")


def scores_are_medians(record: Record) -> Outcome:
    """A score is 100 times the median of the task's main metric over all stated seeds, whose values are within the
    metric's range and in the history of fine-tunings; a missing score is null and says why.
    """
    seeds = {init: len(entries(section.get("seeds"))) for init, section in sections(record).items()}
    problems = []
    for init, entry, task in tasks_of(record):
        name = f"{init}/{entry}"
        main = ENTRIES[entry][0].main_metric if entry in ENTRIES else task.get("main_metric")
        if task.get("main_metric") != main:
            problems.append(f"{name}: the main metric is {main}, not {task.get('main_metric')}")
        problems += [f"{name}: {value:g} is no value of {metric}" for metric, value in _out_of_range(task)]
        values = [number(v) for v in entries(at(task, f"metrics.{main}.per_seed"))]
        measured = [v for v in values if v is not None]
        score = number(task, "score")
        if score is None:
            if not task.get("problem"):
                problems.append(f"{name} has neither a score nor the reason why not")
        elif not measured or len(measured) != seeds[init]:
            problems.append(f"{name}: {len(measured)} values for {seeds[init]} seeds")
        elif abs(score - 100 * statistics.median(measured)) > SCORE_TOLERANCE:
            problems.append(f"{name}: score {score:.2f}, median of seeds {100 * statistics.median(measured):.2f}")
    problems += _against_history(record)
    count = len(entries(at(record, "scorings.entries")))
    told = f"{count} fine-tunings in the history" if count else "no history, for which version 5 was the first to ask"
    return all_or(problems, f"every score is the median over its seeds; {told}")


def _out_of_range(task: Record) -> Iterator[tuple[str, float]]:
    metrics = task.get("metrics")
    for name, found in metrics.items() if isinstance(metrics, Mapping) else ():
        for value in map(number, entries(at(found, "per_seed"))):
            if value is not None and not lowest(name) - VALUE_TOLERANCE <= value <= 1 + VALUE_TOLERANCE:
                yield str(name), value


def _against_history(record: Record) -> Iterator[str]:
    """Where glue/history.jsonl is not the recorded one, or has another value, or none: what was scored before there was
    a history need not be in it."""
    past, older = at(record, "scorings"), before(record, "5")
    if past is None:
        if at(record, "history") or (sections(record) and not older):
            yield "glue/history.jsonl is not beside the record"
        return
    if problem := at(past, "problem"):
        yield str(problem)
    elif not names(at(record, "history"), at(past, "sha256")):
        yield "the SHA-256 of glue/history.jsonl is not the recorded one"
    else:
        for init, section in sections(record).items():
            lacking = sorted(set(_not_in_history(record, init, section, older)))
            yield from [f"not in the history as recorded: {init}/{', '.join(lacking)}"] if lacking else []


def _not_in_history(record: Record, init: str, section: Record, older: bool) -> Iterator[str]:
    """The entries of a section with a value that the history does not have for the same seed and settings.

    Witnesses are the lines that the section came after, and of several of the same run the last: it is what was kept.
    """
    told: dict[tuple[str, str], float | None] = {}
    for run in fine_tuned(record, init, named=True):
        scores = run.get("scores")
        if made_with(run) == made_with(section) and isinstance(scores, Mapping):
            told |= {(str(entry), str(run.get("seed"))): number(value) for entry, value in scores.items()}
    for _, entry, task in tasks_of({"glue": {init: section}}):
        seeds = entries(section.get("seeds"))
        values = entries(at(task, f"metrics.{at(task, 'main_metric')}.per_seed"))
        for seed, value in zip(seeds, map(number, values)):
            known = told.get((entry, str(seed)))
            if value is None or (older and (entry, str(seed)) not in told):
                continue
            if known is None or abs(value - known) > VALUE_TOLERANCE:
                yield entry


def fine_tuned(record: Record, init: str, named: bool = False) -> list[Record]:
    """What the history has of an initialisation, on the suite that the record holds; in full, with what a scoring that
    was interrupted has added, or the lines that the record has `named` and the section came after."""
    section = sections(record).get(init)
    lines = entries(at(record, "scorings.entries"))
    counts = (number(record, "history.entries"), number(section, "history_entries"))
    known = lines[: int(min(count or 0 for count in counts))] if named else lines
    runs = [run for run in known if isinstance(run, Mapping)]
    return [run for run in runs if run.get("init") == init and run.get("suite") == at(section, "suite")]


def kept(record: Record, init: str) -> dict[str, Record]:
    """The line of the history that each result of a section was kept with, by the name of its predictions' file."""
    section = sections(record).get(init, {})
    seeds = set(map(str, entries(section.get("seeds"))))
    return {
        f"{run.get('task')}-seed{run.get('seed')}.npz": run
        for run in fine_tuned(record, init, named=True)
        if made_with(run) == made_with(section) and str(run.get("seed")) in seeds
    }


def made_with(section: Record) -> dict[str, Any]:
    """The settings that the scores of a section, or an entry of the history, were made with."""
    return {key: section.get(key) for key in PROTOCOL}


def averages_complete(record: Record) -> Outcome:
    """Every average of the suite is there with its definition in words: the mean of all its entries, or null with the
    list of what is missing.
    """
    problems = [p for init, section in sections(record).items() for p in _average_problems(init, section)]
    return all_or(problems, "each average is the mean of all its entries, or not printed")


def _average_problems(init: str, section: Record) -> Iterator[str]:
    tasks = section.get("tasks")
    scores = {str(k): number(v, "score") for k, v in tasks.items()} if isinstance(tasks, Mapping) else {}
    for name, average in AVERAGES.get(str(section.get("suite")), {}).items():
        found, where = at(section, f"averages.{name}"), f"{init}/{name}"
        value, missing = number(found, "value"), entries(at(found, "missing"))
        expected = mean_of(average.entries, scores)
        if not at(found, "definition"):
            yield f"{where} has no definition" if found else f"{where} is not in the record"
        if value is None and not missing:
            yield f"{where} has neither a value nor a list of what is missing"
        elif value is not None and expected is None:
            absent = [entry for entry in average.entries if scores.get(entry) is None]
            yield f"{where} has a value although {', '.join(absent)} is missing"
        elif value is not None and expected is not None and abs(value - expected) > SCORE_TOLERANCE:
            yield f"{where} is {value:.2f}, its entries give {expected:.2f}"


def subsets_marked(record: Record) -> Outcome:
    """The official numbers of examples are GLUE's, and a task that was trained or scored on other than these is marked
    as a subset.
    """
    problems, marked = [], []
    for init, entry, task in tasks_of(record):
        name = f"{init}/{entry}"
        for key, size in _official_sizes(record, init, entry).items():
            if number(task, f"official_{key}") != size:
                problems.append(f"{name}: official_{key} is {_count(task, f'official_{key}')}, not {size}")
        if task.get("subset") is True:
            marked.append(name)
        elif differs := other_sizes(record, init, entry, task):
            problems.append(f"{name} is not marked as a subset: {', '.join(differs)}")
    return all_or(problems, f"marked subsets: {', '.join(marked) or 'none'}")


def other_sizes(record: Record, init: str, entry: str, task: Record) -> list[str]:
    """Such as `train 100 of 8551`, where a task's examples are not as many as the official."""
    found = _official_sizes(record, init, entry).items()
    return [
        f"{key.removesuffix('_examples')} {_count(task, key)} of {size}" for key, size in found
        if number(task, key) != size
    ]  # fmt: skip


def _official_sizes(record: Record, init: str, entry: str) -> dict[str, int]:
    """By the task table, whatever the record says; only GLUE itself has official sizes."""
    if at(sections(record).get(init), "suite") != "glue" or entry not in ENTRIES:
        return {}
    task, source = ENTRIES[entry]
    return {"train_examples": task.train.examples, "eval_examples": source.examples}


def _count(task: Record, key: str) -> str:
    value = number(task, key)
    return "not on record" if value is None else f"{value:.0f}"
