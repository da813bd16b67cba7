"""Every filter keeps good text and removes what its source speaks of; a filter that is off removes nothing."""

import base64
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from cramming.config import UserError, build
from data_prep.filters import language
from data_prep.filters.measures import Measures
from data_prep.filters.normalise import CleanConfig, normalize
from data_prep.filters.quality import FILTERS, FilterConfig, is_broken, reason_to_remove, too_many_tokens

ARTICLE = """The harbour of the old town was built in the eleventh century, when merchants from the south began to
winter there. A stone quay replaced the wooden one after the great fire of 1312, and for two hundred years the salt
of the whole coast went over it.
With the silting of the river the trade moved to the new port. What remained were the fishermen, a small yard that
mended their boats, and the customs house, which has been a museum since 1954. Visitors reach it by the ferry (45 min).
The quay is 310 metres long; 3 of its 12 bollards are Roman columns."""
FORMULA = "Let {a, b} be a set with two members and f a map from it to the natural numbers. "
PAGE = """We use cookies to make this site better for you.
Please enable Javascript in your browser to see the prices of these shoes.
By going on you accept our terms of use and the privacy policy of the shop.
These are good shoes for all that you do out of doors."""
REPEATED = "Buy cheap watches and bags in our shop today, with free delivery to every country. "
CODE = "if (x[i] != y[j]) { z += f(&x[i], y->k[j]) * ~(1 << 7); } else { *p++ = q[--n] ^ 0x7f; } // !!\n"
TABLE = "| 12.5 | 14.1 | -- | 33.0 |\n| 11.9 | 2.55 | -- | 34.1 |\n| 9.05 | 8.77 | -- | 35.6 |\n" * 5
WIKITEXT = "{{Infobox|name=[[Quay]]}} The '''quay''' is [[old]].<ref name=a/> == Use == It is [[used]].<br/>&nbsp;'' "
HEADLINES = "\n".join(f"The mayor of the town said on radio that the bridge number {i} would ..." for i in range(12))
LIST = "\n".join(f"• the {word} of the house and the garden" for word in "roof door wall tree gate well path".split())
NUMBERS = "The tables of the year and of the month: " + " ".join(f"{n} {n * 7} -" for n in range(1000, 1060))
ENCODED = ARTICLE + "\n" + base64.b64encode(ARTICLE.encode() * 3).decode()
LONG_WORDS = "internationalisation responsibilities characteristically " * 3 + "misunderstandings of interoperability"
GERMAN = """Der Hafen der alten Stadt wurde im elften Jahrhundert gebaut, als Kaufleute aus dem Süden begannen, dort zu
überwintern. Nach dem großen Brand ersetzte ein Kai aus Stein den hölzernen, und zweihundert Jahre lang ging das Salz
der ganzen Küste über ihn."""
MOJIBAKE = ARTICLE.replace(" the ", " â€œtheâ€\x9d ").replace("salt", "cafÃ©")


def junk() -> str:
    """What is left of random bytes that somebody decoded as Latin-1, after normalisation."""
    return normalize(random.Random(0).randbytes(3000).decode("latin-1"), CleanConfig())


