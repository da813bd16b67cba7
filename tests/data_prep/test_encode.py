"""Ids come out as the tokenizer itself gives them of plain text, whichever way they are made."""

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from data_prep.filters.normalise import CleanConfig, normalize
from data_prep.tokenizer import encode as encoding
from data_prep.tokenizer.encode import ByWords, InPieces, text_encoder
from data_prep.tokenizer.load import SPECIAL_TOKENS, TokenizerConfig
from data_prep.tokenizer.train import TRAINERS, train

DTYPE = np.dtype("<u2")
ODD = "aZ09.'’-—_$é\u0301ßİſΣς漢カ한🙂\u00ad\u200b\x1c\u00a0\u2028ﬁ½ \n"
SPECIAL = ("[SEP]", "[MASK].", "a[CLS]b", "[sep]", "x" * 101, "##a")


def wordpiece(sample: list[str], lowercase: bool = True) -> Tokenizer:
    return train(
        [*sample, *["naïve Éa 漢字 ß ½ . , - ' a##b"] * 5],
        TokenizerConfig(vocab_size=500, lowercase=lowercase),
    )


def odd_texts(sample: list[str]) -> list[str]:
    """Invented words among characters that a tokenizer treats in ways of its own, normalised."""
    draw, texts = random.Random(0), []
    for number in range(120):
        parts = ["".join(draw.choices(ODD, k=draw.randint(0, 12))) for _ in range(20)]
        parts += [*draw.choices(SPECIAL, k=4), *sample[number % len(sample)].split()]
        draw.shuffle(parts)
        texts.append(
            normalize(
                draw.choice(["", " "]).join(parts),
                CleanConfig(unicode=draw.choice(["NFC", "none"])),
            )
        )
    return ["", *texts]


def plain(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    tokenizer.encode_special_tokens = True
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_by_word_gives_the_ids_of_the_whole_text(
    lowercase: bool, made_up: Callable[..., list[str]]
) -> None:
    tokenizer = wordpiece(made_up(100), lowercase)
    encode = text_encoder(tokenizer, DTYPE)
    assert isinstance(encode, ByWords)
    texts = odd_texts(made_up(50))
    found = list(encode(texts))
    assert all(ids.dtype == DTYPE for ids in found)
    assert [ids.tolist() for ids in found] == plain(tokenizer, texts)
    assert [ids.tolist() for ids in InPieces(tokenizer, DTYPE)(texts)] == plain(tokenizer, texts)


def test_the_tables_size_does_not_matter(
    made_up: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "KNOWN_CHARACTERS", 2000)
    tokenizer, texts = wordpiece(made_up(100)), made_up(400, seed=1)
    assert [ids.tolist() for ids in text_encoder(tokenizer, DTYPE)(texts)] == plain(
        tokenizer, texts
    )


@pytest.mark.parametrize("flag", ["rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("token", ["[X]", "##a", "漢", "É"])
def test_added_tokens_are_found_in_words(
    flag: str, token: str, made_up: Callable[..., list[str]]
) -> None:
    tokenizer = wordpiece(made_up(100))
    tokenizer.add_tokens([AddedToken(token, **{"normalized": False, flag: True})])
    encode = text_encoder(tokenizer, DTYPE)
    assert isinstance(encode, ByWords)
    texts = [f"{token} {text} x{token}y {token}{token} {token}" for text in odd_texts(made_up(20))]
    assert [ids.tolist() for ids in encode(texts)] == plain(tokenizer, texts)


def in_a_sentence(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("kalo mi", normalized=False)])


def with_the_space_before_it(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("mi", normalized=False, lstrip=True)])


def by_other_rules(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()


@pytest.mark.parametrize("change", [in_a_sentence, with_the_space_before_it, by_other_rules])
def test_a_tokenizer_that_looks_across_white_space_reads_the_text_itself(
    change: Callable[[Any], None], made_up: Callable[..., list[str]]
) -> None:
    tokenizer = wordpiece(made_up(100))
    change(tokenizer)
    encode = text_encoder(tokenizer, DTYPE)
    assert isinstance(encode, InPieces)
    texts = [*made_up(20), "Oh kalo mi rentas"]
    assert [ids.tolist() for ids in encode(texts)] == plain(tokenizer, texts)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", TRAINERS)
def test_text_that_spells_a_special_token_is_text(
    kind: Any, lowercase: bool, made_up: Callable[..., list[str]]
) -> None:
    """In a worker too, to which the tokenizer is sent; it stands in the middle of a word, and in all the vocabulary."""
    if kind == "unigram":
        pytest.importorskip("sentencepiece")
    texts = [f"kalo {token} mi x{token}y {token}{token}." for token in SPECIAL_TOKENS.values()]
    config = TokenizerConfig(kind=kind, vocab_size=500, lowercase=lowercase)
    encode = text_encoder(train([*made_up(100), *texts * 30], config), DTYPE)
    for encoder in (pickle.loads(pickle.dumps(encode)), encode):
        assert all(ids.min() >= len(SPECIAL_TOKENS) for ids in encoder(texts))
