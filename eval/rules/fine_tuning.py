"""R18 to R22, of the closed division, about the scores: one set of hyperparameters, no selection, seeds, whole tasks.

Each check's docstring is the rule's sentence in docs/rules.md (a test compares them); `eval.rules.table` numbers them.
"""

import json
from collections.abc import Sequence

from cramming.data.task_files import ENTRIES, OFFICIAL_SHA256
from cramming.record_schema import FineTuning, Record, Scores
from eval.rules.evidence import (
    NO_SCORES,
    Outcome,
    all_or,
    few,
    fine_tuned,
    made_with,
    other_sizes,
    swept,
)
from cramming.data.suites import AVERAGES

MIN_SEEDS = 3
MAX_EPOCHS = 5
MAX_SEEN_IN_TRAINING = 0.05  # of GLUE's own sets 1.5 % at most are
NOT_RECORDED = "SHA-256 of the data not recorded"
OTHER = "as many examples as the official data, but not those (by SHA-256)"


def global_hyperparameters(record: Record) -> Outcome:
    """One set of fine-tuning hyperparameters holds for all tasks and initialisations."""
    reference = record.trained.hyperparameters if record.trained else None
    if reference is None:
        return False, "glue.pretrained.hyperparameters is missing" if record.glue else NO_SCORES
    problems = []
    for init, entry, task in record.tasks():
        own = task.hyperparameters
        if own is None:
            problems.append(f"{init}/{entry} has no hyperparameters on record")
        elif own != reference:
            keys = [str(key) for key in {**own, **reference} if own.get(key) != reference.get(key)]
            problems.append(f"{init}/{entry} differs in {', '.join(keys)}")
    return all_or(problems, "the same for every task and initialisation")


def few_epochs(record: Record) -> Outcome:
    """Fine-tuning lasts at most 5 epochs."""
    epochs = {init: section.epochs for init, section in record.glue.items()}
    ok = bool(epochs) and all(
        count is not None and count <= MAX_EPOCHS for count in epochs.values()
    )
    said = [
        f"{init}: {n if n is None else f'{n:g}'} epoch{'' if n == 1 else 's'}"
        for init, n in epochs.items()
    ]
    return ok, ", ".join(said) or NO_SCORES


def nothing_selected(record: Record) -> Outcome:
    """The last epoch is scored; nothing is selected by its score, neither an epoch nor, in a sweep or in one scoring
    after another, the hyperparameters or one of several outcomes of the same."""
    found = {
        init: [str(section.selection), *_other_sets(record, init, section), *_other_epochs(section)]
        for init, section in record.glue.items()
    }
    ok = bool(found) and all(said == ["last epoch"] for said in found.values())
    return ok, "; ".join(f"{init}: {', '.join(said)}" for init, said in found.items()) or NO_SCORES


def _other_sets(record: Record, init: str, section: Scores) -> list[str]:
    """How many sets of hyperparameters there were to choose from: in a sweep, in the history of the trained model."""
    competes = init == "pretrained"
    lines = [*fine_tuned(record, init), *_tried_elsewhere(record, section)] if competes else []
    sets = [made_with(section), *map(made_with, lines)]
    count = len({json.dumps(one, sort_keys=True, default=str) for one in sets})
    said = [
        swept(section),
        f"one of {count} sets in its history" if count > 1 else "",
        _other_outcomes(lines),
    ]
    names = ", ".join(str(other.run) for other in record.elsewhere)
    return [
        *filter(None, said),
        *([f"same weights as {names}"] if competes and names and any(said) else []),
    ]


def _tried_elsewhere(record: Record, section: Scores) -> list[FineTuning]:
    """What other runs of the report fine-tuned of the same weights and suite before this one began: what came later
    cannot have been a choice for this one."""
    began = min((str(line.time) for line in fine_tuned(record, "pretrained")), default="")
    lines = [
        line for other in record.elsewhere for line in other.lines if line.suite == section.suite
    ]
    return [line for line in lines if str(line.time) <= began]


