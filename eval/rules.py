"""The rules of the suite as code: each numbered sentence of docs/rules.md is one pure function of a record.

A record is the whole content of a run's record.json, with one more section, `journal`, that the loader makes by reading
the run's budget.jsonl again (`eval.reading`). A check never repairs or guesses: it looks at what is written, says
whether the sentence holds, and shows its evidence. Rules marked `both` hold in both divisions, and a record that breaks
one is invalid: its numbers cannot be trusted, so it is listed but not ranked. Rules marked `closed` decide between the
closed and the open division.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from cramming.record import FORMAT_VERSION, RULES_VERSION
from eval.reading import Record, at, entries, mean_of, number, sections, tasks_of
from eval.tasks import AVERAGES

MIN_SEEDS = 3
MAX_EPOCHS = 5
MAX_HOURS = 24.0
# Averages are recomputed from the medians; anything beyond rounding to two digits is an inconsistency.
SCORE_TOLERANCE = 0.006
JOURNAL_ROUNDING_SECONDS = 0.01

Outcome = tuple[bool, str]
Check = Callable[[Record], Outcome]


class Finding(NamedTuple):
    """What one check found: the rule's number, whether its sentence holds, and the evidence in words."""

    rule: str
    ok: bool
    evidence: str


class Rule(NamedTuple):
    """A rule's number, the division it binds and its check, whose docstring is the rule's sentence."""

    number: str
    division: Literal["both", "closed"]
    check: Check

    @property
    def sentence(self) -> str:
        """The sentence, as docs/rules.md has it."""
        return " ".join((self.check.__doc__ or "").split())

    def __call__(self, record: Record) -> Finding:
        """Check `record`; pure, and total over any JSON content."""
        return Finding(self.number, *self.check(record))


class Verdict(NamedTuple):
    """A record's division with all findings, in the order of the rules."""

    division: Literal["closed", "open", "invalid"]
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that keep the record out of the closed division."""
        return tuple(f for f in self.findings if not f.ok)


def judge(record: Record) -> Verdict:
    """Check all rules. Invalid: a rule for both divisions is broken. Closed: every rule holds, and the run does not
    itself claim the open division. Open: everything else.
    """
    findings = tuple(rule(record) for rule in RULES)
    broken = {rule.division for rule, finding in zip(RULES, findings) if not finding.ok}
    if "both" in broken:
        return Verdict("invalid", findings)
    closed = not broken and at(record, "division_requested") != "open"
    return Verdict("closed" if closed else "open", findings)


def _missing(record: Record, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if at(record, path) in (None, "", [])]


def _all_or(problems: list[str], fine: str) -> Outcome:
    shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
    return (False, shown) if problems else (True, fine)


# ------------------------------------------------------------------------------------------------ rules for both


def format_and_versions(record: Record) -> Outcome:
    """The record has this version's format and names the suite's version and this version of the rules."""
    found = [at(record, key) for key in ("format", "suite_version", "rules_version")]
    ok = found[0] == FORMAT_VERSION and bool(found[1]) and str(found[2]) == RULES_VERSION
    return ok, f"format {found[0]}, suite {found[1]}, rules {found[2]}"


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

    return _all_or(list(walk(record, "")), "all numbers are finite")


NO_PRETRAINING = "no pretraining in this record"


def pretraining_finished(record: Record) -> Outcome:
    """Pretraining ended as finished, and its steps, tokens, parameters, losses and speed are recorded."""
    if at(record, "pretrain") is None:
        return True, NO_PRETRAINING
    status = at(record, "pretrain.status")
    if status != "finished":
        return False, f"pretraining is {status or 'of unknown status'}, not finished"
    needed = ("parameters", "steps", "tokens", "train_loss", "validation.loss", "tokens_per_second")
    absent = [f"pretrain.{key} is missing" for key in needed if number(record, f"pretrain.{key}") is None]
    return _all_or(absent, f"finished after {at(record, 'pretrain.steps')} steps")


def budget_kept(record: Record) -> Outcome:
    """The budget names its unit and limit, training spent no more than the limit, and the overrun is 0."""
    if at(record, "pretrain") is None:
        return True, NO_PRETRAINING
    unit = at(record, "pretrain.budget.unit")
    keys = ("limit", "spent", "spent_seconds", "overrun_seconds")
    limit, spent, seconds, overrun = (number(record, f"pretrain.budget.{key}") for key in keys)
    if not unit or limit is None or spent is None or seconds is None or overrun is None:
        missing = _missing(record, ("pretrain.budget." + key for key in ("unit", *keys)))
        return False, f"{', '.join(missing) or 'a number of pretrain.budget'} is missing"
    ok = limit > 0 and spent <= limit * (1 + 1e-9) and overrun == 0
    return ok, f"{spent:.6g} of {limit:.6g} {unit}, {seconds:.1f} s, overrun {overrun:g} s"


def journal_agrees(record: Record) -> Outcome:
    """The journal budget.jsonl lies beside the record, has the recorded SHA-256, and by itself gives the recorded
    processes, steps and seconds.
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
    return _all_or(problems, f"{len(entries(journal.get('processes')))} process(es), {total or 0:.1f} s in the journal")


