"""The words of a text as 64-bit numbers: what repetition filters, near-duplicates and decontamination share.

A word is a run of letters and digits, A-Z taken as a-z; what stands between two words does not matter, so "it 's",
"it's" and "It’s" are the same two words. In scripts written without spaces (Han, Kana) each character is a word. The
work is done by numpy on the UTF-8 bytes: a word's number is a polynomial in its bytes, taken as the difference of two
prefix sums (Karp and Rabin 1987), then mixed. Two different words have the same number with a chance of 2**-64.

Suffixes: B bytes, W words.
"""

import functools
from collections.abc import Iterator

import numpy as np

BLOCK_BYTES = 1 << 16  # what the tables of powers cover, and what stays in a core's cache
SENTENCE_ENDS = b".!?\n"
BASE = 0x9E3779B97F4A7C15


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS = _powers(BASE, BLOCK_BYTES)
_INVERSE_POWERS = _powers(pow(BASE, -1, 1 << 64), BLOCK_BYTES)


def _word_table() -> bytes:
    """For `bytes.translate`: which bytes belong to words."""
    table = bytearray(0x80) + bytearray([1] * 0x80)
    for byte in b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
        table[byte] = 1
    return bytes(table)


_WORD_TABLE = _word_table()


def mix(hashes: np.ndarray) -> np.ndarray:
    """MurmurHash3's finaliser (Appleby 2011): every bit of the uint64 reaches every other."""
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> np.uint64(33))


def hash_words_and_lengths(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The words' numbers [W], uint64, and their lengths [W] in bytes."""
    blocks = [(words_W, ends_W - starts_W) for _, words_W, starts_W, ends_W in _blocks(text)]
    return _joined([words_W for words_W, _ in blocks]), _joined([lengths_W for _, lengths_W in blocks])


def word_places(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the words start and end [W], in characters of the text."""
    starts, ends, before = [], [], 0
    for data, _, starts_W, ends_W in _blocks(text):
        starts.append(before + starts_W)
        ends.append(before + ends_W)
        before += len(data)
    data_B = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    characters_B = np.concatenate([[0], np.cumsum((data_B & 0xC0) != 0x80)])  # that begin before this byte
    return characters_B[_joined(starts)], characters_B[_joined(ends)]


def hash_words_and_breaks(text: str, breaks: bytes = SENTENCE_ENDS) -> tuple[np.ndarray, np.ndarray]:
    """The words' numbers [W], and [W] how many of these ASCII characters stand in front of each word."""
    words, counts, before = [], [], 0
    for data, words_W, starts_W, _ in _blocks(text):
        # Few bytes are breaks: look for their places instead of counting along all bytes.
        places = np.flatnonzero(np.frombuffer(data.translate(_break_table(breaks)), np.uint8))
        words.append(words_W)
        counts.append(before + np.searchsorted(places, starts_W))
        before += len(places)
    return _joined(words), _joined(counts)


@functools.cache
def _break_table(breaks: bytes) -> bytes:
    return bytes(byte in breaks for byte in range(256))


def combine(hashes_W: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """Numbers of the n-grams for n = 1, 2 ... `longest`, one array [max(0, W - n + 1)] each; not mixed."""
    current, base = hashes_W, np.uint64(BASE)
    yield current
    for n in range(1, longest):
        current = current[:-1] * base + hashes_W[n:]
        yield current


def ngrams(hashes_W: np.ndarray, n: int) -> np.ndarray:
    """Numbers [max(0, W - n + 1)] of all runs of n words, mixed."""
    *_, last = combine(hashes_W, n)
    return mix(last)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _blocks(text: str) -> Iterator[tuple[bytes, np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks cut at white space: the bytes, the words' numbers [W], where they start and where they end [W]."""
    whole, ascii_only = text.encode("utf-8", "replace").lower(), text.isascii()
    for data in _cut(whole):
        data_B = np.frombuffer(data, np.uint8)
        starts_W, ends_W = _bounds(data, data_B, ascii_only)
        sums_B = np.empty(len(data_B) + 1, dtype=np.uint64)
        sums_B[0] = 0
        np.cumsum(data_B * _POWERS[: len(data_B)], out=sums_B[1:])
        yield data, mix((sums_B[ends_W] - sums_B[starts_W]) * _INVERSE_POWERS[starts_W]), starts_W, ends_W


def _cut(data: bytes) -> Iterator[bytes]:
    start = 0
    while len(data) - start > BLOCK_BYTES:
        end = start + BLOCK_BYTES
        cut = max(data.rfind(b" ", start, end), data.rfind(b"\n", start, end)) + 1
        cut = cut if cut > start else end
        yield data[start:cut]
        start = cut
    yield data[start:] if start else data


def _bounds(data: bytes, data_B: np.ndarray, ascii_only: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where words start and end [W]. Each boundary is a change between inside and outside, or a character's edge."""
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


def _punctuation(lead: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of punctuation and symbols of two bytes (U+0080-00BF) and of three (U+2000-2BFF, 3000-303F, FF00-FF3F,
    FFC0-FFFF): they separate words as ASCII's do."""
    three = ((first == 0xE2) & (second < 0xB0)) | ((first == 0xE3) & (second == 0x80))
    return lead[first == 0xC2], lead[three | ((first == 0xEF) & ((second == 0xBC) | (second == 0xBF)))]
