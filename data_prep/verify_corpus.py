"""What `cramming verify` repeats of a preparation: the embedded tasks generated, a finished corpus searched.

The search goes over the finished shards, whatever the manifest says was found and removed. What the tokenizer does not
keep (signs, in part accents) is not there to be compared, so only what counts wherever it stands is searched for: runs
of 13 words, and sentences of 6 words that say enough (data_prep/dedup/decontaminate.py).
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cramming.config import require
from cramming.data.corpus import Corpus, damage
from cramming.data.manifest import DAMAGED
from cramming.progress import Progress
from data_prep.dedup.decontaminate import DecontaminationConfig, Decontaminator
from data_prep.readers.demo import generator_sha256
from data_prep.synthetic.tasks import write_tasks

GROUP_TOKENS = 1 << 18  # decoded together: about a MB of text
# Share of a task's texts that a searched corpus may hold: without accents two texts are the same that were not before.
MAX_FOUND_SHARE = 0.01
MIN_FOUND = 5


def embedded_tasks(folder: Path, seed: int, generator: str) -> bool:
    """Write the embedded tasks of a corpus with this seed.

    Return False, and write nothing, if its generator was another version of this one (by SHA-256).
    """
    if generator != generator_sha256():
        return False
    write_tasks(folder, seed)
    return True


def overlap(folder: Path, tasks: Path, seconds: float) -> tuple[list[str], str]:
    """Search the training documents of a corpus for the examples in `tasks`, for about so many seconds.

    Shards come at random, and each is compared with the manifest first. Return what contradicts a manifest that says
    that the corpus was searched, and a summary. Memory: what the search takes (`Decontaminator`), and a group of
    documents. UserError: a corpus that is damaged, a folder without tasks.
    """
    corpus = Corpus.open(folder)
    known = corpus.manifest.decontamination  # the tasks and the length that it was searched for
    ngram = known.get("ngram", DecontaminationConfig().ngram)
    search = Decontaminator.from_folder(tasks, DecontaminationConfig(ngram=ngram))
    began = time.monotonic()
    documents, total = 0, sum(shard.documents for shard in corpus.manifest.splits["train"])
    texts_found, holding = set[int](), Counter[str]()
    with Progress("search", float(total), "documents") as bar:
        for texts in _texts(corpus):
            for overlap in search.overlaps(texts, alone=False):
                texts_found.update(overlap.texts.tolist())
                by_task = search.by_task(overlap.texts)
                holding.update(task for task, count in by_task.items() if count)
            documents += len(texts)
            bar.advance(len(texts))
            if time.monotonic() - began > seconds:
                break
    examples = search.by_task(np.array(sorted(texts_found), dtype=np.int64))
    too_many = []
    for task, count in examples.items():
        limit = MAX_FOUND_SHARE * search.searchable[task] * documents / max(1, total)
        if task in known.get("examples", {}) and count >= MIN_FOUND and count > limit:
            too_many.append(f"{task} {count}")
    problems = []
    if too_many:
        named = ", ".join(too_many)
        problems.append(
            f"{folder} holds texts of {named}, and its manifest says that it was searched for them"
        )
    per_task = ", ".join(f"{task} {holding[task]} ({examples[task]})" for task in search.tasks)
    return problems, (
        f"{documents:,} of {total:,} documents searched in {time.monotonic() - began:.0f} s; of each task, documents"
        f" that share a run of {search.ngram} words or a whole sentence with a text (such texts): {per_task}"
    )


def _texts(corpus: Corpus) -> Iterator[list[str]]:
    """Yield the training documents as text in groups, shard by shard, both in an order that cannot be predicted."""
    tokenizer, stream = (
        Tokenizer.from_buffer(corpus.tokenizer_file.read_bytes()),
        corpus.stream("train"),
    )
    shards, hashes, draw = (
        corpus.manifest.splits["train"],
        corpus.manifest.hashes(),
        random.SystemRandom(),
    )
    bounds_D = np.append(stream.document_starts, stream.num_tokens)
    first_S = np.cumsum([0, *(shard.documents for shard in shards)]).tolist()
    for number in draw.sample(range(len(shards)), len(shards)):
        name, first, last = shards[number].file, first_S[number], first_S[number + 1]
        problem = damage(corpus.folder / name, hashes[name])
        require(not problem, f"{problem}. {DAMAGED}")
        cuts = np.unique(
            np.searchsorted(bounds_D, np.arange(bounds_D[first], bounds_D[last], GROUP_TOKENS))
        )
        groups = list(pairwise([*cuts[cuts < last].tolist(), last]))
        for begin, end in draw.sample(groups, len(groups)):
            ids = stream.take(np.arange(bounds_D[begin], bounds_D[end]))
            documents = np.split(ids, bounds_D[begin + 1 : end] - bounds_D[begin])
            yield tokenizer.decode_batch([document.tolist() for document in documents])
