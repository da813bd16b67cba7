"""Finding downstream text in the corpus: documents that hold a piece of a GLUE example.

The rule is GPT-3's (Brown et al. 2020, appendix C): a document is contaminated when it shares a run of 13 words with an
example, in lower case and without regard to punctuation. Both sides are read alike, so a corpus or a task in the Penn
Treebank's spelling ("do n't", "-lrb-") is found from the other. A text or sentence of fewer words, which has no such
run, counts by how much it says: with 6 words of 28 letters and digits wherever it stands, with 4 words of 20 where it
stands from one sentence boundary to another. What says less is no evidence: language produces it again and again
without any copying. In 6 million words of old novels, which hold no example, sentences of GLUE with fewer letters occur
144 times as whole sentences and 4,101 times inside longer ones; with as many, never (docs/log.md). Examples are cut
into sentences for that purpose only; runs of 13 words go across them.

The dev and test sets are always looked for; `train_text` adds the training sets. Labels are never read. The table takes
13 bytes for each run of words of each text and a bit table of 2 to 4 bytes each, which answers for nearly all words of
a clean text. Short sentences are looked for where the first 6 words of one stand in a bit table of their own.

Suffixes: W words, E entries of the table, S sentences.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError, file_sha256
from data_prep.passages import passage
from data_prep.words import combine, hash_words_and_breaks, hash_words_and_lengths, mix, word_places

SHORTEST_NGRAM = 9
SENTENCE_WORDS = 4  # from which a sentence that has no run is looked for
SENTENCE_BYTES = 20  # the same, of its words
FIRST_WORDS, ANYWHERE_BYTES = 6, 28  # from which it is looked for inside longer sentences too; by its first words
BATCH_TEXTS = 1 << 14
_BIT = np.array([1 << bit for bit in range(8)], dtype=np.uint8)
BITS_PER_ENTRY = 16  # one lookup in 16 goes on to the sorted table without need, at most
# Columns with text in the official files. CoLA's training and dev files have no header: their fourth column.
TASKS: dict[str, tuple[str, ...]] = {
    "CoLA": ("sentence",),
    "SST-2": ("sentence",),
    "MRPC": ("#1 String", "#2 String"),
    "STS-B": ("sentence1", "sentence2"),
    "RTE": ("sentence1", "sentence2"),
    "QNLI": ("question", "sentence"),
    "MNLI": ("sentence1", "sentence2"),
    "QQP": ("question1", "question2"),
    "WNLI": ("sentence1", "sentence2"),
}
HEADERLESS = {"CoLA": 3}
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+")
# The Penn Treebank's spelling, in SST-2 and MRPC: "do n't", "-lrb-". The literal signs are found faster.
_DETACHED = re.compile(r"\s+(n['’]t\b)|-[lr][rsc]b-", re.IGNORECASE)
_DETACHED_SIGNS = (" n't", " n’t", " N'T", *(f"-{side}{kind}B-" for side in "LR" for kind in "RSC"))
_DETACHED_SIGNS += tuple(sign.lower() for sign in _DETACHED_SIGNS[3:])


@dataclass(frozen=True)
class DecontaminationConfig:
    """Section `data.decontaminate`."""

    tasks: str | None = None  # folder with CoLA/, SST-2/ ...; null: no decontamination
    ngram: int = 13
    train_text: bool = False  # look for the training sets too

    def __post_init__(self) -> None:
        if not SHORTEST_NGRAM <= self.ngram <= 50:
            raise ValueError(f"ngram={self.ngram} must be between {SHORTEST_NGRAM} and 50")


class Decontaminator:
    """Which tasks' examples a text holds.

    `tasks` are those whose files were found, `files` their names with hashes (for the manifest: the same corpus needs
    the same files), `examples` how many texts each task has, `searchable` how many of these say enough to be found.
    """

    def __init__(self, texts: dict[str, list[str]], config: DecontaminationConfig) -> None:
        """`texts` holds each task's texts, one for each text of an example."""
        self.tasks, self.files = tuple(texts), list[dict[str, Any]]()
        self.examples = {task: len(found) for task, found in texts.items()}
        self._ends = np.cumsum(list(self.examples.values()))  # a text's number counts through all tasks
        self._ngram = config.ngram
        every = [text for found in texts.values() for text in found]
        parts = [
            _entries(every[start : start + BATCH_TEXTS], start, config.ngram)
            for start in range(0, len(every), BATCH_TEXTS)
        ]
        entries_E, texts_E, anywhere_E, firsts = (np.concatenate(column) for column in zip(*parts))
        by_entry_E = np.argsort(entries_E, kind="stable")
        self._entries_E, self._texts_E = entries_E[by_entry_E], texts_E[by_entry_E]
        self._anywhere_E = anywhere_E[by_entry_E]
        self._shift, self._bits = _bit_table(self._entries_E)
        self._first_shift, self._first_bits = _bit_table(firsts)
        self.searchable = self.by_task(np.unique(texts_E))

    def by_task(self, texts: np.ndarray) -> dict[str, int]:
        """How many of these texts, given by number, each task has."""
        counts = np.bincount(np.searchsorted(self._ends, texts, side="right"), minlength=len(self.tasks))
        return dict(zip(self.tasks, counts.tolist()))

    @classmethod
    def from_folder(cls, path: Path, config: DecontaminationConfig) -> "Decontaminator":
        """Read the tasks in this folder, in the layouts of GLUE's official files.

        UserError: no folder, none of the tasks in it, a task without dev set, a file that is not what it should be.
        """
        if not path.is_dir():
            raise UserError(f"data.decontaminate.tasks: no folder {path}; give the one that holds CoLA/, SST-2/ ...")
        texts: dict[str, list[str]] = {}
        sources = []
        for task in TASKS:
            files = _files(path / task, config.train_text)
            sources += [{"name": f"{task}/{file.name}", "sha256": file_sha256(file)} for file in files]
            if files:
                texts[task] = [text for file in files for text in _texts(file, task)]
        if not texts:
            raise UserError(f"data.decontaminate.tasks: {path} holds none of the tasks {', '.join(TASKS)}")
        found = cls(texts, config)
        found.files = sources
        return found

    def texts_in(self, text: str) -> np.ndarray:
        """The numbers of the tasks' texts that share a run of words or a short sentence with this text."""
        found = [texts for _, _, texts in self._matches(text)]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.uint32)

    def tasks_in(self, text: str) -> tuple[str, ...]:
        """The tasks that have such texts, in the order of the table."""
        found = self.texts_in(text)
        return tuple(task for task, count in self.by_task(found).items() if count) if len(found) else ()

    def shown(self, text: str) -> str:
        """For a report on a text with a match: how many words the first one has, whose they are, and the passage."""
        text = _attached(text)
        first, n = min((int(places[0]), n) for n, places, _ in self._matches(text))
        starts_W, ends_W = word_places(text)
        start, end = int(starts_W[first]), int(ends_W[first + n - 1])
        return f"{n} words of {', '.join(self.tasks_in(text[start:end]))}: {passage(text, [(start, end)])}"

    def _matches(self, text: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each length n with matches: n, the first words' places, and the numbers of the tasks' texts."""
        hashes_W, sentence_W = hash_words_and_breaks(_attached(text))
        begins_W = np.ones(len(hashes_W) + 1, dtype=bool)  # whether a sentence begins at this word, or the text ends
        np.not_equal(sentence_W[1:], sentence_W[:-1], out=begins_W[1:-1])
        for n, runs in enumerate(combine(hashes_W, self._ngram), 1):
            if n < SENTENCE_WORDS or not len(runs):
                continue
            wanted_W = whole_W = begins_W[:-n] & begins_W[n:]
            if n == FIRST_WORDS:
                first_W = _in_bit_table(self._first_bits, runs >> self._first_shift)
            if n >= FIRST_WORDS:
                wanted_W = whole_W | first_W[: len(runs)]
            places = np.arange(len(runs)) if n == self._ngram else np.flatnonzero(wanted_W)
            runs = mix(runs[places])
            likely = np.flatnonzero(_in_bit_table(self._bits, runs >> self._shift))
            if not len(likely):
                continue
            places, runs = places[likely], runs[likely]
            start, end = (np.searchsorted(self._entries_E, runs, side=side) for side in ("left", "right"))
            hit = end > start
            hit[hit] = self._anywhere_E[start[hit]] | whole_W[places[hit]]
            if hit.any():
                spans = zip(start[hit].tolist(), end[hit].tolist())
                yield n, places[hit], np.concatenate([self._texts_E[low:high] for low, high in spans])


def _attached(text: str) -> str:
    """The text with what the Penn Treebank detaches written as usual."""
    if any(sign in text for sign in _DETACHED_SIGNS):
        return _DETACHED.sub(r"\1 ", text)
    return text


def _files(folder: Path, train: bool) -> list[Path]:
    """A task's files to read; none if it has no folder."""
    if not folder.is_dir():
        return []
    found = sorted([*folder.glob("dev*.tsv"), *folder.glob("test*.tsv")])
    if not any(file.name.startswith("dev") for file in found):
        raise UserError(f"data.decontaminate.tasks: {folder} has no dev*.tsv; give the official files, or remove it")
    return found + [file for file in [folder / "train.tsv"] if train and file.is_file()]


def _texts(file: Path, task: str) -> list[str]:
    """The texts of a file's examples."""
    try:
        rows = [line.rstrip("\r").split("\t") for line in file.read_text(encoding="utf-8-sig").split("\n") if line]
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}") from None
    if task in HEADERLESS and not file.name.startswith("test"):
        columns = [HEADERLESS[task]]
    else:
        header, *rows = rows or [[]]
        if missing := [name for name in TASKS[task] if name not in header]:
            raise UserError(f"{file}:1: no column {missing[0]!r}; there are: {', '.join(header)}")
        columns = [header.index(name) for name in TASKS[task]]
    whole = [row for row in rows if len(row) > max(columns)]
    if len(rows) - len(whole) > len(rows) // 100:  # QQP's training file has ten broken rows
        raise UserError(f"{file}: {len(rows) - len(whole)} of {len(rows)} rows have fewer columns than the header")
    return [row[column] for row in whole for column in columns]


