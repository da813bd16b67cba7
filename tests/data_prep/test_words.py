"""Words by numpy are those a plain program finds; equal words have equal numbers wherever they stand."""

import random
import re

import numpy as np
import pytest

from data_prep.dedup import words
from data_prep.dedup.words import combine, find_words, hash_words_and_lengths, ngrams

TEXTS = ["It's the END. Of it?", "", "  ", "naïve “quotes” — and dashes…", "漢字 is 日本語。OK", "a"]


def hash_words(text: str) -> np.ndarray:
    return hash_words_and_lengths(text)[0]


def plain(text: str) -> list[str]:
    """The same words, found by a pattern."""
    text = re.sub("[\u0080-\u00bf\u2000-\u2bff\u3000-\u303f\uff00-\uff3f\uffc0-\uffff]", " ", text)
    return re.findall("[\u3040-\u9fff]|(?:[a-zA-Z0-9]|[^\u0000-\u00bf\u3000-\u9fff])+", text)


def assert_same_words(text: str) -> None:
    expected, (found, lengths) = plain(text), hash_words_and_lengths(text)
    assert lengths.tolist() == [len(word.encode()) for word in expected]
    assert found.tolist() == [int(hash_words(word)[0]) for word in expected]


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_a_plain_program(text: str) -> None:
    assert_same_words(text)


def test_words_of_any_mixture() -> None:
    draw = random.Random(0)
    for _ in range(500):
        assert_same_words("".join(draw.choices("aZ09 .'’—é漢カ。\n\u00a0ß", k=draw.randint(1, 30))))


def test_a_word_has_one_number_at_every_place_and_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat sat on the mat. " * 400
    whole = hash_words(text)
    assert len(set(whole.tolist())) == 5 and len(whole) == 2400
    monkeypatch.setattr(words, "BLOCK_BYTES", 100)
    assert np.array_equal(hash_words(text), whole)


def test_texts_that_are_read_together_have_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "BLOCK_BYTES", 20)
    texts = [*TEXTS, "a\0b", " ".join(TEXTS)]
    found, alone = find_words(texts), [hash_words(text).tolist() for text in texts]
    assert found.hashes_W.tolist() == [number for text in alone for number in text]
    assert np.diff(found.firsts_D).tolist() == list(map(len, alone))
    assert found.numbers().tolist() == [number for number, text in enumerate(alone) for _ in text]


@pytest.mark.parametrize("unspaced", ["漢字カナ。", "漢é", "a,b;c-", "é,漢b"])
def test_text_without_a_space_is_cut_between_its_words(monkeypatch: pytest.MonkeyPatch, unspaced: str) -> None:
    text = unspaced * 40
    whole = hash_words(text)
    for size in (99, 100, 101):
        monkeypatch.setattr(words, "BLOCK_BYTES", size)
        assert np.array_equal(hash_words(text), whole)


def test_what_stands_between_words_does_not_matter() -> None:
    assert np.array_equal(hash_words("it 's Mary’s — book ."), hash_words("“It's” mary's\nbook"))


def test_ngrams_know_the_order_of_words() -> None:
    one, two = hash_words("a b c d"), hash_words("a b d c")
    assert ngrams(one, 2)[0] == ngrams(two, 2)[0] and ngrams(one, 4)[0] != ngrams(two, 4)[0]
    assert [len(array) for array in combine(one, 6)] == [4, 3, 2, 1, 0, 0]
    assert len(ngrams(hash_words(""), 3)) == 0