# The filter -> the limit as in conf/data/filters, a text that must go, a text near the limit that must stay.
EXAMPLES: dict[str, tuple[Any, str, str]] = {
    "too_few_words": (50, "The quay is 310 metres long.", ARTICLE),
    "broken_characters": (0.002, MOJIBAKE, ARTICLE.replace("whole", "whôle “Ãland”")),
    "unbroken_runs": (0.1, ENCODED, ARTICLE + " " + "a" * 99),
    "markup": (0.05, WIKITEXT * 3, ARTICLE + " It is < 5 & > 3, see [[here]]."),
    "symbols": (0.25, CODE * 5, ARTICLE + " («§ 5!»)"),
    "words_too_short": (3, "a b c d e f g of an in " * 6, "the old cat sat there on the mat " * 9),
    "words_too_long": (10, LONG_WORDS, ARTICLE),
    "lorem_ipsum": (True, ARTICLE + " Lorem Ipsum dolor sit amet.", ARTICLE + " Lorem and ipsum."),
    "curly_braces": (0.01, CODE * 5, ARTICLE + " " + FORMULA),
    "hashes": (0.1, "#love #sea the #ship and #me " * 4, ARTICLE + " He was #1."),
    "ellipses": (0.1, "And then ... the sea … the ship ... " * 5, ARTICLE + " And then ..."),
    "bullets": (0.9, LIST, "The parts of the house are:\n" + LIST),
    "cut_lines": (0.3, HEADLINES, ARTICLE + "\nread on ..."),
    "boilerplate": (0.3, PAGE, ARTICLE + "\n" + PAGE.splitlines()[0]),
    "duplicate_lines": (0.3, "one\ntwo\none\ntwo\nthree", "one\ntwo\nthree\nfour\none"),
    "duplicate_line_characters": (0.2, f"{REPEATED}\n{ARTICLE[:300]}\n{REPEATED}\n{REPEATED}", ARTICLE + "\nred\nred"),
    "few_sentences": (3, "The title of the page", ARTICLE),
    "not_words": (0.8, NUMBERS, ARTICLE),
    "top_ngrams": ([0.2, 0.18, 0.16], "buy now the best " * 4 + "of all watches in the world " * 2, ARTICLE),
    "duplicate_ngrams": ([0.15, 0.14, 0.13, 0.12, 0.11, 0.1], ARTICLE + REPEATED * 2, ARTICLE + REPEATED),
    "no_stop_words": (2, GERMAN, ARTICLE),
}


def with_limit(name: str, limit: Any) -> FilterConfig:
    return FilterConfig(**{FILTERS[name][0]: limit})


@pytest.mark.parametrize("name", EXAMPLES)
def test_filter_removes_the_one_and_keeps_the_other(name: str) -> None:
    limit, bad, good = EXAMPLES[name]
    config = with_limit(name, limit)
    assert reason_to_remove(bad, config) == name
    assert reason_to_remove(good, config) is None


def test_all_filters_have_examples_and_fields() -> None:
    assert EXAMPLES.keys() == FILTERS.keys() - {"other_language"}
    used = {field for field, _ in FILTERS.values()} | {"max_tokens_per_character", "max_words"}
    assert used == {field.name for field in dataclasses.fields(FilterConfig)}


def test_by_default_nothing_is_removed(compose: Callable[..., dict[str, Any]]) -> None:
    config = build(FilterConfig, compose("data=text", "data.paths=[a]")["data"]["filters"], "data.filters")
    assert config == FilterConfig()
    texts = ["", "x", junk(), *(bad for _, bad, _ in EXAMPLES.values())]
    assert [reason_to_remove(text, config) for text in texts] == [None] * len(texts)


def test_the_strict_set_keeps_an_article_and_removes_junk(compose: Callable[..., dict[str, Any]]) -> None:
    settings = compose("data=text", "data.paths=[a]", "data/filters=strict")["data"]["filters"]
    config = build(FilterConfig, settings, "data.filters")
    assert reason_to_remove(ARTICLE, config) is None
    for text in (junk(), CODE * 9, TABLE, WIKITEXT * 5, MOJIBAKE, ENCODED, REPEATED * 9, PAGE, GERMAN, "", "\x00" * 99):
        assert reason_to_remove(text, config), text[:50]
    active = [name for name, (field, _) in FILTERS.items() if getattr(config, field) not in (None, False)]
    assert set(active) == FILTERS.keys() - {"other_language"}


@pytest.mark.parametrize(
    "text",
    [
        "a film that never quite says what it is about ...",
        "* the best of the three films, and the one to see with the children",
        "it needs no javascript and no cookie policy to be good",
        "so it goes\nso it goes",
    ],
)
def test_rules_on_shares_of_lines_do_not_judge_one_or_two(text: str) -> None:
    limits = ("max_bullet_lines", "max_ellipsis_lines", "max_boilerplate_lines", "max_duplicate_lines")
    config = FilterConfig(**dict.fromkeys(limits, 0.3), max_duplicate_line_characters=0.2)  # type: ignore[arg-type]
    assert reason_to_remove(text, config) is None
    assert reason_to_remove("\n".join([text] * 3), config)


