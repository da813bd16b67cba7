"""Which documents become the corpus, and in which split: what depends on other documents, for all parts together.

    exact deduplication -> near deduplication -> decontamination -> hold-out -> tokens

Decontamination and the limit on tokens were decided by the tasks; here they are counted, of what is left by then.
Memory: about 50 bytes a document, and for near-duplicates what data_prep/dedup/near.py says. Suffixes: N documents that
passed the filters, G groups of near-duplicates, M matches of decontamination.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data_prep.dedup.decontaminate import Decontaminator
from data_prep.dedup.exact import duplicates, first_of_equal, held_out
from data_prep.dedup.near import (
    NearDuplicateConfig,
    estimate,
    find_near_duplicates,
    memory_bytes,
)
from data_prep.dedup.shared_passages import SharedPassages
from data_prep.filters.quality import tokens_limit
from data_prep.filters.text import Violation
from data_prep.parts import Part
from data_prep.readers.source import DataConfig
from data_prep.stats import EXAMPLES, Example, StageStats, one_line

TOO_MANY_TOKENS = "too_many_tokens"
MAX_SOURCES = (
    32  # counted by name; from a corpus of a thousand files the first are, the rest together
)
OTHERS = "all others"
SENTENCES_CUT = "sentences_cut"  # no documents, only bytes
MATCH_WORDS = {"4 to 9 words": 4, "10 to 12 words": 10, "13 words and more": 13}  # the fewest
COMPARED_TOKENS = 1 << 23  # of near-duplicates that are searched for shared passages


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

    def part_of(self, rows: np.ndarray | np.intp) -> np.ndarray:
        """Return the numbers of the parts that hold rows."""
        return np.searchsorted(self.first_P, rows, side="right") - 1

    def example(self, row: np.intp) -> Example:
        """Return what is shown of a document."""
        part = int(self.part_of(row))
        return self.parts[part].example(int(row - self.first_P[part]))

    def tokens(self, row: np.intp) -> np.ndarray:
        """Return the tokens of a document without [CLS] and [SEP]."""
        part = int(self.part_of(row))
        start = int(self._starts[row] - self._starts[self.first_P[part]])
        return self.parts[part].tokens(start, int(self.rows_N["tokens"][row]))[1:-1]

    @cached_property
    def _starts(self) -> np.ndarray:
        """Tokens in front of each document."""
        tokens_N = self.rows_N["tokens"]
        return np.cumsum(tokens_N, dtype=np.int64) - tokens_N

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


class DroppedRows(NamedTuple):
    """Rows that a stage drops, in order, and those that are kept in their place."""

    stage: str
    reason: str
    rows_K: np.ndarray
    partner_K: np.ndarray | None


@dataclass(frozen=True)
class Selection:
    """The result: which rows are written, which of them are held out, and which are dropped."""

    rows: Rows
    keep_N: np.ndarray
    held_out_N: np.ndarray
    dropped: list[DroppedRows]

    def of_split(self, split: str) -> np.ndarray:
        """Return the rows of a split: [N] bool."""
        chosen_N: np.ndarray = self.keep_N & (self.held_out_N == (split == "validation"))
        return chosen_N


class Selector:
    """Passes all documents through the stages and counts them in `stats`."""

    def __init__(self, rows: Rows, stats: StageStats, decode: Callable[[list[int]], str]) -> None:
        """Begin with all rows; `decode` makes text of tokens."""
        self.rows, self.stats, self._decode = rows, stats, decode
        self._left_N = np.ones(len(rows.rows_N), dtype=bool)
        self._dropped: list[DroppedRows] = []
        self._key_N, self._cut_bytes_N = rows.rows_N["key"], rows.rows_N["cut_bytes"]
        self._bytes_N = rows.rows_N["bytes"] + self._cut_bytes_N  # as they are at this stage

    def select(self, config: DataConfig, search: Decontaminator | None) -> Selection:
        """Return what becomes the corpus."""
        self.drop_duplicates(config.deduplicate, config.list_dropped)
        self.drop_near_duplicates(config.near_duplicates)
        self.drop_contaminated(search)
        held_out_N = self.hold_out(config.validation_fraction)
        self.drop_badly_compressed(config.filters.max_tokens_per_character)
        return Selection(self.rows, self._left_N, held_out_N, self._dropped)

    def drop_duplicates(self, enabled: bool, lists_dropped: bool) -> None:
        """Keep the first of equal documents."""
        duplicate_N = duplicates(self._key_N) if enabled else np.zeros_like(self._left_N)
        partner_N = first_of_equal(self._key_N) if lists_dropped else None
        self._drop("exact deduplication", "duplicate", duplicate_N, partner_N=partner_N)

    def drop_near_duplicates(self, config: NearDuplicateConfig) -> None:
        """Keep one of each group of near-duplicates."""
        stage, dropped_N = self.stats["near deduplication"], np.zeros_like(self._left_N)
        examples: list[Example] = []
        partner_N = None
        if config.enabled and len(dropped_N):
            rows, ngrams, signatures = self.rows.signatures(self._left_N)
            keys = self._key_N[rows]
            kept_K = find_near_duplicates(keys, ngrams, signatures, config)
            dropped = np.flatnonzero(keys[kept_K] != keys)
            dropped_N[rows[dropped]] = True
            partner_N = np.zeros(len(dropped_N), dtype=np.int64)
            partner_N[rows] = rows[kept_K]
            stage.notes["clusters"] = len(np.unique(kept_K[dropped]))
            if len(dropped):
                self._note_shared_passages(rows[dropped], rows[kept_K[dropped]], config)
            stage.notes["index_bytes"] = memory_bytes(ngrams, signatures)
            shown = dropped[_smallest(keys[dropped])]
            similarities = estimate(signatures, shown, kept_K[shown]).tolist()
            for row, other, similarity in zip(rows[shown], rows[kept_K[shown]], similarities):
                example, place = self.rows.example(row), self.rows.example(other).place()
                measure = (
                    f"like {place}, {similarity:.4g}, limit {config.threshold:.4g} (threshold)"
                )
                examples.append(example._replace(shown=f"{measure}: {example.shown}"))
        self._drop("near deduplication", "near_duplicate", dropped_N, examples, partner_N)

    def _note_shared_passages(
        self, dropped_rows: np.ndarray, kept_rows: np.ndarray, config: NearDuplicateConfig
    ) -> None:
        """Note which passages explain most of what a group drops: the largest groups, as far as they are compared."""
        order = np.lexsort((self._key_N[dropped_rows], kept_rows))
        kept_G, first_G = np.unique(kept_rows[order], return_index=True)
        dropped_G = np.split(dropped_rows[order], first_G[1:])
        largest_first = np.lexsort((self._key_N[kept_G], [-len(rows) for rows in dropped_G]))
        passages, left = SharedPassages(config), COMPARED_TOKENS
        for group in largest_first:
            sums = np.cumsum(self.rows.rows_N["tokens"][dropped_G[group]], dtype=np.int64)
            compared = dropped_G[group][: 1 + np.searchsorted(sums, left)]
            passages.add_group(self.rows.tokens(kept_G[group]), map(self.rows.tokens, compared))
            left -= int(sums[-1])
            if left <= 0:
                break
        self.stats["near deduplication"].notes["shared_passages"] = {
            one_line(self._decode(tokens_T.tolist())): documents
            for tokens_T, documents in passages.most_common()
        }

    def drop_contaminated(self, search: Decontaminator | None) -> None:
        """Drop what holds text of a downstream task, and count what was cut out of the others."""
        stage, notes = self.stats["decontamination"], self.stats["decontamination"].notes
        words_N, is_cut_N = self.rows.rows_N["match_words"], self._cut_bytes_N > 0
        if search:
            matches_M2 = self.rows.matches()
            matches_M2 = matches_M2[self._left_N[matches_M2[:, 0]]]
            is_cut_M = is_cut_N[matches_M2[:, 0]]
            notes["documents_by_task"] = _documents_by_task(matches_M2[~is_cut_M], search)
            notes["documents_cut_by_task"] = _documents_by_task(matches_M2[is_cut_M], search)
            notes["documents_by_words"] = _by_words(words_N[self._left_N])
            notes["texts_found"] = search.by_task(np.unique(matches_M2[:, 1]))
        self._drop("decontamination", "contaminated", (words_N > 0) & ~is_cut_N)
        is_cut_N &= self._left_N
        if is_cut_N.any():
            cut_bytes = int(self._cut_bytes_N[is_cut_N].sum())
            stage.drop(SENTENCES_CUT, 0, cut_bytes, self._examples(is_cut_N))
            stage.bytes_out -= cut_bytes
        self._bytes_N = self.rows.rows_N["bytes"]

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
        self,
        name: str,
        reason: str,
        marked_N: np.ndarray,
        examples: list[Example] | None = None,
        partner_N: np.ndarray | None = None,
    ) -> None:
        """Drop what is marked of what is left, and count it. `partner_N` are the rows that stay in their place."""
        stage, dropped_N = self.stats[name], marked_N & self._left_N
        stage.count_in(int(self._left_N.sum()), int(self._bytes_N[self._left_N].sum()))
        self._left_N &= ~dropped_N
        stage.count_out(int(self._left_N.sum()), int(self._bytes_N[self._left_N].sum()))
        if dropped_N.any():
            rows_K = np.flatnonzero(dropped_N)
            partner_K = None if partner_N is None else partner_N[rows_K]
            self._dropped.append(DroppedRows(name, reason, rows_K, partner_K))
            shown = self._examples(dropped_N) if examples is None else examples
            size = int(self._bytes_N[dropped_N].sum())
            stage.drop(reason, int(dropped_N.sum()), size, shown)

    def _examples(self, dropped_N: np.ndarray) -> list[Example]:
        return [self.rows.example(row) for row in self._smallest_of(dropped_N)]

    def _smallest_of(self, dropped_N: np.ndarray) -> np.ndarray:
        """Return the rows of the dropped documents that are shown."""
        dropped = np.flatnonzero(dropped_N)
        rows: np.ndarray = dropped[_smallest(self._key_N[dropped])]
        return rows


def _documents_by_task(matches_M2: np.ndarray, search: Decontaminator) -> dict[str, int]:
    """Return how many documents hold text of each task; one with text of two counts for both."""
    tasks_M = search.task_numbers(matches_M2[:, 1])
    pairs = np.unique(np.stack([matches_M2[:, 0], tasks_M], axis=1), axis=0)
    by_task = Counter(search.tasks[task] for task in pairs[:, 1].tolist())
    return dict(sorted(by_task.items()))


def _by_words(words_N: np.ndarray) -> dict[str, int]:
    """Return how many documents have a longest match of so many words, by the names of `MATCH_WORDS`."""
    counts, _ = np.histogram(words_N, [*MATCH_WORDS.values(), 256])
    return dict(zip(MATCH_WORDS, counts.tolist()))


def _smallest(keys: np.ndarray) -> np.ndarray:
    """Return where the `EXAMPLES` smallest of the different keys stand."""
    _, first = np.unique(keys, return_index=True)
    smallest: np.ndarray = first[:EXAMPLES]
    return smallest
