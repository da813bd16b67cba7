"""Cleaning is idempotent, removes what is invisible, and cutting loses nothing."""

import random
import unicodedata
from collections import Counter

import pytest

from data_prep.filters.normalise import (
    CleanConfig,
    deleted_by_kind,
    normalize,
    split_by_words,
    split_evenly,
)

CONFIG = CleanConfig()
ALPHABET = (
    "abé e\u0301\u00a0\u2028 \t\n\r\x00\x07\u200b\u200c\u200d\u200e"
    "\ufeff\ud800\u3000.😀ﬁ\u0645\u0e01\u0d4d\ufe0f"
)


def test_normal_form_is_stable_encodable_and_has_no_stray_space() -> None:
    rng = random.Random(0)
    for _ in range(500):
        text = normalize("".join(rng.choices(ALPHABET, k=rng.randint(0, 60))), CONFIG)
        assert normalize(text, CONFIG) == text
        text.encode()
        assert unicodedata.is_normalized("NFC", text)
        assert all(
            line == line.strip() and line and "  " not in line for line in text.split("\n") if text
        )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\u0301  b\tc \r\n\n\x00\n d\u200b\ufeff", "á b c\nd"),
        ("one<br />two<br>three <br/> four<brave>", "one\ntwo\nthree\nfour<brave>"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", None),  # Persian
        ("\u0915\u094d\u200d\u0937 \u0915\u094d\u200c\u0937", None),  # Hindi
        ("\u0d05\u0d35\u0d28\u0d4d\u200d, \u0d05", None),  # Malayalam: a chillu ends the word
        (
            "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f\u200d\U0001f525",
            None,
        ),  # a family, a heart on fire
        ("\u0645\u06cc\u200c\u200f\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
        (
            "\u0645\u06cc\u200c \u062e\u200d. a\u200cb \U0001f468\u200d",
            "\u0645\u06cc \u062e. ab \U0001f468",
        ),
        (
            "\u0e01\u0e32\u200b\u0e02 \u1780\u200b\u200b\u1781\u200b",
            "\u0e01\u0e32 \u0e02 \u1780 \u1781",
        ),  # Thai, Khmer
        ("an\u200b other\u200b line", "an other line"),
    ],
)
def test_what_is_spelling_stays_and_the_rest_is_one_form(text: str, kept: str | None) -> None:
    assert normalize(text, CONFIG) == (text if kept is None else kept)
    assert normalize("ﬁne", CleanConfig(unicode="NFKC")) == "fine" != normalize("ﬁne", CONFIG)


def test_what_is_deleted_is_counted_by_kind() -> None:
    deleted = Counter[str]()
    text = normalize(
        "a\x00b\x01 so\xadft\u200b, \u0645\u200c\u0645\n\ud800 none of it here\u200f",
        CONFIG,
        deleted,
    )
    assert text == "ab soft, \u0645\u200c\u0645\nnone of it here"
    assert deleted_by_kind(deleted) == {
        "control": 2,
        "soft hyphen": 1,
        "surrogate": 1,
        "invisible": 2,
    }


def test_a_long_text_is_cut_evenly_at_line_ends_else_between_words() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices("abcdefgh \n", k=rng.randint(0, 500)))
        parts = split_evenly(text, 40)
        assert "".join(parts) == text and all(len(part) <= 40 for part in parts)
        assert len(parts) == 1 or min(map(len, parts)) >= 10  # no crumbs
    lines = ["word " * 28, "more " * 30]
    assert split_evenly("\n".join(lines), 200) == [lines[0] + "\n", lines[1]]
    assert [len(part) for part in split_evenly("x" * 101, 100)] == [51, 50]


def test_a_text_of_too_many_words_is_cut_at_its_lines() -> None:
    lines = [f"line {i} " + " ".join(["word"] * (i % 17)) for i in range(300)]
    text = "\n".join(line.strip() for line in lines)
    parts = split_by_words(text, 100)
    counts = [len(part.split()) for part in parts]
    assert "\n".join(parts) == text and max(counts) <= 100
    assert min(counts) >= 30 and len(parts) <= 2 * -(-len(text.split()) // 100)
    assert split_by_words(text, len(text.split())) == split_by_words(text, None) == [text]
    for words in (1001, 1990, 5123):  # no tiny rest, which the next filter would drop
        parts = split_by_words("\n".join(["some words of a line"] * (words // 5)), 1000)
        assert (
            len(parts) == -(-(words // 5 * 5) // 1000)
            and min(len(part.split()) for part in parts) > 400
        )
    one_line = " ".join(f"w{i}" for i in range(1000))
    parts = split_by_words(one_line, 100)
    assert " ".join(parts) == one_line and [len(part.split()) for part in parts] == [100] * 10
