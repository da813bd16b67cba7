"""Hashes of words and n-grams, 64 bits each: what repetition filters, near-duplicates and decontamination share.

A word is a run of letters and digits, A-Z taken as a-z; what stands between two words does not matter, so "it 's",
"it's" and "It’s" are the same two words. In scripts written without spaces (Han, Kana) each character is a word. The
work is done by numpy on the UTF-8 bytes: a word's hash is a polynomial in its bytes, taken as the difference of two
prefix sums (Karp and Rabin 1987), then mixed. Two different words have the same hash with a chance of 2**-64.

Suffixes: B bytes, W words, D texts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

BLOCK_BYTES = 1 << 16  # what the tables of powers cover, and what stays in a core's cache
BASE = 0x9E3779B97F4A7C15


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS = _powers(BASE, BLOCK_BYTES)
_INVERSE_POWERS = _powers(pow(BASE, -1, 1 << 64), BLOCK_BYTES)
# For `bytes.translate`: which bytes belong to words.
_WORD_TABLE = bytes(byte >= 0x80 or chr(byte).isalnum() for byte in range(256))


def mix(hashes: np.ndarray) -> np.ndarray:
    """Apply MurmurHash3's finaliser (Appleby 2011): every bit of the uint64 reaches every other."""
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> np.uint64(33))


class HashedWords(NamedTuple):
    """The words of some texts, one text after the other."""

    data: bytes  # the texts in lower case (ASCII only), one behind the other with a line end between them
    hashes_W: np.ndarray  # uint64
    starts_W: np.ndarray  # places in `data`
    ends_W: np.ndarray
    firsts_D: np.ndarray  # [D + 1]: each text's first word, and how many words there are

    def text_numbers(self) -> np.ndarray:
        """Return which text each word belongs to: [W]."""
        return np.repeat(np.arange(len(self.firsts_D) - 1), np.diff(self.firsts_D))


def hash_words(texts: Sequence[str]) -> HashedWords:
    """Return the words of texts; many short texts in one call take a fraction of the time of a call for each."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    data = b"\n".join(encoded).lower()
    blocks = list(_blocks(data))
    hashes_W, starts_W, ends_W = blocks[0]
    if len(blocks) > 1:
        hashes_W, starts_W, ends_W = map(np.concatenate, zip(*blocks))
    edges_D = np.cumsum([0, *(len(part) + 1 for part in encoded)])
    return HashedWords(data, hashes_W, starts_W, ends_W, np.searchsorted(starts_W, edges_D))


def word_places(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of the words [W], in characters of the text."""
    words = hash_words([text])
    data_B = np.frombuffer(words.data, np.uint8)
    characters_B = np.concatenate(
        [[0], np.cumsum((data_B & 0xC0) != 0x80)]
    )  # that begin before this byte
    return characters_B[words.starts_W], characters_B[words.ends_W]


def combine(hashes_W: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """Yield hashes of the n-grams for n = 1, 2 ... `longest`, one array [max(0, W - n + 1)] each; not mixed."""
    current, base = hashes_W, np.uint64(BASE)
    yield current
    for n in range(1, longest):
        current = current[:-1] * base + hashes_W[n:]
        yield current


def ngrams(hashes_W: np.ndarray, n: int) -> np.ndarray:
    """Return hashes [max(0, W - n + 1)] of all n-grams, mixed."""
    *_, last = combine(hashes_W, n)
    return mix(last)


def _blocks(data: bytes) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield block by block the words' hashes, where they start and where they end in the data: [W] each."""
    ascii_only, offset = data.isascii(), 0
    for block in _cut(data):
        block_B = np.frombuffer(block, np.uint8)
        starts_W, ends_W = _bounds(block, block_B, ascii_only)
        sums_B = np.empty(len(block_B) + 1, dtype=np.uint64)
        sums_B[0] = 0
        np.cumsum(block_B * _POWERS[: len(block_B)], out=sums_B[1:])
        hashes_W = mix((sums_B[ends_W] - sums_B[starts_W]) * _INVERSE_POWERS[starts_W])
        yield hashes_W, starts_W + offset, ends_W + offset
        offset += len(block)


def _cut(data: bytes) -> Iterator[bytes]:
    """Yield blocks cut at white space; without any between words, and only a word that fills a block is cut itself."""
    start = 0
    while len(data) - start > BLOCK_BYTES:
        end = start + BLOCK_BYTES
        cut = max(data.rfind(b" ", start, end), data.rfind(b"\n", start, end)) + 1
        if cut <= start:
            cut = start + data[start:end].translate(_WORD_TABLE).rfind(b"\0") + 1
        if cut <= start:
            cut = end
            while 0x80 <= data[cut] < 0xC0:  # inside a character
                cut -= 1
        yield data[start:cut]
        start = cut
    yield data[start:] if start else data


def _bounds(data: bytes, data_B: np.ndarray, ascii_only: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends of words [W]: changes between inside and outside, or a character's edges."""
    inside = np.frombuffer(b"\0" + data.translate(_WORD_TABLE) + b"\0", np.bool_)
    if ascii_only:
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        return edges[::2], edges[1::2]
    inside = inside.copy()
    lead = np.flatnonzero(data_B >= 0xC2)  # first bytes of characters beyond ASCII
    first, second = data_B[lead], data_B[np.minimum(lead + 1, len(data_B) - 1)]
    two, three = _punctuation(lead, first, second)
    for cleared in (two, two + 1, three, three + 1, three + 2):
        inside[np.minimum(cleared + 1, len(inside) - 1)] = False
    starts_B, ends_B = inside[1:] & ~inside[:-1], inside[:-1] & ~inside[1:]
    alone = lead[(first >= 0xE3) & (first < 0xEA)]  # U+3000 to U+9FFF
    edges = np.concatenate([alone, np.minimum(alone + 3, len(data_B))])
    starts_B[edges] |= inside[edges + 1]
    ends_B[edges] |= inside[edges]
    return np.flatnonzero(starts_B), np.flatnonzero(ends_B)


def _punctuation(
    lead: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of punctuation and symbols, which separate words as ASCII's do.

    They have two bytes (U+0080-00BF) or three (U+2000-2BFF, 3000-303F, FF00-FF3F, FFC0-FFFF).
    """
    three = ((first == 0xE2) & (second < 0xB0)) | ((first == 0xE3) & (second == 0x80))
    return lead[first == 0xC2], lead[
        three | ((first == 0xEF) & ((second == 0xBC) | (second == 0xBF)))
    ]
