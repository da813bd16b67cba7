"""Which documents become the corpus, and in which split: one stream through these stages, in this order.

source -> normalise -> filters -> exact deduplication -> near deduplication -> decontamination -> hold-out

Why a document is dropped: each stage below that drops one calls `Stage.drop` with the reason and a function that shows
the passage. Reasons of `filters` are rows of the table `FilterConfig` in data_prep/filters/quality.py; one more stage,
`tokens`, drops in data_prep/shard_writer.py. `cramming inspect` counts all of them, and corpus_card.md shows examples.

Workers (data_prep/workers.py) do what takes time over a text: reading and normalising it (data_prep/normaliser.py),
filters, decontamination. What is done here is done for each document, in the order of the source.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from cramming.data.manifest import Split
from data_prep.dedup.decontaminate import Decontaminator
from data_prep.dedup.exact import HeldOut, SeenBefore, content_hash
from data_prep.dedup.near import NearDuplicates
from data_prep.filters import normalise, quality
from data_prep.filters.quality import FilterConfig
from data_prep.filters.text import Text
from data_prep.normaliser import NORMALISE, Normaliser, NormalText, through_workers
from data_prep.resume_state import PASSED, Decisions
from data_prep.sources.source import ESCAPED_BYTE, Chunk, DataConfig, Document
from data_prep.stage_stats import EXAMPLES, Stage, StageStats, excerpt, matches
from data_prep.workers import Function, Workers, grouped

GROUP_DOCUMENTS = 512
GROUP_CHARACTERS = 1 << 20
BETWEEN_TASKS = "+"
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0))}  # control characters


class Candidate(NamedTuple):
    """A normalised document, or a part of a very long one."""

    document: Document
    place: int  # how many came before it out of the normalisation
    size: int  # UTF-8 bytes
    key: int  # for finding duplicates
    number: int  # for the split
    reason: str = ""  # why it goes by the filters that are always on, or by what it was before it was normalised
    broken: str = ""  # the text before it was normalised, if that was broken

    def drop(self, stage: Stage, reason: str, show: Callable[[str], str] | None = excerpt) -> None:
        """It goes no further; `show` makes of the text what an example shows, None if it must not be one."""
        stage.drop(reason, self.size, self.document.id, self.document.text, show)


def judges(config: DataConfig, decontaminator: Decontaminator | None) -> dict[str, Function]:
    """For the workers: what normalises, and by the name of a stage that is on what decides on a group of texts."""
    found: dict[str, Function] = {NORMALISE: Normaliser.of(config)}
    if quality.active_filters(config.filters):
        found["filters"] = partial(_filter_reasons, config.filters)
    if decontaminator:
        found["decontamination"] = partial(_tasks_found, decontaminator)
    return found


def _filter_reasons(config: FilterConfig, texts: list[str]) -> list[str]:
    filters = quality.active_filters(config)
    return [quality.reason_to_remove(text, filters) or PASSED for text in texts]


def _tasks_found(decontaminator: Decontaminator, texts: list[str]) -> list[str]:
    return [BETWEEN_TASKS.join(tasks) for tasks in decontaminator.tasks_in(texts)]


@dataclass(frozen=True)
class Pipeline:
    """The settings and state that the stages share. `near` and `decontaminator` are None where switched off."""

    config: DataConfig
    stats: StageStats
    decisions: Decisions
    workers: Workers  # with `judges`
    near: NearDuplicates | None = None
    decontaminator: Decontaminator | None = None

    def run(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Split, Candidate]]:
        """The documents of the corpus in the order of the source, each with its split."""
        return self.held_out(self.decontaminated(self.not_near(self.unique(chunks))))

    def unique(self, chunks: Iterable[Chunk]) -> Iterator[Candidate]:
        """Everything up to the exact deduplication: what the search for near-duplicates reads."""
        return self.deduplicated(self.filtered(self.normalised(self.read(chunks))))

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Document, NormalText | None]]:
        """What the source gives, without what it found damaged, with what it is in normal form; token ids have none."""
        stage, deleted = self.stats["source"], Counter[str]()
        for documents, found in through_workers(NORMALISE, chunks, self.workers):
            texts = found.by_document() if found else iter(())
            for document in documents:
                text = next(texts) if document.is_text else None
                damage = document.damage
                size = damage.bytes if damage else text.bytes if text else 0
                counts = document.part == 0 or damage is not None
                stage.take(size, counts)
                if damage:
                    stage.drop(damage.reason, size, document.id, document.text, _broken_bytes)
                else:
                    stage.give(size, counts)
                    yield document, text
            deleted.update(found.deleted if found else ())
        if kinds := normalise.deleted_by_kind(deleted):
            self.stats["normalise"].notes["deleted_characters"] = kinds

    def normalised(self, documents: Iterable[tuple[Document, NormalText | None]]) -> Iterator[Candidate]:
        """Normal form; documents above `clean.max_characters` or `filters.max_words` in parts. Token ids pass as they
        are."""
        stage, place = self.stats["normalise"], 0
        stage.notes |= {"long_documents_cut": 0, "their_parts": 0}
        made = Counter[str]()  # parts of each source's last document, which its next one may go on with
        for document, text in documents:
            stage.take(text.bytes if text else 0, document.part == 0)
            if text is None:
                assert document.ids is not None
                stage.give(0)
                yield Candidate(document, place, 0, *content_hash(document.ids.tobytes(), self.config.seed))
                place += 1
                continue
            before = made[document.source] if document.part else 0
            made[document.source] = whole = before + len(text.pieces)
            if whole > 1:
                stage.notes["long_documents_cut"] += before <= 1
                stage.notes["their_parts"] += len(text.pieces) if before > 1 else whole
            for number, piece in enumerate(text.pieces, 1):
                stage.give(piece.bytes)
                name = document.id if len(text.pieces) == 1 else f"{document.id} part {number} of {len(text.pieces)}"
                part = Document(piece.text, name, document.source, part=document.part)
                reason = piece.reason or ("broken_characters" if text.broken else "")
                yield Candidate(part, place, piece.bytes, piece.key, piece.number, reason, text.broken)
                place += 1

    def filtered(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """What is text worth learning from, by the filters that read text."""
        stage, always_on = self.stats["filters"], quality.always_on(self.config.clean)
        filters = {f.rule.reason: f for f in [*always_on, *quality.active_filters(self.config.filters)]}

        def explain(reason: str, broken: str, text: str) -> str:
            text = broken if broken and reason == "broken_characters" else text
            violation = filters[reason].judge(Text(text))
            assert violation, f"{reason} does not remove this text"
            return violation.explain(text, filters[reason].setting).translate(_VISIBLE)

        for candidate, reason in self._judged(candidates, stage):
            if reason == PASSED:
                yield candidate
            else:
                candidate.drop(stage, reason, partial(explain, reason, candidate.broken))

    def deduplicated(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """The first of equal documents."""
        stage, seen = self.stats["exact deduplication"], SeenBefore()
        for group in _groups(candidates):
            keys = [candidate.key for candidate in group]
            known = seen.ask(keys) if self.config.deduplicate else [False] * len(group)
            for candidate, duplicate in zip(group, known):
                stage.take(candidate.size)
                if duplicate:
                    candidate.drop(stage, "duplicate")
                else:
                    stage.give(candidate.size)
                    yield candidate

    def not_near(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """One of each group of near-duplicates. An example waits for the end: the document it is like may follow it."""
        stage, near = self.stats["near deduplication"], self.near
        examples = near.first(EXAMPLES) if near else {}
        names = dict.fromkeys((kept for kept, _ in examples.values()), "")
        waiting: dict[int, Candidate] = {}
        for candidate in candidates:
            stage.take(candidate.size)
            if near is None or candidate.key not in near:
                if candidate.key in names:
                    names[candidate.key] = names[candidate.key] or candidate.document.id
                stage.give(candidate.size)
                yield candidate
            elif candidate.key in examples and candidate.key not in waiting:
                waiting[candidate.key] = candidate
            else:
                candidate.drop(stage, "near_duplicate", None)
        for key, candidate in waiting.items():
            kept, similarity = examples[key]
            candidate.drop(stage, "near_duplicate", partial(self._show_near, names[kept], similarity))

    def _show_near(self, kept: str, similarity: float, text: str) -> str:
        limit = self.config.near_duplicates.threshold
        return f"like {kept}, {similarity:.4g}, limit {limit:.4g} (threshold): {excerpt(text)}"

    def decontaminated(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """What holds no text of a downstream task; a document with text of two tasks counts for both."""
        stage, tasks, search = self.stats["decontamination"], Counter[str](), self.decontaminator
        texts: set[int] = set()  # by number; searched again here, since a resumed run knows only that some were found
        show = search.explain if search else excerpt
        for candidate, found in self._judged(candidates, stage):
            if found == PASSED:
                yield candidate
            else:
                tasks.update(found.split(BETWEEN_TASKS))
                texts.update(search.texts_in([candidate.document.text])[0].tolist() if search else ())
                candidate.drop(stage, "contaminated", show)
        stage.notes["documents_by_task"] = dict(sorted(tasks.items()))
        if search:
            stage.notes["texts_found"] = search.by_task(np.array(sorted(texts), dtype=np.uint32))

    def _judged(self, candidates: Iterable[Candidate], stage: Stage) -> Iterator[tuple[Candidate, str]]:
        """Each candidate with a reason to drop it, or PASSED: as decided earlier, by its own `reason`, or by a worker.

        Token ids always pass, and so does everything where the stage is off.
        """
        default = None if stage.name in self.workers.functions else PASSED

        def known(candidate: Candidate) -> str | None:
            decision = self.decisions.get(candidate.place, stage.name)
            if decision is None:
                decision = PASSED if candidate.document.ids is not None else candidate.reason or default
                if decision is not None:
                    self.decisions.set(candidate.place, stage.name, decision)
            return decision

        judged = ([(candidate, known(candidate)) for candidate in group] for group in _groups(candidates))
        asked = ((group, [c.document.text for c, decision in group if decision is None]) for group in judged)
        for group, found in self.workers.map(stage.name, asked):
            answers = iter(found)
            for candidate, decision in group:
                if decision is None:
                    decision = next(answers)
                    self.decisions.set(candidate.place, stage.name, decision)
                stage.take(candidate.size)
                if decision == PASSED:
                    stage.give(candidate.size)
                yield candidate, decision

    def held_out(self, candidates: Iterable[Candidate]) -> Iterator[tuple[Split, Candidate]]:
        """Each document with its split."""
        stage, held_out = self.stats["hold-out"], HeldOut[Candidate](self.config.validation_fraction)
        stage.notes |= {"train_documents": 0, "validation_documents": 0}

        def decided() -> Iterator[tuple[Split, Candidate]]:
            for candidate in candidates:
                stage.take(candidate.size)
                yield from held_out.assign(candidate.number, candidate)
            yield from held_out.finish()

        for split, candidate in decided():
            stage.notes[f"{split}_documents"] += 1
            stage.give(candidate.size)
            yield split, candidate


def _broken_bytes(text: str) -> str:
    return excerpt(text, matches(ESCAPED_BYTE, text))


def _groups(candidates: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    return grouped(candidates, GROUP_DOCUMENTS, lambda candidate: candidate.document.length, GROUP_CHARACTERS)
