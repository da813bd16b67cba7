"""Examples: what both models put in the place of words that are frequent in the text, but not in their vocabulary.

A vocabulary is about in the order of frequency in the text that it was made from: there the share of its r-th word is
proportional to 1 / (r + 2.7), by the law of Zipf and Mandelbrot. Words of this text are ranked by what they have beyond
that. Nothing of the models enters the choice, so no word is shown because one of them is better at it.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from cramming.data.corpus import Corpus
from cramming.model.heads import MaskedLM
from eval.adapt.measure import Query, Window, hidden, inputs
from eval.diagnose.corpus_facts import WORD_MARKS, marks_words

COUNTED_TOKENS = 2_000_000
SHORTEST_WORD = 4
MANDELBROT = 2.7
MAX_WORDS = 1000
EXAMPLES, GUESSES, CONTEXT = 12, 3, 12
PART = "\ufffd"  # how a part of a character is decoded, in byte-level BPE
CONTINUES = "##"  # first characters of entries that continue a word, in WordPiece


@dataclass(frozen=True)
class Example:
    """Hidden word in its sentence, with the likeliest entries and the probability of the word, before and after."""

    word: str
    text: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    probability_before: float
    probability_after: float


def examples(
    before: MaskedLM, after: MaskedLM, corpus: Corpus, windows: Sequence[Window]
) -> list[Example]:
    """Return an example for each of the text's own words that stands whole in a window, the most frequent first."""
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_file))
    words = own_words(corpus, tokenizer)
    begins = word_beginnings(tokenizer, 1 + max(tokenizer.get_vocab().values()))
    results = []
    for entry, word in words.items():
        query = _first_query(entry, windows, begins, corpus.special_ids.mask)
        if query is None:
            continue
        guesses = [_guesses(model, query, tokenizer) for model in (before, after)]
        results.append(
            Example(
                word=word,
                text=_context(query, tokenizer),
                before=guesses[0][0],
                after=guesses[1][0],
                probability_before=guesses[0][1],
                probability_after=guesses[1][1],
            )
        )
        if len(results) == EXAMPLES:
            break
    return results


def own_words(corpus: Corpus, tokenizer: Tokenizer) -> dict[int, str]:
    """Return the entries that are words of the training text beyond their rank, by entry; the most frequent first."""
    stream = corpus.stream("train")
    ids_T = stream.gather(np.array([0]), min(COUNTED_TOKENS, stream.num_tokens))[0]
    counts_V = np.bincount(ids_T, minlength=corpus.vocab_size)
    words = _words(tokenizer)
    entries_W = np.array(sorted(words), dtype=np.int64)
    counts_W = counts_V[entries_W]
    weights_W = 1 / (np.arange(1, len(entries_W) + 1) + MANDELBROT)
    expected_W = counts_W.sum() * weights_W / weights_W.sum()
    excess_W = counts_W * np.log(np.maximum(counts_W, 1) / expected_W)
    order_W = np.argsort(-excess_W)[:MAX_WORDS]
    frequent = [int(entries_W[place]) for place in order_W if counts_W[place] > 1]
    return {entry: words[entry] for entry in frequent}


def _words(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the entries that are words by themselves."""
    has_marks = marks_words(tokenizer)
    words = dict[int, str]()
    for entry, number in tokenizer.get_vocab().items():
        if has_marks and not entry.startswith(WORD_MARKS):
            continue
        word = _readable([number], tokenizer)
        if is_word(word):
            words[number] = word
    return words


def is_word(text: str) -> bool:
    """Return whether a text is of letters and their marks alone, and long enough."""
    return len(text) >= SHORTEST_WORD and all(map(_is_letter, text))


def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LM"


def word_beginnings(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """Return which entries begin a word or are no part of one, bool [V]."""
    has_marks = marks_words(tokenizer)
    begins_V = np.ones(size, dtype=bool)
    for entry, number in tokenizer.get_vocab().items():
        if has_marks:
            first = tokenizer.decode([number], skip_special_tokens=False)[:1]
            continues = first.isdigit() or first == PART or (first and _is_letter(first))
            begins_V[number] = entry.startswith(WORD_MARKS) or not continues
        else:
            begins_V[number] = not entry.startswith(CONTINUES)
    return begins_V


def _first_query(
    entry: int, windows: Sequence[Window], begins_V: np.ndarray, mask_id: int
) -> Query | None:
    """Return the first window with the entry as a whole word, which is hidden there."""
    for window in windows:
        for place in np.flatnonzero(window.ids_L[:-1] == entry).tolist():
            if begins_V[window.ids_L[place + 1]]:
                return hidden(window.ids_L, np.array([place]), mask_id)
    return None


@torch.inference_mode()
def _guesses(model: MaskedLM, query: Query, tokenizer: Tokenizer) -> tuple[tuple[str, ...], float]:
    """Return the likeliest entries, and the probability of the hidden one."""
    logits_V = model.logits(*inputs([query], model.decoder().device))[0]
    probabilities_V = logits_V.float().softmax(-1)
    entries = probabilities_V.topk(GUESSES).indices.tolist()
    guesses = tuple(_readable([entry], tokenizer) for entry in entries)
    return guesses, float(probabilities_V[int(query.targets_M[0])])


def _context(query: Query, tokenizer: Tokenizer) -> str:
    """Return the words around the hidden one."""
    place = int(query.places_M[0])
    left = query.ids_L[max(1, place - CONTEXT) : place].tolist()
    right = query.ids_L[place + 1 : -1][:CONTEXT].tolist()
    return f"{_readable(left, tokenizer)} ____ {_readable(right, tokenizer)}"


def _readable(ids: list[int], tokenizer: Tokenizer) -> str:
    decode: Any = tokenizer.decode
    return str(decode(ids, skip_special_tokens=False)).strip()
