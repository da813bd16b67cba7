"""R16's evidence: what a record says of downstream text in its corpus, by the sources' names and by a search."""

import re
from collections.abc import Iterator, Mapping

from cramming.data.task_files import ENTRIES
from eval.rules.reading import Record, at, number
from eval.tasks.suites import AVERAGES

MAX_RUN = (
    13  # words that corpus and task share, by which a document counts as overlapping (data_prep/dedup/decontaminate.py)
)

# GLUE's tasks and the data sets that their texts come from, as words in a source's name or path.
DOWNSTREAM = re.compile(
    r"(?<![a-z0-9])(?:super)?(?:glue|cola|sst-?2?|mrpc|qqp|sts-?b|stsbenchmark|mnli|multi_?nli|qnli|rte|wnli|squad)(?![a-z0-9])"
)


def gaps_of_the_search(record: Record) -> Iterator[str]:
    """What the search for downstream text left out; whether it was the scored text is known once there are scores."""
    search = at(record, "corpus.decontamination")
    if not search:
        yield "prepare with data.decontaminate.tasks=<GLUE folder>"
        return
    ngram = number(search, "ngram")
    if ngram is None or ngram > MAX_RUN:
        yield f"only runs of more than {MAX_RUN} words count"
    searched = at(search, "development")
    if not isinstance(searched, Mapping):
        yield "which development texts were searched for is not on record: delete the corpus and prepare it anew"
        return
    section = at(record, "glue.pretrained")
    scored = at(section, "tasks") if at(section, "suite") == "glue" else None
    for entry in AVERAGES["glue"]["avg9"].entries:
        task, source = ENTRIES[entry]
        file = f"{source.folder}/{source.file}"
        found, texts, of_entry = searched.get(file), len(task.text) * source.examples, at(scored, entry)
        if (count := number(found, "texts") or 0) != texts:
            yield f"{count:.0f} texts of {file}, which has {texts}"
        elif of_entry is not None and at(of_entry, "texts_sha256") != at(found, "sha256"):
            yield f"{file} is not what was scored (by SHA-256 of the texts): prepare and score with the same files"


def overlap_search(record: Record) -> str:
    """What the preparation says about its search for downstream text: which tasks, and what each of them removed."""
    removed = at(record, "corpus.decontamination.removed")
    if not isinstance(removed, Mapping) or not removed:
        return "no overlap search on record"
    tasks = ", ".join(f"{task} {count}" for task, count in removed.items())
    how = f"searched for runs of {at(record, 'corpus.decontamination.ngram')} words; documents removed: {tasks}"
    counts = {key: at(record, f"corpus.decontamination.{key}") for key in ("found", "searchable", "examples")}
    if not all(isinstance(count, Mapping) for count in counts.values()):
        return how
    rows = (
        f"{task} {counts['found'].get(task)} texts found, {counts['searchable'].get(task)} of"
        f" {counts['examples'].get(task)} searchable"
        for task in removed
    )
    return f"{how}; {'; '.join(rows)}"
