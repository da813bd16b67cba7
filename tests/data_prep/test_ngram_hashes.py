"""Words by numpy are those a plain program finds; equal words have equal hashes wherever they stand."""

import random
import re

import numpy as np
import pytest

from data_prep.dedup import ngram_hashes
from data_prep.dedup.ngram_hashes import combine, hash_words, ngrams, word_places

TEXTS = [
    "It's the END. Of it?",
    "",
    "  ",
    "naïve “quotes” — and dashes…",
    "漢字 is 日本語。OK",
    "a",
    "é ß " * 30_000,
]


def hashes(text: str) -> np.ndarray:
    return hash_words([text]).hashes_W


def plain(text: str) -> list[str]:
    """The same words, found by a pattern."""
    text = re.sub("[\u0080-\u00bf\u2000-\u2bff\u3000-\u303f\uff00-\uff3f\uffc0-\uffff]", " ", text)
    return re.findall("[\u3040-\u9fff]|(?:[a-zA-Z0-9]|[^\u0000-\u00bf\u3000-\u9fff])+", text)


def assert_same_words(text: str) -> None:
    expected, found = plain(text), hash_words([text])
    assert (found.ends_W - found.starts_W).tolist() == [len(word.encode()) for word in expected]
    alone = {word: int(hashes(word)[0]) for word in set(expected)}
    assert found.hashes_W.tolist() == [alone[word] for word in expected]
    assert [text[start:end] for start, end in zip(*word_places(text))] == expected


def test_words_of_any_mixture() -> None:
    for text in TEXTS:
        assert_same_words(text)
    draw = random.Random(0)
    for _ in range(500):
        assert_same_words("".join(draw.choices("aZ09 .'’—é漢カ。\n\u00a0ß", k=draw.randint(1, 30))))


@pytest.mark.parametrize(
    "text", ["the cat sat on the mat. ", "漢字カナ。", "漢é", "a,b;c-", "é,漢b"]
)
def test_a_word_has_one_hash_at_every_place_and_in_every_block(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Blocks are cut at white space; text without any between its words."""
    whole = hashes(text * 40)
    assert len(set(whole.tolist())) == len(set(plain(text.lower() * 40)))
    for size in (99, 100, 101):
        monkeypatch.setattr(ngram_hashes, "BLOCK_BYTES", size)
        assert np.array_equal(hashes(text * 40), whole)


def test_texts_that_are_read_together_have_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_hashes, "BLOCK_BYTES", 20)
    texts = [*TEXTS[:-1], "a\0b", " ".join(TEXTS[:-1])]
    found, alone = hash_words(texts), [hashes(text).tolist() for text in texts]
    assert found.hashes_W.tolist() == [number for text in alone for number in text]
    assert np.diff(found.firsts_D).tolist() == list(map(len, alone))
    assert found.text_numbers().tolist() == [
        number for number, text in enumerate(alone) for _ in text
    ]


def test_ngrams_know_the_order_of_words() -> None:
    one, two = hashes("a b c d"), hashes("a b d c")
    assert np.array_equal(hashes("it 's Mary’s — book ."), hashes("“It’s” mary's\nbook"))
    assert ngrams(one, 2)[0] == ngrams(two, 2)[0] and ngrams(one, 4)[0] != ngrams(two, 4)[0]
    assert [len(array) for array in combine(one, 6)] == [4, 3, 2, 1, 0, 0]
    assert len(ngrams(hashes(""), 3)) == 0
