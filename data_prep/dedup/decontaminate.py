"""Finding downstream text in the corpus: documents that hold a piece of an example of GLUE or SuperGLUE.

The rule is GPT-3's (Brown et al. 2020, appendix C): a document is contaminated when it shares 13 words in a row with an
example, in lower case and without punctuation, and whether either has the Penn Treebank's spelling ("do n't", "-lrb-").
A text or sentence of fewer words counts by how much it says: with 6 words of 28 letters and digits wherever it stands,
with 4 words of 20 where it stands alone: between signs or numbers, as sentences, quotations and cells of tables do.
What says less is no evidence. In 6 million words of old novels, which hold no example, sentences of GLUE with fewer
letters occur 144 times as whole sentences and 4,101 times inside longer ones; with as many, never (docs/log.md).

The dev and test sets are always looked for; `train_text` adds the training sets. Labels are never read. The table takes
13 bytes for each n-gram of each text and two Bloom-like bit tables of 2 to 4 bytes each: one has the first 6 words of
all that is looked for, and answers for nearly all words of a clean text.

Suffixes: W words, E entries of the table, S sentences, K candidates for a match, D texts.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cramming.config import Section, UserError, file_sha256
from cramming.data.task_files import AX, GLUE, SUPERGLUE, TASKS, texts_sha256
from data_prep.dedup.ngram_hashes import BASE, HashedWords, combine, hash_words, mix, word_places
from data_prep.grouping import grouped
from data_prep.stats import excerpt

SENTENCE_WORDS = 4  # from which a sentence that has no run is looked for
SENTENCE_BYTES = 20  # the same, of its words
FIRST_WORDS, ANYWHERE_BYTES = 6, 28  # from which it is looked for beside other words too
BATCH_TEXTS = 1 << 14  # of the tasks
BATCH_CHARACTERS = (
    1 << 17
)  # of the corpus, searched at once: numpy's calls cost more than the work on short texts
_BIT = np.array([1 << bit for bit in range(8)], dtype=np.uint8)
BITS_PER_ENTRY = 16  # one lookup in 16 goes on to the sorted table without need, at most
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)[\"'”’)]*\s+"
)  # not in "U.S. Food and Drug Administration"
# The same, before and behind a line's end, and in scripts without spaces.
_SENTENCE_BORDER = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)[\"'”’)]* +|(?<=[。！？])(?![”’」』）])|(?<=\n)|(?=\n)"
)
_LINE_END = re.compile(r" *\n+")  # with what a line that was cut has left
# The Penn Treebank's spelling, in SST-2 and MRPC: "do n't", "-lrb-". The literal signs are found faster.
_DETACHED = re.compile(r" +(n['’]t\b) *|-[lr][rsc]b-", re.IGNORECASE | re.ASCII)
_DETACHED_SIGNS = (b" n't", " n’t".encode(), b"rb-", b"sb-", b"cb-")  # in lower case
_SETTING = "data.decontaminate.tasks"
_SCORED = chain.from_iterable(task.scored for task in TASKS.values())
_DEVELOPMENT = dict.fromkeys(source.path for source in _SCORED)
# Test files, and tasks that are not scored here, are searched as well.
_SUPERGLUE = (*(task.train.folder for task in SUPERGLUE.values()), "COPA", "MultiRC", "ReCoRD")
_JSON_TEXT = {
    "premise",
    "hypothesis",
    "question",
    "passage",
    "sentence1",
    "sentence2",
    "word",
    "text",
    "choice1",
    "choice2",
    "query",
}
_DIGIT = np.array([0x30 <= byte < 0x3A for byte in range(256)])


class DecontaminationConfig(Section):
    """Section `data.decontaminate`."""

    tasks: str | None = None  # folder with CoLA/, SST-2/ ... BoolQ/ ...; null: no decontamination
    ngram: Annotated[int, Field(ge=9, le=50)] = 13
    train_text: bool = False  # look for the training sets too
    action: Literal["drop", "cut"] = "drop"  # the document, or the sentences with the text


class Overlap(NamedTuple):
    """Numbers of the tasks' texts that a text shares words with, and how many words the longest match has."""

    texts: np.ndarray
    words: int


