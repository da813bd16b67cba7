"""The rules of the closed division; a record that breaks one, and none of `eval.rules.validity`, is open division.

Each check's docstring is the rule's sentence in docs/rules.md (a test compares them); `eval.rules.table` numbers them.
"""

import json
from collections.abc import Mapping
from typing import Any

from cramming.data.task_files import ENTRIES, OFFICIAL_SHA256
from eval.rules.choices import UNNAMED, other_epochs, other_sets
from eval.rules.overlap import DOWNSTREAM, gaps_of_the_search, overlap_search
from eval.rules.reading import (
    Outcome,
    Record,
    all_or,
    at,
    entries,
    few,
    names_of,
    not_written,
    number,
    sections,
    tasks_of,
)
from eval.rules.validity import NO_PRETRAINING, before, fine_tuned, kept, other_sizes
from eval.tasks.suites import AVERAGES

MIN_SEEDS = 3
MAX_EPOCHS = 5
MAX_HOURS = 24.0
FROM_SCRATCH = ("random", "cooccurrence")  # what may be recorded of the embeddings at the start


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
    start, init = at(record, "pretrain.start"), at(record, "pretrain.init")  # the latter up to version 2 only
    if start is None and at(record, "rules_version") == "1" and init == "scratch":
        start = "random"  # then there was no other
    known = isinstance(start, str) and start in FROM_SCRATCH
    old = "" if init in (None, "scratch") else f", initial weights {init}"
    return known and not old, f"start: {start or 'not on record'}{old}"


