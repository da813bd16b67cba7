"""R10 to R17 and R23 to R26, of the closed division: machine, objective, weights, corpus, tokenizer, code.

Each check's docstring is the rule's sentence in docs/rules.md (a test compares them); `eval.rules.table` numbers them.
What they say of the scores stands in `eval.rules.fine_tuning`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cramming.data.task_files import ENTRIES
from cramming.record_schema import Git, Record, Source
from eval.rules.evidence import NO_SCORES, Outcome, all_or, failed, few, kept, names_of
from cramming.data.suites import AVERAGES

MAX_HOURS = 24.0
FROM_SCRATCH = ("random", "cooccurrence")  # what may be recorded of the embeddings at the start
# Words that corpus and task share, by which a document counts as overlapping (data_prep/dedup/decontaminate.py).
MAX_OVERLAP_WORDS = 13
# Tasks of GLUE and SuperGLUE and the data sets that their texts come from; the others are ordinary words, too.
_NAMES = (
    r"(?:super[-_]?)?glue|cola|sst[-_]?[25]|mrpc|msr[-_]paraphrase|qqp|quora(?:[-_]duplicate[-_]questions)?"
    r"|sts-?b(?:enchmark)?|mnli|multi[-_]?nli|qnli|wnli|squad(?:[-_]?v?[12](?:\.[\d.]+)?)?|boolq|multirc"
)
_OTHERS = r"sst|rte|cb|ax(?:-?[bg])?|copa|wic|wsc"
_SPLITS = r"train|dev|val|validation|test"
_PARTS = rf"{_SPLITS}|matched|mismatched|all|data|public|of|v?[\d.]+"
# As words, in the name of a data set on the hub.
DOWNSTREAM = re.compile(rf"(?<![a-z0-9])(?:{_NAMES}|{_OTHERS})(?![a-z0-9])")
# A folder or file called so, but for versions and splits (`SQuAD/`, `glue_data/`, `multinli_1.0_train.jsonl`).
DOWNSTREAM_PATH = re.compile(
    rf"(?:^|/)(?:(?:{_PARTS})[-_])*(?:{_NAMES})(?:[-_](?:{_NAMES}|{_OTHERS}|{_PARTS}))*(?:\.[^/]*)?(?:/|$)"
)
# A file as the official folder and the hub have it (`CB/val.jsonl`, `ax/test-00000-of-00001.parquet`).
DOWNSTREAM_FILE = re.compile(
    rf"(?:^|/)(?:(?:{_OTHERS}|record)/(?:{_SPLITS})|(diagnostic|ax-[bg])/\1)(?:(?:-[^/.]*)?\.(?:tsv|csv|jsonl?|parquet)(?:\.[^/]*)?|/\d{{4}}\.parquet)$"
)


def one_device(record: Record) -> Outcome:
    """One GPU or one CPU did the whole pretraining."""
    devices, kind = record.training.devices, record.environment.device.kind
    names = dict.fromkeys(
        found.device.name or "no name" for found in (record.environment, *record.resumed)
    )
    ok = devices == 1 and kind in ("cpu", "cuda") and len(names) == 1
    return ok, f"{devices} device(s), {kind}: {', then '.join(names)}"


def one_day(record: Record) -> Outcome:
    """Pretraining took at most 24 hours of the wall clock, over all its processes together."""
    budget = record.training.budget
    if (seconds := budget.spent_seconds) is None:
        return False, "no training time on record"
    ok = seconds <= MAX_HOURS * 3600 and budget.clock in (None, "wall")
    return ok, f"{seconds / 3600:.3f} h of training{' by the CPU clock' * (budget.clock == 'cpu')}"


def masked_language_model(record: Record) -> Outcome:
    """The objective is masked language modelling."""
    return record.training.objective == "mlm", f"objective {record.training.objective}"


def from_scratch(record: Record) -> Outcome:
    """All weights start at random or from counts over the run's own corpus, made on the clock; no pretrained weights
    are used anywhere."""
    start = record.training.start
    return start in FROM_SCRATCH, f"start: {start or 'not on record'}"


def own_weights_scored(record: Record) -> Outcome:
    """The scored model is the trained one, by the SHA-256 of its weights and of every other file of final/."""
    trained, scored = record.training.final_sha256, record.trained and record.trained.model_sha256
    if trained and not record.glue:
        return False, NO_SCORES
    if not trained or not scored:
        return (
            False,
            f"SHA-256 of the {'trained' if not trained else 'scored'} weights is not on record",
        )
    if trained != scored:
        return False, "the scored weights are not the trained ones"
    written, read = record.training.final_files, record.trained and record.trained.model_files
    if not written or not read:
        return False, "the same weights, by SHA-256; the other files of the model are not on record"
    others = sorted(name for name in {**written, **read} if written.get(name) != read.get(name))
    return (
        not others,
        f"not the same file: {', '.join(others)}" if others else f"the same {len(written)} files",
    )


def corpus_declared(record: Record) -> Outcome:
    """The corpus is named by the SHA-256 of its manifest, each source by its name and licence, and no file of it was
    written to while training read it."""
    corpus = record.corpus
    problems = failed(
        (corpus.manifest_sha256, "corpus.manifest_sha256 is missing"),
        (corpus.sources, "corpus.sources is missing"),
        (corpus.changed is not None, "corpus.changed is missing"),
    )
    for source in corpus.sources:
        keys = ("name",) if source.kind == "tokenizer" else ("name", "license")
        problems += [
            f"source {source.name!r} has no {key}" for key in keys if not getattr(source, key)
        ]
    for path, as_prepared in (corpus.changed or {}).items():
        now = {
            True: ", and was as prepared at the end",
            False: ", and was not as prepared at the end",
        }
        known = now[as_prepared] if isinstance(as_prepared, bool) else ""
        problems.append(f"{path} changed while training read it{known}")
    return all_or(problems, f"sources: {names_of(corpus.sources)}")


def no_downstream_text(record: Record) -> Outcome:
    """No downstream data set is among the sources of the corpus, and text that was not generated was searched for the
    development sets of every task of the averages, which are those that were scored, by the SHA-256 of their texts."""
    sources, search = record.corpus.sources, record.corpus.decontamination
    removed = ", ".join(f"{task} {count}" for task, count in search.removed.items())
    searched = f"searched for runs of {search.ngram} words; documents removed: {removed}"
    searched = searched if removed else "no overlap search on record"
    found = [source for source in sources if _is_downstream(source)]
    if not sources:
        return False, "no source is declared"
    if found:
        return False, f"downstream data among the sources: {names_of(found)}; {searched}"
    if {source.kind for source in sources if source.kind != "tokenizer"} == {"embedded"}:
        return True, "no downstream data set among the declared sources; the text is generated"
    if gaps := list(_search_gaps(record)):
        return all_or([searched, *gaps], "")
    return True, f"no downstream data set among the declared sources; {searched}"


def _is_downstream(source: Source) -> bool:
    """By its name, of a data set of the hub; of a file, by the folders and files in its path. The search is no
    substitute: it says nothing of training texts."""
    name = (source.name or "").lower()
    hub = re.findall(r"datasets--([^/]+)", name)  # of its cache on the disk
    if source.dataset or (
        source.kind == "hub" and not source.folder
    ):  # older records lack `dataset`
        hub.append(f"{source.dataset}/{name}".lower())
    return any(map(DOWNSTREAM.search, hub)) or bool(
        DOWNSTREAM_PATH.search(name) or DOWNSTREAM_FILE.search(name)
    )


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


def tokenizer_origin(record: Record) -> Outcome:
    """The tokenizer is recorded by kind and SHA-256, is that of the trained and of the scored model, and was trained on
    the corpus unless its origin is stated."""
    tokenizer = record.corpus.tokenizer
    problems = [
        f"corpus.tokenizer.{key} is missing"
        for key in ("kind", "sha256")
        if not getattr(tokenizer, key)
    ]
    scored = record.trained.model_files if record.trained else None
    models = {"trained": record.training.final_files, "scored": scored}
    for model, files in models.items():
        if (
            files is not None and files.get("tokenizer.json") != tokenizer.sha256
        ):  # that they are on record is R14's
            problems.append(f"tokenizer.json of the {model} model is not the corpus's")
    given = [source for source in record.corpus.sources if source.kind == "tokenizer"]
    origin = f"ready-made: {names_of(given)}" if given else "trained on this corpus"
    return all_or(problems, f"{tokenizer.kind}, {origin}")


def clean_code(record: Record) -> Outcome:
    """The code, in pretraining and in fine-tuning, is a commit of a clean git tree."""
    ran: list[tuple[str, Git | None]] = []
    if record.pretrain:
        ran += [("pretraining", found.git) for found in (record.environment, *record.resumed)]
    ran += [(init, s.environment.git if s.environment else None) for init, s in record.glue.items()]
    ran += [
        ("pretrained", line.git) for line in kept(record, "pretrained")
    ]  # in earlier sittings, too
    where: dict[str, dict[str, None]] = {}
    for name, git in ran:
        where.setdefault(_state(git), {})[name] = None
    problems = (
        f"{', '.join(names)}: {found}"
        for found, names in where.items()
        if not found.endswith("clean")
    )
    return all_or(problems, "; ".join(where) or "no code ran")


def _state(git: Git | None) -> str:
    if git is None or not git.commit:
        return "no git commit on record"
    changed = f" ({', '.join(map(str, git.changed))})" if git.changed else ""
    return f"commit {git.commit[:12]}, {'clean' if git.dirty is False else f'with uncommitted changes{changed}'}"


def nothing_forced(record: Record) -> Outcome:
    """No check was overridden: the list of forced exceptions is empty."""
    if (forced := record.training.forced) is None:
        return False, "the list of forced exceptions is not on record"
    return not forced, f"forced: {', '.join(map(str, forced))}" if forced else "none"


def compiled_on_the_clock(record: Record) -> Outcome:
    """Code was compiled on the clock, into the run's own folder, empty at its start, or nothing was compiled."""
    processes = (found.compile_cache for found in (record.environment, *record.resumed))
    caches = {*processes, record.training.compile_cache} - {None}
    compiled, cache = (
        record.training.compiled,
        "own" if caches == {"own"} else "given" if caches else "not on record",
    )
    if compiled is None:
        return False, f"cache {cache}; whether code was compiled is not on record"
    return cache == "own" or not compiled, f"compiled: {compiled}, cache {cache}"


def predictions_beside(record: Record) -> Outcome:
    """The predictions of the trained model lie beside the record, and are by SHA-256 those that the history names, made
    from the scored weights; where final/ lies there too, it is the trained model.
    """
    lines = {f"{line.task}-seed{line.seed}.npz": line for line in kept(record, "pretrained")}
    scored = record.trained and record.trained.model_sha256
    there, final = record.beside.predictions, record.beside.final
    written: Mapping[str, Any] = record.training.final_files or {}
    faults = {
        "not beside the record": [name for name in lines if name not in there],
        "not those of the history": [
            n for n, line in lines.items() if n in there and there[n] != line.predictions_sha256
        ],
        "of other weights": [name for name, line in lines.items() if line.model_sha256 != scored],
    }
    problems = [f"predictions {how}: {few(names)}" for how, names in faults.items() if names]
    others = [
        f"final/{name}" for name, sha256 in final.items() if written.get(name, sha256) != sha256
    ]
    problems += [f"not as pretraining wrote it: {', '.join(others)}"] if others else []
    model = "as pretraining wrote it" if final and written else "not compared"
    return all_or(
        problems, f"{len(lines)} files of predictions, as the history has them; final/ {model}"
    )
