"""Rules of the closed division: machine, objective, weights, corpus, tokenizer, code.

Each check's docstring is the rule's sentence in docs/reference/rules.md; `eval.rules.table` numbers them. Rules on
scores are in `eval.rules.fine_tuning`.
"""

import re
from collections.abc import Iterator

from cramming.data.suites import AVERAGES
from cramming.data.task_files import ENTRIES
from cramming.record_schema import Environment, Git, Record, Source
from eval.rules.evidence import NO_SCORES, Outcome, abbreviated, all_or, fine_tuned, names_of

MAX_HOURS = 24.0
FROM_SCRATCH = ("random", "cooccurrence")  # allowed initialisations of the embeddings
# Largest number of shared words from which a document counts as overlapping (data_prep/dedup/decontaminate.py)
MAX_OVERLAP_WORDS = 13
# Tasks of GLUE and SuperGLUE and the data sets that their texts come from. Those in _OTHERS are ordinary words too.
_NAMES = (
    r"(?:super[-_]?)?glue|cola|sst[-_]?[25]|mrpc|msr[-_]paraphrase|qqp|quora(?:[-_]duplicate[-_]questions)?"
    r"|sts-?b(?:enchmark)?|mnli|multi[-_]?nli|qnli|wnli|squad(?:[-_]?v?[12](?:\.[\d.]+)?)?|boolq|multirc"
)
_OTHERS = r"sst|rte|cb|ax(?:-?[bg])?|copa|wic|wsc"
_SPLITS = r"train|dev|val|validation|test"
_PARTS = rf"{_SPLITS}|matched|mismatched|all|data|public|of|v?[\d.]+"
# names as words in the name of a data set on the hub
DOWNSTREAM = re.compile(rf"(?<![a-z0-9])(?:{_NAMES}|{_OTHERS})(?![a-z0-9])")
# folder or file of such a name, with versions and splits (`SQuAD/`, `glue_data/`, `multinli_1.0_train.jsonl`)
DOWNSTREAM_PATH = re.compile(
    rf"(?:^|/)(?:(?:{_PARTS})[-_])*(?:{_NAMES})(?:[-_](?:{_NAMES}|{_OTHERS}|{_PARTS}))*(?:\.[^/]*)?(?:/|$)"
)
# file of the official folder or of the hub (`CB/val.jsonl`, `ax/test-00000-of-00001.parquet`)
DOWNSTREAM_FILE = re.compile(
    rf"(?:^|/)(?:(?:{_OTHERS}|record)/(?:{_SPLITS})|(diagnostic|ax-[bg])/\1)(?:(?:-[^/.]*)?\.(?:tsv|csv|jsonl?|parquet)(?:\.[^/]*)?|/\d{{4}}\.parquet)$"
)


def one_device(record: Record) -> Outcome:
    """One GPU or one CPU did the whole pretraining."""
    devices = record.training.devices
    kind = record.environment.device.kind
    names = dict.fromkeys(each.device.name or "no name" for each in _machines(record))
    holds = devices == 1 and kind in ("cpu", "cuda") and len(names) == 1
    return holds, f"{devices} device(s), {kind}: {', then '.join(names)}"


def _machines(record: Record) -> list[Environment]:
    """Return the environments of all training processes."""
    return [record.environment, *record.resumed]


def one_day(record: Record) -> Outcome:
    """Pretraining took at most 24 hours of the wall clock, over all its processes together."""
    budget = record.training.budget
    seconds = budget.spent_seconds
    if seconds is None:
        return False, "no training time on record"
    clock = " by the CPU clock" if budget.clock == "cpu" else ""
    holds = seconds <= MAX_HOURS * 3600 and budget.clock == "wall"
    return holds, f"{seconds / 3600:.3f} h of training{clock}"


def masked_language_model(record: Record) -> Outcome:
    """The objective is masked language modelling."""
    return record.training.objective == "mlm", f"objective {record.training.objective}"


def from_scratch(record: Record) -> Outcome:
    """All weights start at random or from counts over the run's own corpus, made on the clock; no pretrained weights
    are used anywhere.
    """
    start = record.training.start
    has_teacher = record.training.objective == "distill"
    teacher = ", with a teacher" if has_teacher else ""
    holds = start in FROM_SCRATCH and not has_teacher
    return holds, f"start: {start or 'not on record'}{teacher}"