def own_weights_scored(record: Record) -> Outcome:
    """The scored model is the trained one, by the SHA-256 of its weights and of every other file of final/."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    trained, scored = at(record, "pretrain.final_sha256"), at(record, "glue.pretrained.model_sha256")
    if not trained or not scored:
        return False, f"SHA-256 of the {'trained' if not trained else 'scored'} weights is not on record"
    if trained != scored:
        return False, "the scored weights are not the trained ones"
    files = [at(record, path) for path in ("pretrain.final_files", "glue.pretrained.model_files")]
    if not all(isinstance(found, Mapping) and found for found in files):
        said = "the other files of the model are not on record"
        return before(record, "5"), f"the same weights, by SHA-256; {said}"
    others = sorted(name for name in {**files[0], **files[1]} if files[0].get(name) != files[1].get(name))
    return not others, f"not the same file: {', '.join(others)}" if others else f"the same {len(files[0])} files"


def corpus_declared(record: Record) -> Outcome:
    """The corpus is named by the SHA-256 of its manifest, each source by its name and licence, and no file of it was
    written to while training read it."""
    problems = [f"{path} is missing" for path in not_written(record, ("corpus.manifest_sha256", "corpus.sources"))]
    sources = entries(at(record, "corpus.sources"))
    for source in sources:
        keys = ("name",) if at(source, "kind") == "tokenizer" else ("name", "license")
        problems += [f"source {at(source, 'name')!r} has no {key}" for key in keys if not at(source, key)]
    changed = at(record, "corpus.changed")
    if not isinstance(changed, Mapping):
        problems += [] if before(record, "5") else ["corpus.changed is missing"]
        return all_or(problems, f"sources: {names_of(sources)}; whether a file changed meanwhile is not on record")
    for path, as_prepared in changed.items():
        now = {"True": ", and was as prepared at the end", "False": ", and was not as prepared at the end"}
        problems.append(f"{path} changed while training read it{now.get(str(as_prepared), '')}")
    return all_or(problems, f"sources: {names_of(sources)}")


def no_downstream_text(record: Record) -> Outcome:
    """No downstream data set is among the sources of the corpus, and text that was not generated was searched for the
    development sets of every task of the averages, which are those that were scored, by the SHA-256 of their texts."""
    sources = entries(at(record, "corpus.sources"))
    if not sources:
        return False, "no source is declared"
    found = [s for s in sources if DOWNSTREAM.search(json.dumps(s, default=str).lower())]
    search, gaps = overlap_search(record), list(gaps_of_the_search(record))
    if found:
        return False, f"downstream data among the sources: {names_of(found)}; {search}"
    if {at(s, "kind") for s in sources if at(s, "kind") != "tokenizer"} == {"embedded"}:
        return True, "no downstream data set among the declared sources; the text is generated"
    if gaps and not before(record, "5"):
        return all_or([search, *gaps], "")
    return True, f"no downstream data set among the declared sources; {search}"


def tokenizer_origin(record: Record) -> Outcome:
    """The tokenizer is recorded by kind and SHA-256, is that of the trained and of the scored model, and was trained on
    the corpus unless its origin is stated."""
    absent = not_written(record, (f"corpus.tokenizer.{key}" for key in ("kind", "sha256")))
    given = [s for s in entries(at(record, "corpus.sources")) if at(s, "kind") == "tokenizer"]
    origin = f"ready-made: {names_of(given)}" if given else "trained on this corpus"
    problems = [f"{path} is missing" for path in absent]
    for model, path in (("trained", "pretrain.final_files"), ("scored", "glue.pretrained.model_files")):
        files = at(record, path)  # that they are on record is R14's
        if isinstance(files, Mapping) and files.get("tokenizer.json") != at(record, "corpus.tokenizer.sha256"):
            problems.append(f"tokenizer.json of the {model} model is not the corpus's")
    return all_or(problems, f"{at(record, 'corpus.tokenizer.kind')}, {origin}")


def global_hyperparameters(record: Record) -> Outcome:
    """One set of fine-tuning hyperparameters holds for all tasks and initialisations."""
    reference = at(record, "glue.pretrained.hyperparameters")
    if not isinstance(reference, Mapping):
        return False, "glue.pretrained.hyperparameters is missing"
    problems = []
    for init, entry, task in tasks_of(record):
        name, own = f"{init}/{entry}", task.get("hyperparameters")
        if not isinstance(own, Mapping):
            problems.append(f"{name} has no hyperparameters on record")
        elif own != reference:
            keys = [str(k) for k in {**own, **reference} if own.get(k) != reference.get(k)]
            problems.append(f"{name} differs in {', '.join(keys)}")
    return all_or(problems, "the same for every task and initialisation")


def few_epochs(record: Record) -> Outcome:
    """Fine-tuning lasts at most 5 epochs."""
    epochs = {init: number(section, "hyperparameters.epochs") for init, section in sections(record).items()}
    ok = bool(epochs) and all(e is not None and e <= MAX_EPOCHS for e in epochs.values())
    said = [f"{init}: {e if e is None else f'{e:g}'} epoch{'' if e == 1 else 's'}" for init, e in epochs.items()]
    return ok, ", ".join(said) or "no scores"


def nothing_selected(record: Record) -> Outcome:
    """The last epoch is scored; nothing is selected by its score, neither an epoch nor, in a sweep or in one scoring
    after another, the hyperparameters or one of several outcomes of the same."""
    accepted = [["last epoch"]]
    if before(record, "4"):  # such records do not name the scored epochs
        accepted.append(["last epoch", UNNAMED])
    found = {
        init: [str(section.get("selection")), *other_sets(record, init, section), *other_epochs(section)]
        for init, section in sections(record).items()
    }
    ok = bool(found) and all(said in accepted for said in found.values())
    return ok, "; ".join(f"{init}: {', '.join(said)}" for init, said in found.items()) or "no scores"


def enough_seeds(record: Record) -> Outcome:
    """The trained model is fine-tuned on every task with at least 3 seeds, which are 0, 1, 2 and so on, and never was
    with any other."""
    found = {init: entries(section.get("seeds")) for init, section in sections(record).items()}
    seeds = list(map(str, found.get("pretrained", [])))
    others = {str(run.get("seed")) for run in fine_tuned(record, "pretrained")} - set(seeds)
    ok = len(seeds) >= MIN_SEEDS and set(seeds) == set(map(str, range(len(seeds)))) and not others
    said = [f"{init}: seeds {seeds}" for init, seeds in found.items()]
    said += [f"in the history of pretrained also {', '.join(sorted(others))}"] if others else []
    return ok, ", ".join(said) or "no scores"


def full_tasks(record: Record) -> Outcome:
    """Every task of the averages is scored, on its full official data; embedded tasks are those of the run's corpus."""
    averages = at(record, "glue.pretrained.averages")
    problems = [
        f"{name} lacks {', '.join(map(str, entries(at(averages, f'{name}.missing')))) or 'a value'}"
        for name in AVERAGES.get(str(at(record, "glue.pretrained.suite")), {"every average": None})
        if number(averages, f"{name}.value") is None
    ]
    subsets = [
        entry
        for init, entry, task in tasks_of(record)
        if init == "pretrained" and (task.get("subset") or other_sizes(record, init, entry, task))
    ]
    problems += [f"not on the official number of examples: {', '.join(subsets)}"] if subsets else []
    problems += [*_tasks_of_another_corpus(record), *_trained_on_what_is_scored(record)]
    contents = _contents(record)
    problems += [f"{OTHER}: {', '.join(names)}" for name, names in contents.items() if name == OTHER]
    shown = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in contents.items())
    return all_or(problems, f"every task, on all of its data; {shown}" if shown else "every task, on all of its data")


def _tasks_of_another_corpus(record: Record) -> list[str]:
    """Embedded tasks come with a corpus; records of before version 5 do not say with which."""
    section, own = at(record, "glue.pretrained"), at(record, "corpus.manifest_sha256")
    foreign = own is None or at(section, "tasks_corpus_sha256") != own
    if at(section, "suite") != "embedded" or not foreign or before(record, "5"):
        return []
    return ["the embedded tasks are not known to be those of the corpus that the model was trained on"]