def scores_stated(record: Record) -> Outcome:
    """Scores are those of the development split, and state the suite, the seeds and the selection."""
    problems = [] if "pretrained" in sections(record) else ["no scores of the trained model"]
    for init, section in sections(record).items():
        if str(section.get("suite")) not in AVERAGES:
            problems.append(f"glue.{init}.suite is {section.get('suite')!r}, not one of {', '.join(AVERAGES)}")
        problems += [f"glue.{init}.{key} is missing" for key in _missing(section, ("seeds", "selection", "tasks"))]
        if section.get("split") != "dev":
            problems.append(f"glue.{init}.split is {section.get('split')!r}, not 'dev'")
    return _all_or(problems, "dev split; seeds and selection stated")


def scores_are_medians(record: Record) -> Outcome:
    """A score is 100 times the median of the task's main metric over all stated seeds; a missing score is null and
    says why.
    """
    seeds = {init: entries(section.get("seeds")) for init, section in sections(record).items()}
    problems = []
    for name, task in tasks_of(record):
        values = [number(v) for v in entries(at(task, f"metrics.{task.get('main_metric')}.per_seed"))]
        measured = [v for v in values if v is not None]
        score = number(task, "score")
        if score is None:
            if not task.get("problem"):
                problems.append(f"{name} has neither a score nor the reason why not")
        elif not measured or len(measured) != len(seeds[name.split("/")[0]]):
            problems.append(f"{name}: {len(measured)} values for {len(seeds[name.split('/')[0]])} seeds")
        elif abs(score - 100 * statistics.median(measured)) > SCORE_TOLERANCE:
            problems.append(f"{name}: score {score:.2f}, median of seeds {100 * statistics.median(measured):.2f}")
    return _all_or(problems, "every score is the median over its seeds")


def averages_complete(record: Record) -> Outcome:
    """Every average of the suite is there with its definition in words: the mean of all its entries, or null with the
    list of what is missing.
    """
    problems = [p for init, section in sections(record).items() for p in _average_problems(init, section)]
    return _all_or(problems, "each average is the mean of all its entries, or not printed")


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
    """A task that was trained or scored on other than the official number of examples is marked as a subset."""
    problems, marked = [], []
    for name, task in tasks_of(record):
        differs = [
            f"{kind} {task.get(f'{kind}_examples')} of {official}"
            for kind in ("train", "eval")
            if (official := number(task, f"official_{kind}_examples")) is not None
            and number(task, f"{kind}_examples") not in (official, None)
        ]
        if task.get("subset") is True:
            marked.append(name)
        elif differs:
            problems.append(f"{name} is not marked as a subset: {', '.join(differs)}")
    return _all_or(problems, f"marked subsets: {', '.join(marked) or 'none'}")


# -------------------------------------------------------------------------------------- rules of the closed division


def one_device(record: Record) -> Outcome:
    """One GPU or one CPU did the whole pretraining."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    devices, kind = number(record, "pretrain.devices"), at(record, "environment.device.kind")
    names = dict.fromkeys(str(at(e, "device.name") or "no name") for e in _pretraining_environments(record))
    ok = devices == 1 and kind in ("cpu", "cuda") and len(names) == 1
    return ok, f"{at(record, 'pretrain.devices')} device(s), {kind}: {', then '.join(names)}"


def _pretraining_environments(record: Record) -> list[Any]:
    """Of the first start, and of every process that resumed it."""
    return [at(record, "environment"), *entries(at(record, "resumed"))]


def one_day(record: Record) -> Outcome:
    """Pretraining took at most 24 hours, over all its processes together."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    seconds = number(record, "pretrain.budget.spent_seconds")
    if seconds is None:
        return False, "no training time on record"
    return seconds <= MAX_HOURS * 3600, f"{seconds / 3600:.3f} h of training"