def trained_weights_scored(record: Record) -> Outcome:
    """The scored model is the exported one, by the SHA-256 of every file of final/."""
    written = record.training.final_files
    if written and not record.glue:
        return False, NO_SCORES
    read = record.trained.model_files if record.trained else None
    if not written or not read:
        return False, "the files of the model are not on record"
    others = sorted(name for name in {**written, **read} if written.get(name) != read.get(name))
    if record.trained and record.trained.model_sha256 != record.training.final_sha256:
        others.append("the weights that were fine-tuned")
    if others:
        return False, f"not the same file: {', '.join(others)}"
    return True, f"the same {len(written)} files"


def corpus_declared(record: Record) -> Outcome:
    """The corpus is named by the SHA-256 of its manifest, each source by its name and licence, and no file of it was
    written to while training read it.
    """
    corpus = record.corpus
    problems: list[str] = []
    if not corpus.manifest_sha256:
        problems.append("no SHA-256 of the manifest")
    if not corpus.sources:
        problems.append("no source is declared")
    for source in corpus.sources:
        if not source.name:
            problems.append("a source has no name")
        if not source.license and source.kind != "tokenizer":
            problems.append(f"source {source.name!r} has no license")
    at_end = {
        True: ", and was as prepared at the end",
        False: ", and was not as prepared at the end",
    }
    for path, as_prepared in corpus.changed.items():
        known = at_end[as_prepared] if as_prepared is not None else ""
        problems.append(f"{path} changed while training read it{known}")
    return all_or(problems, f"sources: {names_of(corpus.sources)}")


def no_downstream_text(record: Record) -> Outcome:
    """No downstream data set is among the sources of the corpus, and text that was not generated was searched for the
    development sets of every task of the averages, which are those that were scored, by the SHA-256 of their texts.
    """
    sources = record.corpus.sources
    if not sources:
        return False, "no source is declared"
    search = _search_words(record)
    downstream = [source for source in sources if _is_downstream(source)]
    if downstream:
        return False, f"downstream data among the sources: {names_of(downstream)}; {search}"
    kinds = {source.kind for source in sources if source.kind != "tokenizer"}
    if kinds == {"embedded"}:
        return True, "no downstream data set among the sources; the text is generated"
    gaps = list(_search_gaps(record))
    if gaps:
        return all_or([search, *gaps], "")
    return True, f"no downstream data set among the sources; {search}"


def _search_words(record: Record) -> str:
    search = record.corpus.decontamination
    removed = ", ".join(f"{task} {count}" for task, count in search.removed.items())
    if not removed:
        return "no overlap search on record"
    return f"searched for runs of {search.ngram} words; documents removed: {removed}"


def _is_downstream(source: Source) -> bool:
    """Return whether a source is a task's data: a data set by its name, a file by the folders and files in its path.

    The search for overlaps is no substitute, because it does not cover training texts.
    """
    name = (source.name or "").lower()
    data_sets = re.findall(r"datasets--([^/]+)", name)  # the hub's cache on the disk
    if source.dataset:
        data_sets.append(f"{source.dataset}/{name}".lower())
    if any(DOWNSTREAM.search(data_set) for data_set in data_sets):
        return True
    return bool(DOWNSTREAM_PATH.search(name) or DOWNSTREAM_FILE.search(name))


def _search_gaps(record: Record) -> Iterator[str]:
    """Yield the gaps of the search; gaps with respect to the scored text are known once there are scores."""
    search = record.corpus.decontamination
    if search.ngram is None or search.development is None:
        yield "prepare with data.decontaminate.tasks=<GLUE folder>"
        return
    if search.ngram > MAX_OVERLAP_WORDS:
        yield f"only runs of more than {MAX_OVERLAP_WORDS} words count"
    is_glue = record.trained is not None and record.trained.suite == "glue"
    scored = record.trained.tasks if record.trained and is_glue else {}
    for entry in AVERAGES["glue"]["avg9"].entries:
        task, source = ENTRIES[entry]
        file = f"{source.folder}/{source.file}"
        texts = len(task.text) * source.examples
        searched = search.development.get(file)
        count = searched.texts if searched else 0
        if count != texts:
            yield f"{count} texts of {file}, which has {texts}"
        elif searched and entry in scored and scored[entry].texts_sha256 != searched.sha256:
            yield (
                f"{file} is not what was scored (by SHA-256 of the texts):"
                " prepare and score with the same files"
            )