def test_text_that_compresses_badly_goes() -> None:
    config = FilterConfig(max_tokens_per_character=0.3)
    assert too_many_tokens(100, 31, config) and not too_many_tokens(100, 30, config)
    assert not too_many_tokens(100, 99, FilterConfig())


@pytest.mark.parametrize(
    "raw",
    [
        ARTICLE.replace(", ", ",\u00a0").encode().decode("latin-1"),
        ARTICLE.replace("the ", "“the” ").encode().decode("latin-1"),
        "".join(c + "\x07" * (i % 9 == 0) for i, c in enumerate(ARTICLE)),
    ],
)
def test_what_normalisation_takes_away_is_broken_before_it(raw: str) -> None:
    config = FilterConfig(max_broken=0.002)
    assert is_broken(raw, config) and not is_broken(raw, FilterConfig())
    assert not is_broken(ARTICLE.replace(". ", ".\r\n\x0c\u00a0\u0085"), config)


def test_a_non_breaking_space_that_was_read_as_latin_1_is_broken() -> None:
    limit = 0.002
    assert reason_to_remove(ARTICLE.replace(", ", ",Â "), FilterConfig(max_broken=limit)) == "broken_characters"
    assert reason_to_remove(ARTICLE.replace("the ", "theÂ "), FilterConfig(max_broken=limit)) == "broken_characters"
    assert reason_to_remove("A NOVA ESTAÇÃO DA MANHÃ E DA IRMÃ NÃO SÃ ", FilterConfig(max_broken=limit)) is None


def test_every_order_of_a_repetition_is_measured() -> None:
    """A run of 10 words said twice, in a text where no shorter run is too frequent."""
    words = [f"w{i}" for i in range(180)]
    text = " ".join([*words, *words[20:32]])
    config = FilterConfig(max_duplicate_ngrams=[1, 1, 1, 1, 1, 0.1])
    assert reason_to_remove(text, config) == "duplicate_ngrams"
    assert reason_to_remove(" ".join([*words, *words[20:29]]), config) is None


def test_a_wrong_limit_is_named() -> None:
    with pytest.raises(UserError, match=r"data.filters: max_top_ngrams=\[0.2\] must have 3 numbers"):
        build(FilterConfig, {"max_top_ngrams": [0.2]}, "data.filters")
    with pytest.raises(UserError, match=r"data.filters: min_words=-1 must not be negative"):
        build(FilterConfig, {"min_words": -1}, "data.filters")
    with pytest.raises(UserError, match=r"data.filters: min_words=50 is above max_words=10"):
        build(FilterConfig, {"min_words": 50, "max_words": 10}, "data.filters")


def test_language_filter() -> None:
    pytest.importorskip("py3langid")
    config = FilterConfig(languages=["en"])
    assert reason_to_remove(GERMAN, config) == "other_language"
    assert reason_to_remove(ARTICLE, config) is None
    assert reason_to_remove(GERMAN, FilterConfig(languages=["en", "de"])) is None


def test_a_missing_language_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    language._identifier.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "py3langid", None)
    with pytest.raises(UserError, match=r"data.filters.languages needs .*pip install 'cramming\[language\]'"):
        language.require_package()


def test_a_run_of_signs_is_read_once() -> None:
    """Eight times as long, about eight times the time; tried from each of its signs, 64 times."""

    def seconds(signs: int) -> float:
        before = time.process_time()
        assert Measures("a " + "!" * signs + "x").sentences == 0
        return time.process_time() - before

    assert min(seconds(16_000) for _ in range(3)) < 24 * min(seconds(2_000) for _ in range(9))
    assert Measures("Wait... What?! (Yes.) e.g. this… 3.14").sentences == 5
