"""Finding downstream text in the corpus: documents that hold a piece of a GLUE example.

The rule is GPT-3's (Brown et al. 2020, appendix C): a document is contaminated when it shares a run of 13 words with an
example, in lower case and without regard to punctuation. Sentences of 8 to 12 words, which have no such run, count when
the document has the same words from one sentence boundary to another. Shorter ones are no evidence: language produces
them again and again without any copying ("What is the capital of France?"). Examples are cut into sentences for
that purpose only; runs of 13 words go across them.

The dev and test sets are always looked for; `train_text` adds the training sets. Labels are never read. The table takes
12 bytes for each run of words and a bit table of 2 to 4 bytes each, which answers for nearly all words of a clean text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cramming.config import UserError, file_sha256
from data_prep.words import combine, hash_words_and_breaks, mix

SHORTEST_SENTENCE = 8
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
# The Penn Treebank's spelling, in SST-2 and MRPC: "do n't", "-lrb-".
_DETACHED = re.compile(r"\s+(n't\b)|-[lr][rsc]b-", re.IGNORECASE)


@dataclass(frozen=True)
class DecontaminationConfig:
    """Section `data.decontaminate`."""

    tasks: str | None = None  # folder with CoLA/, SST-2/ ...; null: no decontamination
    ngram: int = 13
    train_text: bool = False  # look for the training sets too

    def __post_init__(self) -> None:
        if not SHORTEST_SENTENCE < self.ngram <= 50:
            raise ValueError(f"ngram={self.ngram} must be between {SHORTEST_SENTENCE + 1} and 50")


class Decontaminator:
    """Which tasks' examples a text holds.

    `tasks` are those whose files were found, `files` their names with hashes (for the manifest: the same corpus needs
    the same files), `examples` how many texts each task has.
    """

    def __init__(self, texts: dict[str, list[str]], config: DecontaminationConfig) -> None:
        """`texts` holds each task's texts, one for each text of an example."""
        assert 0 < len(texts) <= 16, "marks are 16 bits"
        self.tasks, self.files = tuple(texts), list[dict[str, Any]]()
        self.examples = {task: len(found) for task, found in texts.items()}
        self._ngram = config.ngram
        entries, marks = [], []
        for number, found in enumerate(texts.values()):
            parts = [_entries(batch, config.ngram) for batch in _batches(found)]
            runs = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *parts]))
            entries.append(runs)
            marks.append(np.full(len(runs), 1 << number, dtype=np.uint16))
        self._entries, inverse = np.unique(np.concatenate(entries), return_inverse=True)
        self._marks = np.zeros(len(self._entries), dtype=np.uint16)
        np.bitwise_or.at(self._marks, inverse, np.concatenate(marks))
        self._shift, self._bits = _bit_table(self._entries)

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

    def tasks_in(self, text: str) -> tuple[str, ...]:
        """The tasks that share a run of words or a short sentence with this text, in the order of the table."""
        marks = 0
        for _, _, found in self._matches(text):
            marks |= int(np.bitwise_or.reduce(found))
        return tuple(task for number, task in enumerate(self.tasks) if marks >> number & 1)

    def match(self, text: str) -> str:
        """The first run of words in this text that is a task's, for a report; lower case, words only. Empty: none."""
        first = [(int(places[0]), n) for n, places, _ in self._matches(text)]
        start, n = min(first, default=(0, 0))
        return " ".join(re.findall(r"[^\W_]+", text.lower())[start : start + n])

    def _matches(self, text: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each length n with matches: n, the first words' places and the tasks' marks."""
        hashes_W, sentence_W = hash_words_and_breaks(text)
        begins_W = np.ones(len(hashes_W) + 1, dtype=bool)  # whether a sentence begins at this word, or the text ends
        np.not_equal(sentence_W[1:], sentence_W[:-1], out=begins_W[1:-1])
        for n, runs in enumerate(combine(hashes_W, self._ngram), 1):
            if n < SHORTEST_SENTENCE or not len(runs):
                continue
            places = np.arange(len(runs)) if n == self._ngram else np.flatnonzero(begins_W[:-n] & begins_W[n:])
            runs = mix(runs[places])
            likely = np.flatnonzero(_in_bit_table(self._bits, runs >> self._shift))
            index = np.minimum(np.searchsorted(self._entries, runs[likely]), len(self._entries) - 1)
            hit = self._entries[index] == runs[likely] if len(index) else np.zeros(0, dtype=bool)
            if hit.any():
                yield n, places[likely[hit]], self._marks[index[hit]]


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


def _batches(texts: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), BATCH_TEXTS):
        yield [_DETACHED.sub(r"\1 ", text).replace("\0", " ") for text in texts[start : start + BATCH_TEXTS]]


def _entries(texts: list[str], ngram: int) -> np.ndarray:
    """Numbers of all runs of `ngram` words in these texts, and of all their shorter sentences."""
    hashes_W, number_W = hash_words_and_breaks("\0 ".join(texts), b"\0")
    *_, runs = combine(hashes_W, ngram)
    inside = number_W[: len(runs)] == number_W[len(number_W) - len(runs) :]
    entries = [mix(runs[inside])]
    sentences = [sentence for text in texts for sentence in (text, *_SENTENCE_END.split(text))]
    hashes_W, number_W = hash_words_and_breaks("\0 ".join(sentences), b"\0")
    starts = np.searchsorted(number_W, np.arange(len(sentences) + 1))
    words = np.diff(starts)
    for n, runs in enumerate(combine(hashes_W, ngram - 1), 1):
        if n >= SHORTEST_SENTENCE:
            entries.append(mix(runs[starts[:-1][words == n]]))
    return np.unique(np.concatenate(entries))


def _bit_table(entries: np.ndarray) -> tuple[np.uint64, np.ndarray]:
    """By how much to shift a number to get its place in the table, and the table, eight places a byte."""
    size = max(10, (BITS_PER_ENTRY * len(entries)).bit_length())
    shift, bits = np.uint64(64 - size), np.zeros(1 << size - 3, dtype=np.uint8)
    place = entries >> shift
    np.bitwise_or.at(bits, place >> np.uint64(3), _BIT[place & np.uint64(7)])
    return shift, bits


def _in_bit_table(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    return (bits[places >> np.uint64(3)] & _BIT[places & np.uint64(7)]) != 0
