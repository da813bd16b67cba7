"""The rules of the closed division about the training: machine, objective, weights, corpus, tokenizer, code.

Each check's docstring is the rule's sentence in docs/rules.md (a test compares them); `eval.rules.table` numbers them.
What they say of the scores stands in `eval.rules.fine_tuning`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cramming.data.task_files import ENTRIES
from eval.rules.evidence import Outcome, all_or, before, few, kept, names_of, of_pretraining
from eval.rules.record import Record
from eval.rules.record_sections import Environment, Git, Pretraining
from eval.tasks.suites import AVERAGES

MAX_HOURS = 24.0
FROM_SCRATCH = ("random", "cooccurrence")  # what may be recorded of the embeddings at the start
# Words that corpus and task share, by which a document counts as overlapping (data_prep/dedup/decontaminate.py).
MAX_OVERLAP_WORDS = 13
# GLUE's tasks and the data sets that their texts come from, as words in a source's name or path.
DOWNSTREAM = re.compile(
    r"(?<![a-z0-9])(?:super)?(?:glue|cola|sst-?2?|mrpc|qqp|sts-?b|stsbenchmark|mnli|multi_?nli|qnli|rte|wnli|squad)(?![a-z0-9])"
)


@of_pretraining(holds_without=False)
def one_device(record: Record, pretrain: Pretraining) -> Outcome:
    """One GPU or one CPU did the whole pretraining."""
    kind = record.environment.device.kind
    names = dict.fromkeys(found.device.name or "no name" for found in _environments(record))
    ok = pretrain.devices == 1 and kind in ("cpu", "cuda") and len(names) == 1
    return ok, f"{pretrain.devices} device(s), {kind}: {', then '.join(names)}"


def _environments(record: Record) -> list[Environment]:
    """Of the first start, and of every process that resumed it."""
    return [record.environment, *record.resumed]


@of_pretraining(holds_without=False)
def one_day(record: Record, pretrain: Pretraining) -> Outcome:
    """Pretraining took at most 24 hours, over all its processes together."""
    if (seconds := pretrain.budget.spent_seconds) is None:
        return False, "no training time on record"
    return seconds <= MAX_HOURS * 3600, f"{seconds / 3600:.3f} h of training"


@of_pretraining(holds_without=False)
def masked_language_model(record: Record, pretrain: Pretraining) -> Outcome:
    """The objective is masked language modelling."""
    return pretrain.objective == "mlm", f"objective {pretrain.objective}"


@of_pretraining(holds_without=False)
def from_scratch(record: Record, pretrain: Pretraining) -> Outcome:
    """All weights start at random or from counts over the run's own corpus, made on the clock; no pretrained weights
    are used anywhere."""
    start, init = pretrain.start, pretrain.init
    if start is None and record.rules_version == "1" and init == "scratch":
        start = "random"  # then there was no other
    old = "" if init in (None, "scratch") else f", initial weights {init}"
    return start in FROM_SCRATCH and not old, f"start: {start or 'not on record'}{old}"


@of_pretraining(holds_without=False)
def own_weights_scored(record: Record, pretrain: Pretraining) -> Outcome:
    """The scored model is the trained one, by the SHA-256 of its weights and of every other file of final/."""
    trained, scored = pretrain.final_sha256, record.trained and record.trained.model_sha256
    if not trained or not scored:
        return False, f"SHA-256 of the {'trained' if not trained else 'scored'} weights is not on record"
    if trained != scored:
        return False, "the scored weights are not the trained ones"
    written, read = pretrain.final_files, record.trained and record.trained.model_files
    if not written or not read:
        return before(record, "5"), "the same weights, by SHA-256; the other files of the model are not on record"
    others = sorted(name for name in {**written, **read} if written.get(name) != read.get(name))
    return not others, f"not the same file: {', '.join(others)}" if others else f"the same {len(written)} files"


def corpus_declared(record: Record) -> Outcome:
    """The corpus is named by the SHA-256 of its manifest, each source by its name and licence, and no file of it was
    written to while training read it."""
    corpus = record.corpus
    named = {"corpus.manifest_sha256": corpus.manifest_sha256, "corpus.sources": corpus.sources}
    problems = [f"{path} is missing" for path, value in named.items() if not value]
    for source in corpus.sources:
        keys = ("name",) if source.kind == "tokenizer" else ("name", "license")
        problems += [f"source {source.name!r} has no {key}" for key in keys if not getattr(source, key)]
    sources = f"sources: {names_of(corpus.sources)}"
    if corpus.changed is None:
        problems += [] if before(record, "5") else ["corpus.changed is missing"]
        return all_or(problems, f"{sources}; whether a file changed meanwhile is not on record")
    for path, as_prepared in corpus.changed.items():
        now = {"True": ", and was as prepared at the end", "False": ", and was not as prepared at the end"}
        problems.append(f"{path} changed while training read it{now.get(str(as_prepared), '')}")
    return all_or(problems, sources)


def no_downstream_text(record: Record) -> Outcome:
    """No downstream data set is among the sources of the corpus, and text that was not generated was searched for the
    development sets of every task of the averages, which are those that were scored, by the SHA-256 of their texts."""
    sources = record.corpus.sources
    if not sources:
        return False, "no source is declared"
    found = [source for source in sources if DOWNSTREAM.search(json.dumps(source.raw, default=str).lower())]
    search, gaps = _search_words(record), list(_search_gaps(record))
    if found:
        return False, f"downstream data among the sources: {names_of(found)}; {search}"
    if {source.kind for source in sources if source.kind != "tokenizer"} == {"embedded"}:
        return True, "no downstream data set among the declared sources; the text is generated"
    if gaps and not before(record, "5"):
        return all_or([search, *gaps], "")
    return True, f"no downstream data set among the declared sources; {search}"


def _search_gaps(record: Record) -> Iterator[str]:
    """What the search for downstream text left out; whether it was the scored text is known once there are scores."""
    search = record.corpus.decontamination
    if search.ngram is None and search.development is None:
        yield "prepare with data.decontaminate.tasks=<GLUE folder>"
        return
    if search.ngram is None or search.ngram > MAX_OVERLAP_WORDS:
        yield f"only runs of more than {MAX_OVERLAP_WORDS} words count"
    if search.development is None:
        yield "which development texts were searched for is not on record: delete the corpus and prepare it anew"
        return
    scored = record.trained.tasks if record.trained and record.trained.suite == "glue" else {}
    for entry in AVERAGES["glue"]["avg9"].entries:
        task, source = ENTRIES[entry]
        file, texts = f"{source.folder}/{source.file}", len(task.text) * source.examples
        found = search.development.get(file)
        if (count := (found and found.texts) or 0) != texts:
            yield f"{count:.0f} texts of {file}, which has {texts}"
        elif entry in scored and found and scored[entry].texts_sha256 != found.sha256:
            yield f"{file} is not what was scored (by SHA-256 of the texts): prepare and score with the same files"


def _search_words(record: Record) -> str:
    """What the preparation says about its search for downstream text: which tasks, and what each of them removed."""
    search = record.corpus.decontamination
    if not search.removed:
        return "no overlap search on record"
    tasks = ", ".join(f"{task} {count}" for task, count in search.removed.items())
    how = f"searched for runs of {search.ngram} words; documents removed: {tasks}"
    if not (search.found and search.searchable and search.examples):
        return how
    rows = (
        f"{task} {search.found.get(task)} texts found, {search.searchable.get(task)} of"
        f" {search.examples.get(task)} searchable"
        for task in search.removed
    )
    return f"{how}; {'; '.join(rows)}"


def tokenizer_origin(record: Record) -> Outcome:
    """The tokenizer is recorded by kind and SHA-256, is that of the trained and of the scored model, and was trained on
    the corpus unless its origin is stated."""
    tokenizer = record.corpus.tokenizer
    problems = [f"corpus.tokenizer.{key} is missing" for key in ("kind", "sha256") if not getattr(tokenizer, key)]
    trained = record.pretrain.final_files if record.pretrain else None
    scored = record.trained.model_files if record.trained else None
    for model, files in (("trained", trained), ("scored", scored)):  # that they are on record is R14's
        if isinstance(files, Mapping) and files.get("tokenizer.json") != tokenizer.sha256:
            problems.append(f"tokenizer.json of the {model} model is not the corpus's")
    given = [source for source in record.corpus.sources if source.kind == "tokenizer"]
    origin = f"ready-made: {names_of(given)}" if given else "trained on this corpus"
    return all_or(problems, f"{tokenizer.kind}, {origin}")


def clean_code(record: Record) -> Outcome:
    """The code, in pretraining and in fine-tuning, is a commit of a clean git tree."""
    ran: list[tuple[str, Git | None]] = []
    ran += [("pretraining", found.git) for found in _environments(record)] if record.pretrain else []
    ran += [(init, s.environment.git if s.environment else None) for init, s in record.glue.items()]
    ran += [("pretrained", line.git) for line in kept(record, "pretrained").values()]  # in earlier sittings, too
    where: dict[str, dict[str, None]] = {}
    for name, git in ran:
        where.setdefault(_state(git), {})[name] = None
    problems = [f"{', '.join(names)}: {found}" for found, names in where.items() if not found.endswith("clean")]
    return all_or(problems, "; ".join(where) or "no code ran")


def _state(git: Git | None) -> str:
    if git is None or not git.commit:
        return "no git commit on record"
    changed = f" ({', '.join(map(str, git.changed))})" if git.changed else ""
    return f"commit {git.commit[:12]}, {'clean' if git.dirty is False else f'with uncommitted changes{changed}'}"


@of_pretraining(holds_without=False)
def nothing_forced(record: Record, pretrain: Pretraining) -> Outcome:
    """No check was overridden: the list of forced exceptions is empty."""
    if (forced := pretrain.forced) is None:
        return False, "the list of forced exceptions is not on record"
    return not forced, f"forced: {', '.join(map(str, forced))}" if forced else "none"


@of_pretraining(holds_without=False)
def compiled_on_the_clock(record: Record, pretrain: Pretraining) -> Outcome:
    """Code was compiled on the clock, into the run's own folder, empty at its start, or nothing was compiled."""
    compiled, cache = pretrain.compiled, pretrain.compile_cache or "not on record"
    if compiled is None:
        return before(record, "5"), f"cache {cache}; whether code was compiled is not on record"
    return cache == "own" or not compiled, f"compiled: {compiled}, cache {cache}"


def predictions_beside(record: Record) -> Outcome:
    """The predictions of the trained model lie beside the record, and are by SHA-256 those that the history names, made
    from the scored weights; where final/ lies there too, it is the trained model.
    """
    lines, scored = kept(record, "pretrained"), record.trained and record.trained.model_sha256
    there, final = record.beside.predictions, record.beside.final
    written: Mapping[str, Any] = (record.pretrain and record.pretrain.final_files) or {}
    named = {name: line.predictions_sha256 for name, line in lines.items()}
    faults = {
        "not beside the record": [name for name in named if name not in there],
        "not those of the history": [name for name, sha256 in named.items() if there.get(name, sha256) != sha256],
        "of other weights": [name for name, line in lines.items() if line.model_sha256 != scored],
    }
    problems = [f"predictions {how}: {few(names)}" for how, names in faults.items() if names]
    others = [name for name, sha256 in final.items() if written.get(name, sha256) != sha256]
    problems += [f"not as pretraining wrote it: final/{', final/'.join(others)}"] if others else []
    model = "as pretraining wrote it" if final and written else "not compared"
    return all_or(problems, f"{len(named)} files of predictions, as the history has them; final/ {model}")
