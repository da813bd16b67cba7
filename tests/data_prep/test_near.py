"""Near-duplicates: planted ones are found, unrelated ones are not, and their order does not change the result."""

import random
from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest

from cramming.config import UserError, build
from data_prep.dedup.near import (
    NEIGHBOURS,
    NearDuplicateConfig,
    Signer,
    estimate,
    find_near_duplicates,
    memory_bytes,
)

CONFIG = NearDuplicateConfig(enabled=True)
LEXICON = [f"w{number}" for number in range(5000)]


def text(draw: random.Random, words: int) -> str:
    """Words with frequencies as in language (Zipf), so that unrelated texts share the frequent ones."""
    return " ".join(LEXICON[int(len(LEXICON) ** draw.random()) - 1] for _ in range(words))


def edited(draw: random.Random, original: str, share: float = 0.1) -> str:
    words = original.split()
    for place in draw.sample(range(len(words)), round(share * len(words))):
        words[place] = f"new{draw.randrange(10**6)}"
    return " ".join(words)


def planted(pairs: int, words: int, seed: int = 0) -> list[tuple[int, str]]:
    """So many originals with even keys, an edited copy of each with the next odd key, and as many unrelated texts."""
    draw = random.Random(seed)
    documents = []
    for number in range(pairs):
        original = text(draw, words)
        documents += [(2 * number, original), (2 * number + 1, edited(draw, original, 0.05))]
    return documents + [((1 << 63) + number, text(draw, words)) for number in range(pairs)]


def found(documents: Iterable[tuple[int, str]]) -> dict[int, int]:
    """The keys to drop among these (key, text), in ascending order, each with the key of the kept document."""
    keys, texts = [0], ["one"]  # which has no n-grams
    for key, text in documents:
        keys.append(key)
        texts.append(text)
    signatures, ngrams = Signer(CONFIG)(texts)
    enough = ngrams > 0
    keys_N = np.array(keys, np.uint64)[enough]
    kept_N = keys_N[find_near_duplicates(keys_N, ngrams[enough], signatures[enough], CONFIG)]
    pairs = zip(keys_N.tolist(), kept_N.tolist())
    return dict(sorted(pair for pair in pairs if pair[0] != pair[1]))


def runs(words: str) -> set[tuple[str, ...]]:
    own = words.split()
    return set(zip(own, own[1:], own[2:]))


def similarity(one: str, other: str) -> float:
    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


@pytest.mark.parametrize("words", [50, 100, 1000])
def test_copies_with_a_twentieth_of_the_words_changed_are_found_and_nothing_else(
    words: int,
) -> None:
    pairs = 300 if words < 1000 else 50
    result = found(planted(pairs, words))
    assert result == {2 * number + 1: 2 * number for number in range(pairs)}


def test_the_memory_is_what_the_module_states() -> None:
    """For every document key, length, signature and its row in the search: about 310 bytes."""
    signatures, ngrams = Signer(CONFIG)([f"text number {number}" for number in range(10)])
    assert memory_bytes(ngrams, signatures) == (8 + 4 + 256 + 40) * 10


def test_unrelated_texts_of_three_words_are_no_duplicates() -> None:
    draw = random.Random(4)
    texts = {" ".join(draw.sample(LEXICON, 3)) for _ in range(5000)}
    assert not found(enumerate(sorted(texts)))


def test_only_what_is_similar_to_a_kept_document_is_dropped() -> None:
    """Windows that move through one text: neighbours are similar, so that all of them are connected."""
    draw, words = random.Random(6), [f"w{number}" for number in range(4000)]
    texts = {
        draw.getrandbits(64): " ".join(words[start : start + 200]) for start in range(0, 3800, 10)
    }
    pairs = found(texts.items())
    kept = [texts[key] for key in texts if key not in pairs]
    assert len(pairs) > 200 and not set(pairs.values()) & set(pairs)
    assert (
        min(similarity(texts[one], texts[other]) for one, other in pairs.items())
        > CONFIG.threshold - 0.12
    )
    assert (
        max(similarity(one, other) for one, other in combinations(kept, 2))
        < CONFIG.threshold + 0.12
    )


def test_texts_that_share_boilerplate_stay() -> None:
    draw = random.Random(5)
    boilerplate = text(draw, 170)
    assert not found((key, f"{text(draw, 180)} {boilerplate}") for key in range(150))


def test_the_result_does_not_depend_on_order() -> None:
    documents = planted(200, 60)
    draw = random.Random(1)
    documents += [
        (10**6 + number, edited(draw, documents[0][1], 0.08)) for number in range(3 * NEIGHBOURS)
    ]
    first = found(documents)
    assert len(first) > 200 + 2 * NEIGHBOURS
    draw.shuffle(documents)
    assert found(documents) == first


def test_the_longest_stays_and_of_equally_long_ones_the_smallest_key_however_large() -> None:
    draw = random.Random(2)
    original = text(draw, 80)
    keys = [2**64 - 1, 2**63 + 5, 17, 2**63 - 1]
    documents = [(key, edited(draw, original, 0.03)) for key in keys]
    assert found(documents) == dict.fromkeys([2**63 - 1, 2**63 + 5, 2**64 - 1], 17)
    longer = (2**63 + 6, f"{original} and some more words")
    assert found([*documents, longer]) == dict.fromkeys(keys, 2**63 + 6)


def test_the_estimate_is_the_jaccard_similarity() -> None:
    """Of many pairs: unbiased, and with the standard deviation that the docstring states."""
    draw, signer = random.Random(3), Signer(CONFIG)
    originals = [text(draw, 200) for _ in range(300)]
    copies = [edited(draw, original, 0.1) for original in originals]
    exact = np.array([similarity(one, other) for one, other in zip(originals, copies)])
    signatures = np.concatenate([signer(originals)[0], signer(copies)[0]])
    error = estimate(signatures, np.arange(300), np.arange(300) + 300) - exact
    assert abs(error.mean()) < 0.006
    assert error.std() == pytest.approx(np.sqrt(exact * (1 - exact) / 256).mean(), rel=0.2)


def test_signatures_do_not_depend_on_the_batch() -> None:
    texts = [
        "one two",
        "",
        "a b c",
        "the old man and the sea",
        "a b c d " * 2000,
        "nul \0 byte in it",
        "漢字" * 50_000,
    ]
    together, count = Signer(CONFIG)(texts)
    assert count[:6].tolist() == [0, 0, 1, 4, 7998, 2]
    assert np.array_equal(together, np.concatenate([Signer(CONFIG)([one])[0] for one in texts]))
    assert np.array_equal(together[::-1], Signer(CONFIG)(texts[::-1])[0])


def test_equal_keys_are_one_document_and_short_texts_are_left_alone() -> None:
    assert not found([(5, "one two three four")] * 3 + [(6, "one"), (7, "one")])
    assert not found([])


@pytest.mark.parametrize("wrong", [{"threshold": 1.1}, {"rows": 9}, {"ngram": 0}, {"seed": -1}])
def test_wrong_settings_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"^near.{next(iter(wrong))}="):
        build(NearDuplicateConfig, wrong, "near")