def tokenizer_origin(record: Record) -> Outcome:
    """The tokenizer is recorded by kind and SHA-256, is that of the trained and of the scored model, and was trained on
    the corpus unless its origin is stated.
    """
    tokenizer = record.corpus.tokenizer
    problems: list[str] = []
    if not tokenizer.kind or not tokenizer.sha256:
        problems.append("kind or SHA-256 of the tokenizer is not on record")
    scored = record.trained.model_files if record.trained else None
    models = {"trained": record.training.final_files, "scored": scored}
    for model, files in models.items():
        if files is not None and files.get("tokenizer.json") != tokenizer.sha256:
            problems.append(f"tokenizer.json of the {model} model is not the corpus's")
    ready_made = [source for source in record.corpus.sources if source.kind == "tokenizer"]
    origin = f"ready-made: {names_of(ready_made)}" if ready_made else "trained on this corpus"
    return all_or(problems, f"{tokenizer.kind}, {origin}")


def clean_code(record: Record) -> Outcome:
    """The code, in pretraining and in every fine-tuning, is a commit of a clean git tree."""
    ran: list[tuple[str, Git | None]] = []
    if record.pretrain:
        ran += [("pretraining", each.git) for each in _machines(record)]
    for init, section in record.glue.items():
        ran.append((init, section.environment.git if section.environment else None))
    ran += [("pretrained", line.git) for line in fine_tuned(record, "pretrained")]
    names_by_state: dict[str, dict[str, None]] = {}
    for name, git in ran:
        names_by_state.setdefault(_state(git), {})[name] = None
    problems = []
    for state, names in names_by_state.items():
        if not state.endswith("clean"):
            problems.append(f"{', '.join(names)}: {state}")
    return all_or(problems, "; ".join(names_by_state) or "no code ran")


def _state(git: Git | None) -> str:
    if git is None or not git.commit:
        return "no git commit on record"
    commit = f"commit {git.commit[:12]}"
    if git.dirty is False and not git.changed and not git.diff_sha256:
        return f"{commit}, clean"
    changed = f" ({', '.join(git.changed)})" if git.changed else ""
    return f"{commit}, with uncommitted changes{changed}"


def nothing_forced(record: Record) -> Outcome:
    """No check was overridden: the list of forced exceptions is empty."""
    forced = record.training.forced
    if forced is None:
        return False, "the list of forced exceptions is not on record"
    return not forced, f"forced: {', '.join(forced)}" if forced else "none"


def compiled_on_the_clock(record: Record) -> Outcome:
    """Code was compiled on the clock, into the run's own folder, empty at its start, or nothing was compiled."""
    caches = {each.compile_cache for each in _machines(record)}
    cache = "own" if caches == {"own"} else "given"
    compiled = record.training.compiled
    if compiled is None:
        return False, f"cache {cache}; whether code was compiled is not on record"
    return cache == "own" or not compiled, f"compiled: {compiled}, cache {cache}"


def predictions_present(record: Record) -> Outcome:
    """The predictions of the trained model lie beside the log, named by the SHA-256 that the log gives, and were made
    by the scored weights.
    """
    if record.trained is None:
        return False, NO_SCORES
    named = record.trained.predictions
    absent = [name for name, sha256 in named.items() if sha256 not in record.files.predictions]
    made = {(line.predictions_sha256, line.model_sha256) for line in record.history}
    scored = record.trained.model_sha256
    foreign = [name for name, sha256 in named.items() if (sha256, scored) not in made]
    problems: list[str] = []
    if absent:
        problems.append(f"predictions not there: {abbreviated(absent)}")
    if foreign:
        problems.append(f"predictions of other weights: {abbreviated(foreign)}")
    return all_or(problems, f"{len(named)} files of predictions")


def weights_at_hand(record: Record) -> Outcome:
    """The final weights lie beside the log, or the archive names their address."""
    weights = record.files.weights
    if weights is None:
        return False, "weights: not given"
    return True, f"weights: at {weights}"
