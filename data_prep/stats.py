"""Counts of every stage with examples of what it dropped, measures of documents, and order files.

Every count is a pure function of text and settings. Examples are the dropped documents with the smallest content hash.
"""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cramming.data.corpus import Curriculum, TokenStream
from cramming.data.manifest import Dropped, StageLine
from cramming.files import overwrite_atomically

EXAMPLES = 3
EXCERPT_CHARACTERS = 160
STAGES = (
    "source",
    "normalise",
    "filters",
    "exact deduplication",
    "near deduplication",
    "decontamination",
    "hold-out",
    "tokenizer",
    "tokens",
    "order",
    "shards",
)
Span = tuple[int, int]  # of characters, the end not included


def text_bytes(text: str) -> int:
    """Return the UTF-8 bytes of a text; stray surrogates count as they would be written."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def matches(pattern: re.Pattern[str], text: str) -> list[Span]:
    """Return where the pattern matches."""
    return [match.span() for match in pattern.finditer(text)]


def excerpt(text: str, counted: Iterable[Span] = ()) -> str:
    """Return the `EXCERPT_CHARACTERS` that hold most of the counted spans; without any, the beginning."""
    start = 0
    spans = sorted(counted)
    if spans:
        starts_N, ends_N = np.array(spans, dtype=np.int64).T
        sums_N = np.concatenate([[0], np.cumsum(ends_N - starts_N)])
        beyond_N = np.searchsorted(starts_N, starts_N + EXCERPT_CHARACTERS)
        first = int(np.argmax(sums_N[beyond_N] - sums_N[:-1]))
        room = EXCERPT_CHARACTERS - int(ends_N[first : beyond_N[first]].max() - starts_N[first])
        start = max(0, int(starts_N[first]) - max(0, room // 2))
    start = max(0, min(start, len(text) - EXCERPT_CHARACTERS))
    end = start + EXCERPT_CHARACTERS
    return f"{'... ' if start else ''}{text[start:end]}{' ...' if end < len(text) else ''}"


class Example(NamedTuple):
    """A dropped document. `number` counts the documents of its `origin`, a file or a data set."""

    key: int
    origin: str
    number: int
    label: str  # which part of the document, if it is not whole
    shown: str

    def place(self) -> str:
        """Return what the document is called."""
        return f"{self.origin}:{self.number}{self.label}"

    def node(self, stage: str, reason: str, like: str | None = None) -> dict[str, Any]:
        """Return the row of `dropped.jsonl`; `like` is the document that is kept in its place."""
        document = {"origin": self.origin, "number": self.number, "part": self.label.strip()}
        why = {"stage": stage, "reason": reason, "like": like, "shown": one_line(self.shown)}
        return {**document, **why}

    def line(self) -> str:
        """Return `place: what was measured, and the passage` on one printable line."""
        return f"{self.place()}: {one_line(self.shown)}"


@dataclass
class DropCount:
    """Documents dropped for one reason; `examples` are those with the smallest keys."""

    documents: int = 0
    bytes: int = 0
    examples: list[Example] = field(default_factory=list)

    def add(self, documents: int, size: int, examples: Iterable[Example] = ()) -> None:
        """Count dropped documents of `size` bytes together."""
        self.documents += documents
        self.bytes += size
        by_key: dict[int, Example] = {}
        for example in sorted([*self.examples, *examples]):
            by_key.setdefault(example.key, example)
        self.examples = list(by_key.values())[:EXAMPLES]


@dataclass
class Stage:
    """The counts of one stage. Later parts of a document that came before count bytes alone."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, DropCount] = field(default_factory=dict)
    listed: list[tuple[str, Example]] | None = None  # all that is dropped, where it is to be listed

    def count_in(self, documents: int, size: int) -> None:
        """Count what came in."""
        self.documents_in += documents
        self.bytes_in += size

    def count_out(self, documents: int, size: int) -> None:
        """Count what went out."""
        self.documents_out += documents
        self.bytes_out += size

    def drop(
        self, reason: str, documents: int, size: int, examples: Iterable[Example] = ()
    ) -> None:
        """Count what goes no further."""
        examples = list(examples)
        if self.listed is not None:
            self.listed += [(reason, example) for example in examples]
        self.dropped.setdefault(reason, DropCount()).add(documents, size, examples)

    def wants_example(self, reason: str, key: int) -> bool:
        """Return whether a document of this key, dropped for this reason, would be shown."""
        if self.listed is not None:
            return True
        examples = self.dropped[reason].examples if reason in self.dropped else []
        return len(examples) < EXAMPLES or key < examples[-1].key

    def merge(self, other: "Stage") -> None:
        """Add the counts of another task. Notes are numbers, or numbers by name."""
        self.count_in(other.documents_in, other.bytes_in)
        self.count_out(other.documents_out, other.bytes_out)
        for reason, count in other.dropped.items():
            self.drop(reason, count.documents, count.bytes, count.examples)
        for name, note in other.notes.items():
            self.notes[name] = _sum(self.notes.get(name), note)

    def line(self, name: str) -> StageLine:
        """Return the row of the manifest."""
        counts = (self.documents_in, self.bytes_in, self.documents_out, self.bytes_out)
        dropped = {}
        for reason, count in sorted(self.dropped.items()):
            examples = [example.line() for example in count.examples]
            dropped[reason] = Dropped(count.documents, count.bytes, examples)
        return StageLine(name, *counts, dropped, self.notes)


