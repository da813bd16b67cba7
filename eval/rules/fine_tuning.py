"""Rules of the closed division on scores: one set of hyperparameters, no selection, seeds, whole tasks.

Each check's docstring is the rule's sentence in docs/reference/rules.md; `eval.rules.table` numbers them.
"""

import json
from collections.abc import Sequence

from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES, OFFICIAL_SHA256
from cramming.record_schema import FineTuning, Record, Scores
from eval.rules.evidence import (
    NO_SCORES,
    Outcome,
    abbreviated,
    all_or,
    competes,
    fine_tuned,
    made_with,
    other_sizes,
    swept,
)

MIN_SEEDS = 3
MAX_EPOCHS = 5
MAX_SEEN_IN_TRAINING = 0.05  # in GLUE's sets it is at most 0.015
OTHER = "as many examples as the official data, but not those (by SHA-256)"


def global_hyperparameters(record: Record) -> Outcome:
    """One set of fine-tuning hyperparameters holds for all tasks and initialisations."""
    if record.trained is None:
        return False, "no scores of the trained model" if record.glue else NO_SCORES
    reference = record.trained.hyperparameters
    problems: list[str] = []
    for init, section in record.glue.items():
        other = section.hyperparameters
        if other != reference:
            keys = {*other, *reference}
            differ = sorted(key for key in keys if other.get(key) != reference.get(key))
            problems.append(f"{init} differs in {', '.join(differ)}")
    return all_or(problems, "the same for every task and initialisation")


def few_epochs(record: Record) -> Outcome:
    """Fine-tuning lasts at most 5 epochs."""
    words: list[str] = []
    holds = bool(record.glue)
    for init, section in record.glue.items():
        count = section.epochs
        holds = holds and count is not None and count <= MAX_EPOCHS
        number = "an unknown number of" if count is None else f"{count:g}"
        words.append(f"{init}: {number} epoch{'' if count == 1 else 's'}")
    return holds, ", ".join(words) or NO_SCORES


def nothing_selected(record: Record) -> Outcome:
    """The last epoch is scored; nothing is selected by its score, neither an epoch nor, in a sweep or in one scoring
    after another, the hyperparameters or one of several outcomes of the same.
    """
    choices: dict[str, list[str]] = {}
    for init, section in record.glue.items():
        choices[init] = [section.selection]
        choices[init] += _other_sets(record, init, section)
        choices[init] += _other_epochs(section)
    holds = bool(choices) and all(words == ["last epoch"] for words in choices.values())
    evidence = "; ".join(f"{init}: {', '.join(words)}" for init, words in choices.items())
    return holds, evidence or NO_SCORES


def _other_sets(record: Record, init: str, section: Scores) -> list[str]:
    """Return the alternatives to a section's scores: points of a sweep, and all fine-tunings of the trained model."""
    if init != "pretrained":
        swept_words = swept(section)
        return [swept_words] if swept_words else []
    lines = [*fine_tuned(record, init), *_tried_elsewhere(record, section)]
    sets = {_settings_text(section), *(_settings_text(line) for line in lines)}
    for line in record.history:  # settings that were chosen by the scores of a checkpoint
        if line.checkpoint and line.suite == section.suite and not line.is_probe:
            sets.add(_settings_text(line))
    words = [swept(section)]
    if len(sets) > 1:
        words.append(f"one of {len(sets)} sets that were fine-tuned")
    words.append(_other_outcomes(lines))
    names = ", ".join(other.run for other in record.elsewhere)
    if names and any(words):
        words.append(f"same weights as {names}")
    return [word for word in words if word]


def _settings_text(scored: Scores | FineTuning) -> str:
    return json.dumps(made_with(scored), sort_keys=True, default=str)


def _tried_elsewhere(record: Record, section: Scores) -> list[FineTuning]:
    """Return the fine-tunings of the same weights and suite by other runs of the report before this one began.

    Later ones cannot have been alternatives for this run.
    """
    began = min((line.time for line in fine_tuned(record, "pretrained")), default="")
    lines: list[FineTuning] = []
    for other in record.elsewhere:
        lines += [
            line for line in other.lines if line.suite == section.suite and line.time <= began
        ]
    return [line for line in lines if competes(line)]