def _entries(texts: list[str], number: int, ngram: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Table entries of these texts, whose numbers begin with `number`: all runs of `ngram` words, and all shorter
    sentences that say enough. The entry [E], its text [E], whether it counts anywhere [E]; and beside them the first
    words of the sentences that do."""
    texts = [_attached(text).replace("\0", " ") for text in texts]
    hashes_W, number_W = hash_words_and_breaks("\0 ".join(texts), b"\0")
    *_, runs = combine(hashes_W, ngram)
    inside = number_W[: len(runs)] == number_W[len(number_W) - len(runs) :]
    columns = [(mix(runs[inside]), number_W[: len(runs)][inside], np.ones(int(inside.sum()), dtype=bool))]
    parts = [dict.fromkeys((text, *_SENTENCE_END.split(text))) for text in texts]
    text_S = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    joined = "\0 ".join(sentence for part in parts for sentence in part)
    hashes_W, number_W = hash_words_and_breaks(joined, b"\0")
    start_S = np.searchsorted(number_W, np.arange(len(text_S) + 1))
    bytes_S = np.diff(np.concatenate([[0], np.cumsum(hash_words_and_lengths(joined)[1])])[start_S])
    start_S, words_S = start_S[:-1], np.diff(start_S)
    firsts = np.empty(0, dtype=np.uint64)
    for n, runs in enumerate(combine(hashes_W, ngram - 1), 1):
        if n == FIRST_WORDS:
            firsts = runs[start_S[(words_S >= n) & (words_S < ngram) & (bytes_S >= ANYWHERE_BYTES)]]
        if n >= SENTENCE_WORDS:
            these = (words_S == n) & (bytes_S >= SENTENCE_BYTES)
            anywhere = (bytes_S[these] >= ANYWHERE_BYTES) & (n >= FIRST_WORDS)
            columns.append((mix(runs[start_S[these]]), text_S[these], anywhere))
    entries_E, texts_E, anywhere_E = (np.concatenate(column) for column in zip(*columns))
    return entries_E, (texts_E + number).astype(np.uint32), anywhere_E, firsts


def _bit_table(entries: np.ndarray) -> tuple[np.uint64, np.ndarray]:
    """By how much to shift a number to get its place in the table, and the table, eight places a byte."""
    size = max(10, (BITS_PER_ENTRY * len(entries)).bit_length())
    shift, bits = np.uint64(64 - size), np.zeros(1 << size - 3, dtype=np.uint8)
    place = entries >> shift
    np.bitwise_or.at(bits, place >> np.uint64(3), _BIT[place & np.uint64(7)])
    return shift, bits


def _in_bit_table(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    return (bits[places >> np.uint64(3)] & _BIT[places & np.uint64(7)]) != 0