class StageStats(dict[str, Stage]):
    """All stages by name, in the order of the pipeline."""

    def __init__(self) -> None:
        super().__init__((name, Stage()) for name in STAGES)

    def removed(self) -> dict[str, int]:
        """Return how many documents were dropped, by reason."""
        total: dict[str, int] = {}
        for stage in self.values():
            for reason, count in stage.dropped.items():
                if count.documents:
                    total[reason] = total.get(reason, 0) + count.documents
        return dict(sorted(total.items()))

    def pass_on(self, name: str) -> None:
        """Let a stage that changes nothing take in and give out what its predecessor gave."""
        before = self[STAGES[STAGES.index(name) - 1]]
        self[name].count_in(before.documents_out, before.bytes_out)
        self[name].count_out(before.documents_out, before.bytes_out)


def measured(text: str) -> tuple[int, int, int]:
    """Return characters, words and sentences of a normalised text; 0 for ready-made ids.

    A sentence ends with . ! or ? before a space, or with its line.
    """
    if not text:
        return 0, 0, 0
    lines = text.count("\n")
    ends = sum(text.count(end) for end in (". ", "! ", "? ", '." ', ".) "))
    return len(text), text.count(" ") + lines + 1, ends + lines + 1


def write_orders(
    folder: Path,
    names: Sequence[Curriculum],
    rows_D: np.ndarray,
    stream: TokenStream,
    token_use: np.ndarray,
) -> dict[str, str]:
    """Write order files (uint32) of the training documents and return their names.

    They let the same shards be read in another order, as a curriculum (`train.order`):

        sentence_length    mean words per sentence, short ones first (Bengio et al. 2009 begin with the short)
        compressibility    tokens per character, what the tokenizer compresses best first
        token_prevalence   mean log2 probability of the tokens by their own counts in the corpus, likely ones first

    [CLS] and [SEP], which every document has, are not counted. Geiping and Goldstein 2022 (section 4.4) filter by
    tokens per character and sort rows by token prevalence; here whole documents are sorted. All orders but
    `token_prevalence` need text, which ready-made ids do not have.
    """
    files: dict[str, str] = {}
    for name in names:
        if name != "token_prevalence" and not rows_D["characters"].any():
            continue
        key_D = _sort_key(name, rows_D, stream, token_use)
        buffer = io.BytesIO()  # numpy's own writing to a file loses the system's errors
        np.save(buffer, np.argsort(key_D, kind="stable").astype("<u4"))
        files[name] = f"order-{name}.npy"
        write = partial(Path.write_bytes, data=buffer.getbuffer())
        overwrite_atomically(folder / files[name], write)
    return files


def _sort_key(
    name: Curriculum, rows_D: np.ndarray, stream: TokenStream, token_use: np.ndarray
) -> np.ndarray:
    """Return the number [D] to sort the documents by, ascending."""
    if name == "sentence_length":
        per_sentence_D = rows_D["words"] / np.maximum(1, rows_D["sentences"])
        return per_sentence_D.astype(np.float32)
    if name == "compressibility":
        body_D = rows_D["tokens"].astype(np.int64) - 2
        return body_D / np.maximum(1, rows_D["characters"])
    return -_mean_log_probabilities(stream, token_use)


def _mean_log_probabilities(stream: TokenStream, token_use: np.ndarray) -> np.ndarray:
    """Return the mean over each document of log2 of (count + 1) / (all + vocabulary): [D].

    [CLS] and [SEP], the stream's first token and its last, are left out.
    """
    log_V = np.log2((token_use + 1) / (token_use.sum() + len(token_use)))
    starts_D, sums_D = stream.document_starts, np.zeros(stream.num_documents)
    base = 0
    for tokens in stream.shards:
        first = int(np.searchsorted(starts_D, base, side="right")) - 1  # the shard begins in it
        last = int(np.searchsorted(starts_D, base + len(tokens)))
        inside_D = np.maximum(starts_D[first:last] - base, 0)
        sums_D[first:last] += np.add.reduceat(log_V[tokens], inside_D)
        base += len(tokens)
    ends = log_V[stream.shards[0][0]] + log_V[stream.shards[-1][-1]]
    lengths_D = np.diff(starts_D, append=stream.num_tokens)
    return (sums_D - ends) / np.maximum(1, lengths_D - 2)


def _sum(before: Any, note: Any) -> Any:
    if isinstance(note, dict):
        names = sorted({*(before or {}), *note})
        return {name: (before or {}).get(name, 0) + note.get(name, 0) for name in names}
    return (before or 0) + note


def one_line(text: str) -> str:
    """Return an excerpt that a table can show: printable valid UTF-8 on one line."""
    shown = map(_printable, text.encode(errors="replace").decode())
    return " ".join("".join(shown).split())


def _printable(character: str) -> str:
    return character if character.isprintable() else " "