def _trained_on_what_is_scored(record: Record) -> list[str]:
    """GLUE's entries whose scored examples are largely training examples; records of before version 5 do not say."""
    problems = []
    for init, name, task in tasks_of(record):
        seen, scored = number(task, "seen_in_training"), number(task, "eval_examples")
        if init == "pretrained" and name in ENTRIES and seen and scored and seen > MAX_SEEN_IN_TRAINING * scored:
            problems.append(f"{name}: {seen:.0f} of {scored:.0f} scored examples are training examples too")
    return problems


MAX_SEEN_IN_TRAINING = 0.05  # of GLUE's own sets 1.5 % at most are
OTHER = "as many examples as the official data, but not those (by SHA-256)"


def _contents(record: Record) -> dict[str, list[str]]:
    """GLUE's scored entries with all of their examples, by what the SHA-256 of these says of them."""
    found: dict[str, list[str]] = {}
    if at(record, "glue.pretrained.suite") != "glue":
        return found
    for name in ENTRIES:
        task = at(record, f"glue.pretrained.tasks.{name}")
        if not isinstance(task, Mapping) or task.get("subset"):
            continue
        sha256, official = task.get("data_sha256"), OFFICIAL_SHA256.get(name)
        if not sha256:
            found.setdefault("SHA-256 of the data not recorded", []).append(name)
        elif official is None:
            found.setdefault("official SHA-256 not known", []).append(f"{name} ({str(sha256)[:12]})")
        else:
            found.setdefault("official by SHA-256" if sha256 == official else OTHER, []).append(name)
    return found


def clean_code(record: Record) -> Outcome:
    """The code, in pretraining and in fine-tuning, is a commit of a clean git tree."""
    ran = [("pretraining", e) for e in _pretraining_environments(record)] if at(record, "pretrain") else []
    ran += [(init, at(section, "environment")) for init, section in sections(record).items()]
    ran += [("pretrained", line) for line in kept(record, "pretrained").values()]  # in earlier sittings, too
    where: dict[str, dict[str, None]] = {}
    for name, environment in ran:
        commit, dirty = at(environment, "git.commit"), at(environment, "git.dirty")
        changed = ", ".join(map(str, listed)) if isinstance(listed := at(environment, "git.changed"), list) else ""
        state = "clean" if dirty is False else f"with uncommitted changes{changed and f' ({changed})'}"
        finding = f"commit {str(commit)[:12]}, {state}" if commit else "no git commit on record"
        where.setdefault(finding, {})[name] = None
    problems = [f"{', '.join(names)}: {found}" for found, names in where.items() if not found.endswith("clean")]
    return all_or(problems, "; ".join(where) or "no code ran")


def nothing_forced(record: Record) -> Outcome:
    """No check was overridden: the list of forced exceptions is empty."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    forced = at(record, "pretrain.forced")
    if not isinstance(forced, list):
        return False, "the list of forced exceptions is not on record"
    return not forced, "none" if not forced else f"forced: {', '.join(map(str, forced))}"


def compiled_on_the_clock(record: Record) -> Outcome:
    """Code was compiled on the clock, into the run's own folder, empty at its start, or nothing was compiled."""
    if at(record, "pretrain") is None:
        return False, NO_PRETRAINING
    cache, compiled = at(record, "pretrain.compile_cache"), at(record, "pretrain.compiled")
    if compiled is None:
        return before(record, "5"), f"cache {cache or 'not on record'}; whether code was compiled is not on record"
    return cache == "own" or compiled is False, f"compiled: {compiled}, cache {cache or 'not on record'}"


def predictions_beside(record: Record) -> Outcome:
    """The predictions of the trained model lie beside the record, and are by SHA-256 those that the history names, made
    from the scored weights; where final/ lies there too, it is the trained model.
    """
    lines, scored = kept(record, "pretrained"), at(record, "glue.pretrained.model_sha256")
    paths = ("beside.predictions", "beside.final", "pretrain.final_files")
    there, final, written = (found if isinstance(found := at(record, path), Mapping) else {} for path in paths)
    named = {name: line.get("predictions_sha256") for name, line in lines.items()}
    faults = {
        "not beside the record": [name for name in named if name not in there],
        "not those of the history": [name for name, sha256 in named.items() if there.get(name, sha256) != sha256],
        "of other weights": [name for name, line in lines.items() if line.get("model_sha256") != scored],
    }
    problems = [f"predictions {how}: {few(names)}" for how, names in faults.items() if names]
    others = [name for name, sha256 in final.items() if written.get(name, sha256) != sha256]
    problems += [f"not as pretraining wrote it: final/{', final/'.join(others)}"] if others else []
    model = "as pretraining wrote it" if final and written else "not compared"
    return all_or(problems, f"{len(named)} files of predictions, as the history has them; final/ {model}")
