"""Which documents become the corpus, and in which split: one stream through these stages, in this order.

source -> normalise -> filters -> exact deduplication -> near deduplication -> decontamination -> hold-out

Why a document is dropped: each stage below that drops some gives `Group.through` their reasons, and what shows the
passage. Reasons of `filters` are rows of the table `FilterConfig` in data_prep/filters/quality.py; one more stage,
`tokens`, drops in data_prep/shard_writer.py. `cramming inspect` counts all of them, and corpus_card.md shows examples.

Workers (data_prep/workers.py) do what takes time over a text: reading and normalising it (data_prep/normaliser.py),
filters, decontamination. What is done here is done for groups of documents in columns (data_prep/columns.py), in the
order of the source.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from data_prep.columns import Group, Normalised, TextBlock
from data_prep.dedup.decontaminate import BETWEEN_TASKS, Decontaminator
from data_prep.dedup.exact import HeldOut, SeenBefore
from data_prep.dedup.near import NearDuplicates
from data_prep.filters import normalise, quality
from data_prep.filters.quality import FilterConfig
from data_prep.filters.text import Text
from data_prep.normaliser import NORMALISE, Normaliser, through_workers
from data_prep.resume_state import Decisions
from data_prep.sources.source import ESCAPED_BYTE, Chunk, DataConfig, Documents
from data_prep.stage_stats import EXAMPLES, Stage, StageStats, excerpt, matches
from data_prep.workers import Function, Workers

GROUP_BYTES = 1 << 21  # of text in a task, where there is more than one document
_VISIBLE = {
    code: f"\\x{code:02x}" for code in (*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0))
}  # control characters


def judges(config: DataConfig, decontaminator: Decontaminator | None) -> dict[str, Function]:
    """For the workers: what normalises, and by the name of a stage that is on what decides on a group of texts: why
    some of them go, by their places."""
    found: dict[str, Function] = {NORMALISE: Normaliser(config.clean, config.filters, config.seed)}
    if quality.active_filters(config.filters):
        found["filters"] = partial(_filter_reasons, config.filters)
    if decontaminator:
        found["decontamination"] = decontaminator
    return found


def _filter_reasons(config: FilterConfig, texts: Iterable[str]) -> dict[int, str]:
    filters = quality.active_filters(config)
    found = ((place, quality.reason_to_remove(text, filters)) for place, text in enumerate(texts))
    return {place: reason for place, reason in found if reason}


@dataclass(frozen=True)
class Pipeline:
    """The settings and state that the stages share. `near` and `decontaminator` are None where switched off."""

    config: DataConfig
    stats: StageStats
    decisions: Decisions
    workers: Workers  # with `judges`
    near: NearDuplicates | None = None
    decontaminator: Decontaminator | None = None

    def run(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Group, np.ndarray]]:
        """The documents of the corpus in the order of the source, and whether each is held out [N]."""
        return self.held_out(self.decontaminated(self.not_near(self.unique(chunks))))

    def unique(self, chunks: Iterable[Chunk]) -> Iterator[Group]:
        """Everything up to the exact deduplication: what the search for near-duplicates reads."""
        return self.deduplicated(self.filtered(self.normalised(chunks)))

    def normalised(self, chunks: Iterable[Chunk]) -> Iterator[Group]:
        """What the source gives, without what it found damaged, in normal form; documents above `clean.max_characters`
        or `filters.max_words` in parts. Token ids pass as they are."""
        source, stage = self.stats["source"], self.stats["normalise"]
        stage.notes |= {"long_documents_cut": 0, "their_parts": 0}
        made, deleted, first = Counter[str](), Counter[str](), 0
        for documents, found in through_workers(NORMALISE, chunks, self.workers):
            for one in documents.others.values():
                if one.damage:
                    source.take(one.damage.bytes, one.part == 0)
                    source.drop(one.damage.reason, one.damage.bytes, one.part == 0)
                    source.example(one.damage.reason, one.id, one.text, _broken_bytes)
            count = int(
                np.count_nonzero((documents.part_D == 0) & (found.pieces_D > 0))
            )  # all that are not damaged
            source.take(found.bytes_read, count)
            source.give(found.bytes_read, count)
            stage.take(found.bytes_read, count)
            self._count_parts(documents, found, made)
            deleted.update(found.deleted)
            stage.give(int(found.bytes_P.sum()), len(found.bytes_P))
            rows = np.arange(len(found.bytes_P))
            cuts = np.flatnonzero(np.diff(np.cumsum(found.bytes_P) // GROUP_BYTES)) + 1
            yield from (Group(found, documents, first, rows_N) for rows_N in np.split(rows, cuts))
            first += len(rows)
        if kinds := normalise.deleted_by_kind(deleted):
            stage.notes["deleted_characters"] = kinds

    def _count_parts(self, documents: Documents, found: Normalised, made: Counter[str]) -> None:
        """Which documents were cut, into how many. `made`: pieces of each source's last document, which its next one
        may go on with."""
        notes, part_D, source_D = (
            self.stats["normalise"].notes,
            documents.part_D,
            documents.source_D,
        )
        if not part_D.any() and (found.pieces_D == 1).all():  # nearly always
            made.update({documents.sources[source]: 1 for source in np.unique(source_D).tolist()})
            return
        for part, pieces, source in zip(
            part_D.tolist(), found.pieces_D.tolist(), source_D.tolist()
        ):
            before = made[documents.sources[source]] if part else 0
            made[documents.sources[source]] = whole = before + pieces
            if whole > 1:
                notes["long_documents_cut"] += before <= 1
                notes["their_parts"] += pieces if before > 1 else whole

    def filtered(self, groups: Iterable[Group]) -> Iterator[Group]:
        """What is text worth learning from, by the filters that read text."""
        stage, always_on = self.stats["filters"], quality.always_on(self.config.clean)
        filters = {
            f.rule.reason: f for f in [*always_on, *quality.active_filters(self.config.filters)]
        }

        def explain(reason: str, broken: str, text: str) -> str:
            text = broken if broken and reason == "broken_characters" else text
            violation = filters[reason].judge(Text(text))
            assert violation, f"{reason} does not remove this text"
            return violation.explain(text, filters[reason].setting).translate(_VISIBLE)

        for group, reasons in self._judged(groups, stage):
            yield group.through(
                stage, reasons, lambda group, n, reason: partial(explain, reason, group.broken(n))
            )

    def deduplicated(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The first of equal documents."""
        stage, seen = self.stats["exact deduplication"], SeenBefore()
        for group in groups:
            known_N = seen.ask(group.hashes["key"]) if self.config.deduplicate else np.zeros(0)
            duplicates = dict.fromkeys(np.flatnonzero(known_N).tolist(), "duplicate")
            yield group.through(stage, duplicates, lambda *_: excerpt)

    def not_near(self, groups: Iterable[Group]) -> Iterator[Group]:
        """One of each group of near-duplicates. An example waits for the end: the document it is like may follow it."""
        stage, near = self.stats["near deduplication"], self.near
        examples = near.first(EXAMPLES) if near else {}
        names = dict.fromkeys((kept for kept, _ in examples.values()), "")
        waiting: dict[int, Group] = {}
        for group in groups:
            keys_N, dropped = group.hashes["key"], dict[int, str]()
            if near:
                dropped = dict.fromkeys(
                    np.flatnonzero(near.holds(keys_N)).tolist(), "near_duplicate"
                )
                for n in np.flatnonzero(
                    np.isin(keys_N, np.array([*names, *examples], np.uint64))
                ).tolist():
                    key = int(keys_N[n])
                    if key in examples:
                        waiting.setdefault(key, group.chosen(np.array([n])))
                    else:
                        names[key] = names[key] or group.name(n)
            yield group.through(stage, dropped, lambda *_: None)
        for key, example in waiting.items():
            kept, similarity = examples[key]
            example.show(
                0, stage, "near_duplicate", partial(self._show_near, names[kept], similarity)
            )

    def _show_near(self, kept: str, similarity: float, text: str) -> str:
        limit = self.config.near_duplicates.threshold
        return f"like {kept}, {similarity:.4g}, limit {limit:.4g} (threshold): {excerpt(text)}"

    def decontaminated(self, groups: Iterable[Group]) -> Iterator[Group]:
        """What holds no text of a downstream task; a document with text of two tasks counts for both."""
        stage, tasks, search = self.stats["decontamination"], Counter[str](), self.decontaminator
        texts: set[int] = (
            set()
        )  # by number; searched again here, since a resumed run knows only that some were found
        show = search.explain if search else excerpt
        for group, found in self._judged(groups, stage):
            for names in found.values():
                tasks.update(names.split(BETWEEN_TASKS))
            if search and found:
                for numbers in search.texts_in(list(group.chosen(np.array(list(found))).texts)):
                    texts.update(numbers.tolist())
            yield group.through(stage, dict.fromkeys(found, "contaminated"), lambda *_: show)
        stage.notes["documents_by_task"] = dict(sorted(tasks.items()))
        if search:
            stage.notes["texts_found"] = search.by_task(np.array(sorted(texts), dtype=np.uint32))

    def _judged(
        self, groups: Iterable[Group], stage: Stage
    ) -> Iterator[tuple[Group, dict[int, str]]]:
        """Each group with the reasons why this stage drops rows of it: known, from normalisation, or a worker's."""
        asks = stage.name in self.workers.functions

        def asked() -> Iterator[tuple[tuple[Group, dict[int, str], np.ndarray], TextBlock]]:
            for group in groups:
                open_N = (
                    self.decisions.undecided(group.places, stage.name)
                    if asks
                    else np.zeros(len(group), bool)
                )
                known = group.reasons()
                to_ask = np.setdiff1d(np.flatnonzero(open_N), [*known, *group.ids()])
                yield (group, known, to_ask), group.chosen(to_ask).texts

        for (group, reasons, to_ask), found in self.workers.map(stage.name, asked()):
            reasons |= {int(to_ask[place]): reason for place, reason in dict(found).items()}
            self.decisions.set(group.places, stage.name, reasons)
            yield group, self.decisions.dropped(group.places, stage.name)

    def held_out(self, groups: Iterable[Group]) -> Iterator[tuple[Group, np.ndarray]]:
        """The documents, and whether each is held out [N]."""
        stage, held_out = self.stats["hold-out"], HeldOut(self.config.validation_fraction)
        stage.notes |= {"train_documents": 0, "validation_documents": 0}

        def given(group: Group, out_N: np.ndarray) -> tuple[Group, np.ndarray]:
            stage.give(int(group.sizes.sum()), len(group))
            stage.notes["validation_documents"] += int(out_N.sum())
            stage.notes["train_documents"] += int((~out_N).sum())
            return group, out_N

        kept_back: Group | None = None
        for group in groups:
            stage.take(int(group.sizes.sum()), len(group))
            places_N, out_N, left = held_out.assign(group.hashes["number"])
            before = np.flatnonzero(
                places_N < 0
            )  # where the one that was kept back comes in between
            cuts = np.concatenate([before, before + 1])
            for some_N, some_out_N in zip(np.split(places_N, cuts), np.split(out_N, cuts)):
                if kept_back and (some_N < 0).any():
                    yield given(kept_back, some_out_N)
                elif len(some_N):
                    yield given(group.chosen(some_N), some_out_N)
            if not (left < 0).any():  # else it is kept back still
                kept_back = group.chosen(left)  # nothing, once one was held out
        if kept_back:
            yield given(kept_back, np.ones(1, dtype=bool))


def _broken_bytes(text: str) -> str:
    return excerpt(text, matches(ESCAPED_BYTE, text))
