"""Normalised texts to token ids, as `Tokenizer.encode` gives them; what spells a special token is text as any other.

Word by word: BERT's normaliser and word splitting (Devlin et al. 2019) look at nothing beyond white space, so each
different word is encoded once and its ids looked up from then on (half the time of the tokenizer, on Wikipedia). Any
other tokenizer gets the text itself; a long one in pieces cut in front of whitespace, where byte-level BPE and Unigram
over words start anew anyway.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from data_prep.grouping import grouped

PIECE_CHARACTERS = 1 << 16
GROUP_CHARACTERS = 1 << 20
KNOWN_CHARACTERS = 1 << 21  # of the words in the table: some 260,000 words, 60 MB

TextEncoder = Callable[[Iterable[str]], Iterator[np.ndarray]]


def text_encoder(tokenizer: Tokenizer, dtype: np.dtype[Any]) -> TextEncoder:
    """Return the faster way to a tokenizer's ids: texts to one array [n] each, without [CLS] and [SEP]."""
    return (ByWords if reads_word_by_word(tokenizer) else InPieces)(tokenizer, dtype)


def reads_word_by_word(tokenizer: Tokenizer) -> bool:
    """Return whether nothing in it looks across white space.

    That is BERT's two steps, and no added token that holds any, or takes what stands in front of it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        isinstance(tokenizer.normalizer, normalizers.BertNormalizer | None)
        and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and all(token.content.split() == [token.content] and not token.lstrip for token in added)
    )


class ByWords:
    """Looks words up in a table, and begins a new one when it is full."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        self._known: dict[str, bytes] = {}  # ids as bytes: small, joined by one call
        self._characters = 0  # in the table

    def __call__(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each text."""
        return map(self._ids, texts)

    def _ids(self, text: str) -> np.ndarray:
        words = text.split()
        if self._characters > KNOWN_CHARACTERS:
            self._known, self._characters = {}, 0
        if new := list(set(words).difference(self._known)):
            self._known |= self._encoded(new)
            self._characters += sum(map(len, new))
        return np.frombuffer(b"".join(map(self._known.__getitem__, words)), self._dtype)

    def _encoded(self, words: list[str]) -> dict[str, bytes]:
        """Return the ids of words that are in no table."""
        self._tokenizer.encode_special_tokens = True  # sent to a worker, it has forgotten that
        # One text, cut at the words' first characters: a call for each would take three times as long.
        encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
        starts_N = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        lengths_W = np.array([len(word) + 1 for word in words], dtype=np.int64)
        ids, places = (
            np.array(encoding.ids, self._dtype),
            np.searchsorted(starts_N, np.cumsum(lengths_W)).tolist(),
        )
        return {
            word: ids[start:end].tobytes() for word, start, end in zip(words, [0, *places], places)
        }


class InPieces:
    """Hands the text to the tokenizer, not too much at once: encodings are large."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype

    def __call__(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each text."""
        parts = [split_at_whitespace(text, PIECE_CHARACTERS) for text in texts]
        encoded = self._encoded(list(chain.from_iterable(parts)))
        for pieces in parts:
            yield np.concatenate([next(encoded) for _ in pieces])

    def _encoded(self, pieces: list[str]) -> Iterator[np.ndarray]:
        self._tokenizer.encode_special_tokens = True  # as in `ByWords`
        for group in grouped(pieces, GROUP_CHARACTERS, len, GROUP_CHARACTERS):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, self._dtype)


def split_at_whitespace(text: str, limit: int) -> list[str]:
    """Return parts of at most `limit` characters, cut in front of whitespace if there is any in a part's second half.

    Joined, the parts are the text again. Whitespace stays in front of the word after it, as byte-level BPE wants it.
    """
    parts, start = [], 0
    while len(text) - start > limit:
        low, high = start + limit // 2, start + limit
        cut = max(text.rfind(" ", low, high + 1), text.rfind("\n", low, high + 1))
        cut = cut if cut > 0 else high
        parts.append(text[start:cut])
        start = cut
    parts.append(text[start:])
    return parts