def _other_outcomes(lines: Sequence[FineTuning]) -> str:
    """Such as `rte seed 0 has 2 outcomes in its history`: one set fine-tuned again, on all data and by the same version
    of the code, with other scores."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        same = json.dumps([made_with(line), line.seed, line.version], sort_keys=True, default=str)
        for entry, value in line.scores.items() if not line.subset else ():
            found.setdefault((f"{entry} seed {line.seed}", same), set()).add(repr(value))
    several = [
        f"{name} has {len(values)}" for (name, _), values in found.items() if len(values) > 1
    ]
    return f"{few(several)} outcomes in its history" if several else ""


def _other_epochs(section: Scores) -> list[str]:
    """What keeps the scored weights from being, by the record, those after the last epoch."""
    unknown, others = list[str](), list[str]()
    for name, task in section.tasks.items():
        epochs, values = task.scored_epochs, task.main.per_seed
        if not epochs:
            unknown.append(name)
            continue
        # A run whose loss is not finite ends before its last epoch, and has no score.
        scored = [epoch for epoch, value in zip(epochs, values) if value is not None]
        if len(epochs) != len(values) or any(epoch != section.epochs for epoch in scored):
            others.append(name)
    found = [f"which epochs were scored is not on record: {', '.join(unknown)}"] if unknown else []
    return [*found, f"not the last epoch of every seed of {', '.join(others)}"] if others else found


def enough_seeds(record: Record) -> Outcome:
    """The trained model is fine-tuned on every task with at least 3 seeds, which are 0, 1, 2 and so on, and never was
    with any other."""
    seeds = list(map(str, record.trained.seeds)) if record.trained else []
    others = {str(line.seed) for line in fine_tuned(record, "pretrained")} - set(seeds)
    ok = len(seeds) >= MIN_SEEDS and set(seeds) == set(map(str, range(len(seeds)))) and not others
    said = [f"{init}: seeds {section.seeds}" for init, section in record.glue.items()]
    said += [f"in the history of pretrained also {', '.join(sorted(others))}"] if others else []
    return ok, ", ".join(said) or NO_SCORES


def full_tasks(record: Record) -> Outcome:
    """Every task of the averages is scored, on its full official data; embedded tasks are those of the run's corpus."""
    if (trained := record.trained) is None:
        return False, "no scores of the trained model" if record.glue else NO_SCORES
    problems = []
    for name in AVERAGES.get(trained.suite or "", {"every average": None}):
        found = trained.averages.get(name)
        if found is None or found.value is None:
            missing = ", ".join(map(str, found.missing if found else []))
            problems.append(f"{name} lacks {missing or 'a value'}")
    tasks = trained.tasks.items()
    subsets = [
        entry
        for entry, task in tasks
        if task.subset or other_sizes(record, "pretrained", entry, task)
    ]
    problems += [f"not on the official number of examples: {', '.join(subsets)}"] if subsets else []
    own = record.corpus.manifest_sha256
    if trained.suite == "embedded" and (own is None or trained.tasks_corpus_sha256 != own):
        problems.append(
            "the embedded tasks are not known to be those of the corpus that the model was trained on"
        )
    for name, task in tasks:
        seen, scored = task.seen_in_training, task.eval_examples
        if name in ENTRIES and seen is None:
            problems.append(
                f"{name}: how many scored examples are training examples too is not on record"
            )
        elif name in ENTRIES and seen and scored and seen > MAX_SEEN_IN_TRAINING * scored:
            problems.append(
                f"{name}: {seen:.0f} of {scored:.0f} scored examples are training examples too"
            )
    contents = _contents(trained)
    problems += [
        f"{kind}: {', '.join(contents[kind])}" for kind in (OTHER, NOT_RECORDED) if kind in contents
    ]
    shown = "".join(f"; {kind}: {', '.join(names)}" for kind, names in contents.items())
    return all_or(problems, f"every task, on all of its data{shown}")


def _contents(trained: Scores) -> dict[str, list[str]]:
    """GLUE's scored entries with all of their examples, by what the SHA-256 of these says of them."""
    found: dict[str, list[str]] = {}
    for name in ENTRIES if trained.suite == "glue" else ():
        if (task := trained.tasks.get(name)) is None or task.subset:
            continue
        sha256, official = task.data_sha256, OFFICIAL_SHA256.get(name)
        if not sha256:
            found.setdefault(NOT_RECORDED, []).append(name)
        elif official is None:
            found.setdefault("official SHA-256 not known", []).append(f"{name} ({sha256[:12]})")
        else:
            found.setdefault("official by SHA-256" if sha256 == official else OTHER, []).append(
                name
            )
    return found