class Decontaminator:
    """Search of texts for the examples of tasks.

    `ngram` words are a run. `tasks` are those whose files were found, `files` their names with hashes (for the
    manifest: the same corpus needs the same files), `examples` how many texts each task has, `searchable` how many of
    these can be found; `development` tells of each development set's texts, by file, how many they are and their
    SHA-256.
    """

    def __init__(self, texts: dict[str, list[str]], config: DecontaminationConfig) -> None:
        """Read `texts`, which holds each task's texts, one for each text of an example."""
        self.tasks, self.files = tuple(texts), list[dict[str, Any]]()
        self.development: dict[str, dict[str, Any]] = {}
        self.examples = {task: len(task_texts) for task, task_texts in texts.items()}
        self._ends = np.cumsum(
            list(self.examples.values())
        )  # a text's number counts through all tasks
        self.ngram = config.ngram
        every = list(chain.from_iterable(texts.values()))
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
        """Return how many of these texts, given by number, each task has."""
        counts = np.bincount(self.task_numbers(texts), minlength=len(self.tasks))
        return dict(zip(self.tasks, counts.tolist()))

    def task_numbers(self, texts: np.ndarray) -> np.ndarray:
        """Return the place among `tasks` of each of these texts, given by number."""
        return np.searchsorted(self._ends, texts, side="right")

    @classmethod
    def from_folder(cls, path: Path, config: DecontaminationConfig) -> "Decontaminator":
        """Read the tasks in this folder, in the layouts of the official files.

        UserError: no folder, none of the tasks in it, a task without dev set, a file that is not what it should be.
        """
        texts: dict[str, list[str]] = {}
        files, development = list[dict[str, Any]](), dict[str, dict[str, Any]]()
        for title, name, columns, header in _searched(config.train_text):
            if not (path / name).is_file():
                continue
            file_texts = _texts(path / name, columns, header)
            files.append({"name": name, "sha256": file_sha256(path / name)})
            texts.setdefault(title, []).extend(file_texts)
            if name in _DEVELOPMENT:
                sha256 = texts_sha256(file_texts)
                development[name] = {"texts": len(file_texts), "sha256": sha256}
        folders = dict.fromkeys(name.partition("/")[0] for name in _DEVELOPMENT)
        with_dev = {name.partition("/")[0] for name in development}
        if lacking := [
            folder for folder in folders if (path / folder).is_dir() and folder not in with_dev
        ]:
            raise UserError(
                f"{_SETTING}: {path / lacking[0]} has no dev set; give the official files, or remove it"
            )
        if not texts:
            raise UserError(
                f"{_SETTING}: {path} is no folder that holds one of {', '.join(folders)}"
            )
        search = cls(texts, config)
        search.files, search.development = files, development
        return search

    def overlaps(self, texts: Sequence[str], *, alone: bool = True) -> list[Overlap]:
        """Return for each text the tasks' texts that share a run of words or a short sentence with it.

        `alone`: with those that count only where they stand alone, which shows in no text whose signs are not the
        original's.
        """
        matching: list[list[int]] = [[] for _ in texts]
        longest = [0] * len(texts)
        for batch in grouped(
            range(len(texts)), BATCH_TEXTS, lambda number: len(texts[number]), BATCH_CHARACTERS
        ):
            words = _read([texts[number] for number in batch])
            for n, first_K, task_text_K in self._matches(words, alone):
                number_K = np.searchsorted(words.firsts_D, first_K, side="right") - 1 + batch[0]
                for number, task_text in zip(number_K.tolist(), task_text_K.tolist()):
                    matching[number].append(task_text)
                    longest[number] = n  # they come in ascending order
        numbers = [np.unique(np.array(task_texts, dtype=np.uint32)) for task_texts in matching]
        return list(map(Overlap, numbers, longest))

    def cut(self, text: str) -> str:
        """Return the text without the sentences that hold a match.

        What is left is searched again until nothing is found, because neighbours of a sentence that was cut become
        neighbours of each other. Without a full stop in it a whole line is a sentence.
        """
        while True:
            sentences = _sentences(text)
            attached = [_attached(sentence) for sentence in sentences]
            ends_S = np.cumsum([len(sentence) for sentence in attached])
            joined = "".join(attached)
            starts_W, ends_W = word_places(joined)
            is_hit_S = np.zeros(len(sentences), dtype=bool)
            for n, first_K, _ in self._matches(hash_words([joined])):
                first_S = np.searchsorted(ends_S, starts_W[first_K], side="right")
                last_S = np.searchsorted(ends_S, ends_W[first_K + n - 1])
                for first, last in zip(first_S, last_S):
                    is_hit_S[first : last + 1] = True
            if not is_hit_S.any():
                return text
            left = [
                sentence
                for sentence, is_hit in zip(sentences, is_hit_S)
                if sentence == "\n" or not is_hit
            ]
            text = _LINE_END.sub("\n", "".join(left)).strip()

    def _tasks_of(self, texts: np.ndarray) -> list[str]:
        return [task for task, count in self.by_task(texts).items() if count]

    def explain(self, text: str) -> str:
        """Return of a text's first match the number of words, the tasks they are of, and the excerpt."""
        text = _attached(text)
        words = hash_words([text])
        matches = (
            (int(first_K[0]), n, task_texts[first_K == first_K[0]])
            for n, first_K, task_texts in self._matches(words)
        )
        first, n, task_texts = min(matches, key=lambda match: match[:2])
        starts_W, ends_W = word_places(text)
        span = int(starts_W[first]), int(ends_W[first + n - 1])
        return f"{n} words of {', '.join(self._tasks_of(task_texts))}: {excerpt(text, [span])}"

    def _matches(
        self, words: HashedWords, alone: bool = True
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield for each length n with matches: n, the first words' places [K], the numbers of the tasks' texts [K]."""
        apart_W = _apart(words) if alone else np.zeros(len(words.hashes_W) + 1, dtype=bool)
        for n, first_K, runs_K in self._candidates(words.hashes_W, apart_W):
            runs_K = mix(runs_K)
            likely = np.flatnonzero(_in_bit_table(self._bits, runs_K >> self._shift))
            if not len(likely):
                continue
            first_K, runs_K = first_K[likely], runs_K[likely]
            start_K, end_K = (
                np.searchsorted(self._entries_E, runs_K, side=side) for side in ("left", "right")
            )
            text_K, last_K = (
                np.searchsorted(words.firsts_D, place, side="right")
                for place in (first_K, first_K + n - 1)
            )
            hit_K = (end_K > start_K) & (text_K == last_K)
            hit_K[hit_K] = (
                self._anywhere_E[start_K[hit_K]] | (apart_W[first_K] & apart_W[first_K + n])[hit_K]
            )
            if hit_K.any():
                start_K, end_K = start_K[hit_K], end_K[hit_K]
                numbers = [
                    self._texts_E[start:end] for start, end in zip(start_K.tolist(), end_K.tolist())
                ]
                yield n, np.repeat(first_K[hit_K], end_K - start_K), np.concatenate(numbers)

    def _candidates(
        self, hashes_W: np.ndarray, apart_W: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield for each length n the places [K] where something of n words may begin, and the n-grams' numbers [K]."""
        for n, runs in enumerate(combine(hashes_W, FIRST_WORDS), 1):
            if SENTENCE_WORDS <= n < FIRST_WORDS:
                first_K = np.flatnonzero(apart_W[:-n] & apart_W[n:])
                yield n, first_K, runs[first_K]
        first_K = np.flatnonzero(_in_bit_table(self._first_bits, runs >> self._first_shift))
        runs_K = runs[first_K]
        yield FIRST_WORDS, first_K, runs_K
        for n in range(FIRST_WORDS + 1, self.ngram + 1):
            inside = np.searchsorted(first_K, len(hashes_W) - n, side="right")
            first_K, runs_K = first_K[:inside], runs_K[:inside] * np.uint64(BASE)
            runs_K += hashes_W[first_K + (n - 1)]
            yield n, first_K, runs_K


def _read(texts: Sequence[str]) -> HashedWords:
    """Return the words of texts, with what the Penn Treebank detaches written as usual."""
    words = hash_words(texts)
    if any(sign in words.data for sign in _DETACHED_SIGNS):
        return hash_words([_attached(text) for text in texts])
    return words


def _sentences(text: str) -> list[str]:
    """Return the sentences with the spaces behind them, and the line ends, which together are the text."""
    borders = [match.end() for match in _SENTENCE_BORDER.finditer(text)]
    slices = [text[start:end] for start, end in pairwise([0, *borders, len(text)])]
    return [each for each in slices if each]


def _attached(text: str) -> str:
    return _DETACHED.sub(r"\1 ", text)


def _apart(words: HashedWords) -> np.ndarray:
    """Return where more than " " or ", " lies in front of a word, or a number on either side; and the end: [W + 1]."""
    apart_W = np.ones(len(words.hashes_W) + 1, dtype=bool)
    data_B = np.frombuffer(words.data, np.uint8)
    end_W, start_W = words.ends_W[:-1], words.starts_W[1:]
    together_W = (start_W - end_W == 1) | ((start_W - end_W == 2) & (data_B[end_W] == ord(",")))
    together_W &= data_B[start_W - 1] == ord(" ")
    together_W &= ~(_DIGIT[data_B[end_W - 1]] | _DIGIT[data_B[start_W]])
    np.logical_not(together_W | (start_W == end_W), out=apart_W[1:-1])  # characters of Han touch
    return apart_W


def _searched(train_text: bool) -> Iterator[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Yield the files to search: the task's title, the file's place, its columns of text, the header that it lacks."""
    for task in GLUE.values():
        for source in (*task.scored, *task.blind, *[task.train] * train_text):
            if source is not AX:
                yield (
                    task.title,
                    source.path,
                    task.text,
                    () if source in task.blind else task.headerless,
                )
    for title in _SUPERGLUE:
        for split in ("val", "test", *["train"] * train_text):
            yield title, f"{title}/{split}.jsonl", (), ()


def _texts(file: Path, columns: tuple[str, ...], header: Sequence[str]) -> list[str]:
    """Return the texts of a file's examples."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").split("\n") if line]
        if file.suffix == ".jsonl":
            return list(chain.from_iterable(_json_texts(json.loads(line)) for line in lines))
    except ValueError as error:
        raise UserError(f"{file}: not a file of examples: {error}") from None
    rows = [line.rstrip("\r").split("\t") for line in lines]
    if not header:
        header, *rows = rows or [[]]
    if missing := [name for name in columns if name not in header]:
        raise UserError(f"{file}:1: no column {', '.join(missing)}; there are: {', '.join(header)}")
    places = [header.index(name) for name in columns]
    whole = [row for row in rows if len(row) > max(places)]
    if len(rows) - len(whole) > len(rows) // 100:  # QQP's training file has ten broken rows
        raise UserError(
            f"{file}: {len(rows) - len(whole)} of {len(rows)} rows have fewer columns than the header"
        )
    texts: list[str] = []
    for row in whole:
        texts += [row[place] for place in places]
    return texts


def _json_texts(node: Any) -> Iterator[str]:
    """Return the texts of a row of SuperGLUE at any depth; without answers, which are single names in ReCoRD."""
    for key, value in node.items() if isinstance(node, dict) else ((None, item) for item in node):
        if isinstance(value, str) and key in _JSON_TEXT:
            yield value
        elif isinstance(value, (dict, list)) and key != "answers":
            yield from _json_texts(value)


def _entries(
    texts: list[str], number: int, ngram: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the table entries of texts whose numbers begin with `number`.

    They are all runs of `ngram` words, and all shorter sentences long enough: the entry [E], its text [E], whether it
    counts anywhere [E]; and beside them the first words of the entries that have more.
    """
    words = _read(texts)
    grams, text_W = list(combine(words.hashes_W, ngram)), words.text_numbers()
    inside = np.flatnonzero(text_W[: len(grams[-1])] == text_W[len(text_W) - len(grams[-1]) :])
    columns = [(mix(grams[-1][inside]), text_W[inside], np.ones(len(inside), dtype=bool))]
    firsts = [grams[FIRST_WORDS - 1][inside]]
    parts = [dict.fromkeys((text, *_SENTENCE_END.split(text))) for text in texts]
    text_S = np.repeat(np.arange(len(texts)), [len(part) for part in parts])
    words = _read(list(chain.from_iterable(parts)))
    grams = list(combine(words.hashes_W, ngram - 1))
    start_S, words_S = words.firsts_D[:-1], np.diff(words.firsts_D)
    bytes_S = np.diff(
        np.concatenate([[0], np.cumsum(words.ends_W - words.starts_W)])[words.firsts_D]
    )
    for n in range(SENTENCE_WORDS, ngram):
        these = (words_S == n) & (bytes_S >= SENTENCE_BYTES)
        anywhere = (bytes_S[these] >= ANYWHERE_BYTES) & (n >= FIRST_WORDS)
        columns.append((mix(grams[n - 1][start_S[these]]), text_S[these], anywhere))
        firsts += [grams[FIRST_WORDS - 1][start_S[these]]] if n >= FIRST_WORDS else []
    entries_E, texts_E, anywhere_E = (np.concatenate(column) for column in zip(*columns))
    return entries_E, (texts_E + number).astype(np.uint32), anywhere_E, np.concatenate(firsts)


def _bit_table(entries: np.ndarray) -> tuple[np.uint64, np.ndarray]:
    """Return by how much to shift a number to get its place in the table, and the table, eight places a byte."""
    size = max(10, (BITS_PER_ENTRY * len(entries)).bit_length())
    shift, bits = np.uint64(64 - size), np.zeros(1 << size - 3, dtype=np.uint8)
    place = entries >> shift
    np.bitwise_or.at(bits, place >> np.uint64(3), _BIT[place & np.uint64(7)])
    return shift, bits


def _in_bit_table(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    return (bits[places >> np.uint64(3)] & _BIT[places & np.uint64(7)]) != 0