def masked_language_model(record: Record) -> Outcome:
    """The objective is masked language modelling."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    objective = at(record, "pretrain.objective")
    return objective == "mlm", f"objective {objective}"


def from_scratch(record: Record) -> Outcome:
    """All weights start at random or from counts over the run's own corpus, made on the clock; no pretrained weights
    are used anywhere."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    init = at(record, "pretrain.init")
    start = at(record, "pretrain.start")
    return init == "scratch", f"initial weights: {init or 'not on record'}{f', embeddings {start}' if start else ''}"


def own_weights_scored(record: Record) -> Outcome:
    """The scored weights are the pretrained ones, by SHA-256."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    trained, scored = at(record, "pretrain.final_sha256"), at(record, "glue.pretrained.model_sha256")
    if not trained or not scored:
        return False, f"SHA-256 of the {'trained' if not trained else 'scored'} weights is not on record"
    return trained == scored, "the same SHA-256" if trained == scored else "the scored weights are not the trained ones"


def corpus_declared(record: Record) -> Outcome:
    """The corpus is named by the SHA-256 of its manifest, and each source by its name and licence."""
    problems = [f"{path} is missing" for path in _missing(record, ("corpus.manifest_sha256", "corpus.sources"))]
    sources = entries(at(record, "corpus.sources"))
    for source in sources:
        keys = ("name",) if at(source, "kind") == "tokenizer" else ("name", "license")
        problems += [f"source {at(source, 'name')!r} has no {key}" for key in keys if not at(source, key)]
    return _all_or(problems, f"sources: {names_of(sources)}")


def names_of(sources: list[Any], most: int = 6) -> str:
    """The first names of a list of sources, which may be as long as a folder of files."""
    more = f" and {len(sources) - most} more" if len(sources) > most else ""
    return ", ".join(str(at(source, "name")) for source in sources[:most]) + more


# GLUE's tasks and the data sets that their texts come from, as words in a source's name or path.
DOWNSTREAM = re.compile(
    r"(?<![a-z0-9])(?:super)?(?:glue|cola|sst-?2?|mrpc|qqp|sts-?b|stsbenchmark|mnli|multi_?nli|qnli|rte|wnli|squad)(?![a-z0-9])"
)


def no_downstream_text(record: Record) -> Outcome:
    """No downstream data set is among the sources of the corpus; what a search for overlap removed is shown."""
    sources = entries(at(record, "corpus.sources"))
    if not sources:
        return False, "no source is declared"
    found = [s for s in sources if DOWNSTREAM.search(json.dumps(s, default=str).lower())]
    search = overlap_search(record)
    if found:
        return False, f"downstream data among the sources: {names_of(found)}; {search}"
    return True, f"no downstream data set among the declared sources; {search}"


def overlap_search(record: Record) -> str:
    """What the preparation says about its search for downstream text: which tasks, and what each of them removed."""
    removed = at(record, "corpus.decontamination.removed")
    if not isinstance(removed, Mapping) or not removed:
        return "no overlap search on record"
    tasks = ", ".join(f"{task} {count}" for task, count in removed.items())
    return f"searched for runs of {at(record, 'corpus.decontamination.ngram')} words; documents removed: {tasks}"


def tokenizer_origin(record: Record) -> Outcome:
    """The tokenizer is recorded by kind and SHA-256, and was trained on the corpus unless its origin is stated."""
    absent = _missing(record, (f"corpus.tokenizer.{key}" for key in ("kind", "sha256")))
    given = [s for s in entries(at(record, "corpus.sources")) if at(s, "kind") == "tokenizer"]
    origin = f"ready-made: {names_of(given)}" if given else "trained on this corpus"
    return _all_or([f"{path} is missing" for path in absent], f"{at(record, 'corpus.tokenizer.kind')}, {origin}")


def global_hyperparameters(record: Record) -> Outcome:
    """One set of fine-tuning hyperparameters holds for all tasks and initialisations."""
    reference = at(record, "glue.pretrained.hyperparameters")
    if not isinstance(reference, Mapping):
        return False, "glue.pretrained.hyperparameters is missing"
    problems = []
    for name, task in tasks_of(record):
        own = task.get("hyperparameters")
        if not isinstance(own, Mapping):
            problems.append(f"{name} has no hyperparameters on record")
        elif own != reference:
            keys = [str(k) for k in {**own, **reference} if own.get(k) != reference.get(k)]
            problems.append(f"{name} differs in {', '.join(keys)}")
    tried = entries(at(record, "glue.pretrained.sweep.points"))
    chosen = f", chosen from {len(tried)} sets by the mean over all tasks" if tried else ""
    return _all_or(problems, f"the same for every task and initialisation{chosen}")


def few_epochs(record: Record) -> Outcome:
    """Fine-tuning lasts at most 5 epochs."""
    epochs = {init: number(section, "hyperparameters.epochs") for init, section in sections(record).items()}
    ok = bool(epochs) and all(e is not None and e <= MAX_EPOCHS for e in epochs.values())
    return ok, ", ".join(f"{init}: {e if e is None else f'{e:g}'} epochs" for init, e in epochs.items()) or "no scores"


def last_epoch(record: Record) -> Outcome:
    """The last epoch is scored; nothing is selected by its score."""
    found = {init: section.get("selection") for init, section in sections(record).items()}
    ok = bool(found) and set(map(str, found.values())) == {"last epoch"}
    return ok, ", ".join(f"{init}: {value}" for init, value in found.items()) or "no scores"


def enough_seeds(record: Record) -> Outcome:
    """Every task is fine-tuned with at least 3 different seeds."""
    found = {init: entries(section.get("seeds")) for init, section in sections(record).items()}
    ok = bool(found) and all(len(set(map(str, seeds))) == len(seeds) >= MIN_SEEDS for seeds in found.values())
    return ok, ", ".join(f"{init}: seeds {seeds}" for init, seeds in found.items()) or "no scores"


def full_tasks(record: Record) -> Outcome:
    """Every task of the averages is scored, on its full official data."""
    averages = at(record, "glue.pretrained.averages")
    problems = [
        f"{name} lacks {', '.join(map(str, entries(at(averages, f'{name}.missing')))) or 'a value'}"
        for name in AVERAGES.get(str(at(record, "glue.pretrained.suite")), {"every average": None})
        if number(averages, f"{name}.value") is None
    ]
    subsets = [
        name.split("/")[1] for name, task in tasks_of(record) if name.startswith("pretrained/") and task.get("subset")
    ]
    problems += [f"scored on subsets: {', '.join(subsets)}"] if subsets else []
    return _all_or(problems, "every task, on all of its data")


def clean_code(record: Record) -> Outcome:
    """The code, in pretraining and in fine-tuning, is a commit of a clean git tree."""
    ran = [("pretraining", e) for e in _pretraining_environments(record)] if at(record, "pretrain") else []
    ran += [(init, at(section, "environment")) for init, section in sections(record).items()]
    where: dict[str, dict[str, None]] = {}
    for name, environment in ran:
        commit, dirty = at(environment, "git.commit"), at(environment, "git.dirty")
        state = "clean" if dirty is False else "with uncommitted changes"
        finding = f"commit {str(commit)[:12]}, {state}" if commit else "no git commit on record"
        where.setdefault(finding, {})[name] = None
    problems = [f"{', '.join(names)}: {found}" for found, names in where.items() if not found.endswith("clean")]
    return _all_or(problems, "; ".join(where) or "no code ran")


def nothing_forced(record: Record) -> Outcome:
    """No check was overridden: the list of forced exceptions is empty."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    forced = at(record, "pretrain.forced")
    if not isinstance(forced, list):
        return False, "the list of forced exceptions is not on record"
    return not forced, "none" if not forced else f"forced: {', '.join(map(str, forced))}"


_BOTH: dict[str, Check] = {
    "R1": format_and_versions,
    "R2": finite_numbers,
    "R3": pretraining_finished,
    "R4": budget_kept,
    "R5": journal_agrees,
    "R6": scores_stated,
    "R7": scores_are_medians,
    "R8": averages_complete,
    "R9": subsets_marked,
}
_CLOSED: dict[str, Check] = {
    "R10": one_device,
    "R11": one_day,
    "R12": masked_language_model,
    "R13": from_scratch,
    "R14": own_weights_scored,
    "R15": corpus_declared,
    "R16": no_downstream_text,
    "R17": tokenizer_origin,
    "R18": global_hyperparameters,
    "R19": few_epochs,
    "R20": last_epoch,
    "R21": enough_seeds,
    "R22": full_tasks,
    "R23": clean_code,
    "R24": nothing_forced,
}
RULES = (
    *(Rule(name, "both", check) for name, check in _BOTH.items()),
    *(Rule(name, "closed", check) for name, check in _CLOSED.items()),
)
