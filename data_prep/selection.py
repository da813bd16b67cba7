"""Which documents become the corpus, and in which split: what depends on other documents, for all parts together.

    exact deduplication -> near deduplication -> decontamination -> hold-out -> tokens

Decontamination and the limit on tokens were decided by the tasks; here they are counted, of what is left by then.
Memory: about 50 bytes a document, and for near-duplicates what data_prep/dedup/near.py says. Suffixes: N documents that
passed the filters, M matches of decontamination.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.dedup.decontaminate import Decontaminator
from data_prep.dedup.exact import duplicates, held_out
from data_prep.dedup.near import (
    NearDuplicateConfig,
    estimate,
    find_near_duplicates,
    memory_bytes,
)
from data_prep.filters.quality import tokens_limit
from data_prep.filters.text import Violation
from data_prep.parts import Part
from data_prep.readers.source import DataConfig
from data_prep.stats import EXAMPLES, Example, StageStats

TOO_MANY_TOKENS = "too_many_tokens"
MAX_SOURCES = (
    32  # counted by name; from a corpus of a thousand files the first are, the rest together
)
OTHERS = "all others"


class Rows:
    """The documents of all parts, in their order. `sources` are those to count by name."""

    def __init__(self, parts: Sequence[Part], sources: Sequence[str]) -> None:
        self.parts = parts
        self.sources = [*sources[:MAX_SOURCES], OTHERS]
        arrays = [self._rows_of(part) for part in parts]
        self.rows_N = np.concatenate(arrays)
        self.first_P = np.cumsum([0, *map(len, arrays)])

    def _rows_of(self, part: Part) -> np.ndarray:
        rows = part.array("rows")
        index = {name: number for number, name in enumerate(self.sources)}
        others = len(self.sources) - 1
        places = [index.get(name, others) for name in part.node["sources"]]
        if places:
            rows["source"] = np.array(places, dtype=np.uint16)[rows["source"]]
        return rows

    def example(self, row: np.intp) -> Example:
        """Return what is shown of a document."""
        part = int(np.searchsorted(self.first_P, row, side="right")) - 1
        return self.parts[part].example(int(row - self.first_P[part]))

    def matches(self) -> np.ndarray:
        """Return which documents hold which of the tasks' texts: pairs [M, 2]."""
        shifted = [
            part.array("matches") + np.array([first, 0])
            for part, first in zip(self.parts, self.first_P.tolist())
        ]
        return np.concatenate(shifted)

    def signatures(self, wanted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, numbers of n-grams and signatures of the wanted documents that have n-grams."""
        rows, ngrams, signatures = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for part, first, last in zip(self.parts, self.first_P, self.first_P[1:]):
            if first == last:
                continue
            of_part = part.array("ngrams")
            chosen = wanted_N[first:last] & (of_part > 0)
            rows.append(first + np.flatnonzero(chosen))
            ngrams.append(of_part[chosen])
            signatures.append(part.signatures()[chosen])
        return np.concatenate(rows), np.concatenate(ngrams), np.concatenate(signatures)


@dataclass(frozen=True)
class Selection:
    """The result: which rows are written, and which of them are held out."""

    rows: Rows
    keep_N: np.ndarray
    held_out_N: np.ndarray

    def of_split(self, split: str) -> np.ndarray:
        """Return the rows of a split: [N] bool."""
        chosen_N: np.ndarray = self.keep_N & (self.held_out_N == (split == "validation"))
        return chosen_N


class Selector:
    """Passes all documents through the stages and counts them in `stats`."""

    def __init__(self, rows: Rows, stats: StageStats) -> None:
        self.rows, self.stats = rows, stats
        self._left_N = np.ones(len(rows.rows_N), dtype=bool)
        self._key_N, self._bytes_N = rows.rows_N["key"], rows.rows_N["bytes"]

    def select(self, config: DataConfig, search: Decontaminator | None) -> Selection:
        """Return what becomes the corpus."""
        self.drop_duplicates(config.deduplicate)
        self.drop_near_duplicates(config.near_duplicates)
        self.drop_contaminated(search)
        held_out_N = self.hold_out(config.validation_fraction)
        self.drop_badly_compressed(config.filters.max_tokens_per_character)
        return Selection(self.rows, self._left_N, held_out_N)

    def drop_duplicates(self, enabled: bool) -> None:
        """Keep the first of equal documents."""
        duplicate_N = duplicates(self._key_N) if enabled else np.zeros_like(self._left_N)
        self._drop("exact deduplication", "duplicate", duplicate_N)

    def drop_near_duplicates(self, config: NearDuplicateConfig) -> None:
        """Keep one of each group of near-duplicates."""
        stage, dropped_N = self.stats["near deduplication"], np.zeros_like(self._left_N)
        examples: list[Example] = []
        if config.enabled and len(dropped_N):
            rows, ngrams, signatures = self.rows.signatures(self._left_N)
            keys = self._key_N[rows]
            kept = find_near_duplicates(keys, ngrams, signatures, config)
            dropped = np.flatnonzero(keys[kept] != keys)
            dropped_N[rows[dropped]] = True
            stage.notes["clusters"] = len(np.unique(kept[dropped]))
            stage.notes["index_bytes"] = memory_bytes(ngrams, signatures)
            shown = dropped[_smallest(keys[dropped])]
            similarities = estimate(signatures, shown, kept[shown]).tolist()
            for row, other, similarity in zip(rows[shown], rows[kept[shown]], similarities):
                example, place = self.rows.example(row), self.rows.example(other).place()
                measure = (
                    f"like {place}, {similarity:.4g}, limit {config.threshold:.4g} (threshold)"
                )
                examples.append(example._replace(shown=f"{measure}: {example.shown}"))
        self._drop("near deduplication", "near_duplicate", dropped_N, examples)

    def drop_contaminated(self, search: Decontaminator | None) -> None:
        """Drop what holds text of a downstream task; a document with text of two tasks counts for both."""
        stage, contaminated_N = self.stats["decontamination"], np.zeros_like(self._left_N)
        stage.notes["documents_by_task"] = {}
        if search:
            matches_M2 = self.rows.matches()
            matches_M2 = matches_M2[self._left_N[matches_M2[:, 0]]]
            contaminated_N[matches_M2[:, 0]] = True
            tasks_M = search.task_numbers(matches_M2[:, 1])
            pairs = np.unique(np.stack([matches_M2[:, 0], tasks_M], axis=1), axis=0)
            counts = np.bincount(pairs[:, 1], minlength=len(search.tasks)).tolist()
            by_task = {task: count for task, count in zip(search.tasks, counts) if count}
            stage.notes["documents_by_task"] = dict(sorted(by_task.items()))
            stage.notes["texts_found"] = search.by_task(np.unique(matches_M2[:, 1]))
        self._drop("decontamination", "contaminated", contaminated_N)

    def hold_out(self, fraction: float) -> np.ndarray:
        """Return which of the documents that are left are held out: [N] bool."""
        stage, held_out_N = self.stats["hold-out"], np.zeros_like(self._left_N)
        numbers = self.rows.rows_N["split_number"][self._left_N]
        held_out_N[self._left_N] = held_out(numbers, fraction)
        validation = int(held_out_N.sum())
        stage.notes["train_documents"] = int(self._left_N.sum()) - validation
        stage.notes["validation_documents"] = validation
        self.stats.pass_on("hold-out")
        return held_out_N

    def drop_badly_compressed(self, limit: float | None) -> None:
        """Drop the documents of which the tokenizer makes many more tokens than of the others."""
        rows_N = self.rows.rows_N
        rate_N = (rows_N["tokens"] - 2.0) / np.maximum(1, rows_N["characters"])
        if limit is not None and len(rate_N):
            limit = tokens_limit(limit, float(np.median(rate_N)))
            self.stats["tokens"].notes["limit of tokens per character"] = round(limit, 4)
        marked_N = rate_N > (np.inf if limit is None else limit)
        examples: list[Example] = []
        for row in self._smallest_of(marked_N & self._left_N):
            example, violation = self.rows.example(row), Violation(float(rate_N[row]), limit)
            shown = violation.explain(example.shown, "max_tokens_per_character")
            examples.append(example._replace(shown=shown))
        self._drop("tokens", TOO_MANY_TOKENS, marked_N, examples)

    def _drop(
        self, name: str, reason: str, marked_N: np.ndarray, examples: list[Example] | None = None
    ) -> None:
        """Drop what is marked of what is left, and count it."""
        stage, dropped_N = self.stats[name], marked_N & self._left_N
        stage.count_in(int(self._left_N.sum()), int(self._bytes_N[self._left_N].sum()))
        self._left_N &= ~dropped_N
        stage.count_out(int(self._left_N.sum()), int(self._bytes_N[self._left_N].sum()))
        if dropped_N.any():
            shown = examples
            if shown is None:
                shown = [self.rows.example(row) for row in self._smallest_of(dropped_N)]
            size = int(self._bytes_N[dropped_N].sum())
            stage.drop(reason, int(dropped_N.sum()), size, shown)

    def _smallest_of(self, dropped_N: np.ndarray) -> np.ndarray:
        """Return the rows of the dropped documents that are shown."""
        dropped = np.flatnonzero(dropped_N)
        rows: np.ndarray = dropped[_smallest(self._key_N[dropped])]
        return rows


def _smallest(keys: np.ndarray) -> np.ndarray:
    """Return where the `EXAMPLES` smallest of the different keys stand."""
    _, first = np.unique(keys, return_index=True)
    smallest: np.ndarray = first[:EXAMPLES]
    return smallest