def _other_outcomes(lines: Sequence[FineTuning]) -> str:
    """Return text such as `rte seed 0 has 2 outcomes`: equal settings were fine-tuned twice, with other scores.

    Parts of the official data, and other versions of the code, do not count as a second outcome.
    """
    outcomes: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        if line.subset:
            continue
        same = json.dumps([_settings_text(line), line.seed, line.version])
        for entry, value in line.scores.items():
            outcomes.setdefault((f"{entry} seed {line.seed}", same), set()).add(repr(value))
    several = []
    for (name, _), values in outcomes.items():
        if len(values) > 1:
            several.append(f"{name} has {len(values)}")
    return f"{abbreviated(several)} outcomes" if several else ""


def _other_epochs(section: Scores) -> list[str]:
    """Return a problem if the scored weights are not those after the last epoch.

    A fine-tuning whose loss is not finite ends before its last epoch, and has no score.
    """
    others: list[str] = []
    for name, task in section.tasks.items():
        values = task.main.per_seed
        pairs = zip(task.scored_epochs, values, strict=False)
        scored = [epoch for epoch, value in pairs if value is not None]
        is_last = all(epoch == section.epochs for epoch in scored)
        if len(task.scored_epochs) != len(values) or not is_last:
            others.append(name)
    return [f"not the last epoch of every seed of {', '.join(others)}"] if others else []


def enough_seeds(record: Record) -> Outcome:
    """The trained model is fine-tuned on every task with at least 3 seeds, which are 0, 1, 2 and so on, and never was
    with any other.
    """
    seeds = record.trained.seeds if record.trained else []
    others = {line.seed for line in fine_tuned(record, "pretrained")} - set(seeds)
    are_first = sorted(seeds) == list(range(len(seeds)))
    words = [f"{init}: seeds {section.seeds}" for init, section in record.glue.items()]
    if others:
        words.append(f"pretrained was fine-tuned with {', '.join(map(str, sorted(others)))} too")
    holds = len(seeds) >= MIN_SEEDS and are_first and not others
    return holds, ", ".join(words) or NO_SCORES


def full_tasks(record: Record) -> Outcome:
    """Every task of the averages is scored, on its full official data; embedded tasks are those of the run's corpus."""
    trained = record.trained
    if trained is None:
        return False, "no scores of the trained model" if record.glue else NO_SCORES
    problems: list[str] = []
    for name in AVERAGES.get(trained.suite, {}):
        average = trained.averages.get(name)
        if average is None or average.value is None:
            missing = ", ".join(average.missing if average else [])
            problems.append(f"{name} lacks {missing or 'a value'}")
    subsets = []
    for entry, task in trained.tasks.items():
        if task.subset or other_sizes(record, "pretrained", entry, task):
            subsets.append(entry)
    if subsets:
        problems.append(f"not on the official number of examples: {', '.join(subsets)}")
    corpus = record.corpus.manifest_sha256
    if trained.suite == "embedded" and (corpus is None or trained.tasks_corpus_sha256 != corpus):
        problems.append("the embedded tasks are not those of the corpus that was trained on")
    problems += _seen_in_training(trained)
    contents = _contents(trained)
    if OTHER in contents:
        problems.append(f"{OTHER}: {', '.join(contents[OTHER])}")
    shown = "".join(f"; {kind}: {', '.join(names)}" for kind, names in contents.items())
    return all_or(problems, f"every task, on all of its data{shown}")


def _seen_in_training(trained: Scores) -> list[str]:
    problems: list[str] = []
    for name, task in trained.tasks.items():
        seen, scored = task.seen_in_training, task.eval_examples
        if seen is None or scored is None:
            problems.append(f"{name}: how many scored examples are training examples is not known")
        elif seen > MAX_SEEN_IN_TRAINING * scored:
            problems.append(f"{name}: {seen} of {scored} scored examples are training examples too")
    return problems


def _contents(trained: Scores) -> dict[str, list[str]]:
    """Return GLUE's scored entries on all of their examples, grouped by the result of comparing their SHA-256."""
    contents: dict[str, list[str]] = {}
    if trained.suite != "glue":
        return contents
    for name in ENTRIES:
        task = trained.tasks.get(name)
        if task is None or task.subset:
            continue
        official = OFFICIAL_SHA256.get(name)
        if official is None:
            named = f"{name} ({(task.data_sha256 or '')[:12]})"
            contents.setdefault("official SHA-256 not known", []).append(named)
        elif task.data_sha256 == official:
            contents.setdefault("official by SHA-256", []).append(name)
        else:
            contents.setdefault(OTHER, []).append(name)
    return contents
