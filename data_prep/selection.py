"""Which documents become the corpus, and on which side: clean, filter, deduplicate, hold out. One stream, one order."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cramming.data.shards import Split
from data_prep.clean import normalize, reason_to_remove, split_at_whitespace
from data_prep.dedup import HeldOut, SeenBefore, content_hash
from data_prep.sources import DataConfig, Document

GROUP_DOCUMENTS = 512
GROUP_CHARACTERS = 1 << 22


class Tally:
    """What was counted on the way; the manifest keeps it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()


class _Candidate(NamedTuple):
    document: Document
    key: int  # for finding duplicates
    number: int  # for the split


def select(documents: Iterable[Document], config: DataConfig, tally: Tally) -> Iterator[tuple[Split, Document]]:
    """The documents of the corpus, normalised, in the order of the source, each with its split."""
    seen, held_out = SeenBefore(), HeldOut[Document](config.validation_fraction)
    for group in _groups(_clean(documents, config, tally)):
        known = seen.ask([candidate.key for candidate in group]) if config.deduplicate else (False for _ in group)
        for candidate, duplicate in zip(group, known):
            if duplicate:
                tally.removed["duplicate"] += 1
                continue
            tally.counts["documents"] += 1
            yield from held_out.assign(candidate.number, candidate.document)
    yield from held_out.finish()


def _clean(documents: Iterable[Document], config: DataConfig, tally: Tally) -> Iterator[_Candidate]:
    for document in documents:
        tally.counts["documents_read"] += 1
        if document.ids is not None:
            yield _Candidate(document, *content_hash(document.ids.tobytes(), config.seed))
            continue
        text = normalize(document.text, config.clean)
        parts = split_at_whitespace(text, config.clean.max_characters)
        tally.counts["long_documents_cut"] += len(parts) > 1
        for part in parts:
            reason = reason_to_remove(part, config.clean)
            if reason:
                tally.removed[reason] += 1
                continue
            data = part.encode()
            tally.counts["text_bytes"] += len(data)
            yield _Candidate(document._replace(text=part.strip()), *content_hash(data, config.seed))


def _groups(candidates: Iterable[_Candidate]) -> Iterator[list[_Candidate]]:
    group: list[_Candidate] = []
    characters = 0
    for candidate in candidates:
        group.append(candidate)
        characters += len(candidate.document.text)
        if len(group) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
